"""Codegen: the scheduled local graph becomes a forward and a backward GraphModule that read as Python."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from shardweave.errors import LayoutError, VerifyError
from shardweave.ir import StepSpec, axes_size
from shardweave.passes.annotate import graph_outputs, info
from shardweave.passes.local import remove_dead
from shardweave.passes.modules import module_of
from shardweave.passes.times import is_coordinate
from shardweave.units import readable_bytes

if TYPE_CHECKING:
    from shardweave.compiler.turns import Turns

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
