"""Pieces of values: `slice`, `select`, `cat`, `split`, `pad`, and writes into pieces.

A dimension that is cut into pieces is a product: chunks as large as all cuts allow, which are blocked, of an inner
factor, which is free and the same one on both sides. The halves of a rotary embedding, a fused qkv with few key and
value heads, and the joined channels of a U-Net keep their inner factor. Writing a part into a whole drops what was
there, so `slice_scatter` and `select_scatter` have the same factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from shardweave.ir import BoundRule, Dims
from shardweave.sharding.rules.registry import Emitter, argument, family, output_shapes, shape, tensor_args
from shardweave.sharding.rules.view import Builder

aten = torch.ops.aten
Names = tuple[str, ...]


def chunks(builder: Builder, sizes: Sequence[int], cuts: Sequence[int] = ()) -> list[Names]:
    """Dimensions of these `sizes` as chunks of one inner factor, cut at these places too; a size of 1 has no factor."""
    if len(set(sizes)) == 1 and not any(cut % max(sizes[0], 1) for cut in cuts):
        return [builder.new(sizes[0])] * len(sizes)
    step = math.gcd(*sizes, *cuts) or 1
    inner = builder.new(step)
    return [builder.new(size // step, blocked=True) + inner for size in sizes]


def _bounds(node: fx.Node, whole: int) -> tuple[int, int, int]:
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    start = 0 if start is None else start
    end = whole if end is None else end
    start, end = (min(max(bound + whole if bound < 0 else bound, 0), whole) for bound in (start, end))
    return start, end, step


def _sliced(builder: Builder, node: fx.Node, whole: int, part: int) -> list[Names]:
    start, _, step = _bounds(node, whole)
    if step != 1:
        return [builder.new(whole, blocked=True), builder.new(part, blocked=True)]
    return chunks(builder, [whole, part], [start])


def bind_slice(node: fx.Node) -> BoundRule:
    """`slice` and `slice_backward`: the sliced dimension is cut into chunks."""
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    backward = node.target is aten.slice_backward.default
    dim = argument(node, "dim") % len(given)
    wholes, parts = (result, given) if backward else (given, result)
    builder = Builder()
    whole_dims, part_dims = [], []
    for index, (whole, part) in enumerate(zip(wholes, parts)):
        names = _sliced(builder, node, whole, part) if index == dim else [builder.new(whole)] * 2
        whole_dims.append(names[0])
        part_dims.append(names[1])
    sides = (tuple(part_dims), tuple(whole_dims)) if backward else (tuple(whole_dims), tuple(part_dims))
    return BoundRule(tuple(builder.factors), (sides[0],), (sides[1],))


def bind_slice_scatter(node: fx.Node) -> BoundRule:
    """`slice_scatter`: as a slice; the result is cut as the whole."""
    wholes, parts = (shape(arg) for arg in tensor_args(node))
    dim = argument(node, "dim") % len(wholes)
    builder = Builder()
    pairs = [
        _sliced(builder, node, whole, part) if index == dim else [builder.new(whole)] * 2
        for index, (whole, part) in enumerate(zip(wholes, parts))
    ]
    whole_dims, part_dims = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    return BoundRule(tuple(builder.factors), (whole_dims, part_dims), (whole_dims,))


def lower_slice(emit: Emitter) -> fx.Node:
    """The same chunks of the local dimension: bounds scale with it."""
    target = emit.node.target
    whole_layout = (emit.output_layouts if target is aten.slice_backward.default else emit.input_layouts)[0]
    dim = argument(emit.node, "dim") % len(whole_layout.dims)
    whole, local = whole_layout.global_shape[dim], whole_layout.local_shape[dim]
    start, end, step = _bounds(emit.node, whole)
    start, end = (bound * local // max(whole, 1) for bound in (start, end))
    if target is aten.slice_backward.default:
        sizes = list(emit.output_layouts[0].local_shape)
        return emit.call(target, emit.args[0], sizes, dim, start, end, step)
    values = emit.args[:2] if target is aten.slice_scatter.default else emit.args[:1]
    return emit.call(target, *values, dim, start, end, step)


def bind_select(node: fx.Node) -> BoundRule:
    """`select` and `select_backward`: the selected dimension is blocked, the others are free."""
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    backward = node.target is aten.select_backward.default
    wholes = result if backward else given
    dim = argument(node, "dim") % len(wholes)
    builder = Builder()
    whole_dims = [builder.new(size, blocked=index == dim) for index, size in enumerate(wholes)]
    part_dims = whole_dims[:dim] + whole_dims[dim + 1 :]
    sides = (tuple(part_dims), tuple(whole_dims)) if backward else (tuple(whole_dims), tuple(part_dims))
    return BoundRule(tuple(builder.factors), (sides[0],), (sides[1],))


def lower_select_backward(emit: Emitter) -> fx.Node:
    """The same selection, into zeros of the local shape."""
    sizes = list(emit.output_layouts[0].local_shape)
    return emit.call(aten.select_backward.default, emit.args[0], sizes, *emit.args[2:])


def bind_select_scatter(node: fx.Node) -> BoundRule:
    """`select_scatter`: as `select`; the result is the whole."""
    wholes = shape(tensor_args(node)[0])
    dim = argument(node, "dim") % len(wholes)
    builder = Builder()
    whole_dims = tuple(builder.new(size, blocked=index == dim) for index, size in enumerate(wholes))
    return BoundRule(tuple(builder.factors), (whole_dims, whole_dims[:dim] + whole_dims[dim + 1 :]), (whole_dims,))


def bind_stack(node: fx.Node) -> BoundRule:
    """`stack` and `unbind`: the dimension that counts the parts is blocked, the others are free."""
    unbind = node.target is aten.unbind.int
    whole = shape(tensor_args(node)[0]) if unbind else output_shapes(node)[0]
    dim = argument(node, "dim") % len(whole)
    builder = Builder()
    whole_dims = tuple(builder.new(size, blocked=index == dim) for index, size in enumerate(whole))
    parts = (whole_dims[:dim] + whole_dims[dim + 1 :],) * whole[dim]
    return BoundRule(tuple(builder.factors), *(((whole_dims,), parts) if unbind else (parts, (whole_dims,))))


def _pieces(whole: Sequence[int], parts: Sequence[Sequence[int]], dim: int) -> tuple[Builder, Dims, list[Dims]]:
    """The dimensions of a value and of the pieces that it consists of along `dim`."""
    builder = Builder()
    shared = [() if index == dim else builder.new(size) for index, size in enumerate(whole)]
    names = chunks(builder, [whole[dim], *(part[dim] for part in parts)])
    dims = [tuple(mine if index == dim else other for index, other in enumerate(shared)) for mine in names]
    return builder, dims[0], dims[1:]


def bind_cat(node: fx.Node) -> BoundRule:
    """`cat`: the pieces are chunks of the result."""
    (result,) = output_shapes(node)
    # What has no elements may be of any rank.
    parts = [shape(arg) for arg in tensor_args(node)]
    empty = [index for index, part in enumerate(parts) if len(part) != len(result)]
    kept = [part for part in parts if len(part) == len(result)]
    builder, whole, pieces = _pieces(result, kept, argument(node, "dim") % len(result))
    for index in empty:
        pieces.insert(index, (builder.new(0, blocked=True),))
    return BoundRule(tuple(builder.factors), tuple(pieces), (whole,))


def bind_split(node: fx.Node) -> BoundRule:
    """`split`: the pieces are chunks of the value."""
    given = shape(tensor_args(node)[0])
    builder, whole, pieces = _pieces(given, output_shapes(node), argument(node, "dim") % len(given))
    return BoundRule(tuple(builder.factors), (whole,), tuple(pieces))


def lower_split(emit: Emitter) -> fx.Node:
    """Chunks of the local dimension."""
    dim = argument(emit.node, "dim") % len(emit.input_layouts[0].dims)
    sizes = [layout.local_shape[dim] for layout in emit.output_layouts]
    return emit.call(aten.split_with_sizes.default, emit.args[0], sizes, dim)


def _padding(node: fx.Node) -> list[int]:
    """What is added in front, of each dimension."""
    pairs = list(argument(node, "pad"))
    rank = len(shape(tensor_args(node)[0]))
    return [0] * (rank - len(pairs) // 2) + pairs[::2][::-1]


def bind_pad(node: fx.Node) -> BoundRule:
    """`constant_pad_nd`: a padded dimension is a chunk of the result."""
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    builder = Builder()
    pairs = [chunks(builder, [source, target], [front]) for source, target, front in zip(given, result, _padding(node))]
    return BoundRule(tuple(builder.factors), (tuple(pair[0] for pair in pairs),), (tuple(pair[1] for pair in pairs),))


def lower_pad(emit: Emitter) -> fx.Node:
    """The same chunks around the local dimensions."""
    source, result = emit.input_layouts[0], emit.output_layouts[0]
    pad: list[int] = []
    for dim, front in reversed(list(enumerate(_padding(emit.node)))):
        whole, local = result.global_shape[dim], result.local_shape[dim]
        front = front * local // max(whole, 1)
        pad += [front, local - source.local_shape[dim] - front]
    return emit.call(aten.constant_pad_nd.default, emit.args[0], pad, *emit.args[2:])


_CHUNKS = "chunks, each of one inner factor; blocked: the number of chunks, all of a slice with steps"
family([aten.slice.Tensor, aten.slice_backward.default], bind_slice, _CHUNKS, lower=lower_slice)
family([aten.slice_scatter.default], bind_slice_scatter, _CHUNKS, lower=lower_slice)
family([aten.select.int], bind_select, "one of a dimension; blocked: that dimension")
family(
    [aten.select_backward.default],
    bind_select,
    "one of a dimension; blocked: that dimension",
    lower=lower_select_backward,
)
family([aten.select_scatter.default], bind_select_scatter, "one of a dimension; blocked: that dimension")
family([aten.unbind.int, aten.stack.default], bind_stack, "one by one of a dimension; blocked: that dimension")
family([aten.cat.default], bind_cat, _CHUNKS)
_SPLITS = [
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
]
family(_SPLITS, bind_split, _CHUNKS, lower=lower_split)
family([aten.constant_pad_nd.default], bind_pad, _CHUNKS, lower=lower_pad)
