"""The SPMD partitioner: the pass `Shard` turns the global joint graph into the local graph that every rank runs.

`Shard` emits each op once, in the local form that its strategy asks for, and the collectives that bring its inputs to
the layouts that this form needs. An op without a strategy follows its inputs (`sharding.follow`).

The work is divided among four classes:

`ShardedValues`
    knows which local node holds each global value, and at which layout. It brings a value to another layout on request
    and remembers the result, so that no collective is emitted twice. A view has no local node of its own: its base is
    redistributed, and the view is emitted on the result. A constant has none either: each rank makes its own part of it
    where it is read (see `spmd_builder.part`).
`InputArrivals`
    says at which layouts the inputs of an op are available, where other readers of the same value already need it
    gathered or reduce-scattered.
`StepOutputs`
    emits the outputs of the step: results at the layouts that the caller asks for, and gradients at the layout of the
    optimizer's states.
`Sharder`
    walks over the graph and emits op after op.

A partial sum is not reduced where it is computed. It passes through views and sums that have one user, and is reduced
at its first other use.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from shardweave.ir import (
    META,
    Assignment,
    Axis,
    BoundRule,
    Dtypes,
    Layout,
    LayoutError,
    Mesh,
    NodeInfo,
    VerifyError,
    axes_size,
    factors_of,
    input_layouts,
    layout_through_view,
    output_layouts,
    sliced_like,
    state_layouts,
    with_axes_joined,
    without_axes,
)
from shardweave.passes.base import Pass, Property
from shardweave.passes.spmd_builder import INPUT_SLICE, LocalGraph, OpEmitter, Origin, Part, local_part, remove_dead
from shardweave.sharding import (
    OpInput,
    OpSharding,
    Rule,
    accept_own_partials,
    any_covers,
    attainable_layout,
    bind_new,
    checkpoint_of,
    decompose,
    depends_on_inputs,
    describe,
    find_rule,
    follow,
    graph_outputs,
    info,
    is_view,
    linear_in,
    masks_with_zeros,
    module_of,
    passing_sums,
    source_of,
    tensor_args,
)

aten = torch.ops.aten


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


@dataclass(frozen=True)
class ShardedStep:
    """What `Shard` decided about a step, for the passes after it and for the signature. Nodes are given by name."""

    output_layouts: Mapping[int, Layout]
    """The layouts of the outputs of the forward, and of the gradients of inputs, by index."""
    state_layouts: Mapping[str, Layout]
    """The layout of each parameter's optimizer states, and of the parameter between steps."""
    state_sharding: Mapping[str, StateSharding]
    gathered_once: Sequence[str]
    """The copies of parameters that are gathered once a step, for forward and backward."""
    accumulators: Mapping[str, str]
    """For each placeholder that takes a gradient's running sum, the node that adds this run's gradient to it."""
    whole_batch_sums: Sequence[str]
    """The placeholders that take sums over all micro-batches."""


_SHARDED_STEP = "sharded_step"
"""The key of the `ShardedStep` in the meta of a graph module. Later passes keep the meta."""


def sharded_step(graph_module: fx.GraphModule) -> ShardedStep:
    """What `Shard` decided about the step of a local graph."""
    found = graph_module.meta[_SHARDED_STEP]
    assert isinstance(found, ShardedStep)
    return found


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
        # 1. The base as it is. 2. Without the axes that belong to no factor of the view. 3. The base gathered.
        bound = bound_rule(view)
        have = self.layout(tensor_args(view)[0])
        result = layout_through_view(have, bound.inputs[0], bound.outputs[0], bound.sizes())
        if result is None:
            kept = factors_of(have.dims, bound.inputs[0], bound.sizes())
            have = without_axes(have, set(have.shard_axes) - set(kept))
            result = layout_through_view(have, bound.inputs[0], bound.outputs[0], bound.sizes())
        if result is None:
            have = without_axes(have, have.shard_axes)
            result = layout_through_view(have, bound.inputs[0], bound.outputs[0], bound.sizes())
        if result is None:
            raise LayoutError(f"{view} cannot be computed at {have}")
        return have, result

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


