"""Choosing: the program's answer, held to the simulator's memory before it becomes a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardweave.compiler.judge import Decision, Judged
from shardweave.compiler.planner.costing import Costed
from shardweave.compiler.planner.recomputation import layer_named
from shardweave.compiler.planner.solver import Solution, smallest, solve
from shardweave.compiler.planner.tidy import tidied
from shardweave.compiler.refine import rivals
from shardweave.errors import InfeasibleError
from shardweave.units import readable_bytes

UNLIMITED = 2**62
"""Bytes that no device has."""

GAP, EXACT = 1e-3, 2**13
"""How far from its bound an answer of the program may be; of problems with at most so many candidates, not at all."""

FAR = 1.5
"""A plan that the program counts as so many times the limit is not simulated: it does not fit."""

Start = Callable[[Costed], Sequence[int] | None]
"""From a problem to a choice to begin with."""

Simulate = Callable[[Decision, int], Judged]
"""From what is decided of each op and join to what the generated step takes, scheduled under a memory limit."""


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


@dataclass(frozen=True)
class Chooser:
    """Chooses one plan of a step.

    Parameters
    ----------
    simulate : callable
    time_limit : float
        Seconds that the solver may take for one problem.
    start : callable
        From a problem to a choice to begin with, where one is known.
    runs : sequence of sequences of str
        The names of layers that are equal.
    """

    simulate: Simulate
    time_limit: float
    start: Start = lambda costed: None
    runs: Sequence[Sequence[str]] = ()
    _judged: dict[tuple[int, ...], dict[int, Judged]] = field(default_factory=dict)
    """What has been simulated, by its choice (of a problem with modes a longer one than without) and the limit."""

    def choose(self, costed: Costed, smaller: Callable[[], Costed] | None = None) -> Chosen:
        """The best choice whose generated step, simulated, fits.

        The program adds up what its ops hold, mostly a little too much; the simulator follows every value of the
        generated step, and is the judge. Where the fastest plan of all fits, it is the answer. Otherwise the program
        is asked under the limit, `smaller` with all ways to save memory, and again under a smaller limit as long as its
        answer needs more than it thought; its first answer remains the bound. The smallest plan is the last resort.
        The answer is refined: the simulator picks among plans that the program says to be close.

        Raises
        ------
        InfeasibleError
            With the smallest memory that would do, and what takes it.
        """
        limit = costed.problem.memory_limit
        free = _limited(costed, UNLIMITED)
        fastest = self._solve(free, self.start(costed))
        if costed.problem.memory(fastest.choice) <= FAR * limit:
            first = self._simulated(free, fastest, limit)
            if _peak(first) <= limit:
                return _within(self._refined(free, first, limit), limit)
        if smaller is not None:
            costed = smaller()
        found = self._under(costed, limit, self.start(costed) or (fastest.choice if smaller is None else None))
        if found is not None:
            return _within(self._refined(costed, found, limit), limit)
        return self._last(costed, fastest, limit)

    def _refined(self, costed: Costed, best: Chosen, limit: int) -> Chosen:
        """The fastest by the simulator of the best choice and its rivals, of those that fit."""
        found = best
        exact = _is_small(costed)
        for solution in rivals(costed, best.solution, lambda family: self._solve(family, exact=exact)):
            rival = self._simulated(costed, solution, limit)
            if _peak(rival) <= limit and rival.judged.step_time < found.judged.step_time:
                found = rival
        return found

    def _last(self, costed: Costed, fastest: Solution, limit: int) -> Chosen:
        """The smallest plan of all, where the program finds none that fits."""
        choice = smallest(costed.problem, self.time_limit)
        assert choice is not None  # there is a fastest one
        least = self._simulated(costed, _unproven(costed, choice, fastest), limit)
        if _peak(least) <= limit:
            return _within(least, limit)
        needed = _peak(least)
        # What is counted as more than the smallest may be simulated as less, and the smallest in another order, too
        while (found := self._under(costed, needed - 1) or self._fits(least, needed - 1)) is not None:
            least, needed = found, found.peak_memory
        if needed <= limit:  # asked from above, the program came by a plan that it had skipped under this limit
            return self._lowered_under(limit, least)
        parts = [f"{kind} {readable_bytes(size)}" for kind, size in largest(least.judged.at_peak)]
        raise InfeasibleError.needing(
            needed,
            f"no plan fits into the memory limit of {limit} bytes ({readable_bytes(limit)}) a device; the smallest "
            f"memory that does is {needed} bytes ({readable_bytes(needed)}): {', '.join(parts)}. Raise memory_limit, "
            "or use more devices or a smaller batch",
        )

    def _lowered_under(self, limit: int, chosen: Chosen) -> Chosen:
        """A plan with what it takes as it will be lowered: under the user's limit, not one that it was found under."""
        judged = self.simulate(_decision(chosen.costed, chosen.solution), limit)
        return _within(_chosen(chosen.costed, chosen.solution, judged), limit)

    def _fits(self, chosen: Chosen, limit: int) -> Chosen | None:
        """A plan scheduled under a limit; None where it does not meet it."""
        again = self._simulated(chosen.costed, chosen.solution, limit)
        return _within(again, limit) if _peak(again) <= limit else None

    def _under(self, costed: Costed, limit: int, hint: Sequence[int] | None = None) -> Chosen | None:
        """The best choice that fits into `limit` when simulated, too; None where the program runs out of choices."""
        asked = _limited(costed, limit)
        first: Solution | None = None
        while True:
            try:
                solution = self._solve(asked, hint)
            except InfeasibleError:
                return None
            first, hint = first or solution, hint if first is None else first.choice
            # The bound of the tighter problem says nothing of the user's own.
            held = solution if solution is first else solution.held_to(first.bound)
            chosen = self._simulated(costed, held, limit)
            if _peak(chosen) <= limit:
                return _within(chosen, limit)
            counted = costed.problem.memory(solution.choice)
            asked = _limited(costed, min(counted - 1, limit - (_peak(chosen) - counted)))

    def _solve(self, costed: Costed, hint: Sequence[int] | None = None, exact: bool | None = None) -> Solution:
        exact = _is_small(costed) if exact is None else exact
        found = solve(costed.problem, self.time_limit, hint=hint, gap=0.0 if exact else GAP)
        if exact:
            return found
        choice = tidied(costed.problem, costed.variables, self.runs, found.choice)
        return replace(found, choice=choice, objective=costed.problem.objective(choice)).held_to(found.bound)

    def _simulated(self, costed: Costed, solution: Solution, limit: int) -> Chosen:
        known = self._judged.setdefault(solution.choice, {})
        # What does not meet a limit does not meet a smaller one, and what holds less than both meets either.
        same = [judged for other, judged in known.items() if limit <= other < judged.peak_memory
                or judged.peak_memory <= limit <= other]  # fmt: skip
        if not same:
            known[limit] = self.simulate(_decision(costed, solution), limit)
        return _chosen(costed, solution, same[0] if same else known[limit])


