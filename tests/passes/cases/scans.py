"""Scans, sorts, triangles, counts, repetitions, and pieces that do not divide evenly."""

from __future__ import annotations

import math

import torch

from tests.passes.cases.compute import some_dims
from tests.passes.cases.draw import Call, Draw, case

aten = torch.ops.aten


# -- along one dimension


@case(
    aten.cumsum.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
    aten.prod.dim_int,
)
def along(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.dim(len(size))), {}


@case(aten.kthvalue.default)
def kthvalue(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    return (d.tensor(*size), d.rng.randrange(1, size[dim] + 1), dim, d.flag()), {}


@case(aten.topk.default)
def topk(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    return (d.tensor(*size), d.rng.randrange(1, size[dim] + 1), dim, d.flag()), {}


@case(aten.sort.default)
def sort(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.dim(len(size)), d.flag()), {}


@case(aten.sort.stable)
def sort_stable(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.integers(4, *size),), {"stable": True, "dim": d.dim(len(size)), "descending": d.flag()}


@case(aten.prod.default, aten.median.default, aten.nanmedian.default)
def over_all(d: Draw) -> Call:
    return (d.tensor(*d.sizes(1, 3)),), {}


@case(aten.flip.default)
def flip(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dims = d.rng.sample(range(len(size)), d.choice(list(range(1, len(size) + 1))))
    return (d.tensor(*size), [dim - len(size) * d.flag() for dim in dims]), {}


@case(aten.roll.default)
def roll(d: Draw) -> Call:
    size = d.sizes(1, 3)
    if d.flag():
        return (d.tensor(*size), [3]), {}
    dims = d.rng.sample(range(len(size)), d.choice(list(range(1, len(size) + 1))))
    return (d.tensor(*size), [d.choice([-1, 2]) for _ in dims], dims), {}


@case(aten.tril.default, aten.triu.default)
def triangle(d: Draw) -> Call:
    return (d.tensor(*d.sizes(2, 4)), d.choice([-1, 0, 2])), {}


@case(aten.nonzero_static.default)
def nonzero_static(d: Draw) -> Call:
    flags = d.tensor(*d.sizes(1, 2)) > 0
    return (flags,), {"size": int(flags.count_nonzero())}


@case(aten.repeat_interleave.Tensor)
def repeats(d: Draw) -> Call:
    counts = torch.tensor([d.choice([0, 1, 2]) for _ in range(d.size())])
    return (counts,), {"output_size": int(counts.sum())}


@case(aten.histc.default)
def histc(d: Draw) -> Call:
    bounds = (0, 0) if d.flag() else (-1, 2)
    return (d.tensor(*d.sizes(1, 2)), d.size(), *bounds), {}


@case(aten.searchsorted.Tensor)
def searchsorted(d: Draw) -> Call:
    rows = d.sizes(0, 2)
    sorted_ = d.tensor(*rows, d.size())
    values = d.tensor(*(rows if rows or d.flag() else []), d.size())
    if d.flag():
        return (sorted_, values), {"sorter": sorted_.argsort(-1), "right": d.flag()}
    return (sorted_.sort(-1).values, values), {"right": d.flag()}


@case(aten.bucketize.Tensor)
def bucketize(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)), d.tensor(d.size()).sort().values), {"right": d.flag()}


def _two_dims(d: Draw) -> tuple[list[int], int, int]:
    size = d.sizes(2, 4)
    first, second = d.rng.sample(range(len(size)), 2)
    return size, first, second - len(size) * d.flag()


@case(aten.diagonal.default)
def diagonal(d: Draw) -> Call:
    size, first, second = _two_dims(d)
    return (d.tensor(*size), d.choice([0, 0, 1]) if min(size) > 1 else 0, first, second), {}


@case(aten.diagonal_scatter.default)
def diagonal_scatter(d: Draw) -> Call:
    size, first, second = _two_dims(d)
    line = torch.diagonal(torch.zeros(size), 0, first, second)
    return (d.tensor(*size), d.tensor(*line.shape), 0, first, second), {}


@case(aten.diag_embed.default)
def diag_embed(d: Draw) -> Call:
    size = d.sizes(1, 3)
    first, second = d.rng.sample(range(len(size) + 1), 2)
    return (d.tensor(*size), d.choice([0, 1, -2]), first, second), {}


@case(aten.unfold.default)
def unfold(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    return (d.tensor(*size), dim, d.rng.randrange(1, size[dim] + 1), d.choice([1, 2])), {}


@case(aten.unfold_backward.default)
def unfold_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size)) % len(size)
    width, step = d.rng.randrange(1, size[dim] + 1), d.choice([1, 2])
    windows = list(torch.zeros(size).unfold(dim, width, step).shape)
    spread = [index for index in range(len(size)) if index != dim and d.flag()]
    grad = d.tensor(*(1 if index in spread else length for index, length in enumerate(windows)))
    return (grad, size, dim, width, step), {}


