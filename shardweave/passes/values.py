"""Values at layouts: where each value of the global graph lies in the local one, and how it gets where it is wanted.

A value has one *canonical* place, where it was computed or reduced to. Wanted elsewhere, it is brought there once for
each layout and remembered. Views have no place of their own: what they look at is brought to the layout that makes
them lie as wanted, and they are written on it. Nor have constants: see `constants`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from shardweave.cost_model.graphs import describe
from shardweave.errors import LayoutError, VerifyError
from shardweave.ir import META, Axis, BoundRule, Layout, Mesh
from shardweave.passes.annotate import info
from shardweave.passes.constants import Part, part
from shardweave.passes.emitter import OpEmitter
from shardweave.passes.follow import Arrival
from shardweave.passes.layouts import drop, factors_of, rest_layouts, through, together
from shardweave.passes.local import LocalGraph, Origin
from shardweave.passes.rules import find_rule
from shardweave.passes.rules.registry import tensor_args
from shardweave.precision import Dtypes


class Rest(NamedTuple):
    """The axes that a parameter rests on in a step, those besides on which its gradient is added up, and those
    besides on which its states rest between steps.

    `dtypes` are those of its master and of its gradient's sum; None: as the step computes with it.
    """

    parameter: tuple[Axis, ...] = ()
    gradient: tuple[Axis, ...] = ()
    states: tuple[Axis, ...] = ()
    dtypes: Dtypes | None = None


class Total(NamedTuple):
    """A sum over time axes that inputs alone decide: where each step finds it, and its part that each computes."""

    placeholder: fx.Node
    part: fx.Node


class Values:
    """The values of one global graph while its local graph is written.

    Parameters
    ----------
    local : LocalGraph
    names : mapping of str to str
        What buffers and inputs are called, by placeholder.
    rest_axes : mapping of str to Rest
        What each parameter and its states rest on, beside the axes of the layout that it is first needed in.
    """

    def __init__(self, local: LocalGraph, mesh: Mesh, names: Mapping[str, str], rest_axes: Mapping[str, Rest]) -> None:
        self.local, self.mesh = local, mesh
        self.names, self.rest_axes = names, rest_axes
        self.canonical: dict[fx.Node, tuple[fx.Node, Layout]] = {}
        self.memo: dict[tuple[fx.Node, Layout, bool], fx.Node] = {}
        self.constants: set[fx.Node] = set()
        self.parameters: dict[fx.Node, str] = {}
        self.rests: dict[str, Layout] = {}
        """Where each parameter's states rest."""
        self.sums: dict[str, Layout] = {}
        """Where each parameter's gradient is added up."""
        self.working: list[fx.Node] = []
        """The copies of parameters that are gathered once a step."""
        self.totals: list[Total] = []
        self.given: set[fx.Node] = set()
        """Global values that depend on inputs alone."""
        self.current: fx.Node | None = None
        self.at_once = False
        """Whether what is being written takes all steps of the woven axes at once."""
        self.backward = False

    def arrival(self, value: fx.Node) -> Arrival:
        root = self._root(value)
        layout = self.layout(value)
        if value in self.given:  # it is found as a whole
            layout = replace(layout, partial=tuple(item for item in layout.partial if item[0].kind == "space"))
        if self.at_once:
            layout = together(layout, self.mesh.woven)
        return Arrival(layout, value.meta["val"].numel(), root in self.parameters, self._single_user(value))

    def _has_place(self, value: fx.Node) -> bool:
        """Whether a value is no view: it lies somewhere, or is a constant that is made wherever it is wanted."""
        return value in self.canonical or value in self.constants

    def _root(self, value: fx.Node) -> fx.Node:
        while not self._has_place(value):
            value = tensor_args(value)[0]
        return value

    def _single_user(self, value: fx.Node) -> bool:
        """Whether the value that `value` looks at has one user, views looked through."""
        while True:
            if len(value.users) != 1:
                return False
            if self._has_place(value):
                return True
            value = tensor_args(value)[0]

    def layout(self, value: fx.Node) -> Layout:
        """Where a global value lies now."""
        if value in self.canonical:
            return self.canonical[value][1]
        if value in self.constants:
            return Layout.replicated(value.meta["val"].shape)
        return self._view(value)[1]

    def _view(self, view: fx.Node) -> tuple[Layout, Layout]:
        """Where a view wants what it looks at, and where it then lies itself: axes that it would cut are gathered."""
        bound = bound_rule(view)
        have = self.layout(tensor_args(view)[0])
        result = through(have, bound.inputs[0], bound.outputs[0], bound.sizes())
        if result is None:
            kept = factors_of(have.dims, bound.inputs[0], bound.sizes())
            have = drop(have, set(have.shard_axes) - set(kept))
            result = through(have, bound.inputs[0], bound.outputs[0], bound.sizes())
        if result is None:
            have = drop(have, have.shard_axes)
            result = through(have, bound.inputs[0], bound.outputs[0], bound.sizes())
        if result is None:
            raise LayoutError(f"{view} cannot be computed at {have}")
        return have, result

    def value(self, node: fx.Node, want: Layout, origin: Origin | None = None) -> fx.Node:
        """The local node that holds a global value at `want`."""
        root = self._root(node)
        # A gathered parameter is freed after its forward use: the backward gathers it again. A constant is not kept
        # either: the backward makes its own. Nor is a slice.
        whole = drop(want, self.mesh.slices)
        key = node, want, self.backward and (root in self.parameters or root in self.constants or whole != want)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._materialise(node, want, origin)
        return found

    def _materialise(self, node: fx.Node, want: Layout, origin: Origin | None) -> fx.Node:
        whole = drop(want, self.mesh.slices)
        if whole != want and self._is_cut_late(node):
            origin = Origin(info(node).op, "slice", backward=self.backward)
            return self.local.redistribute(self.value(node, whole), whole, want, origin, lambda *_: None)
        if node in self.constants:
            return self._constant(node, want)
        first = self._before_steps(node, want) if self.mesh.woven else None
        if first is not None:
            where = origin or self._origin(node, first)
            return self.local.redistribute(self.value(node, first, origin), first, want, where, lambda *_: None)
        if node in self.canonical:
            if node in self.parameters and self.parameters[node] not in self.rests:
                self._rest(node, want)
            written, have = self.canonical[node]
            if have == want:
                return written
            origin = origin or self._origin(node, have)
            written, have = self._together(written, have, want, origin)
            if have == want:
                return written

            def reduced(result: fx.Node, layout: Layout) -> None:
                self.canonical[node] = result, layout

            times = tuple(item for item in have.partial if item[0].kind == "time" and item not in want.partial)
            if not times:
                return self.local.redistribute(written, have, want, origin, reduced)
            self._check_given(node, times[0][0])
            part = self.local.redistribute(written, have, replace(want, partial=times), origin, reduced)
            part, lies = self.local.ended(part, replace(want, partial=times), origin, self.mesh.woven)
            if lies != want:
                part = self._total(node, part, want)
            self.canonical[node] = part, want
            return part
        bound, rule = bound_rule(node), find_rule(node)
        source = tensor_args(node)[0]
        back = through(want, bound.outputs[0], bound.inputs[0], bound.sizes())
        if back is None:
            first, lies = self._view(node)
            where = origin or self._origin(node, lies)
            written, have = self._together(self.value(node, lies), lies, want, where)
            return self.local.redistribute(written, have, want, where, lambda *_: None)
        inner = self.value(source, back, origin)
        return self._write(node, [inner], want, Part(rule, bound, {}, (back,)))

    def _before_steps(self, node: fx.Node, want: Layout) -> Layout | None:
        """Where a value is brought before steps of woven axes are taken of it; None where it is there."""
        have = self.layout(node)
        first = drop(want, set(self.mesh.woven).difference(have.shard_axes, have.partial_axes))
        return None if first in (want, have) else first

    def _together(self, written: fx.Node, have: Layout, want: Layout, origin: Origin) -> tuple[fx.Node, Layout]:
        """What the steps of woven axes have, for a reader that takes all of them at once; else what one has."""
        if not self.at_once:
            return written, have
        wanted = {*want.shard_axes, *want.partial_axes}
        return self.local.ended(written, have, origin, [axis for axis in self.mesh.woven if axis not in wanted])

    def _is_cut_late(self, node: fx.Node) -> bool:
        """Whether slices of a value are taken of what is whole; a parameter's are gathered one by one."""
        lies = self.layout(node)
        return drop(lies, self.mesh.slices) == lies and self._root(node) not in self.parameters

    def _write(self, node: fx.Node, values: Sequence[fx.Node], want: Layout, made: Part) -> fx.Node:
        """A view or a constant in its local form, on local values of what it is made from."""
        where = Origin(info(node).op, backward=self.backward)
        emitter = OpEmitter(
            self.local, self.canonical, node, iter(values), made.inputs, (want,), made.assignment, made.bound, where
        )
        written = emitter.emit(made.rule)
        check_shape(node, written.meta["val"], want)
        annotate_layouts(written, (want,))
        return written

    def _constant(self, node: fx.Node, want: Layout) -> fx.Node:
        """A part of a constant, made as such where its rule allows it."""
        origin = Origin(info(node).op, backward=self.backward)
        whole = Layout.replicated(node.meta["val"].shape)
        if want == whole:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._whole_constant)
            return self.local.call(origin, node.target, *args, **kwargs)  # type: ignore[arg-type]
        made = part(node, want, self.mesh)
        if made is None:
            return self.local.redistribute(self.value(node, whole), whole, want, origin, lambda *_: None)
        values = [self.value(source, lies) for source, lies in zip(tensor_args(node), made.inputs)]
        return self._write(node, values, want, made)

    def _whole_constant(self, leaf: fx.Node) -> fx.Node:
        if leaf in self.constants:
            return self.value(leaf, Layout.replicated(leaf.meta["val"].shape))
        return self.canonical[leaf][0]

    def _rest(self, node: fx.Node, want: Layout) -> None:
        """Let a parameter rest as it is first needed, spread further over its axes of rest; its states further still.

        Between steps it lies as its states do. It is gathered from there once, for both forward and backward; what the
        step computes with in another dtype is cast before that.
        """
        name, written = self.parameters[node], self.canonical[node][0]
        axes = self.rest_axes.get(name, Rest())
        every = axes.parameter, axes.gradient, axes.states
        free = [[axis for axis in part if axis not in want.shard_axes] for part in every]
        stages = [drop(lies, self.mesh.slices) for lies in rest_layouts(want, free, self.mesh)]
        in_step, self.sums[name], layout = stages
        value = node.meta["val"]
        dtype = axes.dtypes.master if axes.dtypes else value.dtype
        with self.local.fake:
            written.meta["val"] = torch.empty(layout.local_shape, dtype=dtype, device=value.device)
        written.meta[META] = replace(info(written), layouts=(layout,))
        origin = Origin(name, "gather for the step", "parameter", self.backward)
        working = self.local.cast(written, value.dtype, origin)
        working = self.local.redistribute(working, layout, in_step, origin, lambda *_: None)
        if working is not written:
            self.working.append(working)
        self.canonical[node] = working, in_step
        self.rests[name] = layout

    def _check_given(self, node: fx.Node, axis: Axis) -> None:
        """Refuse a sum over a time axis inside of its steps, unless inputs alone decide it."""
        if node not in self.given:
            reader = self.current or node
            raise LayoutError(
                f"{info(reader).op}: {reader.target} needs the sum over the whole batch of {info(node).op} "
                f"({node.name}), so the batch cannot be computed in {axis.name}-batches, one after another: use "
                f"{axis.name}_batches=1, or move what needs the whole batch out of the model"
            )

    def _total(self, node: fx.Node, part: fx.Node, want: Layout) -> fx.Node:
        """The sum over all micro-batches of a value that inputs alone decide: it is found before the first of them."""
        origin = Origin(info(node).op)
        total = self.local.placeholder(f"total_{len(self.totals)}", node.meta["val"], want, origin, last=True)
        self.totals.append(Total(total, part))
        return total

    def _origin(self, node: fx.Node, have: Layout) -> Origin:
        if node in self.parameters:
            return Origin(self.parameters[node], "gather from rest", "parameter", self.backward)
        name = self.names.get(node.name) or info(node).op or node.name
        reason = f"sum of {name}" if have.partial else f"layout of {name}"
        return Origin(name, reason, "activation", self.backward)


def bound_rule(node: fx.Node) -> BoundRule:
    """The rule that `annotate` bound to a node."""
    rule = info(node).rule
    if rule is None:
        raise VerifyError(f"{describe(node)} was bound to no rule: a bug in shardweave")
    return rule


def annotate_layouts(node: fx.Node, layouts: Sequence[Layout]) -> None:
    """Note where a node's outputs lie; a view that turned out to be its base keeps what the base has."""
    if not info(node).layouts:
        node.meta[META] = replace(info(node), layouts=tuple(layouts))


def check_shape(node: fx.Node, value: torch.Tensor, layout: Layout) -> None:
    """`VerifyError` where a local value does not have the shape that its layout gives it."""
    if tuple(value.shape) != layout.local_shape:
        raise VerifyError(
            f"the local form of {node.target} ({node.name}, {info(node).op}) has the shape {tuple(value.shape)}, "
            f"its layout {layout} says {layout.local_shape}: its rule or its lowering is wrong"
        )
