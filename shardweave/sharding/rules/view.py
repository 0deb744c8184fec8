"""Rules of views, expansions, repetitions, and pieces of values: `slice`, `select`, `cat`, `split`, `pad`.

Layouts pass through a view. A reshape's factors come from its shapes: ``(b s) d -> b s d`` makes the first dimension of
its input a product.

A dimension that is cut into pieces is a product of chunks and an inner factor. Chunks are as large as all cuts allow,
and blocked. The inner factor is free and the same one on both sides: the halves of a rotary embedding, a fused qkv
with few key and value heads, and the joined channels of a U-Net keep it. A write of a part into a whole drops what
was there, so `slice_scatter` and `select_scatter` have the same factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import BoundRule, Dims, Factor
from shardweave.sharding.rules.registry import Emitter, argument, family, output_shapes, shape, tensor_args

aten = torch.ops.aten


class Builder:
    """Collects the factors of a generated rule."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def new(self, size: int, blocked: bool = False) -> tuple[str, ...]:
        """A new factor as a dimension of its own; size 1 has none."""
        if size == 1:
            return ()
        self.factors.append(Factor(f"i{len(self.factors)}", size, blocked))
        return (self.factors[-1].name,)


def reshape_dims(builder: Builder, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """The dimensions of a row-major reshape as products of common factors.

    Where the two do not share a factor (``6 4 -> 8 3``), the dimensions concerned are blocked.
    """
    left: list[tuple[str, ...]] = []
    right: list[tuple[str, ...]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        # Take the shortest runs of dimensions with equal products.
        i_end, j_end = i, j
        a = b = 1
        while i_end == i and j_end == j or a != b:
            if (a <= b and i_end < len(source)) or j_end >= len(target):
                a, i_end = a * source[i_end], i_end + 1
            else:
                b, j_end = b * target[j_end], j_end + 1
        run_left, run_right = _match(builder, source[i:i_end], target[j:j_end])
        left += run_left
        right += run_right
        i, j = i_end, j_end
    return tuple(left), tuple(right)


def _match(
    builder: Builder, source: Sequence[int], target: Sequence[int]
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Common factors of two runs of dimensions whose products are equal."""
    bounds = []
    for sizes in (source, target):
        product, inner = 1, {1}
        for size in reversed(sizes):
            product *= size
            inner.add(product)
        bounds.append(inner)
    cuts = sorted(bounds[0] | bounds[1])
    if any(big % small for small, big in zip(cuts, cuts[1:])):
        return [builder.new(size, True) for size in source], [builder.new(size, True) for size in target]
    steps = [(small, builder.new(big // small)) for small, big in zip(cuts, cuts[1:])]

    def dims(sizes: Sequence[int]) -> list[tuple[str, ...]]:
        result, low = [], 1
        for size in reversed(sizes):
            result.append(tuple(name for at, names in reversed(steps) if low <= at < low * size for name in names))
            low *= size
        return result[::-1]

    return dims(source), dims(target)


def bind_reshape(node: fx.Node) -> BoundRule:
    """The rule of any reshape, from its shapes alone."""
    builder = Builder()
    left, right = reshape_dims(builder, shape(tensor_args(node)[0]), output_shapes(node)[0])
    return BoundRule(tuple(builder.factors), (left,), (right,))


def bind_permute(node: fx.Node) -> BoundRule:
    """`permute`, `transpose` and `t`: the same factors in another order."""
    size = shape(tensor_args(node)[0])
    if node.target is aten.permute.default:
        order = [dim % len(size) for dim in argument(node, "dims")]
    else:
        order = list(range(len(size)))
        if len(size) > 1:
            first, second = (
                (0, 1) if node.target is aten.t.default else (argument(node, "dim0"), argument(node, "dim1"))
            )
            order[first], order[second] = order[second], order[first]
    builder = Builder()
    dims = [builder.new(length) for length in size]
    return BoundRule(tuple(builder.factors), (tuple(dims),), (tuple(dims[dim] for dim in order),))


def bind_identity(node: fx.Node) -> BoundRule:
    """`detach`, `alias`, `clone`."""
    builder = Builder()
    dims = tuple(builder.new(length) for length in shape(tensor_args(node)[0]))
    return BoundRule(tuple(builder.factors), (dims,), (dims,))


def bind_expand(node: fx.Node) -> BoundRule:
    """`expand`: a broadcast dimension is a factor that only the output has."""
    source, (target,) = shape(tensor_args(node)[0]), output_shapes(node)
    builder = Builder()
    right = tuple(builder.new(length) for length in target)
    aligned = right[len(target) - len(source) :]
    left = tuple(names if length > 1 else () for names, length in zip(aligned, source))
    return BoundRule(tuple(builder.factors), (left,), (right,))


def lower_to_local_shape(emit: Emitter) -> fx.Node:
    """A reshape or an expand to the local shape of its output."""
    expand = emit.node.target is aten.expand.default
    target = aten.expand.default if expand else aten.reshape.default
    size = list(emit.output_layouts[0].local_shape)
    return emit.call(target, emit.args[0], size)


def lower_identity(emit: Emitter) -> fx.Node:
    """The joint graph needs no `detach` and no `alias`: the value itself."""
    value = emit.args[0]
    assert isinstance(value, fx.Node)
    return value


RESHAPES = [
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.flatten.using_ints,
]
family(
    RESHAPES,
    bind_reshape,
    "common factors of both shapes; blocked: dimensions that share none",
    lower=lower_to_local_shape,
    kind="view",
)
family(
    [aten.permute.default, aten.transpose.int, aten.t.default],
    bind_permute,
    "the same factors in another order; blocked: nothing",
    kind="view",
)
family(
    [aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default],
    bind_identity,
    "the value itself; blocked: nothing",
    lower=lower_identity,
    kind="view",
)
family([aten.clone.default], bind_identity, "the value itself; blocked: nothing", kind="view")
family(
    [aten.expand.default],
    bind_expand,
    "repeated dimensions are factors of the output alone; blocked: nothing",
    lower=lower_to_local_shape,
    kind="view",
)


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
