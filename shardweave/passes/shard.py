"""Shard: the global joint graph becomes the local one that every rank runs, with its collectives.

Every op is written once, at its strategy's layout; ops without one *follow* their inputs. Views are transparent: a
layout change is made at the value that they look at, once for each target layout, and the views are written again
on the result. A partial sum passes views and sums with one user, and is reduced where it is first used otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardweave.errors import LayoutError, VerifyError
from shardweave.ir import META, Assignment, Axis, BoundRule, Layout, Mesh, NodeInfo
from shardweave.passes.annotate import bind_new, decompose, depends_on_inputs, graph_outputs, info, source_of
from shardweave.passes.follow import Arrival, follow
from shardweave.passes.layouts import (
    drop,
    factors_of,
    input_layouts,
    outermost_first,
    output_layouts,
    rest_layout,
    through,
)
from shardweave.passes.local import LocalGraph, Origin
from shardweave.passes.rules import find_rule
from shardweave.passes.rules.registry import Rule, tensor_args


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
    gradients: Sequence[str] = ()
    """The parameters whose gradients are the last outputs."""
    rests: Mapping[str, tuple[Axis, ...]] = field(default_factory=dict)
    """The axes that a parameter's states rest on, beside those of the layout that it is first needed in."""

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        return Sharder(self, graph_module).run()


