"""The space of plans: what may be chosen of each op, of each layer, and once for the whole step.

===============  =======================================================  ==============================================
chosen of        what                                                     restricted by
===============  =======================================================  ==============================================
each op          a grid; over how many devices its parameters, gradients  `Options.force`
                 and states rest (`strategies`, `legal`)
each op          slices that it runs in (`Space.in_slices`)               `Options.operator_slices`
each parameter   slices that stay gathered (`Space.kept_slices`)          `Options.keep_gathered`
each layer       recomputation (`Space.recompute_modes`)                  `Options.recompute`, checkpoints of the model
each sum         whole or scattered                                       `Options.sequence_parallel`
the step         micro-batches (`Space.micro_batches`)                    `Options.micro_batches`
the step         sub-batches and buckets (`Space.overlaps`)               `Options.sub_batches`, `Options.buckets`
===============  =======================================================  ==============================================

The bits that collectives move are those of `Options.quantize`: numbers change with them, so that no plan asks for less
by itself. Presets, such as ``"zero3"``, and baselines are options, and restrict the space as these do. Where a value
can be scattered is told by the rules of ops (`graph_analysis.Scatters`).

A grid ``(x, y, z, data)`` is a cut of the axes, innermost first, into runs, so there are about ``n**2`` grids for n
axes, not a product over placements. z and data both shard the batch. With z > 1 a weight is sharded over the z axes
only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import cast

from shardweave.cost_model import Cluster, Forced, Options
from shardweave.ir import (
    PRESETS,
    RECOMPUTE_MODES,
    Assignment,
    Axis,
    Buckets,
    Grid,
    LayoutError,
    Mesh,
    PlanError,
    RecomputeMode,
    Strategy,
    axes_size,
    preset,
)
from shardweave.passes import Annotated, with_times
from shardweave.sharding import (
    ColumnRowStrategies,
    Op,
    checkpoint_of,
    info,
    last_match,
    matches,
    unmatched_pattern_error,
)

OPERATOR_SLICES = 4
"""The slices that ops are offered in where nothing fits otherwise: as many as OSDP takes (arXiv 2209.13258)."""

MAX_NAMED = 3
"""So many equal ops are listed by their names, more by what these have in common."""

SUB_BATCHES = 2
"""One computes while the other communicates (Oases, arXiv 2305.16121, section 3.1); more make smaller kernels."""


@dataclass(frozen=True)
class Space:
    """The plans of a step that options leave. `str` lists what there is to choose.

    Strategies are those of one micro-batch where their number is open: gradients of several may also rest otherwise.

    Parameters
    ----------
    annotated : Annotated
        The step, with all of its layers or a few.
    cluster : Cluster
    options : Options
        Those of one setting have a number of micro-batches, of sub-batches, and say whether there are buckets.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> import shardweave as sw
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> print(sw.space(model, "dgx-h100", torch.zeros(64, 64), options=sw.Options(recompute="none", buckets=False)))
    the step: 1 micro-batch; 1 or 2 sub-batches; without buckets
    each layer: recomputation none
    each sum: whole or scattered
    0, 2: 36 strategies on 14 grids
    """

    annotated: Annotated
    cluster: Cluster
    options: Options

    # -- of the step

    @cached_property
    def micro_batches(self) -> tuple[int, ...]:
        """The powers of two that divide the batch; one where there is none, or no loss to begin each backward from."""
        if self.options.micro_batches is not None:
            return (self.options.micro_batches,)
        found, batch, annotated = [1], self.annotated.batch, self.annotated
        several = not annotated.captured.whole and annotated.loss_inside and len(annotated.tangents) == 1 and batch
        while several and batch % (2 * found[-1]) == 0:
            found.append(2 * found[-1])
        return tuple(found)

    @property
    def sub_batches(self) -> tuple[int, ...]:
        """The numbers of sub-batches of a micro-batch."""
        return (1, SUB_BATCHES) if self.options.sub_batches is None else (self.options.sub_batches,)

    @property
    def merges_small(self) -> bool:
        """Whether small collectives may be merged in a plan without buckets, where that makes it faster."""
        return self.options.buckets is None and not self.options.ablation.flat_parameter

    @property
    def buckets(self) -> tuple[Buckets, ...]:
        """Whether collectives are merged, and which."""
        return (False, True) if self.merges_small else (self.options.overlap.buckets,)

    @property
    def overlaps(self) -> tuple[tuple[int, Buckets], ...]:
        """Numbers of sub-batches, and which collectives are merged; first what overlaps least."""
        return tuple((sub_batches, buckets) for sub_batches in self.sub_batches for buckets in self.buckets)

    def setting(self, micro_batches: int, sub_batches: int, buckets: Buckets) -> Options:
        """The options of a setting."""
        given = self.options.buckets if self.options.ablation.flat_parameter else buckets
        return replace(self.options, micro_batches=micro_batches, sub_batches=sub_batches, buckets=given)

    # -- of a layer

    @cached_property
    def has_recomputation(self) -> bool:
        """Whether it is open how layers are recomputed: neither options nor checkpoints in the model say so."""
        nodes = self.annotated.captured.graph.graph.nodes
        return self.options.recompute is None and not any(checkpoint_of(node) for node in nodes)

    def recompute_modes(self, layer: str) -> tuple[RecomputeMode, ...]:
        """How a layer may be recomputed, if the model does not say."""
        asked = self.options.overlap.recompute
        return RECOMPUTE_MODES if self.options.recompute is None else (last_match(asked, layer, "none"),)

    # -- of an op

    @cached_property
    def mesh(self) -> Mesh:
        """Of the devices, and the axes of time that strategies tell apart."""
        axes = sorted(self.cluster.mesh().axes, key=lambda axis: -axis.stride)
        return with_times(Mesh(tuple(axes)), self.options)

    @cached_property
    def whole_batch_mesh(self) -> Mesh:
        """The same without sub-batches, which are cut from what a micro-batch has."""
        return replace(self.mesh, sub_batch_axes=())

    @cached_property
    def forced(self) -> dict[str, list[Strategy]]:
        """The strategies of ops that may not have every one: those that the user forces, under ``torch.compile`` all.

        Parameters of a step that is captured whole rest whole on every rank: no strategy spreads them at rest beyond
        the z of its grid, which is compute alone.

        Raises
        ------
        PlanError
            As `forced_strategies`; or where an op of such a step is left no strategy.
        """
        annotated, options = self.annotated, self.options
        excluded = options.overlap.exclude_from_sub_batches
        forced = forced_strategies(options.force, annotated.ops, self.mesh, annotated.batch, excluded)
        if not annotated.captured.whole:
            return forced
        found = {}
        for op in annotated.ops:
            given = forced.get(op.name) or [option for option in legal(op, self.mesh) if option.states == 1]
            fits = [replace(each, rest=1, states=1, gradients=1) for each in given if each.states in (1, each.grid.z)]
            if not fits:
                raise PlanError(
                    f"{op.name} is forced to {given[0] if given else 'nothing that fits'}, but parameters cannot rest "
                    "sharded under torch.compile, which leaves them to you: force 'dp', or use compile_parallel"
                )
            found[op.name] = list(dict.fromkeys(fits))
        return found

    def strategies(self, op: Op) -> list[Strategy]:
        """What an op may be, in as many slices as patterns say: strategies that these do not divide stay whole.

        Raises
        ------
        PlanError
            No strategy fits.
        """
        mesh = op.mesh_of(self.mesh, self.options.overlap.exclude_from_sub_batches)
        found = self.forced.get(op.name) or legal(op, mesh)
        if not found:
            devices, sizes = self.mesh.world_size, list(op.sizes.values())
            raise PlanError(
                f"no strategy fits {op.name} on {devices} devices: neither the batch of {op.batch} nor its loops "
                f"of sizes {sizes} take up all of them. Use a batch that is a multiple of {devices}, other "
                "sizes, or another number of devices"
            )
        slices = 1
        for pattern, count in self.options.overlap.operator_slices.items():
            slices = count if matches(pattern, op) else slices
        return [*found] if slices == 1 else [self._sliced(op, each, slices) or each for each in found]

    def in_slices(self, op: Op, strategies: Sequence[Strategy]) -> list[Strategy]:
        """These strategies in slices, those that have a loop to slice; none where options say what an op is."""
        if op.name in self.forced or self.options.operator_slices:
            return []
        return [sliced for each in strategies if (sliced := self._sliced(op, each, OPERATOR_SLICES)) is not None]

    def _sliced(self, op: Op, strategy: Strategy, slices: int) -> Strategy | None:
        """A strategy in slices; None where their number divides none of the op's loops."""
        try:
            op.slice_atom(strategy, self.whole_batch_mesh, slices)
        except LayoutError:
            return None
        return replace(strategy, slices=slices)

    def kept_slices(self, op: Op, strategy: Strategy, strategies: Sequence[Strategy]) -> Sequence[int]:
        """How many slices of its parameter an op may keep gathered: as the options say, or any number.

        Not where another of its strategies, which gathers once a step, does the same.
        """
        if strategy.rest == 1 or not self.is_read_again(op.parameter):
            return [0]
        if self.options.keep_gathered is not None:
            return [min(strategy.slices, last_match(self.options.overlap.keep_gathered, op.parameter, 0))]
        if strategy.degree > 1:
            return [0]
        once = replace(strategy, grid=replace(strategy.grid, z=1, data=strategy.grid.z * strategy.grid.data), rest=1,
                       gradients=strategy.states, slices=1)  # fmt: skip
        is_needless = self.options.micro_batch_count == 1 and once in strategies
        return range(strategy.slices if is_needless else strategy.slices + 1)

    def is_read_again(self, parameter: str) -> bool:
        """Whether the backward reads a parameter, or what is made of it alone: then it is gathered for it, too."""
        return parameter in self._read_again

    @cached_property
    def _read_again(self) -> set[str]:
        names, nodes = self.annotated.captured.parameters, self.annotated.captured.graph.graph.nodes
        made_of = {node: {names[node.name]} for node in nodes if node.name in names}
        found: set[str] = set()
        for node in nodes:
            if node.op != "call_function":
                continue
            read = set[str]().union(*(made_of.get(source, ()) for source in node.all_input_nodes))
            if info(node).backward:
                found |= read
            elif read and all(source in made_of for source in node.all_input_nodes):
                made_of[node] = read
        return found

    def __str__(self) -> str:
        words = {False: "without buckets", "small": "small collectives merged", True: "with buckets"}
        merged = ("small", True) if self.merges_small else self.buckets
        buckets = " or ".join(words[each] for each in merged)
        micro_batches, sub_batches = _listed(self.micro_batches), _listed(self.sub_batches)
        modes = _listed(RECOMPUTE_MODES) if self.has_recomputation else self.options.recompute or "as the model says"
        sums = {None: "whole or scattered", True: "scattered", False: "whole"}[self.options.sequence_parallel]
        lines = [
            f"the step: {micro_batches} micro-batch{'es' * (self.micro_batches != (1,))}; "
            f"{sub_batches} sub-batch{'es' * (self.sub_batches != (1,))}; {buckets}",
            f"each layer: recomputation {modes}",
            f"each sum: {sums}",
        ]
        equal: dict[tuple[str, tuple[Strategy, ...]], list[str]] = {}
        for op in self.annotated.ops:
            equal.setdefault((re.sub(r"\d+", "*", op.name), tuple(self.strategies(op))), []).append(op.name)
        for (name, strategies), names in equal.items():
            grids = len({each.grid for each in strategies})
            many = f"{len(strategies)} strategies on {grids} grid{'s' * (grids > 1)}"
            what = many if len(strategies) > 1 else str(strategies[0])
            lines.append(f"{f'{name} ×{len(names)}' if len(names) > MAX_NAMED else ', '.join(names)}: {what}")
        return "\n".join(lines)


def _listed(values: Sequence[object]) -> str:
    """
    >>> _listed([1, 2, 4])
    '1, 2 or 4'
    """
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


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
