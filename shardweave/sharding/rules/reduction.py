"""Rules of reductions, scans, sorts, softmax and cross entropy.

A reduced dimension is a factor that the output does not have. `any`, `all`, variances and norms are decomposed into
sums, maxima and minima. Ops that process a dimension in order (cumulative sums, sorts, top-k, rolls, triangles) block
that dimension; all others are free. Over a sharded vocabulary, softmax and cross entropy become a maximum, a sum and
a masked lookup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import BoundRule
from shardweave.sharding.rules.registry import (
    Factors,
    along,
    argument,
    bind_pattern,
    family,
    output_shapes,
    register_decomposition,
    rule,
    shape,
    tensor_args,
    with_local_shape,
)

aten = torch.ops.aten

_REDUCED = "reduced dimensions are contracted; blocked: nothing"
for _target, _op in {aten.sum.dim_IntList: "sum", aten.amax.default: "max", aten.amin.default: "min"}.items():
    family([_target], along("dim", reduce=_op), _REDUCED)
for _target, _op in {aten.sum.default: "sum", aten.max.default: "max", aten.min.default: "min"}.items():
    family([_target], along(reduce=_op), _REDUCED)


def bind_histogram(node: fx.Node) -> BoundRule:
    """Counts of parts add up if the bounds are arguments, not the extremes of the data. The bins are blocked."""
    by_data = argument(node, "min") == argument(node, "max")
    return bind_pattern(node, "[...] -> [k]" if by_data else "... -> [k]")


def bind_search(node: fx.Node) -> BoundRule:
    """Positions in a sorted sequence: the sequence is blocked; the values and the rows of both are free."""
    bounds = argument(node, "boundaries" if node.target is aten.bucketize.Tensor else "sorted_sequence")
    value = argument(node, "self")
    factors = Factors()
    found = [factors.new(size) for size in shape(value)]
    *rows, last = shape(bounds)
    by_value = {value: found}
    ordered = [*found[: len(rows)], factors.new(last, blocked=True)]
    return factors.rule([by_value.get(arg, ordered) for arg in tensor_args(node)], [found])


def bind_diagonal(node: fx.Node) -> BoundRule:
    """`diagonal`, `diagonal_scatter` and `diag_embed`: both dimensions and the diagonal are blocked."""
    values = [*(shape(arg) for arg in tensor_args(node)), *output_shapes(node)]
    whole, line = max(values, key=len), min(values, key=len)
    crossed = {argument(node, name) % len(whole) for name in ("dim1", "dim2")}
    factors = Factors()
    wide = [factors.new(size, blocked=dim in crossed) for dim, size in enumerate(whole)]
    thin = [*(names for dim, names in enumerate(wide) if dim not in crossed), factors.new(line[-1], blocked=True)]
    dims = [wide if len(value) == len(whole) else thin for value in values]
    return factors.rule(dims[:-1], dims[-1:])


def bind_unfold(node: fx.Node) -> BoundRule:
    """Windows along a dimension: the dimension, the windows and their elements are blocked.

    The other dimensions of windows may be broadcast, as those of an inverse short-time Fourier transform are.
    """
    backward = node.target is aten.unfold_backward.default
    given, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    whole, windows = (result, given) if backward else (given, result)
    dim = argument(node, "dim" if backward else "dimension") % max(len(whole), 1)
    factors = Factors()
    names = [factors.new(size, blocked=index == dim) for index, size in enumerate(whole)]
    count, inside = factors.new(windows[dim], blocked=True), factors.new(windows[-1], blocked=True)
    cut = [count if index == dim else names[index] if size > 1 else () for index, size in enumerate(windows[:-1])]
    cut.append(inside)
    return factors.rule([cut], [names]) if backward else factors.rule([names], [cut])


def bind_whole(node: fx.Node) -> BoundRule:
    """No dimension can be split."""
    factors = Factors()
    given, results = [shape(arg) for arg in tensor_args(node)], output_shapes(node)
    made = [[[factors.new(size, blocked=True) for size in value] for value in side] for side in (given, results)]
    return factors.rule(*made)


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
_CTC = "[t] b [c], b [s], b, b"
rule(torch.ops.shardweave.ctc_loss.default, f"{_CTC} -> b, b [t] [a]")
rule(torch.ops.shardweave.ctc_loss_backward.default, f"b, {_CTC}, b, b [t] [a] -> [t] b [c]")
family([torch.ops.shardweave.region.default], bind_whole, "sizes inside depend on values; blocked: all dimensions")
family(
    [aten.nonzero_static.default, aten.repeat_interleave.Tensor],
    bind_whole,
    "which elements are chosen, or repeated; blocked: all dimensions",
)
family(
    [aten._fused_moving_avg_obs_fq_helper_functional.default],
    bind_whole,
    "the ends of a tensor, and the steps of its quantization; blocked: all dimensions",
)
family(SCANS, along("dim"), "in order along a dimension; blocked: that dimension")
family(
    [aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default],
    along("dim"),
    "a Fourier transform along dimensions; blocked: those dimensions",
)
family([aten.flip.default, aten.roll.default], along("dims"), "moved along dimensions; blocked: those dimensions")
family(
    [aten.prod.default, aten.median.default, aten.nanmedian.default],
    along(),
    "one number of all values; blocked: all dimensions",
)
family(
    [aten.tril.default, aten.triu.default], along(-2, -1), "a triangle of matrices; blocked: the last two dimensions"
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
family([aten.unfold_backward.default], bind_unfold, _WINDOWS, lower=with_local_shape("input_sizes"))


Dim = int | Sequence[int] | None


def _dims(x: Tensor, dim: Dim) -> list[int]:
    listed = [dim] if isinstance(dim, int) else list(dim or ())
    return [d % x.dim() for d in listed if x.dim()] or list(range(x.dim()))


@register_decomposition(aten.mean.dim)
def mean_dim(x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """The sum, divided by the global number of elements: means of unequal parts cannot be combined."""
    dims = _dims(x, dim)
    total = aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)
    return aten.div.Scalar(total, math.prod(x.shape[d] for d in dims))


@register_decomposition(aten.mean.default)
def mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """As `mean_dim`, over all dimensions."""
    return aten.div.Scalar(aten.sum.default(x, dtype=dtype), x.numel())


@register_decomposition(aten.any.default, aten.any.dim, aten.any.dims)
def any_(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Any:
    """Whether the number of true elements is positive: numbers can be summed over ranks, flags cannot."""
    if dim is not None and not isinstance(dim, int) and not len(dim):
        return x != 0  # torch reduces nothing then
    return aten.gt.Scalar(aten.sum.dim_IntList(x != 0, _dims(x, dim), keepdim), 0)


@register_decomposition(aten.all.default, aten.all.dim, aten.all.dims)
def all_(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Any:
    """Whether the number of false elements is zero."""
    if dim is not None and not isinstance(dim, int) and not len(dim):
        return x != 0
    return aten.eq.Scalar(aten.sum.dim_IntList(x == 0, _dims(x, dim), keepdim), 0)


@register_decomposition(aten.var_mean.correction)
def var_mean(
    x: Tensor, dim: Dim = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean, in two passes: the global mean, then the squared differences from it."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = aten.div.Scalar(aten.sum.dim_IntList(x, dims, True), count)
    away = x - mean
    degrees = max(0, count - (1 if correction is None else correction))
    squares = aten.sum.dim_IntList(away * away, dims, keepdim)
    variance = aten.div.Scalar(squares, degrees) if degrees else squares / torch.zeros_like(squares)
    return variance, mean if keepdim else aten.squeeze.dims(mean, dims)


@register_decomposition(aten.var.correction)
def var(x: Tensor, dim: Dim = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """As `var_mean`."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@register_decomposition(aten.std_mean.correction)
def std_mean(x: Tensor, dim: Dim = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """The root of the variance, and the mean."""
    variance, mean = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return aten.sqrt.default(variance), mean


@register_decomposition(aten.std.correction)
def std(x: Tensor, dim: Dim = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """As `std_mean`."""
    return std_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@register_decomposition(aten.linalg_vector_norm.default)
def vector_norm(
    x: Tensor, ord: float = 2, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The norm of any order: a sum of powers, an extreme absolute value, or a count."""
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


@register_decomposition(
    aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, aten.norm.ScalarOpt_dtype
)
def norm(x: Tensor, p: float | None = 2, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """As `linalg_vector_norm`, by its former name."""
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@register_decomposition(aten._weight_norm_interface.default)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """A weight with the direction of `v` and the norms `g` of its slices along `dim`, and the norms of `v`."""
    norms = vector_norm(v, 2, [d for d in range(v.dim()) if d != dim % v.dim()], keepdim=True)
    return v * (g / norms), norms


@register_decomposition(aten._weight_norm_interface_backward.default)
def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The gradients of `v` and `g`."""
    along = aten.sum.dim_IntList(grad * v, [d for d in range(v.dim()) if d != dim % v.dim()], True)
    return (g / norms) * (grad - v * (along / (norms * norms))), along / norms


@register_decomposition(aten.logsumexp.default)
def logsumexp(x: Tensor, dim: Dim, keepdim: bool = False) -> Any:
    """Computed on differences to the maximum, unless that is infinite."""
    dims = _dims(x, dim)
    x = x if x.is_floating_point() else aten._to_copy.default(x, dtype=torch.get_default_dtype())
    largest = aten.amax.default(x, dims, True)
    shift = aten.masked_fill.Scalar(largest, aten.isinf.default(largest), 0)
    total = aten.log.default(aten.sum.dim_IntList(aten.exp.default(x - shift), dims, True)) + shift
    return total if keepdim else aten.squeeze.dims(total, dims)


@register_decomposition(aten.aminmax.default)
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    """The smallest and the largest."""
    dims = _dims(x, dim)
    return aten.amin.default(x, dims, keepdim), aten.amax.default(x, dims, keepdim)


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
    """Softmax that gives zeros for a row of ``-inf``, in ops that can be split along `dim`."""
    x = x if dtype is None else x.to(dtype)
    largest = aten.amax.default(x, [dim], True)
    weights = aten.exp.default(x - aten.masked_fill.Scalar(largest, aten.eq.Scalar(largest, -math.inf), 0))
    total = aten.sum.dim_IntList(weights, [dim], True)
    return weights / aten.masked_fill.Scalar(total, aten.eq.Scalar(total, 0), 1)


_SOFTMAX_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._log_softmax.default: log_softmax,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten._softmax.default: softmax,
    aten._safe_softmax.default: safe_softmax,
    aten._softmax_backward_data.default: softmax_backward,
}
for _target, _decomposition in _SOFTMAX_DECOMPOSITIONS.items():
    family([_target], along("dim"), "values of one shape; blocked: the softmax's dimension", decompose=_decomposition)


@register_decomposition(aten.mse_loss_backward.default)
def mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Any:
    """The gradient of `mse_loss`; the scale goes into the one number of the loss, not into every element as in torch's.
    """
    return (x - target) * aten.mul.Scalar(grad, 2.0 / x.numel() if reduction == 1 else 2.0)


def _class_dim(x: Tensor) -> int:
    """The dimension of classes: the last one, or the one before the two dimensions of an image."""
    return 1 if x.dim() == 4 else -1


def _rows(log_probabilities: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The class and the weight of each row, both 0 if the row is ignored."""
    dim = _class_dim(log_probabilities)
    ignored = aten.eq.Scalar(target, ignore_index)
    row = aten.unsqueeze.default(aten.masked_fill.Scalar(target, ignored, 0), dim)
    if weight is None:
        return row, aten._to_copy.default(aten.logical_not.default(ignored), dtype=log_probabilities.dtype)
    weight = weight if dim == -1 else aten.view.default(weight, [-1, 1, 1])
    weights = aten.gather.default(aten.expand.default(weight, list(log_probabilities.shape)), dim, row)
    return row, aten.masked_fill.Scalar(aten.squeeze.dim(weights, dim), ignored, 0)


@register_decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    log_probabilities: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Negative log likelihood: a gather along the classes, a sum over rows (reduction: 0 none, 1 mean, 2 sum)."""
    dim = _class_dim(log_probabilities)
    row, weights = _rows(log_probabilities, target, weight, ignore_index)
    picked = aten.squeeze.dim(aten.gather.default(log_probabilities, dim, row), dim)
    # The first class of an ignored row may have probability 0, and -inf * 0 is not 0.
    kept = aten.masked_fill.Scalar(picked, aten.eq.Scalar(target, ignore_index), 0)
    losses = aten.neg.default(kept * weights)
    count = aten.sum.default(weights)
    if reduction == 0:
        return losses, aten.zeros_like.default(count)
    total = aten.sum.default(losses)
    return (total / count if reduction == 1 else total), count


@register_decomposition(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad: Tensor,
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """The gradient of `nll_loss_forward`: one number for each row, written at its class.

    It is written into zeros that have the layout of the log-probabilities. Zeros that depend on no input would be
    replicated on every rank, as large as all logits.
    """
    row, weights = _rows(log_probabilities, target, weight, ignore_index)
    scale = aten.neg.default(grad / total_weight if reduction == 1 else grad)
    dim = _class_dim(log_probabilities)
    # torch skips ignored rows. If all rows are ignored, `scale` is a division by zero, and 0 * nan is not 0.
    kept = aten.masked_fill.Scalar(weights * scale, aten.eq.Scalar(target, ignore_index), 0)
    values = aten.unsqueeze.default(kept, dim)
    every = aten.full.default([], True, dtype=torch.bool, device=log_probabilities.device)
    return aten.scatter.src(aten.masked_fill.Scalar(log_probabilities, every, 0), dim, row, values)


@register_decomposition(aten.log_sigmoid_forward.default)
def log_sigmoid(x: Tensor) -> tuple[Any, Any]:
    """The logarithm of the sigmoid, and the buffer that its gradient reads on CPUs."""
    away = aten.exp.default(aten.neg.default(aten.abs.default(x)))
    result = aten.clamp_max.default(x, 0) - aten.log1p.default(away)
    return result, away if x.device.type != "cuda" else aten.full.default([0], 0, dtype=x.dtype, device=x.device)
