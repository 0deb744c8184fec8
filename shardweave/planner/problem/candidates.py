"""The strategies that an op may have: all legal ones, or those that a user forces.

A grid ``(x, y, z, data)`` is a cut of the axes, innermost first, into runs, so there are about ``n**2`` grids for n
axes, not a product over placements. z and data both shard the batch. With z > 1 a weight is sharded over the z axes
only. `allowed_strategies` applies the patterns of `Options.force`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import cast

from shardweave.cost_model import Forced, Options
from shardweave.ir import PRESETS, Assignment, Axis, Grid, LayoutError, Mesh, PlanError, Strategy, axes_size, preset
from shardweave.passes import Annotated
from shardweave.sharding import ColumnRowStrategies, Op, matches, unmatched_pattern_error


def strategies(mesh: Mesh, experts: bool = False) -> Iterator[Strategy]:
    """Every strategy on `mesh`, with `experts` also those that spread experts.

    Of a data parallel grid each pair of shard degrees of AMSP's section IV-B for parameters and optimizer states; where
    gradients of micro-batches add up, with gradients sharded as either. Of other grids the parameters rest replicated,
    over z, or over z and data, and the states as they do, or over all devices.

    >>> len(list(strategies(Mesh.of_levels([("gpu", 4)]))))
    16
    """
    axes = sorted(mesh.axes, key=lambda axis: axis.stride)
    adds_up = bool(mesh.micro_batch_axes)
    for first in range(len(axes) + 1):
        for second in range(first, len(axes) + 1):
            inner, outer, rest = axes[:first], axes[first:second], axes[second:]
            if not inner and outer:
                continue  # the same as one run
            sizes = axes_size(inner), axes_size(outer)
            orders = {(sizes[0], sizes[1], False), (sizes[1], sizes[0], bool(inner))}
            for x, y, y_inside in sorted(orders):
                for third in range(len(rest) + 1 if experts else 1):
                    grid, free = Grid(x, y, experts=axes_size(rest[:third])), rest[third:]
                    yield from _states_alike(grid, y_inside, free)
                    if grid.x == grid.y == grid.experts == 1:
                        yield from _states_apart(replace(grid, data=axes_size(free)), free, adds_up)
                    elif adds_up:
                        yield from _adding_up(replace(grid, data=axes_size(free)), y_inside, free)


def _states_alike(grid: Grid, y_inside: bool, free: list[Axis]) -> Iterator[Strategy]:
    """Parameters that rest as their states do, and whole ones with states over all devices."""
    whole = axes_size(free)
    yield Strategy(replace(grid, data=whole), 1, y_inside)
    for length in range(1, len(free)):
        z = axes_size(free[:length])
        yield Strategy(replace(grid, z=z, data=whole // z), z, y_inside)
    if free:
        yield Strategy(replace(grid, data=whole), whole, y_inside)
        yield Strategy(replace(grid, data=whole), 1, y_inside, whole)


def _states_apart(grid: Grid, free: list[Axis], adds_up: bool) -> Iterator[Strategy]:
    """Data parallel strategies whose states rest over more devices than the parameters."""
    degrees = [axes_size(free[:length]) for length in range(len(free) + 1)]
    for rest, states in combinations(degrees, 2):
        if (rest, states) != (1, degrees[-1]):  # that is among those of every grid
            yield Strategy(grid, rest, states=states)
        if adds_up:
            yield Strategy(grid, rest, states=states, gradients=rest)


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


WORDS = ("column", "row", "expert", "3d")
_TENSOR = re.compile(r"tensor:(\d+)(?:x(\d+))?(?:x(\d+))?(?:x(\d+))?(?:\+(dp|zero[123]))?")


def forced_strategies(
    force: Mapping[str, Forced | Sequence[Forced]],
    ops: Sequence[Op],
    mesh: Mesh,
    batch: int,
    exclude_from_sub_batches: Sequence[str] = (),
) -> dict[str, list[Strategy]]:
    """For each op that a pattern names, the strategies that the user leaves it; the planner chooses among them.

    Raises
    ------
    PlanError
        Where a pattern names nothing, a value is no strategy, or none of its strategies fits the op; where tensor
        parallelism fits none of the ops that it is forced on.
    """
    found: dict[str, list[Strategy]] = {}
    for pattern, wanted in force.items():
        meant = [op for op in ops if matches(pattern, op)]
        if not meant:
            raise unmatched_pattern_error("force", pattern, ops)
        choices = [_options(pattern, each, mesh) for each in _alternatives(wanted)]
        tensor = [each for each in choices if isinstance(each, ColumnRowStrategies)]
        for op in meant:
            fits, reasons = _fitting(op, choices, op.mesh_of(mesh, exclude_from_sub_batches))
            if not fits:
                raise _unfit(op, pattern, wanted, reasons, batch, mesh)
            found[op.name] = fits
        if tensor and all(set(found[op.name]) <= {each.neither for each in tensor} for op in meant):
            raise _unfit(meant[0], pattern, wanted, _fitting(meant[0], choices, mesh)[1], batch, mesh)
    return found


def _alternatives(wanted: Forced | Sequence[Forced]) -> Sequence[Forced]:
    """What the planner may choose among: a sequence of anything but the sizes of a grid."""
    several = isinstance(wanted, list | tuple) and not all(isinstance(each, int) for each in wanted)
    return cast("Sequence[Forced]", wanted if several else [wanted])


def _fitting(
    op: Op, choices: Sequence[Sequence[Strategy] | ColumnRowStrategies], mesh: Mesh
) -> tuple[list[Strategy], list[str]]:
    """The strategies that fit an op, of tensor parallelism the first one; and why the others do not."""
    fits, reasons = [], []
    for choice in choices:
        for strategy in choice.by_preference(op) if isinstance(choice, ColumnRowStrategies) else choice:
            try:
                op.assignments(strategy, mesh)
            except LayoutError as error:
                reasons.append(str(error))
                continue
            fits.append(strategy)
            if isinstance(choice, ColumnRowStrategies):
                break
    return fits, reasons or [f"{op.name} has no loop that tensor parallelism spreads"]


def _unfit(op: Op, pattern: str, wanted: object, reasons: Sequence[str], batch: int, mesh: Mesh) -> PlanError:
    return PlanError(
        f"{op.name} cannot be {wanted!r} as {pattern!r} forces it to be: {reasons[0]} (batch {batch}, "
        f"{mesh.world_size} devices). Force another grid there, or change the size that does not divide."
    )


def _options(pattern: str, wanted: Forced, mesh: Mesh) -> list[Strategy] | ColumnRowStrategies:
    if isinstance(wanted, Strategy):
        return [wanted]
    if isinstance(wanted, Grid) or (
        isinstance(wanted, tuple) and len(wanted) in (4, 5) and all(isinstance(n, int) for n in wanted)
    ):
        grid = wanted if isinstance(wanted, Grid) else Grid(*wanted)
        if grid.size != mesh.world_size:
            raise PlanError(
                f"force[{pattern!r}]: the grid {grid} has {grid.size} devices, the cluster {mesh.world_size}"
            )
        rests = (grid.z,) if grid.z > 1 else (1, grid.data)
        orders = (False, True) if grid.x > 1 and grid.y > 1 else (False,)
        options = [Strategy(grid, rest, order) for order in orders for rest in dict.fromkeys(rests)]
        if grid.z == 1 and grid.data > 1:
            options += [Strategy(grid, 1, order, grid.data) for order in orders]
        return [option for option in options if _fits_mesh(pattern, option, mesh)]
    if isinstance(wanted, str) and (sizes := _TENSOR.fullmatch(wanted)):
        return _tensor(pattern, wanted, sizes, mesh)
    if isinstance(wanted, str):
        word, _, degree = wanted.partition(":")
        if word in PRESETS and (not degree or degree.isdigit()):
            option = preset(word, int(degree or 0), mesh)
            return [option] if _fits_mesh(pattern, option, mesh) else []
        if word in WORDS and (not degree or degree.isdigit()):
            every = strategies(mesh, experts=word == "expert")
            options = [option for option in every if _is(word, int(degree or 0), option)]
            if options:
                return options
            raise PlanError(f"force[{pattern!r}]: no grid of {mesh.world_size} devices is {wanted!r}")
    raise PlanError(
        f"force[{pattern!r}] must be one of {', '.join(map(repr, (*PRESETS, *WORDS)))} (with a degree: 'column:4'), "
        f"'tensor:4', a grid (x, y, z, data) or (x, y, z, data, experts) or a shardweave.Strategy, got {wanted!r}"
    )


def _tensor(pattern: str, wanted: str, sizes: re.Match[str], mesh: Mesh) -> ColumnRowStrategies:
    """``"tensor:4"`` is Megatron's, ``"tensor:2x2x2"`` AxoNN's x, y and z; data is said or what is left."""
    x, y, z = (int(size or 1) for size in sizes.groups()[:3])
    word, world, used = sizes[5] or "dp", mesh.world_size, x * y * z
    if not used or world % used or used * int(sizes[4] or world // used) != world:
        raise PlanError(f"force[{pattern!r}]: no grid of {world} devices is {wanted!r}")
    if z > 1 and word != "dp":
        raise PlanError(f"force[{pattern!r}]: {wanted!r} says twice where states rest: over z = {z}, and {word}")
    grid = Grid(x, y, z, world // used)
    found = ColumnRowStrategies.of(grid, word)
    for option in (found.column, found.row):
        _fits_mesh(pattern, option, mesh)
    return found


def _fits_mesh(pattern: str, option: Strategy, mesh: Mesh) -> bool:
    try:
        option.axes(mesh)
    except LayoutError as error:
        raise PlanError(f"force[{pattern!r}]: {error}") from None
    return True


def _is(word: str, degree: int, option: Strategy) -> bool:
    grid, free = option.grid, option.grid.z * option.grid.data
    if word == "3d":
        return grid.x > 1 and grid.y > 1 and (grid.z > 1 or free == 1) and option.rest == grid.z
    degrees = {"column": grid.x, "row": grid.y, "expert": grid.experts}
    mine = degrees.pop(word)
    return all(other == 1 for other in degrees.values()) and grid.z == 1 and (mine == degree if degree else mine > 1)


def allowed_strategies(annotated: Annotated, mesh: Mesh, options: Options) -> dict[str, list[Strategy]]:
    """The strategies of the ops that may not have every one: those that the user forces, under ``torch.compile`` all.

    Parameters of a step that is captured whole rest whole on every rank: no strategy spreads them at rest beyond the
    z of its grid, which is compute alone.

    Raises
    ------
    PlanError
        As `forced_strategies`; or where an op of such a step is left no strategy.
    """
    excluded = options.overlap.exclude_from_sub_batches
    forced = forced_strategies(options.force, annotated.ops, mesh, annotated.batch, excluded)
    if not annotated.captured.whole:
        return forced
    found = {}
    for op in annotated.ops:
        given = forced.get(op.name) or [option for option in legal(op, mesh) if option.states == 1]
        fits = [replace(each, rest=1, states=1, gradients=1) for each in given if each.states in (1, each.grid.z)]
        if not fits:
            raise PlanError(
                f"{op.name} is forced to {given[0] if given else 'nothing that fits'}, but parameters cannot rest "
                "sharded under torch.compile, which leaves them to you: force 'dp', or use compile_parallel"
            )
        found[op.name] = list(dict.fromkeys(fits))
    return found
