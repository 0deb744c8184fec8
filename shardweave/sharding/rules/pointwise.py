"""Rules of ops all of whose dimensions are free: pointwise ops, and ops that create tensors, such as random ops.

Pointwise ops
    Every factor of the output is free, and broadcast dimensions have no factor. Some ops keep zeros. An ``"own"``
    partial result, each entry of which is zero on all ranks but one, passes them. A rank that does not hold an expert
    has zeros in the rows of this expert. The activation of an expert, its gate and their gradients keep these zeros, so
    that the next product reads only the rows that its rank owns.

Factories
    An op that creates a tensor like another one (`zeros_like`, `new_full`) is decomposed into `full`, which depends on
    no input. So its result is a constant of the step, and a partial sum is not completed just to read its shape. Each
    rank creates its own part of a constant.

Random ops
    Every dimension of the result is free. The generated graph runs each op under a seed of its own (see
    `ops.seeded_random`): replicas draw the same numbers, shards draw independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import BoundRule
from shardweave.sharding.rules.registry import (
    EVERY,
    RULES,
    Emitter,
    Rule,
    along,
    argument,
    argument_names,
    bind_broadcast,
    family,
    register_decomposition,
    rule,
    with_local_shape,
)

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


def bind_range(node: fx.Node) -> BoundRule:
    """A range of integers is free. A floating-point range is blocked: its rounding depends on its start."""
    whole = not node.meta["val"].is_floating_point() and all(isinstance(bound, int) for bound in node.args)
    return bind_broadcast(node, blocked=() if whole else (0,))


def lower_range(emit: Emitter) -> fx.Node:
    """A range of this rank's length, shifted to its start."""
    (length,) = emit.output_layouts[0].local_shape
    start = 0 if emit.node.target is aten.arange.default else argument(emit.node, "start")
    step = argument(emit.node, "step") if emit.node.target is aten.arange.start_step else 1
    local = emit.call(aten.arange.start_step, start, start + step * length, step, **emit.kwargs)
    offset = emit.offset(list(emit.assignment), step * length)
    return local if isinstance(offset, int) and offset == 0 else emit.call(aten.add.Tensor, local, offset)


def _full(
    x: Tensor, size: Sequence[int], value: float, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Any:
    """A constant with the dtype and device of `x` unless others are given; memory formats are ignored."""
    return aten.full.default(list(size), value, dtype=dtype or x.dtype, device=device or x.device)


@register_decomposition(aten.new_full.default)
def new_full(x: Tensor, size: Sequence[int], fill_value: float, **options: Any) -> Any:
    """A value of another shape, filled."""
    return _full(x, size, fill_value, **options)


@register_decomposition(aten.new_zeros.default, aten.new_empty.default, aten.new_empty_strided.default)
def new_zeros(x: Tensor, size: Sequence[int], stride: Sequence[int] = (), **options: Any) -> Any:
    """A value of another shape, of zeros."""
    return _full(x, size, 0, **options)


@register_decomposition(aten.new_ones.default)
def new_ones(x: Tensor, size: Sequence[int], **options: Any) -> Any:
    """A value of another shape, of ones."""
    return _full(x, size, 1, **options)


@register_decomposition(aten.full_like.default, aten.fill.Scalar)
def full_like(x: Tensor, fill_value: float, **options: Any) -> Any:
    """A value of the same shape, filled."""
    return _full(x, x.shape, fill_value, **options)


@register_decomposition(aten.zeros_like.default, aten.empty_like.default, aten.zero.default)
def zeros_like(x: Tensor, **options: Any) -> Any:
    """A value of the same shape, of zeros."""
    return _full(x, x.shape, 0, **options)


@register_decomposition(aten.ones_like.default)
def ones_like(x: Tensor, **options: Any) -> Any:
    """A value of the same shape, of ones."""
    return _full(x, x.shape, 1, **options)


@register_decomposition(aten.fill.Tensor)
def fill_tensor(x: Tensor, value: Tensor) -> Any:
    """A value of the same shape, filled with a value of the graph."""
    return aten.expand.default(_cast(value, x.dtype), list(x.shape))


@register_decomposition(aten.copy.default)
def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """`source` in the shape and dtype of `x`."""
    source = _cast(source, x.dtype)
    return source if source.shape == x.shape else aten.expand.default(source, list(x.shape))


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype == dtype else aten._to_copy.default(value, dtype=dtype)


RANGES = [aten.arange.default, aten.arange.start, aten.arange.start_step]
CONSTANT_FACTORIES = [aten.full.default, aten.zeros.default, aten.ones.default]
family(
    CONSTANT_FACTORIES,
    bind_broadcast,
    "one factor a dimension of what is made; blocked: nothing",
    lower=with_local_shape("size"),
)
family(RANGES, bind_range, "in order, each part from its own start; blocked: floating numbers", lower=lower_range)


RANDOM_OPS = [
    aten.native_dropout.default,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.uniform.default,
    aten.normal_functional.default,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
    aten.exponential.default,
    aten.geometric.default,
    aten.cauchy.default,
    aten.log_normal.default,
    aten.poisson.default,
    aten.binomial.default,
    aten.rrelu_with_noise_functional.default,
]
RANDOM_FACTORIES = [
    aten.rand.default,
    aten.randn.default,
    aten.randint.default,
    aten.randint.low,
    aten.normal.float_float,
]


def draws(node: fx.Node) -> bool:
    """Whether an op draws from a random generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return "dropout_p" not in argument_names(node) or argument(node, "dropout_p") > 0


_DRAWN = "one factor a dimension of what is drawn; blocked: nothing"
family(RANDOM_OPS, bind_broadcast, _DRAWN)
family(RANDOM_FACTORIES, bind_broadcast, _DRAWN, lower=with_local_shape("size"))
family([aten.randperm.default], along(), "a permutation of all numbers; blocked: all of it")
rule(aten.multinomial.default, "... [v] -> ... [n]")
RULES[aten.rrelu_with_noise_backward.default] = POINTWISE
