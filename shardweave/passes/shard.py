"""Shard: the global joint graph becomes the local one that every rank runs, with its collectives.

Every op is written once, at its strategy's layout; ops without one *follow* their inputs. Views are transparent: a
layout change is made at the value that they look at, once for each target layout, and the views are written again
on the result. A partial sum passes views and sums with one user, and is reduced where it is first used otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardweave.errors import LayoutError
from shardweave.ir import META, Assignment, Axis, BoundRule, Layout, Mesh, NodeInfo
from shardweave.passes.annotate import bind_new, decompose, depends_on_inputs, graph_outputs, info, source_of
from shardweave.passes.emitter import OpEmitter
from shardweave.passes.follow import Arrival, Choice, accepting, follow, met, passing_times
from shardweave.passes.layouts import cut_as, drop, input_layouts, output_layouts
from shardweave.passes.local import TAKEN, LocalGraph, Origin, remove_dead
from shardweave.passes.modules import module_of
from shardweave.passes.recompute import checkpoint_of
from shardweave.passes.rules import find_rule, is_view
from shardweave.passes.rules.linear import linear_in
from shardweave.passes.rules.registry import Rule, tensor_args
from shardweave.passes.values import Rest, Values, annotate_layouts, bound_rule, check_shape
from shardweave.precision import Dtypes

aten = torch.ops.aten


@dataclass(frozen=True)
class Shard:
    """Write the local graph.

    Requires an annotated joint graph; ensures that every node has its local fake value and its layouts, and that
    every started collective is waited for.
    """

    name = "shard"
    mesh: Mesh
    """The axes, in layout order."""
    assignments: Mapping[str, Assignment]
    """The ops that do not follow their inputs, by node name."""
    sources: Mapping[str, Layout]
    """Where inputs, buffers and tangents lie, by placeholder, and parameters that may not rest elsewhere; what is not
    named is whole."""
    outputs: Sequence[Layout | None]
    """Where the graph's outputs are wanted; None: as they lie, and for a gradient, where its parameter rests."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """The parameters' names, by placeholder."""
    tangents: Mapping[str, int] = field(default_factory=dict)
    """The output, counted over all, that a tangent's placeholder belongs to: it lies as that output."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names of buffers and inputs, by placeholder."""
    inputs: Collection[str] = ()
    """The placeholders of a call's inputs."""
    gradients: Sequence[str] = ()
    """The parameters whose gradients are the last outputs."""
    rests: Mapping[str, Rest] = field(default_factory=dict)
    """The axes that a parameter and its states rest on, beside those of the layout that it is first needed in."""
    accumulates: bool = False
    """Gradients are added up over several runs of the graph: see `Sharder.accumulators`."""
    known: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    """What local ops give, where graphs of the same fake mode have been written before: see `LocalGraph`."""
    whole_sums: bool = False
    """Each device gets the whole sum of the gradients that it adds up, of which its states take a part."""

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        return Sharder(self, graph_module).run()


