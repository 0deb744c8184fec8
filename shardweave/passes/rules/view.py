"""View ops: layouts pass through them; a reshape's factors come from its shapes.

A reshape ``(b s) d -> b s d`` makes the first dimension of its input a product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from shardweave.ir import BoundRule, Dims, Factor
from shardweave.passes.rules.registry import (
    Emitter,
    argument,
    family,
    output_shapes,
    shape,
    tensor_args,
)

aten = torch.ops.aten


class Builder:
    """Collects the factors of a generated rule."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def new(self, size: int, blocked: bool = False) -> tuple[str, ...]:
        """A new factor as a dimension of its own; size 1 has none."""
        if size == 1:
            return ()
        self.factors.append(Factor(f"i{len(self.factors)}", size, blocked))
        return (self.factors[-1].name,)


def reshape_dims(builder: Builder, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """The dimensions of a row-major reshape as products of common factors.

    Where the two do not share a factor (``6 4 -> 8 3``), the dimensions concerned are blocked.
    """
    left: list[tuple[str, ...]] = []
    right: list[tuple[str, ...]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        # Take the shortest runs of dimensions with equal products.
        i_end, j_end = i, j
        a = b = 1
        while i_end == i and j_end == j or a != b:
            if (a <= b and i_end < len(source)) or j_end >= len(target):
                a, i_end = a * source[i_end], i_end + 1
            else:
                b, j_end = b * target[j_end], j_end + 1
        run_left, run_right = _match(builder, source[i:i_end], target[j:j_end])
        left += run_left
        right += run_right
        i, j = i_end, j_end
    return tuple(left), tuple(right)


def _match(
    builder: Builder, source: Sequence[int], target: Sequence[int]
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Common factors of two runs of dimensions whose products are equal."""
    bounds = []
    for sizes in (source, target):
        product, inner = 1, {1}
        for size in reversed(sizes):
            product *= size
            inner.add(product)
        bounds.append(inner)
    cuts = sorted(bounds[0] | bounds[1])
    if any(big % small for small, big in zip(cuts, cuts[1:])):
        return [builder.new(size, True) for size in source], [builder.new(size, True) for size in target]
    steps = [(small, builder.new(big // small)) for small, big in zip(cuts, cuts[1:])]

    def dims(sizes: Sequence[int]) -> list[tuple[str, ...]]:
        result, low = [], 1
        for size in reversed(sizes):
            result.append(tuple(name for at, names in reversed(steps) if low <= at < low * size for name in names))
            low *= size
        return result[::-1]

    return dims(source), dims(target)


def bind_reshape(node: fx.Node) -> BoundRule:
    """The rule of any reshape, from its shapes alone."""
    builder = Builder()
    left, right = reshape_dims(builder, shape(tensor_args(node)[0]), output_shapes(node)[0])
    return BoundRule(tuple(builder.factors), (left,), (right,))


def bind_permute(node: fx.Node) -> BoundRule:
    """`permute`, `transpose` and `t`: the same factors in another order."""
    size = shape(tensor_args(node)[0])
    if node.target is aten.permute.default:
        order = [dim % len(size) for dim in argument(node, "dims")]
    else:
        order = list(range(len(size)))
        if len(size) > 1:
            first, second = (
                (0, 1) if node.target is aten.t.default else (argument(node, "dim0"), argument(node, "dim1"))
            )
            order[first], order[second] = order[second], order[first]
    builder = Builder()
    dims = [builder.new(length) for length in size]
    return BoundRule(tuple(builder.factors), (tuple(dims),), (tuple(dims[dim] for dim in order),))


def bind_identity(node: fx.Node) -> BoundRule:
    """`detach`, `alias`, `clone`."""
    builder = Builder()
    dims = tuple(builder.new(length) for length in shape(tensor_args(node)[0]))
    return BoundRule(tuple(builder.factors), (dims,), (dims,))


def bind_expand(node: fx.Node) -> BoundRule:
    """`expand`: a broadcast dimension is a factor that only the output has."""
    source, (target,) = shape(tensor_args(node)[0]), output_shapes(node)
    builder = Builder()
    right = tuple(builder.new(length) for length in target)
    aligned = right[len(target) - len(source) :]
    left = tuple(names if length > 1 else () for names, length in zip(aligned, source))
    return BoundRule(tuple(builder.factors), (left,), (right,))


def lower_to_local_shape(emit: Emitter) -> fx.Node:
    """A reshape or an expand to the local shape of its output."""
    expand = emit.node.target is aten.expand.default
    target = aten.expand.default if expand else aten.reshape.default
    size = list(emit.output_layouts[0].local_shape)
    return emit.call(target, emit.args[0], size)


def lower_identity(emit: Emitter) -> fx.Node:
    """The joint graph needs no `detach` and no `alias`: the value itself."""
    value = emit.args[0]
    assert isinstance(value, fx.Node)
    return value


RESHAPES = [
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.flatten.using_ints,
]
family(
    RESHAPES,
    bind_reshape,
    "common factors of both shapes; blocked: dimensions that share none",
    lower=lower_to_local_shape,
    kind="view",
)
family(
    [aten.permute.default, aten.transpose.int, aten.t.default],
    bind_permute,
    "the same factors in another order; blocked: nothing",
    kind="view",
)
family(
    [aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default],
    bind_identity,
    "the value itself; blocked: nothing",
    lower=lower_identity,
    kind="view",
)
family([aten.clone.default], bind_identity, "the value itself; blocked: nothing", kind="view")
family(
    [aten.expand.default],
    bind_expand,
    "repeated dimensions are factors of the output alone; blocked: nothing",
    lower=lower_to_local_shape,
    kind="view",
)
