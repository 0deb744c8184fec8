"""Resizing, padding and sampling of images: batch and channels are free, places mostly are not."""

from __future__ import annotations

import torch
from torch import fx

from shardweave.ir import BoundRule
from shardweave.passes.rules.registry import Emitter, argument, bind_pattern, family, rule
from shardweave.passes.rules.spatial import lower_shape_only, places, row_major

aten = torch.ops.aten

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


def lower_input_size(emit: Emitter) -> fx.Node:
    """A gradient of an input of this rank's batch and channels."""
    names = [declared.name for declared in emit.node.target._schema.arguments]  # type: ignore[union-attr]
    given = list(emit.args)
    given[names.index("input_size")] = list(emit.output_layouts[0].local_shape)
    return emit.call(emit.node.target, *given, **emit.kwargs)


for _count, _names in _UPSAMPLES.items():
    _before, _after = f"n c {places('x', _count)}", f"n c {places('y', _count)}"
    for _name in _names:
        rule(getattr(aten, _name).default, f"{_before} -> {_after}")
        rule(getattr(aten, _name).vec, f"{_before} -> {_after}")
        rule(getattr(aten, f"{_name}_backward").default, f"{_after} -> {_before}", lower=lower_input_size)

for _count in (1, 2, 3):
    _inner, _padded = f"... {places('x', _count)}", f"... {places('y', _count)}"
    for _mode in ("reflection", "replication"):
        _name = f"{_mode}_pad{_count}d"
        rule(getattr(aten, _name).default, f"{_inner} -> {_padded}")
        rule(getattr(aten, f"{_name}_backward").default, f"{_padded}, {_inner} -> {_inner}", lower=lower_shape_only)

rule(aten.im2col.default, "... c [x0] [x1] -> ... (c [k]) [y]")
rule(aten.col2im.default, "... (c [k]) [y] -> ... c [x0] [x1]")

# Each place of the output is sampled by itself; a gradient of the input adds up over all of them.
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
    """The groups that this rank has, of a row-major value: fake and real results lie differently for others."""
    groups = argument(emit.node, "groups")
    for axis, factor in emit.assignment.items():
        if factor.split(".")[0] == "g":
            groups //= axis.size
    return emit.call(aten.channel_shuffle.default, row_major(emit, emit.args[0]), groups)


family([aten.pixel_shuffle.default], bind_pixel_shuffle, "... (c [a] [b]) h w -> ... c (h [a]) (w [b])")
family([aten.pixel_unshuffle.default], bind_pixel_shuffle, "... c (h [a]) (w [b]) -> ... (c [a] [b]) h w")
family([aten.channel_shuffle.default], bind_channel_shuffle, "n (g c) ... -> n (c g) ...", lower=lower_channel_shuffle)