def _chosen(costed: Costed, solution: Solution, judged: Judged) -> Chosen:
    return Chosen(costed, solution, judged, max(costed.problem.memory(solution.choice), judged.peak_memory))


def _is_small(costed: Costed) -> bool:
    return sum(len(op.candidates) for op in costed.problem.ops) <= EXACT


def _limited(costed: Costed, limit: int) -> Costed:
    return replace(costed, problem=replace(costed.problem, memory_limit=limit))


def _unproven(costed: Costed, choice: tuple[int, ...], fastest: Solution) -> Solution:
    """A choice of which all that is known is that none is faster than the fastest of all."""
    return Solution(choice, costed.problem.objective(choice), fastest.bound, "feasible", 0.0)


def _peak(chosen: Chosen) -> int:
    return chosen.judged.peak_memory


def _within(chosen: Chosen, limit: int) -> Chosen:
    """What the plan says that it needs: the larger figure, unless only the program's is above the limit."""
    return chosen if chosen.peak_memory <= limit else replace(chosen, peak_memory=chosen.judged.peak_memory)


def largest(sizes: Mapping[str, int], count: int = 3) -> list[tuple[str, int]]:
    """The largest entries, largest first.

    >>> largest({"saved": 3, "optimizer": 7, "inputs": 1}, 2)
    [('optimizer', 7), ('saved', 3)]
    """
    return sorted(sizes.items(), key=lambda item: -item[1])[:count]


def _decision(costed: Costed, solution: Solution) -> Decision:
    found = Decision({}, {}, {})
    for variable, index in zip(costed.variables, solution.choice, strict=True):
        if variable.op is not None:
            found.strategies[variable.name] = variable.strategies[index]
        elif variable.modes:
            found.modes[layer_named(variable.name)] = variable.modes[index]
        else:
            found.joins[variable.name] = next(iter(variable.ports[index].values()))
    return found
