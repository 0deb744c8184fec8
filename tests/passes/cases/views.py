"""Views: reshapes, permutations, and pieces of values."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from tests.passes.cases.compute import some_dims
from tests.passes.cases.draw import Call, Draw, case

aten = torch.ops.aten


def regrouped(d: Draw, size: list[int]) -> list[int]:
    """A random shape with as many elements as `size`, mostly one that shares factors with it."""
    parts: list[int] = []
    for length in size:
        cut = d.rng.choice([n for n in range(1, length + 1) if length % n == 0])
        parts += [cut, length // cut]
    if d.rng.random() < 0.2:
        d.rng.shuffle(parts)
    merged = [1]
    for part in parts:
        if d.rng.random() < 0.5:
            merged[-1] *= part
        else:
            merged.append(part)
    return merged


@case(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(d: Draw) -> Call:
    size = d.sizes(1, 3)
    target = regrouped(d, size)
    if d.flag():
        target[d.rng.randrange(len(target))] = -1
    return (d.tensor(*size), target), {}


def _with_ones(d: Draw) -> list[int]:
    return [1 if d.rng.random() < 0.3 else length for length in d.sizes(1, 4)]


@case(aten.squeeze.default)
def squeeze(d: Draw) -> Call:
    return (d.tensor(*_with_ones(d)),), {}


@case(aten.squeeze.dim)
def squeeze_dim(d: Draw) -> Call:
    size = _with_ones(d)
    return (d.tensor(*size), d.dim(len(size))), {}


@case(aten.squeeze.dims)
def squeeze_dims(d: Draw) -> Call:
    size = _with_ones(d)
    return (d.tensor(*size), some_dims(d, len(size))), {}


@case(aten.unsqueeze.default)
def unsqueeze(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.dim(len(size) + 1)), {}


@case(aten.flatten.using_ints)
def flatten(d: Draw) -> Call:
    size = d.sizes(1, 4)
    start = d.choice(list(range(len(size))))
    return (d.tensor(*size), start, d.choice(list(range(start, len(size))))), {}


@case(aten.permute.default)
def permute(d: Draw) -> Call:
    size = d.sizes(1, 4)
    order = d.data.draw(st.permutations(range(len(size))))
    return (d.tensor(*size), [dim - len(size) * d.flag() for dim in order]), {}


@case(aten.transpose.int)
def transpose(d: Draw) -> Call:
    size = d.sizes(2, 4)
    return (d.tensor(*size), d.dim(len(size)), d.dim(len(size))), {}


@case(aten.t.default)
def t(d: Draw) -> Call:
    return (d.tensor(*d.sizes(1, 2)),), {}


@case(aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
def identity(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)),), {}


@case(aten.clone.default)
def clone(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)),), {"memory_format": torch.contiguous_format} if d.flag() else {}


@case(aten.expand.default)
def expand(d: Draw) -> Call:
    target = d.sizes(1, 4)
    source = d.broadcast(target)
    aligned = len(target) - len(source)
    sizes = [
        -1 if index >= aligned and source[index - aligned] == length and d.flag() else length
        for index, length in enumerate(target)
    ]
    return (d.tensor(*source), sizes), {}


def _piece(d: Draw, whole: int) -> tuple[int, int, int]:
    """Bounds of a slice: often an equal chunk."""
    if d.flag():
        part = d.choice([n for n in range(1, whole + 1) if whole % n == 0])
        start = part * d.choice(list(range(whole // part)))
        return start, start + part, 1
    start = d.choice(list(range(whole)))
    return start, d.choice(list(range(start + 1, whole + 1))), d.choice([1, 2])


@case(aten.slice.Tensor)
def slice_(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    start, end, step = _piece(d, size[dim])
    if d.flag() and start:
        start -= size[dim]
    if end == size[dim] and d.flag():
        end = 2**63 - 1
    return (d.tensor(*size), dim, start, end, step), {}


@case(aten.slice_backward.default)
def slice_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    start, end, step = _piece(d, size[dim])
    part = list(size)
    part[dim] = math.ceil((end - start) / step)
    return (d.tensor(*part), size, dim, start, end, step), {}


@case(aten.select.int)
def select(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    return (d.tensor(*size), dim, d.dim(size[dim])), {}


@case(aten.select_backward.default)
def select_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    part = [length for index, length in enumerate(size) if index != dim % len(size)]
    return (d.tensor(*part), size, dim, d.dim(size[dim])), {}


@case(aten.cat.default)
def cat(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    values = []
    equal = d.flag()
    for _ in range(d.choice([1, 2, 3])):
        part = list(size)
        part[dim] = part[dim] if equal else d.size()
        values.append(d.tensor(*part))
    return (values + values[: d.flag()], dim), {}


@case(aten.stack.default)
def stack(d: Draw) -> Call:
    size = d.sizes(0, 3)
    values = [d.tensor(*size) for _ in range(d.choice([1, 2, 3]))]
    return (values + values[: d.flag()], d.dim(len(size) + 1)), {}


@case(aten.unbind.int)
def unbind(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.dim(len(size))), {}


@case(aten.split.Tensor)
@case(aten.unsafe_split.Tensor)
def split(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    return (d.tensor(*size), d.choice(list(range(1, size[dim] + 1))), dim), {}


@case(aten.split_with_sizes.default)
@case(aten.unsafe_split_with_sizes.default)
def split_with_sizes(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    part = d.size()
    parts = [part] * d.choice([1, 2, 3]) if d.flag() else d.sizes(1, 3)
    size[dim] = sum(parts)
    return (d.tensor(*size), parts, dim), {}


@case(aten.constant_pad_nd.default)
def pad(d: Draw) -> Call:
    size = d.sizes(1, 3)
    count = d.choice(list(range(1, len(size) + 1)))
    return (d.tensor(*size), [d.choice([0, 1, 2]) for _ in range(2 * count)], d.choice([0.0, 1.5])), {}
