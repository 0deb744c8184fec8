"""The solver of one setting's programs, with a cache of its answers.

An answer may mix strategies that are equally fast, or nearly, over equal layers. `simplified` gives one with fewer
kinds of layers in fewer stretches: it is easier to read, and its step is quicker to simulate (`evaluation`). It also
moves less where that is as fast: the program takes for free what its links have room for, but in the generated step
less of it may hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shardweave.ir import InfeasibleError
from shardweave.planner.problem.problem import Problem
from shardweave.planner.problem.variables import Costed
from shardweave.planner.search.evaluation import choice_of
from shardweave.planner.search.plan import Plan
from shardweave.planner.search.proposals import simplified
from shardweave.planner.solver.branch_and_bound import Progress
from shardweave.planner.solver.solver import Solution, solve

UNLIMITED = 2**62
"""Bytes that no device has."""

MAX_GAP, MAX_CANDIDATES_EXACT = 2e-3, 2**10
"""The gap to the bound that the solver may leave. Problems with at most so many candidates are solved exactly."""

MAX_ROUGH_GAP, MAX_CANDIDATES_ROUGH_EXACT = 5e-3, 2**8
"""The same for answers that the simulator compares."""

MAX_CANDIDATES_MODEST = 2**14
"""Problems with at most so many candidates have uniform plans simulated, however near to the bound the answer is."""

MAX_OVER_LIMIT, MAX_OVER_LIMIT_SMALL, MAX_OVER_LIMIT_LARGE = 1.5, 2.0, 1.1
"""A plan whose estimated memory is more than this ratio of the limit is not simulated. The second value is for problems
with at most `MAX_CANDIDATES_EXACT` candidates, where the estimate is least exact; the third for problems with more than
`MAX_CANDIDATES_MODEST`, where it is most exact."""

MEMORY_BOUND_RATIO, MEMORY_BOUND_RATIO_LARGE = 0.01, 0.05
"""A step is memory-bound if the limit makes it slower by more than this part. The second value is for problems with
more than `MAX_CANDIDATES_MODEST` candidates, for which alternatives take long."""


@dataclass(frozen=True)
class CachedSolver:
    """The program's answers.

    Parameters
    ----------
    time_limit : float
        Seconds that the solver may take for one problem.
    start : Plan, optional
        To begin with.
    runs : sequence of sequences of str
        The names of layers that are equal.
    """

    time_limit: float
    start: Plan | None = None
    runs: Sequence[Sequence[str]] = ()
    told: Callable[[Progress], None] | None = None
    """Gets the incumbent and the bound while a problem is solved."""
    _known: dict[tuple[int, int], Solution] = field(default_factory=dict)
    """Choices that are nearly the best, by the identity of the problem and the memory limit."""
    _lacking: dict[tuple[int, int], int] = field(default_factory=dict)
    """The bytes that would do where nothing fits, by the same."""
    _solved: dict[tuple[int, int], list[_Solved]] = field(default_factory=dict)
    """What was found of problems, whatever they take, by the identities of ops and edges."""

    def start_choice(self, costed: Costed) -> tuple[int, ...] | None:
        """The choice of the plan to begin with; None where there is none, or the problem has no such candidates."""
        return None if self.start is None else choice_of(costed, self.start)

    def is_memory_bound(self, costed: Costed, smaller: Costed) -> bool:
        """Whether the program says that memory makes a plan of many candidates slower, which will not be simulated."""
        fastest = self.fastest(costed) if size(costed) > MAX_CANDIDATES_MODEST else None
        limit = max_over_limit(costed) * costed.problem.memory_limit
        if fastest is None or costed.problem.memory(fastest.choice) <= limit:
            return False
        return self.expects(costed, smaller)[0] > (1 + memory_bound_ratio(costed)) * fastest.bound

    def expects(self, costed: Costed, smaller: Costed, ceiling: float = math.inf) -> tuple[float, int]:
        """Seconds that the program says the fastest plan takes that fits, about; infinite where none does.

        And the bytes that it counts for it, or for the smallest there is. Where a `ceiling` is given, roughly: any plan
        will do from so many seconds on. `smaller` is the program with the choices that save memory.
        """
        limit = costed.problem.memory_limit
        if (known := self.expected(smaller, limit)) is not None:
            return known.objective, smaller.problem.memory(known.choice)
        if (id(smaller), limit) in self._lacking:
            return math.inf, self._lacking[id(smaller), limit]
        fastest = self.fastest(costed)
        if fastest.bound >= ceiling:
            return fastest.objective, costed.problem.memory(fastest.choice)
        hint = self.start_choice(smaller) or (fastest.choice if smaller is costed else None)
        try:
            found = self.solve(smaller, hint, ceiling, rough=ceiling < math.inf)
        except InfeasibleError as error:
            self._lacking[id(smaller), limit] = error.needed_bytes or 0
            return math.inf, self._lacking[id(smaller), limit]
        self._known[id(smaller), limit] = found
        return found.objective, smaller.problem.memory(found.choice)

    def expected(self, costed: Costed, limit: int) -> Solution | None:
        """What `expects` found under a limit."""
        return self._known.get((id(costed), limit))

    def bound(self, costed: Costed, smaller: Costed) -> float:
        """Seconds that no plan takes less than that the program counts as fitting, by what was asked of it so far."""
        limit = costed.problem.memory_limit
        if (id(smaller), limit) in self._lacking:
            return math.inf
        return (self.expected(smaller, limit) or self.fastest(costed)).bound

    def takes(self, limit: int, ceiling: float) -> bool:
        """Whether it is known that whatever fits takes at least `ceiling` seconds."""
        bounds = (found.bound for (_, under), found in self._known.items() if under in (limit, UNLIMITED))
        return any(bound >= ceiling for bound in bounds)

    def fastest(self, costed: Costed, ceiling: float = math.inf) -> Solution:
        """A choice that is nearly the fastest of all, whatever it holds."""
        key = id(costed), UNLIMITED
        if key not in self._known:
            asked = costed.limited(UNLIMITED)
            self._known[key] = self.solve(asked, self.start_choice(asked), ceiling=ceiling, rough=True)
        return self._known[key]

    def solve(
        self,
        costed: Costed,
        hint: Sequence[int] | None = None,
        ceiling: float = math.inf,
        rough: bool = False,
    ) -> Solution:
        """Solve the problem to the allowed gap."""
        rough = rough and size(costed) > MAX_CANDIDATES_ROUGH_EXACT
        gap, problem = MAX_ROUGH_GAP if rough else 0.0 if is_small(costed) else MAX_GAP, costed.problem
        key = id(problem.ops), id(problem.edges)
        before = self._solved.setdefault(key, []) if ceiling == math.inf else []
        for each in before:
            if each.gap <= gap and each.counted <= problem.memory_limit <= each.problem.memory_limit:
                return each.solution
        found = solve(problem, self.time_limit, self.told, hint, gap, ceiling, rough)
        choice = simplified(problem, self.runs, found.choice)
        found = replace(found, choice=choice, objective=problem.objective(choice)).held_to(found.bound)
        before.append(_Solved(problem, gap, found, problem.memory(choice)))
        return found


@dataclass(frozen=True)
class _Solved:
    """That a solution, which counts so many bytes, is so near the best of a problem: and of it under less, too."""

    problem: Problem
    gap: float
    solution: Solution
    counted: int


def is_small(costed: Costed) -> bool:
    """Whether the program's memory is at its roughest."""
    return size(costed) <= MAX_CANDIDATES_EXACT


def size(costed: Costed) -> int:
    """How many candidates there are."""
    return sum(len(op.candidates) for op in costed.problem.ops)


def max_over_limit(costed: Costed) -> float:
    """The ratio of a memory limit up to which plans are simulated, as they may fit."""
    if is_small(costed):
        return MAX_OVER_LIMIT_SMALL
    return MAX_OVER_LIMIT if size(costed) <= MAX_CANDIDATES_MODEST else MAX_OVER_LIMIT_LARGE


def memory_bound_ratio(costed: Costed) -> float:
    """By how much longer memory has to make a step for it to press."""
    return MEMORY_BOUND_RATIO if size(costed) <= MAX_CANDIDATES_MODEST else MEMORY_BOUND_RATIO_LARGE
