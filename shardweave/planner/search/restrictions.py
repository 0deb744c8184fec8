"""Restrictions of a step's program to plans that people write by hand: alike in all layers.

The simulator hides communication otherwise than the program says, so a plan that the program takes for a little slower
may be simulated as faster. Uniform plans are the likeliest ones: their collectives are alike, and overlap alike. Each
restriction leaves some of the candidates of each op; the program chooses among these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial

from shardweave.ir import RECOMPUTE_MODES, Grid, Strategy
from shardweave.planner.problem.problem import Kept
from shardweave.planner.problem.variables import Costed
from shardweave.sharding import ColumnRowStrategies


def data_parallel(costed: Costed) -> Iterator[Kept]:
    """All ops data parallel, with whole states, states sharded over all devices, or parameters, too.

    DDP, ZeRO-2 and ZeRO-3 (FSDP). An op that cannot keeps its candidates.
    """
    yield _kept(costed, partial(_is_sharded, (1, 1, 1)))
    yield _kept(costed, lambda each: _shards(each) == (1, 1, each.grid.data))
    yield _kept(costed, lambda each: _shards(each) == (1, each.grid.data, each.grid.data))


def partly_sharded(costed: Costed) -> Iterator[Kept]:
    """The same with parameters or states over a part of the devices: HSDP, MiCS, ZeRO++'s secondary partition."""
    own = [each for variable in costed.variables for each in variable.strategies]
    most = max((each.grid.data for each in own), default=1)
    for shards in sorted({found for each in own if (found := _shards(each)) is not None}):
        if shards not in ((1, 1, 1), (1, 1, most), (1, most, most)):
            yield _kept(costed, partial(_is_sharded, shards))


def tensor_parallel(costed: Costed) -> Iterator[Kept]:
    """Layers tensor parallel by columns and rows in turn, on one grid: Megatron-LM's and AxoNN's.

    Their states are sharded in any way, and so is all of what a model has once, such as its head. Columns are over more
    devices than rows, or as many: a branch is mostly wider inside, where they leave no sums.
    """
    names = [row.group if each.op else "" for row, each in zip(costed.problem.ops, costed.variables, strict=True)]
    num_equal = Counter(names)
    is_repeated = [bool(name) and num_equal[name] > 1 for name in names]
    counted = is_repeated if any(is_repeated) else [True] * len(is_repeated)
    grids = {id(each.strategies): [own.grid for own in each.strategies] for each in costed.variables}
    every = {grid for own in grids.values() for grid in own}
    any_candidate: list[bool] = []
    for grid in sorted((grid for grid in every if grid.x >= grid.y and grid.x > 1 == grid.experts), key=astuple):
        found = ColumnRowStrategies.of(grid, "dp")
        known: dict[tuple[int, str], list[bool]] = {}  # equal layers share their strategies
        own = []
        for variable, counts in zip(costed.variables, counted, strict=True):
            if variable.op is None or not counts:
                own.append(any_candidate)
                continue
            key = id(variable.strategies), variable.op.form
            if key not in known:
                known[key] = _on_grid([each.grid for each in found.by_preference(variable.op)], grids[key[0]])
            own.append(known[key])
        yield _left(costed, own)


def recomputed_alike(costed: Costed) -> Iterator[Kept]:
    """The same mode of recomputation for all layers that have a choice."""
    if any(len(variable.modes) > 1 for variable in costed.variables):
        for mode in RECOMPUTE_MODES:
            yield _left(costed, [[each == mode for each in variable.modes] for variable in costed.variables])


def _on_grid(preferred: Sequence[Grid], grids: Sequence[Grid]) -> list[bool]:
    """Which strategies, on these grids, are on the first of the preferred ones that there is among them."""
    its = next((grid for grid in preferred if grid in grids), None)
    return [grid == its for grid in grids]


def _shards(each: Strategy) -> tuple[int, int, int] | None:
    """Devices that a data parallel op gathers its parameters from, that these are sharded over, and that states are."""
    return (each.grid.z, each.rest, each.states) if each.degree == each.slices == 1 else None


def _is_sharded(shards: tuple[int, int, int], each: Strategy) -> bool:
    return _shards(each) == shards


def _kept(costed: Costed, is_so: Callable[[Strategy], bool]) -> Kept:
    """The candidates that are so, of ops that have any."""
    known = {id(each.strategies): each.strategies for each in costed.variables}  # equal layers share theirs
    are_so = {key: [is_so(each) for each in strategies] for key, strategies in known.items()}
    return _left(costed, [are_so[id(each.strategies)] for each in costed.variables])


def _left(costed: Costed, are_so: Sequence[Sequence[bool]]) -> Kept:
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    keys = [(id(row.candidates), id(own)) for row, own in zip(costed.problem.ops, are_so, strict=True)]
    for key, row, own in zip(keys, costed.problem.ops, are_so, strict=True):
        if key not in found:
            every = range(len(row.candidates))
            found[key] = tuple(index for index in every if own[index]) if any(own) else tuple(every)
    return tuple(found[key] for key in keys)
