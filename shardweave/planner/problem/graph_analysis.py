"""Facts about a captured step's graph that hold for every plan, and where sequence parallelism is possible.

A product sharded by rows leaves a partial sum on each device (Megatron-LM, arXiv 2205.05198). An op that combines it
with other values (a residual sum, and with it the norms after it) may take it whole, which is an all-reduce, or each
device takes a part, which is a reduce-scatter there and an all-gather before the next product. Both move the same
bytes, but with the second the op and its followers are computed and saved once. Megatron-LM shards the sequence. Here
it is the first loop of the value that the devices divide.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import fx

from shardweave.cost_model import Cluster, node_seconds, node_work
from shardweave.ir import Assignment, Axis, BoundRule, Layout, Mesh, RuleError, axes_size, input_layouts, output_layouts
from shardweave.passes import Annotated, join_names
from shardweave.planner.problem.op_costs import Ends
from shardweave.planner.problem.resharding_costs import tensor_outputs
from shardweave.sharding import (
    Op,
    OpSharding,
    Rule,
    accept_own_partials,
    alias_of,
    batch_classes,
    depends_on_inputs,
    describe,
    graph_outputs,
    info,
    is_view,
    source_of,
    tensor_args,
)


class Facts:
    """Of one annotated step.

    Parameters
    ----------
    annotated : Annotated
    cluster : Cluster
        On one device of which ops are compared.
    """

    def __init__(self, annotated: Annotated, cluster: Cluster) -> None:
        self.annotated, self.cluster = annotated, cluster
        self.graph = annotated.captured.graph.graph
        self.roles: dict[fx.Node, Op] = {role.node: op for op in annotated.ops for role in op.roles}
        """The op whose product a node computes."""
        parameters = annotated.captured.parameters
        self.shapes = {parameters[node.name]: node.meta["val"] for node in self.graph.nodes if node.name in parameters}
        self.names = join_names(self.graph)
        self.dependent = depends_on_inputs(self.graph)
        values = graph_outputs(self.graph)
        self.returned = {root_of(value) for value in values if isinstance(value, fx.Node)}
        captured = annotated.captured
        tangents = [captured.tangents[name] + len(captured.mutated) for name in annotated.tangents]
        self.differentiated = {root_of(values[index]) for index in tangents}
        """Of what is returned, that whose gradient is given."""

    @cached_property
    def readers(self) -> Counter[fx.Node]:
        """How many ops read each activation."""
        forward = (node for node in self.roles if not info(node).backward)
        return Counter(root_of(argument) for node in forward for argument in tensor_args(node))

    def backward_ratio(self, node: fx.Node) -> float:
        """Seconds of the backward for each of the forward: of followers that multiply, as attention, or of others."""
        return self._ratios[_multiplies(node)]

    @cached_property
    def _ratios(self) -> dict[bool, float]:
        seconds = {each: [0.0, 0.0] for each in (False, True)}
        for node in self.graph.nodes:
            if node not in self.roles and node.op == "call_function":
                seconds[_multiplies(node)][info(node).backward] += node_seconds(node, self.cluster)
        return {each: backward / forward if forward else 0.0 for each, (forward, backward) in seconds.items()}

    @property
    def inputs(self) -> list[fx.Node]:
        """What the step is given that is no parameter."""
        parameters = self.annotated.captured.parameters
        return [node for node in self.graph.nodes if node.op == "placeholder" and node.name not in parameters]

    def batch_factor(self, node: fx.Node) -> str:
        """The factor of a node that is the batch; "" where it has none."""
        of, (source, _) = self.annotated.classes.of, source_of(node)
        names = (factor.name for factor in bound_of(source).factors)
        return next((name for name in names if of.get((source, name)) in self._batch_classes), "")

    @cached_property
    def _batch_classes(self) -> frozenset[int]:
        return batch_classes(self.annotated.captured, self.annotated.classes)[0]

    def needed_by_backward(self, node: fx.Node) -> bool:
        """Whether a backward op other than an op's own product reads a forward value."""
        for user in node.users:
            if info(user).backward and user not in self.roles and not is_alias(user):
                return True
            if is_alias(user) and self.needed_by_backward(user):
                return True
        return False

    def is_kept(self, node: fx.Node) -> bool:
        """Whether a forward value outlives its readers, as it lies: for the backward, or as it is returned."""
        return node in self.returned or self.needed_by_backward(node)

    def held(self, size: int) -> int:
        """The most bytes of values, as they are whole, that live at once where none of them is larger than `size`.

        Beside what is saved, returned and given, where nodes run in the graph's order; at least one value of this size.
        """
        at = bisect_right(self._holding, (size, math.inf))
        return max(size, self._holding[at - 1][1]) if at else size

    @cached_property
    def _holding(self) -> list[tuple[int, int]]:
        """By the size of the largest value, ascending: the most that lives at once where none is larger."""
        last: dict[fx.Node, fx.Node] = {}
        kept = set(self.returned)
        for node in self.graph.nodes:
            for source in map(root_of, node.all_input_nodes):
                last[source] = node
                if node in self._backward and source not in self._backward:
                    kept.add(source)
        most: dict[int, int] = {}
        live: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            if node.op != "call_function" or is_alias(node):
                continue
            if node not in kept and isinstance(node.meta["val"], torch.Tensor):
                live[node] = num_bytes([node])
            largest = max(live.values(), default=0)
            most[largest] = max(most.get(largest, 0), sum(live.values()))
            live = {value: size for value, size in live.items() if last.get(value) not in (node, None)}
        return list(accumulate(sorted(most.items()), lambda one, other: (other[0], max(one[1], other[1]))))

    @cached_property
    def _backward(self) -> set[fx.Node]:
        return {node for node in self.graph.nodes if node.op == "call_function" and info(node).backward}

    def ends(self, op: Op) -> Ends:
        """Whether no op comes before it, and whether none comes after it."""
        own = [role.node for role in op.roles if not info(role.node).backward]
        is_last = any(node not in self._before for node in own)
        behind_all = is_last and self._last_nodes.issubset(own)
        return Ends(any(node not in self._behind for node in own), is_last, behind_all)

    @cached_property
    def _last_nodes(self) -> set[fx.Node]:
        """The products of the forward that no other comes after."""
        return {node for node in self.roles if not info(node).backward and node not in self._before}

    def beside(self, op: Op) -> float:
        """How large a neighbour's parameter is, as a part of this op's: it is gathered and reduced beside it.

        The largest of the ops just before and after it, wherever the forward comes by it; at most as large as its own.
        """
        sizes = [self.shapes[near.parameter].numel() for near in self._neighbours[op.name]]
        return min(1.0, max(sizes, default=0) / max(1, int(self.shapes[op.parameter].numel())))

    @cached_property
    def _neighbours(self) -> dict[str, list[Op]]:
        """By an op's name: the others that the forward comes by just before it and just after it."""
        forward = [self.roles[node] for node in self.graph.nodes if node in self.roles and not info(node).backward]
        found: dict[str, list[Op]] = {op.name: [] for op in self.annotated.ops}
        for one, other in pairwise(forward):
            if one is not other:
                found[one.name].append(other)
                found[other.name].append(one)
        return found

    @cached_property
    def _behind(self) -> set[fx.Node]:
        """The nodes of the forward that an op comes before."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if any(source in found or source in self.roles for source in node.all_input_nodes):
                found.add(node)
        return found

    @cached_property
    def _before(self) -> set[fx.Node]:
        """The nodes of the forward that an op of it comes after."""
        found: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if any(user in found or user in self.roles for user in node.users if not info(user).backward):
                found.add(node)
        return found


def bound_of(node: fx.Node) -> BoundRule:
    """The rule of a node, bound to its sizes."""
    bound = info(node).rule
    if bound is None:
        raise RuleError(f"{describe(node)} has no sharding rule here: write that line with other ops")
    return bound


def root_of(value: fx.Node) -> fx.Node:
    """What a view is one of, or the value itself."""
    while is_alias(value):
        value = tensor_args(value)[0]
    return value


def is_alias(node: fx.Node) -> bool:
    """Whether a node is a view that takes no memory of its own; one that reshapes an expanded value does."""
    return is_view(node) and alias_of(node) is not None


def _multiplies(node: fx.Node) -> bool:
    work = node_work(node)
    return work is not None and work.flops > 0


def num_bytes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the values of these, whole."""
    return sum(value.numel() * value.element_size() for node in nodes for value in tensor_outputs(node))


