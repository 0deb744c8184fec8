"""Rules of pointwise ops: every factor of the output is free, and broadcast dimensions have no factor.

Some ops keep zeros. An ``"own"`` partial result, each entry of which is zero on all ranks but one, passes them. A rank
that does not hold an expert has zeros in the rows of this expert. The activation of an expert, its gate and their
gradients keep these zeros, so that the next product reads only the rows that its rank owns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardweave.sharding.rules.registry import EVERY, RULES, Rule, bind_broadcast

aten = torch.ops.aten

# Ops that are pointwise but do not carry torch's tag.
UNTAGGED = [
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten._to_copy.default,
    aten.native_dropout_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.softplus_backward.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.mish_backward.default,
    aten.softshrink_backward.default,
    aten.hardshrink_backward.default,
    aten.hardswish.default,
    aten.complex.default,
    aten.polar.default,
]
# Linear in all tensor arguments together: a sum of partial sums is a partial sum.
ADDITIONS = [aten.add.Tensor, aten.sub.Tensor]
SUMS = [*ADDITIONS, aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten._conj_physical.default]


POINTWISE = Rule(bind_broadcast, source="one factor a dimension, none where it is broadcast; blocked: nothing")
POINTWISE_SUM = Rule(bind_broadcast, kind="sum", source=POINTWISE.source)

for _target in UNTAGGED:
    RULES[_target] = POINTWISE
for _target in SUMS:
    RULES[_target] = POINTWISE_SUM


# For each op, `Rule.zeros` and `Rule.ignores`.
ZEROS_KEPT: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {
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


def keep_zeros() -> None:
    """Add the entries of `ZEROS_KEPT` to the rules, once all rules are registered."""
    for target, (zeros, ignores) in ZEROS_KEPT.items():
        RULES[target] = replace(RULES.get(target, POINTWISE), zeros=zeros, ignores=ignores)
