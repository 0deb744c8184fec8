"""Positions that are values of the graph: from the number of an element to its place on the rank that holds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

import shardweave.runtime.index_range  # noqa: F401  (registers the op)
from shardweave.ir import META, Axis, Digit, axes_size
from shardweave.passes.rules.registry import Emitter

aten = torch.ops.aten
own = torch.ops.shardweave
MOST_EVALUATED = 1 << 20


def checked(emit: Emitter, index: fx.Node, start: Any, low: int, high: int) -> fx.Node:
    """`index` counted from `start`; an error on a rank that sees one less than `low` or not less than `high`."""
    known = emit.node.meta.get(META)
    what = f"{emit.node.target} of {known.op}" if known is not None else str(emit.node.target)
    return emit.call(own.checked_index.default, index, start, low, high, what)


def local_index(
    emit: Emitter, index: fx.Node, digits: Sequence[Digit], is_checked: bool = False
) -> tuple[fx.Node, fx.Node] | None:
    """`index` into a dimension, counted in this rank's part of it, and a mask of where it lies outside of that part.

    The place of what lies outside is some place inside. None if the dimension with these `digits` is whole. An index
    outside of the whole dimension is an error, as in torch, unless it `is_checked` elsewhere.
    """
    axes = [digit for digit in digits if isinstance(digit, Axis)]
    if not axes:
        return None
    local = math.prod(digit for digit in digits if isinstance(digit, int))
    whole = local * axes_size(axes)
    if all(isinstance(digit, Axis) for digit in digits[: len(axes)]):  # one piece
        start = emit.offset(axes, local)
        moved = emit.call(aten.sub.Tensor, index, start) if is_checked else checked(emit, index, start, 0, whole)
        below, above = emit.call(aten.lt.Scalar, moved, 0), emit.call(aten.ge.Scalar, moved, local)
        outside = emit.call(aten.logical_or.default, below, above)
        return emit.call(aten.masked_fill.Scalar, moved, outside, 0), outside
    index = index if is_checked else checked(emit, index, 0, 0, whole)
    place: fx.Node | None = None
    missed: fx.Node | None = None
    low = step = 1
    for digit in reversed(digits):  # several pieces: compare and keep the index's own digits
        size = digit.size if isinstance(digit, Axis) else digit
        part = emit.call(aten.floor_divide.Scalar, index, low) if low > 1 else index
        part = emit.call(aten.remainder.Scalar, part, size)
        if isinstance(digit, Axis):
            other = emit.call(aten.ne.Scalar, part, emit.offset([digit], 1))
            missed = other if missed is None else emit.call(aten.logical_or.default, missed, other)
        else:
            part = emit.call(aten.mul.Scalar, part, step)
            place = part if place is None else emit.call(aten.add.Tensor, place, part)
            step *= digit
        low *= size
    if missed is None:
        return None
    return emit.call(aten.mul.Scalar, index, 0) if place is None else place, missed


def constant(node: fx.Node, most: int = MOST_EVALUATED) -> torch.Tensor | None:
    """The integers that a node of the graph always holds; None where it depends on an input, or is large or random."""
    done: dict[fx.Node, Any] = {}

    def evaluate(value: fx.Node) -> Any:
        if value not in done:
            done[value] = _evaluate_one(value, evaluate, most)
        return done[value]

    try:
        result = evaluate(node)
    except _Unknown:
        return None
    return result if isinstance(result, torch.Tensor) and not result.is_floating_point() else None


class _Unknown(Exception):
    """A value is not a small constant of the graph."""


def _evaluate_one(node: fx.Node, evaluate: Any, most: int) -> Any:
    value, target = node.meta.get("val"), node.target
    if not isinstance(value, torch.Tensor) or value.numel() > most:
        raise _Unknown
    if node.op == "get_attr":
        held = getattr(node.graph.owning_module, str(target), None)
        if isinstance(held, torch.Tensor) and type(held) is torch.Tensor:
            return held.cpu()
        raise _Unknown
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        raise _Unknown
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise _Unknown
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), evaluate)
    kwargs = {name: item for name, item in kwargs.items() if name not in ("device", "pin_memory")}
    return target(*args, **kwargs)


def counts(node: fx.Node, size: int) -> int | None:
    """The dimension along which a constant index is ``0, 1, ..., size - 1``, all others being 1; None if it is not."""
    shape = [int(length) for length in node.meta["val"].shape]
    long = [dim for dim, length in enumerate(shape) if length > 1]
    if len(long) != 1 or shape[long[0]] != size:
        return None
    values = constant(node)
    if values is None or values.dtype == torch.bool or not torch.equal(values.flatten().long(), torch.arange(size)):
        return None
    return long[0]