class InputArrivals:
    """The layouts at which the inputs of an op are available, other readers considered.

    Parameters
    ----------
    values : ShardedValues
    assignments : mapping of str to Assignment
        The ops that have a strategy, by node name. The others follow their inputs.
    """

    def __init__(self, values: ShardedValues, assignments: Mapping[str, Assignment]) -> None:
        self.values, self.mesh, self.assignments = values, values.mesh, assignments

    def of(self, node: fx.Node, follows: bool) -> list[OpInput]:
        """The layouts of the inputs of an op. For an op that `follows` its inputs, other readers of these count too."""
        arguments = tensor_args(node)
        arrivals = [self.values.arrival(argument) for argument in arguments]
        if not follows:
            return arrivals
        arrivals = [self._reduce_scattered_for_another(node, each, have) for each, have in zip(arguments, arrivals)]
        return [self._gathered_for_another(node, each, have) for each, have in zip(arguments, arrivals)]

    def _reduce_scattered_for_another(self, node: fx.Node, value: fx.Node, arrival: OpInput) -> OpInput:
        """A partial sum arrives reduce-scattered at `node` where the other inputs of another reader make it need that.

        One reduce-scatter then serves both. For example a norm's backward reads a gradient with the saved activation,
        for the gradient of its weight, and without it.
        """
        sums = {axis for axis, op in arrival.layout.partial if op == "sum" and axis.kind == "space"}
        if not sums or arrival.single_user:
            return arrival
        for user in value.users:
            arguments = tensor_args(user) if user.op == "call_function" else []
            others = [other for other in arguments if other is not value]
            decides = user is not node and others and user.name not in self.assignments
            if not decides or not all(map(self._has_layout, others)):
                continue
            bound, rule = bound_rule(user), find_rule(user)
            at = [self.values.arrival(argument) for argument in arguments]
            want = follow(bound, rule, at, self.mesh).inputs[arguments.index(value)]
            if sums <= set(want.shard_axes) and not want.partial:
                return replace(arrival, layout=want)
        return arrival

    def _has_layout(self, value: fx.Node) -> bool:
        """Whether the layout of a value, or of its base, is known yet."""
        while is_view(value) and not self.values.has_local_node(value):
            value = tensor_args(value)[0]
        return self.values.has_local_node(value)

    def _gathered_for_another(self, node: fx.Node, value: fx.Node, arrival: OpInput) -> OpInput:
        """A value arrives gathered at `node` where another op needs it gathered, and the readers of `node` do as well.

        Where layers of different sharding degrees meet, this gathers a residual stream once, instead of once for the
        stream and once for its norm.
        """
        if self.values.backward or arrival.single_user or arrival.is_parameter:
            return arrival
        results = [each for each in node.users if each.target is operator.getitem] or [node]
        elsewhere, behind = self._axes_at_readers([value], node), self._axes_at_readers(results, node)
        gone = {axis for axis in arrival.layout.shard_axes if axis.kind == "space"}.difference(*elsewhere, *behind)
        if not elsewhere or not behind or not gone:
            return arrival
        return replace(arrival, layout=without_axes(arrival.layout, gone))

    def _axes_at_readers(self, values: Sequence[fx.Node], but: fx.Node) -> list[set[Axis]]:
        """The axes over which each forward op with a strategy needs one of these values sharded, through views."""
        found = []
        for read, user in [(value, user) for value in values for user in value.users if user is not but]:
            explicit = self.assignments.get(user.name)
            if user.op == "call_function" and is_view(user):
                found += self._axes_at_readers([user], but)
            elif explicit is not None and not info(user).backward:
                wants = input_layouts(bound_rule(user), explicit.as_dict())
                found.append(set(wants[tensor_args(user).index(read)].shard_axes))
        return found


