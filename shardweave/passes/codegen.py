"""Code generation: the scheduled graph of a step is split into a forward and a backward that read as Python.

With gradient accumulation the two run several times before the optimizer does, on a micro-batch or on the batch of a
call each time. All runs share the copies of parameters that are gathered once a step, and add their gradients up in the
layout that the plan has for this. The last run brings the sums to the layout of the optimizer's states (AMSP, arXiv
2311.00257, section IV-C). `MicroBatchGraphs` makes the graphs of first, middle and last runs from the forward and the
backward: values that the first run computes become inputs of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from shardweave.ir import LayoutError, StepSpec, VerifyError, axes_size, readable_bytes
from shardweave.ops import is_coordinate
from shardweave.passes.spmd_builder import remove_dead
from shardweave.sharding import graph_outputs, info, is_wait, module_of


@dataclass(frozen=True)
class Step:
    """A generated training step: its forward and backward graphs, and their calling convention (see `StepSpec`).

    `micro_batch_graphs` makes the graphs for several runs before the optimizer's step, for gradient accumulation. A
    step of several micro-batches is always run by these.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    spec: StepSpec
    micro_batch_graphs: Callable[[], MicroBatchGraphs] | None = None


def split(module: fx.GraphModule, num_results: int, tangents: Sequence[str]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a local graph into its forward and its backward.

    Parameters
    ----------
    num_results : int
        How many of the graph's outputs the forward computes. It also returns the values that the backward needs.
    tangents : sequence of str
        The placeholders that only the backward takes.
    """
    # 1. Find the nodes of the backward, and the values of the forward that it needs.
    graph = module.graph
    outputs = graph_outputs(graph)
    coordinates = [node for node in graph.nodes if is_coordinate(node)]
    late = {node for node in graph.nodes if node.name in tangents or info(node).backward}
    for index, value in enumerate(outputs[:num_results]):
        if isinstance(value, fx.Node) and value in late:
            raise VerifyError(f"the output {index} of the model is computed in its backward, by {value.name}")
    early = [node for node in graph.nodes if node not in late and node.op != "output"]
    needed = {argument for node in late for argument in node.all_input_nodes}
    needed |= {value for value in outputs[num_results:] if isinstance(value, fx.Node)}
    saved = [node for node in early if node in needed and node not in coordinates]

    # 2. Copy the forward. It returns its results and the saved values.
    forward, backward = fx.Graph(), fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in early:
        mapping[node] = forward.node_copy(node, lambda leaf: mapping[leaf])
    results = fx.node.map_arg(tuple(outputs[:num_results]), lambda leaf: mapping[leaf])
    forward.output((*results, *(mapping[node] for node in saved)))
    # 3. Copy the backward. It takes the coordinates, the saved values and the tangents.
    inner: dict[fx.Node, fx.Node] = {}
    for node in [*coordinates, *saved, *(node for node in graph.nodes if node.name in tangents)]:
        copy = backward.placeholder(node.name)
        copy.meta = dict(node.meta)
        inner[node] = copy
    for node in graph.nodes:
        if node in late and node.name not in tangents:
            inner[node] = backward.node_copy(node, lambda leaf: inner[leaf])
    backward.output(fx.node.map_arg(tuple(outputs[num_results:]), lambda leaf: inner[leaf]))
    return as_module(module, forward, "Forward"), as_module(module, backward, "Backward")


def split_whole_batch_sums(module: fx.GraphModule, holders: Sequence[str], name: str) -> fx.GraphModule:
    """Move the last outputs of a local graph to a graph of their own, which takes the inputs of the forward.

    These outputs are one micro-batch's parts of sums over the whole batch (`partition.WholeBatchSum`).

    Parameters
    ----------
    holders : sequence of str
        The placeholders of the forward that take these sums.

    Raises
    ------
    LayoutError
        If one of the sums is needed to compute another.
    """
    count = len(holders)
    totals = {node for node in module.graph.nodes if node.name in holders}
    outputs = graph_outputs(module.graph)
    needed = {node for node in outputs[len(outputs) - count :] if isinstance(node, fx.Node)}
    for node in reversed(list(module.graph.nodes)):
        if node in needed:
            needed.update(node.all_input_nodes)
    if twice := needed.intersection(totals):
        raise LayoutError(
            f"sums over the whole batch of {sorted(info(node).op for node in twice)} are needed for other such sums, "
            "and one pass over the micro-batches finds one: use micro_batches=1, or pass them to the model as inputs"
        )
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in needed or (node.op == "placeholder" and not info(node).backward and node not in totals):
            mapping[node] = graph.node_copy(node, lambda leaf: mapping[leaf])
    graph.output(fx.node.map_arg(tuple(outputs[len(outputs) - count :]), lambda leaf: mapping[leaf]))
    module.graph.output_node().args = (tuple(outputs[: len(outputs) - count]),)
    remove_dead(module.graph)
    return as_module(module, graph, name)


def as_module(constants: fx.GraphModule, graph: fx.Graph, name: str) -> fx.GraphModule:
    """A generated graph as a module whose code has a comment above each collective; `constants` holds its tensors."""
    graph.on_generate_code(lambda _: commented(graph))
    graph.lint()
    return module_of(constants, graph, name)


def commented(graph: fx.Graph) -> Callable[[list[str]], list[str]]:
    """A transformation of generated code that puts a comment with owner and reason above each collective.

    It also moves the deletion of a collective's input behind its wait: the collective may read it until then.
    """
    comments: dict[str, str] = {}
    starts = {node.name: arg.name for node in graph.nodes if is_wait(node) for arg in node.all_input_nodes}
    for node in graph.nodes:
        collective = info(node).collective
        if collective is not None:
            over = " ".join(axis.name for axis in collective.axes)
            why = f", {collective.reason}" if collective.reason else ""
            comments[node.name] = (
                f"# {collective.owner}: {collective.kind} of {readable_bytes(collective.bytes)} over {over} "
                f"({axes_size(collective.axes)} ranks){why}"
            )

    def transform(lines: list[str]) -> list[str]:
        result: list[str] = []
        kept: dict[str, str] = {}
        for line in "".join(lines).splitlines(keepends=True):  # torch gives a call and what it frees apart
            name = line.split(" = ", 1)[0].split(":")[0].strip()
            if name in comments:
                result.append(f"{comments[name]}\n")
                body, _, freed = line.rstrip("\n").partition(";  ")
                if freed.endswith("= None"):
                    kept[name], line = freed, f"{body}\n"
            if starts.get(name) in kept:
                freed = kept.pop(starts[name])
                line = f"{line.rstrip()};  {freed}\n"
            result.append(line)
        return result

    return transform


def graph_hash(*modules: fx.GraphModule) -> str:
    """A hash of generated code. Ranks with equal hashes issue the same collectives in the same order."""
    text = "\n".join(module.code for module in modules)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class MicroBatchGraphs:
    """The graphs of the runs of one step, for gradient accumulation.

    Parameters
    ----------
    whole_forward, whole_backward : GraphModule
        The complete graphs. The forward gathers the parameters. The backward takes the running sums of gradients behind
        the tangents, adds its own gradients, and brings the sums to the layout of the states.
    gathered_parameters : sequence of str
        The nodes of the forward that are parameters gathered once a step.
    accumulators : mapping of str to str
        For each placeholder of the backward that takes a running sum, the node that adds to it.
    whole_batch_sums : GraphModule, optional
        Computes one micro-batch's part of each sum over the whole batch. It takes the inputs of the forward without
        these sums.
    input_gradients : int
        How many of the backward's results are gradients of inputs, which come first and are not added up.
    """

    whole_forward: fx.GraphModule
    whole_backward: fx.GraphModule
    gathered_parameters: Sequence[str]
    accumulators: Mapping[str, str]
    whole_batch_sums: fx.GraphModule | None = None
    input_gradients: int = 0
    _backwards: dict[tuple[bool, bool], fx.GraphModule] = field(default_factory=dict)

    def forward(self, gathers: bool, returns_gathered: bool) -> fx.GraphModule:
        """The forward of one run.

        Parameters
        ----------
        gathers : bool
            Whether it gathers the parameters. Otherwise it takes them, behind all other inputs.
        returns_gathered : bool
            Whether it returns the gathered parameters, behind all other outputs.
        """
        if not self.gathered_parameters or (gathers and not returns_gathered):
            return self.whole_forward
        return self._first_forward if gathers else self._next_forward

    @cached_property
    def _first_forward(self) -> fx.GraphModule:
        graph, nodes = _copied(self.whole_forward)
        gathered = (nodes[name] for name in self.gathered_parameters)
        graph.output_node().args = ((*graph_outputs(graph), *gathered),)
        return _without_dead_code(self.whole_forward, graph, "FirstForward")

    @cached_property
    def _next_forward(self) -> fx.GraphModule:
        return _reading(self.whole_forward, self.gathered_parameters, "NextForward")

    def backward(self, takes_sums: bool, finishes: bool) -> fx.GraphModule:
        """The backward of one run.

        Parameters
        ----------
        takes_sums : bool
            Whether it takes the running sums of gradients. The first run does not.
        finishes : bool
            Whether it returns gradients at the layout of the states. Otherwise it returns the running sums.
        """
        key = takes_sums, finishes
        if key == (True, True):
            return self.whole_backward
        if key not in self._backwards:
            module = self.whole_backward
            if not finishes:
                module = self._returning_sums()
            if not takes_sums:
                module = _without_sums(module, self.accumulators, "OnlyBackward" if finishes else "FirstBackward")
            self._backwards[key] = module
        return self._backwards[key]

    @cached_property
    def finish(self) -> fx.GraphModule:
        """The graph from running sums to gradients at the layout of the states, if the last run returned sums."""
        names = list(self.accumulators.values())
        graph, _ = _copied(self.whole_backward)
        graph.output_node().args = (tuple(graph_outputs(graph)[self.input_gradients :]),)
        read = _reading(_without_dead_code(self.whole_backward, graph, "Finish"), names, "Finish")
        return _only(read, {*names, *_coordinates(read)}, "Finish")

    def _returning_sums(self) -> fx.GraphModule:
        """The backward with the running sum in the place of each gradient."""
        graph, nodes = _copied(self.whole_backward)
        sums, outputs = iter(self.accumulators.values()), graph_outputs(graph)
        of_inputs, of_parameters = outputs[: self.input_gradients], outputs[self.input_gradients :]
        summed = (nodes[next(sums)] if isinstance(each, fx.Node) else each for each in of_parameters)
        graph.output_node().args = ((*of_inputs, *summed),)
        return _without_dead_code(self.whole_backward, graph, "MiddleBackward")


def _coordinates(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if is_coordinate(node)]


def _copied(module: fx.GraphModule) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A copy of a graph, and its nodes by name."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for node in module.graph.nodes:
        nodes[node.name] = graph.node_copy(node, lambda leaf: nodes[leaf.name])
    return graph, nodes


def _without_dead_code(constants: fx.GraphModule, graph: fx.Graph, name: str) -> fx.GraphModule:
    remove_dead(graph)
    return as_module(constants, graph, name)


def _reading(module: fx.GraphModule, names: Iterable[str], name: str) -> fx.GraphModule:
    """`module` that takes these values as inputs, behind the others, instead of computing them."""
    graph, nodes = _copied(module)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for each in names:
        with graph.inserting_after(last):
            last = graph.placeholder(f"given_{each}")
        last.meta = dict(nodes[each].meta)
        nodes[each].replace_all_uses_with(last)
    return _without_dead_code(module, graph, name)


def _without_sums(module: fx.GraphModule, accumulators: Mapping[str, str], name: str) -> fx.GraphModule:
    """`module` that takes no running sums: its gradients are the first."""
    graph, nodes = _copied(module)
    for holder, total in accumulators.items():
        nodes[total].replace_all_uses_with(nodes[total].args[1])  # type: ignore[arg-type]
        graph.erase_node(nodes[total])
        graph.erase_node(nodes[holder])
    return _without_dead_code(module, graph, name)


def _only(module: fx.GraphModule, kept: set[str], name: str) -> fx.GraphModule:
    """`module` with only the inputs in `kept`. An input that replaces a value counts by that value's name."""
    graph, nodes = _copied(module)
    for node in nodes.values():
        if node.op == "placeholder" and node.name.removeprefix("given_") not in kept:
            assert not node.users, f"{node} is still used"
            graph.erase_node(node)
    return _without_dead_code(module, graph, name)
