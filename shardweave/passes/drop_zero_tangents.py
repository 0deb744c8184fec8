"""Remove tangents that are always zero, and the backward ops that only propagate their zeros."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from shardweave.sharding import LINEAR_IN_EACH, LINEAR_IN_FIRST

aten = torch.ops.aten

# Ops whose result is zero if one argument is. A division is not among them: zero may be the divisor.
LINEAR = (LINEAR_IN_FIRST | LINEAR_IN_EACH) - {aten.div.Tensor}


def drop_tangents(graph_module: fx.GraphModule, names: Iterable[str]) -> None:
    """Treat the tangents called `names` as zero.

    A sum with a zero becomes its other argument. An op that is linear in a zero becomes zero itself. A gradient that is
    zero becomes None, as in autograd. Where any other op reads a zero, the zero is written as a constant.
    """
    graph = graph_module.graph
    wanted = set(names)
    zeros: set[fx.Node] = {node for node in graph.nodes if node.op == "placeholder" and node.name in wanted}
    for node in list(graph.nodes):
        dead = [argument for argument in node.all_input_nodes if argument in zeros]
        if not dead or node.op == "placeholder":
            continue
        if node.target is aten.add.Tensor and len(dead) < len(node.all_input_nodes):
            other = next(argument for argument in node.all_input_nodes if argument not in zeros)
            if other.meta["val"].shape == node.meta["val"].shape and not node.kwargs:
                node.replace_all_uses_with(other)
                continue
        if node.op == "output":
            node.args = fx.node.map_arg(node.args, lambda value: None if value in zeros else value)
            continue
        if node.target in LINEAR or (node.target is aten.add.Tensor and len(dead) == len(node.all_input_nodes)):
            zeros.add(node)
            continue
        for argument in dead:
            node.replace_input_with(argument, _written_out(graph, node, argument))
    for node in reversed(list(graph.nodes)):
        if not node.users and (node in zeros or node.op == "call_function"):
            graph.erase_node(node)
    graph.lint()
    graph_module.recompile()


def _written_out(graph: fx.Graph, before: fx.Node, zero: fx.Node) -> fx.Node:
    value = zero.meta["val"]
    with graph.inserting_before(before):
        node = graph.call_function(
            aten.zeros.default, (list(value.shape),), {"dtype": value.dtype, "device": value.device}
        )
    node.meta.update(val=value, partitioner_tag="is_backward")
    return node
