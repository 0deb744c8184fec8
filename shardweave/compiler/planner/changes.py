"""Changes of layout, a whole table of them at once: the steps of `passes.layouts.steps_between`, without their layouts.

An edge of the problem needs the change from each layout that its producer may leave a value in to each that its
consumer may want: on a thousand devices ten thousands of changes. What becomes of an axis in a change depends on
little: whether the value is partial over it, and its *places* before and after: which steps of which dimension it cuts.
Two places are the same or apart, or they overlap; so with a number for each, a step of all changes is a comparison of
a column of numbers with a row of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardweave.ir import Axis, Layout
from shardweave.passes.layouts import StepKind, digit_size, outermost_first

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Place = tuple[int, int, int]
"""A dimension, and its steps outside of the axis, without the axis' own and with them."""


@dataclass(frozen=True)
class Move:
    """One step of all changes of a table.

    Parameters
    ----------
    kind : StepKind
    groups : array of int
        The axes that it is over, outermost first, as the bits of a number; 0 where a change has no such step.
    numel : array of int
        Elements on one device, where they are most: before a reduction or a slice, after a gather.
    copied : array of int
        Elements that are copied besides, to lie in a row: where what is cut is not the first dimension.
    """

    kind: StepKind
    groups: Ints
    numel: Ints
    copied: Ints


