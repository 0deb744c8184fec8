"""What the ops on images share: patterns of places, inputs taken for their shape only, and row-major memory."""

from __future__ import annotations

import torch
from torch import fx

from shardweave.passes.rules.registry import Emitter

aten = torch.ops.aten


def places(name: str, count: int) -> str:
    """`count` blocked dimensions.

    >>> places("x", 2)
    '[x0] [x1]'
    """
    return " ".join(f"[{name}{index}]" for index in range(count))


def row_major(emit: Emitter, value: fx.Node) -> fx.Node:
    """`value` in row-major memory, itself where it is so."""
    if value.meta["val"].is_contiguous():
        return value
    return emit.call(aten.clone.default, value, memory_format=torch.contiguous_format)


def lower_shape_only(emit: Emitter) -> fx.Node:
    """A gradient whose op takes the input, its second argument, for its shape only: a scalar in this rank's shape.

    So the input is neither communicated nor kept for the backward.
    """
    grad, _, *rest = emit.args
    scalar = emit.call(aten.new_empty.default, grad, [1])
    like = emit.call(aten.expand.default, scalar, list(emit.output_layouts[0].local_shape))
    return emit.call(emit.node.target, grad, like, *rest, **emit.kwargs)
