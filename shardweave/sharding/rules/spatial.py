"""Rules of ops on images: convolution, pooling, resizing, padding and sampling.

Batch and channels are free. Spatial dimensions are blocked, except the output positions of sampling.

A convolution is a matrix product at each position of the kernel. The out-channels of a group, ``o``, are like the ``n``
of a product, and its in-channels, ``c``, like its ``k``. The groups, ``g``, are independent convolutions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.ir import BoundRule, axes_size
from shardweave.sharding.rules.registry import (
    Emitter,
    argument,
    bind_pattern,
    call_with,
    family,
    register_decomposition,
    rule,
    shape,
    tensor_args,
    with_local_shape,
)

aten = torch.ops.aten


def places(name: str, count: int) -> str:
    """The pattern of `count` blocked dimensions.

    >>> places("x", 2)
    '[x0] [x1]'
    """
    return " ".join(f"[{name}{index}]" for index in range(count))


def row_major(emit: Emitter, value: fx.Node) -> fx.Node:
    """`value` in row-major memory: itself, or a copy."""
    if value.meta["val"].is_contiguous():
        return value
    return emit.call(aten.clone.default, value, memory_format=torch.contiguous_format)


def lower_shape_only(emit: Emitter) -> fx.Node:
    """Replace the input of a gradient, which only reads its shape, by a scalar expanded to this rank's shape.

    So the input is neither communicated nor kept for the backward.
    """
    grad, _, *rest = emit.args
    scalar = emit.call(aten.new_empty.default, grad, [1])
    like = emit.call(aten.expand.default, scalar, list(emit.output_layouts[0].local_shape))
    return emit.call(emit.node.target, grad, like, *rest, **emit.kwargs)


custom_ops = torch.ops.shardweave
# x, w, y: positions in the input, kernel and output. The weight of a transposed convolution has in-channels first.
PATTERNS: dict[Any, tuple[str, str]] = {
    aten.convolution.default: (
        "n (g c) [x], (g o) c [w] -> n (g o) [y]",
        "n (g c) [x], (g c) o [w] -> n (g o) [y]",
    ),
    custom_ops.conv_input_grad.default: (
        "n (g o) [y], (g o) c [w] -> n (g c) [x]",
        "n (g o) [y], (g c) o [w] -> n (g c) [x]",
    ),
    custom_ops.conv_weight_grad.default: (
        "n (g o) [y], n (g c) [x] -> (g o) c [w]",
        "n (g o) [y], n (g c) [x] -> (g c) o [w]",
    ),
}


def bind_convolution(node: fx.Node) -> BoundRule:
    """Bind the pattern of the op with the spatial dimensions of the call."""
    pattern = PATTERNS[node.target][argument(node, "transposed")]
    for name in ("x", "w", "y"):
        pattern = pattern.replace(f"[{name}]", places(name, len(shape(tensor_args(node)[0])) - 2))
    return bind_pattern(node, pattern, known={"g": argument(node, "groups")})


def lower_convolution(emit: Emitter) -> fx.Node:
    """The op with this rank's groups; a gradient has the size of this rank's part."""
    size = list(emit.output_layouts[0].local_shape)  # an argument of the gradients only
    return call_with(emit, groups=_local_groups(emit), input_size=size, weight_size=size)


def _local_groups(emit: Emitter) -> int:
    axes = [axis for axis, factor in emit.assignment.items() if factor.split(".")[0] == "g"]
    groups: int = argument(emit.node, "groups")
    return groups // axes_size(axes)


@register_decomposition(aten.convolution.default)
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """The convolution, then its bias: each part of split in-channels would add the bias again."""
    result: Tensor = aten.convolution.default(x, weight, None, *options)
    return result if bias is None else result + bias.view(1, -1, *[1] * (result.dim() - 2))


@register_decomposition(aten.convolution_backward.default)
def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, *options: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a convolution, each by an op of its own with the inputs that it needs."""
    *geometry, (of_input, of_weight, of_bias) = options
    return (
        custom_ops.conv_input_grad.default(grad, weight, list(x.shape), *geometry) if of_input else None,
        custom_ops.conv_weight_grad.default(grad, x, list(weight.shape), *geometry) if of_weight else None,
        aten.sum.dim_IntList(grad, [0, *range(2, grad.dim())]) if of_bias else None,
    )


for _target, (_pattern, _transposed) in PATTERNS.items():
    _source = f"`{_pattern}`, or transposed `{_transposed}`; blocked: all places"
    family([_target], bind_convolution, _source, lower=lower_convolution)