# -- pieces and repetitions


@case(aten.slice_scatter.default)
def slice_scatter(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    start = d.rng.randrange(size[dim])
    end = d.rng.randrange(start + 1, size[dim] + 1)
    step = d.choice([1, 1, 2])
    part = list(size)
    part[dim] = math.ceil((end - start) / step)
    return (d.tensor(*size), d.tensor(*part), dim, start, end, step), {}


@case(aten.select_scatter.default)
def select_scatter(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    part = [length for index, length in enumerate(size) if index != dim % len(size)]
    return (d.tensor(*size), d.tensor(*part), dim, d.dim(size[dim])), {}


@case(aten.repeat.default)
def repeat(d: Draw) -> Call:
    size = d.sizes(0, 3)
    times = [d.choice([1, 2, 3, 4]) for _ in range(len(size) + d.choice([0, 1]))]
    return (d.tensor(*size), times), {}


@case(aten.view_as_real.default)
def view_as_real(d: Draw) -> Call:
    size = d.sizes(0, 3)
    return (torch.complex(d.tensor(*size), d.tensor(*size)),), {}


@case(aten.view_as_complex.default)
def view_as_complex(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3), 2),), {}


@case(aten.view.dtype)
def view_dtype(d: Draw) -> Call:
    value = d.tensor(*d.sizes(1, 3))
    return (value, d.choice([torch.int32, torch.int64]) if value.shape[-1] % 2 == 0 else value.dtype), {}


@case(aten.glu.default)
def glu(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    size[dim] *= 2
    return (d.tensor(*size), dim), {}


@case(aten.glu_backward.default)
def glu_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    whole = list(size)
    whole[dim] *= 2
    return (d.tensor(*size), d.tensor(*whole), dim), {}


@case(aten.as_strided.default)
def as_strided(d: Draw) -> Call:
    size = d.sizes(1, 4)
    order = d.rng.sample(range(len(size)), len(size))
    shown = torch.zeros(size).permute(order)
    return (d.tensor(math.prod(size)) if d.flag() else d.tensor(*size), list(shown.shape), list(shown.stride())), {}


@case(aten.as_strided_scatter.default)
def as_strided_scatter(d: Draw) -> Call:
    (value, size, stride), _ = as_strided(d)
    return (value, d.tensor(*size), size, stride), {}


# -- pointwise ops that torch does not tag so


@case(aten.floor_divide.default)
def floor_divide(d: Draw) -> Call:
    size = d.sizes(0, 3)
    return (d.integers(50, *size), d.integers(5, *d.broadcast(size)) + 1), {}


@case(aten.floor_divide.Scalar)
def floor_divide_number(d: Draw) -> Call:
    return (d.integers(50, *d.sizes(0, 3)), 3), {}


@case(aten.hardswish_backward.default, aten.hardsigmoid_backward.default, aten.mish_backward.default)
def activation_backward(d: Draw) -> Call:
    size = d.sizes(0, 3)
    return (d.tensor(*size), d.tensor(*size)), {}


@case(aten.softshrink_backward.default, aten.hardshrink_backward.default)
def shrink_backward(d: Draw) -> Call:
    size = d.sizes(0, 3)
    return (d.tensor(*size), d.tensor(*size), 0.4), {}


def _normalized(d: Draw, size: list[int]) -> tuple[list[int], int]:
    dims = sorted({dim % len(size) for dim in some_dims(d, len(size))})
    return dims or [0], d.choice([0, 1, 2])


@case(aten._fft_c2c.default)
def fft(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.complex(*size), *_normalized(d, size), d.flag()), {}


@case(aten._fft_r2c.default)
def fft_of_reals(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), *_normalized(d, size), d.flag()), {}


@case(aten._fft_c2r.default)
def fft_to_reals(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dims, norm = _normalized(d, size)
    last = dims[-1]
    whole = size[last]
    half = torch.fft.fftn(d.tensor(*size), dim=dims).narrow(last, 0, whole // 2 + 1).contiguous()
    return (half, dims, norm, whole), {}


@case(aten._weight_norm_interface.default)
def weight_norm(d: Draw) -> Call:
    size, dim = d.sizes(2, 3), d.choice([0, -1])
    dim %= len(size)
    gains = [length if index == dim else 1 for index, length in enumerate(size)]
    return (d.positive(*size), d.tensor(*gains), dim), {}


@case(aten._weight_norm_interface_backward.default)
def weight_norm_backward(d: Draw) -> Call:
    (weight, gains, dim), _ = weight_norm(d)
    norms = weight.square().sum([index for index in range(weight.dim()) if index != dim], keepdim=True).sqrt()
    return (d.tensor(*weight.shape), weight, gains, norms, dim), {}
