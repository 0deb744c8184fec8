"""Convolutions: a matrix product at each place of the kernel; only batch, channels and groups are split.

The out-channels of a group, ``o``, are like the ``n`` of a product and its in-channels, ``c``, like its ``k``. The
groups, ``g``, are as many convolutions side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

import shardweave.runtime.convolution  # noqa: F401  (registers the two gradients)
from shardweave.ir import BoundRule
from shardweave.passes.rules.registry import Emitter, argument, bind_pattern, family, shape, tensor_args

aten = torch.ops.aten
ours = torch.ops.shardweave
# x, w, y: places of the input, of the kernel and of the output; a transposed weight has the in-channels first.
PATTERNS: dict[Any, tuple[str, str]] = {
    aten.convolution.default: (
        "n (g c) [x], (g o) c [w] -> n (g o) [y]",
        "n (g c) [x], (g c) o [w] -> n (g o) [y]",
    ),
    ours.conv_input_grad.default: (
        "n (g o) [y], (g o) c [w] -> n (g c) [x]",
        "n (g o) [y], (g c) o [w] -> n (g c) [x]",
    ),
    ours.conv_weight_grad.default: (
        "n (g o) [y], n (g c) [x] -> (g o) c [w]",
        "n (g o) [y], n (g c) [x] -> (g c) o [w]",
    ),
}


def bind_convolution(node: fx.Node) -> BoundRule:
    """The pattern of the op, with as many places as the convolution has dimensions."""
    pattern = PATTERNS[node.target][argument(node, "transposed")]
    places = len(shape(tensor_args(node)[0])) - 2
    for name in ("x", "w", "y"):
        pattern = pattern.replace(f"[{name}]", " ".join(f"[{name}{index}]" for index in range(places)))
    return bind_pattern(node, pattern, known={"g": argument(node, "groups")})


def lower_convolution(emit: Emitter) -> fx.Node:
    """The groups that this rank has; a gradient is as large as this rank's part of it."""
    given = list(emit.args)
    names = [declared.name for declared in emit.node.target._schema.arguments]  # type: ignore[union-attr]
    for axis, factor in emit.assignment.items():
        if factor.split(".")[0] == "g":
            given[names.index("groups")] //= axis.size
    if emit.node.target is not aten.convolution.default:
        given[2] = list(emit.output_layouts[0].local_shape)
    return emit.call(emit.node.target, *given)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """The convolution, then its bias: each part of split in-channels would add the bias again."""
    result: Tensor = aten.convolution.default(x, weight, None, *options)
    return result if bias is None else result + bias.view(1, -1, *[1] * (result.dim() - 2))


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, *options: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a convolution, each from what it depends on."""
    *geometry, (of_input, of_weight, of_bias) = options
    return (
        ours.conv_input_grad.default(grad, weight, list(x.shape), *geometry) if of_input else None,
        ours.conv_weight_grad.default(grad, x, list(weight.shape), *geometry) if of_weight else None,
        aten.sum.dim_IntList(grad, [0, *range(2, grad.dim())]) if of_bias else None,
    )


for _target, (_pattern, _transposed) in PATTERNS.items():
    family(
        [_target],
        bind_convolution,
        f"`{_pattern}`, or transposed `{_transposed}`; blocked: all places",
        lower=lower_convolution,
    )
