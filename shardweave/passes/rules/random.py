"""Ops that draw numbers: every dimension of what is drawn is free.

The emitter runs each under a seed of its own (see `runtime.random`): replicas agree, shards draw independently.
"""

from __future__ import annotations

import torch
from torch import fx

from shardweave.ir import BoundRule, Dims, Factor
from shardweave.passes.rules.factories import lower_created
from shardweave.passes.rules.pointwise import POINTWISE
from shardweave.passes.rules.registry import RULES, argument, family, output_shapes, rule, shape, tensor_args

aten = torch.ops.aten

DRAWN = [
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
CREATED = [
    aten.rand.default,
    aten.randn.default,
    aten.randint.default,
    aten.randint.low,
    aten.normal.float_float,
]


def draws(node: fx.Node) -> bool:
    """Whether an op takes numbers from a random generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = {declared.name for declared in target._schema.arguments}
    return "dropout_p" not in names or argument(node, "dropout_p") > 0


def bind_drawn(node: fx.Node) -> BoundRule:
    """One factor a dimension of what is drawn, which all outputs have; an input's dimension of size 1 has none."""
    outputs = output_shapes(node)
    whole = outputs[0]

    def dims(size: tuple[int, ...]) -> Dims:
        first = len(whole) - len(size)
        return tuple((f"i{first + index}",) if length > 1 else () for index, length in enumerate(size))

    factors = tuple(Factor(f"i{index}", length) for index, length in enumerate(whole) if length > 1)
    return BoundRule(factors, tuple(dims(shape(arg)) for arg in tensor_args(node)), tuple(map(dims, outputs)))


def bind_permutation(node: fx.Node) -> BoundRule:
    """A permutation is of all the numbers."""
    ((size,),) = output_shapes(node)
    dims: Dims = (("n",),) if size > 1 else ((),)
    return BoundRule((Factor("n", size, blocked=True),) if size > 1 else (), (), (dims,))


family(DRAWN, bind_drawn, "one factor a dimension of what is drawn; blocked: nothing")
family(CREATED, bind_drawn, "one factor a dimension of what is drawn; blocked: nothing", lower=lower_created)
family([aten.randperm.default], bind_permutation, "a permutation of all numbers; blocked: all of it")
rule(aten.multinomial.default, "... [v] -> ... [n]")
RULES[aten.rrelu_with_noise_backward.default] = POINTWISE
