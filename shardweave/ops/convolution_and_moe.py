"""The two gradients of a convolution, and the matmuls of a mixture of experts, each as an op with its own rule.

``aten.convolution_backward`` computes both gradients, and takes the input and the weight for both. Here each gradient
is an op of its own that takes what it depends on, and the shape of its result, so that each can be sharded by itself.

A mixture of experts sorts its tokens by expert, multiplies group by group, and sorts back. The ops here do all three,
so that everything outside of them keeps the order of the tokens, and each has a rule of one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardweave.ops.library import register

aten = torch.ops.aten
_OPTIONS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)
_TRANSPOSED = 3
"""The index of `transposed` among the options."""


def _gradient(index: int) -> Callable[..., Tensor]:
    """The gradient of a convolution's input (index 0) or weight (index 1), of which only the size is needed."""

    def gradient(grad: Tensor, other: Tensor, size: Sequence[int], *options: Any) -> Tensor:
        operands = [other, other]
        operands[index] = grad.new_empty(1).expand(size)
        mask = [index == 0, index == 1, False]
        result: Tensor = aten.convolution_backward.default(grad, *operands, None, *options, mask)[index]
        return result

    return gradient


for _index, _schema in enumerate(
    (
        f"conv_input_grad(Tensor grad, Tensor weight, SymInt[] input_size, {_OPTIONS}) -> Tensor",
        f"conv_weight_grad(Tensor grad, Tensor input, SymInt[] weight_size, {_OPTIONS}) -> Tensor",
    )
):
    register(_schema, _gradient(_index), _gradient(_index))


def _flops(grad: Sequence[int], kernel: Sequence[int], applied: Sequence[int]) -> int:
    """Two FLOPs for each weight of the kernel, each sample, and each position that the kernel is applied at."""
    return 2 * grad[0] * math.prod(kernel) * math.prod(applied[2:])


@register_flop_formula(torch.ops.shardweave.conv_input_grad)
def _input_grad_flops(
    grad: Sequence[int], weight: Sequence[int], input_size: Sequence[int], *options: Any, **_: object
) -> int:
    return _flops(grad, weight, input_size if options[_TRANSPOSED] else grad)


@register_flop_formula(torch.ops.shardweave.conv_weight_grad)
def _weight_grad_flops(
    grad: Sequence[int], input: Sequence[int], weight_size: Sequence[int], *options: Any, **_: object
) -> int:
    return _flops(grad, weight_size, input if options[_TRANSPOSED] else grad)


@torch.library.custom_op("shardweave::expert_mm", mutates_args=())
def expert_mm(x: Tensor, weight: Tensor, expert: Tensor, spread: int = 1) -> Tensor:
    """Each row of `x` times the weight of its expert: ``y[s] = x[s] @ weight[expert[s]]``.

    Parameters
    ----------
    x : Tensor
        Of shape (rows, k).
    weight : Tensor
        Of shape (experts, k, n).
    expert : Tensor
        Of shape (rows,): the expert of each row; a row whose expert is not in ``[0, experts)`` gives zeros and is not
        computed.
    spread : int
        The number of devices that the experts are sharded over: a rank computes about one in `spread` rows. Only the
        cost model uses it; it changes no result.

    Examples
    --------
    >>> weight = torch.stack([torch.eye(2), 2 * torch.eye(2)])
    >>> expert_mm(torch.ones(3, 2), weight, torch.tensor([1, 5, 0])).tolist()
    [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    """
    order, ends = _groups(expert, weight.shape[0])
    sorted_x = x[order]
    result = x.new_zeros(x.shape[0], weight.shape[2])
    for index, (start, end) in enumerate(ends):
        if end > start:
            result[order[start:end]] = sorted_x[start:end] @ weight[index]
    return result


@expert_mm.register_fake
def _(x: Tensor, weight: Tensor, expert: Tensor, spread: int = 1) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("shardweave::expert_outer", mutates_args=())
def expert_outer(x: Tensor, grad: Tensor, expert: Tensor, experts: int, spread: int = 1) -> Tensor:
    """The gradient of the weights of `expert_mm`: for each expert, the sum of ``outer(x[s], grad[s])`` over its rows.

    Parameters
    ----------
    x, grad : Tensor
        Of shapes (rows, k) and (rows, n).
    expert : Tensor
        Of shape (rows,); rows of other experts than ``[0, experts)`` are left out.

    Returns
    -------
    Tensor
        Of shape (experts, k, n).
    """
    order, ends = _groups(expert, experts)
    sorted_x, sorted_grad = x[order], grad[order]
    result = x.new_zeros(experts, x.shape[1], grad.shape[1])
    for index, (start, end) in enumerate(ends):
        if end > start:
            torch.mm(sorted_x[start:end].t(), sorted_grad[start:end], out=result[index])
    return result


@expert_outer.register_fake
def _(x: Tensor, grad: Tensor, expert: Tensor, experts: int, spread: int = 1) -> Tensor:
    return x.new_empty(experts, x.shape[1], grad.shape[1])


def _groups(expert: Tensor, experts: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """The stable order of the rows by expert, and the start and end of each expert's rows in it."""
    group = torch.where((expert < 0) | (expert >= experts), experts, expert)
    order = torch.argsort(group, stable=True)
    ends = torch.bincount(group, minlength=experts + 1).cumsum(0)[:experts].tolist()
    return order, list(zip([0, *ends], ends))


@register_flop_formula(torch.ops.shardweave.expert_mm)
def _expert_mm_flops(x: Any, weight: Any, expert: Any, spread: int = 1, **_: Any) -> int:
    return int(2 * x[0] * x[1] * weight[2] // spread)


@register_flop_formula(torch.ops.shardweave.expert_outer)
def _expert_outer_flops(x: Any, grad: Any, expert: Any, experts: int, spread: int = 1, **_: Any) -> int:
    return int(2 * x[0] * x[1] * grad[1] // spread)
