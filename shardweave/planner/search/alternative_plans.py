"""Alternatives to the solver's answer that are simulated too: uniform plans, fewer devices for tensor parallelism, and
choices of small problems that the memory estimate rejects.

Refinement: the program's best plans that really differ are simulated, and the fastest of them is taken.

Plans really differ where they use tensor parallelism of other degrees: a *family* is all choices up to one degree. So
do plans without any whose states rest in one way everywhere: whole, sharded, or the parameters as well. The program
finds the best of each family, exactly as it finds the best of all; what it says to be close to that is lowered,
scheduled and simulated.

Overlooked: of a problem with few choices, those that the program takes for a little too large, and that may fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import islice, product

from shardweave.ir import PlanError, Strategy
from shardweave.planner.problem.problem import Problem
from shardweave.planner.problem.variables import Costed, Variable
from shardweave.planner.solver.reductions import Kept, invert, restricted
from shardweave.planner.solver.solver import Solution
from shardweave.sharding import Alternating

Solve = Callable[[Costed, Solution, float], Solution]

CLOSE, MOST = 0.1, 2
"""How much longer than the best plan's the program may say that a plan's step is, to be simulated: how far the two may
disagree; and how many of these are."""


def rivals(costed: Costed, best: Solution, solve: Solve, most: int) -> Iterator[Solution]:
    """The best choices of families that are others than the best of all and close to it: first the least degree's.

    Parameters
    ----------
    costed : Costed
        The problem, under the memory limit.
    best : Solution
        The best of all.
    solve : callable
        From a smaller problem, the best of all and a number of seconds to its best choice, if that takes less; may
        raise `PlanError` where there is none.
    most : int
        How many families are looked at.
    """
    close = list(_close(costed, best, solve, islice(families(costed, best.choice), most)))
    yield from [*close[:1], *sorted(close[1:], key=_objective)][:MOST]


PARTLY = 3
"""How many plans are simulated whose states all rest over the same part of the devices, and how many of one grid."""

ABOUT = 0.03
"""By how much the program may count too much for a plan of one grid."""


def alike(costed: Costed, best: Solution, solve: Solve, simulated: float = math.inf) -> list[Solution]:
    """The same of plans that people write by hand: spread alike in all layers.

    Of data parallel ones, resting alike, over all devices and over a part of them; and of tensor parallel ones that the
    program says may take about as long as what is known to be `simulated` in so many seconds.
    """
    found = [*_close(costed, best, solve, ways_to_rest(costed))]
    partly = _close(costed, best, solve, partly_at_rest(costed))
    tensor = _close(costed, best, solve, in_turn(costed), (1 + ABOUT) * simulated)
    for several in (partly, tensor):
        found += sorted(several, key=_objective)[:PARTLY]
    return [*{solution.choice: solution for solution in found}.values()]


def _objective(solution: Solution) -> float:
    return solution.objective


def _close(
    costed: Costed, best: Solution, solve: Solve, found_in: Iterable[Kept], ceiling: float = math.inf
) -> Iterator[Solution]:
    seen, ceiling = {best.choice}, min(ceiling, best.objective * (1 + CLOSE))
    for kept in found_in:
        try:
            found = solve(replace(costed, problem=restricted(costed.problem, kept)), best, ceiling)
        except PlanError:
            continue
        choice = invert(found.choice, kept)
        if choice not in seen and found.objective <= ceiling:
            seen.add(choice)
            yield replace(found, choice=choice).held_to(best.bound)


def families(costed: Costed, choice: Sequence[int]) -> Iterator[Kept]:
    """For some degrees of tensor parallelism that are less than a choice's, what is left of the candidates up to them.

    The best choice of all is also the best of the families of its own degree and more. So the least degree is one, and
    the next to the choice's own. Once all ops count, and once those of layers alone, which have others like them: what
    a model has once, such as its head, is then free.
    """
    degrees = [[strategy.degree for strategy in variable.strategies] for variable in costed.variables]
    alike = Counter(row.group for row, own in zip(costed.problem.ops, degrees) if own)
    layers = [own if alike[row.group] > 1 else [] for row, own in zip(costed.problem.ops, degrees, strict=True)]
    for counted in [degrees, layers] if any(layers) else [degrees]:
        highest = max((own[index] for own, index in zip(counted, choice, strict=True) if own), default=1)
        least = max((min(own) for own in counted if own), default=1)
        levels = sorted({each for own in counted for each in own if least <= each < highest})
        for level in dict.fromkeys([*levels[:1], *levels[-1:]]):
            yield tuple(
                tuple(index for index in range(len(row.candidates)) if not own or own[index] <= level)
                for row, own in zip(costed.problem.ops, counted, strict=True)
            )


def ways_to_rest(costed: Costed) -> Iterator[Kept]:
    """What is left of the candidates where all ops are data parallel, and rest alike.

    Their states whole, or sharded over all devices, or their parameters as well: DDP, ZeRO-2 and ZeRO-3. The program
    says that as much hides of all of them, and the simulator does not. An op that cannot keeps its candidates.
    """
    yield _kept(costed, lambda each: _rests(each) == (1, 1, 1))
    yield _kept(costed, lambda each: _rests(each) == (1, 1, each.grid.data))
    yield _kept(costed, lambda each: _rests(each) == (1, each.grid.data, each.grid.data))


def partly_at_rest(costed: Costed) -> Iterator[Kept]:
    """The same where parameters or states rest over a part of the devices: HSDP, MiCS, ZeRO++'s secondary partition."""
    own = [each for variable in costed.variables for each in variable.strategies]
    most = max((each.grid.data for each in own), default=1)
    for rests in sorted({found for each in own if (found := _rests(each)) is not None}):
        if rests not in ((1, 1, 1), (1, 1, most), (1, most, most)):
            yield _kept(costed, partial(_rests_so, rests))


