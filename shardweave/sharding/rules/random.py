"""Rules of random numbers and of ops that make a tensor from nothing.

Values made from no numbers: of a given shape, or in the likeness of others, of which they take shape and dtype.

The latter are written as `full`, which depends on no input: they are constants of the step, and a partial sum need
not be summed to ask it for its shape. Of a constant, each rank makes its own part.

Ops that draw numbers: every dimension of what is drawn is free.

The emitter runs each under a seed of its own (see `ops.seeded_random`): replicas agree, shards draw independently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import BoundRule, Dims, Factor
from shardweave.sharding.rules.pointwise import POINTWISE
from shardweave.sharding.rules.registry import RULES, Emitter, argument, family, output_shapes, rule, shape, tensor_args

aten = torch.ops.aten


def bind_filled(node: fx.Node) -> BoundRule:
    """Every dimension is free; of a range, where its numbers are whole ones: others are rounded from its start on."""
    (size,) = output_shapes(node)
    whole = not node.meta["val"].is_floating_point() and all(isinstance(bound, int) for bound in node.args)
    free = node.target not in RANGES or whole
    factors = tuple(Factor(f"i{index}", length, not free) for index, length in enumerate(size) if length > 1)
    return BoundRule(factors, (), (tuple((f"i{i}",) if length > 1 else () for i, length in enumerate(size)),))


def lower_created(emit: Emitter) -> fx.Node:
    """The op with this rank's sizes."""
    assert isinstance(emit.node.target, torch._ops.OpOverload)
    position = [declared.name for declared in emit.node.target._schema.arguments].index("size")
    args: list[Any] = list(emit.args)
    args[position] = list(emit.output_layouts[0].local_shape)
    return emit.call(emit.node.target, *args, **emit.kwargs)


def lower_range(emit: Emitter) -> fx.Node:
    """A range of this rank's length, moved to where it begins."""
    (length,) = emit.output_layouts[0].local_shape
    start = 0 if emit.node.target is aten.arange.default else argument(emit.node, "start")
    step = argument(emit.node, "step") if emit.node.target is aten.arange.start_step else 1
    local = emit.call(aten.arange.start_step, start, start + step * length, step, **emit.kwargs)
    offset = emit.offset(list(emit.assignment), step * length)
    return local if isinstance(offset, int) and offset == 0 else emit.call(aten.add.Tensor, local, offset)


def _full(x: Tensor, size: Sequence[int], value: float, dtype: torch.dtype | None, device: Any) -> Any:
    return aten.full.default(list(size), value, dtype=dtype or x.dtype, device=device or x.device)


def _new(value: float) -> Callable[..., Any]:
    def form(
        x: Tensor,
        size: Sequence[int],
        stride: Sequence[int] = (),
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Any:
        """A value of another shape, filled."""
        return _full(x, size, value, dtype, device)

    return form


def _like(value: float) -> Callable[..., Any]:
    def form(
        x: Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Any:
        """A value of the same shape, filled."""
        return _full(x, x.shape, value, dtype, device)

    return form


def new_full(x: Tensor, size: Sequence[int], fill_value: float, **options: Any) -> Any:
    """A value of another shape, filled."""
    return _new(fill_value)(x, size, **options)


def full_like(x: Tensor, fill_value: float, **options: Any) -> Any:
    """A value of the same shape, filled."""
    return _like(fill_value)(x, **options)


def fill_tensor(x: Tensor, value: Tensor) -> Any:
    """A value of the same shape, filled with a value of the graph."""
    return aten.expand.default(_cast(value, x.dtype), list(x.shape))


def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """`source` in the likeness of `x`."""
    source = _cast(source, x.dtype)
    return source if source.shape == x.shape else aten.expand.default(source, list(x.shape))


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype == dtype else aten._to_copy.default(value, dtype=dtype)


FACTORIES: dict[Any, Callable[..., Any]] = {
    aten.new_zeros.default: _new(0),
    aten.new_ones.default: _new(1),
    aten.new_full.default: new_full,
    aten.new_empty.default: _new(0),
    aten.new_empty_strided.default: _new(0),
    aten.zeros_like.default: _like(0),
    aten.ones_like.default: _like(1),
    aten.full_like.default: full_like,
    aten.empty_like.default: _like(0),
    aten.zero.default: _like(0),
    aten.fill.Scalar: full_like,
    aten.fill.Tensor: fill_tensor,
    aten.copy.default: copy,
}

RANGES = [aten.arange.default, aten.arange.start, aten.arange.start_step]
FILLED = [aten.full.default, aten.zeros.default, aten.ones.default]
family(FILLED, bind_filled, "one factor a dimension of what is made; blocked: nothing", lower=lower_created)
family(RANGES, bind_filled, "in order, each part from its own start; blocked: floating numbers", lower=lower_range)


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
