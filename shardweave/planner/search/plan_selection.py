"""Selection of a plan: the solver's answers and some alternatives are simulated, and the fastest that fits is taken.

Alternatives
    - The best plan of each *family*: all choices up to one degree of tensor parallelism, and choices whose states are
      sharded in one way everywhere (not at all, the states, or the parameters as well). The solver finds the best of
      each family exactly. Those that it predicts to be close to the best of all are simulated.
    - Of problems with few choices, those that the solver's memory estimate rejects by a little.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import islice, product

from shardweave.ir import InfeasibleError, PlanError, Strategy, readable_bytes
from shardweave.planner.problem.build_problem import Costed, Variable
from shardweave.planner.problem.problem import Problem
from shardweave.planner.search.evaluation import Decision, Evaluation
from shardweave.planner.search.solver_cache import (
    MAX_CANDIDATES_MODEST,
    MAX_GAP,
    MAX_ROUGH_GAP,
    UNLIMITED,
    Both,
    CachedSolver,
    Chosen,
    Lacking,
    decision,
    fastest_of,
    is_small,
    limited,
    memory_bound_ratio,
    size,
)
from shardweave.planner.solver.reductions import Kept, invert, restricted
from shardweave.planner.solver.solver import Solution, smallest
from shardweave.sharding import ColumnRowStrategies

Solve = Callable[[Costed, Solution, float], Solution]

FAMILY_TOLERANCE, MAX_SIMULATED_FAMILIES = 0.1, 2
"""The best plan of a family is simulated if the solver predicts at most this part more time for it than for the best
plan. At most so many are."""


def other_families(costed: Costed, best: Solution, solve: Solve, most: int) -> Iterator[Solution]:
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
    yield from [*close[:1], *sorted(close[1:], key=_objective)][:MAX_SIMULATED_FAMILIES]


MAX_SIMULATED_PER_SHARDING = 3
"""The number of plans that are simulated for each shard degree of the states, and for each grid."""

ESTIMATE_TOLERANCE = 0.03
"""The part by which the solver may overestimate the time of a plan with one grid for all ops."""


def alike(costed: Costed, best: Solution, solve: Solve, simulated: float = math.inf) -> list[Solution]:
    """The same of plans that people write by hand: spread alike in all layers.

    Of data parallel ones, resting alike, over all devices and over a part of them; and of tensor parallel ones that the
    program says may take about as long as what is known to be `simulated` in so many seconds.
    """
    found = [*_close(costed, best, solve, ways_to_rest(costed))]
    partly = _close(costed, best, solve, partly_at_rest(costed))
    tensor = _close(costed, best, solve, in_turn(costed), (1 + ESTIMATE_TOLERANCE) * simulated)
    for several in (partly, tensor):
        found += sorted(several, key=_objective)[:MAX_SIMULATED_PER_SHARDING]
    return [*{solution.choice: solution for solution in found}.values()]


def _objective(solution: Solution) -> float:
    return solution.objective


def _close(
    costed: Costed, best: Solution, solve: Solve, found_in: Iterable[Kept], ceiling: float = math.inf
) -> Iterator[Solution]:
    seen, ceiling = {best.choice}, min(ceiling, best.objective * (1 + FAMILY_TOLERANCE))
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
        found = ColumnRowStrategies.of(grid, "dp")
        own = [_as_in(found, each) if counts else [] for each, counts in zip(costed.variables, counted, strict=True)]
        yield _left(costed, own)


def _as_in(found: ColumnRowStrategies, variable: Variable) -> list[bool]:
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


MAX_ENUMERATED_CHOICES = 2**12
"""Problems with at most so many choices have each choice looked at."""

MAX_ESTIMATE_OVER_LIMIT = 1.15
"""A choice is simulated although its estimated memory exceeds the limit, up to this ratio."""

MAX_SIMULATED_NEAR_MISSES = 32
"""The number of such choices that are simulated."""


def near_misses(problem: Problem, limit: int, ceiling: float) -> list[tuple[int, ...]]:
    """Choices that may fit and take less than `ceiling` seconds, the fastest first; the smallest first where it is inf.

    None of a problem with many choices.

    Examples
    --------
    >>> from shardweave.planner.problem.problem import Candidate, Op
    >>> ways = Candidate("dp", 1.0, 102), Candidate("zdp", 2.0, 100), Candidate("tensor", 3.0, 90)
    >>> problem = Problem((Op("head", ways),), (), memory_limit=100)
    >>> near_misses(problem, 100, ceiling=2.5), near_misses(problem, 99, ceiling=float("inf"))
    ([(0,), (1,)], [(2,), (1,), (0,)])
    """
    if math.prod(len(op.candidates) for op in problem.ops) > MAX_ENUMERATED_CHOICES:
        return []
    found = []
    for choice in product(*(range(len(op.candidates)) for op in problem.ops)):
        seconds = problem.objective(choice)
        if seconds < ceiling and (size := problem.memory(choice)) <= MAX_ESTIMATE_OVER_LIMIT * limit:
            found.append((seconds if ceiling < math.inf else size, choice))
    return [choice for _, choice in sorted(found)[:MAX_SIMULATED_NEAR_MISSES]]


MARGIN_STEP = 0.25
"""The part of the underestimated memory by which the margin grows each time that an answer of a large problem does not
fit."""

MAX_FAMILIES = 8
"""The number of families in which better plans are looked for."""

STOP_GAP, STOP_GAP_LARGE = 0.03, 0.06
"""No other plans are simulated once a simulated step is within this part of the solver's bound. The second value is for
problems with more than `MAX_CANDIDATES_MODEST` candidates, of which only a few layers are simulated. With at most
`MAX_CANDIDATES_EXACT` candidates all plans in question are simulated."""

MEMORY_FRACTIONS = (0.0, 0.125, 0.25, 0.375, 0.5)
"""The limits that are tried where no plan fits: parts of the way from the smallest memory that the solver estimates to
what the simulator measures for that plan."""

MAX_NEED_RATIO = 1.25
"""Micro-batch counts whose estimated need exceeds the smallest need that was found by this ratio are not tried."""

Simulate = Callable[[Decision, int], Evaluation]
"""From what is decided of each op and join to what the generated step takes, scheduled under a memory limit."""


@dataclass(frozen=True)
class PlanSelector:
    """Chooses one plan of a step.

    Parameters
    ----------
    simulate : callable
    solver : CachedSolver
    """

    simulate: Simulate
    solver: CachedSolver
    _evaluated: dict[tuple[int, ...], dict[int, Evaluation]] = field(default_factory=dict)
    """Evaluations by choice (longer for a problem with recompute modes) and memory limit."""

    def choose(
        self, costed: Costed, smaller: Callable[[], Costed] | None = None, ceiling: float = math.inf
    ) -> Chosen | Lacking | None:
        """The fastest choice whose simulated step fits.

        1. If the fastest choice without a limit fits when simulated, it is the answer.
        2. Else the solver is asked under the limit, for `smaller` with all ways to save memory. The solver estimates
           memory, mostly a little high; the simulator follows every value of the generated step. As long as an answer
           needs more than estimated, the solver is asked again under a smaller limit. Its first answer stays the bound.
        3. Alternatives that may be faster when less communication is hidden are simulated, and the fastest is taken.
        4. If nothing fits, the choice with the smallest memory is tried.

        Parameters
        ----------
        costed : Costed
            The problem, with the seconds of communication both overlapped and not.
        smaller : callable, optional
            Makes the problem with recomputation.
        ceiling : float
            Seconds. None is returned if the solver proves that nothing that fits is faster; not for small problems.
        """
        limit, ceiling = costed.problem.memory_limit, math.inf if is_small(costed) else ceiling
        if self.solver.takes(limit, ceiling):
            return None
        free, fastest = self.solver.both(costed, UNLIMITED), self.solver.fastest(costed, ceiling)
        if fastest.bound >= ceiling:
            return None
        near = self._near(free, fastest, limit)
        too_large = [chosen for chosen in near if chosen.evaluation.peak_memory <= limit]  # by the estimate
        if near and (best := fastest_of(near)).evaluation.peak_memory <= limit:
            # What does not fit is simulated as slower than it would be with the memory that it needs
            fits_too = near[0].evaluation.peak_memory <= limit
            if fits_too or best.evaluation.step_time <= (1 + MAX_ROUGH_GAP) * fastest.bound:
                pressed = self._presses(free, best, near)
                return replace(best, pressed=pressed, answer=_least(too_large)).within(limit)
        given = costed if smaller is None else smaller()
        both = self.solver.both(given, limit)
        hint = self.solver.start(both.overlapping) or (fastest.choice if smaller is None else None)
        if (expected := self.solver.expected(given, limit)) is not None:
            hint = expected.choice
        found = self._under(both.overlapping, limit, hint, fastest.waits_for, ceiling=ceiling, known=expected)
        families = self._families(both.overlapping, fastest, limit) if not found else []
        fits = self._with_other_families(both, found, limit) if found else families
        known = fastest_of([*too_large, *fits]) if too_large or fits else None
        too_large += self._near_misses(free.overlapping, fastest, known, limit)
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
            pressed = found is None or bound > (1 + memory_bound_ratio(costed)) * fastest.bound
        held, answer = best.solution.held_to(bound), _least([*too_large, *fits])
        return replace(best, solution=held, pressed=pressed, answer=answer).within(limit)

    def _presses(self, free: Both, best: Chosen, near: Sequence[Chosen]) -> bool:
        """Whether a plan is slower by much than the fastest would be with all the memory that it asks for."""
        fastest = fastest_of(near).evaluation.step_time
        if size(free.given) <= MAX_CANDIDATES_MODEST:  # others take long to simulate again
            unhindered = self._simulated(free.overlapping, near[0].solution, UNLIMITED)
            fastest = min(fastest, unhindered.evaluation.step_time)
        return best.evaluation.step_time > (1 + memory_bound_ratio(free.given)) * fastest

    def _near(self, free: Both, fastest: Solution, limit: int) -> list[Chosen]:
        """The fastest choice of all and those of other families, simulated; some may not fit. None if it is far off."""
        if self.solver.is_far(free.overlapping, fastest, limit):
            return []
        fastest = self.solver.solve(free.overlapping, fastest.choice, fastest.waits_for)
        if size(free.given) <= MAX_CANDIDATES_MODEST:  # a plan that fits tells what the limit costs
            self._simulated(free.overlapping, fastest, UNLIMITED)
        return self._with_other_families(free, self._simulated(free.overlapping, fastest, limit), limit)

    def _near_misses(self, costed: Costed, fastest: Solution, best: Chosen | None, limit: int) -> list[Chosen]:
        """Faster choices of a small problem that fit when simulated, although the estimate exceeds the limit."""
        found: list[Chosen] = []
        ceiling = best.evaluation.step_time if best is not None else math.inf
        for choice in near_misses(costed.problem, limit, ceiling):
            solution = _unproven(costed, choice, fastest)
            if solution.objective >= ceiling:
                continue
            chosen = self._simulated(costed, solution, limit)
            if chosen.evaluation.peak_memory <= limit and chosen.evaluation.step_time < ceiling:
                found.append(chosen)
                ceiling = chosen.evaluation.step_time
        if found and best is None:  # the smallest ones were looked at
            found += self._near_misses(costed, fastest, found[-1], limit)
        return found

    def _with_other_families(self, both: Both, best: Chosen, limit: int) -> list[Chosen]:
        """The best choice and those of other families, simulated, until one is near the bound; those that fit."""
        under_limit = both.given.problem.memory_limit < UNLIMITED
        close = STOP_GAP if size(both.given) <= MAX_CANDIDATES_MODEST else STOP_GAP_LARGE
        found: list[Chosen] = []
        for others in self._in_question(both, best, limit):
            found += others
            fits = [chosen for chosen in found if chosen.evaluation.peak_memory <= limit]
            near = bool(fits) and fastest_of(fits).evaluation.step_time <= (1 + close) * best.solution.bound
            if near and not is_small(both.given):
                break
        if size(both.given) <= MAX_CANDIDATES_MODEST:
            seen = {chosen.solution.choice for chosen in found}
            simulated = fastest_of(fits).evaluation.step_time if fits else math.inf
            others = self._alike(both.overlapping, best.solution, limit, simulated)
            found += [chosen for chosen in others if chosen.solution.choice not in seen]
            fits = [chosen for chosen in found if chosen.evaluation.peak_memory <= limit]
        return fits if under_limit else found

    def _in_question(self, both: Both, best: Chosen, limit: int) -> Iterator[list[Chosen]]:
        """The alternatives that may be the fastest when simulated, the likeliest first."""
        yield [best]
        share = both.hidden_in(best)
        if share < 1.0:
            yield from self._where_hides(share, both, best, limit)
        yield self._other_families(both.overlapping, best, limit, MAX_FAMILIES)
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
            other = self._simulated(asked, self.solver.solve(asked, hint, waits_for, rough=True), limit)
        if other is not None:
            yield [other.in_terms_of(both.overlapping, best)]
            yield [each.in_terms_of(both.overlapping, best) for each in self._other_families(asked, other, limit, 1)]

    def _other_families(self, costed: Costed, best: Chosen, limit: int, most: int) -> list[Chosen]:
        """The best choices of other families, simulated."""
        found = other_families(costed, best.solution, self._close, most)
        return [self._simulated(costed, solution, limit) for solution in found]

    def _alike(self, costed: Costed, best: Solution, limit: int, simulated: float = math.inf) -> list[Chosen]:
        """Plans that are spread alike everywhere, simulated; of tensor parallel ones what may be as fast as one is."""
        found = alike(costed, best, self._close, simulated)
        return [self._simulated(costed, solution, limit) for solution in found]

    def _families(self, costed: Costed, fastest: Solution, limit: int) -> list[Chosen]:
        """Plans that are alike everywhere and fit when simulated, however long they take; none of large problems."""
        if size(costed) > MAX_CANDIDATES_MODEST:
            return []
        found = self._alike(costed, replace(fastest, objective=math.inf), limit)
        return [chosen.within(limit) for chosen in found if chosen.evaluation.peak_memory <= limit]

    def _close(self, costed: Costed, best: Solution, ceiling: float) -> Solution:
        """A choice that is nearly the best one, if that takes less than `ceiling` seconds."""
        return self.solver.solve(costed, waits_for=best.waits_for, ceiling=ceiling, rough=True)

    def _smallest(self, costed: Costed, free: Both, fastest: Solution, limit: int) -> Chosen | Lacking:
        """What the program says is the smallest plan of all, where it finds none that fits."""
        choice = smallest(costed.problem, self.solver.time_limit)
        if choice is None:
            raise InfeasibleError(
                f"no plan that fits into the memory limit of {readable_bytes(limit)} a device was found within "
                f"{self.solver.time_limit:g} s: raise memory_limit, or time_limit to search for longer"
            )
        least = self._simulated(costed, _unproven(costed, choice, fastest), limit)
        if least.evaluation.peak_memory <= limit:
            return replace(least, pressed=True).within(limit)
        lacking = Lacking(costed, free, fastest, replace(least, peak_memory=least.evaluation.peak_memory))
        if is_small(costed) and least.evaluation.peak_memory <= MAX_NEED_RATIO * limit:
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
        for part in MEMORY_FRACTIONS if low < high else ():
            asked = limited(costed, low + int(part * (high - low)))
            chosen = self._simulated(costed, self.solver.solve(asked, least.solution.choice, rough=True), low)
            least = min(least, chosen, key=lambda each: each.peak_memory)
        return replace(lacking, least=least)

    def _lowered_under(self, limit: int, chosen: Chosen) -> Chosen:
        """A plan with what it takes as it will be lowered: under the user's limit, not one that it was found under."""
        evaluation = self.simulate(chosen.decision, limit)
        return replace(Chosen.of(chosen.costed, chosen.solution, evaluation), pressed=True).within(limit)

    def _below(self, lacking: Lacking) -> Chosen | None:
        """A plan that needs less than the smallest so far."""
        limit = lacking.least.peak_memory - 1
        rough = not is_small(lacking.costed)
        found = self._under(lacking.costed, limit, rough=rough) or self._fits(lacking.least, limit)
        near = [] if found else self._near(lacking.free, lacking.fastest, limit)
        fits = [each.within(limit) for each in near if each.evaluation.peak_memory <= limit]
        return found or next(iter(fits or self._families(limited(lacking.costed, limit), lacking.fastest, limit)), None)

    def _fits(self, chosen: Chosen, limit: int) -> Chosen | None:
        """A plan scheduled under a limit; None where it does not meet it."""
        again = self._simulated(chosen.costed, chosen.solution, limit)
        return again.within(limit) if again.evaluation.peak_memory <= limit else None

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
                if first is None and known is not None and known.gap <= MAX_GAP:
                    solution = known
                else:
                    solution = self.solver.solve(asked, hint, first.waits_for if first else waits_for, ceiling, rough)
            except InfeasibleError:
                return None
            if solution.bound >= ceiling:
                return None
            first, hint = first or solution, hint if first is None else first.choice
            # The bound of the tighter problem says nothing of the user's own.
            held = solution if solution is first else solution.held_to(first.bound)
            chosen = self._simulated(costed, held, limit)
            if chosen.evaluation.peak_memory <= limit:
                return chosen.within(limit)
            counted = costed.problem.memory(solution.choice)
            missed = chosen.evaluation.peak_memory - counted
            asked = limited(costed, min(counted - 1, limit - int(wider * missed)))
            wider += MARGIN_STEP if size(costed) > MAX_CANDIDATES_MODEST else 0.0

    def _simulated(self, costed: Costed, solution: Solution, limit: int) -> Chosen:
        known = self._evaluated.setdefault(solution.choice, {})
        # What does not meet a limit does not meet a smaller one, and what holds less than both meets either.
        same = [evaluation for other, evaluation in known.items() if limit <= other < evaluation.peak_memory
                or evaluation.peak_memory <= limit <= other]  # fmt: skip
        if not same:
            known[limit] = self.simulate(decision(costed, solution.choice), limit)
        return Chosen.of(costed, solution, same[0] if same else known[limit])


def _least(found: Sequence[Chosen]) -> float:
    """What the program's answer takes in it."""
    return min(chosen.solution.objective for chosen in found)


def _unproven(costed: Costed, choice: tuple[int, ...], fastest: Solution) -> Solution:
    """A choice without a bound of its own: the bound is that of the fastest choice."""
    return Solution(choice, costed.problem.objective(choice), fastest.bound, "feasible", 0.0)
