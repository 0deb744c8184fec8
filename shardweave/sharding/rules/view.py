"""Rules of views, expansions, repetitions, and of ops that cut or join: `slice`, `select`, `cat`, `split`, `pad`.

Layouts pass through a view. The factors of a reshape follow from its shapes: ``(b s) d -> b s d`` makes the first
dimension of its input a product.

A dimension that is cut into pieces is a product of chunks and an inner factor. Chunks are as large as all cuts allow,
and blocked. The inner factor is free and the same on both sides: it survives in the halves of a rotary embedding, in a
fused qkv with few key and value heads, and in the joined channels of a U-Net. `slice_scatter` and `select_scatter`
overwrite a part of a value and have the same factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import BoundRule, Dims
from shardweave.sharding.rules.registry import (
    Emitter,
    Factors,
    Names,
    along,
    argument,
    bind_broadcast,
    family,
    output_shapes,
    register_conditional,
    register_decomposition,
    rule,
    shape,
    tensor_args,
    with_local_shape,
)

aten = torch.ops.aten


def reshape_dims(factors: Factors, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """The dimensions of a row-major reshape as products of common factors.

    Dimensions that share no factor (``6 4 -> 8 3``) are blocked.
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
        run_left, run_right = _match(factors, source[i:i_end], target[j:j_end])
        left += run_left
        right += run_right
        i, j = i_end, j_end
    return tuple(left), tuple(right)


