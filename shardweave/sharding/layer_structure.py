"""Layer deduplication: find the identical layers of a model and keep only a few of them in the graph.

Layers are modules with consecutive numbers (``blocks.3``). A *run* is a stretch of identical layers. Their nodes are
pairwise the same op on arguments of the same shapes, which come from the layer itself, from its neighbours or from
outside of all layers. `deduplicate_layers` removes all but the first few layers of a run, and makes the layers on both
sides of the gap neighbours. Costs and layouts of a layer that is kept hold for the removed layers too. A step of a
hundred layers is therefore priced, sharded and simulated as fast as a step of four.

`DeduplicatedStep.stands_for` maps a layer that is kept to the removed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from shardweave.ir import Captured
from shardweave.sharding.annotate import checkpoint_of, graph_outputs, layer_of
from shardweave.sharding.graphs import argument_key, module_of, op_name

Layer = str
LayerOptions = Callable[[str], Hashable]
"""The user's options for a module or parameter: layers with different options are not equal."""


@dataclass(frozen=True)
class LayerRun:
    """Equal layers, in the order of the model."""

    layers: tuple[Layer, ...]


def find_layer_runs(captured: Captured, options: LayerOptions = lambda name: None) -> list[LayerRun]:
    """The runs of two and more equal layers of a captured step."""
    layers = _Layers(captured.graph.graph, _states(captured), options)
    first, last = len(captured.mutated), len(captured.mutated) + len(captured.outputs)
    return layers.runs(shared=graph_outputs(captured.graph.graph)[first:last])


def layers_of_ops(graph: fx.Graph) -> dict[str, Layer]:
    """The layers of ops that have no module, by the ops' names.

    A gradient accumulation belongs to the last layer that adds to it.
    """
    layers = _Layers(graph, {})
    return {node.name: layer for node, layer in layers.of.items() if op_name(node) == node.name}


@dataclass(frozen=True)
class DeduplicatedStep:
    """A step from which layers were removed.

    Parameters
    ----------
    captured : Captured
        The step of the layers that are kept.
    runs : tuple of (LayerRun, int)
        The runs, and how many layers of each are kept.
    """

    captured: Captured
    runs: tuple[tuple[LayerRun, int], ...]

    @property
    def stands_for(self) -> dict[Layer, tuple[Layer, ...]]:
        """The removed layers, by the last layer of their run that is kept."""
        return {run.layers[left - 1]: run.layers[left:] for run, left in self.runs if left < len(run.layers)}


def deduplicate_layers(captured: Captured, kept_counts: Mapping[LayerRun, int]) -> DeduplicatedStep:
    """Keep only so many of the first layers of each run, at least one. Other runs keep all layers.

    Examples
    --------
    >>> import torch
    >>> from shardweave.compiler.capture import capture
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(9)), torch.nn.Flatten(0))
    >>> captured = capture(model, torch.zeros(2, 4))
    >>> (run,) = find_layer_runs(captured)
    >>> run.layers[0], run.layers[-1]
    ('1', '7')
    >>> folded = deduplicate_layers(captured, {run: 2})
    >>> [name for name in folded.captured.gradients if name.endswith("bias")], folded.stands_for["2"]
    (['0.bias', '1.bias', '2.bias', '8.bias'], ('3', '4', '5', '6', '7'))
    """
    layers = _Layers(captured.graph.graph, _states(captured))
    gone = {layer for run, count in kept_counts.items() for layer in run.layers[count:]}
    gone_states = {name for name in _states(captured).values() if layer_of(name) in gone}
    names = (*captured.mutated, *captured.outputs, *captured.input_gradients, *captured.gradients)
    results = zip(names, graph_outputs(captured.graph.graph), strict=True)
    closed = [(run.layers[count - 1], run.layers[-1]) for run, count in kept_counts.items() if count < len(run.layers)]
    kept = [value for name, value in results if name not in gone_states]
    graph = module_of(captured.graph, layers.without(gone, closed, kept))

    def staying(names: Mapping[str, str]) -> dict[str, str]:
        return {node: name for node, name in names.items() if name not in gone_states}

    smaller = replace(
        captured,
        graph=graph,
        parameters=staying(captured.parameters),
        buffers=staying(captured.buffers),
        gradients=tuple(name for name in captured.gradients if name not in gone_states),
        mutated=tuple(name for name in captured.mutated if name not in gone_states),
    )
    return DeduplicatedStep(smaller, tuple((run, min(count, len(run.layers))) for run, count in kept_counts.items()))


def _states(captured: Captured) -> dict[str, str]:
    return {**captured.parameters, **captured.buffers}


