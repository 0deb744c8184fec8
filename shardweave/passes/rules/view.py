"""View ops: layouts pass through them; a reshape's factors come from its shapes.

Views refine atoms and nothing else does: a reshape ``(b s) d -> b s d`` makes the first dimension of its input a
product. `slice`, `cat`, `split` and `select` on equal chunks are products too, whose outer factor (the chunk) is
blocked: the halves of a rotary embedding or a fused qkv keep their inner factor free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from shardweave.ir import BoundRule, Dims, Factor
from shardweave.passes.rules.registry import (
    Emitter,
    argument,
    family,
    output_shapes,
    shape,
    tensor_args,
)

aten = torch.ops.aten


class _Builder:
    """Collects the factors of a generated rule."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def new(self, size: int, blocked: bool = False) -> tuple[str, ...]:
        """A new factor as a dimension of its own; size 1 has none."""
        if size == 1:
            return ()
        self.factors.append(Factor(f"i{len(self.factors)}", size, blocked))
        return (self.factors[-1].name,)


def reshape_dims(builder: _Builder, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
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
    builder: _Builder, source: Sequence[int], target: Sequence[int]
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
    builder = _Builder()
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
    builder = _Builder()
    dims = [builder.new(length) for length in size]
    return BoundRule(tuple(builder.factors), (tuple(dims),), (tuple(dims[dim] for dim in order),))


def bind_identity(node: fx.Node) -> BoundRule:
    """`detach`, `alias`, `clone`."""
    builder = _Builder()
    dims = tuple(builder.new(length) for length in shape(tensor_args(node)[0]))
    return BoundRule(tuple(builder.factors), (dims,), (dims,))


def bind_expand(node: fx.Node) -> BoundRule:
    """`expand`: a broadcast dimension is a factor that only the output has."""
    source, (target,) = shape(tensor_args(node)[0]), output_shapes(node)
    builder = _Builder()
    right = tuple(builder.new(length) for length in target)
    aligned = right[len(target) - len(source) :]
    left = tuple(names if length > 1 else () for names, length in zip(aligned, source))
    return BoundRule(tuple(builder.factors), (left,), (right,))


def _chunked(builder: _Builder, whole: int, part: int, aligned: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dimensions of a whole and of one part of it: ``(chunk r)`` and ``r`` where the parts are equal chunks."""
    if part == whole:
        names = builder.new(whole)
        return names, names
    if aligned and whole % part == 0:
        chunk, inner = builder.new(whole // part, blocked=True), builder.new(part)
        return chunk + inner, inner
    return builder.new(whole, blocked=True), builder.new(part, blocked=True)


def _bounds(node: fx.Node, whole: int) -> tuple[int, int, int]:
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    start = 0 if start is None else start
    end = whole if end is None else end
    start, end = (min(max(bound + whole if bound < 0 else bound, 0), whole) for bound in (start, end))
    return start, end, step


def bind_slice(node: fx.Node) -> BoundRule:
    """`slice` and `slice_backward`: the sliced dimension is a chunk of the whole one."""
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    backward = node.target is aten.slice_backward.default
    dim = argument(node, "dim") % len(given)
    wholes, parts = (result, given) if backward else (given, result)
    start, _, step = _bounds(node, wholes[dim])
    builder = _Builder()
    whole_dims, part_dims = [], []
    for index, (whole, part) in enumerate(zip(wholes, parts)):
        aligned = step == 1 and part > 0 and start % part == 0
        names = _chunked(builder, whole, part, aligned) if index == dim else (builder.new(whole),) * 2
        whole_dims.append(names[0])
        part_dims.append(names[1])
    sides = (tuple(part_dims), tuple(whole_dims)) if backward else (tuple(whole_dims), tuple(part_dims))
    return BoundRule(tuple(builder.factors), (sides[0],), (sides[1],))


def lower_slice(emit: Emitter) -> fx.Node:
    """The same chunk of the local dimension: bounds scale with it."""
    backward = emit.node.target is aten.slice_backward.default
    whole_layout = (emit.output_layouts if backward else emit.input_layouts)[0]
    dim = argument(emit.node, "dim") % len(whole_layout.dims)
    whole, local = whole_layout.global_shape[dim], whole_layout.local_shape[dim]
    start, end, step = _bounds(emit.node, whole)
    start, end = start * local // whole, end * local // whole
    if backward:
        sizes = list(emit.output_layouts[0].local_shape)
        return emit.call(aten.slice_backward.default, emit.args[0], sizes, dim, start, end, step)
    return emit.call(aten.slice.Tensor, emit.args[0], dim, start, end, step)


def bind_select(node: fx.Node) -> BoundRule:
    """`select` and `select_backward`: the selected dimension is blocked, the others are free."""
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    backward = node.target is aten.select_backward.default
    wholes = result if backward else given
    dim = argument(node, "dim") % len(wholes)
    builder = _Builder()
    whole_dims = [builder.new(size, blocked=index == dim) for index, size in enumerate(wholes)]
    part_dims = whole_dims[:dim] + whole_dims[dim + 1 :]
    sides = (tuple(part_dims), tuple(whole_dims)) if backward else (tuple(whole_dims), tuple(part_dims))
    return BoundRule(tuple(builder.factors), (sides[0],), (sides[1],))


def lower_select_backward(emit: Emitter) -> fx.Node:
    """The same selection, into zeros of the local shape."""
    sizes = list(emit.output_layouts[0].local_shape)
    return emit.call(aten.select_backward.default, emit.args[0], sizes, *emit.args[2:])


def bind_stack(node: fx.Node) -> BoundRule:
    """`stack` and `unbind`: the dimension that counts the parts is blocked, the others are free."""
    unbind = node.target is aten.unbind.int
    whole = shape(tensor_args(node)[0]) if unbind else output_shapes(node)[0]
    dim = argument(node, "dim") % len(whole)
    builder = _Builder()
    whole_dims = tuple(builder.new(size, blocked=index == dim) for index, size in enumerate(whole))
    parts = (whole_dims[:dim] + whole_dims[dim + 1 :],) * whole[dim]
    return BoundRule(tuple(builder.factors), *(((whole_dims,), parts) if unbind else (parts, (whole_dims,))))


def bind_cat(node: fx.Node) -> BoundRule:
    """`cat` of equal chunks is a product whose outer factor is blocked; of unequal ones its dimension is blocked."""
    (result,) = output_shapes(node)
    parts = [shape(arg) for arg in tensor_args(node)]
    dim = argument(node, "dim") % len(result)
    builder = _Builder()
    shared = [() if index == dim else builder.new(size) for index, size in enumerate(result)]
    if len({part[dim] for part in parts}) == 1:
        whole, inner = _chunked(builder, result[dim], parts[0][dim], True)
        inners = [inner] * len(parts)
    else:
        whole, inners = builder.new(result[dim], True), [builder.new(part[dim], True) for part in parts]

    def dims(names: tuple[str, ...]) -> Dims:
        return tuple(names if index == dim else other for index, other in enumerate(shared))

    return BoundRule(tuple(builder.factors), tuple(dims(inner) for inner in inners), (dims(whole),))


def bind_split(node: fx.Node) -> BoundRule:
    """`split` into equal chunks: each output is the inner factor of the product."""
    given, results = shape(tensor_args(node)[0]), output_shapes(node)
    dim = argument(node, "dim") % len(given)
    builder = _Builder()
    shared = [() if index == dim else builder.new(size) for index, size in enumerate(given)]
    if len({part[dim] for part in results}) == 1:
        whole, inner = _chunked(builder, given[dim], results[0][dim], True)
        inners = [inner] * len(results)
    else:
        whole, inners = builder.new(given[dim], True), [builder.new(part[dim], True) for part in results]

    def dims(names: tuple[str, ...]) -> Dims:
        return tuple(names if index == dim else other for index, other in enumerate(shared))

    return BoundRule(tuple(builder.factors), (dims(whole),), tuple(dims(inner) for inner in inners))


def lower_split(emit: Emitter) -> fx.Node:
    """Chunks of the local dimension."""
    dim = argument(emit.node, "dim") % len(emit.input_layouts[0].dims)
    sizes = [layout.local_shape[dim] for layout in emit.output_layouts]
    return emit.call(aten.split_with_sizes.default, emit.args[0], sizes, dim)


def bind_pad(node: fx.Node) -> BoundRule:
    """`constant_pad_nd`: a padded dimension is blocked."""
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    builder = _Builder()
    pairs = []
    for source, target in zip(given, result):
        names = builder.new(source) if source == target else None
        pairs.append((names, names) if names is not None else (builder.new(source, True), builder.new(target, True)))
    return BoundRule(tuple(builder.factors), (tuple(a for a, _ in pairs),), (tuple(b for _, b in pairs),))


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
family(RESHAPES, bind_reshape, "reshape", lower=lower_to_local_shape, kind="view")
family([aten.permute.default, aten.transpose.int, aten.t.default], bind_permute, "permute", kind="view")
family([aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default], bind_identity, "identity",
       lower=lower_identity, kind="view")  # fmt: skip
family([aten.clone.default], bind_identity, "identity", kind="view")
family([aten.expand.default], bind_expand, "expand", lower=lower_to_local_shape)
family([aten.slice.Tensor, aten.slice_backward.default], bind_slice, "slice on equal chunks", lower=lower_slice)
family([aten.select.int], bind_select, "select")
family([aten.select_backward.default], bind_select, "select", lower=lower_select_backward)
family([aten.unbind.int, aten.stack.default], bind_stack, "stack and unbind")
family([aten.cat.default], bind_cat, "cat of equal chunks")
family([aten.split.Tensor, aten.split_with_sizes.default], bind_split, "split into equal chunks", lower=lower_split)
family([aten.constant_pad_nd.default], bind_pad, "pad")
