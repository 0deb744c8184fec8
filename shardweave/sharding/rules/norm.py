"""Rules of layer, group and batch normalization.

Layer and group norm
    The dimensions that are normalised are blocked; all others are free.

Batch norm
    The statistics of a channel are those of the whole batch. In training, the batch and the spatial dimensions are
    blocked. The op stays as it is if its input arrives whole or split by channel. If the batch arrives split, the op is
    decomposed into sums over the global batch (synchronised batch norm). In evaluation nothing is reduced, and the op
    is decomposed into pointwise ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import BoundRule, RuleError
from shardweave.sharding.rules.registry import (
    Emitter,
    argument,
    bind_broadcast,
    call_with,
    family,
    register_conditional,
    register_decomposition,
    rule,
    shape,
    tensor_args,
)
from shardweave.sharding.rules.spatial import row_major

aten = torch.ops.aten


def bind_layer_norm(node: fx.Node) -> BoundRule:
    """``... [d], [d], [d] -> ... [d], ... 1, ... 1`` for any number of normalised dimensions, and its backward."""
    rank = len(shape(tensor_args(node)[0]))
    return bind_broadcast(node, blocked=range(rank - len(argument(node, "normalized_shape")), rank))


family([aten.native_layer_norm.default], bind_layer_norm, "... [d], [d], [d] -> ... [d], ... 1, ... 1")
family(
    [aten.native_layer_norm_backward.default],
    bind_layer_norm,
    "... [d], ... [d], ... 1, ... 1, [d], [d] -> ... [d], [d], [d]",
)
family([aten._fused_rms_norm.default], bind_layer_norm, "... [d], [d] -> ... [d], ... 1")
family([aten._fused_rms_norm_backward.default], bind_layer_norm, "... [d], ... [d], ... 1, [d] -> ... [d], [d]")


def lower_group_norm(emit: Emitter) -> fx.Node:
    """The op with this rank's batch, channels and groups, on row-major values.

    The op refuses other values, and the CPU kernel of its backward is silently wrong for a gradient in another order.
    """
    backward = emit.node.target is aten.native_group_norm_backward.default
    groups = (emit.input_layouts[2] if backward else emit.output_layouts[1]).local_shape[1]
    batch, channels = emit.input_layouts[0].local_shape[:2]
    values = ["grad_out", "input"] if backward else ["input"]
    row_majors = {name: row_major(emit, value) for name, value in zip(values, emit.args)}
    return call_with(emit, N=batch, C=channels, group=groups, **row_majors)


_GROUPED = "n (g [c]) [...]"
rule(
    aten.native_group_norm.default,
    f"{_GROUPED}, (g [c]), (g [c]) -> {_GROUPED}, n g, n g",
    lower=lower_group_norm,
)
rule(
    aten.native_group_norm_backward.default,
    f"{_GROUPED}, {_GROUPED}, n g, n g, (g [c]) -> {_GROUPED}, (g [c]), (g [c])",
    lower=lower_group_norm,
)


@register_conditional(aten.native_group_norm_backward.default)
def group_norm_gradient(node: fx.Node) -> Callable[..., Any] | None:
    """Make the values of a group norm's backward row-major, if they were captured in another order.

    Autograd gives the kernel two values in the same order. A gradient that a decomposition computes (of a convolution)
    may have another order than the captured one, and the CPU kernel would be silently wrong.
    """
    if all(argument(node, name).meta["val"].is_contiguous() for name in ("grad_out", "input")):
        return None

    def form(grad: Tensor, x: Tensor, *rest: Any) -> Any:
        grad, x = (aten.clone.default(value, memory_format=torch.contiguous_format) for value in (grad, x))
        return aten.native_group_norm_backward.default(grad, x, *rest)

    return form


def _wide(value: Tensor) -> Tensor:
    """`value` in the dtype of statistics: at least float32."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _like_statistics(vector: Tensor | None, statistics: Tensor) -> Tensor | None:
    """A weight or bias in the dtype of the statistics if that is wider: kernels refuse mixed dtypes.

    Under mixed precision the parameters are cast, and the running statistics stay in float32.
    """
    if vector is None or vector.dtype == statistics.dtype or _wide(vector).dtype != statistics.dtype:
        return vector
    return vector.to(statistics.dtype)


def _along(vector: Tensor, like: Tensor) -> Tensor:
    """One number for each channel, in a shape that broadcasts to `like`."""
    return vector.view(1, -1, *[1] * (like.dim() - 2))


def _sum(value: Tensor) -> Tensor:
    """One sum a channel."""
    return aten.sum.dim_IntList(value, [0, *range(2, value.dim())])


def _count(value: Tensor) -> int:
    """The values of a channel in the global batch."""
    return value.numel() // value.shape[1]


