"""Refinement: the program's best plans that really differ are simulated, and the fastest of them is taken.

Plans really differ where they use tensor parallelism of other degrees: a *family* is all choices up to one degree. The
program finds the best of each family, exactly as it finds the best of all; what it says to be close to that is lowered,
scheduled and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from shardweave.compiler.planner.reductions import Kept, invert, restricted
from shardweave.compiler.planner.rows import Costed
from shardweave.compiler.planner.solver import Solution
from shardweave.errors import PlanError
from shardweave.ir import Strategy

CLOSE, MOST = 0.1, 2
"""How much longer than the best plan's the program may say that a plan's step is, to be simulated: how far the two may
disagree; and how many of these are."""


def rivals(costed: Costed, best: Solution, solve: Callable[[Costed], Solution]) -> Iterator[Solution]:
    """The best choices of families that are others than the best of all and close to it: first the least degree's.

    Parameters
    ----------
    costed : Costed
        The problem, under the memory limit.
    best : Solution
        The best of all.
    solve : callable
        From a smaller problem to its best choice; raises `PlanError` where there is none.
    """
    seen = {best.choice}
    close: list[Solution] = []
    for kept in families(costed, below=_degree_of(costed, best)):
        family = replace(costed, problem=restricted(costed.problem, kept))
        try:
            found = solve(family)
        except PlanError:
            continue
        choice = invert(found.choice, kept)
        if choice not in seen and found.objective <= best.objective * (1 + CLOSE):
            seen.add(choice)
            close.append(replace(found, choice=choice).held_to(best.bound))
    yield from [*close[:1], *sorted(close[1:], key=lambda solution: solution.objective)][:MOST]


def families(costed: Costed, below: int) -> Iterator[Kept]:
    """For each degree of tensor parallelism that is less than this one, what is left of the candidates up to it.

    The best choice of all is also the best of the families of its own degree and more.
    """
    degrees = [[degree(strategy) for strategy in variable.strategies] for variable in costed.variables]
    levels = sorted({each for own in degrees for each in own})
    for level in levels:
        if level < below and all(not own or min(own) <= level for own in degrees):
            yield tuple(
                tuple(index for index in range(len(row.candidates)) if not own or own[index] <= level)
                for row, own in zip(costed.problem.ops, degrees, strict=True)
            )


def _degree_of(costed: Costed, solution: Solution) -> int:
    chosen = zip(costed.variables, solution.choice, strict=True)
    return max((degree(variable.strategies[index]) for variable, index in chosen if variable.strategies), default=1)


def degree(strategy: Strategy) -> int:
    """Over how many devices one op's product is spread.

    >>> from shardweave.ir import Grid
    >>> degree(Strategy(Grid(x=2, y=2, data=4)))
    4
    """
    return strategy.grid.x * strategy.grid.y * strategy.grid.experts
