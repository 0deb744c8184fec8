"""Choosing: the program's answer, held to the simulator's memory before it becomes a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardweave.ir import InfeasibleError, readable_bytes
from shardweave.planner.problem.variables import Costed
from shardweave.planner.search.alternative_plans import alike, overlooked, rivals
from shardweave.planner.search.evaluation import Judged
from shardweave.planner.search.lowering import Decision
from shardweave.planner.search.solver_cache import (
    GAP,
    MODEST,
    ROUGH,
    UNLIMITED,
    Answers,
    Both,
    Chosen,
    Lacking,
    decision,
    fastest_of,
    is_small,
    limited,
    pressing,
    size,
)
from shardweave.planner.solver.solver import Solution, smallest

WIDER = 0.25
"""How much more of what was not counted is left free each time that an answer of many candidates did not fit."""

MANY = 8
"""Families of plans that rivals are looked for in."""

NEAR, NEAR_LARGE = 0.03, 0.06
"""How much longer than the program's bound a simulated step may be for no other plans to be simulated; of problems
with more than `MODEST` candidates, whose steps are simulated with few of their layers, and are so far from whole ones.
Of problems with at most `EXACT` candidates all are that are in question."""

LITTLE = (0.0, 0.125, 0.25, 0.375, 0.5)
"""Parts of the way from what the program says is the smallest memory to what the simulator says of that plan."""

MUCH_LESS = 1.25
"""How many times what is found to need least may need that the program says is the smallest."""

Simulate = Callable[[Decision, int], Judged]
"""From what is decided of each op and join to what the generated step takes, scheduled under a memory limit."""


@dataclass(frozen=True)
class Chooser:
    """Chooses one plan of a step.

    Parameters
    ----------
    simulate : callable
    answers : Answers
        What the program says.
    """

    simulate: Simulate
    answers: Answers
    _judged: dict[tuple[int, ...], dict[int, Judged]] = field(default_factory=dict)
    """What has been simulated, by its choice (of a problem with modes a longer one than without) and the limit."""

    def choose(
        self, costed: Costed, smaller: Callable[[], Costed] | None = None, ceiling: float = math.inf
    ) -> Chosen | Lacking | None:
        """The best choice whose generated step, simulated, fits; `costed` has the seconds both overlapped and in turn.

        The program adds up what its ops hold, mostly a little too much; the simulator follows every value of the
        generated step, and is the judge. Where the fastest plan of all fits, it is the answer. Otherwise the program
        is asked under the limit, `smaller` with all ways to save memory, and again under a smaller limit as long as its
        answer needs more than it thought; its first answer remains the bound. The smallest plan is the last resort.
        The answer is refined: the simulator picks among plans that may be faster when less hides than the program lets.
        None where the program says that nothing that fits takes less than `ceiling` seconds; not of small problems.
        """
        limit, ceiling = costed.problem.memory_limit, math.inf if is_small(costed) else ceiling
        if self.answers.takes(limit, ceiling):
            return None
        free, fastest = self.answers.both(costed, UNLIMITED), self.answers.fastest(costed, ceiling)
        if fastest.bound >= ceiling:
            return None
        near = self._near(free, fastest, limit)
        too_large = [chosen for chosen in near if chosen.judged.peak_memory <= limit]  # as counted, maybe, but they fit
        if near and (best := fastest_of(near)).judged.peak_memory <= limit:
            # What does not fit is simulated as slower than it would be with the memory that it needs
            fits_too = near[0].judged.peak_memory <= limit
            if fits_too or best.judged.step_time <= (1 + ROUGH) * fastest.bound:
                pressed = self._presses(free, best, near)
                return replace(best, pressed=pressed, answer=_least(too_large)).within(limit)
        given = costed if smaller is None else smaller()
        both = self.answers.both(given, limit)
        hint = self.answers.start(both.overlapping) or (fastest.choice if smaller is None else None)
        if (expected := self.answers.expected(given, limit)) is not None:
            hint = expected.choice
        found = self._under(both.overlapping, limit, hint, fastest.waits_for, ceiling=ceiling, known=expected)
        fits = self._with_rivals(both, found, limit) if found else self._families(both.overlapping, fastest, limit)
        known = fastest_of([*too_large, *fits]) if too_large or fits else None
        too_large += self._overlooked(free.overlapping, fastest, known, limit)
        if not (too_large or fits):
            if ceiling < math.inf:
                return None
            return self._smallest(both.overlapping, free, fastest, limit)
        best = fastest_of([*too_large, *fits])
        if found is None or any(best is chosen for chosen in too_large):
            bound = fastest.bound  # of all choices: of those that fit, too, nothing more is known
        else:
            bound = min([found.solution.bound, *(chosen.solution.objective for chosen in too_large)])
        # Simulated is held against simulated: of a plan that counts too much, the bound tells nothing of memory
        if near:
            pressed = self._presses(free, best, near)
        else:  # of what the program does not find its bound tells nothing
            pressed = found is None or bound > (1 + pressing(costed)) * fastest.bound
        held, answer = best.solution.held_to(bound), _least([*too_large, *fits])
        return replace(best, solution=held, pressed=pressed, answer=answer).within(limit)

    def _presses(self, free: Both, best: Chosen, near: Sequence[Chosen]) -> bool:
        """Whether a plan is slower by much than the fastest would be with all the memory that it asks for."""
        fastest = fastest_of(near).judged.step_time
        if size(free.given) <= MODEST:  # others take long to simulate again
            unhindered = self._simulated(free.overlapping, near[0].solution, UNLIMITED)
            fastest = min(fastest, unhindered.judged.step_time)
        return best.judged.step_time > (1 + pressing(free.given)) * fastest

    def _near(self, free: Both, fastest: Solution, limit: int) -> list[Chosen]:
        """The fastest choice of all, first, and its rivals, simulated; some may not fit. None where it is far off."""
        if self.answers.is_far(free.overlapping, fastest, limit):
            return []
        fastest = self.answers.solve(free.overlapping, fastest.choice, fastest.waits_for)
        if size(free.given) <= MODEST:  # what fits so is the same under the limit, and tells what that costs
            self._simulated(free.overlapping, fastest, UNLIMITED)
        return self._with_rivals(free, self._simulated(free.overlapping, fastest, limit), limit)

    def _overlooked(self, costed: Costed, fastest: Solution, best: Chosen | None, limit: int) -> list[Chosen]:
        """What fits and is faster than the best that is known, whatever it counts; of a problem with few choices."""
        found: list[Chosen] = []
        ceiling = best.judged.step_time if best is not None else math.inf
        for choice in overlooked(costed.problem, limit, ceiling):
            solution = _unproven(costed, choice, fastest)
            if solution.objective >= ceiling:
                continue
            chosen = self._simulated(costed, solution, limit)
            if chosen.judged.peak_memory <= limit and chosen.judged.step_time < ceiling:
                found.append(chosen)
                ceiling = chosen.judged.step_time
        if found and best is None:  # the smallest ones were looked at
            found += self._overlooked(costed, fastest, found[-1], limit)
        return found

    def _with_rivals(self, both: Both, best: Chosen, limit: int) -> list[Chosen]:
        """The best choice and its rivals, simulated, until one is near the bound; under the limit those that fit."""
        under_limit = both.given.problem.memory_limit < UNLIMITED
        close = NEAR if size(both.given) <= MODEST else NEAR_LARGE
        found: list[Chosen] = []
        for others in self._in_question(both, best, limit):
            found += others
            fits = [chosen for chosen in found if chosen.judged.peak_memory <= limit]
            near = bool(fits) and fastest_of(fits).judged.step_time <= (1 + close) * best.solution.bound
            if near and not is_small(both.given):
                break
        if size(both.given) <= MODEST:
            seen = {chosen.solution.choice for chosen in found}
            simulated = fastest_of(fits).judged.step_time if fits else math.inf
            others = self._alike(both.overlapping, best.solution, limit, simulated)
            found += [chosen for chosen in others if chosen.solution.choice not in seen]
            fits = [chosen for chosen in found if chosen.judged.peak_memory <= limit]
        return fits if under_limit else found

    def _in_question(self, both: Both, best: Chosen, limit: int) -> Iterator[list[Chosen]]:
        """What may be the fastest when simulated: the likeliest first."""
        yield [best]
        share = both.hidden_in(best)
        if share < 1.0:
            yield from self._where_hides(share, both, best, limit)
        yield self._rivals(both.overlapping, best, limit, MANY)
        if share > 0.0:
            yield from self._where_hides(0.0, both, best, limit)

    def _where_hides(self, share: float, both: Both, best: Chosen, limit: int) -> Iterator[list[Chosen]]:
        """About the best choice where only a share hides of what could, and its rival of the least degree."""
        asked = both.hiding(share)
        hint, waits_for = best.solution.choice, best.solution.waits_for
        other: Chosen | None
        if asked.problem.memory_limit < UNLIMITED:
            other = self._under(asked, limit, hint, waits_for, rough=True)
        else:
            other = self._simulated(asked, self.answers.solve(asked, hint, waits_for, rough=True), limit)
        if other is not None:
            yield [other.in_terms_of(both.overlapping, best)]
            yield [each.in_terms_of(both.overlapping, best) for each in self._rivals(asked, other, limit, 1)]

    def _rivals(self, costed: Costed, best: Chosen, limit: int, most: int) -> list[Chosen]:
        """The rivals, simulated."""
        found = rivals(costed, best.solution, self._close, most)
        return [self._simulated(costed, solution, limit) for solution in found]

    def _alike(self, costed: Costed, best: Solution, limit: int, simulated: float = math.inf) -> list[Chosen]:
        """Plans that are spread alike everywhere, simulated; of tensor parallel ones what may be as fast as one is."""
        found = alike(costed, best, self._close, simulated)
        return [self._simulated(costed, solution, limit) for solution in found]

    def _families(self, costed: Costed, fastest: Solution, limit: int) -> list[Chosen]:
        """Plans that are alike everywhere and fit when simulated, however long they take; none of large problems."""
        if size(costed) > MODEST:
            return []
        found = self._alike(costed, replace(fastest, objective=math.inf), limit)
        return [chosen.within(limit) for chosen in found if chosen.judged.peak_memory <= limit]

    def _close(self, costed: Costed, best: Solution, ceiling: float) -> Solution:
        """A choice that is nearly the best one, if that takes less than `ceiling` seconds."""
        return self.answers.solve(costed, waits_for=best.waits_for, ceiling=ceiling, rough=True)

    def _smallest(self, costed: Costed, free: Both, fastest: Solution, limit: int) -> Chosen | Lacking:
        """What the program says is the smallest plan of all, where it finds none that fits."""
        choice = smallest(costed.problem, self.answers.time_limit)
        if choice is None:
            raise InfeasibleError(
                f"no plan that fits into the memory limit of {readable_bytes(limit)} a device was found within "
                f"{self.answers.time_limit:g} s: raise memory_limit, or time_limit to search for longer"
            )
        least = self._simulated(costed, _unproven(costed, choice, fastest), limit)
        if least.judged.peak_memory <= limit:
            return replace(least, pressed=True).within(limit)
        lacking = Lacking(costed, free, fastest, replace(least, peak_memory=least.judged.peak_memory))
        if is_small(costed) and least.judged.peak_memory <= MUCH_LESS * limit:
            lacking = self._less(self._nearly_smallest(lacking), limit)
        return lacking if lacking.least.peak_memory > limit else self._lowered_under(limit, lacking.least)

    def last(self, lacking: Lacking, limit: int) -> Chosen:
        """What is found for where nothing is known to fit: a plan that does after all, or the smallest."""
        least = self._less(self._nearly_smallest(lacking), limit).least
        return self._lowered_under(limit, least) if least.peak_memory <= limit else least

    def _less(self, lacking: Lacking, limit: int) -> Lacking:
        """With the smallest plan that is found, or the first that fits: asked from above, the program comes by others.

        What is counted as more than the smallest may be simulated as less, and the smallest in another order, too.
        """
        least: Chosen | None = lacking.least
        while least is not None and lacking.least.peak_memory > limit:
            least = self._below(lacking)
            lacking = replace(lacking, least=least or lacking.least)
        return lacking

    def _nearly_smallest(self, lacking: Lacking) -> Lacking:
        """With what holds least of the fastest choices that count little more than the smallest, where that is less.

        The smallest of all in the program computes and gathers whatever saves a byte, and is simulated as more.
        """
        costed, least = lacking.costed, lacking.least
        low, high = costed.problem.memory(least.solution.choice), least.peak_memory
        for part in LITTLE if low < high else ():
            asked = limited(costed, low + int(part * (high - low)))
            chosen = self._simulated(costed, self.answers.solve(asked, least.solution.choice, rough=True), low)
            least = min(least, chosen, key=lambda each: each.peak_memory)
        return replace(lacking, least=least)

    def _lowered_under(self, limit: int, chosen: Chosen) -> Chosen:
        """A plan with what it takes as it will be lowered: under the user's limit, not one that it was found under."""
        judged = self.simulate(chosen.decision, limit)
        return replace(Chosen.of(chosen.costed, chosen.solution, judged), pressed=True).within(limit)

    def _below(self, lacking: Lacking) -> Chosen | None:
        """A plan that needs less than the smallest so far."""
        limit = lacking.least.peak_memory - 1
        rough = not is_small(lacking.costed)
        found = self._under(lacking.costed, limit, rough=rough) or self._fits(lacking.least, limit)
        near = [] if found else self._near(lacking.free, lacking.fastest, limit)
        fits = [each.within(limit) for each in near if each.judged.peak_memory <= limit]
        return found or next(iter(fits or self._families(limited(lacking.costed, limit), lacking.fastest, limit)), None)

    def _fits(self, chosen: Chosen, limit: int) -> Chosen | None:
        """A plan scheduled under a limit; None where it does not meet it."""
        again = self._simulated(chosen.costed, chosen.solution, limit)
        return again.within(limit) if again.judged.peak_memory <= limit else None

    def _under(
        self,
        costed: Costed,
        limit: int,
        hint: Sequence[int] | None = None,
        waits_for: Sequence[str] = (),
        rough: bool = False,
        ceiling: float = math.inf,
        known: Solution | None = None,
    ) -> Chosen | None:
        """The best choice that fits into `limit` when simulated, too; None where the program runs out of choices.

        Of those that may take less than `ceiling` seconds; `known` is one that the program has found under the limit.
        """
        asked, wider = limited(costed, limit), 1.0
        first: Solution | None = None
        while True:
            try:
                if first is None and known is not None and known.gap <= GAP:
                    solution = known
                else:
                    solution = self.answers.solve(asked, hint, first.waits_for if first else waits_for, ceiling, rough)
            except InfeasibleError:
                return None
            if solution.bound >= ceiling:
                return None
            first, hint = first or solution, hint if first is None else first.choice
            # The bound of the tighter problem says nothing of the user's own.
            held = solution if solution is first else solution.held_to(first.bound)
            chosen = self._simulated(costed, held, limit)
            if chosen.judged.peak_memory <= limit:
                return chosen.within(limit)
            counted = costed.problem.memory(solution.choice)
            missed = chosen.judged.peak_memory - counted
            asked = limited(costed, min(counted - 1, limit - int(wider * missed)))
            wider += WIDER if size(costed) > MODEST else 0.0

    def _simulated(self, costed: Costed, solution: Solution, limit: int) -> Chosen:
        known = self._judged.setdefault(solution.choice, {})
        # What does not meet a limit does not meet a smaller one, and what holds less than both meets either.
        same = [judged for other, judged in known.items() if limit <= other < judged.peak_memory
                or judged.peak_memory <= limit <= other]  # fmt: skip
        if not same:
            known[limit] = self.simulate(decision(costed, solution.choice), limit)
        return Chosen.of(costed, solution, same[0] if same else known[limit])


def _least(found: Sequence[Chosen]) -> float:
    """What the program's answer takes in it."""
    return min(chosen.solution.objective for chosen in found)


def _unproven(costed: Costed, choice: tuple[int, ...], fastest: Solution) -> Solution:
    """A choice of which all that is known is that none is faster than the fastest of all."""
    return Solution(choice, costed.problem.objective(choice), fastest.bound, "feasible", 0.0)
