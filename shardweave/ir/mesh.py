"""Mesh axes: the dimensions of a machine; and meshes: all the axes of one machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardweave.ir.errors import LayoutError


@dataclass(frozen=True)
class Axis:
    """A dimension of the machine, or of time, over which a loop (factor) of an op can be split.

    Parameters
    ----------
    name : str
        Unique within a `Mesh`, such as ``"gpu0"``.
    size : int
        The number of steps along the axis. It is prime for the axes of a mesh.
    stride : int
        Distance in global ranks between two neighbours along the axis (1 for the innermost).
    kind : {"space", "time"}
        Whether the steps run on different devices at once, or one after another on the same device.

    Examples
    --------
    >>> Axis("node0", 2, stride=4).coordinate(rank=6)
    1
    """

    name: str
    size: int
    stride: int = 1
    kind: Literal["space", "time"] = "space"

    def __hash__(self) -> int:
        return hash((self.stride, self.size))  # cheap and nearly unique: layouts are hashed often

    @property
    def level(self) -> str:
        """The level of the cluster that the axis belongs to: its name without the number."""
        return self.name.rstrip("0123456789")

    def coordinate(self, rank: int) -> int:
        """The coordinate of `rank` along this axis, in ``[0, size)``."""
        return rank // self.stride % self.size

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"


Digit = int | Axis


def axes_size(axes: Iterable[Axis]) -> int:
    """Number of devices in one group over `axes` (1 for none)."""
    return math.prod(axis.size for axis in axes)


def prime_factors(number: int) -> list[int]:
    """The prime factors of `number`, smallest first.

    >>> prime_factors(12)
    [2, 2, 3]
    """
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def slice_axis(count: int) -> Axis:
    """The time axis over `count` slices of an op.

    >>> str(slice_axis(4))
    'slice4:4'
    """
    return Axis(f"slice{count}", count, 0, "time")


@dataclass(frozen=True)
class Mesh:
    """The axes of the machine, in *layout order*: of two axes on one dimension, the earlier one is outermost.

    The order is free: it is not the order of ranks, which each axis carries as its stride. A plan puts the axes of
    tensor parallelism first and the axes that shard states after them, so that every layout is a plain DTensor
    placement.

    Besides the `axes` of devices there are three kinds of time axes. The generated graphs run once for each step of
    `micro_batch_axes`. They contain all steps of `sub_batch_axes` and of `slice_axes`; a slice axis belongs to a single
    op. On a dimension, axes of micro-batches and sub-batches are outside all others, with strides of at least the world
    size, so that a step is the same part of the dimension on any number of devices. Slice axes are inside all others:
    they cut the part that a device computes.

    Examples
    --------
    >>> mesh = Mesh.of_levels([("gpu", 4), ("node", 2)])
    >>> [str(axis) for axis in mesh.axes], mesh.world_size
    (['gpu0:2', 'gpu1:2', 'node0:2'], 8)
    >>> mesh.group_ranks(mesh.axes[:2], rank=6)
    (4, 5, 6, 7)
    """

    axes: tuple[Axis, ...]
    micro_batch_axes: tuple[Axis, ...] = ()
    sub_batch_axes: tuple[Axis, ...] = ()
    slice_axes: tuple[Axis, ...] = ()

    @classmethod
    def of_levels(cls, levels: Sequence[tuple[str, int]]) -> Mesh:
        """A mesh with one axis a prime factor of each level's size, innermost level first."""
        axes, stride = [], 1
        for name, size in levels:
            for index, prime in enumerate(prime_factors(size)):
                axes.append(Axis(f"{name}{index}", prime, stride))
                stride *= prime
        return cls(tuple(axes))

    @property
    def time_axes(self) -> tuple[Axis, ...]:
        """The time axes of the batch: over micro-batches and over sub-batches."""
        return *self.micro_batch_axes, *self.sub_batch_axes

    @property
    def unrolled_axes(self) -> tuple[Axis, ...]:
        """The time axes that are unrolled in the generated graphs: over sub-batches and over slices of ops."""
        return *self.sub_batch_axes, *self.slice_axes

    @cached_property
    def world_size(self) -> int:
        return axes_size(self.axes)

    @cached_property
    def innermost_first(self) -> tuple[Axis, ...]:
        """The axes in the order of ranks."""
        return tuple(sorted(self.axes, key=lambda axis: axis.stride))

    @cached_property
    def _order(self) -> dict[Axis, int]:
        return {axis: index for index, axis in enumerate((*self.axes, *self.time_axes, *self.slice_axes))}

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on every axis, by the axis' name."""
        return {axis.name: axis.coordinate(rank) for axis in self.axes}

    def ordered(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        """`axes` in layout order."""
        return tuple(sorted({axis for axis in axes if axis in self._order}, key=self._order.__getitem__))

    def axis(self, name: str) -> Axis:
        """The axis called `name`; `LayoutError` if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise LayoutError(f"no axis is called {name!r}; this mesh has {', '.join(map(str, self.axes)) or 'none'}")

    def group_ranks(self, axes: Iterable[Axis], rank: int) -> tuple[int, ...]:
        """The ranks, ascending, that differ from `rank` at most along `axes`."""
        ranks = [rank - sum(axis.coordinate(rank) * axis.stride for axis in axes)]
        for axis in axes:
            ranks = [base + step * axis.stride for base in ranks for step in range(axis.size)]
        return tuple(sorted(ranks))


def group_name(axes: Iterable[Axis]) -> str:
    """The symbolic name of the process groups over `axes`, equal on all ranks. The runtime replaces it by a group.

    >>> group_name([Axis("gpu1", 2, 2), Axis("gpu0", 2)])
    'gpu0.gpu1'
    """
    return ".".join(axis.name for axis in sorted(axes, key=lambda axis: axis.stride))
