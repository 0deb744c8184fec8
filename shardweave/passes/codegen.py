"""Code generation: one graph of a step is split into a forward and a backward, which run once for each micro-batch.

Codegen: the scheduled local graph becomes a forward and a backward GraphModule that read as Python.

Turns: the forms of a step that runs several times before the optimizer does.

A *turn* is one run of the step, on a micro-batch or on a call's whole batch. All turns of a step share the copies of
parameters that are gathered once a step, and add their gradients up where the plan has these; the last one brings the
sums to the states (AMSP, arXiv 2311.00257, section IV-C). Each form is the step's forward or backward graph with its
border moved: what the first turn computes, the others take.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from shardweave.ir import LayoutError, StepSpec, VerifyError, axes_size, readable_bytes
from shardweave.ops import is_coordinate
from shardweave.passes.spmd_builder import remove_dead
from shardweave.sharding import graph_outputs, info, module_of

WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Step:
    """A generated training step: its two graphs, and how they are called (see `StepSpec`).

    `turns` gives its forms for several runs before the optimizer's step; a step of several micro-batches has no others.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    spec: StepSpec
    turns: Callable[[], Turns] | None = None


def split(module: fx.GraphModule, num_results: int, tangents: Sequence[str]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a local graph.

    Parameters
    ----------
    num_results : int
        How many of the graph's outputs the forward computes; what the backward needs of it follows them.
    tangents : sequence of str
        The placeholders that only the backward takes.
    """
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

    forward, backward = fx.Graph(), fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in early:
        mapping[node] = forward.node_copy(node, lambda leaf: mapping[leaf])
    results = fx.node.map_arg(tuple(outputs[:num_results]), lambda leaf: mapping[leaf])
    forward.output((*results, *(mapping[node] for node in saved)))
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


def set_apart(module: fx.GraphModule, holders: Sequence[str], name: str) -> fx.GraphModule:
    """Take the last outputs off a local graph: they become one that takes what the forward takes.

    Parameters
    ----------
    holders : sequence of str
        The placeholders of the forward that take the sums of these outputs.

    Raises
    ------
    LayoutError
        Where one of these sums is needed to compute another.
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
    """A generated graph as a module: its code says whose each collective is; `constants` holds its tensors."""
    graph.on_generate_code(lambda _: commented(graph))
    graph.lint()
    return module_of(constants, graph, name)


def commented(graph: fx.Graph) -> Callable[[list[str]], list[str]]:
    """A transformation of generated code that says, above each collective, whose it is and why.

    It also lets what a collective reads live until its wait: it may be read until then.
    """
    comments: dict[str, str] = {}
    starts = {node.name: arg.name for node in graph.nodes if node.target is WAIT for arg in node.all_input_nodes}
    for node in graph.nodes:
        what = info(node).collective
        if what is not None:
            over = " ".join(axis.name for axis in what.axes)
            why = f", {what.reason}" if what.reason else ""
            comments[node.name] = (
                f"# {what.owner}: {what.kind} of {readable_bytes(what.bytes)} over {over} "
                f"({axes_size(what.axes)} ranks){why}"
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
    """A fingerprint of generated code, equal on all ranks that will issue the same collectives in the same order."""
    text = "\n".join(module.code for module in modules)
    return hashlib.sha256(text.encode()).hexdigest()


def as_python(module: fx.GraphModule) -> str:
    """The generated code as a file that a reader can open."""
    return f"# Generated by shardweave; the local program that every rank runs.\n{module.code.lstrip()}"


@dataclass
class Turns:
    """The forms of one step's graphs.

    Parameters
    ----------
    whole_forward, whole_backward : GraphModule
        With everything: the forward gathers the parameters, the backward takes the sums of the gradients before, behind
        the tangents, adds its own, and brings them to the states.
    working : sequence of str
        The nodes of the forward that are parameters gathered once a step.
    added : mapping of str to str
        For each placeholder of the backward that takes a sum, the node that adds to it.
    totals : GraphModule, optional
        Takes what the forward takes, but for the totals; gives this turn's part of each.
    """

    whole_forward: fx.GraphModule
    whole_backward: fx.GraphModule
    working: Sequence[str]
    added: Mapping[str, str]
    totals: fx.GraphModule | None = None
    _backwards: dict[tuple[bool, bool], fx.GraphModule] = field(default_factory=dict)

    def forward(self, fresh: bool, keeps: bool) -> fx.GraphModule:
        """The forward of a turn.

        Parameters
        ----------
        fresh : bool
            It gathers the parameters; else it takes them, behind all other inputs.
        keeps : bool
            It returns what it gathered, behind all other outputs.
        """
        if not self.working or (fresh and not keeps):
            return self.whole_forward
        return self._first_forward if fresh else self._next_forward

    @cached_property
    def _first_forward(self) -> fx.GraphModule:
        return _with_outputs(
            self.whole_forward,
            lambda outputs, nodes: (*outputs, *(nodes[name] for name in self.working)),
            "FirstForward",
        )

    @cached_property
    def _next_forward(self) -> fx.GraphModule:
        return _reading(self.whole_forward, self.working, "NextForward")

    def backward(self, adds: bool, closes: bool) -> fx.GraphModule:
        """The backward of a turn.

        Parameters
        ----------
        adds : bool
            It takes the sums of the gradients so far; else it is the first to compute one.
        closes : bool
            It returns the gradients where the states rest; else their sums.
        """
        key = adds, closes
        if key == (True, True):
            return self.whole_backward
        if key not in self._backwards:
            module = self.whole_backward
            if not closes:
                module = _with_outputs(module, self._as_summed, "MiddleBackward")
            if not adds:
                module = _without_sums(module, self.added, "OnlyBackward" if closes else "FirstBackward")
            self._backwards[key] = module
        return self._backwards[key]

    @cached_property
    def finish(self) -> fx.GraphModule:
        """From the sums to the gradients where the states rest: for sums whose last turn did not do it."""
        names = list(self.added.values())
        read = _reading(self.whole_backward, names, "Finish")
        return _only(read, {*names, *_coordinates(read)}, "Finish")

    def _as_summed(self, outputs: Sequence[object], nodes: Mapping[str, fx.Node]) -> tuple[object, ...]:
        """The sum for each gradient: the first node behind which nothing else is added."""
        sums = iter(self.added.values())
        return tuple(nodes[next(sums)] if isinstance(value, fx.Node) else value for value in outputs)


def _coordinates(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if is_coordinate(node)]


def _edited(
    module: fx.GraphModule, edit: Callable[[fx.Graph, Mapping[str, fx.Node]], None], name: str
) -> fx.GraphModule:
    """A copy of `module` after `edit` of its graph and its nodes by name; what nothing uses any more is dropped."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for node in module.graph.nodes:
        nodes[node.name] = graph.node_copy(node, lambda leaf: nodes[leaf.name])
    edit(graph, nodes)
    remove_dead(graph)
    return as_module(module, graph, name)


def _with_outputs(
    module: fx.GraphModule,
    outputs: Callable[[Sequence[object], Mapping[str, fx.Node]], tuple[object, ...]],
    name: str,
) -> fx.GraphModule:
    def edit(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> None:
        graph.output_node().args = (outputs(graph_outputs(graph), nodes),)  # type: ignore[assignment]

    return _edited(module, edit, name)


def _reading(module: fx.GraphModule, names: Iterable[str], name: str) -> fx.GraphModule:
    """`module` with these values taken as inputs, behind the others, instead of computed."""

    def edit(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> None:
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        for each in names:
            with graph.inserting_after(last):
                last = graph.placeholder(f"given_{each}")
            last.meta = dict(nodes[each].meta)
            nodes[each].replace_all_uses_with(last)

    return _edited(module, edit, name)


def _without_sums(module: fx.GraphModule, added: Mapping[str, str], name: str) -> fx.GraphModule:
    def edit(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> None:
        for holder, total in added.items():
            nodes[total].replace_all_uses_with(nodes[total].args[1])  # type: ignore[arg-type]
            graph.erase_node(nodes[total])
            graph.erase_node(nodes[holder])

    return _edited(module, edit, name)


def _only(module: fx.GraphModule, kept: set[str], name: str) -> fx.GraphModule:
    """`module` with only those inputs that are among `kept`, or given in their place."""

    def edit(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> None:
        for node in nodes.values():
            if node.op == "placeholder" and node.name.removeprefix("given_") not in kept:
                assert not node.users, f"{node} is still used"
                graph.erase_node(node)

    return _edited(module, edit, name)
