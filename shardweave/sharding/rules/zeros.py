"""Which ops keep zeros: an ``"own"`` partial result, zero on all ranks but one, passes them as it is.

What an expert computes is zero on the ranks that do not hold the expert. Its activation, its gate and their gradients
keep these zeros, so they are computed in place, and the next product reads just what its rank owns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardweave.sharding.rules.pointwise import POINTWISE
from shardweave.sharding.rules.registry import EVERY, RULES

aten = torch.ops.aten

# By op: the arguments one zero of which makes the result zero, and those that then do not matter.
KEEPS: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(
        (
            aten.relu.default, aten.silu.default, aten.gelu.default, aten.tanh.default, aten.neg.default,
            aten.abs.default, aten.mul.Scalar, aten.div.Scalar, aten._to_copy.default, aten.slice.Tensor,
            aten.split.Tensor, aten.split_with_sizes.default, aten.select.int,
            aten.slice_backward.default, aten.select_backward.default, aten.sum.dim_IntList, aten.div.Tensor,
        ),
        ((0,), ()),
    ),
    **dict.fromkeys((aten.silu_backward.default, aten.gelu_backward.default), ((0,), (1,))),
    aten.threshold_backward.default: ((0,), (1,)),
    aten.tanh_backward.default: ((0,), (1,)),
    aten.mul.Tensor: ((0, 1), ()),
    **dict.fromkeys((aten.cat.default, aten.stack.default, aten.add.Tensor, aten.sub.Tensor), (EVERY, ())),
}  # fmt: skip

for _target, (_zeros, _ignores) in KEEPS.items():
    RULES[_target] = replace(RULES.get(_target, POINTWISE), zeros=_zeros, ignores=_ignores)
