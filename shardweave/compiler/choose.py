"""Choosing: the program's answer, held to the simulator's memory before it becomes a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shardweave.compiler.planner.costing import Costed
from shardweave.compiler.planner.problem import Problem
from shardweave.compiler.planner.solver import Solution, smallest, solve
from shardweave.cost_model import Timeline
from shardweave.errors import InfeasibleError
from shardweave.ir import Assignment, Strategy
from shardweave.units import readable_bytes

UNLIMITED = 2**62
"""Bytes that no device has."""

Simulate = Callable[[dict[str, Strategy], dict[str, Assignment]], Timeline]
"""From the strategies of the ops and the assignments of the joins to the timeline of the generated step."""


@dataclass(frozen=True)
class Chosen:
    """A solution of the program, its generated step on the simulator, and the larger memory of the two."""

    costed: Costed
    solution: Solution
    timeline: Timeline
    peak_memory: int

    @property
    def strategies(self) -> dict[str, Strategy]:
        """The strategy of each op."""
        return _parts(self.costed, self.solution)[0]

    @property
    def joins(self) -> dict[str, Assignment]:
        """How the ops that bring several values together are spread."""
        return _parts(self.costed, self.solution)[1]


def choose(costed: Costed, time_limit: float, simulate: Simulate) -> Chosen:
    """The best choice whose generated step, simulated, fits.

    The program adds up what its ops hold, mostly a little too much; the simulator follows every value of the generated
    step, and is the judge. Where the fastest plan of all fits, it is the answer. Otherwise the program is asked under
    the limit, and again under a smaller one as long as its answer needs more than it thought; its first answer remains
    the bound. The smallest plan is the last resort.

    Raises
    ------
    InfeasibleError
        With the smallest memory that would do, and what takes it.
    """
    problem, limit = costed.problem, costed.problem.memory_limit
    fastest = _simulated(costed, solve(replace(problem, memory_limit=UNLIMITED), time_limit), simulate)
    if fastest.timeline.peak_memory <= limit:
        return _within(fastest, limit)
    found = _under(costed, limit, fastest, time_limit, simulate)
    if found is not None:
        return found
    choice = smallest(problem, time_limit)
    assert choice is not None  # there is a fastest one
    least = min((_last_resort(costed, choice, fastest, simulate), fastest), key=_peak)
    if _peak(least) <= limit:
        return _within(least, limit)
    needed = _peak(least)
    while (smaller := _under(costed, needed - 1, fastest, time_limit, simulate)) is not None:
        least, needed = smaller, smaller.peak_memory  # counted as more than the smallest, simulated as less
    if needed <= limit:  # asked from above, the program came by a plan that it had skipped when asked for this limit
        return least
    parts = [f"{kind} {readable_bytes(size)}" for kind, size in largest(least.timeline.memory.at_peak())]
    raise InfeasibleError(
        f"no plan fits into the memory limit of {limit} bytes ({readable_bytes(limit)}) a device; the smallest memory "
        f"that does is {needed} bytes ({readable_bytes(needed)}): {', '.join(parts)}. Raise memory_limit, "
        "or use more devices or a smaller batch"
    )


def _under(costed: Costed, limit: int, fastest: Chosen, time_limit: float, simulate: Simulate) -> Chosen | None:
    """The program's best choice that fits into `limit` when simulated, too; None where it runs out of choices."""
    problem, first = replace(costed.problem, memory_limit=limit), fastest.solution
    answers = 0
    while True:
        try:
            solution = solve(problem, time_limit, hint=first.choice)
        except InfeasibleError:
            return None
        first = solution if not answers else first
        answers += 1
        chosen = _simulated(costed, _bounded(costed.problem, solution, first), simulate)
        if _peak(chosen) <= limit:
            return _within(chosen, limit)
        counted = problem.memory(solution.choice)
        problem = replace(problem, memory_limit=min(counted - 1, limit - (_peak(chosen) - counted)))


def _last_resort(costed: Costed, choice: tuple[int, ...], fastest: Chosen, simulate: Simulate) -> Chosen:
    """The smallest plan; all that is known of the others is that none is faster than the fastest of all."""
    objective, bound = costed.problem.objective(choice), fastest.solution.bound
    gap = (objective - bound) / objective if objective else 0.0
    return _simulated(costed, Solution(choice, objective, bound, gap, "feasible", 0.0), simulate)


def _peak(chosen: Chosen) -> int:
    return chosen.timeline.peak_memory


def _simulated(costed: Costed, solution: Solution, simulate: Simulate) -> Chosen:
    timeline = simulate(*_parts(costed, solution))
    return Chosen(costed, solution, timeline, max(costed.problem.memory(solution.choice), timeline.peak_memory))


def _within(chosen: Chosen, limit: int) -> Chosen:
    """What the plan says that it needs: the larger figure, unless only the program's is above the limit."""
    return chosen if chosen.peak_memory <= limit else replace(chosen, peak_memory=chosen.timeline.peak_memory)


def _bounded(problem: Problem, solution: Solution, first: Solution) -> Solution:
    """A solution of a tighter problem, held against the bound of the user's own, whose answer was `first`."""
    if solution is first:
        return solution
    objective = problem.objective(solution.choice)
    gap = max(0.0, (objective - first.bound) / objective) if objective else 0.0
    status: Literal["optimal", "feasible"] = "feasible" if gap else "optimal"
    return replace(solution, bound=first.bound, gap=gap, status=status)


def largest(sizes: Mapping[str, int], count: int = 3) -> list[tuple[str, int]]:
    """The largest entries, largest first.

    >>> largest({"saved": 3, "optimizer": 7, "inputs": 1}, 2)
    [('optimizer', 7), ('saved', 3)]
    """
    return sorted(sizes.items(), key=lambda item: -item[1])[:count]


def _parts(costed: Costed, solution: Solution) -> tuple[dict[str, Strategy], dict[str, Assignment]]:
    strategies: dict[str, Strategy] = {}
    joins: dict[str, Assignment] = {}
    for variable, index in zip(costed.variables, solution.choice):
        if variable.op is not None:
            strategies[variable.name] = variable.strategies[index]
        else:
            joins[variable.name] = next(iter(variable.ports[index].values()))
    return strategies, joins
