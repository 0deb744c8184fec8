"""Ops that `annotate` writes in simpler ones, because their parts along a factor do not add up as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.sharding.rules.index import INDEX_CONDITIONAL, INDEX_FORMS, SCATTER_CONDITIONAL
from shardweave.sharding.rules.norm import BATCH_NORMS, NORM_CONDITIONAL
from shardweave.sharding.rules.random import FACTORIES
from shardweave.sharding.rules.reduction import (
    MOMENTS,
    binary_cross_entropy_with_logits,
    log_sigmoid,
    nll_loss_backward,
    nll_loss_forward,
)
from shardweave.sharding.rules.registry import BORROWED
from shardweave.sharding.rules.spatial import convolution, convolution_backward
from shardweave.sharding.rules.view import TILING_CONDITIONAL

aten = torch.ops.aten


def addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The product, then the bias: each part of a split ``k`` would add the bias again."""
    product = aten.mm.default(left, right)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def baddbmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """As `addmm`, for each of a batch."""
    product = aten.bmm.default(left, right)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def addbmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """As `baddbmm`, summed over the batch."""
    product = aten.sum.dim_IntList(aten.bmm.default(left, right), [0])
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def addr(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """An outer product, and the bias."""
    product = left.unsqueeze(1) * right
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def huber_loss(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    """Squared where it is small, straight where it is large (reduction: 0 none, 1 mean, 2 sum)."""
    away = aten.abs.default(x - target)
    losses = torch.where(away <= delta, 0.5 * away * away, delta * (away - 0.5 * delta))
    if reduction == 0:
        return losses
    total = aten.sum.default(losses)
    return aten.div.Scalar(total, x.numel()) if reduction == 1 else total


def mean_dim(x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over the global number of elements: a part's own mean would weigh its own number."""
    dims = list(range(x.dim())) if not dim else [d % x.dim() for d in dim]
    total = aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)
    return aten.div.Scalar(total, math.prod(x.shape[d] for d in dims))


def mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """As `mean_dim`, over all dimensions."""
    return aten.div.Scalar(aten.sum.default(x, dtype=dtype), x.numel())


def mse_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Squared differences and their sum (reduction: 0 none, 1 mean, 2 sum)."""
    squared = (x - target) * (x - target)
    if reduction == 0:
        return squared
    total = aten.sum.default(squared)
    return aten.div.Scalar(total, x.numel()) if reduction == 1 else total


def mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """The gradient of `mse_loss`."""
    scale = 2.0 / x.numel() if reduction == 1 else 2.0
    return (x - target) * aten.mul.Scalar(grad, scale)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: addmm,
    aten.mean.dim: mean_dim,
    aten.mean.default: mean,
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
    aten.nll_loss_forward.default: nll_loss_forward,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_forward.default: nll_loss_forward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
    aten.log_sigmoid_forward.default: log_sigmoid,
    aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
    aten.baddbmm.default: baddbmm,
    aten.addbmm.default: addbmm,
    aten.addr.default: addr,
    aten.huber_loss.default: huber_loss,
    **BORROWED,
    **FACTORIES,
    **MOMENTS,
    **INDEX_FORMS,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    **BATCH_NORMS,
}
CONDITIONAL: dict[Any, Callable[[fx.Node], Callable[..., Any] | None]] = {
    **INDEX_CONDITIONAL,
    **SCATTER_CONDITIONAL,
    **TILING_CONDITIONAL,
    **NORM_CONDITIONAL,
}
"""Ops that are written in others depending on their arguments: from the node to the form, None to leave it."""


def form_of(node: fx.Node) -> Callable[..., Any] | None:
    """The form that `annotate` writes a node in, None if it stays as it is."""
    if node.target in CONDITIONAL:
        return CONDITIONAL[node.target](node)
    return DECOMPOSITIONS.get(node.target)
