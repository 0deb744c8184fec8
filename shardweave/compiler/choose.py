"""Choosing: the program's answer, held to the simulator's memory before it becomes a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardweave.compiler.judge import Decision, Judged
from shardweave.compiler.planner.costing import Costed
from shardweave.compiler.planner.problem import Problem
from shardweave.compiler.planner.recomputation import layer_named
from shardweave.compiler.planner.solver import Solution, smallest, solve
from shardweave.errors import InfeasibleError
from shardweave.units import readable_bytes

UNLIMITED = 2**62
"""Bytes that no device has."""

Start = Callable[[Costed], Sequence[int] | None]
"""From a problem to a choice to begin with."""

Simulate = Callable[[Decision], Judged]
"""From what is decided of each op and join to what the generated step takes."""


@dataclass(frozen=True)
class Chosen:
    """A solution of the program, its generated step on the simulator, and the larger memory of the two."""

    costed: Costed
    solution: Solution
    judged: Judged
    peak_memory: int

    @property
    def decision(self) -> Decision:
        """What it says of each op and join."""
        return _decision(self.costed, self.solution)


def choose(
    costed: Costed,
    time_limit: float,
    simulate: Simulate,
    smaller: Callable[[], Costed] | None = None,
    start: Start = lambda costed: None,
) -> Chosen:
    """The best choice whose generated step, simulated, fits.

    The program adds up what its ops hold, mostly a little too much; the simulator follows every value of the generated
    step, and is the judge. Where the fastest plan of all fits, it is the answer. Otherwise the program is asked under
    the limit, `smaller` with all ways to save memory, and again under a smaller limit as long as its answer needs more
    than it thought; its first answer remains the bound. The smallest plan is the last resort. `start` knows a choice to
    begin with.

    Raises
    ------
    InfeasibleError
        With the smallest memory that would do, and what takes it.
    """
    problem, limit = costed.problem, costed.problem.memory_limit
    fastest = _simulated(
        costed, solve(replace(problem, memory_limit=UNLIMITED), time_limit, hint=start(costed)), simulate
    )
    if fastest.judged.peak_memory <= limit:
        return _within(fastest, limit)
    if smaller is not None:
        costed = smaller()
        problem = costed.problem
    found = _under(costed, limit, fastest, time_limit, simulate, start(costed))
    if found is not None:
        return found
    choice = smallest(problem, time_limit)
    assert choice is not None  # there is a fastest one
    least = min((_last_resort(costed, choice, fastest, simulate), fastest), key=_peak)
    if _peak(least) <= limit:
        return _within(least, limit)
    needed = _peak(least)
    while (found := _under(costed, needed - 1, fastest, time_limit, simulate)) is not None:
        least, needed = found, found.peak_memory  # counted as more than the smallest, simulated as less
    if needed <= limit:  # asked from above, the program came by a plan that it had skipped when asked for this limit
        return least
    parts = [f"{kind} {readable_bytes(size)}" for kind, size in largest(least.judged.at_peak)]
    raise InfeasibleError(
        f"no plan fits into the memory limit of {limit} bytes ({readable_bytes(limit)}) a device; the smallest memory "
        f"that does is {needed} bytes ({readable_bytes(needed)}): {', '.join(parts)}. Raise memory_limit, "
        "or use more devices or a smaller batch",
        needed,
    )


def _under(
    costed: Costed,
    limit: int,
    fastest: Chosen,
    time_limit: float,
    simulate: Simulate,
    hint: Sequence[int] | None = None,
) -> Chosen | None:
    """The program's best choice that fits into `limit` when simulated, too; None where it runs out of choices."""
    problem = replace(costed.problem, memory_limit=limit)
    first: Solution | None = None
    if hint is None and costed is fastest.costed:
        hint = fastest.solution.choice
    while True:
        try:
            solution = solve(problem, time_limit, hint=hint)
        except InfeasibleError:
            return None
        first, hint = first or solution, hint if first is None else first.choice
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
    return chosen.judged.peak_memory


def _simulated(costed: Costed, solution: Solution, simulate: Simulate) -> Chosen:
    judged = simulate(_decision(costed, solution))
    return Chosen(costed, solution, judged, max(costed.problem.memory(solution.choice), judged.peak_memory))


def _within(chosen: Chosen, limit: int) -> Chosen:
    """What the plan says that it needs: the larger figure, unless only the program's is above the limit."""
    return chosen if chosen.peak_memory <= limit else replace(chosen, peak_memory=chosen.judged.peak_memory)


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


def _decision(costed: Costed, solution: Solution) -> Decision:
    found = Decision({}, {}, {}, {})
    kept = costed.problem.kept_by_op(solution.choice)
    for variable, index, size in zip(costed.variables, solution.choice, kept, strict=True):
        found.kept_bytes[variable.name] = size
        if variable.op is not None:
            found.strategies[variable.name] = variable.strategies[index]
        elif variable.modes:
            found.modes[layer_named(variable.name)] = variable.modes[index]
        else:
            found.joins[variable.name] = next(iter(variable.ports[index].values()))
    return found
