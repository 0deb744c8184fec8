"""Refinement: the program's best plans that really differ are simulated, and the fastest of them is taken.

Plans really differ where they use tensor parallelism of other degrees: a *family* is all choices up to one degree. The
program finds the best of each family, exactly as it finds the best of all; what it says to be close to that is lowered,
scheduled and simulated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from shardweave.compiler.planner.reductions import Kept, invert, restricted
from shardweave.compiler.planner.rows import Costed
from shardweave.compiler.planner.solver import Solution
from shardweave.errors import PlanError
from shardweave.ir import Strategy

Solve = Callable[[Costed, float], Solution]

CLOSE, MOST = 0.1, 2
"""How much longer than the best plan's the program may say that a plan's step is, to be simulated: how far the two may
disagree; and how many of these are."""


def rivals(costed: Costed, in_turn: Costed, best: Solution, solve: Solve) -> Iterator[Solution]:
    """The best choices of families that are others than the best of all and close to it: first the least degree's.

    Parameters
    ----------
    costed, in_turn : Costed
        The problem, under the memory limit, and that of a step that overlaps nothing.
    best : Solution
        The best of all.
    solve : callable
        From a smaller problem to its best choice, if that takes less than so many seconds; may raise `PlanError` where
        there is none.
    """
    seen = {best.choice}

    def close(problems: Iterable[tuple[Costed, Kept]], least: float) -> Iterator[Solution]:
        for family, kept in problems:
            try:
                found = solve(replace(family, problem=restricted(family.problem, kept)), least * (1 + CLOSE))
            except PlanError:
                continue
            choice = invert(found.choice, kept)
            if found.objective <= least * (1 + CLOSE) and choice not in seen:
                seen.add(choice)
                yield Solution(choice, costed.problem.objective(choice), best.bound, "feasible", found.seconds)

    lower = list(families(costed, below=_degree_of(costed, best.choice)))
    found = [*close(((costed, kept) for kept in lower), best.objective)]
    yield from [*found[:1], *sorted(found[1:], key=lambda solution: solution.objective)][:MOST]
    whole = tuple(tuple(range(len(op.candidates))) for op in costed.problem.ops)
    for solution in close([(in_turn, whole)], math.inf):
        yield solution
        lower = list(families(costed, below=_degree_of(costed, solution.choice)))
        least = in_turn.problem.objective(solution.choice)
        found = [*close(((in_turn, kept) for kept in lower), least)]
        yield from [*found[:1], *sorted(found[1:], key=lambda solution: solution.objective)][:MOST]


def families(costed: Costed, below: int) -> Iterator[Kept]:
    """For each degree of tensor parallelism that is less than this one, what is left of the candidates up to it.

    The best choice of all is also the best of the families of its own degree and more. Only ops of layers count, those
    that have others like them: what a model has once, such as its head, takes its own degree in every family.
    """
    degrees = _degrees(costed)
    levels = sorted({each for own in degrees for each in own})
    for level in levels:
        if level < below and all(not own or min(own) <= level for own in degrees):
            yield tuple(
                tuple(index for index in range(len(row.candidates)) if not own or own[index] <= level)
                for row, own in zip(costed.problem.ops, degrees, strict=True)
            )


def _degrees(costed: Costed) -> list[list[int]]:
    """Those of each op's candidates, of ops that count."""
    alike = Counter(row.group for row, variable in zip(costed.problem.ops, costed.variables) if variable.strategies)
    counted = {group for group, count in alike.items() if count > 1} or set(alike)
    return [
        [degree(strategy) for strategy in variable.strategies] if row.group in counted else []
        for row, variable in zip(costed.problem.ops, costed.variables, strict=True)
    ]


def _degree_of(costed: Costed, choice: Sequence[int]) -> int:
    return max((own[index] for own, index in zip(_degrees(costed), choice, strict=True) if own), default=1)


def degree(strategy: Strategy) -> int:
    """Over how many devices one op's product is spread.

    >>> from shardweave.ir import Grid
    >>> degree(Strategy(Grid(x=2, y=2, data=4)))
    4
    """
    return strategy.grid.x * strategy.grid.y * strategy.grid.experts
