"""Reductions that are not a sum, a maximum or a minimum themselves, written in those: any, all, variances, norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Dim = int | Sequence[int] | None


def _dims(x: Tensor, dim: Dim) -> list[int]:
    listed = [dim] if isinstance(dim, int) else list(dim or ())
    return [d % max(x.dim(), 1) for d in listed] or list(range(x.dim()))


def any_(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Any:
    """Whether there are some that hold: flags cannot be combined over ranks, their number can."""
    if dim is not None and not isinstance(dim, int) and not len(dim):
        return x != 0  # torch reduces nothing then
    return aten.gt.Scalar(aten.sum.dim_IntList(x != 0, _dims(x, dim), keepdim), 0)


def all_(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Any:
    """Whether there are none that do not hold."""
    if dim is not None and not isinstance(dim, int) and not len(dim):
        return x != 0
    return aten.eq.Scalar(aten.sum.dim_IntList(x == 0, _dims(x, dim), keepdim), 0)


def var_mean(
    x: Tensor, dim: Dim = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean, in two passes: the mean of the whole, then the squares of what differs from it."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = aten.div.Scalar(aten.sum.dim_IntList(x, dims, True), count)
    away = x - mean
    degrees = max(0, count - (1 if correction is None else correction))
    squares = aten.sum.dim_IntList(away * away, dims, keepdim)
    variance = aten.div.Scalar(squares, degrees) if degrees else squares / torch.zeros_like(squares)
    return variance, mean if keepdim else aten.squeeze.dims(mean, dims)


def var(x: Tensor, dim: Dim = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """As `var_mean`."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std_mean(x: Tensor, dim: Dim = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """The root of the variance, and the mean."""
    variance, mean = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return aten.sqrt.default(variance), mean


def std(x: Tensor, dim: Dim = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """As `std_mean`."""
    return std_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def vector_norm(
    x: Tensor, ord: float = 2, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The norm of any order: a sum of powers, or the largest or smallest absolute value, or a count."""
    x = x if dtype is None else aten._to_copy.default(x, dtype=dtype)
    dims, size = _dims(x, dim), aten.abs.default(x)
    if ord == math.inf:
        return aten.amax.default(size, dims, keepdim)
    if ord == -math.inf:
        return aten.amin.default(size, dims, keepdim)
    if ord == 0:
        return aten.sum.dim_IntList((x != 0).to(x.dtype), dims, keepdim)
    if ord == 1:
        return aten.sum.dim_IntList(size, dims, keepdim)
    if ord == 2:
        return aten.sqrt.default(aten.sum.dim_IntList(x * x, dims, keepdim))
    return aten.sum.dim_IntList(size**ord, dims, keepdim) ** (1 / ord)


def norm(x: Tensor, p: float | None = 2, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The same, as it was spelled before."""
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


def logsumexp(x: Tensor, dim: Dim, keepdim: bool = False) -> Any:
    """Shifted by the largest, unless that is infinite."""
    dims = _dims(x, dim)
    x = x if x.is_floating_point() else aten._to_copy.default(x, dtype=torch.get_default_dtype())
    largest = aten.amax.default(x, dims, True)
    shift = aten.masked_fill.Scalar(largest, aten.isinf.default(largest), 0)
    total = aten.log.default(aten.sum.dim_IntList(aten.exp.default(x - shift), dims, True)) + shift
    return total if keepdim else aten.squeeze.dims(total, dims)


def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    """The smallest and the largest."""
    dims = _dims(x, dim)
    return aten.amin.default(x, dims, keepdim), aten.amax.default(x, dims, keepdim)


MOMENTS: dict[Any, Callable[..., Any]] = {
    aten.any.default: any_,
    aten.any.dim: any_,
    aten.any.dims: any_,
    aten.all.default: all_,
    aten.all.dim: all_,
    aten.all.dims: all_,
    aten.var_mean.correction: var_mean,
    aten.var.correction: var,
    aten.std_mean.correction: std_mean,
    aten.std.correction: std,
    aten.linalg_vector_norm.default: vector_norm,
    aten.norm.Scalar: norm,
    aten.norm.ScalarOpt_dim: norm,
    aten.norm.ScalarOpt_dim_dtype: norm,
    aten.norm.ScalarOpt_dtype: norm,
    aten.logsumexp.default: logsumexp,
    aten.aminmax.default: aminmax,
}