def group_axes(group: int, axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """The axes of one of `Move.groups`, outermost first; `axes` as given to `moves_between`."""
    return tuple(axis for index, axis in enumerate(outermost_first(axes)) if group >> index & 1)


def moves_between(
    haves: Sequence[Layout], wants: Sequence[Layout], axes: Sequence[Axis], paired: bool = False
) -> list[Move]:
    """The moves from each of `haves` (the rows) to each of `wants` (the columns), in their order.

    Where a layout is wanted partial, what is partial in the same way stays so (`passes.follow.met`).

    Parameters
    ----------
    haves, wants : sequences of Layout
        Of one value, without padding.
    axes : sequence of Axis
        All that these layouts have.
    paired : bool
        Only from each of `haves` to that of `wants` in the same place: the arrays have one dimension.

    Examples
    --------
    >>> gpu, node = Axis("gpu0", 2), Axis("node0", 4, 2)
    >>> haves = [Layout(((8,),), ((gpu, "sum"),)), Layout(((node, gpu),))]
    >>> for move in moves_between(haves, [Layout(((8,),)), Layout(((gpu, 4),))], (gpu, node)):
    ...     print(move.kind, move.groups.tolist(), move.numel.tolist())
    reduce_scatter [[0, 2], [0, 0]] [[8, 8], [1, 1]]
    all_reduce [[2, 0], [0, 0]] [[8, 4], [1, 1]]
    all_gather [[0, 0], [3, 3]] [[8, 4], [8, 8]]
    slice [[0, 0], [0, 2]] [[8, 4], [8, 8]]
    """
    axes = outermost_first(axes)
    arrays = _Arrays(axes)
    have, want = arrays.rows(haves), arrays.rows(wants)
    table = np.arange(len(haves))[:, None], np.arange(len(wants))[None, :]
    at = (np.arange(len(haves)),) if paired else table
    row, column, shape = at[0], at[-1], np.broadcast_shapes(*(index.shape for index in at))
    reduces = arrays.reduces
    dims, overlap = arrays.relations()
    across = overlap & ~np.eye(len(dims), dtype=bool)
    have_on, want_on, have_across = have.touch(overlap), want.touch(overlap), have.touch(across)
    opposed = np.zeros((int(dims.max()) + 1, *shape), dtype=bool)  # dimensions that are gathered whole
    for index in range(len(axes)):
        new = want.places[column, index]
        for dim in np.unique(dims[new]):
            opposed[dim] |= have_across[row, new] & (dims[new] == dim)

    scattered, reduced = ({op: _Groups(shape) for op in reduces} for _ in range(2))
    sliced, exchanged, gathered, cut = (_Groups(shape) for _ in range(4))
    for index, axis in enumerate(axes):
        old, new = have.places[row, index], want.places[column, index]
        fixed = opposed[dims[old], *at]
        room = (new > 0) & ~have_on[row, new] & ~opposed[dims[new], *at]
        before, after = have.partial[row, index], want.partial[column, index]
        pending = (before > 0) & (before != after)
        for op, numbers in reduces.items():
            mine = pending & np.isin(before, numbers)
            scattered[op].add(axis, index, mine & room, dims[new] > 1)
            reduced[op].add(axis, index, mine & ~room)
        slices = room & (old == 0)
        sliced.add(axis, index, slices & ~pending)
        exchanges = room & (old > 0) & ~want_on[column, old] & ~fixed
        exchanged.add(axis, index, exchanges, exchanges)
        done = (old == new) & ~fixed | slices | exchanges
        gathered.add(axis, index, (old > 0) & ~done, dims[old] > 1)
        cut.add(axis, index, (new > 0) & ~done)

    numel = np.broadcast_to(have.numel[row], shape)
    found: list[Move] = []
    for op in reduces:
        found.append(Move("reduce_scatter", scattered[op].axes, numel, numel * scattered[op].apart))
        numel = numel // scattered[op].size
        found.append(Move("all_reduce", reduced[op].axes, numel, np.zeros_like(numel)))
    found.append(Move("slice", sliced.axes, numel, numel // sliced.size * (sliced.axes > 0)))
    numel = numel // sliced.size
    found.append(Move("all_to_all", exchanged.axes, numel, numel * exchanged.apart))
    numel = numel * gathered.size
    found.append(Move("all_gather", gathered.axes, numel, numel * gathered.apart))
    found.append(Move("slice", cut.axes, numel, numel // cut.size * (cut.axes > 0)))
    return [move for move in found if move.groups.any()]


class _Groups:
    """The group of one step of each change: its axes as bits, its size, whether it moves what does not lie in a row."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.axes, self.size = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.int64)
        self.apart = np.zeros(shape, dtype=bool)

    def add(self, axis: Axis, index: int, where: Bools, apart: Bools | bool = False) -> None:
        """One axis more, where it takes part."""
        if where.any():
            self.axes += where * (1 << index)
            self.size *= np.where(where, axis.size, 1)
            self.apart |= where & apart


@dataclass(frozen=True)
class _Rows:
    """Layouts as rows: for each axis the number of its place (0: none), and of how the value is partial (0: not)."""

    places: Ints
    partial: Ints
    numel: Ints

    def touch(self, relation: Bools) -> Bools:
        """By layout and place: whether one of the layout's axes lies in this relation to the place."""
        return np.asarray(relation[self.places].any(axis=1))


class _Arrays:
    """Layouts of one value as arrays, with a number for each place and for each way of being partial."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.columns = {axis.name: index for index, axis in enumerate(axes)}
        self.places: dict[Place, int] = {}
        self.ways: dict[str, int] = {}

    def rows(self, layouts: Sequence[Layout]) -> _Rows:
        different = {layout: row for row, layout in enumerate(dict.fromkeys(layouts))}
        places = np.zeros((len(different), len(self.columns)), dtype=np.int64)
        partial = np.zeros_like(places)
        for layout, row in different.items():
            for dim, digits in enumerate(layout.dims):
                steps = 1
                for digit in digits:
                    outside, steps = steps, steps * digit_size(digit)
                    if isinstance(digit, Axis):
                        place = dim, outside, steps
                        places[row, self.columns[digit.name]] = self.places.setdefault(place, len(self.places) + 1)
            for axis, op in layout.partial:
                partial[row, self.columns[axis.name]] = self.ways.setdefault(op, len(self.ways) + 1)
        numel = np.array([math.prod(layout.local_shape) for layout in different], dtype=np.int64)
        row_of = np.array([different[layout] for layout in layouts], dtype=np.int64)
        return _Rows(places[row_of], partial[row_of], numel[row_of])

    @property
    def reduces(self) -> dict[str, list[int]]:
        """What is reduced together: ``"own"`` is a sum."""
        found: dict[str, list[int]] = {}
        for op in sorted(self.ways):
            found.setdefault("sum" if op == "own" else op, []).append(self.ways[op])
        return dict(sorted(found.items()))

    def relations(self) -> tuple[Ints, Bools]:
        """The dimension of each place, from 1 on (0 is no place), and which places have steps in common."""
        dims, outside, steps = np.array([(-1, 1, 1), *self.places]).T
        apart = (outside[:, None] % steps[None, :] == 0) | (outside[None, :] % steps[:, None] == 0)
        return dims + 1, ~apart & (dims[:, None] == dims[None, :])
