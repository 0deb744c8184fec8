"""What the program is asked, and what it answers, with its generated step as the simulator sees it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardweave.compiler.judge import Decision, Judged
from shardweave.compiler.planner.recomputation import layer_named
from shardweave.compiler.planner.rows import Costed
from shardweave.compiler.planner.solver import Solution
from shardweave.compiler.planner.windows import hiding, overlapping


@dataclass(frozen=True)
class Chosen:
    """A solution of the program, its generated step on the simulator, and the larger memory of the two."""

    costed: Costed
    solution: Solution
    judged: Judged
    peak_memory: int
    pressed: bool = False
    """Whether memory makes it slower by much."""
    schedule_limit: int = 0
    """Bytes that its graphs are ordered for, where that is not what the options say."""
    answer: float = math.inf
    """What the program's own answer takes in it, where that fits, too, and the simulator takes it for slower."""

    @classmethod
    def of(cls, costed: Costed, solution: Solution, judged: Judged) -> Chosen:
        """With the larger memory of the two."""
        return cls(costed, solution, judged, max(costed.problem.memory(solution.choice), judged.peak_memory))

    @property
    def proven_gap(self) -> float:
        """How far the program's own answer is from its bound at most."""
        answer = min(self.answer, self.solution.objective)
        return max(0.0, (answer - self.solution.bound) / answer) if answer else 0.0

    @property
    def decision(self) -> Decision:
        """What it says of each op and join."""
        return decision(self.costed, self.solution.choice)

    @property
    def gathers(self) -> bool:
        """Whether anything is gathered for each of its uses."""
        return any(strategy.rest > 1 for strategy in self.decision.strategies.values())

    def within(self, limit: int) -> Chosen:
        """With the memory that the plan says it needs: the larger figure, unless only the program's is too large."""
        return self if self.peak_memory <= limit else replace(self, peak_memory=self.judged.peak_memory)

    def in_terms_of(self, costed: Costed, best: Chosen) -> Chosen:
        """The same as an answer to another problem, whose best one is known."""
        choice, solution = self.solution.choice, best.solution
        if choice != solution.choice:
            objective = costed.problem.objective(choice)
            found = Solution(choice, objective, objective, "feasible", best.solution.seconds)
            solution = found.held_to(min(best.solution.bound, objective))
        return Chosen.of(costed, solution, self.judged)


@dataclass(frozen=True)
class Both:
    """A step's problem with the seconds both overlapped and in turn, and that of a step in which all hides that can."""

    given: Costed
    overlapping: Costed

    @classmethod
    def of(cls, costed: Costed, limit: int) -> Both:
        """Of what has the seconds of both, under a memory limit."""
        given = limited(costed, limit)
        return cls(given, replace(given, problem=overlapping(given.problem)))

    def hiding(self, share: float) -> Costed:
        """The problem of a step in which a share of what could hide does."""
        return replace(self.given, problem=hiding(self.given.problem, share))

    def hidden_in(self, chosen: Chosen) -> float:
        """The share of what could hide that did when a choice was simulated."""
        choice = chosen.solution.choice
        # With all streams, the busiest of a pass is that of its seconds in turn
        most, least = self.given.problem.objective(choice), self.overlapping.problem.objective(choice)
        share = (most - chosen.judged.step_time) / (most - least) if most > least else 1.0
        return min(1.0, max(0.0, share))


@dataclass(frozen=True)
class Lacking:
    """That nothing fits into a memory limit, as far as that is known: the fastest plan of all, and the smallest."""

    costed: Costed
    free: Both
    fastest: Solution
    least: Chosen


def fastest_of(found: Sequence[Chosen]) -> Chosen:
    """By the simulator; the first of equal ones."""
    return min(found, key=lambda chosen: chosen.judged.step_time)


def limited(costed: Costed, limit: int) -> Costed:
    """Under another memory limit."""
    return replace(costed, problem=replace(costed.problem, memory_limit=limit))


def decision(costed: Costed, choice: Sequence[int]) -> Decision:
    """What a choice says of each op and join."""
    found = Decision({}, {}, {})
    for variable, index in zip(costed.variables, choice, strict=True):
        if variable.op is not None:
            found.strategies[variable.name] = variable.strategies[index]
        elif variable.modes:
            found.modes[layer_named(variable.name)] = variable.modes[index]
        elif variable.ports:
            found.joins[variable.name] = next(iter(variable.ports[index].values())).in_space
    return found
