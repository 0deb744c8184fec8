"""The local node and the layout of each global value, while the pass `Shard` (`partition`) writes the local graph.

`ShardedValues` brings a value to another layout on request and remembers the result, so that no collective is emitted
twice. A view has no local node of its own: its base is redistributed, and the view is emitted on the result. A constant
has none either: each rank makes its own part of it where it is read (see `spmd_builder.part`).

A partial sum is not reduced where it is computed. It passes through views and sums that have one user, and is reduced
at its first other use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from shardweave.ir import (
    META,
    Axis,
    BoundRule,
    Dtypes,
    Layout,
    LayoutError,
    Mesh,
    VerifyError,
    factors_of,
    layout_through_view,
    state_layouts,
    with_axes_joined,
    without_axes,
)
from shardweave.passes.spmd_builder import INPUT_SLICE, LocalGraph, OpEmitter, Origin, Part, local_part
from shardweave.sharding import OpInput, describe, find_rule, info, tensor_args


class StateSharding(NamedTuple):
    """The mesh axes that a parameter and its states are sharded over, in the three stages of AMSP (arXiv 2311.00257).

    Each stage adds axes to the stage before it: `parameter` (s_p) shards the parameter during a step, `gradient` (s_g)
    also shards the accumulated gradient, `states` (s_os) also shards the optimizer's states, and with them the
    parameter between steps. `dtypes` are the dtypes of the master weight and of the gradient reduction; None where both
    are the dtype that the step computes in. `at_rest` is the layout between steps, where another step has chosen it.
    """

    parameter: tuple[Axis, ...] = ()
    gradient: tuple[Axis, ...] = ()
    states: tuple[Axis, ...] = ()
    dtypes: Dtypes | None = None
    at_rest: Layout | None = None


class WholeBatchSum(NamedTuple):
    """A sum over all micro-batches of a value that depends on inputs alone.

    It is computed before the first micro-batch runs: `part` is the node that computes one micro-batch's part, and
    `placeholder` brings the finished sum to each micro-batch.
    """

    placeholder: fx.Node
    part: fx.Node


class ShardedValues:
    """The local node and the layout of each value of the global graph, while the local graph is written.

    Parameters
    ----------
    local : LocalGraph
        The graph to write to.
    names : mapping of str to str
        The names of buffers and inputs, by placeholder.
    state_sharding : mapping of str to StateSharding
        The axes that each parameter and its states are sharded over, beyond those of the layout of its first use.
    """

    def __init__(
        self, local: LocalGraph, mesh: Mesh, names: Mapping[str, str], state_sharding: Mapping[str, StateSharding]
    ) -> None:
        self.local, self.mesh = local, mesh
        self.names, self.state_sharding = names, state_sharding
        self.canonical: dict[fx.Node, tuple[fx.Node, Layout]] = {}
        """The local node and layout that a value was computed at or last reduced to."""
        self.memo: dict[tuple[fx.Node, Layout, bool], fx.Node] = {}
        """The local nodes of values at the other layouts that were asked for."""
        self.constants: set[fx.Node] = set()
        self.parameters: dict[fx.Node, str] = {}
        self.state_layouts: dict[str, Layout] = {}
        """The layout of each parameter's optimizer states, and of the parameter between steps."""
        self.gradient_layouts: dict[str, Layout] = {}
        """The layout in which each parameter's gradient is accumulated."""
        self.gathered_once: list[fx.Node] = []
        """The copies of parameters that are gathered once a step, for forward and backward."""
        self.whole_batch_sums: list[WholeBatchSum] = []
        self.input_only: set[fx.Node] = set()
        """Global values that depend on inputs alone, not on parameters or buffers."""
        self.current: fx.Node | None = None
        """The op that is being emitted, for error messages."""
        self.all_sub_batches = False
        """Whether the op that is being emitted takes all sub-batches at once."""
        self.backward = False
        """Whether the node that is being emitted belongs to the backward."""

    def arrival(self, value: fx.Node) -> OpInput:
        """The layout at which an op finds `value`, and what else its rule has to know of it."""
        root = self._base(value)
        layout = self.layout(value)
        if value in self.input_only:  # its sum over the micro-batches can be computed before the first one runs
            layout = replace(layout, partial=tuple(item for item in layout.partial if item[0].kind == "space"))
        if self.all_sub_batches:
            layout = with_axes_joined(layout, self.mesh.sub_batch_axes)
        return OpInput(layout, value.meta["val"].numel(), root in self.parameters, self._single_user(value))

    def current_sub_batch(self, whole_batch: fx.Node, layout: Layout, origin: Origin) -> fx.Node:
        """The part that belongs to the current sub-batch, at `layout`, of a value that enters the graph whole."""
        whole = without_axes(layout, self.mesh.sub_batch_axes)
        if whole == layout:
            return whole_batch
        part = self.local.redistribute(whole_batch, whole, layout, replace(origin, reason=INPUT_SLICE))
        annotate_layouts(part, (layout,))
        return part

    def note_input_only(self, node: fx.Node, inputs: Collection[str]) -> None:
        """Remember a value that depends on inputs alone; `inputs` are the names of their placeholders."""
        if node.op == "placeholder":
            known = node.name in inputs
        else:
            known = node.op == "call_function" and all(source in self.input_only for source in node.all_input_nodes)
        if known:
            self.input_only.add(node)

    def has_local_node(self, value: fx.Node) -> bool:
        """Whether a value is a computed value or a constant. Otherwise it is a view."""
        return value in self.canonical or value in self.constants

    def _base(self, value: fx.Node) -> fx.Node:
        """The value that a view looks at, through any number of views."""
        while not self.has_local_node(value):
            value = tensor_args(value)[0]
        return value

    def _single_user(self, value: fx.Node) -> bool:
        """Whether `value`, each view that it is made of, and their base have one user each."""
        while True:
            if len(value.users) != 1:
                return False
            if self.has_local_node(value):
                return True
            value = tensor_args(value)[0]

    def layout(self, value: fx.Node) -> Layout:
        """The layout that a global value has now."""
        if value in self.canonical:
            return self.canonical[value][1]
        if value in self.constants:
            return Layout.replicated(value.meta["val"].shape)
        return self._view(value)[1]

    def _view(self, view: fx.Node) -> tuple[Layout, Layout]:
        """The layout that a view needs its base at, and the layout that the view then has itself.

        Axes that the view cannot carry over to its output are gathered at the base.
        """
        bound = bound_rule(view)
        have, sizes = self.layout(tensor_args(view)[0]), bound.sizes()
        # 1. The base as it is. 2. Without the axes that belong to no factor of the view. 3. The base gathered.
        for attempt in range(3):
            if attempt:
                kept = factors_of(have.dims, bound.inputs[0], sizes) if attempt == 1 else ()
                have = without_axes(have, set(have.shard_axes).difference(kept))
            if (result := layout_through_view(have, bound.inputs[0], bound.outputs[0], sizes)) is not None:
                return have, result
        raise LayoutError(f"{view} cannot be computed at {have}")

    def at_layout(self, node: fx.Node, want: Layout, origin: Origin | None = None) -> fx.Node:
        """The local node that holds a global value at the layout `want`."""
        root = self._base(node)
        # Forward and backward each have their own copy of a gathered parameter, which is freed after its use in the
        # forward, of a constant, and of a slice.
        whole = without_axes(want, self.mesh.slice_axes)
        key = node, want, self.backward and (root in self.parameters or root in self.constants or whole != want)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._materialise(node, want, origin)
        return found

    def _materialise(self, node: fx.Node, want: Layout, origin: Origin | None) -> fx.Node:
        """Emit what brings a global value to `want`."""
        # 1. A slice of an op (operator slicing) is cut from the whole value.
        whole = without_axes(want, self.mesh.slice_axes)
        if whole != want and self._is_sliced_when_whole(node):
            origin = Origin(info(node).op, "slice", backward=self.backward)
            return self.local.redistribute(self.at_layout(node, whole), whole, want, origin)
        # 2. A constant is made by each rank.
        if node in self.constants:
            return self._constant(node, want)
        # 3. A value that all sub-batches share is redistributed over the devices first, and then cut into sub-batches.
        first = self._before_slicing(node, want) if self.mesh.sub_batch_axes else None
        if first is not None:
            where = origin or self.origin_of(node, first)
            return self.local.redistribute(self.at_layout(node, first, origin), first, want, where)
        # 4. A computed value is redistributed. The first use of a parameter decides how its states are sharded.
        if node in self.canonical:
            if node in self.parameters and self.parameters[node] not in self.state_layouts:
                self._shard_states(node, want)
            written, have = self.canonical[node]
            if have == want:
                return written
            origin = origin or self.origin_of(node, have)
            written, have = self._join_sub_batches(written, have, want, origin)
            if have == want:
                return written
            times = tuple(item for item in have.partial if item[0].kind == "time" and item not in want.partial)
            if not times:
                written, reduced = self.local.redistribute_and_reduced(written, have, want, origin)
                self.canonical[node] = reduced or self.canonical[node]
                return written
            # A sum over micro-batches or sub-batches: first over the devices, then over the sub-batches, and over the
            # micro-batches in a graph of its own, which runs before the first of them.
            self._check_input_only(node, *times[0])
            part = self.local.redistribute(written, have, replace(want, partial=times), origin)
            part, have = self.local.join_steps(part, replace(want, partial=times), origin, self.mesh.sub_batch_axes)
            if have != want:
                part = self._add_whole_batch_sum(node, part, want)
            self.canonical[node] = part, want
            return part
        # 5. A view is emitted on its base, at the layout of the base that gives the view the layout `want`. Where there
        #    is no such layout, the view is emitted at a layout that it can have, and is redistributed itself.
        bound, rule = bound_rule(node), find_rule(node)
        source = tensor_args(node)[0]
        back = layout_through_view(want, bound.outputs[0], bound.inputs[0], bound.sizes())
        if back is None:
            _, possible = self._view(node)
            where = origin or self.origin_of(node, possible)
            written, have = self._join_sub_batches(self.at_layout(node, possible), possible, want, where)
            return self.local.redistribute(written, have, want, where)
        inner = self.at_layout(source, back, origin)
        return self._emit_view_or_constant(node, [inner], want, Part(rule, bound, {}, (back,)))

    def _before_slicing(self, node: fx.Node, want: Layout) -> Layout | None:
        """The layout that a value needs before it is cut into sub-batches; None where it has that layout already."""
        have = self.layout(node)
        first = without_axes(want, set(self.mesh.sub_batch_axes).difference(have.shard_axes, have.partial_axes))
        return None if first in (want, have) else first

    def _join_sub_batches(self, written: fx.Node, have: Layout, want: Layout, origin: Origin) -> tuple[fx.Node, Layout]:
        """The value of all sub-batches, for an op that takes them all at once; the current sub-batch for any other."""
        if not self.all_sub_batches:
            return written, have
        wanted = {*want.shard_axes, *want.partial_axes}
        return self.local.join_steps(
            written, have, origin, [axis for axis in self.mesh.sub_batch_axes if axis not in wanted]
        )

    def _is_sliced_when_whole(self, node: fx.Node) -> bool:
        """Whether a slice of a value is cut from the whole value. Slices of a parameter are gathered one by one."""
        have = self.layout(node)
        return without_axes(have, self.mesh.slice_axes) == have and self._base(node) not in self.parameters

    def _emit_view_or_constant(self, node: fx.Node, values: Sequence[fx.Node], want: Layout, made: Part) -> fx.Node:
        """Emit a view or a constant in its local form, on the local nodes of its inputs."""
        where = Origin(info(node).op, backward=self.backward)
        emitter = OpEmitter(
            self.local, self.canonical, node, iter(values), made.inputs, (want,), made.assignment, made.bound, where
        )
        written = emitter.emit(made.rule)
        check_shape(node, written.meta["val"], want)
        annotate_layouts(written, (want,))
        return written

    def _constant(self, node: fx.Node, want: Layout) -> fx.Node:
        """Emit this rank's part of a constant. Where its rule cannot split it, the whole constant is made and cut."""
        origin = Origin(info(node).op, backward=self.backward)
        whole = Layout.replicated(node.meta["val"].shape)
        if want == whole:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.replicated_constant)
            return self.local.call(origin, node.target, *args, **kwargs)  # type: ignore[arg-type]
        made = local_part(node, want, self.mesh)
        if made is None:
            return self.local.redistribute(self.at_layout(node, whole), whole, want, origin)
        values = [self.at_layout(source, layout) for source, layout in zip(tensor_args(node), made.inputs)]
        return self._emit_view_or_constant(node, values, want, made)

    def replicated_constant(self, leaf: fx.Node) -> fx.Node:
        """The local node of an argument of a constant that is made whole."""
        if leaf in self.constants:
            return self.at_layout(leaf, Layout.replicated(leaf.meta["val"].shape))
        return self.canonical[leaf][0]

    def _shard_states(self, node: fx.Node, want: Layout) -> None:
        """Decide how a parameter, its gradient and its states are sharded, at the parameter's first use.

        Each is sharded as the first use needs the parameter, and further over its axes of `state_sharding`. Between
        steps the parameter has the layout of its states. It is gathered from there to its layout in the step once, for
        both forward and backward. A step that computes in another dtype than the master's casts it before the gather.
        """
        name, written = self.parameters[node], self.canonical[node][0]
        axes = self.state_sharding.get(name, StateSharding())
        every = axes.parameter, axes.gradient, axes.states
        free = [[axis for axis in part if axis not in want.shard_axes] for part in every]
        stages = [without_axes(each, self.mesh.slice_axes) for each in state_layouts(want, free, self.mesh)]
        in_step, self.gradient_layouts[name], layout = stages
        layout = axes.at_rest or layout
        value = node.meta["val"]
        dtype = axes.dtypes.master if axes.dtypes else value.dtype
        written.meta["val"] = self.local.empty(layout, dtype, value.device)
        written.meta[META] = replace(info(written), layouts=(layout,))
        origin = Origin(name, "gather for the step", "parameter", self.backward)
        working = self.local.cast(written, value.dtype, origin)
        working = self.local.redistribute(working, layout, in_step, origin)
        if working is not written:
            self.gathered_once.append(working)
        self.canonical[node] = working, in_step
        self.state_layouts[name] = layout

    def _check_input_only(self, node: fx.Node, axis: Axis, combine: str) -> None:
        """Raise `LayoutError` where one micro-batch or sub-batch needs a sum, or a maximum, over all of them.

        A sum that depends on inputs alone can be computed beforehand, and is allowed.
        """
        if node not in self.input_only or combine != "sum":
            reader = self.current or node
            raise LayoutError(
                f"{info(reader).op}: {reader.target} needs the {combine} over the whole batch of {info(node).op} "
                f"({node.name}), so the batch cannot be computed in {axis.name}-batches, one after another: use "
                f"{axis.name}_batches=1, or move what needs the whole batch out of the model"
            )

    def _add_whole_batch_sum(self, node: fx.Node, part: fx.Node, want: Layout) -> fx.Node:
        """Emit the placeholder of a sum over all micro-batches, which is computed before the first of them runs."""
        origin = Origin(info(node).op)
        total = self.local.placeholder(f"total_{len(self.whole_batch_sums)}", node.meta["val"], want, origin, last=True)
        self.whole_batch_sums.append(WholeBatchSum(total, part))
        return total

    def origin_of(self, node: fx.Node, have: Layout) -> Origin:
        """The owner and reason that collectives on this value are marked with."""
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
    """Note the layouts of a node's outputs. A view that is emitted as its base keeps the note of the base."""
    if not info(node).layouts:
        node.meta[META] = replace(info(node), layouts=tuple(layouts))


def check_shape(node: fx.Node, value: torch.Tensor, layout: Layout) -> None:
    """`VerifyError` where a local value does not have the shape that its layout gives it."""
    if tuple(value.shape) != layout.local_shape:
        raise VerifyError(
            f"the local form of {node.target} ({node.name}, {info(node).op}) has the shape {tuple(value.shape)}, "
            f"its layout {layout} says {layout.local_shape}: its rule or its lowering is wrong"
        )