_MAX = {
    2: [aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default],
    3: [aten.max_pool3d_with_indices.default, aten.adaptive_max_pool3d.default],
}
_MAX_BACKWARD = {
    2: [aten.max_pool2d_with_indices_backward.default, aten.adaptive_max_pool2d_backward.default],
    3: [aten.max_pool3d_with_indices_backward.default, aten.adaptive_max_pool3d_backward.default],
}
_AVERAGE = {
    1: [aten.avg_pool1d.default],
    2: [aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default],
    3: [aten.avg_pool3d.default, aten._adaptive_avg_pool3d.default],
}
_AVERAGE_BACKWARD = {
    2: [aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default],
    3: [aten.avg_pool3d_backward.default, aten._adaptive_avg_pool3d_backward.default],
}

for _count in (1, 2, 3):
    _whole, _pooled = f"... {places('x', _count)}", f"... {places('y', _count)}"
    for _target in _MAX.get(_count, []):
        rule(_target, f"{_whole} -> {_pooled}, {_pooled}")
    for _target in _MAX_BACKWARD.get(_count, []):
        rule(_target, f"{_pooled}, {_whole}, {_pooled} -> {_whole}")
    for _target in _AVERAGE[_count]:
        rule(_target, f"{_whole} -> {_pooled}")
    for _target in _AVERAGE_BACKWARD.get(_count, []):
        rule(_target, f"{_pooled}, {_whole} -> {_whole}", lower=lower_shape_only)
for _count, _target in ((2, aten.max_unpool2d.default), (3, aten.max_unpool3d.default)):
    _pooled = f"... {places('y', _count)}"
    rule(_target, f"{_pooled}, {_pooled} -> ... {places('x', _count)}")


_UPSAMPLES = {
    1: ["upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"],
    2: [
        "upsample_nearest2d",
        "_upsample_nearest_exact2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
    ],
    3: ["upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"],
}


for _count, _names in _UPSAMPLES.items():
    _before, _after = f"n c {places('x', _count)}", f"n c {places('y', _count)}"
    for _name in _names:
        rule(getattr(aten, _name).default, f"{_before} -> {_after}")
        rule(getattr(aten, _name).vec, f"{_before} -> {_after}")
        rule(getattr(aten, f"{_name}_backward").default, f"{_after} -> {_before}", lower=with_local_shape("input_size"))

for _count in (1, 2, 3):
    _inner, _padded = f"... {places('x', _count)}", f"... {places('y', _count)}"
    for _mode in ("reflection", "replication"):
        _name = f"{_mode}_pad{_count}d"
        rule(getattr(aten, _name).default, f"{_inner} -> {_padded}")
        rule(getattr(aten, f"{_name}_backward").default, f"{_padded}, {_inner} -> {_inner}", lower=lower_shape_only)

rule(aten.im2col.default, "... c [x0] [x1] -> ... (c [k]) [y]")
rule(aten.col2im.default, "... (c [k]) [y] -> ... c [x0] [x1]")

# Each position of the output is sampled independently; the gradient of the input is a sum over all positions.
for _count, _out in ((2, "y0 y1"), (3, "y0 y1 y2")):
    _given = f"n c {places('x', _count)}, n {_out} [d]"
    rule(getattr(aten, f"grid_sampler_{_count}d").default, f"{_given} -> n c {_out}")
    rule(getattr(aten, f"grid_sampler_{_count}d_backward").default, f"n c {_out}, {_given} -> {_given}")


def bind_pixel_shuffle(node: fx.Node) -> BoundRule:
    """``... (c [a] [b]) h w -> ... c (h [a]) (w [b])``, and back."""
    deep, wide = "... (c [a] [b]) h w", "... c (h [a]) (w [b])"
    if node.target is aten.pixel_unshuffle.default:
        factor = argument(node, "downscale_factor")
        return bind_pattern(node, f"{wide} -> {deep}", known={"a": factor, "b": factor})
    factor = argument(node, "upscale_factor")
    return bind_pattern(node, f"{deep} -> {wide}", known={"a": factor, "b": factor})


def bind_channel_shuffle(node: fx.Node) -> BoundRule:
    """``n (g c) ... -> n (c g) ...``."""
    return bind_pattern(node, "n (g c) ... -> n (c g) ...", known={"g": argument(node, "groups")})


def lower_channel_shuffle(emit: Emitter) -> fx.Node:
    """The op with this rank's groups, on a row-major value: otherwise real results differ from fake ones in order."""
    return emit.call(aten.channel_shuffle.default, row_major(emit, emit.args[0]), _local_groups(emit))


family([aten.pixel_shuffle.default], bind_pixel_shuffle, "... (c [a] [b]) h w -> ... c (h [a]) (w [b])")
family([aten.pixel_unshuffle.default], bind_pixel_shuffle, "... c (h [a]) (w [b]) -> ... (c [a] [b]) h w")
family([aten.channel_shuffle.default], bind_channel_shuffle, "n (g c) ... -> n (c g) ...", lower=lower_channel_shuffle)
