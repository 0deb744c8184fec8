"""Moments, norms, losses and products that are written in others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.passes.cases.compute import some_dims
from tests.passes.cases.draw import Call, Draw, case

aten = torch.ops.aten


# -- reductions


@case(aten._fused_moving_avg_obs_fq_helper_functional.default)
def fake_quantized_ends(d: Draw) -> Call:
    channels, by_channel = d.size(), d.flag()
    sizes, flags = [channels] if by_channel else [], [torch.tensor([int(d.flag())]) for _ in range(2)]
    known = [d.tensor(*sizes).abs().neg(), d.tensor(*sizes).abs()]
    steps = [d.tensor(*(sizes or [1])).abs() + 0.1, torch.zeros(*(sizes or [1]), dtype=torch.int32)]
    values = [each.float() for each in (d.tensor(*sizes, 2), *known, steps[0])]
    return (values[0], *flags, *values[1:], steps[1], 0.01, -8, 7, 0, by_channel, d.flag()), {}


@case(aten.any.default, aten.all.default)
def any_all(d: Draw) -> Call:
    size = d.sizes(0, 3)
    return (d.mask(*size) if d.flag() else d.integers(2, *size),), {}


@case(aten.any.dim, aten.all.dim)
def any_all_dim(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.mask(*size), d.dim(len(size)), d.flag()), {}


@case(aten.any.dims, aten.all.dims)
def any_all_dims(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.mask(*size), d.choice([None, some_dims(d, len(size))]), d.flag()), {}


@case(aten.var.correction, aten.var_mean.correction, aten.std.correction, aten.std_mean.correction)
def moments(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dims = d.choice([None, some_dims(d, len(size))])
    return (d.tensor(*size), dims), {"correction": d.choice([None, 0, 1, 2]), "keepdim": d.flag()}


ORDERS = [2, 1, 0, 3, 0.5, math.inf, -math.inf]


@case(aten.linalg_vector_norm.default)
def vector_norm(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dims = d.choice([None, some_dims(d, len(size))])
    return (d.tensor(*size), d.choice(ORDERS), dims, d.flag()), {"dtype": torch.float64} if d.flag() else {}


@case(aten.norm.Scalar)
def norm(d: Draw) -> Call:
    return (d.tensor(*d.sizes(1, 3)), d.choice(ORDERS)), {}


@case(aten.norm.ScalarOpt_dtype)
def norm_dtype(d: Draw) -> Call:
    return (d.tensor(*d.sizes(1, 3)), d.choice([None, *ORDERS])), {"dtype": torch.float64}


@case(aten.norm.ScalarOpt_dim)
def norm_dim(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.choice([None, *ORDERS]), some_dims(d, len(size)), d.flag()), {}


@case(aten.norm.ScalarOpt_dim_dtype)
def norm_dim_dtype(d: Draw) -> Call:
    (*args,), _ = norm_dim(d)
    return tuple(args), {"dtype": torch.float64}


@case(aten.logsumexp.default)
def logsumexp(d: Draw) -> Call:
    size = d.sizes(1, 3)
    value = d.tensor(*size)
    value = value.masked_fill(d.mask(*size), -math.inf) if d.flag() else value
    return (value, some_dims(d, len(size)) or [0], d.flag()), {}


@case(aten.aminmax.default)
def aminmax(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size),), {"dim": d.dim(len(size)), "keepdim": d.flag()} if d.flag() else {}


# -- products


@case(aten.baddbmm.default)
def baddbmm(d: Draw) -> Call:
    b, m, k, n = d.sizes(4)
    scales = {"beta": d.choice([0.5, 0]), "alpha": 3.0} if d.flag() else {}
    return (d.tensor(*d.choice([[b, m, n], [b, 1, n], [n]])), d.tensor(b, m, k), d.tensor(b, k, n)), scales


@case(aten.addbmm.default)
def addbmm(d: Draw) -> Call:
    b, m, k, n = d.sizes(4)
    return (d.tensor(m, n), d.tensor(b, m, k), d.tensor(b, k, n)), {"beta": 0.5, "alpha": 3.0} if d.flag() else {}


@case(aten.addmv.default)
def addmv(d: Draw) -> Call:
    m, k = d.sizes(2)
    return (d.tensor(m), d.tensor(m, k), d.tensor(k)), {"beta": 0.5, "alpha": 3.0} if d.flag() else {}


@case(aten.addr.default)
def addr(d: Draw) -> Call:
    m, n = d.sizes(2)
    return (d.tensor(m, n), d.tensor(m), d.tensor(n)), {"beta": 0.5, "alpha": 3.0} if d.flag() else {}


# -- activations


@case(aten._safe_softmax.default)
def safe_softmax(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    rows = [1 if index == dim % len(size) else length for index, length in enumerate(size)]
    value = d.tensor(*size).masked_fill(d.mask(*size), -math.inf).masked_fill(d.mask(*rows), -math.inf)
    return (value, dim), {"dtype": torch.float64} if d.flag() else {}


@case(aten.log_sigmoid_forward.default)
def log_sigmoid(d: Draw) -> Call:
    return (d.tensor(*d.sizes(1, 3)),), {}


@case(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(d: Draw) -> Call:
    value = d.tensor(*d.sizes(1, 3))
    return (d.tensor(*value.shape), value, aten.log_sigmoid_forward.default(value)[1]), {}


def _slopes(d: Draw, size: list[int]) -> Tensor:
    return d.tensor(*[length if index == 1 else 1 for index, length in enumerate(size)])


@case(aten._prelu_kernel.default)
def prelu(d: Draw) -> Call:
    size = d.sizes(2, 3)
    return (d.tensor(*size), _slopes(d, size)), {}


@case(aten._prelu_kernel_backward.default)
def prelu_backward(d: Draw) -> Call:
    size = d.sizes(2, 3)
    return (d.tensor(*size), d.tensor(*size), _slopes(d, size)), {}


# -- losses


def _pair(d: Draw) -> tuple[Tensor, Tensor, Tensor, int]:
    """Two values, a gradient of the loss between them, and how it is reduced."""
    size, reduction = d.sizes(1, 3), d.choice([0, 1, 2])
    return d.tensor(*size), d.tensor(*size), d.tensor(*(size if reduction == 0 else [])), reduction


@case(aten.smooth_l1_loss.default, aten.huber_loss.default)
def robust(d: Draw) -> Call:
    x, target, _, reduction = _pair(d)
    return (x, target, reduction, d.choice([0.5, 1.0])), {}


@case(aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default)
def robust_backward(d: Draw) -> Call:
    x, target, grad, reduction = _pair(d)
    return (grad, x, target, reduction, d.choice([0.5, 1.0])), {}


@case(aten.soft_margin_loss.default)
def soft_margin(d: Draw) -> Call:
    x, target, _, reduction = _pair(d)
    return (x, target.sign(), reduction), {}


@case(aten.soft_margin_loss_backward.default)
def soft_margin_backward(d: Draw) -> Call:
    x, target, grad, reduction = _pair(d)
    return (grad, x, target.sign(), reduction), {}


@case(aten.binary_cross_entropy.default)
def binary(d: Draw) -> Call:
    x, target, _, reduction = _pair(d)
    weight = d.positive(*x.shape) if d.flag() else None
    return (x.sigmoid(), target.sigmoid(), weight, reduction), {}


@case(aten.binary_cross_entropy_backward.default)
def binary_backward(d: Draw) -> Call:
    x, target, grad, reduction = _pair(d)
    weight = d.positive(*x.shape) if d.flag() else None
    return (grad, x.sigmoid(), target.sigmoid(), weight, reduction), {}


@case(aten.binary_cross_entropy_with_logits.default)
def binary_logits(d: Draw) -> Call:
    x, target, _, reduction = _pair(d)
    weight = d.positive(*x.shape) if d.flag() else None
    positive = d.positive(x.shape[-1]) if d.flag() else None
    return (x, target.sigmoid(), weight, positive, reduction), {}


def _segments(d: Draw) -> tuple[Tensor, Tensor, Tensor | None, int]:
    n, classes, h, w = d.size(), d.size(among=[2, 3, 4, 6]), d.size(among=[1, 2, 3]), d.size(among=[1, 2, 4])
    scores, target = torch.log_softmax(d.tensor(n, classes, h, w), 1), d.integers(classes, n, h, w)
    ignored = d.choice([-100, 1])
    if ignored == -100:
        target = target.masked_fill(d.mask(n, h, w), ignored)
    return scores, target, d.positive(classes) if d.flag() else None, ignored


@case(aten.nll_loss2d_forward.default)
def nll2d(d: Draw) -> Call:
    scores, target, weight, ignored = _segments(d)
    return (scores, target, weight, d.choice([0, 1, 2]), ignored), {}


@case(aten.nll_loss2d_backward.default)
def nll2d_backward(d: Draw) -> Call:
    scores, target, weight, ignored = _segments(d)
    reduction = d.choice([0, 1, 2])
    grad = d.tensor(*(target.shape if reduction == 0 else ()))
    kept = target != ignored
    total = kept.to(d.dtype) if weight is None else torch.where(kept, weight[target.masked_fill(~kept, 0)], 0.0)
    return (grad, scores, target, weight, reduction, ignored, total.sum()), {}
