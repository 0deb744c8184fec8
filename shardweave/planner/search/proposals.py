"""Plans to propose beside the program's optimum: alike in all layers, its neighbours, and simpler ones.

The simulator hides communication otherwise than the program says, so a plan that the program takes for a little slower
may be simulated as faster. Uniform plans are the likeliest ones: their collectives are alike, and overlap alike. A
*restriction* to plans that people write by hand leaves some of the candidates of each op; the program chooses among
these. *Neighbours* of a plan have another candidate for all equal ops. A *simpler* choice has equal layers alike, and
fewer strategies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import numpy as np

from shardweave.ir import RECOMPUTE_MODES, Grid, Strategy
from shardweave.planner.problem.problem import Kept, Op, Problem, to_ticks
from shardweave.planner.problem.variables import Costed
from shardweave.planner.search.layer_problem import inside, renamed
from shardweave.planner.solver.elimination import Tables
from shardweave.planner.solver.lagrangian import Choice
from shardweave.sharding import ColumnRowStrategies

MAX_SLOWDOWN = 3e-4
"""The part by which having equal layers alike may make each answer of the program slower."""

MAX_SLOWDOWN_LESS_LOADED = 1e-3
"""The part by which an answer that loads streams less may be slower before that."""


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


def gathered_once(costed: Costed) -> Iterator[Kept]:
    """Each parameter is gathered once a step at most: it is whole in a step, or what is gathered is kept."""
    known = {id(each.kept_slices): each for each in costed.variables}  # equal layers share theirs
    are_so = {
        key: [each.rest == 1 or kept == each.slices for each, kept in zip(own.strategies, own.kept_slices, strict=True)]
        for key, own in known.items()
    }
    if not all(map(all, are_so.values())):
        yield _left(costed, [are_so[id(each.kept_slices)] for each in costed.variables])


def neighbours(costed: Costed, choice: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Of each group of equal ops, or layers, and each of its candidates: a choice with this one for all of them."""
    groups: dict[tuple[str, int], list[int]] = {}
    for number, (row, variable) in enumerate(zip(costed.problem.ops, costed.variables, strict=True)):
        if variable.op is not None or variable.modes:
            groups.setdefault((row.group, id(row.candidates)), []).append(number)
    for numbers in groups.values():
        taken = {choice[number] for number in numbers}
        for other in range(len(costed.problem.ops[numbers[0]].candidates)):
            if taken != {other}:
                changed = list(choice)
                for number in numbers:
                    changed[number] = other
                yield tuple(changed)


def simplified(problem: Problem, runs: Sequence[Sequence[str]], choice: Choice) -> Choice:
    """A choice within the limit, a little slower at most, that loads streams less, with fewer kinds of layers.

    Parameters
    ----------
    problem : Problem
    runs : sequence of sequences of str
        The names of equal layers, in order.
    choice : tuple of int
        One within the limit.
    """
    choice = _less_loaded(problem, choice, problem.objective(choice) * (1 + MAX_SLOWDOWN_LESS_LOADED))
    return _with_alike_layers(problem, runs, choice, problem.objective(choice) * (1 + MAX_SLOWDOWN))


def simpler(
    problem: Problem, runs: Sequence[Sequence[str]], choice: Choice, max_slowdown: float
) -> tuple[Choice, Choice]:
    """A choice with fewer kinds of layers, and that with fewer strategies, too.

    Each is within the limit, and slower by this part at most. Parameters as of `simplified`.
    """
    most = problem.objective(choice) * (1 + max_slowdown)
    alike = _with_alike_layers(problem, runs, choice, most)
    return alike, _with_fewer_strategies(problem, alike, most)


def recomputed_first(problem: Problem, choice: Choice) -> Choice:
    """A choice that the program takes for as fast, in which the first of equal layers compute again, not the last.

    It needs less memory, which the program does not see: the backward frees what the last layers hold before the others
    compute theirs again.
    """
    most = problem.objective(choice)
    groups: dict[tuple[str, int], list[int]] = {}
    for index, op in enumerate(problem.ops):
        if op.candidates[0].label in RECOMPUTE_MODES:
            groups.setdefault((op.group, id(op.candidates)), []).append(index)
    for members in groups.values():
        modes = sorted((choice[index] for index in members), reverse=True,
                       key=partial(_recomputes, problem.ops[members[0]]))  # fmt: skip
        places = dict(zip(members, modes, strict=True))
        other = tuple(places.get(index, own) for index, own in enumerate(choice))
        if problem.objective(other) <= most:
            choice = other
    return choice


def _recomputes(op: Op, index: int) -> int:
    """How much a layer computes again by one of its modes; 0 for other ops."""
    label = op.candidates[index].label
    return RECOMPUTE_MODES.index(label) if label in RECOMPUTE_MODES else 0


def _with_alike_layers(problem: Problem, runs: Sequence[Sequence[str]], choice: Choice, most: float) -> Choice:
    """A choice that takes at most so many seconds, with fewer kinds of layers in fewer stretches."""
    at = {op.name: index for index, op in enumerate(problem.ops)}
    for layers in runs:
        first = [name for name in at if inside(name, layers[0])]
        run = _Run([[at[renamed(name, layers[0], layer)] for name in first] for layer in layers])
        kinds = run.kinds(choice)

        def accepted(others: list[Choice], run: _Run = run, choice: Choice = choice) -> bool:
            return _is_as_good(problem, run.written(choice, others), most)

        for rare in sorted(set(kinds), key=lambda kind: (kinds.count(kind), kind)):
            for other in sorted(set(kinds) - {rare}, key=lambda kind: (-kinds.count(kind), kind)):
                fewer = [other if kind == rare else kind for kind in kinds]
                if accepted(fewer):
                    kinds = fewer
                    break
        order = list(dict.fromkeys(kinds))
        together = sorted(kinds, key=order.index)
        if together != kinds and accepted(together):
            kinds = together
        choice = run.written(choice, kinds)
    return _alike(problem, choice, most)