class StepOutputs:
    """Emits the outputs of the step: the results of the forward and the gradients.

    Parameters
    ----------
    values : ShardedValues
    options : Shard
        The pass, which says what the outputs are and at which layouts they are wanted.
    """

    def __init__(self, values: ShardedValues, options: Shard) -> None:
        self.values, self.local, self.mesh, self.options = values, values.local, values.mesh, options
        self.results: dict[int, Any] = {}
        """The local node of each output, by its index."""
        self.layouts: dict[int, Layout] = {}
        """The layouts of the outputs of the forward, and of the gradients of inputs."""
        self.sub_batch_layouts: dict[int, Layout] = {}
        """Their layouts inside one sub-batch."""
        self.accumulators: dict[str, fx.Node] = {}
        """For each parameter with a gradient, the node that adds this run's gradient to the sum of the runs before."""

    def write(self, graph: fx.Graph, backward: bool) -> None:
        """Emit the outputs of the forward, or with `backward` those that are left."""
        values = graph_outputs(graph)
        is_first = not self.results
        first_gradient = len(values) - len(self.options.gradients)
        for index, value in enumerate(values):
            if index in self.results:
                continue
            name = self.options.gradients[index - first_gradient] if index >= first_gradient else None
            wanted = self.options.outputs[index]
            if not isinstance(value, fx.Node):
                self.results[index] = value
            elif name is None and not info(value).backward:
                self.values.backward = False
                self.sub_batch_layouts[index] = (wanted or self.values.layout(value)).without_partial()
                self.results[index], self.layouts[index] = self.returned(value, wanted)
            elif backward and name is not None and wanted is None:
                self.values.backward = True
                self.results[index] = self.gradient(name, value)
            elif backward:
                self.values.backward = True
                self.results[index], self.layouts[index] = self.returned(value, wanted)
        if is_first:
            self._write_tangents(graph)

    def _write_tangents(self, graph: fx.Graph) -> None:
        """Emit the placeholders of the tangents: each has the layout of its output, which is known only now."""
        last = [node for node in self.local.graph.nodes if node.op == "placeholder"][-1]
        for node in graph.nodes:
            if node.op == "placeholder" and node.name in self.options.tangents:
                # Each part of a sum has the sum's tangent.
                layout = self.sub_batch_layouts[self.options.tangents[node.name]]
                origin = Origin(node.name, backward=True)
                with self.local.graph.inserting_after(last):
                    last = self.local.placeholder(
                        node.name, node.meta["val"], without_axes(layout, self.mesh.sub_batch_axes), origin
                    )
                self.values.canonical[node] = self.values.current_sub_batch(last, layout, origin), layout

    def returned(self, value: fx.Node, wanted: Layout | None) -> tuple[fx.Node, Layout]:
        """An output with all sub-batches joined, and its layout: `wanted`, or None for the layout that it has.

        The runtime sums it over micro-batches.
        """
        have = self.values.layout(value)
        want = without_axes(wanted or have.without_partial(), self.mesh.sub_batch_axes)
        times = tuple((axis, op) for axis, op in have.partial if axis in self.mesh.micro_batch_axes)
        want = replace(want, partial=(*want.partial, *times))
        if not self._differs_by_sub_batch(have):
            return self.values.at_layout(value, want), want
        origin = self.values.origin_of(value, have)
        node, have = self.local.join_steps(self.values.at_layout(value, have), have, origin, self.mesh.unrolled_axes)
        return self.local.redistribute(node, have, want, origin), want

    def _differs_by_sub_batch(self, layout: Layout) -> bool:
        """Whether a value differs between sub-batches or between slices of an op."""
        return not set(self.mesh.unrolled_axes).isdisjoint((*layout.shard_axes, *layout.partial_axes))

    def gradient(self, name: str, value: fx.Node) -> fx.Node:
        """The gradient of a parameter at the layout of its states.

        It is reduced in the dtype of the reduction and then cast to the dtype of the master weight.
        """
        origin = Origin(name, "gradient", "gradient", True)
        dtype = value.meta["val"].dtype
        sharding = self.values.state_sharding.get(name, StateSharding())
        dtypes = sharding.dtypes or Dtypes(dtype, dtype)
        whole = Layout.replicated(value.meta["val"].shape)
        at_rest = self.values.state_layouts.get(name) or sharding.at_rest or whole
        first = self.values.gradient_layouts.get(name, at_rest) if self.options.all_reduce_gradients else at_rest
        summed = self._accumulated if self.options.accumulates else self._reduced
        found = summed(value, first, dtypes.reduced, origin)
        found = self.local.redistribute(found, first, at_rest, origin)
        return self.local.cast(found, dtypes.master, origin)

    def _accumulated(self, value: fx.Node, want: Layout, dtype: torch.dtype, origin: Origin) -> fx.Node:
        """The sum of a gradient over this run and the runs before, at `want`.

        The gradient is brought to the layout in which gradients are accumulated, and added to the sum there; over the
        remaining devices it stays a partial sum. Only the last run's sum is reduced further, to `want`.
        """
        name, have = origin.op, without_axes(self.values.layout(value), self.mesh.unrolled_axes)
        sums = self.values.gradient_layouts.get(name, want)
        partial = [item for item in have.partial if item[0].kind == "space" and item[1] == "sum"]
        layout = replace(sums, partial=tuple(item for item in partial if item[0] not in sums.shard_axes))
        times = tuple((axis, "sum") for axis in self.mesh.micro_batch_axes)
        mine = self._reduced(value, replace(layout, partial=(*layout.partial, *times)), dtype, origin)
        with self.local.fake:
            like = torch.empty((), dtype=dtype, device=value.meta["val"].device)
        before = self.local.placeholder(f"sum_{name}", like, layout, origin, last=True)
        total = self.local.call(origin, aten.add_.Tensor, before, mine)
        annotate_layouts(total, (layout,))
        self.accumulators[name] = total
        return self.local.redistribute(total, layout, want, origin)

    def _reduced(self, value: fx.Node, want: Layout, dtype: torch.dtype, origin: Origin) -> fx.Node:
        """A gradient at `want`, with its partial sums reduced in `dtype`.

        The sum over sub-batches comes first. Slices of an op are reduced one by one where `want` allows it.
        """
        have = self.values.layout(value)
        if not self._differs_by_sub_batch(have) and (dtype == value.meta["val"].dtype or have == want):
            return self.values.at_layout(value, want, origin)
        cast = self.local.cast(self.values.at_layout(value, have, origin), dtype, origin)
        cast, have = self.local.join_steps(cast, have, origin, self.mesh.sub_batch_axes)
        cut = sliced_like(want, have, self.mesh.slice_axes)
        if cut is None:
            cast, have = self.local.join_steps(cast, have, origin, self.mesh.slice_axes)
        cast = self.local.redistribute(cast, have, cut or want, origin)
        return self.local.join_steps(cast, cut or want, origin, self.mesh.slice_axes)[0]