class _Layers:
    """The nodes of each layer of a graph."""

    def __init__(self, graph: fx.Graph, states: Mapping[str, str], options: LayerOptions = lambda name: None) -> None:
        self.graph, self.states, self.options = graph, states, options
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self.of: dict[fx.Node, Layer] = {}
        self.members: dict[Layer, list[fx.Node]] = {}
        for node in graph.nodes:
            layer = self._layer(node)
            if layer:
                self.of[node] = layer
                self.members.setdefault(layer, []).append(node)
        self.place = {node: index for nodes in self.members.values() for index, node in enumerate(nodes)}

    def _layer(self, node: fx.Node) -> Layer:
        """The layer of its module; of a gradient accumulation, which has none, the last layer that adds to it."""
        if node.op == "placeholder":
            return layer_of(self.states.get(node.name, ""))
        if node.op == "output":
            return ""
        module = op_name(node)
        if module != node.name or not node.all_input_nodes:
            return layer_of(module) if module != node.name else ""
        latest = max(node.all_input_nodes, key=self.position.__getitem__)
        return self.of.get(latest, "")

    def runs(self, shared: Sequence[Any]) -> list[LayerRun]:
        """Stretches of equal layers with consecutive numbers. A layer that computes a `shared` value is in none."""
        found: list[list[Layer]] = []
        before: Hashable = None
        outside = {self.of.get(value, "") for value in shared if isinstance(value, fx.Node)}
        for layer in sorted(self.members, key=_numbered):
            code = None if layer in outside else self._code(layer)
            if code is not None and code == before and found[-1][-1] == _neighbour(layer, -1):
                found[-1].append(layer)
            else:
                found.append([layer])
            before = code
        return [LayerRun(tuple(run)) for run in found if len(run) > 1]

    def _code(self, layer: Layer) -> Hashable | None:
        """A key that equal layers share; None if the layer cannot be removed.

        A layer cannot be removed if a node outside of its neighbours reads it, or if it has an op with several inputs
        and no module, as plans name such ops by number. One that is not called has nothing to remove.
        """
        near = {layer, _neighbour(layer, -1), _neighbour(layer, 1)}
        nodes = self.members[layer]
        if all(node.op == "placeholder" for node in nodes):
            return None
        for node in nodes:
            backward = node.meta.get("partitioner_tag") == "is_backward"
            if not backward and len(node.all_input_nodes) > 1 and op_name(node) == node.name:
                return None
            for user in node.users:
                if user.op != "output" and self.of.get(user) not in near:
                    return None
        return tuple(self._node_code(node, layer) for node in nodes)

    def _node_code(self, node: fx.Node, layer: Layer) -> Hashable:
        def reference(argument: fx.Node) -> Hashable:
            """Arguments are equal if they have the same position in the layer or a neighbour, or are one node."""
            where = {layer: 0, _neighbour(layer, -1): -1, _neighbour(layer, 1): 1}.get(self.of.get(argument, ""))
            return argument.name if where is None else (where, self.place[argument])

        constants = fx.map_arg((node.args, node.kwargs), lambda _: "_")
        name = self.states.get(node.name)
        known = None if name is None else name[len(layer) :], self.options(name or "")
        module = op_name(node)
        inside = (module[len(layer) :], self.options(module)) if layer_of(module) == layer else None
        return (
            node.op,
            str(node.target) if node.op != "placeholder" else "",
            tuple(map(reference, _arguments(node))),
            str(constants),
            argument_key(node.meta.get("val")),
            node.meta.get("partitioner_tag"),
            bool(checkpoint_of(node)),
            known,
            inside,
        )

    def without(self, gone: Set[Layer], closed: Sequence[tuple[Layer, Layer]], results: Sequence[Any]) -> fx.Graph:
        """The graph without the layers that are `gone`, with these results.

        `closed` has for each run the last layer that is kept and the last that is removed. The layer after the removed
        one becomes the neighbour of the kept one.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        twins = {}
        stands_in: dict[fx.Node, fx.Node] = {}
        for last, end in closed:
            for node, twin in zip(self.members[last], self.members[end], strict=True):
                twins[node], stands_in[twin] = twin, node

        def copy(argument: fx.Node) -> fx.Node:
            return copies[stands_in.get(argument, argument)]

        for node in self.graph.nodes:
            if self.of.get(node) in gone or node.op == "output":
                continue
            taken: Callable[[fx.Node], fx.Node] = copy
            if node in twins and any(self.of.get(argument) in gone for argument in node.all_input_nodes):
                taken = self._taken(node, twins[node], copy)
            copies[node] = graph.node_copy(node, taken)
        graph.output(fx.map_arg(list(results), copy)).meta = dict(self.graph.output_node().meta)
        graph.lint()
        return graph

    def _taken(self, node: fx.Node, twin: fx.Node, copy: Callable[[fx.Node], fx.Node]) -> Callable[[fx.Node], fx.Node]:
        """Map the arguments of `node`, in order, to copies.

        An argument from the next layer is replaced by the argument of `twin`, the same node of the last removed layer.
        """
        given = iter(_arguments(twin))
        behind = _neighbour(self.of[node], 1)

        def chosen(argument: fx.Node) -> fx.Node:
            other = next(given)
            return copy(other if self.of.get(argument) == behind else argument)

        return chosen


def _arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order, repeated ones included."""
    found: list[fx.Node] = []

    def found_one(argument: fx.Node) -> fx.Node:
        found.append(argument)
        return argument

    fx.map_arg((node.args, node.kwargs), found_one)
    return found


def _numbered(layer: Layer) -> tuple[str, int]:
    stem, _, number = layer.rpartition(".")
    return stem, int(number)


def _neighbour(layer: Layer, by: int) -> Layer:
    stem, dot, number = layer.rpartition(".")
    return f"{stem}{dot}{int(number) + by}"
