"""Ops of convolutional networks: convolutions and the norms over their channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

import shardweave.ops.layer_ops  # noqa: F401
from tests.passes.cases.draw import Call, Draw, case

aten = torch.ops.aten
custom_ops = torch.ops.shardweave
# The CPU has no kernel of this op.
LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("_fused_rms_norm_backward", decomposition_table[aten._fused_rms_norm_backward.default], "CPU")
BATCHES = [1, 2, 3, 4, 6]

# -- convolutions


def _convolution(d: Draw) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """An input, a weight, and the arguments after the bias; some are depthwise, some transposed."""
    places = d.choice([1, 2, 2, 3])
    groups = d.size(among=[1, 1, 2, 3, 4, 6])
    ins, outs = (1, d.size(among=[1, 2])) if d.flag() else (d.size(among=[1, 2, 4]), d.size(among=[1, 2, 3]))
    kernel = [d.size(among=[1, 2, 3]) for _ in range(places)]
    x = d.tensor(d.size(among=BATCHES), groups * ins, *(d.size(among=[4, 5]) for _ in range(places)))
    transposed = d.flag()
    weight = d.tensor(*([groups * ins, outs] if transposed else [groups * outs, ins]), *kernel)
    stride = [d.size(among=[1, 2]) for _ in range(places)]
    dilation = [d.size(among=[1, 2]) if max(kernel) < 3 else 1 for _ in range(places)]
    padding = [d.size(among=[0, 1]) for _ in range(places)]
    output_padding = [d.size(among=[0, 1]) if transposed and step == 2 else 0 for step in stride]
    if transposed:  # its output must not be empty
        padding = [min(size, 1) * (size > 2) for size in kernel]
    return x, weight, (stride, padding, dilation, transposed, output_padding, groups)


@case(aten.convolution.default)
def convolution(d: Draw) -> Call:
    x, weight, options = _convolution(d)
    channels = weight.shape[1] * options[-1] if options[3] else weight.shape[0]
    return (x, weight, d.tensor(channels) if d.flag() else None, *options), {}


def _gradient(d: Draw) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    x, weight, options = _convolution(d)
    return d.tensor(*aten.convolution.default(x, weight, None, *options).shape), x, weight, options


@case(aten.convolution_backward.default)
def convolution_backward(d: Draw) -> Call:
    grad, x, weight, options = _gradient(d)
    mask = d.choice([[True, True, True], [False, True, True], [True, False, False], [True, True, False]])
    return (grad, x, weight, [grad.shape[1]] if mask[2] else None, *options, mask), {}


@case(custom_ops.conv_input_grad.default)
def conv_input_grad(d: Draw) -> Call:
    grad, x, weight, options = _gradient(d)
    return (grad, weight, list(x.shape), *options), {}


@case(custom_ops.conv_weight_grad.default)
def conv_weight_grad(d: Draw) -> Call:
    grad, x, weight, options = _gradient(d)
    return (grad, x, list(weight.shape), *options), {}


# -- group norm and RMS norm


def _group_norm(d: Draw) -> tuple[Tensor, Tensor | None, Tensor | None, list[int]]:
    groups, per = d.size(among=[1, 2, 3, 4, 6]), d.size(among=[1, 2, 4])
    x = d.tensor(d.size(among=BATCHES), groups * per, *d.choice([[], [3], [3, 5]]))
    weight = d.tensor(groups * per) if d.flag() else None
    bias = d.tensor(groups * per) if weight is not None and d.flag() else None
    return x, weight, bias, [x.shape[0], x.shape[1], x[0, 0].numel(), groups]


@case(aten.native_group_norm.default)
def group_norm(d: Draw) -> Call:
    x, weight, bias, sizes = _group_norm(d)
    return (x, weight, bias, *sizes, 1e-5), {}


@case(aten.native_group_norm_backward.default)
def group_norm_backward(d: Draw) -> Call:
    x, weight, bias, sizes = _group_norm(d)
    _, mean, rstd = aten.native_group_norm.default(x, weight, bias, *sizes, 1e-5)
    mask = [d.flag() or weight is None, weight is not None, bias is not None]
    return (d.tensor(*x.shape), x, mean, rstd, weight, *sizes, mask), {}


@case(aten._fused_rms_norm.default)
def rms_norm(d: Draw) -> Call:
    size = d.sizes(1, 3)
    normalised = size[-d.choice(list(range(1, len(size) + 1))) :]
    return (d.tensor(*size), normalised, d.tensor(*normalised) if d.flag() else None, 1e-5), {}


@case(aten._fused_rms_norm_backward.default)
def rms_norm_backward(d: Draw) -> Call:
    (x, normalised, weight, eps), _ = rms_norm(d)
    rstd = aten._fused_rms_norm.default(x, normalised, weight, eps)[1]
    return (d.tensor(*x.shape), x, normalised, rstd, weight, [True, weight is not None]), {}


# -- batch norm


def _batch_norm(d: Draw, affine: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    x = d.tensor(d.size(among=[2, 3, 4, 6]), d.size(), *d.choice([[], [3], [3, 5]])) + 2.0
    channels = x.shape[1]
    weight = d.tensor(channels) if affine or d.flag() else None
    return x, weight, None if weight is None else d.tensor(channels), d.tensor(channels), d.positive(channels)


@case(aten._native_batch_norm_legit_functional.default)
def batch_norm(d: Draw) -> Call:
    return (*_batch_norm(d), d.choice([True, True, False]), 0.1, 1e-5), {}


@case(aten._native_batch_norm_legit_no_training.default)
def batch_norm_evaluated(d: Draw) -> Call:
    return (*_batch_norm(d), 0.1, 1e-5), {}


@case(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(d: Draw) -> Call:
    return (*_batch_norm(d, affine=True), 0.1, 1e-5), {}


@case(aten._native_batch_norm_legit.no_stats)
def batch_norm_untracked(d: Draw) -> Call:
    return (*_batch_norm(d)[:3], True, 0.1, 1e-5), {}


@case(aten.native_batch_norm_backward.default)
def batch_norm_backward(d: Draw) -> Call:
    x, weight, bias, mean, variance = _batch_norm(d)
    training = d.choice([True, True, False])
    _, *saved, _, _ = aten._native_batch_norm_legit_functional.default(
        x, weight, bias, mean, variance, training, 0.1, 1e-5
    )
    saved = saved if training else [None, None]
    mask = [True, weight is not None, weight is not None]
    return (d.tensor(*x.shape), x, weight, mean, variance, *saved, training, 1e-5, mask), {}


@case(aten.batch_norm_backward.default)
def batch_norm_backward_with_reserve(d: Draw) -> Call:
    (grad, x, weight, *rest), _ = batch_norm_backward(d)
    weight = d.tensor(x.shape[1]) if weight is None else weight
    return (grad, x, weight, *rest, torch.zeros(1, dtype=torch.uint8)), {}