def is_gradient(node: fx.Node) -> bool:
    """Whether a backward value is only returned, by itself or through views: the final gradient of a parameter."""
    users = list(node.users)
    if not users or not info(node).backward:
        return False
    return all(user.op == "output" or (is_view(user) and is_gradient(user)) for user in users)


def gradient_numel(node: fx.Node) -> int:
    """Elements of a parameter's gradient, or of one that a masked backward value becomes by one more op; 0 of others.

    The gradient is summed over devices in any case, so that partial sums may pass the mask and the op.
    """
    value, is_masked = node, masks_with_zeros(node)
    while is_masked and not is_gradient(value) and len(value.users) == 1:
        before, (value,) = value, value.users
        is_linear = (tensor_args(value).index(before),) in linear_in(value) if value.op == "call_function" else False
        is_masked = is_linear and (is_view(value) or masks_with_zeros(value) or is_gradient(value))
    return int(value.meta["val"].numel()) if is_gradient(value) and (is_masked or value is node) else 0


@dataclass(frozen=True)
class Shard(Pass):
    """Write the local graph of one rank.

    Requires an annotated joint graph. Ensures that every node has its local fake value and its layouts, and that every
    collective is waited for right after its start.
    """

    name = "shard"
    requires: ClassVar[frozenset[Property]] = frozenset({"joint"})
    ensures: ClassVar[frozenset[Property]] = frozenset({"local"})
    invalidates: ClassVar[frozenset[Property]] = frozenset({"joint"})
    mesh: Mesh
    """The axes, in layout order."""
    assignments: Mapping[str, Assignment]
    """The assignment of each op that has a strategy, by node name. The other ops follow their inputs."""
    sources: Mapping[str, Layout]
    """The layouts of inputs, buffers and tangents, by placeholder, and of parameters whose layout is fixed. Values that
    are not named are replicated."""
    outputs: Sequence[Layout | None]
    """The layout of each output of the graph; None for the layout that it has, and for the gradient of a parameter,
    that of its states."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """The parameters' names, by placeholder."""
    tangents: Mapping[str, int] = field(default_factory=dict)
    """The index, among all outputs, of the output that a tangent's placeholder belongs to. They have one layout."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names of buffers and inputs, by placeholder."""
    inputs: Collection[str] = ()
    """The placeholders of a call's inputs."""
    gradients: Sequence[str] = ()
    """The inputs and the parameters whose gradients are the last outputs."""
    state_sharding: Mapping[str, StateSharding] = field(default_factory=dict)
    """The axes that each parameter and its states are sharded over, beyond those of the layout of its first use."""
    accumulates: bool = False
    """Whether gradients are added up over several runs of the graph: see `StepOutputs.accumulators`."""
    known: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    """A cache of the fake results of local ops, shared by graphs of one fake mode: see `LocalGraph`."""
    all_reduce_gradients: bool = False
    """Whether a gradient is reduced to its accumulation layout before each device takes the part of its states."""
    exclude_from_sub_batches: Collection[str] = ()
    """Patterns of modules whose ops take all sub-batches at once."""

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        sharder = Sharder(self, graph_module)
        local = sharder.run()
        local.meta[_SHARDED_STEP] = sharder.sharded_step()
        return local


