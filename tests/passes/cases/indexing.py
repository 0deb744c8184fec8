"""Indexing, gathering and scattering, and values made in the likeness of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.passes.cases.draw import Call, Draw, case

aten = torch.ops.aten


# -- indexing by tensors


def _indices(d: Draw, size: list[int]) -> tuple[list[Any], list[int]]:
    """Index tensors for some dimensions of `size`, some of them counting, and the shape of the result."""
    rank = len(size)
    spread = d.sizes(0, 2)
    indexed = sorted(d.rng.sample(range(rank), d.choice(list(range(1, rank + 1)))))
    count = d.rng.choice(indexed) if d.flag() else None
    if count is not None:
        spread.append(size[count])
    at = d.rng.randrange(len(spread)) if count is not None else 0
    if count is not None:
        spread[at] = size[count]
    indices: list[Any] = [None] * (indexed[-1] + 1)
    for dim in indexed:
        shape = d.broadcast(spread) or spread  # torch's fake tensors mistake [] with [1] for []
        indices[dim] = d.integers(size[dim], *shape) - size[dim] * d.flag()
        if dim == count:
            indices[dim] = d.counting(size[dim], *[size[dim] if i == at else 1 for i in range(len(spread))])
    real = [torch.zeros(i.args[1] if not isinstance(i, Tensor) else i.shape) for i in indices if i is not None]
    common = list(torch.broadcast_shapes(*(value.shape for value in real)))
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    free = [length for dim, length in enumerate(size) if dim not in indexed]
    front = indexed[0] if together else 0
    return indices, [*free[:front], *common, *free[front:]]


@case(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(d: Draw) -> Call:
    size = d.sizes(1, 3)
    indices, _ = _indices(d, size)
    if d.choice([False, False, True]):
        return (d.mask(*size), indices), {}
    return (d.tensor(*size), indices), {}


def _unique(d: Draw, size: list[int]) -> tuple[list[Any], list[int]]:
    """Index tensors that name no place twice: one dimension by some of its rows, in any order."""
    dim = d.rng.randrange(len(size))
    rows = torch.randperm(size[dim], generator=d.generator)[: d.choice(list(range(1, size[dim] + 1)))]
    return [*[None] * dim, rows - size[dim] * d.flag()], [*size[:dim], len(rows), *size[dim + 1 :]]


@case(aten.index_put.default)
def index_put(d: Draw) -> Call:
    size = d.sizes(1, 3)
    if d.flag():
        indices, result = _indices(d, size)
        return (d.zeros(*size), indices, d.tensor(*d.broadcast(result)), True), {}
    indices, result = _unique(d, size)
    return (d.tensor(*size), indices, d.tensor(*d.broadcast(result))), {}


@case(aten._unsafe_index_put.default)
def index_add_any(d: Draw) -> Call:
    size = d.sizes(1, 3)
    indices, result = _indices(d, size)
    return (d.tensor(*size), indices, d.tensor(*d.broadcast(result)), True), {}


def _rows(d: Draw) -> tuple[list[int], int, Tensor, list[int]]:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    rows = torch.randperm(size[dim], generator=d.generator)[: d.choice(list(range(1, size[dim] + 1)))]
    part = list(size)
    part[dim] = len(rows)
    return size, dim, rows, part


@case(aten.index_select.default)
def index_select(d: Draw) -> Call:
    size, dim, rows, _ = _rows(d)
    return (d.tensor(*size), dim, rows), {}


@case(aten.index_add.default)
def index_add(d: Draw) -> Call:
    size, dim, rows, part = _rows(d)
    rows = rows if d.flag() else d.integers(size[dim], len(rows))
    return (d.tensor(*size), dim, rows, d.tensor(*part)), {"alpha": 2} if d.flag() else {}


@case(aten.index_copy.default)
def index_copy(d: Draw) -> Call:
    size, dim, rows, part = _rows(d)
    return (d.tensor(*size), dim, rows, d.tensor(*part)), {}


@case(aten.index_fill.int_Scalar)
def index_fill(d: Draw) -> Call:
    size, dim, rows, _ = _rows(d)
    return (d.tensor(*size), dim, rows, 1.5), {}


@case(aten.index_fill.int_Tensor)
def index_fill_tensor(d: Draw) -> Call:
    size, dim, rows, _ = _rows(d)
    return (d.tensor(*size), dim, rows, d.tensor()), {}


@case(aten.take.default)
def take(d: Draw) -> Call:
    value = d.tensor(*d.sizes(1, 3))
    return (value, d.integers(value.numel(), *d.sizes(0, 2))), {}


# -- gather and scatter


def _picks(d: Draw, write: bool) -> tuple[list[int], int, Tensor, list[int]]:
    """The shape of a value, a dimension, an index along it, and the shape of what is written."""
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    along = dim % len(size)
    picked = list(size)
    picked[along] = 1 if d.flag() else d.size(among=[1, 2, 3, 4, 6])
    if d.choice([False, False, True]):  # shorter than the value in some other dimension
        other = d.rng.randrange(len(size))
        picked[other] = d.rng.randrange(1, size[other] + 1) if other != along else picked[other]
    if write:  # no place twice
        picked[along] = min(picked[along], size[along])
        order = torch.rand(*[n if i != along else size[along] for i, n in enumerate(picked)], generator=d.generator)
        index = order.argsort(along).narrow(along, 0, picked[along]).contiguous()
    else:
        index = d.integers(size[along], *picked)
    source = [length + d.choice([0, 0, 0, 2]) for length in picked]
    return size, dim, index, source


@case(aten.gather.default)
def gather(d: Draw) -> Call:
    size, dim, index, _ = _picks(d, write=False)
    return (d.mask(*size) if d.choice([False, False, True]) else d.tensor(*size), dim, index), {}


@case(aten.scatter.src)
def scatter(d: Draw) -> Call:
    size, dim, index, source = _picks(d, write=True)
    return (d.tensor(*size), dim, index, d.tensor(*source)), {}


@case(aten.scatter.value)
def scatter_value(d: Draw) -> Call:
    size, dim, index, _ = _picks(d, write=False)
    return (d.tensor(*size), dim, index, 1.5), {}


@case(aten.scatter_add.default)
def scatter_add(d: Draw) -> Call:
    size, dim, index, source = _picks(d, write=False)
    return (d.zeros(*size), dim, index, d.tensor(*source)), {}


@case(aten.scatter.reduce)
def scatter_reduce_old(d: Draw) -> Call:
    size, dim, index, source = _picks(d, write=False)
    return (d.tensor(*size), dim, index, d.tensor(*source)), {"reduce": d.choice(["add", "multiply"])}


@case(aten.scatter.value_reduce)
def scatter_value_reduce(d: Draw) -> Call:
    size, dim, index, _ = _picks(d, write=False)
    return (d.tensor(*size), dim, index, 1.5), {"reduce": d.choice(["add", "multiply"])}


@case(aten.scatter_reduce.two)
def scatter_reduce(d: Draw) -> Call:
    size, dim, index, source = _picks(d, write=False)
    how = d.choice([("sum", False), ("mean", True), ("amax", True), ("amin", False), ("prod", True)])
    return (d.tensor(*size), dim, index, d.tensor(*source), how[0]), {"include_self": how[1]}


# -- likenesses


@case(aten.new_zeros.default, aten.new_ones.default)
def new(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 2)), d.sizes(0, 3)), {"dtype": torch.int64} if d.flag() else {}


@case(aten.new_full.default)
def new_full(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 2)), d.sizes(0, 3), 1.5), {}


@case(aten.zeros_like.default, aten.ones_like.default, aten.zero.default)
def like(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)),), {}


@case(aten.full_like.default, aten.fill.Scalar)
def full_like(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)), 1.5), {}


@case(aten.full.default)
def full(d: Draw) -> Call:
    return (d.sizes(0, 3), 1.5), {"dtype": d.choice([torch.float64, torch.int64])}


@case(aten.zeros.default, aten.ones.default)
def blank(d: Draw) -> Call:
    return (d.sizes(0, 3),), {"dtype": d.dtype}


def _numbers(d: Draw) -> dict[str, torch.dtype]:
    return {"dtype": d.choice([torch.int64, torch.int32, torch.float64])} if d.flag() else {}


@case(aten.arange.default)
def counted(d: Draw) -> Call:
    return (d.size(),), _numbers(d)


@case(aten.arange.start)
def started(d: Draw) -> Call:
    start = d.choice([0, 3, -2, 0.5])
    return (start, start + d.size()), {} if start == 0.5 else _numbers(d)


@case(aten.arange.start_step)
def stepped(d: Draw) -> Call:
    start, step = d.choice([0, 3, -2]), d.choice([1, 2, -3, 0.5])
    return (start, start + step * d.size(), step), {} if step == 0.5 else _numbers(d)


@case(aten.fill.Tensor)
def fill(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)), d.tensor()), {}


@case(aten.copy.default)
def copy(d: Draw) -> Call:
    size = d.sizes(0, 3)
    source = d.tensor(*d.broadcast(size))
    return (d.tensor(*size), source.float() if d.flag() else source), {}


@case(aten.new_empty.default)
def new_empty(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 2)), d.sizes(0, 3)), {}


@case(aten.empty_like.default)
def empty_like(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 2)),), {}


@case(aten.new_empty_strided.default)
def new_empty_strided(d: Draw) -> Call:
    size = d.sizes(2)
    return (d.tensor(*d.sizes(0, 2)), size, [size[1], 1]), {}
