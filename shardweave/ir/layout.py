"""Layouts: where a value lies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardweave.ir.axes import Axis, Digit


def normalise(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    """`digits` with neighbouring local digits merged and local ones dropped.

    >>> normalise([4, 1, 8]), normalise([1])
    ((32,), ())
    """
    merged: list[Digit] = []
    for digit in digits:
        if isinstance(digit, int) and merged and isinstance(merged[-1], int):
            merged[-1] *= digit
        elif digit != 1:
            merged.append(digit)
    return tuple(merged)


@dataclass(frozen=True)
class Layout:
    """Where a value lies: the digits of each dimension, and the axes over which it is a partial result.

    Parameters
    ----------
    dims : tuple of tuple of Digit
        A dimension's digits, outermost first, normalised. A dimension of size 1 is ``()``.
    partial : tuple of (Axis, str)
        Axes over which the value still has to be combined, and how: ``"sum"``, ``"max"``, ``"min"``, or ``"own"`` for
        a sum in which each entry lies on one rank and is zero on the others.

    Examples
    --------
    >>> x = Axis("gpu0", 2)
    >>> layout = Layout(((x, 4), (16,)))
    >>> layout.global_shape, layout.local_shape, str(layout)
    ((8, 16), (4, 16), '[gpu0 4, 16]')
    """

    dims: tuple[tuple[Digit, ...], ...]
    partial: tuple[tuple[Axis, str], ...] = ()

    @classmethod
    def replicated(cls, shape: Sequence[int]) -> Layout:
        """The layout of a value of `shape` that is whole on every device."""
        return cls(tuple(normalise([int(size)]) for size in shape))

    @property
    def global_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(d if isinstance(d, int) else d.size for d in dim) for dim in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(d for d in dim if isinstance(d, int)) for dim in self.dims)

    @property
    def shard_axes(self) -> tuple[Axis, ...]:
        """The axes that some dimension is sharded over, in the order of the dimensions."""
        return tuple(d for dim in self.dims for d in dim if isinstance(d, Axis))

    @property
    def partial_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not self.shard_axes

    def without_partial(self) -> Layout:
        return Layout(self.dims)

    def __str__(self) -> str:
        dims = [" ".join(d.name if isinstance(d, Axis) else str(d) for d in dim) or "1" for dim in self.dims]
        partial = "".join(f" +{axis.name}" if op == "sum" else f" {op}({axis.name})" for axis, op in self.partial)
        return f"[{', '.join(dims)}]{partial}"