class Sharder:
    """One run of `Shard`: it walks over the global graph and emits the local one.

    Parameters
    ----------
    options : Shard
    graph_module : GraphModule
        The annotated joint graph. Decompositions may add nodes to it.
    """

    def __init__(self, options: Shard, graph_module: fx.GraphModule) -> None:
        fake = next(
            node.meta["val"].fake_mode
            for node in graph_module.graph.nodes
            if hasattr(node.meta.get("val"), "fake_mode")
        )
        self.options, self.module, self.mesh = options, graph_module, options.mesh
        self.local = LocalGraph(options.mesh, fake, known=options.known)
        self.values = ShardedValues(self.local, options.mesh, options.names, options.state_sharding)
        self.arrivals = InputArrivals(self.values, options.assignments)
        self.outputs = StepOutputs(self.values, options)
        self.assigned: dict[fx.Node, Assignment] = {}
        """The assignment that each op was emitted with."""
        self.followed: dict[object, tuple[Rule | None, OpSharding]] = options.known.setdefault(
            ("follow", options.mesh), {}
        )
        """A cache of `follow`, which equal layers ask for the same again."""

    def run(self) -> fx.GraphModule:
        """Emit the local graph. Afterwards `values` and `outputs` say how states and outputs are laid out."""
        graph, values = self.module.graph, self.values
        is_forward_done = False
        self.dependent = depends_on_inputs(graph)
        # 1. Emit the nodes in their order; the outputs of the forward before the first node of the backward.
        for node in list(graph.nodes):
            values.note_input_only(node, self.options.inputs)
            values.backward = info(node).backward
            self.local.checkpoint = checkpoint_of(node)
            if node.op == "placeholder":
                self._emit_placeholder(node)
            elif node.op == "output":
                values.all_sub_batches = False
                self.outputs.write(graph, backward=True)
            else:
                if values.backward and not is_forward_done:
                    self.outputs.write(graph, backward=False)
                    values.backward = is_forward_done = True
                self._emit(node)
        # 2. Return the outputs, and behind them the parts of sums over the whole batch.
        results, parts = self.outputs.results, [each.part for each in values.whole_batch_sums]
        out = self.local.graph.output((*(results[index] for index in sorted(results)), *parts))
        # 3. Drop what nothing uses.
        out.meta[META] = NodeInfo(op="output")
        remove_dead(self.local.graph)
        if not self.local.seed.users:
            self.local.graph.erase_node(self.local.seed)
        self.local.graph.lint()
        return module_of(self.module, self.local.graph)

    def sharded_step(self) -> ShardedStep:
        """What the run decided about the step."""
        unread = {name: each.at_rest for name, each in self.options.state_sharding.items() if each.at_rest}
        return ShardedStep(
            self.outputs.layouts,
            {**unread, **self.values.state_layouts},
            self.options.state_sharding,
            [node.name for node in self.values.gathered_once],
            {node.all_input_nodes[0].name: node.name for node in self.outputs.accumulators.values()},
            [each.placeholder.name for each in self.values.whole_batch_sums],
        )

    def _emit_placeholder(self, node: fx.Node) -> None:
        """Emit an input of the step: a parameter, a buffer or an input of the call."""
        if node.name in self.options.tangents:
            return  # `StepOutputs` emits it with its output
        value = node.meta["val"]
        name = self.options.parameters.get(node.name)
        layout = self.options.sources.get(node.name, Layout.replicated(value.shape))
        shown = name or self.options.names.get(node.name, node.name)
        origin = Origin(shown, backward=self.values.backward)
        dtypes = self.options.state_sharding.get(name or "", StateSharding()).dtypes
        taken = value.to(dtypes.master) if dtypes else value
        holder = self.local.placeholder(shown, taken, without_axes(layout, self.mesh.sub_batch_axes), origin)
        self.values.canonical[node] = self.values.current_sub_batch(holder, layout, origin), layout
        if name is not None:
            self.values.parameters[node] = name
            if node.name in self.options.sources:
                self.values.state_layouts[name] = layout

    def _emit(self, node: fx.Node) -> None:
        """Emit an op in its local form, at the layouts that its strategy or its inputs ask for."""
        # 1. Constants and views are emitted where they are read, items of an op with that op.
        if node not in self.dependent:
            return self._emit_constant(node)
        if node.target is operator.getitem:
            return None
        rule = find_rule(node)
        if rule is not None and rule.kind == "view":
            return None
        # 2. The assignment: that of the strategy, or of the op's partner (an op of the forward), or the one that
        #    follows from the layouts of the inputs.
        bound = bound_rule(node)
        arguments = tensor_args(node)
        self.values.current, self.values.all_sub_batches = node, self._takes_all_sub_batches(node)
        explicit = self.options.assignments.get(node.name)
        partner = rule.partner(node) if rule is not None and rule.partner is not None else None
        if partner is not None:
            explicit = self.assigned[partner]
        arrivals = self.arrivals.of(node, explicit is None)
        linear, summed_to = linear_in(node), gradient_numel(node)
        choice = self._follow(bound, rule, arrivals, linear, summed_to)
        if explicit is not None:
            explicit = _with_time_axes(explicit, choice.assignment, bound)
        # 3. An assignment may split a loop that the op itself cannot split, where the op can be decomposed.
        if explicit is not None and (blocked := {axis for axis, name in explicit.items if bound.factor(name).blocked}):
            if rule is None or rule.decompose is None:
                raise LayoutError(
                    f"{info(node).op}: the loops {sorted(dict(explicit.items)[axis] for axis in blocked)} of "
                    f"{node.target} ({node.name}) cannot be split, but {explicit} gives them axes: use other loops"
                )
            explicit, choice = None, replace(choice, blocked=choice.blocked | blocked)
        # 4. The layouts of inputs and outputs: of the explicit assignment, or as they follow from the inputs. An op
        #    that has to be decomposed is emitted part by part.
        if explicit is not None and explicit != Assignment.of(choice.assignment):
            assignment = explicit.as_dict()
            wanted = accept_own_partials(rule, assignment, input_layouts(bound, assignment))
            sums = passing_sums(linear, arrivals, self.mesh, summed_to, assignment)
            wanted = tuple(
                attainable_layout(want, self.values.layout(argument))
                for want, argument in zip(sums.of_inputs(wanted), arguments)
            )
            results = sums.of_outputs(output_layouts(bound, assignment, self.mesh), self.mesh)
        else:
            if choice.blocked and rule is not None and rule.decompose is not None:
                parents = [source_of(argument)[0] for argument in arguments]
                for part in bind_new(decompose(node, rule.decompose, self.options.known), parents):
                    self.dependent.add(part)
                    self.values.note_input_only(part, self.options.inputs)
                    self._emit(part)
                return None
            assignment, wanted, results = choice.assignment, choice.inputs, choice.outputs
        # 5. Bring the inputs to their layouts and emit the op. An input without elements is taken as it is.
        self.assigned[node] = Assignment.of(assignment)
        origin = Origin(info(node).op, backward=self.values.backward)
        wanted = tuple(
            want if argument.meta["val"].numel() else self.values.layout(argument)
            for argument, want in zip(arguments, wanted)
        )
        values = iter([self.values.at_layout(argument, want) for argument, want in zip(arguments, wanted)])
        emitter = OpEmitter(self.local, self.values.canonical, node, values, wanted, results, assignment, bound, origin)
        self._record(node, emitter.emit(rule), results)
        return None

    def _takes_all_sub_batches(self, node: fx.Node) -> bool:
        """Whether an op takes all sub-batches at once, because its module is `exclude_from_sub_batches`.

        An op of no module, such as a sum of gradients, does so if the producer of one of its inputs does.
        """
        if info(node).op != node.name or not self.options.exclude_from_sub_batches:
            return any_covers(self.options.exclude_from_sub_batches, info(node).op)
        sources = [source_of(value)[0] for value in node.all_input_nodes]
        return any(any_covers(self.options.exclude_from_sub_batches, info(source).op) for source in sources)

    def _follow(
        self,
        bound: BoundRule,
        rule: Rule | None,
        arrivals: Sequence[OpInput],
        linear: Sequence[tuple[int, ...]],
        summed_to: int,
    ) -> OpSharding:
        """How an op is sharded by following its inputs. Equal layers share one result."""
        key = bound, id(rule), tuple(arrivals), tuple(linear), summed_to
        found = self.followed.get(key)
        if found is None:
            found = self.followed[key] = rule, follow(bound, rule, arrivals, self.mesh, linear, summed_to)
        return found[1]

    def _emit_constant(self, node: fx.Node) -> None:
        """Note a constant, which is emitted where it is read.

        A constant of the model, one that is no tensor, and one item of an op's several results are emitted now.
        """
        value, origin = node.meta["val"], Origin(info(node).op, backward=self.values.backward)
        if node.op == "get_attr":
            written = self.local.constant(origin, node)
        elif isinstance(value, torch.Tensor) and node.target is not operator.getitem:
            self.values.constants.add(node)
            return
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.replicated_constant)
            written = self.local.call(origin, node.target, *args, **kwargs)  # type: ignore[arg-type]
        layout = Layout.replicated(value.shape) if isinstance(value, torch.Tensor) else Layout(())
        self.values.canonical[node] = written, layout

    def _record(self, node: fx.Node, written: fx.Node, layouts: Sequence[Layout]) -> None:
        """Note the local nodes and layouts of an op's outputs. An op with several is read through `getitem` nodes."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            check_shape(node, written.meta["val"], layouts[0])
            annotate_layouts(written, layouts)
            self.values.canonical[node] = self._join_slices(node, written, layouts[0])
            return
        annotate_layouts(written, layouts)
        for user in node.users:
            if user.target is operator.getitem and isinstance(user.meta.get("val"), torch.Tensor):
                _, index = source_of(user)
                origin = Origin(info(node).op, backward=info(written).backward)
                item = self.local.call(origin, operator.getitem, written, user.args[1])
                layout = layouts[index] if user.meta["val"].numel() else Layout.replicated(user.meta["val"].shape)
                check_shape(user, item.meta["val"], layout)
                annotate_layouts(item, (layout,))
                self.values.canonical[user] = self._join_slices(user, item, layout)

    def _join_slices(self, node: fx.Node, written: fx.Node, layout: Layout) -> tuple[fx.Node, Layout]:
        """The result of an op with its slices joined. Slices of a gradient stay apart: they are reduced one by one."""
        if is_gradient(node):
            return written, layout
        origin = Origin(info(node).op, backward=self.values.backward)
        return self.local.join_steps(written, layout, origin, self.mesh.slice_axes)


def _with_time_axes(explicit: Assignment, followed: Mapping[Axis, str], bound: BoundRule) -> Assignment:
    """A strategy's assignment of mesh axes, with the time axes that the inputs bring: strategies only know devices.

    A loop that is too small to be split over its mesh axis and the time axes together is not split over the mesh axis:
    the devices along it compute the same.
    """
    found = {axis: name for axis, name in followed.items() if axis.kind == "time"}
    if not found:
        return explicit
    sizes, timed = bound.sizes(), set(found.values())
    for axis, name in explicit.items:
        mine = [other for other, its in found.items() if its == name]
        if name not in timed or sizes[name] % axes_size([axis, *mine]) == 0:
            found[axis] = name
    return Assignment.of(found)
