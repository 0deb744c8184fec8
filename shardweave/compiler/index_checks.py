"""Checks of a call's indices against what they look up, before the step begins.

A rank that computes other rows would not see an index that is out of range, and would wait for the ranks that do. Where
an index is made of integers of the call alone, each rank checks what it was given, and all of them raise the error.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from shardweave.ir import Captured
from shardweave.ops import Check, IndexChecks
from shardweave.sharding import argument, describe, info, shape

aten = torch.ops.aten
ALONG_DIM = {
    aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce,
    aten.scatter_add.default, aten.scatter_reduce.two,
}  # fmt: skip


def index_checks(captured: Captured) -> IndexChecks | None:
    """The checks of an annotated step; None where there is nothing to check."""
    given = _made_of_integers(captured)
    found: dict[tuple[fx.Node, int, int], str] = {}
    for node in captured.graph.graph.nodes:
        if node.op != "call_function" or info(node).backward:
            continue
        for index, low, high in _lookups(node):
            if index in given:
                found.setdefault((index, low, high), describe(node))
    if not found:
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = {index for index, _, _ in found}
    for node in reversed(list(captured.graph.graph.nodes)):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in captured.graph.graph.nodes:
        if node.name in captured.inputs:
            copies[node] = graph.placeholder(node.name)
        elif node in needed:
            copies[node] = graph.node_copy(node, lambda leaf: copies[leaf])
    graph.output(tuple(copies[index] for index, _, _ in found))
    held = nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr":
            setattr(held, str(node.target), getattr(captured.graph, str(node.target)))
    checks = tuple(Check(what, low, high) for (_, low, high), what in found.items())
    return IndexChecks(fx.GraphModule(held, graph, "Indices"), checks)


def _made_of_integers(captured: Captured) -> set[fx.Node]:
    """The integers that depend on integers of the call's inputs, and on nothing else but constants."""
    known: set[fx.Node] = set()
    of_inputs: set[fx.Node] = set()
    for node in captured.graph.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
            continue
        if node.op == "placeholder":
            if node.name in captured.inputs:
                known.add(node)
                of_inputs.add(node)
        elif (node.op == "get_attr" or _repeats(node)) and known.issuperset(node.all_input_nodes):
            known.add(node)
            if not of_inputs.isdisjoint(node.all_input_nodes):
                of_inputs.add(node)
    return of_inputs


def _repeats(node: fx.Node) -> bool:
    """Whether an op gives the same again."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags


def _lookups(node: fx.Node) -> list[tuple[fx.Node, int, int]]:
    """The indices of an op, each with the least that it may be, and what it must be less than."""
    if node.target is aten.embedding.default:
        return [(argument(node, "indices"), 0, shape(argument(node, "weight"))[0])]
    if node.target in ALONG_DIM:
        size = shape(argument(node, "self"))
        return [(argument(node, "index"), 0, size[argument(node, "dim")])] if size else []
    if node.target in (aten.index.Tensor, aten.index_put.default):
        size, given = shape(argument(node, "self")), argument(node, "indices")
        flags = torch.bool, torch.uint8
        return [
            (index, -length, length)
            for index, length in zip(given, size)
            if index is not None and index.meta["val"].dtype not in flags
        ]
    return []
