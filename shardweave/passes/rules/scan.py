"""Ops that go along some dimensions in an order: sums so far, sorts, the largest few, shifts, triangles.

These dimensions are blocked, all others are free.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from shardweave.ir import BoundRule, Dims, Factor
from shardweave.passes.rules.registry import Emitter, argument, family, output_shapes, shape, tensor_args

aten = torch.ops.aten


def bind_along(blocked: set[int], given: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> BoundRule:
    """All values have the dimensions of the first one in order; the `blocked` ones may differ in size, or be left out.

    A result whose rank is smaller lacks all of the blocked dimensions.
    """
    whole = given[0]
    factors: dict[str, Factor] = {}

    def name(index: int, size: int) -> tuple[str, ...]:
        if size == 1:
            return ()
        text = f"i{index}" if size == whole[index] else f"i{index}x{size}"
        factors.setdefault(text, Factor(text, size, index in blocked))
        return (text,)

    def dims(size: tuple[int, ...]) -> Dims:
        kept = range(len(whole)) if len(size) == len(whole) else [i for i in range(len(whole)) if i not in blocked]
        return tuple(name(index, length) for index, length in zip(kept, size, strict=True))

    inputs, outputs = tuple(map(dims, given)), tuple(map(dims, results))
    return BoundRule(tuple(factors.values()), inputs, outputs)


def along(*names: str) -> Callable[[fx.Node], BoundRule]:
    """The binder of ops whose arguments `names` say which dimensions are blocked: all of them where none is given."""

    def binder(node: fx.Node) -> BoundRule:
        given = [shape(arg) for arg in tensor_args(node)]
        rank = len(given[0])
        blocked: set[int] = set()
        for name in names:
            dims = argument(node, name)
            listed = dims if isinstance(dims, (list, tuple)) else [dims]
            whole = dims is None or len(listed) == 0
            blocked |= set(range(rank)) if whole else {dim % max(rank, 1) for dim in listed}
        if not names:
            blocked = set(range(rank))
        return bind_along(blocked, given, output_shapes(node))

    return binder


def bind_last_two(node: fx.Node) -> BoundRule:
    """Triangles: the last two dimensions are blocked."""
    size = shape(tensor_args(node)[0])
    return bind_along({len(size) - 2, len(size) - 1}, [size], output_shapes(node))


def _own(size: tuple[int, ...], letter: str, factors: list[Factor], blocked: bool = True) -> Dims:
    names: list[tuple[str, ...]] = []
    for index, length in enumerate(size):
        if length > 1:
            factors.append(Factor(f"{letter}{index}", length, blocked))
        names.append((f"{letter}{index}",) if length > 1 else ())
    return tuple(names)


def bind_histogram(node: fx.Node) -> BoundRule:
    """Counts of parts add up, if the bounds are given and not those of the data; the bins are blocked."""
    data = argument(node, "min") == argument(node, "max")
    factors: list[Factor] = []
    given = _own(shape(tensor_args(node)[0]), "i", factors, blocked=data)
    bins = _own(output_shapes(node)[0], "k", factors)
    return BoundRule(tuple(factors), (given,), (bins,))


def bind_search(node: fx.Node) -> BoundRule:
    """Places in a sorted sequence: the sequence is blocked, what is placed is free, and so are rows of both."""
    bounds = argument(node, "boundaries" if node.target is aten.bucketize.Tensor else "sorted_sequence")
    value = argument(node, "self")
    factors: list[Factor] = []
    found = _own(shape(value), "i", factors, blocked=False)
    rows = shape(bounds)[:-1]
    last = _own(shape(bounds)[-1:], "k", factors)
    sorted_ = (*found[: len(rows)], *last)
    by_value = {id(bounds): sorted_, id(value): found}
    inputs = tuple(by_value.get(id(arg), sorted_) for arg in tensor_args(node))
    return BoundRule(tuple(factors), inputs, (found,))


def bind_diagonal(node: fx.Node) -> BoundRule:
    """`diagonal`, `diagonal_scatter` and `diag_embed`: both dimensions and the diagonal are blocked."""
    values = [shape(arg) for arg in tensor_args(node)]
    embed, written = node.target is aten.diag_embed.default, node.target is aten.diagonal_scatter.default
    whole = output_shapes(node)[0] if embed else values[0]
    line = values[0] if embed else values[1] if written else output_shapes(node)[0]
    crossed = {argument(node, name) % len(whole) for name in ("dim1", "dim2")}
    factors: list[Factor] = []
    names = list(_own(whole, "i", factors, blocked=False))
    factors = [Factor(f.name, f.size, int(f.name[1:]) in crossed) for f in factors]
    last = _own(line[-1:], "k", factors)
    thin: Dims = (*(name for index, name in enumerate(names) if index not in crossed), *last)
    wide: Dims = tuple(names)
    inputs = (thin,) if embed else (wide, thin) if written else (wide,)
    return BoundRule(tuple(factors), inputs, (wide if embed or written else thin,))


def bind_unfold(node: fx.Node) -> BoundRule:
    """Windows along a dimension: it is blocked, and so are the windows and what is in them."""
    backward = node.target is aten.unfold_backward.default
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    whole, windows = (result, given) if backward else (given, result)
    dim = argument(node, "dim" if backward else "dimension") % max(len(whole), 1)
    factors: list[Factor] = []
    names = list(_own(whole, "i", factors, blocked=False))
    factors = [Factor(f.name, f.size, f.name == f"i{dim}") for f in factors]
    count, inside = _own((windows[dim], windows[-1]), "k", factors)
    cut: Dims = (*names[:dim], count, *names[dim + 1 :], inside)
    return BoundRule(tuple(factors), *(((cut,), (tuple(names),)) if backward else ((tuple(names),), (cut,))))


def lower_unfold_backward(emit: Emitter) -> fx.Node:
    """The same windows, in the local shape."""
    grad, _, *rest = emit.args
    return emit.call(aten.unfold_backward.default, grad, list(emit.output_layouts[0].local_shape), *rest)


SCANS = [
    aten.cumsum.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    aten.kthvalue.default,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.prod.dim_int,
]
family(SCANS, along("dim"), "in order along a dimension; blocked: that dimension")
family([aten.flip.default, aten.roll.default], along("dims"), "moved along dimensions; blocked: those dimensions")
family(
    [aten.prod.default, aten.median.default, aten.nanmedian.default],
    along(),
    "one number of all values; blocked: all dimensions",
)
family(
    [aten.tril.default, aten.triu.default], bind_last_two, "a triangle of matrices; blocked: the last two dimensions"
)
family([aten.histc.default], bind_histogram, "counts add up; blocked: the bins, and all where the data sets the bounds")
family(
    [aten.searchsorted.Tensor, aten.bucketize.Tensor], bind_search, "places in a sorted sequence; blocked: the sequence"
)
family(
    [aten.diagonal.default, aten.diagonal_scatter.default, aten.diag_embed.default],
    bind_diagonal,
    "a diagonal; blocked: its two dimensions and itself",
)
_WINDOWS = "windows along a dimension; blocked: that dimension, the windows and what is in them"
family([aten.unfold.default], bind_unfold, _WINDOWS)
family([aten.unfold_backward.default], bind_unfold, _WINDOWS, lower=lower_unfold_backward)
