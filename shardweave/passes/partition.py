"""The SPMD partitioner: the pass `Shard` turns the global joint graph into the local graph that every rank runs.

`Shard` emits each op once, in the local form that its strategy asks for, and the collectives that bring its inputs to
the layouts that this form needs. An op without a strategy follows its inputs (`sharding.follow`).

The work is divided among four classes:

`sharded_values.ShardedValues`
    knows which local node holds each global value, and at which layout, and brings it to another layout on request.
`InputArrivals`
    says at which layouts the inputs of an op are available, where other readers of the same value already need it
    gathered or reduce-scattered.
`StepOutputs`
    emits the outputs of the step: results at the layouts that the caller asks for, and gradients at the layout of the
    optimizer's states.
`Sharder`
    walks over the graph and emits op after op.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

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
    axes_size,
    input_layouts,
    output_layouts,
    sliced_like,
    without_axes,
)
from shardweave.passes.base import Pass, Property
from shardweave.passes.sharded_values import (
    ShardedValues,
    StateSharding,
    annotate_layouts,
    bound_rule,
    check_shape,
)
from shardweave.passes.spmd_builder import LocalGraph, OpEmitter, Origin, remove_dead
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
            if (changed := self.options.mutated.get(index)) is not None:
                wanted = self._at_rest(changed, value)
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
        at_rest = self._at_rest(name, value)
        first = self.values.gradient_layouts.get(name, at_rest) if self.options.all_reduce_gradients else at_rest
        summed = self._accumulated if self.options.accumulates else self._reduced
        found = summed(value, first, dtypes.reduced, origin)
        found = self.local.redistribute(found, first, at_rest, origin)
        return self.local.cast(found, dtypes.master, origin)

    def _at_rest(self, name: str, value: fx.Node) -> Layout:
        """The layout of a parameter's states."""
        known = self.values.state_layouts.get(name) or self.values.state_sharding.get(name, StateSharding()).at_rest
        return known or Layout.replicated(value.meta["val"].shape)

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
    mutated: Mapping[int, str] = field(default_factory=dict)
    """The parameters that have outputs as their new values, by index: each gets the layout of its states."""

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
