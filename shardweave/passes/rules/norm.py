"""Normalisations: the normalised dimensions stay whole."""

from __future__ import annotations

import torch
from torch import fx

from shardweave.ir import BoundRule, Dims, Factor
from shardweave.passes.rules.registry import RULES, Rule, argument, output_shapes, shape, tensor_args

aten = torch.ops.aten


def bind_layer_norm(node: fx.Node) -> BoundRule:
    """``... [d], [d], [d] -> ... [d], ... 1, ... 1`` for any number of normalised dimensions, and its backward."""
    normalised = len(argument(node, "normalized_shape"))
    whole = shape(tensor_args(node)[0])
    free = len(whole) - normalised
    factors = tuple(Factor(f"i{index}", size, blocked=index >= free) for index, size in enumerate(whole) if size > 1)
    names = [(f"i{index}",) if size > 1 else () for index, size in enumerate(whole)]

    def dims(size: tuple[int, ...]) -> Dims:
        if len(size) == normalised and free:
            return tuple(names[free:])
        return tuple(() if length == 1 else name for name, length in zip(names, size))

    return BoundRule(
        factors,
        tuple(dims(shape(arg)) for arg in tensor_args(node)),
        tuple(dims(size) for size in output_shapes(node)),
    )


RULES[aten.native_layer_norm.default] = Rule(bind_layer_norm, source="... [d], [d], [d] -> ... [d], ... 1, ... 1")
RULES[aten.native_layer_norm_backward.default] = Rule(
    bind_layer_norm, source="... [d], ... [d], ... 1, ... 1, [d], [d] -> ... [d], [d], [d]"
)
