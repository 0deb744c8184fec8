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
from shardweave.ir import META, Assignment, Axis, BoundRule, Layout, Mesh, NodeInfo, axes_size
from shardweave.passes.annotate import (
    bind_new,
    checkpoint_of,
    covered,
    decompose,
    depends_on_inputs,
    graph_outputs,
    info,
    source_of,
)
from shardweave.passes.emitter import OpEmitter
from shardweave.passes.follow import Arrival, Choice, accepting, follow, met, passing_sums
from shardweave.passes.layouts import drop, input_layouts, output_layouts
from shardweave.passes.local import TAKEN, LocalGraph, Origin, remove_dead
from shardweave.passes.modules import module_of
from shardweave.passes.results import Results, is_gradient
from shardweave.passes.rules import find_rule
from shardweave.passes.rules.linear import linear_in
from shardweave.passes.rules.registry import Rule, tensor_args
from shardweave.passes.values import Rest, annotate_layouts, bound_rule, check_shape

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
    undivided: Collection[str] = ()
    """Patterns of modules that take all steps of the woven axes at once."""

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        return Sharder(self, graph_module).run()


class Sharder(Results):
    """One run of the pass: the local graph so far, and which layout each global value has."""

    def __init__(self, options: Shard, graph_module: fx.GraphModule) -> None:
        fake = next(
            node.meta["val"].fake_mode
            for node in graph_module.graph.nodes
            if hasattr(node.meta.get("val"), "fake_mode")
        )
        super().__init__(
            LocalGraph(options.mesh, fake, known=options.known),
            options.mesh,
            options.names,
            options.rests,
            options.assignments,
            whole_sums=options.whole_sums,
            accumulates=options.accumulates,
        )
        self.options, self.module = options, graph_module
        self.results: dict[int, Any] = {}
        self.assigned: dict[fx.Node, Assignment] = {}
        self.lies: dict[int, Layout] = {}
        """Where the outputs of the forward lie."""
        self.inside: dict[int, Layout] = {}
        """Where they lie in each step of the woven axes."""
        self.followed: dict[object, tuple[Rule | None, Choice]] = options.known.setdefault(("follow", options.mesh), {})

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
                self.at_once = False
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
                self.results[index], self.lies[index] = self.returned(value, self.options.outputs[index])
            elif backward and name is not None:
                self.backward = True
                self.results[index] = self.gradient(name, value)
            elif backward:
                self.backward = True
                self.results[index], _ = self.returned(value, self.options.outputs[index])

        if not written:
            self._tangents(graph)

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
        self.current, self.at_once = node, self._takes_all(node)
        explicit = self.assignments.get(node.name)
        partner = rule.partner(node) if rule is not None and rule.partner is not None else None
        if partner is not None:
            explicit = self.assigned[partner]
        arrivals = self.arrivals_of(node, explicit is None)
        linear, summed_to = linear_in(node), node.meta["val"].numel() if is_gradient(node) else 0
        choice = self._followed(bound, rule, arrivals, linear, summed_to)
        if explicit is not None:
            explicit = _with_times(explicit, choice.assignment, bound)
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
            sums = passing_sums(linear, arrivals, self.mesh, summed_to, assignment)
            wanted = tuple(
                met(want, self.layout(argument)) for want, argument in zip(sums.of_inputs(wanted), arguments)
            )
            results = sums.of_outputs(output_layouts(bound, assignment, self.mesh), self.mesh)
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
        wanted = tuple(
            want if argument.meta["val"].numel() else self.layout(argument) for argument, want in zip(arguments, wanted)
        )  # a result that an op leaves without elements has no loop
        values = iter([self.value(argument, want) for argument, want in zip(arguments, wanted)])
        emitter = OpEmitter(self.local, self.canonical, node, values, wanted, results, assignment, bound, origin)
        self._record(node, emitter.emit(rule), results)
        return None

    def _takes_all(self, node: fx.Node) -> bool:
        """Whether an op takes all sub-batches at once; what is in no module, a sum of gradients, as what it reads."""
        if info(node).op != node.name or not self.options.undivided:
            return covered(self.options.undivided, info(node).op)
        sources = [source_of(value)[0] for value in node.all_input_nodes]
        return any(covered(self.options.undivided, info(source).op) for source in sources)

    def _followed(
        self,
        bound: BoundRule,
        rule: Rule | None,
        arrivals: Sequence[Arrival],
        linear: Sequence[tuple[int, ...]],
        summed_to: int,
    ) -> Choice:
        """How an op is spread by its inputs, worked out once for equal layers."""
        key = bound, id(rule), tuple(arrivals), tuple(linear), summed_to
        if key not in self.followed:
            self.followed[key] = rule, follow(bound, rule, arrivals, self.mesh, linear, summed_to)
        return self.followed[key][1]

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
                layout = layouts[index] if user.meta["val"].numel() else Layout.replicated(user.meta["val"].shape)
                check_shape(user, item.meta["val"], layout)
                annotate_layouts(item, (layout,))
                self.canonical[user] = self._whole(user, item, layout)

    def _whole(self, node: fx.Node, written: fx.Node, layout: Layout) -> tuple[fx.Node, Layout]:
        """What an op gives, its slices together, and where; those of a gradient go to its states one by one."""
        if is_gradient(node):
            return written, layout
        return self.local.ended(written, layout, Origin(info(node).op, backward=self.backward), self.mesh.slices)


def _with_times(explicit: Assignment, followed: Mapping[Axis, str], bound: BoundRule) -> Assignment:
    """An assignment with the time axes that inputs bring: plans and strategies are about devices.

    What a step is too small for, of an op where others meet, all devices compute.
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
