"""The strategies that an op may have: runs of axes for x and y, the rest for the batch, and prefixes of it to rest on.

A grid ``(x, y, z, data)`` is a cut of the axes, innermost first, into runs, so there are about ``n**2`` grids for n
axes, not a product over placements. z and data are both batch; z > 1 says that the weight rests over the z axes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardweave.ir import Assignment, Axis, Grid, LayoutError, Mesh, Strategy, axes_size
from shardweave.sharding import Op


def strategies(mesh: Mesh, experts: bool = False) -> Iterator[Strategy]:
    """Every strategy on `mesh`: each grid with its parameters resting replicated, over z, or over z and data.

    The last also with the optimizer's states there alone: gathered once a step, and whole until its end (ZeRO-2). Where
    gradients of micro-batches add up, also with these whole (ZeRO-1), and with each two of the factors of AMSP's
    section IV-B alike and the third between, each over the devices of a node or over all: states inside of a node, of
    parameters that are whole; parameters inside of a node, of states over all devices, their gradients with either.

    With `experts` also those that spread experts.

    >>> len(list(strategies(Mesh.of_levels([("gpu", 4)]))))
    18
    """
    axes = sorted(mesh.axes, key=lambda axis: axis.stride)
    for first in range(len(axes) + 1):
        for second in range(first, len(axes) + 1):
            inner, outer, rest = axes[:first], axes[first:second], axes[second:]
            if not inner and outer:
                continue  # the same as one run
            sizes = axes_size(inner), axes_size(outer)
            orders = {(sizes[0], sizes[1], False), (sizes[1], sizes[0], True)}
            for x, y, y_inside in sorted(orders):
                for third in range(len(rest) + 1 if experts else 1):
                    grid = Grid(x, y, experts=axes_size(rest[:third]))
                    yield from _rests(grid, y_inside, rest[third:])
                    if mesh.micro_batch_axes:
                        yield from _adding_up(replace(grid, data=axes_size(rest[third:])), y_inside, rest[third:])


def _adding_up(grid: Grid, y_inside: bool, free: list[Axis]) -> Iterator[Strategy]:
    """What differs only where gradients of several micro-batches add up, or pays only there."""
    whole = axes_size(free)
    if free:
        yield Strategy(grid, 1, y_inside, whole, 1)
    for length in range(1, len(free)):
        if free[length - 1].level == free[length].level:
            continue
        inner = axes_size(free[:length])
        for rest, gradients, states in ((1, 1, inner), (inner, inner, whole), (inner, whole, whole)):
            yield Strategy(grid, rest, y_inside, states, gradients)


def _rests(grid: Grid, y_inside: bool, free: list[Axis]) -> Iterator[Strategy]:
    whole = axes_size(free)
    yield Strategy(replace(grid, data=whole), 1, y_inside)
    for length in range(1, len(free)):
        z = axes_size(free[:length])
        yield Strategy(replace(grid, z=z, data=whole // z), z, y_inside)
    if free:
        yield Strategy(replace(grid, data=whole), whole, y_inside)
        yield Strategy(replace(grid, data=whole), 1, y_inside, whole)


def legal(op: Op, mesh: Mesh) -> list[Strategy]:
    """The strategies that fit `op`; where two mean the same for it, the first."""
    options = [*strategies(mesh, bool(op.experts))]
    found: dict[object, Strategy] = {}
    for strategy, number in zip(options, spread(op, options, mesh)[1]):
        if number != UNFIT:
            axes = strategy.axes(mesh)
            found.setdefault((number, axes.rest, axes.gradients, axes.states), strategy)
    return list(found.values())


UNFIT = -1


def spread(op: Op, options: Sequence[Strategy], mesh: Mesh) -> tuple[list[dict[str, Assignment]], list[int]]:
    """The different assignments that strategies give the nodes of `op`, and the number of each one's; `UNFIT` for none.

    It makes no difference where parameters rest, so that there are far fewer assignments than strategies. They are
    those of the whole op: slices are put together before anything else sees them.
    """
    different: dict[tuple[Assignment, ...], int] = {}
    found: list[dict[str, Assignment]] = []
    numbers: dict[object, int] = {}
    keys = [(s.grid.x, s.grid.y, s.grid.experts, s.y_inside) for s in options]
    for key, strategy in zip(keys, options):
        if key in numbers:
            continue
        try:
            assignments = op.assignments(replace(strategy, slices=1), mesh)
        except LayoutError:
            numbers[key] = UNFIT
            continue
        numbers[key] = different.setdefault(tuple(assignments.values()), len(different))
        if len(different) > len(found):
            found.append(assignments)
    return found, [numbers[key] for key in keys]