def _with_fewer_strategies(problem: Problem, choice: Choice, most: float) -> Choice:
    """A choice that takes at most so many seconds, whose ops of one strategy take another one, presets above all.

    Another that there is already, or a preset, with as little kept gathered as there may be.
    """
    # 1. The first candidate of each strategy, by table of candidates
    firsts: dict[int, dict[Strategy, int]] = {}
    for op in problem.ops:
        if id(op.candidates) not in firsts:
            own = [_strategy(candidate.data) for candidate in op.candidates]
            firsts[id(op.candidates)] = {each: own.index(each) for each in reversed(own) if each is not None}
    presets = {each for own in firsts.values() for each in own if each.is_preset}
    # 2. One strategy less at a time, or one more that has a name, as long as there is a choice that is as good
    while True:
        strategies = (_strategy(op.candidates[index].data) for op, index in zip(problem.ops, choice, strict=True))
        chosen = Counter(each for each in strategies if each is not None)
        pairs = (
            (rare, other)
            for rare in sorted(chosen, key=lambda each: (each.is_preset, chosen[each], str(each)))
            for other in sorted({*chosen} | presets, key=lambda each: (not each.is_preset, -chosen[each], str(each)))
            if other != rare and (other in chosen or not rare.is_preset)
        )
        others = (_with_another(problem, choice, firsts, *pair) for pair in pairs)
        simpler_one = next((each for each in others if each and _is_as_good(problem, each, most)), None)
        if simpler_one is None:
            return choice
        choice = simpler_one


def _with_another(
    problem: Problem, choice: Choice, firsts: dict[int, dict[Strategy, int]], strategy: Strategy, other: Strategy
) -> Choice | None:
    """The choice with another strategy for all ops of one; None where one of these does not have it."""
    found = list(choice)
    for number, (op, index) in enumerate(zip(problem.ops, choice, strict=True)):
        if _strategy(op.candidates[index].data) == strategy:
            first = firsts[id(op.candidates)].get(other)
            if first is None:
                return None
            found[number] = first
    return tuple(found)


def _strategy(data: object) -> Strategy | None:
    """The strategy of a candidate by its data, which may say besides how many slices are kept."""
    first = data[0] if isinstance(data, tuple) else data
    return first if isinstance(first, Strategy) else None


def _is_as_good(problem: Problem, choice: Choice, most: float) -> bool:
    """Whether a choice fits and takes at most so many seconds."""
    return problem.feasible(choice) and problem.objective(choice) <= most


def _less_loaded(problem: Problem, choice: Choice, most: float) -> Choice:
    """A choice that takes at most so many seconds and loads the streams less, all of them together.

    All ops of a group take the candidate that loads them least, if another one does, until none does.
    """
    tables, groups = Tables(problem), dict[tuple[str, int], list[int]]()
    for index, op in enumerate(problem.ops):
        groups.setdefault((op.group, id(op.candidates)), []).append(index)
    total, _ = tables.sums(choice)
    changed = True
    while changed:
        changed = False
        for members in groups.values():
            # 1. The sums if all members take another candidate: exact where none is another's neighbour
            each = [tables.around(index, choice) for index in members]
            differences = [own - own[:, choice[index], None] for index, (own, _) in zip(members, each, strict=True)]
            then = total[:, None] + np.sum(differences, axis=0)
            loads, allowed = then[tables.streams].sum(axis=0), np.all([allowed for _, allowed in each], axis=0)
            allowed &= (tables.ticks(then) <= to_ticks(most)) & (loads < total[tables.streams].sum())
            # 2. The first of them that is as good, by the exact sums
            for other in sorted(np.flatnonzero(allowed).tolist(), key=lambda number: (loads[number], number)):
                taken = list(choice)
                for index in members:
                    taken[index] = other
                sums, _ = tables.sums(taken)
                is_less = sums[tables.streams].sum() < total[tables.streams].sum()
                if is_less and _is_as_good(problem, tuple(taken), most):
                    choice, total, changed = tuple(taken), sums, True
                    break
    return choice


def _alike(problem: Problem, choice: Choice, most: float) -> Choice:
    """A choice that takes at most so many seconds, with equal data for ops of one group where that does."""
    known = {id(op.candidates): [candidate.data for candidate in op.candidates] for op in problem.ops}
    data = [known[id(op.candidates)] for op in problem.ops]
    groups: dict[str, list[int]] = {}
    for index, op in enumerate(problem.ops):
        if data[index][0] is not None:
            groups.setdefault(op.group, []).append(index)
    for members in groups.values():
        chosen = Counter(data[index][choice[index]] for index in members)
        for wanted, _ in chosen.most_common() if len(chosen) > 1 else []:
            if all(wanted in data[index] for index in members):
                places = {index: data[index].index(wanted) for index in members}
                other = tuple(places.get(index, own) for index, own in enumerate(choice))
                if _is_as_good(problem, other, most):
                    choice = other
                    break
    return choice


@dataclass(frozen=True)
class _Run:
    """Equal layers: of each the ops, in the same order."""

    places: list[list[int]]

    def kinds(self, choice: Choice) -> list[Choice]:
        """What is chosen for each layer."""
        return [tuple(choice[index] for index in own) for own in self.places]

    def written(self, choice: Choice, kinds: Sequence[Choice]) -> Choice:
        """`choice` with these for the layers."""
        found = list(choice)
        for own, kind in zip(self.places, kinds, strict=True):
            for index, value in zip(own, kind, strict=True):
                found[index] = value
        return tuple(found)


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
