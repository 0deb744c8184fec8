"""Shares: which part of a step's FLOPs devices do not do alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from shardweave.cost_model import flops_by_op
from shardweave.ir import META, NodeInfo
from tests.cost_model.handmade import Builder, aten

custom_ops = torch.ops.shardweave
CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
EXPERTS = torch.zeros(24, dtype=torch.long, device="meta")


def graph_of(target: Any, *args: Any, op: str = "op") -> fx.Graph:
    """One call, on tensors of these shapes (tuples) and on other arguments."""
    builder = Builder([])
    nodes = [builder.tensor(f"x{at}", *arg) if isinstance(arg, tuple) else arg for at, arg in enumerate(args)]
    for at, node in enumerate(nodes):
        if isinstance(node, torch.Tensor):
            nodes[at] = builder.graph.placeholder(f"x{at}")
            nodes[at].meta["val"] = node
    builder.call(target, *nodes, op=op)
    return builder.graph


CALLS: dict[str, tuple[Callable[[], fx.Graph], int]] = {
    "mm": (lambda: graph_of(aten.mm.default, (3, 5), (5, 7)), 2 * 3 * 5 * 7),
    "bmm": (lambda: graph_of(aten.bmm.default, (2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
    "mv": (lambda: graph_of(aten.mv.default, (3, 5), (5,)), 2 * 3 * 5),
    "dot": (lambda: graph_of(aten.dot.default, (5,), (5,)), 2 * 5),
    "experts": (lambda: graph_of(custom_ops.expert_mm.default, (24, 5), (4, 5, 7), EXPERTS), 2 * 24 * 5 * 7),
    "a quarter of the experts": (
        lambda: graph_of(custom_ops.expert_mm.default, (24, 5), (1, 5, 7), EXPERTS, 4),
        2 * 6 * 5 * 7,
    ),
    "the experts' gradient": (
        lambda: graph_of(custom_ops.expert_outer.default, (24, 5), (24, 7), EXPERTS, 4),
        2 * 24 * 5 * 7,
    ),
    "convolution": (
        lambda: graph_of(aten.convolution.default, (2, 4, 8, 8), (6, 4, 3, 3), None, *CONVOLUTION),
        2 * 2 * 6 * 4 * 9 * 64,
    ),
    "its input's gradient": (
        lambda: graph_of(custom_ops.conv_input_grad.default, (2, 6, 8, 8), (6, 4, 3, 3), [2, 4, 8, 8], *CONVOLUTION),
        2 * 2 * 6 * 4 * 9 * 64,
    ),
    "its weight's gradient": (
        lambda: graph_of(custom_ops.conv_weight_grad.default, (2, 6, 8, 8), (2, 4, 8, 8), [6, 4, 3, 3], *CONVOLUTION),
        2 * 2 * 6 * 4 * 9 * 64,
    ),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_every_op_that_multiplies_counts(name: str) -> None:
    build, expected = CALLS[name]
    assert flops_by_op(build()) == {("op", False): expected}


KINDS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_all_forms_of_attention_count_alike_forward_and_backward(kind: str) -> None:
    size, rows = (2, 4, 16, 8), (2, 4, 16)
    value = torch.empty(size, device="meta")
    for backward, products in ((False, 2), (True, 5)):
        graph = fx.Graph()
        given = [graph.placeholder(name) for name in ("q", "k", "v")]
        for holder in given:
            holder.meta["val"] = value
        target = getattr(aten, f"_scaled_dot_product_{kind}{'_backward' * backward}").default
        args = (given[0], *given, given[0], given[0]) if backward else tuple(given)
        node = graph.call_function(target, args)
        node.meta["val"] = (value, value, value) if backward else (value, torch.empty(rows, device="meta"))
        if kind in ("efficient_attention", "cudnn_attention") and backward:
            node.args = (given[0], *given, None, given[0], given[0])
        node.meta[META] = NodeInfo(op="attention", backward=backward)
        assert flops_by_op(graph) == {("attention", backward): products * 2 * 2 * 4 * 16 * 16 * 8}