class Sharder(Values):
    """One run of the pass: the local graph so far, and which layout each global value has."""

    def __init__(self, options: Shard, graph_module: fx.GraphModule) -> None:
        fake = next(
            node.meta["val"].fake_mode
            for node in graph_module.graph.nodes
            if hasattr(node.meta.get("val"), "fake_mode")
        )
        super().__init__(
            LocalGraph(options.mesh, fake, known=options.known), options.mesh, options.names, options.rests
        )
        self.options, self.module = options, graph_module
        self.results: dict[int, Any] = {}
        self.assigned: dict[fx.Node, Assignment] = {}
        self.lies: dict[int, Layout] = {}
        """Where the outputs of the forward lie."""
        self.inside: dict[int, Layout] = {}
        """Where they lie in each step of the woven axes."""
        self.followed: dict[object, tuple[Rule | None, Choice]] = options.known.setdefault(("follow", options.mesh), {})
        self.accumulators: dict[str, fx.Node] = {}
        """For each parameter with a gradient the node that adds the gradient to the sum of those before."""

    def run(self) -> fx.GraphModule:
        """The local graph; `rests` then holds where each parameter rests between steps."""
        graph, ended = self.module.graph, False
        self.dependent = depends_on_inputs(graph)
        for node in list(graph.nodes):
            self._note_given(node)
            self.backward = info(node).backward
            self.local.checkpoint = checkpoint_of(node)
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self._outputs(graph, backward=True)
            else:
                if self.backward and not ended:
                    self._outputs(graph, backward=False)
                    self.backward = ended = True
                self._node(node)
        totals = [total.part for total in self.totals]
        out = self.local.graph.output((*(self.results[index] for index in sorted(self.results)), *totals))
        out.meta[META] = NodeInfo(op="output")
        remove_dead(self.local.graph)
        if not self.local.seed.users:
            self.local.graph.erase_node(self.local.seed)
        self.local.graph.lint()
        return module_of(self.module, self.local.graph)

    # -- sources and sinks

    def _placeholder(self, node: fx.Node) -> None:
        if node.name in self.options.tangents:
            return  # written once its output is
        value = node.meta["val"]
        name = self.options.parameters.get(node.name)
        layout = self.options.sources.get(node.name, Layout.replicated(value.shape))
        shown = name or self.options.names.get(node.name, node.name)
        origin = Origin(shown, backward=self.backward)
        dtypes = self.rest_axes.get(name or "", Rest()).dtypes
        taken = value.to(dtypes.master) if dtypes else value
        holder = self.local.placeholder(shown, taken, drop(layout, self.mesh.woven), origin)
        self.canonical[node] = self._step_of(holder, layout, origin), layout
        if name is not None:
            self.parameters[node] = name
            if node.name in self.options.sources:
                self.rests[name] = layout

    def _step_of(self, holder: fx.Node, layout: Layout, origin: Origin) -> fx.Node:
        """The step at `layout` of what comes into the graph with all steps of the woven axes."""
        whole = drop(layout, self.mesh.woven)
        if whole == layout:
            return holder
        step = self.local.redistribute(holder, whole, layout, replace(origin, reason=TAKEN), lambda *_: None)
        annotate_layouts(step, (layout,))
        return step

    def _outputs(self, graph: fx.Graph, backward: bool) -> None:
        """Write the outputs of the forward, before its first backward node, or those of the backward."""
        values = graph_outputs(graph)
        written = bool(self.results)
        first_gradient = len(values) - len(self.options.gradients)
        for index, value in enumerate(values):
            if index in self.results:
                continue
            name = self.options.gradients[index - first_gradient] if index >= first_gradient else None
            if not isinstance(value, fx.Node):
                self.results[index] = value
            elif name is None and not info(value).backward:
                self.backward = False
                self.inside[index] = (self.options.outputs[index] or self.layout(value)).without_partial()
                self.results[index], self.lies[index] = self._returned(value, self.options.outputs[index])
            elif backward and name is not None:
                self.backward = True
                self.results[index] = self._gradient(name, value)
            elif backward:
                self.backward = True
                self.results[index], _ = self._returned(value, self.options.outputs[index])

        if not written:
            self._tangents(graph)

    def _returned(self, value: fx.Node, wanted: Layout | None) -> tuple[fx.Node, Layout]:
        """An output, and where it goes: as it is wanted, or as it lies, with the steps of woven axes together.

        To sum it over micro-batches is for the caller.
        """
        have = self.layout(value)
        want = drop(wanted or have.without_partial(), self.mesh.woven)
        times = tuple((axis, op) for axis, op in have.partial if axis in self.mesh.times)
        want = replace(want, partial=(*want.partial, *times))
        if not self._is_woven(have):
            return self.value(value, want), want
        origin = self._origin(value, have)
        node, have = self.local.ended(self.value(value, have), have, origin, self.mesh.unrolled)
        return self.local.redistribute(node, have, want, origin, lambda *_: None), want

    def _is_woven(self, layout: Layout) -> bool:
        """Whether a value differs from step to step of an unrolled axis."""
        return not set(self.mesh.unrolled).isdisjoint((*layout.shard_axes, *layout.partial_axes))

    def _gradient(self, name: str, value: fx.Node) -> fx.Node:
        """The gradient of a parameter where its states rest, summed in the dtype for that, then in its master's."""
        origin = Origin(name, "gradient", "gradient", True)
        dtype = value.meta["val"].dtype
        dtypes = self.rest_axes.get(name, Rest()).dtypes or Dtypes(dtype, dtype)
        rests = self.rests.get(name) or Layout.replicated(value.meta["val"].shape)
        first = self.sums.get(name, rests) if self.options.whole_sums else rests
        summed = self._added if self.options.accumulates else self._summed
        found = summed(value, first, dtypes.reduced, origin)
        found = self.local.redistribute(found, first, rests, origin, lambda *_: None)
        return self.local.cast(found, dtypes.master, origin)

    def _added(self, value: fx.Node, want: Layout, dtype: torch.dtype, origin: Origin) -> fx.Node:
        """A gradient at `want`, together with those of the runs before.

        It is brought to where they are added up (over the other devices it stays a partial sum) and added to their sum;
        only that is brought on.
        """
        name, have = origin.op, drop(self.layout(value), self.mesh.unrolled)
        sums = self.sums.get(name, want)
        partial = [item for item in have.partial if item[0].kind == "space" and item[1] == "sum"]
        lies = replace(sums, partial=tuple(item for item in partial if item[0] not in sums.shard_axes))
        times = tuple((axis, "sum") for axis in self.mesh.times)
        mine = self._summed(value, replace(lies, partial=(*lies.partial, *times)), dtype, origin)
        with self.local.fake:
            like = torch.empty((), dtype=dtype, device=value.meta["val"].device)
        before = self.local.placeholder(f"sum_{name}", like, lies, origin, last=True)
        total = self.local.call(origin, aten.add_.Tensor, before, mine)
        annotate_layouts(total, (lies,))
        self.accumulators[name] = total
        return self.local.redistribute(total, lies, want, origin, lambda *_: None)

    def _summed(self, value: fx.Node, want: Layout, dtype: torch.dtype, origin: Origin) -> fx.Node:
        """A gradient at `want`, what is partial there summed in this dtype; over woven axes first, slice by slice."""
        have = self.layout(value)
        if not self._is_woven(have) and (dtype == value.meta["val"].dtype or have == want):
            return self.value(value, want, origin)
        cast = self.local.cast(self.value(value, have, origin), dtype, origin)
        cast, have = self.local.ended(cast, have, origin, self.mesh.woven)
        cut = cut_as(want, have, self.mesh.slices)
        if cut is None:
            cast, have = self.local.ended(cast, have, origin, self.mesh.slices)
        cast = self.local.redistribute(cast, have, cut or want, origin, lambda *_: None)
        return self.local.ended(cast, cut or want, origin, self.mesh.slices)[0]

    def _tangents(self, graph: fx.Graph) -> None:
        last = [node for node in self.local.graph.nodes if node.op == "placeholder"][-1]
        for node in graph.nodes:
            if node.op == "placeholder" and node.name in self.options.tangents:
                # Each part of a sum has the sum's tangent.
                layout = self.inside[self.options.tangents[node.name]]
                origin = Origin(node.name, backward=True)
                with self.local.graph.inserting_after(last):
                    last = self.local.placeholder(node.name, node.meta["val"], drop(layout, self.mesh.woven), origin)
                self.canonical[node] = self._step_of(last, layout, origin), layout

    def _note_given(self, node: fx.Node) -> None:
        """Whether a value depends on inputs alone."""
        if node.op == "placeholder":
            known = node.name in self.options.inputs
        else:
            known = node.op == "call_function" and all(source in self.given for source in node.all_input_nodes)
        if known:
            self.given.add(node)

    # -- ops

    def _node(self, node: fx.Node) -> None:
        if node not in self.dependent:
            return self._constant_node(node)
        if node.target is operator.getitem:
            return None  # written with its parent
        rule = find_rule(node)
        if rule is not None and rule.kind == "view":
            return None  # written when it is asked for
        bound = bound_rule(node)
        arguments = tensor_args(node)
        self.current = node
        explicit = self.options.assignments.get(node.name)
        partner = rule.partner(node) if rule is not None and rule.partner is not None else None
        if partner is not None:
            explicit = self.assigned[partner]
        arrivals = [self.arrival(argument) for argument in arguments]
        if explicit is None:
            arrivals = [self._as_read_elsewhere(node, each, have) for each, have in zip(arguments, arrivals)]
        linear = linear_in(node)
        choice = self._followed(bound, rule, arrivals, linear)
        if explicit is not None:
            explicit = _with_times(explicit, choice.assignment)
        if explicit is not None and (blocked := {axis for axis, name in explicit.items if bound.factor(name).blocked}):
            if rule is None or rule.decompose is None:
                raise LayoutError(
                    f"{info(node).op}: the loops {sorted(dict(explicit.items)[axis] for axis in blocked)} of "
                    f"{node.target} ({node.name}) cannot be split, but {explicit} gives them axes: use other loops"
                )
            explicit, choice = None, replace(choice, blocked=choice.blocked | blocked)
        if explicit is not None and explicit != Assignment.of(choice.assignment):
            assignment = explicit.as_dict()
            wanted = accepting(rule, assignment, input_layouts(bound, assignment, self.mesh))
            times = passing_times(linear, arrivals, self.mesh)
            wanted = tuple(
                met(want, self.layout(argument)) for want, argument in zip(times.of_inputs(wanted), arguments)
            )
            results = times.of_outputs(output_layouts(bound, assignment, self.mesh))
        else:
            if choice.blocked and rule is not None and rule.decompose is not None:
                parents = [source_of(argument)[0] for argument in arguments]
                for part in bind_new(decompose(node, rule.decompose, self.options.known), parents):
                    self.dependent.add(part)
                    self._note_given(part)
                    self._node(part)
                return None
            assignment, wanted, results = choice.assignment, choice.inputs, choice.outputs
        self.assigned[node] = Assignment.of(assignment)
        origin = Origin(info(node).op, backward=self.backward)
        values = iter([self.value(argument, want) for argument, want in zip(arguments, wanted)])
        emitter = OpEmitter(self.local, self.canonical, node, values, wanted, results, assignment, bound, origin)
        self._record(node, emitter.emit(rule), results)
        return None

    def _followed(
        self, bound: BoundRule, rule: Rule | None, arrivals: Sequence[Arrival], linear: Sequence[tuple[int, ...]]
    ) -> Choice:
        """How an op is spread by its inputs, worked out once for equal layers."""
        key = bound, id(rule), tuple(arrivals), tuple(linear)
        if key not in self.followed:
            self.followed[key] = rule, follow(bound, rule, arrivals, self.mesh, linear)
        return self.followed[key][1]

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
            decides = user is not node and others and user.name not in self.options.assignments
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

    def _constant_node(self, node: fx.Node) -> None:
        """A constant is written when it is asked for; now only where it is no tensor, or one of an op's several."""
        value = node.meta["val"]
        if node.op == "get_attr":
            written = self.local.constant(Origin(info(node).op, backward=self.backward), node)
        elif isinstance(value, torch.Tensor) and node.target is not operator.getitem:
            self.constants.add(node)
            return
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._whole_constant)
            written = self.local.call(Origin(info(node).op, backward=self.backward), node.target, *args, **kwargs)  # type: ignore[arg-type]
        layout = Layout.replicated(value.shape) if isinstance(value, torch.Tensor) else Layout(())
        self.canonical[node] = written, layout

    def _record(self, node: fx.Node, written: fx.Node, layouts: Sequence[Layout]) -> None:
        """Remember where the outputs lie; a node with several outputs is read through its `getitem` nodes."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            check_shape(node, written.meta["val"], layouts[0])
            annotate_layouts(written, layouts)
            self.canonical[node] = self._whole(node, written, layouts[0])
            return
        annotate_layouts(written, layouts)
        for user in node.users:
            if user.target is operator.getitem and isinstance(user.meta.get("val"), torch.Tensor):
                _, index = source_of(user)
                origin = Origin(info(node).op, backward=info(written).backward)
                item = self.local.call(origin, operator.getitem, written, user.args[1])
                check_shape(user, item.meta["val"], layouts[index])
                annotate_layouts(item, (layouts[index],))
                self.canonical[user] = self._whole(user, item, layouts[index])

    def _whole(self, node: fx.Node, written: fx.Node, layout: Layout) -> tuple[fx.Node, Layout]:
        """What an op gives, its slices together, and where; those of a gradient go to its states one by one."""
        if _is_gradient(node):
            return written, layout
        return self.local.ended(written, layout, Origin(info(node).op, backward=self.backward), self.mesh.slices)


def _is_gradient(node: fx.Node) -> bool:
    """Whether nothing of the backward reads a value of it, views looked through, but its output."""
    users = list(node.users)
    return info(node).backward and all(user.op == "output" or (is_view(user) and _is_gradient(user)) for user in users)


def _with_times(explicit: Assignment, followed: Mapping[Axis, str]) -> Assignment:
    """An assignment with the time axes that inputs bring: plans and strategies are about devices."""
    times = {axis: name for axis, name in followed.items() if axis.kind == "time"}
    return Assignment.of(times | explicit.as_dict()) if times else explicit