def in_turn(costed: Costed) -> Iterator[Kept]:
    """The same where layers are tensor parallel by columns and rows in turn, on one grid: Megatron-LM's and AxoNN's.

    Its states rest as they like, and so does all of what a model has once, such as its head. Columns are over more
    devices than rows, or as many: a branch is mostly wider inside, where they leave no sums.
    """
    names = [row.group if each.op else "" for row, each in zip(costed.problem.ops, costed.variables, strict=True)]
    alike = Counter(names)
    several = [bool(name) and alike[name] > 1 for name in names]
    counted = several if any(several) else [True] * len(several)
    every = {each.grid for variable in costed.variables for each in variable.strategies}
    for grid in sorted((grid for grid in every if grid.x >= grid.y and grid.x > 1 == grid.experts), key=astuple):
        found = Alternating.of(grid, "dp")
        own = [_as_in(found, each) if counts else [] for each, counts in zip(costed.variables, counted, strict=True)]
        yield _left(costed, own)


def _as_in(found: Alternating, variable: Variable) -> list[bool]:
    """Which strategies of an op are on the grid that it has there."""
    if variable.op is None:
        return []
    own = {each.grid for each in variable.strategies}
    its = next((each.grid for each in found.by_preference(variable.op) if each.grid in own), None)
    return [each.grid == its for each in variable.strategies]


def _rests(each: Strategy) -> tuple[int, int, int] | None:
    """Devices that a data parallel op gathers its parameters from, that they rest on, and that its states rest on."""
    return (each.grid.z, each.rest, each.states) if each.degree == each.slices == 1 else None


def _rests_so(rests: tuple[int, int, int], each: Strategy) -> bool:
    return _rests(each) == rests


def _kept(costed: Costed, is_so: Callable[[Strategy], bool]) -> Kept:
    """The candidates that are so, of ops that have any."""
    return _left(costed, [[is_so(each) for each in variable.strategies] for variable in costed.variables])


def _left(costed: Costed, are_so: Sequence[Sequence[bool]]) -> Kept:
    return tuple(
        tuple(index for index in range(len(row.candidates)) if not any(own) or own[index])
        for row, own in zip(costed.problem.ops, are_so, strict=True)
    )


FEW = 2**12
"""Choices of a problem up to which each is looked at."""

SLACK = 1.15
"""How many times the limit one may count."""

MOST_OVERLOOKED = 32
"""How many are simulated."""


def overlooked(problem: Problem, limit: int, ceiling: float) -> list[tuple[int, ...]]:
    """Choices that may fit and take less than `ceiling` seconds, the fastest first; the smallest first where it is inf.

    None of a problem with many choices.

    Examples
    --------
    >>> from shardweave.planner.problem.problem import Candidate, Op
    >>> ways = Candidate("dp", 1.0, 102), Candidate("zdp", 2.0, 100), Candidate("tensor", 3.0, 90)
    >>> problem = Problem((Op("head", ways),), (), memory_limit=100)
    >>> overlooked(problem, 100, ceiling=2.5), overlooked(problem, 99, ceiling=float("inf"))
    ([(0,), (1,)], [(2,), (1,), (0,)])
    """
    if math.prod(len(op.candidates) for op in problem.ops) > FEW:
        return []
    found = []
    for choice in product(*(range(len(op.candidates)) for op in problem.ops)):
        seconds = problem.objective(choice)
        if seconds < ceiling and (size := problem.memory(choice)) <= SLACK * limit:
            found.append((seconds if ceiling < math.inf else size, choice))
    return [choice for _, choice in sorted(found)[:MOST_OVERLOOKED]]
