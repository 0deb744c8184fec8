"""The strategies that an op may have: runs of axes for x and y, the rest for the batch, and prefixes of it to rest on.

A grid ``(x, y, z, data)`` is a cut of the axes, innermost first, into runs, so there are about ``n**2`` grids for n
axes, not a product over placements. z and data are both batch; z > 1 says that the weight rests over the z axes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardweave.compiler.planner.ops import Op
from shardweave.errors import LayoutError
from shardweave.ir import Axis, Grid, Mesh, Strategy, axes_size


def strategies(mesh: Mesh, experts: bool = False) -> Iterator[Strategy]:
    """Every strategy on `mesh`: each grid with its parameters resting replicated, over z, or over z and data.

    The last also with the optimizer's states there alone: gathered once a step, and whole until its end (ZeRO-2).

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
    found: dict[object, Strategy] = {}
    for strategy in strategies(mesh, bool(op.experts)):
        try:
            assignments = op.assignments(strategy, mesh)
        except LayoutError:
            continue
        axes = strategy.axes(mesh)
        rest = tuple(axis.name for axis in axes.rest), tuple(axis.name for axis in axes.states)
        found.setdefault((tuple(sorted((name, str(a)) for name, a in assignments.items())), rest), strategy)
    return list(found.values())