@dataclass
class Scatters:
    """The ways to spread one op over devices from which partial sums come.

    Parameters
    ----------
    bound : BoundRule
    rule : Rule, optional
    mesh : Mesh
    batch : str
        The factor of its batch; "" without one.
    sub_batches : int
        The batch is cut into so many parts before it is spread.
    """

    bound: BoundRule
    rule: Rule | None
    mesh: Mesh
    batch: str = ""
    sub_batches: int = 1
    found: dict[Assignment, OpSharding] = field(default_factory=dict)
    sums: set[frozenset[Axis]] = field(default_factory=set)

    def add(self, whole: OpSharding, arriving: Layout) -> None:
        """The way that differs from `whole` in that a partial sum, arriving so, is scattered; if there is one."""
        axes = frozenset(axis for axis, op in arriving.partial if op == "sum" and axis.kind == "space")
        rows = self.bound.outputs[0][0] if self.bound.outputs[0] else ()
        # A value that lies in parts of its other dimensions, too (AxoNN's), is small already: fewer ways to weigh up.
        if not axes or axes & set(whole.assignment) or not set(whole.assignment.values()) <= set(rows):
            return
        for name in (name for names in self.bound.outputs[0] for name in names):
            mine = [axis for axis, other in whole.assignment.items() if other == name]
            factor = self.bound.factor(name)
            parts = axes_size([*axes, *mine]) * (self.sub_batches if name == self.batch else 1)
            if not factor.blocked and factor.size % parts == 0:
                spread = Assignment.of({**whole.assignment, **dict.fromkeys(self.mesh.ordered(axes), name)})
                wanted = accept_own_partials(
                    self.rule, spread.as_dict(), input_layouts(self.bound, spread.as_dict())
                )
                results = output_layouts(self.bound, spread.as_dict(), self.mesh)
                self.found.setdefault(spread, OpSharding(spread.as_dict(), wanted, results, whole.blocked))
                self.sums.add(axes)
                return

    def among(self, choices: Mapping[Assignment, OpSharding], wanted: bool | None) -> dict[Assignment, OpSharding]:
        """`choices` with the scattered ones, without them, or those alone that leave no such sum whole."""
        if wanted is False or not self.found:
            return dict(choices)
        every = {**self.found, **choices}
        if wanted is None:
            return every
        return {spread: choice for spread, choice in every.items()
                if any(axes <= set(choice.assignment) for axes in self.sums)}  # fmt: skip
