"""Values repeated, seen in other strides, as complex numbers, in halves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import BoundRule, Dims
from shardweave.passes.rules.registry import Emitter, argument, family, output_shapes, shape, tensor_args
from shardweave.passes.rules.view import Builder

aten = torch.ops.aten


def bind_repeat(node: fx.Node) -> BoundRule:
    """`repeat`: each dimension is how often it is repeated, times itself; both are free."""
    source, (target,) = shape(tensor_args(node)[0]), output_shapes(node)
    builder = Builder()
    left: list[tuple[str, ...]] = []
    right: list[tuple[str, ...]] = []
    for size, long in zip([1] * (len(target) - len(source)) + list(source), target):
        times, own = builder.new(long // max(size, 1)), builder.new(size)
        left.append(own)
        right.append(times + own)
    return BoundRule(tuple(builder.factors), (tuple(left[len(target) - len(source) :]),), (tuple(right),))


def lower_repeat(emit: Emitter) -> fx.Node:
    """As often as the local result is longer than the local value."""
    source, target = emit.input_layouts[0].local_shape, emit.output_layouts[0].local_shape
    aligned = [1] * (len(target) - len(source)) + list(source)
    return emit.call(aten.repeat.default, emit.args[0], [long // max(size, 1) for size, long in zip(aligned, target)])


def bind_complex(node: fx.Node) -> BoundRule:
    """`view_as_real` and `view_as_complex`: the last dimension, of the two parts, is blocked."""
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    builder = Builder()
    shared = [builder.new(size) for size in min(given, result, key=len)]
    parts = (*shared, builder.new(2, blocked=True))
    sides: tuple[Dims, Dims] = (parts, tuple(shared)) if len(given) > len(result) else (tuple(shared), parts)
    return BoundRule(tuple(builder.factors), (sides[0],), (sides[1],))


def bind_bits(node: fx.Node) -> BoundRule:
    """`view.dtype`: the last dimension is blocked where its size changes."""
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    builder = Builder()
    shared = [builder.new(size) for size in given[:-1]]
    last = [builder.new(given[-1])] * 2 if given[-1:] == result[-1:] and given else []
    last = last or [builder.new(size[-1], blocked=True) if size else () for size in (given, result)]
    dims = [tuple([*shared, names][: len(size)]) for names, size in zip(last, (given, result))]
    return BoundRule(tuple(builder.factors), (dims[0],), (dims[1],))


def bind_glu(node: fx.Node) -> BoundRule:
    """`glu` and its gradient: the halves are blocked, what they are made of is free."""
    values = [shape(arg) for arg in tensor_args(node)]
    whole = values[-1]
    dim = argument(node, "dim") % len(whole)
    builder = Builder()
    shared = [builder.new(size if index != dim else size // 2) for index, size in enumerate(whole)]
    halves = builder.new(2, blocked=True)
    wide: Dims = tuple(halves + names if index == dim else names for index, names in enumerate(shared))
    backward = node.target is aten.glu_backward.default
    inputs = (tuple(shared), wide) if backward else (wide,)
    return BoundRule(tuple(builder.factors), inputs, (wide if backward else tuple(shared),))


family([aten.repeat.default], bind_repeat, "`d -> (r d)`; blocked: nothing", lower=lower_repeat)
family(
    [aten.view_as_real.default, aten.view_as_complex.default],
    bind_complex,
    "`... [2] -> ...` and back; blocked: the two parts of a number",
)
family([aten.view.dtype], bind_bits, "the same bits; blocked: the last dimension where its size changes")
family(
    [aten.glu.default, aten.glu_backward.default],
    bind_glu,
    "`... ([2] d) -> ... d` and its gradient; blocked: the two halves",
)


# -- strides


def _strided_form(value: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Any:
    """What `as_strided` of a row-major value does, as a reshape and a permutation: (shape, order); None for others."""
    if not value.is_contiguous() or math.prod(size) != value.numel() or offset:
        return None
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], size[dim] == 1))
    order = [dim for dim in order if size[dim] != 1]
    expected = 1
    for dim in reversed(order):
        if stride[dim] != expected:
            return None
        expected *= size[dim]
    return [size[dim] for dim in order], order


def strided(node: fx.Node) -> Callable[..., Any] | None:
    """The form of an `as_strided` that shows all of a row-major value in another shape or order."""
    found = _strided_form(
        argument(node, "self").meta["val"],
        argument(node, "size"),
        argument(node, "stride"),
        argument(node, "storage_offset"),
    )
    if found is None:
        return None

    def form(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
        long, order = found
        ranks = [order.index(dim) for dim in sorted(order)]
        return x.reshape(long).permute(ranks).reshape(size)

    return form


def strided_scatter(node: fx.Node) -> Callable[..., Any] | None:
    """The form of an `as_strided_scatter` that writes all of a row-major value."""
    value = argument(node, "self").meta["val"]
    found = _strided_form(value, argument(node, "size"), argument(node, "stride"), argument(node, "storage_offset"))
    if found is None:
        return None

    def form(x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
        _, order = found
        squeezed = source.reshape([size[dim] for dim in sorted(order)])
        return squeezed.permute([sorted(order).index(dim) for dim in order]).reshape(x.shape)

    return form


TILING_CONDITIONAL: dict[Any, Callable[[fx.Node], Callable[..., Any] | None]] = {
    aten.as_strided.default: strided,
    aten.as_strided_scatter.default: strided_scatter,
}
