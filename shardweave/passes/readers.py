"""Readers: what others that read a value say of where an op should take it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from shardweave.ir import Assignment, Axis, Mesh
from shardweave.passes.annotate import info
from shardweave.passes.follow import Arrival, follow
from shardweave.passes.layouts import drop, input_layouts
from shardweave.passes.local import LocalGraph
from shardweave.passes.rules import find_rule, is_view
from shardweave.passes.rules.registry import tensor_args
from shardweave.passes.values import Rest, Values, bound_rule


class Readers(Values):
    """Values, and the ops that are known to read them.

    Parameters
    ----------
    local, mesh, names, rest_axes
        As of `Values`.
    assignments : mapping of str to Assignment
        The ops that do not follow their inputs, by node name.
    """

    def __init__(
        self,
        local: LocalGraph,
        mesh: Mesh,
        names: Mapping[str, str],
        rest_axes: Mapping[str, Rest],
        assignments: Mapping[str, Assignment],
    ) -> None:
        super().__init__(local, mesh, names, rest_axes)
        self.assignments = assignments

    def arrivals_of(self, node: fx.Node, follows: bool) -> list[Arrival]:
        """Where the inputs of an op arrive; one that follows them takes them as others do."""
        arguments = tensor_args(node)
        arrivals = [self.arrival(argument) for argument in arguments]
        if not follows:
            return arrivals
        arrivals = [self._as_read_elsewhere(node, each, have) for each, have in zip(arguments, arrivals)]
        return [self._as_gathered(node, each, have) for each, have in zip(arguments, arrivals)]

    def _as_read_elsewhere(self, node: fx.Node, value: fx.Node, arrival: Arrival) -> Arrival:
        """Where a sum arrives at `node`: scattered, if another reader takes it so, as it lies with what else it reads.

        A gradient is read with the value that its op has saved, for the gradient of a norm's weight, and without it.
        """
        sums = {axis for axis, op in arrival.layout.partial if op == "sum" and axis.kind == "space"}
        if not sums or arrival.single_user:
            return arrival
        for user in value.users:
            arguments = tensor_args(user) if user.op == "call_function" else []
            others = [other for other in arguments if other is not value]
            decides = user is not node and others and user.name not in self.assignments
            if not decides or not all(map(self._placed, others)):
                continue
            bound, rule = bound_rule(user), find_rule(user)
            at = [self.arrival(argument) for argument in arguments]
            want = follow(bound, rule, at, self.mesh).inputs[arguments.index(value)]
            if sums <= set(want.shard_axes) and not want.partial:
                return replace(arrival, layout=want)
        return arrival

    def _placed(self, value: fx.Node) -> bool:
        """Whether it is known where a value, or what it looks at, lies."""
        while is_view(value) and not self._has_place(value):
            value = tensor_args(value)[0]
        return self._has_place(value)

    def _as_gathered(self, node: fx.Node, value: fx.Node, arrival: Arrival) -> Arrival:
        """Where a value arrives at `node`: gathered, if it is for another op, and what `node` gives would be next.

        Where layers of unlike degrees meet, a residual stream and its norm are gathered once, not each for itself.
        """
        if self.backward or arrival.single_user or arrival.is_parameter:
            return arrival
        results = [each for each in node.users if each.target is operator.getitem] or [node]
        elsewhere, behind = self._cut_by([value], node), self._cut_by(results, node)
        gone = {axis for axis in arrival.layout.shard_axes if axis.kind == "space"}.difference(*elsewhere, *behind)
        if not elsewhere or not behind or not gone:
            return arrival
        return replace(arrival, layout=drop(arrival.layout, gone))

    def _cut_by(self, values: Sequence[fx.Node], but: fx.Node) -> list[set[Axis]]:
        """The axes that each forward op of known assignment cuts one of these values by, views looked through."""
        found = []
        for read, user in [(value, user) for value in values for user in value.users if user is not but]:
            explicit = self.assignments.get(user.name)
            if user.op == "call_function" and is_view(user):
                found += self._cut_by([user], but)
            elif explicit is not None and not info(user).backward:
                wants = input_layouts(bound_rule(user), explicit.as_dict(), self.mesh)
                found.append(set(wants[tensor_args(user).index(read)].shard_axes))
        return found
