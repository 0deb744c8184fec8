"""Pieces of a dimension keep the loop that they are all made of."""

from __future__ import annotations

import torch

from tests.passes.harness import bound, graph_of

aten = torch.ops.aten


def _rule(target: object, *args: object) -> str:
    module, _ = graph_of(target, args, {})
    (node,) = (node for node in module.graph.nodes if node.target is target)
    return str(bound(node))


def test_fused_heads() -> None:
    """Four query heads, one key and one value head, of 8: the head's width is free in all of them."""
    rule = _rule(aten.split_with_sizes.default, torch.zeros(5, 48), [32, 8, 8], -1)
    assert rule == "i0 ([i2] i1) -> i0 ([i3] i1), i0 i1, i0 i1"


def test_joined_channels() -> None:
    """A U-Net joins 64 and 32 channels: 32 of them are free."""
    rule = _rule(aten.cat.default, [torch.zeros(2, 64, 3, 3), torch.zeros(2, 32, 3, 3)], 1)
    assert rule == "i0 ([i5] i3) i1 i2, i0 i3 i1 i2 -> i0 ([i4] i3) i1 i2"


def test_bounds_off_the_chunks() -> None:
    """A slice from 4 to 12 of 16 is two chunks of 4; one from 1 has no chunks."""
    assert _rule(aten.slice.Tensor, torch.zeros(16), 0, 4, 12) == "([i1] i0) -> ([i2] i0)"
    assert _rule(aten.slice.Tensor, torch.zeros(16), 0, 1, 16) == "[i0] -> [i1]"
    assert _rule(aten.constant_pad_nd.default, torch.zeros(6), [2, 0]) == "([i1] i0) -> ([i2] i0)"
