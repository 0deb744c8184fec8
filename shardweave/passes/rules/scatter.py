"""`gather` and `scatter`: one index for each element along a dimension, all other dimensions side by side.

The dimension itself is looked up as in `index`: what this rank does not hold is zero, or not written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import BoundRule, Dims, Factor
from shardweave.passes.rules.index import added, is_zero, spare
from shardweave.passes.rules.lookup import local_index
from shardweave.passes.rules.registry import RULES, Emitter, Rule, argument, shape, tensor_args

aten = torch.ops.aten
SCATTERS = [
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
]


def bind_pick(node: fx.Node) -> BoundRule:
    """``i v, i n -> i n`` (gather) and ``i v, i n, i n -> i v`` (scatter).

    Where the index is shorter than the value along ``i``, that dimension is blocked. Along ``n``, what is written to
    one place is in an order, so only a `scatter_add` can be made in parts: to zeros, to be summed.
    """
    sizes = [shape(arg) for arg in tensor_args(node)]
    rank = len(sizes[0])
    dim = argument(node, "dim") % max(rank, 1)
    gather = node.target is aten.gather.default
    contracted = gather or node.target is aten.scatter_add.default
    is_flag = gather and tensor_args(node)[0].meta["val"].dtype == torch.bool
    factors: dict[str, Factor] = {}

    def name(text: str, size: int, blocked: bool) -> tuple[str, ...]:
        if size > 1:
            factors.setdefault(text, Factor(text, size, blocked))
        return (text,) if size > 1 else ()

    def dims(value: int) -> Dims:
        names = []
        for at, size in enumerate(sizes[value]):
            others = {other[at] for other in sizes[bool(at == dim) :]}
            if at != dim:
                names.append(name(f"i{at}" if len(others) == 1 else f"i{at}x{size}", size, len(others) > 1))
            elif value == 0:
                names.append(name("v", size, is_flag))
            else:
                names.append(name("n" if len(others) == 1 else f"n{size}", size, len(others) > 1 or not contracted))
        return tuple(names)

    inputs = tuple(dims(value) if sizes[value] else () for value in range(len(sizes)))
    return BoundRule(tuple(factors.values()), inputs, (inputs[1 if gather else 0],))


def _found(emit: Emitter) -> tuple[int, fx.Node, tuple[fx.Node, fx.Node] | None]:
    value, dim, index = emit.args[:3]
    dim %= max(value.meta["val"].dim(), 1)
    digits = emit.input_layouts[0].dims
    return dim, index, local_index(emit, index, digits[dim]) if digits else None


def lower_gather(emit: Emitter) -> fx.Node:
    """Pick what this rank holds, zeros elsewhere."""
    dim, index, found = _found(emit)
    if found is None:
        return emit.call(aten.gather.default, emit.args[0], dim, index)
    picked = emit.call(aten.gather.default, emit.args[0], dim, found[0])
    return emit.call(aten.masked_fill.Scalar, picked, found[1], 0)


def lower_scatter(emit: Emitter) -> fx.Node:
    """Write what falls into this rank's part."""
    target, (value, _, _, *rest) = emit.node.target, emit.args
    dim, index, found = _found(emit)
    if found is None:
        return emit.call(target, value, dim, index, *rest, **emit.kwargs)
    place, outside = found
    matching = rest and isinstance(rest[0], fx.Node) and rest[0].meta["val"].shape == index.meta["val"].shape
    if target is aten.scatter_add.default and matching:
        source = emit.call(aten.masked_fill.Scalar, rest[0], outside, 0)
        return emit.call(target, value, dim, place, source)
    single = index.meta["val"].shape[dim] == 1  # then nothing else can be written where an outer one reads
    if single and (target is aten.scatter.value or target is aten.scatter.src and matching):
        kept = emit.call(aten.gather.default, value, dim, place)
        if target is aten.scatter.value:
            inside = emit.call(aten.logical_not.default, outside)
            source = emit.call(aten.masked_fill.Scalar, kept, inside, rest[0])
        else:
            source = emit.call(aten.where.self, outside, kept, rest[0])
        return emit.call(aten.scatter.src, value, dim, place, source)
    local = value.meta["val"].shape[dim]
    place = emit.call(aten.masked_fill.Scalar, place, outside, local)
    written = emit.call(target, spare(emit, value, dim), dim, place, *rest, **emit.kwargs)
    return emit.call(aten.slice.Tensor, written, dim, 0, local)


_SHORT = "`i` where the index is shorter than the value"
RULES[aten.gather.default] = Rule(bind_pick, lower_gather, source=f"`i v, i n -> i n`; blocked: {_SHORT}, `v` of flags")
for _target in SCATTERS:
    RULES[_target] = Rule(
        bind_pick, lower_scatter, source=f"`i v, i n, i n -> i v`; blocked: {_SHORT}, `n` but of a `scatter_add`"
    )


def _added(node: fx.Node) -> Callable[..., Any] | None:
    """The form of a `scatter_add` to what is not zero."""
    return None if is_zero(argument(node, "self")) else partial(added, aten.scatter_add.default)


def _reduced(node: fx.Node) -> Callable[..., Any] | None:
    """A `scatter_reduce` that sums is a `scatter_add`."""
    if argument(node, "reduce") != "sum" or not argument(node, "include_self"):
        return None

    def form(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Any:
        return aten.scatter_add.default(x, dim, index, source)

    return form


SCATTER_CONDITIONAL: dict[Any, Callable[[fx.Node], Callable[..., Any] | None]] = {
    aten.scatter_add.default: _added,
    aten.scatter_reduce.two: _reduced,
}