def _match(
    factors: Factors, source: Sequence[int], target: Sequence[int]
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
        return [factors.new(size, True) for size in source], [factors.new(size, True) for size in target]
    steps = [(small, factors.new(big // small)) for small, big in zip(cuts, cuts[1:])]

    def dims(sizes: Sequence[int]) -> list[tuple[str, ...]]:
        result, low = [], 1
        for size in reversed(sizes):
            result.append(tuple(name for at, names in reversed(steps) if low <= at < low * size for name in names))
            low *= size
        return result[::-1]

    return dims(source), dims(target)


def bind_reshape(node: fx.Node) -> BoundRule:
    """The rule of any reshape, from its shapes alone."""
    factors = Factors()
    left, right = reshape_dims(factors, shape(tensor_args(node)[0]), output_shapes(node)[0])
    return factors.rule([left], [right])


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
    factors = Factors()
    dims = [factors.new(length) for length in size]
    return factors.rule([tuple(dims)], [tuple(dims[dim] for dim in order)])


def lower_reshape(emit: Emitter) -> fx.Node:
    """A reshape to the local shape of its output."""
    return emit.call(aten.reshape.default, emit.args[0], list(emit.output_layouts[0].local_shape))


def lower_identity(emit: Emitter) -> fx.Node:
    """The value itself: the joint graph needs no `detach` and no `alias`."""
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
    lower=lower_reshape,
    kind="view",
)
family(
    [aten.permute.default, aten.transpose.int, aten.t.default],
    bind_permute,
    "the same factors in another order; blocked: nothing",
    kind="view",
)
family(
    [
        aten.detach.default,
        aten.alias.default,
        aten.lift_fresh_copy.default,
        aten.resolve_conj.default,
        aten.resolve_neg.default,
    ],
    bind_broadcast,
    "the value itself; blocked: nothing",
    lower=lower_identity,
    kind="view",
)
family([aten.clone.default], bind_broadcast, "the value itself; blocked: nothing", kind="view")
family(
    [aten.expand.default],
    bind_broadcast,
    "repeated dimensions are factors of the output alone; blocked: nothing",
    lower=with_local_shape("size"),
    kind="view",
)


def bind_repeat(node: fx.Node) -> BoundRule:
    """`repeat`: each dimension is a product of the repetitions and the dimension itself; both are free."""
    source, (target,) = shape(tensor_args(node)[0]), output_shapes(node)
    factors = Factors()
    left: list[Names] = []
    right: list[Names] = []
    for size, long in zip([1] * (len(target) - len(source)) + list(source), target):
        times, own = factors.new(long // max(size, 1)), factors.new(size)
        left.append(own)
        right.append(times + own)
    return factors.rule([left[len(target) - len(source) :]], [right])


def lower_repeat(emit: Emitter) -> fx.Node:
    """The op with the number of repetitions on this rank."""
    source, target = emit.input_layouts[0].local_shape, emit.output_layouts[0].local_shape
    aligned = [1] * (len(target) - len(source)) + list(source)
    return emit.call(aten.repeat.default, emit.args[0], [long // max(size, 1) for size, long in zip(aligned, target)])


def bind_bits(node: fx.Node) -> BoundRule:
    """`view.dtype`: the last dimension is blocked if its size changes."""
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    factors = Factors()
    shared = [factors.new(size) for size in given[:-1]]
    last = [factors.new(given[-1])] * 2 if given[-1:] == result[-1:] and given else []
    last = last or [factors.new(size[-1], blocked=True) if size else () for size in (given, result)]
    before, after = ([*shared, names][: len(size)] for names, size in zip(last, (given, result)))
    return factors.rule([before], [after])


def bind_glu(node: fx.Node) -> BoundRule:
    """`glu` and its gradient: the two halves are blocked, the elements of a half are free."""
    values = [shape(arg) for arg in tensor_args(node)]
    whole = values[-1]
    dim = argument(node, "dim") % len(whole)
    factors = Factors()
    shared = [factors.new(size if index != dim else size // 2) for index, size in enumerate(whole)]
    halves = factors.new(2, blocked=True)
    wide = [halves + names if index == dim else names for index, names in enumerate(shared)]
    backward = node.target is aten.glu_backward.default
    return factors.rule([shared, wide], [wide]) if backward else factors.rule([wide], [shared])


@register_decomposition(aten._conj.default)
def conj(x: Tensor) -> Any:
    """The conjugate in memory of its own: collectives and custom ops know no lazily conjugated values."""
    return aten._conj_physical.default(x)


@register_decomposition(aten._neg_view.default)
def neg_view(x: Tensor) -> Any:
    """As `conj`, of the imaginary part of a conjugate."""
    return aten.neg.default(x)


def lower_view_as_complex(emit: Emitter) -> fx.Node:
    """The op, after a copy where a real and an imaginary part do not lie side by side."""
    (value,) = emit.args
    *outer, last = value.meta["val"].stride()
    if last != 1 or any(stride % 2 for stride in outer):
        value = emit.call(aten.clone.default, value, memory_format=torch.contiguous_format)
    return emit.call(emit.node.target, value)


family([aten.repeat.default], bind_repeat, "`d -> (r d)`; blocked: nothing", lower=lower_repeat)
rule(aten.view_as_real.default, "... -> ... [part]")
rule(aten.view_as_complex.default, "... [part] -> ...", lower=lower_view_as_complex)
family([aten.view.dtype], bind_bits, "the same bits; blocked: the last dimension where its size changes")
family(
    [aten.glu.default, aten.glu_backward.default],
    bind_glu,
    "`... ([2] d) -> ... d` and its gradient; blocked: the two halves",
)


# -- strides


def _order(node: fx.Node) -> list[int] | None:
    """The dimensions of an `as_strided` longer than 1, outermost in memory first; None if it is no permutation."""
    value, size, stride = argument(node, "self").meta["val"], argument(node, "size"), argument(node, "stride")
    if not value.is_contiguous() or math.prod(size) != value.numel() or argument(node, "storage_offset"):
        return None
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], size[dim] == 1))
    order = [dim for dim in order if size[dim] != 1]
    expected = 1
    for dim in reversed(order):
        if stride[dim] != expected:
            return None
        expected *= size[dim]
    return order


@register_conditional(aten.as_strided.default)
def strided(node: fx.Node) -> Callable[..., Any] | None:
    """Decompose an `as_strided` that views all of a row-major value in another shape or order."""
    order = _order(node)
    if order is None:
        return None

    def form(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
        ranks = [order.index(dim) for dim in sorted(order)]
        return x.reshape([size[dim] for dim in order]).permute(ranks).reshape(size)

    return form


@register_conditional(aten.as_strided_scatter.default)
def strided_scatter(node: fx.Node) -> Callable[..., Any] | None:
    """Decompose an `as_strided_scatter` that writes all of a row-major value."""
    order = _order(node)
    if order is None:
        return None

    def form(x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
        squeezed = source.reshape([size[dim] for dim in sorted(order)])
        return squeezed.permute([sorted(order).index(dim) for dim in order]).reshape(x.shape)

    return form


def chunks(factors: Factors, sizes: Sequence[int], cuts: Sequence[int] = ()) -> list[Names]:
    """Dimensions of these `sizes` as chunks of one inner factor, with further `cuts`; a size of 1 has no factor."""
    if len(set(sizes)) == 1 and not any(cut % max(sizes[0], 1) for cut in cuts):
        return [factors.new(sizes[0])] * len(sizes)
    step = math.gcd(*sizes, *cuts) or 1
    inner = factors.new(step)
    return [factors.new(size // step, blocked=True) + inner for size in sizes]


def _bounds(node: fx.Node, whole: int) -> tuple[int, int, int]:
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    start = 0 if start is None else start
    end = whole if end is None else end
    start, end = (min(max(bound + whole if bound < 0 else bound, 0), whole) for bound in (start, end))
    return start, end, step


def _sliced(factors: Factors, node: fx.Node, whole: int, part: int) -> list[Names]:
    start, _, step = _bounds(node, whole)
    if step != 1:
        return [factors.new(whole, blocked=True), factors.new(part, blocked=True)]
    return chunks(factors, [whole, part], [start])


def bind_slice(node: fx.Node) -> BoundRule:
    """`slice`, `slice_backward` and `slice_scatter`: the sliced dimension is cut into chunks."""
    sizes = [*(shape(arg) for arg in tensor_args(node)), *output_shapes(node)]
    first, second = sizes[:2]  # the whole and a part of it; of the backward, the part and the whole
    wholes, parts = (second, first) if node.target is aten.slice_backward.default else (first, second)
    dim = argument(node, "dim") % len(wholes)
    factors = Factors()
    pairs = [
        _sliced(factors, node, whole, part) if index == dim else [factors.new(whole)] * 2
        for index, (whole, part) in enumerate(zip(wholes, parts))
    ]
    whole_dims, part_dims = zip(*pairs)
    if node.target is aten.slice_backward.default:
        return factors.rule([part_dims], [whole_dims])
    if node.target is aten.slice_scatter.default:
        return factors.rule([whole_dims, part_dims], [whole_dims])
    return factors.rule([whole_dims], [part_dims])


def lower_slice(emit: Emitter) -> fx.Node:
    """The op on the local dimension, with bounds in proportion to its length."""
    target = emit.node.target
    whole_layout = (emit.output_layouts if target is aten.slice_backward.default else emit.input_layouts)[0]
    dim = argument(emit.node, "dim") % len(whole_layout.dims)
    whole, local = whole_layout.global_shape[dim], whole_layout.local_shape[dim]
    start, end, step = _bounds(emit.node, whole)
    start, end = (bound * local // max(whole, 1) for bound in (start, end))
    if target is aten.slice_backward.default:
        return emit.call(target, emit.args[0], list(whole_layout.local_shape), dim, start, end, step)
    values = emit.args[:2] if target is aten.slice_scatter.default else emit.args[:1]
    return emit.call(target, *values, dim, start, end, step)


def _pieces(whole: Sequence[int], parts: Sequence[Sequence[int]], dim: int) -> tuple[Factors, Dims, list[Dims]]:
    """The dimensions of a value and of its pieces along `dim`."""
    factors = Factors()
    shared = [() if index == dim else factors.new(size) for index, size in enumerate(whole)]
    names = chunks(factors, [whole[dim], *(part[dim] for part in parts)])
    dims = [tuple(mine if index == dim else other for index, other in enumerate(shared)) for mine in names]
    return factors, dims[0], dims[1:]


def bind_cat(node: fx.Node) -> BoundRule:
    """`cat`: the inputs are chunks of the result."""
    (result,) = output_shapes(node)
    # A tensor without elements may have any rank.
    parts = [shape(arg) for arg in tensor_args(node)]
    empty = [index for index, part in enumerate(parts) if len(part) != len(result)]
    kept = [part for part in parts if len(part) == len(result)]
    factors, whole, pieces = _pieces(result, kept, argument(node, "dim") % len(result))
    for index in empty:
        pieces.insert(index, (factors.new(0, blocked=True),))
    return factors.rule(pieces, [whole])


def bind_split(node: fx.Node) -> BoundRule:
    """`split`: the results are chunks of the input."""
    given = shape(tensor_args(node)[0])
    factors, whole, pieces = _pieces(given, output_shapes(node), argument(node, "dim") % len(given))
    return factors.rule([whole], pieces)


def lower_split(emit: Emitter) -> fx.Node:
    """The op with the local sizes."""
    dim = argument(emit.node, "dim") % len(emit.input_layouts[0].dims)
    sizes = [layout.local_shape[dim] for layout in emit.output_layouts]
    return emit.call(aten.split_with_sizes.default, emit.args[0], sizes, dim)


def _padding(node: fx.Node) -> list[int]:
    """The padding in front of each dimension."""
    pairs = list(argument(node, "pad"))
    rank = len(shape(tensor_args(node)[0]))
    return [0] * (rank - len(pairs) // 2) + pairs[::2][::-1]


def bind_pad(node: fx.Node) -> BoundRule:
    """`constant_pad_nd`: the input is a chunk of the result."""
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    factors = Factors()
    pairs = [chunks(factors, [source, target], [front]) for source, target, front in zip(given, result, _padding(node))]
    return factors.rule([tuple(pair[0] for pair in pairs)], [tuple(pair[1] for pair in pairs)])


def lower_pad(emit: Emitter) -> fx.Node:
    """The op with padding in proportion to the local dimensions."""
    source, result = emit.input_layouts[0], emit.output_layouts[0]
    pad: list[int] = []
    for dim, front in reversed(list(enumerate(_padding(emit.node)))):
        whole, local = result.global_shape[dim], result.local_shape[dim]
        front = front * local // max(whole, 1)
        pad += [front, local - source.local_shape[dim] - front]
    return emit.call(aten.constant_pad_nd.default, emit.args[0], pad, *emit.args[2:])


_CHUNKS = "chunks, each of one inner factor; blocked: the number of chunks, all of a slice with steps"
family([aten.slice.Tensor, aten.slice_backward.default], bind_slice, _CHUNKS, lower=lower_slice)
family([aten.slice_scatter.default], bind_slice, _CHUNKS, lower=lower_slice)
_ONE = "one of a dimension; blocked: that dimension"
family([aten.select.int, aten.select_scatter.default], along("dim"), _ONE)
family([aten.select_backward.default], along("dim"), _ONE, lower=with_local_shape("input_sizes"))
family([aten.unbind.int, aten.stack.default], along("dim"), "one by one of a dimension; blocked: that dimension")
family([aten.cat.default], bind_cat, _CHUNKS)
_SPLITS = [
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
]
family(_SPLITS, bind_split, _CHUNKS, lower=lower_split)
family([aten.constant_pad_nd.default], bind_pad, _CHUNKS, lower=lower_pad)
