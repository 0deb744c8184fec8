"""Answers: what the program says of a step, asked for everything once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shardweave.compiler.chosen import Both
from shardweave.compiler.planner.incumbent import Progress
from shardweave.compiler.planner.problem import Problem
from shardweave.compiler.planner.rows import Costed
from shardweave.compiler.planner.solver import Solution, solve
from shardweave.compiler.planner.tidy import tidied
from shardweave.errors import InfeasibleError

UNLIMITED = 2**62
"""Bytes that no device has."""

GAP, EXACT = 1e-3, 2**10
"""How far from its bound an answer of the program may be; of problems with at most so many candidates, not at all."""

ROUGH, TINY = 5e-3, 2**8
"""The same where the simulator has the last word; of problems with at most so many candidates, not at all."""

MODEST = 2**14
"""Candidates of a problem up to which plans that people write by hand are simulated, however near the answer is."""

FAR, FAR_SMALL, FAR_LARGE = 1.5, 2.0, 1.1
"""A plan that the program counts as so many times the limit is not simulated: it does not fit. Of problems with at most
`EXACT` candidates, of which the program's memory is the roughest; with more than `MODEST`, of which it is good."""

PRESSING, PRESSING_LARGE = 0.01, 0.05
"""Memory presses where it makes a step longer by more than that; of problems with more than `MODEST` candidates, for
which it takes long to look at others."""

Start = Callable[[Costed], Sequence[int] | None]
"""From a problem to a choice to begin with."""


@dataclass(frozen=True)
class Answers:
    """The program's answers.

    Parameters
    ----------
    time_limit : float
        Seconds that the solver may take for one problem.
    start : callable
        From a problem to a choice to begin with, where one is known.
    runs : sequence of sequences of str
        The names of layers that are equal.
    """

    time_limit: float
    start: Start = lambda costed: None
    runs: Sequence[Sequence[str]] = ()
    told: Callable[[Progress], None] | None = None
    """Told what is found while a problem is solved."""
    _asked: dict[tuple[int, int], tuple[Costed, Both]] = field(default_factory=dict)
    """What the program is asked, by the identity of the problem and the memory limit."""
    _known: dict[tuple[int, int], Solution] = field(default_factory=dict)
    """Choices that are nearly the best, by the same."""
    _lacking: dict[tuple[int, int], int] = field(default_factory=dict)
    """The bytes that would do where nothing fits, by the same."""
    _solved: dict[tuple[int, int], list[_Solved]] = field(default_factory=dict)
    """What was found of problems of few candidates, whatever they take, by the identities of ops and edges."""

    def presses(self, costed: Costed, smaller: Callable[[], Costed] | None = None) -> bool:
        """Whether the program says that memory makes a plan of many candidates slower, which will not be simulated."""
        fastest = self.fastest(costed) if size(costed) > MODEST else None
        if fastest is None or not self.is_far(costed, fastest, costed.problem.memory_limit):
            return False
        return self.expects(costed, smaller)[0] > (1 + pressing(costed)) * fastest.bound

    def expects(
        self, costed: Costed, smaller: Callable[[], Costed] | None = None, ceiling: float = math.inf
    ) -> tuple[float, int]:
        """Seconds that the program says the fastest plan takes that fits, about; infinite where none does.

        And the bytes that it counts for it, or for the smallest there is. Where a `ceiling` is given, roughly: any plan
        will do from so many seconds on.
        """
        limit = costed.problem.memory_limit
        given = costed if smaller is None else smaller()
        if (known := self.expected(given, limit)) is not None:
            return known.objective, given.problem.memory(known.choice)
        if (id(given), limit) in self._lacking:
            return math.inf, self._lacking[id(given), limit]
        fastest = self.fastest(costed)
        if fastest.bound >= ceiling:
            return fastest.objective, costed.problem.memory(fastest.choice)
        asked = self.both(given, limit).overlapping
        hint = self.start(asked) or (fastest.choice if smaller is None else None)
        try:
            found = self.solve(asked, hint, fastest.waits_for, ceiling, rough=ceiling < math.inf)
        except InfeasibleError as error:
            self._lacking[id(given), limit] = error.needed_bytes or 0
            return math.inf, self._lacking[id(given), limit]
        self._known[id(given), limit] = found
        kept = [] if found.bound >= ceiling else [(id(given), limit)]  # others take much memory, and are not asked soon
        for key in self._asked.keys() - kept:
            del self._asked[key]
        return found.objective, given.problem.memory(found.choice)

    def expected(self, costed: Costed, limit: int) -> Solution | None:
        """What `expects` found under a limit."""
        return self._known.get((id(costed), limit))

    def takes(self, limit: int, ceiling: float) -> bool:
        """Whether it is known that whatever fits takes at least `ceiling` seconds."""
        bounds = (found.bound for (_, under), found in self._known.items() if under in (limit, UNLIMITED))
        return any(bound >= ceiling for bound in bounds)

    def both(self, costed: Costed, limit: int) -> Both:
        """What the program is asked under a limit."""
        key = id(costed), limit
        if key not in self._asked:
            self._asked[key] = costed, Both.of(costed, limit)
        return self._asked[key][1]

    def fastest(self, costed: Costed, ceiling: float = math.inf) -> Solution:
        """A choice that is nearly the fastest of all, whatever it holds."""
        key = id(costed), UNLIMITED
        if key not in self._known:
            asked = self.both(costed, UNLIMITED).overlapping
            self._known[key] = self.solve(asked, self.start(asked), ceiling=ceiling, rough=True)
        return self._known[key]

    def is_far(self, costed: Costed, fastest: Solution, limit: int) -> bool:
        """Whether a choice does not fit for sure, whatever the simulator says."""
        far = FAR_SMALL if is_small(costed) else FAR if size(costed) <= MODEST else FAR_LARGE
        return costed.problem.memory(fastest.choice) > far * limit

    def solve(
        self,
        costed: Costed,
        hint: Sequence[int] | None = None,
        waits_for: Sequence[str] = (),
        ceiling: float = math.inf,
        rough: bool = False,
    ) -> Solution:
        """What the program chooses, near enough to its bound."""
        rough = rough and size(costed) > TINY
        gap, problem = ROUGH if rough else 0.0 if is_small(costed) else GAP, costed.problem
        whatever = ceiling == math.inf and size(costed) <= MODEST
        before = self._solved.setdefault((id(problem.ops), id(problem.edges)), []) if whatever else []
        for each in before:
            if each.gap <= gap and each.counted <= problem.memory_limit <= each.problem.memory_limit:
                return each.solution
        found = solve(problem, self.time_limit, self.told, hint, waits_for, gap, ceiling, rough)
        choice = tidied(problem, self.runs, found.choice)
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
    return size(costed) <= EXACT


def size(costed: Costed) -> int:
    """How many candidates there are."""
    return sum(len(op.candidates) for op in costed.problem.ops)


def pressing(costed: Costed) -> float:
    """By how much longer memory has to make a step for it to press."""
    return PRESSING if size(costed) <= MODEST else PRESSING_LARGE
