"""Products, tables, losses, norms and reductions."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.passes.cases.draw import Call, Draw, case

aten = torch.ops.aten


# -- products


@case(aten.mm.default)
def mm(d: Draw) -> Call:
    m, k, n = d.sizes(3)
    return (d.tensor(m, k), d.tensor(k, n)), {}


@case(aten.addmm.default)
def addmm(d: Draw) -> Call:
    m, k, n = d.sizes(3)
    scales = {"beta": 0.5, "alpha": 3.0} if d.flag() else {}
    return (d.tensor(*d.choice([[n], [m, n]])), d.tensor(m, k), d.tensor(k, n)), scales


@case(aten.bmm.default)
def bmm(d: Draw) -> Call:
    b, m, k, n = d.sizes(4)
    return (d.tensor(b, m, k), d.tensor(b, k, n)), {}


@case(aten.dot.default)
def dot(d: Draw) -> Call:
    (k,) = d.sizes(1)
    return (d.tensor(k), d.tensor(k)), {}


@case(aten.mv.default)
def mv(d: Draw) -> Call:
    m, k = d.sizes(2)
    return (d.tensor(m, k), d.tensor(k)), {}


# -- tables


@case(aten.embedding.default)
def embedding(d: Draw) -> Call:
    v, width = d.sizes(2)
    padding = d.choice([-1, v - 1])
    return (d.tensor(v, width), d.integers(v, *d.sizes(1, 2)), padding), {}


@case(aten.embedding_dense_backward.default)
def embedding_backward(d: Draw) -> Call:
    v, width = d.sizes(2)
    size = d.sizes(1, 2)
    return (d.tensor(*size, width), d.integers(v, *size), v, d.choice([-1, v - 1]), d.choice([False, True])), {}


# -- softmax and losses


@case(aten._log_softmax.default, aten._softmax.default)
def softmax(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.dim(len(size)), False), {}


@case(aten._log_softmax_backward_data.default)
def log_softmax_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    return (d.tensor(*size), torch.log_softmax(d.tensor(*size), dim), dim, d.dtype), {}


@case(aten._softmax_backward_data.default)
def softmax_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    return (d.tensor(*size), torch.softmax(d.tensor(*size), dim), dim, d.dtype), {}


def _nll(d: Draw) -> tuple[Tensor, Tensor, Tensor | None, int]:
    rows, classes = d.size(), d.size(among=[2, 3, 4, 6, 8])
    scores, target = torch.log_softmax(d.tensor(rows, classes), -1), d.integers(classes, rows)
    ignored = d.choice([-100, 1])
    if ignored == -100:  # and rows that are padding, whose impossible classes are -inf
        padding = d.mask(rows)
        target = target.masked_fill(padding, ignored)
        scores = scores.masked_fill(padding.unsqueeze(-1), -math.inf)
    return scores, target, d.positive(classes) if d.flag() else None, ignored


@case(aten.nll_loss_forward.default)
def nll(d: Draw) -> Call:
    scores, target, weight, ignored = _nll(d)
    return (scores, target, weight, d.choice([0, 1, 2]), ignored), {}


@case(aten.nll_loss_backward.default)
def nll_backward(d: Draw) -> Call:
    scores, target, weight, ignored = _nll(d)
    reduction = d.choice([0, 1, 2])
    grad = d.tensor(*(target.shape if reduction == 0 else ()))
    kept = target != ignored
    total = kept.to(d.dtype) if weight is None else torch.where(kept, weight[target.masked_fill(~kept, 0)], 0.0)
    return (grad, scores, target, weight, reduction, ignored, total.sum()), {}


@case(aten.mse_loss.default)
def mse(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.tensor(*size), d.choice([0, 1, 2])), {}


@case(aten.mse_loss_backward.default)
def mse_backward(d: Draw) -> Call:
    size, reduction = d.sizes(1, 3), d.choice([0, 1, 2])
    return (d.tensor(*(size if reduction == 0 else [])), d.tensor(*size), d.tensor(*size), reduction), {}


# -- norms


def _norm(d: Draw) -> tuple[Tensor, list[int], Tensor | None, Tensor | None]:
    size = d.sizes(1, 3)
    normalised = size[-d.choice(list(range(1, len(size) + 1))) :]
    weight = d.tensor(*normalised) if d.flag() else None
    bias = d.tensor(*normalised) if weight is not None and d.flag() else None
    return d.tensor(*size), normalised, weight, bias


@case(aten.native_layer_norm.default)
def layer_norm(d: Draw) -> Call:
    return (*_norm(d), 1e-5), {}


@case(aten.native_layer_norm_backward.default)
def layer_norm_backward(d: Draw) -> Call:
    x, normalised, weight, bias = _norm(d)
    _, mean, rstd = aten.native_layer_norm.default(x, normalised, weight, bias, 1e-5)
    mask = [d.flag() or weight is None, weight is not None, bias is not None]
    return (d.tensor(*x.shape), x, normalised, mean, rstd, weight, bias, mask), {}


# -- reductions


@case(aten.sum.default)
def total(d: Draw) -> Call:
    size = d.sizes(1, 3)
    value = d.mask(*size) if d.flag() else d.tensor(*size)
    return (value,), {"dtype": d.dtype} if d.flag() else {}


@case(aten.max.default, aten.min.default)
def extreme(d: Draw) -> Call:
    return (d.tensor(*d.sizes(1, 3)),), {}


def some_dims(d: Draw, rank: int) -> list[int]:
    dims = d.data.draw(st.lists(st.integers(0, rank - 1), unique=True, max_size=rank))
    return [dim - rank * d.flag() for dim in dims]


@case(aten.sum.dim_IntList, aten.amax.default, aten.amin.default)
def reduction(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), some_dims(d, len(size)), d.flag()), {}


@case(aten.mean.dim)
def mean_dim(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), some_dims(d, len(size)), d.flag()), {}


@case(aten.mean.default)
def mean(d: Draw) -> Call:
    return (d.tensor(*d.sizes(1, 3)),), {}
