"""Products with one of many weights a row: what a mixture of experts computes, in the order of its tokens.

Frameworks sort tokens by expert, multiply group by group, and sort back. These ops do all three, so that what lies
outside of them keeps the order of the tokens, and each has a rule of one line.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


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
        Over how many devices the experts are spread: a rank computes about one row in so many. It changes no number;
        the cost model counts by it.

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
    """The rows in the order of their experts (equal ones in the rows' order), and where each expert's rows lie."""
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
