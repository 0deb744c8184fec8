"""Softmax and cross entropy. Over a sharded vocabulary they fall apart into a max, a sum and a masked pick."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import BoundRule, Dims, Factor
from shardweave.sharding.rules.registry import RULES, Rule, argument, shape, tensor_args

aten = torch.ops.aten


def bind_softmax(node: fx.Node) -> BoundRule:
    """All values of one shape; the dimension of the softmax is blocked."""
    size = shape(tensor_args(node)[0])
    dim = argument(node, "dim") % len(size)
    factors = tuple(Factor(f"i{index}", length, index == dim) for index, length in enumerate(size) if length > 1)
    dims: Dims = tuple((f"i{index}",) if length > 1 else () for index, length in enumerate(size))
    return BoundRule(factors, (dims,) * len(tensor_args(node)), (dims,))


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Log-softmax in ops that can be split along `dim`."""
    x = x.float() if half_to_float else x
    shifted = x - aten.amax.default(x, [dim], True)
    return shifted - aten.log.default(aten.sum.dim_IntList(aten.exp.default(shifted), [dim], True))


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The gradient of log-softmax in ops that can be split along `dim`."""
    result = grad - aten.exp.default(output) * aten.sum.dim_IntList(grad, [dim], True)
    return result.to(dtype)


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Softmax in ops that can be split along `dim`."""
    x = x.float() if half_to_float else x
    weights = aten.exp.default(x - aten.amax.default(x, [dim], True))
    return weights / aten.sum.dim_IntList(weights, [dim], True)


def softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The gradient of softmax in ops that can be split along `dim`."""
    product = grad * output
    return (product - output * aten.sum.dim_IntList(product, [dim], True)).to(dtype)


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax that gives zeros for a row of which nothing is allowed, in ops that can be split along `dim`."""
    x = x if dtype is None else x.to(dtype)
    largest = aten.amax.default(x, [dim], True)
    weights = aten.exp.default(x - aten.masked_fill.Scalar(largest, aten.eq.Scalar(largest, -math.inf), 0))
    total = aten.sum.dim_IntList(weights, [dim], True)
    return weights / aten.masked_fill.Scalar(total, aten.eq.Scalar(total, 0), 1)


_FORMS: dict[Any, Callable[..., Any]] = {
    aten._log_softmax.default: log_softmax,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten._softmax.default: softmax,
    aten._safe_softmax.default: safe_softmax,
    aten._softmax_backward_data.default: softmax_backward,
}
for _target, _form in _FORMS.items():
    RULES[_target] = Rule(bind_softmax, decompose=_form, source="values of one shape; blocked: the softmax's dimension")


def _class_dim(x: Tensor) -> int:
    """Classes are last, or before the two dimensions of an image."""
    return 1 if x.dim() == 4 else -1


def _rows(log_probabilities: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """For each row its class, 0 where the row is ignored, and its weight, 0 where it is ignored."""
    dim = _class_dim(log_probabilities)
    ignored = aten.eq.Scalar(target, ignore_index)
    row = aten.unsqueeze.default(aten.masked_fill.Scalar(target, ignored, 0), dim)
    if weight is None:
        return row, aten._to_copy.default(aten.logical_not.default(ignored), dtype=log_probabilities.dtype)
    weight = weight if dim == -1 else aten.view.default(weight, [-1, 1, 1])
    weights = aten.gather.default(aten.expand.default(weight, list(log_probabilities.shape)), dim, row)
    return row, aten.masked_fill.Scalar(aten.squeeze.dim(weights, dim), ignored, 0)


def nll_loss_forward(
    log_probabilities: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Negative log likelihood: a pick along the classes, a sum over the rows (reduction: 0 none, 1 mean, 2 sum)."""
    dim = _class_dim(log_probabilities)
    row, weights = _rows(log_probabilities, target, weight, ignore_index)
    picked = aten.squeeze.dim(aten.gather.default(log_probabilities, dim, row), dim)
    # An ignored row's first class may be impossible, and -inf * 0 is not 0.
    kept = aten.masked_fill.Scalar(picked, aten.eq.Scalar(target, ignore_index), 0)
    losses = aten.neg.default(kept * weights)
    count = aten.sum.default(weights)
    if reduction == 0:
        return losses, aten.zeros_like.default(count)
    total = aten.sum.default(losses)
    return (total / count if reduction == 1 else total), count


def nll_loss_backward(
    grad: Tensor,
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """The gradient of `nll_loss_forward`: one number a row, put at its class.

    It is put into zeros that lie where the log-probabilities do: zeros that depend on nothing would be whole on every
    rank, as large as the whole logits.
    """
    row, weights = _rows(log_probabilities, target, weight, ignore_index)
    scale = aten.neg.default(grad / total_weight if reduction == 1 else grad)
    dim = _class_dim(log_probabilities)
    # torch skips ignored rows: where all are ignored, `scale` is a division by zero, and 0 * nan is not 0.
    kept = aten.masked_fill.Scalar(weights * scale, aten.eq.Scalar(target, ignore_index), 0)
    values = aten.unsqueeze.default(kept, dim)
    every = aten.full.default([], True, dtype=torch.bool, device=log_probabilities.device)
    return aten.scatter.src(aten.masked_fill.Scalar(log_probabilities, every, 0), dim, row, values)


def log_sigmoid(x: Tensor) -> tuple[Any, Any]:
    """The logarithm of the sigmoid, and on CPUs what its gradient uses."""
    away = aten.exp.default(aten.neg.default(aten.abs.default(x)))
    result = aten.clamp_max.default(x, 0) - aten.log1p.default(away)
    return result, away if x.device.type != "cuda" else aten.full.default([0], 0, dtype=x.dtype, device=x.device)


def binary_cross_entropy_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = 1
) -> Any:
    """Binary cross entropy of logits (reduction: 0 none, 1 mean, 2 sum)."""
    certain = log_sigmoid(x)[0]
    if pos_weight is not None:
        certain = ((pos_weight - 1) * target + 1) * certain
    losses = (1 - target) * x - certain
    losses = losses if weight is None else losses * weight
    if reduction == 0:
        return losses
    total = aten.sum.default(losses)
    return aten.div.Scalar(total, losses.numel()) if reduction == 1 else total