class Sharder:
    """One run of the pass: the local graph so far, and which layout each global value has."""

    def __init__(self, options: Shard, graph_module: fx.GraphModule) -> None:
        self.options = options
        self.module = graph_module
        self.mesh = options.mesh
        fake = next(
            node.meta["val"].fake_mode
            for node in graph_module.graph.nodes
            if hasattr(node.meta.get("val"), "fake_mode")
        )
        self.local = LocalGraph(options.mesh, fake)
        self.canonical: dict[fx.Node, tuple[fx.Node, Layout]] = {}
        self.memo: dict[tuple[fx.Node, Layout, bool], fx.Node] = {}
        self.parameters: dict[fx.Node, str] = {}
        self.rests: dict[str, Layout] = {}
        self.backward = False
        self.results: dict[int, Any] = {}

    def run(self) -> fx.GraphModule:
        """The local graph; `rests` then holds where each parameter rests."""
        graph = self.module.graph
        self.dependent = depends_on_inputs(graph)
        for node in list(graph.nodes):
            self.backward = info(node).backward
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self._outputs(graph, backward=True)
            else:
                if self.backward:
                    self._outputs(graph, backward=False)
                    self.backward = True
                self._node(node)
        out = self.local.graph.output(tuple(self.results[index] for index in sorted(self.results)))
        out.meta[META] = NodeInfo(op="output")
        _remove_dead(self.local.graph)
        self.local.graph.lint()
        module = fx.GraphModule(torch.nn.Module(), self.local.graph)
        module.meta.update(self.module.meta)
        return module

    # -- sources and sinks

    def _placeholder(self, node: fx.Node) -> None:
        if node.name in self.options.tangents:
            return  # written once its output is
        value = node.meta["val"]
        name = self.options.parameters.get(node.name)
        layout = self.options.sources.get(node.name, Layout.replicated(value.shape))
        shown = name or self.options.names.get(node.name, node.name)
        origin = Origin(shown, backward=self.backward)
        self.canonical[node] = self.local.placeholder(shown, value, layout, origin), layout
        if name is not None:
            self.parameters[node] = name
            if node.name in self.options.sources:
                self.rests[name] = layout

    def _outputs(self, graph: fx.Graph, backward: bool) -> None:
        """Write the outputs of the forward, before its first backward node, or those of the backward."""
        values = graph_outputs(graph)
        written = bool(self.results)
        lies: dict[int, Layout] = {}
        first_gradient = len(values) - len(self.options.gradients)
        for index, value in enumerate(values):
            if index in self.results:
                continue
            name = self.options.gradients[index - first_gradient] if index >= first_gradient else None
            if not isinstance(value, fx.Node):
                self.results[index] = value
            elif name is None and not info(value).backward:
                self.backward = False
                want = self.options.outputs[index] or self._whole(value)
                self.results[index] = self.value(value, want)
                lies[index] = want
            elif backward and name is not None:
                self.backward = True
                want = self.rests.get(name) or Layout.replicated(value.meta["val"].shape)
                self.results[index] = self.value(value, want, Origin(name, "gradient", "gradient", True))
            elif backward:
                self.backward = True
                self.results[index] = self.value(value, self.options.outputs[index] or self._whole(value))

        if not written:
            self._tangents(graph, lies)

    def _tangents(self, graph: fx.Graph, lies: Mapping[int, Layout]) -> None:
        last = [node for node in self.local.graph.nodes if node.op == "placeholder"][-1]
        for node in graph.nodes:
            if node.op == "placeholder" and node.name in self.options.tangents:
                layout = lies[self.options.tangents[node.name]]
                with self.local.graph.inserting_after(last):
                    last = self.local.placeholder(node.name, node.meta["val"], layout, Origin(node.name, backward=True))
                self.canonical[node] = last, layout

    def _whole(self, value: fx.Node) -> Layout:
        return self.layout(value).without_partial()

    # -- ops

    def _node(self, node: fx.Node) -> None:
        if node not in self.dependent:
            return self._constant(node)
        if node.target is operator.getitem:
            return None  # written with its parent
        rule = find_rule(node)
        if rule is not None and rule.kind == "view":
            return None  # written when it is asked for
        bound = info(node).rule
        assert bound is not None
        arguments = tensor_args(node)
        explicit = self.options.assignments.get(node.name)
        choice = follow(bound, rule, [self._arrival(argument) for argument in arguments], self.mesh)
        if explicit is not None and explicit != Assignment.of(choice.assignment):
            assignment = explicit.as_dict()
            wanted = input_layouts(bound, assignment, self.mesh)
            results = output_layouts(bound, assignment, self.mesh)
        else:
            if choice.blocked and rule is not None and rule.decompose is not None:
                parents = [source_of(argument)[0] for argument in arguments]
                for part in bind_new(decompose(node, rule.decompose), parents):
                    self.dependent.add(part)
                    self._node(part)
                return None
            assignment, wanted, results = choice.assignment, choice.inputs, choice.outputs
        origin = Origin(info(node).op, backward=self.backward)
        values = iter([self.value(argument, want) for argument, want in zip(arguments, wanted)])
        emitter = _Emitter(self, node, values, wanted, results, assignment, bound, origin)
        self._record(node, emitter.emit(rule), results)
        return None

    def _constant(self, node: fx.Node) -> None:
        origin = Origin(info(node).op, backward=self.backward)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda leaf: self.canonical[leaf][0])
        written = self.local.call(origin, node.target, *args, **kwargs)  # type: ignore[arg-type]
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            self.canonical[node] = written, Layout.replicated(value.shape)
        else:
            self.canonical[node] = written, Layout(())

    def _record(self, node: fx.Node, written: fx.Node, layouts: Sequence[Layout]) -> None:
        """Remember where the outputs lie; a node with several outputs is read through its `getitem` nodes."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            _check_shape(node, written.meta["val"], layouts[0])
            _annotate(written, layouts)
            self.canonical[node] = written, layouts[0]
            return
        _annotate(written, layouts)
        for user in node.users:
            if user.target is operator.getitem and isinstance(user.meta.get("val"), torch.Tensor):
                _, index = source_of(user)
                origin = Origin(info(node).op, backward=info(written).backward)
                item = self.local.call(origin, operator.getitem, written, user.args[1])
                _check_shape(user, item.meta["val"], layouts[index])
                _annotate(item, (layouts[index],))
                self.canonical[user] = item, layouts[index]

    # -- values at layouts

    def _arrival(self, value: fx.Node) -> Arrival:
        root = self._root(value)
        return Arrival(self.layout(value), value.meta["val"].numel(), root in self.parameters, self._single_user(value))

    def _root(self, value: fx.Node) -> fx.Node:
        while value not in self.canonical:
            value = tensor_args(value)[0]
        return value

    def _single_user(self, value: fx.Node) -> bool:
        """Whether the value that `value` looks at has one user, views looked through."""
        while True:
            if len(value.users) != 1:
                return False
            if value in self.canonical:
                return True
            value = tensor_args(value)[0]

    def layout(self, value: fx.Node) -> Layout:
        """Where a global value lies now."""
        if value in self.canonical:
            return self.canonical[value][1]
        return self._view(value)[1]

    def _view(self, view: fx.Node) -> tuple[Layout, Layout]:
        """Where a view wants what it looks at, and where it then lies itself: axes that it would cut are gathered."""
        bound = _bound(view)
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
        # A gathered parameter is freed after its forward use: the backward gathers it again.
        key = node, want, self.backward and root in self.parameters
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._materialise(node, want, origin)
        return found

    def _materialise(self, node: fx.Node, want: Layout, origin: Origin | None) -> fx.Node:
        if node in self.canonical:
            written, have = self.canonical[node]
            if node in self.parameters and self.parameters[node] not in self.rests:
                have = self._rest(node, written, want)
            if have == want:
                return written
            origin = origin or self._origin(node, have)

            def reduced(result: fx.Node, layout: Layout) -> None:
                self.canonical[node] = result, layout

            return self.local.redistribute(written, have, want, origin, reduced)
        bound, rule = _bound(node), find_rule(node)
        source = tensor_args(node)[0]
        back = through(want, bound.outputs[0], bound.inputs[0], bound.sizes())
        if back is None:
            first, lies = self._view(node)
            where = origin or self._origin(node, lies)
            return self.local.redistribute(self.value(node, lies), lies, want, where, lambda *_: None)
        inner = self.value(source, back, origin)
        assert rule is not None
        where = Origin(info(node).op, backward=self.backward)
        emitter = _Emitter(self, node, iter([inner]), (back,), (want,), {}, bound, where)
        written = emitter.emit(rule)
        _check_shape(node, written.meta["val"], want)
        _annotate(written, (want,))
        return written

    def _rest(self, node: fx.Node, written: fx.Node, want: Layout) -> Layout:
        """Let a parameter rest as it is first needed, with its states spread further over its axes of rest."""
        name = self.parameters[node]
        taken = want.shard_axes
        axes = [axis for axis in self.options.rests.get(name, ()) if axis not in taken]
        layout = rest_layout(want, axes, self.mesh)
        value = node.meta["val"]
        with self.local.fake:
            written.meta["val"] = torch.empty(layout.local_shape, dtype=value.dtype, device=value.device)
        written.meta[META] = replace(info(written), layouts=(layout,))
        self.canonical[node] = written, layout
        self.rests[name] = layout
        return layout

    def _origin(self, node: fx.Node, have: Layout) -> Origin:
        if node in self.parameters:
            return Origin(self.parameters[node], "gather from rest", "parameter", self.backward)
        name = self.options.names.get(node.name) or info(node).op or node.name
        reason = f"sum of {name}" if have.partial else f"layout of {name}"
        return Origin(name, reason, "activation", self.backward)


class _Emitter:
    """What a rule's lowering sees of one op (see `registry.Emitter`)."""

    def __init__(
        self,
        sharder: Sharder,
        node: fx.Node,
        values: Any,
        inputs: Sequence[Layout],
        outputs: Sequence[Layout],
        assignment: Mapping[Axis, str],
        rule: BoundRule,
        origin: Origin,
    ) -> None:
        self._local, self._origin = sharder.local, origin
        self.node, self.rule = node, rule
        self.input_layouts, self.output_layouts = tuple(inputs), tuple(outputs)
        self.assignment: Mapping[Axis, str] = {axis: assignment[axis] for axis in outermost_first(assignment)}

        def local(leaf: fx.Node) -> Any:
            return next(values) if isinstance(leaf.meta.get("val"), torch.Tensor) else sharder.canonical[leaf][0]

        self.args: tuple[Any, ...] = fx.node.map_arg(node.args, local)
        names = [argument.name for argument in getattr(getattr(node.target, "_schema", None), "arguments", [])]
        ordered = sorted(node.kwargs, key=lambda name: names.index(name) if name in names else len(names))
        self.kwargs: dict[str, Any] = {name: fx.node.map_arg(node.kwargs[name], local) for name in ordered}

    def emit(self, rule: Rule | None) -> fx.Node:
        """Write the op in its local form."""
        if rule is not None and rule.lower is not None:
            return rule.lower(self)
        return self.call(self.node.target, *self.args, **self.kwargs)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._local.call(self._origin, target, *args, **kwargs)

    def offset(self, axes: Sequence[Axis], step: int) -> Any:
        return self._local.offset(self._origin, axes, step)


def _bound(node: fx.Node) -> BoundRule:
    rule = info(node).rule
    assert rule is not None
    return rule


def _annotate(node: fx.Node, layouts: Sequence[Layout]) -> None:
    """Note where a node's outputs lie; a view that turned out to be its base keeps what the base has."""
    if not info(node).layouts:
        node.meta[META] = replace(info(node), layouts=tuple(layouts))


def _check_shape(node: fx.Node, value: torch.Tensor, layout: Layout) -> None:
    if tuple(value.shape) != layout.local_shape:
        raise VerifyError(
            f"the local form of {node.target} ({node.name}, {info(node).op}) has the shape {tuple(value.shape)}, "
            f"its layout {layout} says {layout.local_shape}: its rule or its lowering is wrong"
        )


def _remove_dead(graph: fx.Graph) -> None:
    """Drop what nothing uses, collectives included: torch takes these for side effects."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
