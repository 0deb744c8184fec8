"""Layouts: how a value is sharded, and over which axes it is a partial result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from shardweave.ir.mesh import Axis, Digit


def normalise(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    """`digits` with neighbouring local digits merged and those of size 1 dropped.

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
class Padding:
    """The sharding of a dimension that its axes do not divide, in *places* of one length on all devices.

    A block of `size` rows is cut over `levels`, outermost first, each time into equal parts rounded up, so that the
    last ones are shorter or empty, as in ``torch.chunk`` and DTensor. A place has room for the longest part. A shorter
    part is at the front of its place; the rows behind it are padding.

    Parameters
    ----------
    dim : int
        The dimension. A block is a run of its innermost rows; the digits outside of the block divide the dimension.
    size : int
        The rows of a block.
    levels : tuple of int
        The number of parts of each cut.

    Examples
    --------
    >>> padding = Padding(0, 10, (2, 2, 2))
    >>> padding.counts, padding.place, padding.padded
    ((2, 1, 1, 1, 2, 1, 1, 1), 2, 16)
    """

    dim: int
    size: int
    levels: tuple[int, ...]

    @property
    def place(self) -> int:
        """Rows of the place of one part."""
        return -(-self.size // math.prod(self.levels))

    @property
    def padded(self) -> int:
        """Rows of all places of a block together."""
        return self.place * math.prod(self.levels)

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each part, in order."""
        return _counts(self.size, self.levels)

    @property
    def in_front(self) -> bool:
        """Whether the places of a block hold its rows contiguously, with all padding at the end.

        >>> Padding(0, 7, (2, 2)).in_front, Padding(0, 5, (2, 2)).in_front
        (True, False)
        """
        return self.counts == _counts(self.size, (math.prod(self.levels),))

    def before(self, row: int) -> int:
        """How many rows of the value come before `row` of its places.

        >>> [Padding(0, 10, (2, 2, 2)).before(row) for row in (0, 2, 4, 8, 16, 18)]
        [0, 2, 3, 5, 10, 12]
        """
        blocks, row = divmod(row, self.padded)
        part, row = divmod(row, self.place)
        counts = self.counts
        return blocks * self.size + sum(counts[:part]) + min(row, counts[part])


@cache
def _counts(size: int, levels: tuple[int, ...]) -> tuple[int, ...]:
    parts = [size]
    for level in levels:
        parts = [max(0, min(-(-n // level), n - step * -(-n // level))) for n in parts for step in range(level)]
    return tuple(parts)


@dataclass(frozen=True)
class Layout:
    """The layout of a value: the digits of each dimension, and the axes over which it is a partial result.

    A dimension is a product of *digits*, like a number in a mixed radix: an `Axis` is a digit that is sharded over it,
    an int is a digit that each device has whole.

    Parameters
    ----------
    dims : tuple of tuple of Digit
        The digits of each dimension, outermost first, normalised. A dimension of size 1 is ``()``.
    partial : tuple of (Axis, str)
        The axes over which the value still has to be reduced, and how: ``"sum"``, ``"max"``, ``"min"``, or ``"own"``
        for a sum in which each entry is on one rank and zero on the others.
    padding : Padding, optional
        The padding of a dimension that its axes do not divide; its digits are then those of the places. Only optimizer
        states, parameters between steps, and gradients on the way there are padded.

    Examples
    --------
    >>> x = Axis("gpu0", 2)
    >>> layout = Layout(((x, 4), (16,)))
    >>> layout.global_shape, layout.local_shape, str(layout)
    ((8, 16), (4, 16), '[gpu0 4, 16]')
    """

    dims: tuple[tuple[Digit, ...], ...]
    partial: tuple[tuple[Axis, str], ...] = ()
    padding: Padding | None = None

    @cached_property
    def _hash(self) -> int:  # depends on numbers alone, so it is equal in a process that reads a pickled layout
        return hash((self.dims, self.partial_axes))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def replicated(cls, shape: Sequence[int]) -> Layout:
        """The layout of a value of `shape` that is replicated on every device."""
        return cls(tuple(normalise([int(size)]) for size in shape))

    @cached_property
    def global_shape(self) -> tuple[int, ...]:
        shape = self.padded_shape
        if (padding := self.padding) is None:
            return shape
        return tuple(
            size // padding.padded * padding.size if dim == padding.dim else size for dim, size in enumerate(shape)
        )

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The global shape, with the padding of a padded dimension."""
        return tuple(math.prod(d if isinstance(d, int) else d.size for d in dim) for dim in self.dims)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape on each device. A padded dimension has the length of its place, which the part may not fill."""
        return tuple(math.prod(d for d in dim if isinstance(d, int)) for dim in self.dims)

    @cached_property
    def shard_axes(self) -> tuple[Axis, ...]:
        """The axes that some dimension is sharded over, in the order of the dimensions."""
        return tuple(d for dim in self.dims for d in dim if isinstance(d, Axis))

    @cached_property
    def partial_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not self.shard_axes

    def without_partial(self) -> Layout:
        return replace(self, partial=())

    def place(self, axis: Axis) -> tuple[int, int, int]:
        """The dimension that an axis shards, and how many local rows are outside and inside of the axis there.

        >>> micro, gpu = Axis("micro", 2, 2, "time"), Axis("gpu0", 2)
        >>> Layout(((16,), (3, micro, gpu, 4))).place(micro)
        (1, 3, 4)
        """
        dim = next(dim for dim, digits in enumerate(self.dims) if axis in digits)
        at = self.dims[dim].index(axis)
        outer, inner = (
            math.prod(digit for digit in part if isinstance(digit, int))
            for part in (self.dims[dim][:at], self.dims[dim][at + 1 :])
        )
        return dim, outer, inner

    def __str__(self) -> str:
        dims = [" ".join(d.name if isinstance(d, Axis) else str(d) for d in dim) or "1" for dim in self.dims]
        if self.padding is not None:
            dims[self.padding.dim] += f" of {self.global_shape[self.padding.dim]}"
        partial = "".join(f" +{axis.name}" if op == "sum" else f" {op}({axis.name})" for axis, op in self.partial)
        return f"[{', '.join(dims)}]{partial}"