def _scaled(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`x` normalised, in its own dtype."""
    scale = invstd if weight is None else invstd * weight
    result = (_wide(x) - _along(mean, x)) * _along(scale, x)
    return (result if bias is None else result + _along(bias, x)).to(x.dtype)


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and reciprocal deviation over the global batch, in two passes: the mean may be large."""
    wide = _wide(x)
    mean = aten.div.Scalar(_sum(wide), _count(x))
    centred = wide - _along(mean, x)
    variance = aten.div.Scalar(_sum(centred * centred), _count(x))
    return mean, variance, aten.rsqrt.default(variance + eps)


def _saved(x: Tensor, channel: Tensor | None, value: Tensor) -> Tensor:
    """A statistic in the dtype in which the op saves it: on a CPU that of the input, unless its vectors are wider."""
    narrow = x.device.type == "cpu" and (channel is None or channel.dtype == x.dtype)
    return value.to(x.dtype) if narrow else value


def _empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor: evaluation saves no statistics."""
    return torch.zeros(0, dtype=dtype or like.dtype, device=like.device)


# -- the forward


def batch_norm_in_training(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Batch norm in training, by sums that can be split along the batch."""
    mean, variance, invstd = _statistics(x, eps)
    unbiased = variance * (_count(x) / (_count(x) - 1) if _count(x) > 1 else math.nan)
    return (
        _scaled(x, mean, invstd, weight, bias),
        _saved(x, running_mean, mean),
        _saved(x, running_mean, invstd),
        (running_mean * (1 - momentum) + mean * momentum).to(running_mean.dtype),
        (running_var * (1 - momentum) + unbiased * momentum).to(running_var.dtype),
    )


def batch_norm_untracked(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """Batch norm in training without running statistics, as in instance norm."""
    mean, _, invstd = _statistics(x, eps)
    return _scaled(x, mean, invstd, weight, bias), _saved(x, weight, mean), _saved(x, weight, invstd)


@register_decomposition(aten._native_batch_norm_legit_no_training.default)
def batch_norm_in_evaluation(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Batch norm by its running statistics."""
    invstd = aten.rsqrt.default(_wide(running_var) + eps)
    return _scaled(x, _wide(running_mean), invstd, weight, bias), _empty(x), _empty(x)


@register_decomposition(aten._native_batch_norm_legit_functional.default)
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """The op itself in training; pointwise ops in evaluation, where the running statistics do not change."""
    if training:
        op = aten._native_batch_norm_legit_functional.default
        weight, bias = _like_statistics(weight, running_mean), _like_statistics(bias, running_mean)
        result, mean, invstd, *updated = op(x, weight, bias, running_mean, running_var, True, momentum, eps)
        # On a CPU the dtype of the statistics depends on the vectors, and fake tensors have another one than real ones.
        return result, _wide(mean), _wide(invstd), *updated
    results = batch_norm_in_evaluation(x, weight, bias, running_mean, running_var, momentum, eps)
    return (*results, aten.clone.default(running_mean), aten.clone.default(running_var))


@register_decomposition(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """As `_native_batch_norm_legit_functional`, with an empty reserve (cuDNN's) for the backward."""
    *results, mean, variance = batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return (*results, _empty(x, torch.uint8), mean, variance)


# -- the backward


def batch_norm_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    invstd: Tensor | None,
    training: bool,
    eps: float,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients that `mask` asks for, by sums that can be split along the batch.

    Each has the dtype of the tensor that it is a gradient of. In training the statistics depend on the input, too; in
    evaluation they are constants.
    """
    if training:
        assert mean is not None and invstd is not None
        mean, invstd = _wide(mean), _wide(invstd)
    elif running_mean is None or running_var is None:
        raise RuleError("a batch norm that evaluates has no running statistics: leave it in training mode")
    else:
        invstd = aten.rsqrt.default(_wide(running_var) + eps)
        mean = _wide(running_mean)
    wide = _wide(grad)
    normalised = (_wide(x) - _along(mean, x)) * _along(invstd, x)
    of_bias, of_weight = _sum(wide), _sum(wide * normalised)
    scale = invstd if weight is None else invstd * weight
    of_input = wide
    if training:
        centred = wide - _along(aten.div.Scalar(of_bias, _count(x)), x)
        of_input = centred - normalised * _along(aten.div.Scalar(of_weight, _count(x)), x)
    dtype = grad.dtype if weight is None else weight.dtype
    results = (of_input * _along(scale, x)).to(grad.dtype), of_weight.to(dtype), of_bias.to(dtype)
    return tuple(value if wanted else None for value, wanted in zip(results, mask))


@register_decomposition(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    invstd: Tensor | None,
    training: bool,
    eps: float,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """The op itself in training, without the running statistics, which it does not read; else pointwise ops."""
    if not training:
        return batch_norm_gradients(grad, x, weight, running_mean, running_var, mean, invstd, False, eps, mask)
    wide = weight if mean is None else _like_statistics(weight, mean)
    results: tuple[Tensor | None, ...] = aten.native_batch_norm_backward.default(
        grad, x, wide, None, None, mean, invstd, True, eps, mask
    )
    if wide is weight or weight is None:
        return results
    return results[0], *(None if value is None else value.to(weight.dtype) for value in results[1:])


@register_decomposition(aten.batch_norm_backward.default)
def batch_norm_backward_with_reserve(*args: Any) -> tuple[Tensor | None, ...]:
    """As `native_batch_norm_backward`, without the reserve."""
    return batch_norm_backward(*args[:-1])


def lower_batch_norm_backward(emit: Emitter) -> fx.Node:
    """The op on a gradient and an input in the same memory order: otherwise real results differ from fake ones."""
    grad, x, *rest = emit.args
    if grad.meta["val"].stride() != x.meta["val"].stride():
        grad, x = row_major(emit, grad), row_major(emit, x)
    return emit.call(emit.node.target, grad, x, *rest)


_X = "[n] c [...]"
rule(
    aten._native_batch_norm_legit_functional.default,
    f"{_X}, c, c, c, c -> {_X}, c, c, c, c",
    decompose=batch_norm_in_training,
)
rule(aten._native_batch_norm_legit.no_stats, f"{_X}, c, c -> {_X}, c, c", decompose=batch_norm_untracked)
rule(
    aten.native_batch_norm_backward.default,
    f"{_X}, {_X}, c, c, c, c, c -> {_X}, c, c",
    decompose=batch_norm_gradients,
    lower=lower_batch_norm_backward,
)
