"""The search for the best plan of one setting of the step (its micro-batches and sub-batches).

Plans are proposed, the step of each is simulated, and the fastest that fits is kept (`Incumbent`). Proposals are

0. a plan of another setting that is the best so far, or the user's own to begin with,
1. the program's optimum with all the memory that it asks for,
2. where that does not fit, its optimum under the memory limit, with the choices that save memory,
3. neighbours of that: all equal ops take another candidate,
4. its optima among plans that are alike in all layers (`proposals`), and neighbours of the best of these,
5. a simpler plan than the best, with fewer kinds of layers and strategies.

The program's memory is an estimate. As long as an answer is simulated as more than the limit, or leaves a part of it
free, the program is asked again, under the limit less what it was off by. Only proposals that the program takes for at
most a little slower than the best plan are simulated.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from shardweave.cost_model import Options
from shardweave.ir import InfeasibleError, PlanError, readable_bytes
from shardweave.planner.problem.problem import TICKS_PER_SECOND, Kept, invert, restricted
from shardweave.planner.problem.variables import Costed
from shardweave.planner.search.evaluation import Decision, Evaluation, PlanEvaluator, complexity, decision
from shardweave.planner.search.layer_problem import Programs
from shardweave.planner.search.proposals import (
    data_parallel,
    gathered_once,
    neighbours,
    partly_sharded,
    recomputed_alike,
    recomputed_first,
    simpler,
    tensor_parallel,
)
from shardweave.planner.search.solver_cache import (
    MAX_CANDIDATES_MODEST,
    MAX_ROUGH_GAP,
    UNLIMITED,
    CachedSolver,
    is_small,
    max_over_limit,
    memory_bound_ratio,
    size,
)
from shardweave.planner.solver.elimination import KEPT, Tables
from shardweave.planner.solver.solver import Solution, relative_gap, smallest
from shardweave.report import Reporter
from shardweave.sharding import LayerRun

ESTIMATE_TOLERANCE = 0.05
"""The part by which the program may overestimate the time of a proposal."""

STOP_GAP = 0.01
"""Plans of problems with more than `MAX_CANDIDATES_MODEST` candidates are not compared with others once their simulated
step is within this part of the program's bound."""

MIN_GAIN_LARGE = 0.02
"""Another setting of a problem with more than `MAX_CANDIDATES_MODEST` candidates is searched if it saves this part of
the time in the program."""

MAX_SIMULATED_ALIKE = 3
"""The number of restrictions of each kind whose plans are simulated, the fastest in the program first."""

ESTIMATE_ERROR, MAX_RIVALS = 0.01, 2
"""The part by which a step of a few layers may be simulated as slower than one with all of them takes, beside another:
so many plans that are at most so much slower than the best are compared with it once more with all layers."""

SQUEEZED_RATIO = 1.1
"""Where a memory limit makes the order of a plan slower by this ratio, the plan is taken for one that does not fit."""

MAX_ANSWERS, MAX_ANSWERS_OTHER = 6, 2
"""How often the program is asked for a plan that fits and leaves nothing free; and in other settings than the first."""

MAX_SIMULATED_NEIGHBOURS, NEIGHBOUR_GAP = 4, 0.005
"""So many neighbours of a plan are simulated, where the best plan is farther than this part from the program's bound
and not much slower than the best of another setting."""

MARGIN_STEP = 0.25
"""The part of what an answer exceeds the limit by that is taken off what is asked for besides, with each that does."""

MEMORY_FRACTIONS = (0.0, 0.125, 0.25, 0.375, 0.5)
"""The limits that are tried where no plan fits: parts of the way from the smallest memory that the program estimates to
what the simulator measures for that plan."""


@dataclass(frozen=True)
class Evaluated:
    """An answer of the program with the simulator's evaluation of its step.

    Parameters
    ----------
    costed : Costed
        The program that it is an answer to.
    solution : Solution
    evaluation : Evaluation
    schedule_limit : int
        Bytes that its graphs are ordered for. It may hold less, and meet a limit that no order made for it meets.
    is_merged : bool
        Whether small collectives are merged, as the step takes no longer so.
    is_memory_bound : bool
        Whether the memory limit makes it slower by much.
    proven_gap : float
        How far the program's own answer is from its bound at most.
    rivals : tuple of Evaluated
        Other plans that may be faster with all layers, the one first that is the fastest with a few.
    is_spare : bool
        Whether it is of interest only if the fastest one takes longer with all layers than said.
    simpler : tuple of Evaluated
        Simpler plans: the simplest that is nearly as fast, if there is one, and the simplest of all.
    """

    costed: Costed
    solution: Solution
    evaluation: Evaluation
    schedule_limit: int
    is_merged: bool = False
    is_memory_bound: bool = False
    proven_gap: float = 0.0
    rivals: tuple[Evaluated, ...] = ()
    is_spare: bool = False
    simpler: tuple[Evaluated, ...] = ()

    @property
    def decision(self) -> Decision:
        """What it says of each op, join and layer."""
        return decision(self.costed, self.solution.choice)

    @property
    def counted_bytes(self) -> int:
        """The program's estimate of its memory."""
        return self.costed.problem.memory(self.solution.choice)


@dataclass
class Incumbent:
    """The fastest plan so far whose simulated step fits into `limit` bytes, and the program's bound, in seconds."""

    limit: int
    bound: float
    slowest: float = math.inf
    """Seconds from which on no plan is of interest."""
    over_limit: float = 1.0
    """By what ratio the program may count a proposal over the limit: what it counts too much of fits all the same."""
    best: Evaluated | None = None
    least_objective: float = math.inf
    """What the program's best answer takes in it, of those that fit when simulated."""
    fitting: list[Evaluated] = field(default_factory=list)

    def offer(self, chosen: Evaluated) -> None:
        """Keep the fastest plan that fits."""
        if chosen.evaluation.peak_memory > self.limit:
            return
        self.least_objective = min(self.least_objective, chosen.solution.objective)
        self.fitting.append(chosen)
        if chosen.evaluation.step_time < self.step_time:
            self.best = chosen

    @property
    def step_time(self) -> float:
        """Seconds of the best plan's simulated step; infinite where there is none."""
        return math.inf if self.best is None else self.best.evaluation.step_time

    def simplest(self, simplicity: float, runs: Sequence[LayerRun]) -> tuple[Evaluated, ...]:
        """The simplest plan that is at most by a part of `simplicity` slower, and the simplest of all.

        None that is as complex as the best, of a step with these runs of equal layers.
        """
        if self.best is None:
            return ()
        of = {id(each): complexity(each.decision, runs) for each in self.fitting}
        simpler = [each for each in self.fitting if of[id(each)] < of[id(self.best)]]
        simpler.sort(key=lambda each: (of[id(each)], each.evaluation.step_time))
        near = [each for each in simpler if each.evaluation.step_time <= (1 + simplicity) * self.step_time]
        return (*near[:1], *(each for each in simpler[:1] if each not in near[:1]))

    def rivals(self) -> tuple[Evaluated, ...]:
        """The plans that may be faster than the best with all layers: they and the best were simulated with a few."""
        found, most = list[Evaluated](), (1 + ESTIMATE_ERROR) * self.step_time
        known = [] if self.best is None else [self.best.decision]
        for each in sorted(self.fitting, key=lambda each: each.evaluation.step_time):
            if each.evaluation.step_time > most or len(found) == MAX_RIVALS:
                break
            if each.evaluation.is_estimate and each.decision not in known:
                known.append(each.decision)
                found.append(each)
        return tuple(found)

    @property
    def ceiling(self) -> float:
        """What the program may say of a proposal that is simulated, in seconds."""
        return (1 + ESTIMATE_TOLERANCE) * min(self.step_time, self.slowest)


class SettingSearch:
    """Searches the plans of one setting.

    Parameters
    ----------
    programs : Programs
        Of the step, under the limit.
    solver : CachedSolver
    evaluator : PlanEvaluator
    options : Options
        With the memory limit.
    limit : int
        The same in bytes.
    progress : Reporter
    merges_small : bool
        Whether small collectives may be merged.
    """

    def __init__(
        self,
        programs: Programs,
        solver: CachedSolver,
        evaluator: PlanEvaluator,
        options: Options,
        limit: int,
        progress: Reporter,
        merges_small: bool = False,
    ) -> None:
        self.programs, self.solver, self.evaluator = programs, solver, evaluator
        self.options, self.limit, self.progress = options, limit, progress
        self.plain, self.merges_small = programs.plain, merges_small
        self._evaluated: dict[tuple[int, ...], dict[int, tuple[Evaluation, bool]]] = {}
        """Evaluations by choice (longer for a program with recompute modes) and memory limit."""
        self._counted_ratio = 1.0
        """By what ratio the program counted more memory than was simulated, at most, in the last search."""
        self._fastest, self._smallest = math.inf, math.inf
        """Of all that was simulated: seconds of what fits, and bytes."""

    def best(self, ceiling: float = math.inf, is_other: bool = False) -> Evaluated | None:
        """The fastest plan found; None where none is known to fit, or the program says none takes less than `ceiling`.

        Parameters
        ----------
        ceiling : float
            Seconds.
        is_other : bool
            The best plan of another setting is what it starts from: plans alike in all layers are not proposed.
        """
        most = (1 + ESTIMATE_TOLERANCE) * ceiling if is_small(self.plain) else ceiling
        if self.solver.takes(self.limit, most) or self.solver.fastest(self.plain, most).bound >= most:
            return None
        if size(self.plain) > MAX_CANDIDATES_MODEST and is_other:
            most = (1 - MIN_GAIN_LARGE) * ceiling
            if self.solver.expects(self.plain, self.programs.with_recomputation, most)[0] >= most:
                return None
        for program in self.programs:
            found = self._best(program, self.limit, ceiling, is_other)
            if found is not None or ceiling < math.inf:
                return found
        return None

    def _best(self, program: Costed, limit: int, ceiling: float = math.inf, is_other: bool = False) -> Evaluated | None:
        self._counted_ratio = 1.0  # what is proposed must not depend on other searches
        fastest = self.solver.fastest(self.plain)
        incumbent, costed = Incumbent(limit, fastest.bound, ceiling, max_over_limit(self.plain)), self.plain
        # 0. What another search found
        if (start := self.solver.start_choice(program)) is not None:
            self._consider(program, known_choice(program, start), incumbent)
        # 1. With all the memory that it asks for
        free, fits, looked_around = None, False, False
        if self.plain.problem.memory(fastest.choice) <= incumbent.over_limit * limit:
            unlimited = self.plain.limited(UNLIMITED)
            free = self._consider(unlimited, self.solver.solve(unlimited, fastest.choice), incumbent)
            fits = self._excess(free, limit) <= 0
            if not fits and free.counted_bytes <= limit:  # others like it may
                looked_around = self._neighbours(free, incumbent)
        # 2. Under the limit
        if not fits:
            costed, known = program, self.solver.expected(program, limit)
            hint = known.choice if known is not None else self.solver.start_choice(program)
            if hint is None and program is self.plain:
                hint = fastest.choice
            most = MAX_ANSWERS_OTHER if is_other else MAX_ANSWERS
            bound = self._under_limit(costed, incumbent, hint, rough=_is_inexact(free), most=most)
            incumbent.bound = bound if incumbent.best is not None else fastest.bound
        optimum = incumbent.best
        # 3. Neighbours of that, and of a modest program's best answer if the simulator says that another one is faster,
        # 4. plans that are alike in all layers, and neighbours of the best of these
        if not (optimum is None or looked_around):
            self._neighbours(optimum, incumbent)
            answer = min(incumbent.fitting, key=lambda each: each.solution.objective)
            if answer is not optimum and size(costed) <= MAX_CANDIDATES_MODEST:
                self._neighbours(answer, incumbent)
        if not is_other and (optimum is not None or size(costed) <= MAX_CANDIDATES_MODEST):
            self._alike(costed, incumbent)
        if not is_other and incumbent.best is not None and incumbent.best is not optimum:
            self._neighbours(incumbent.best, incumbent)
        if incumbent.best is None:
            return None
        # 5. A simpler one
        self._simpler(incumbent.best, incumbent)
        if optimum is None:
            self._propose_over_limit(incumbent)
        best = self._with_others(costed, incumbent)
        # Memory decides whether the step is cut into more micro-batches, which is decided in the first setting
        return best if is_other else replace(best, is_memory_bound=self._is_slowed(best, optimum, free, fastest))

    def _with_others(self, costed: Costed, incumbent: Incumbent) -> Evaluated:
        """The best plan, held to the bound, with others that may be faster with all layers, or are simpler."""
        assert incumbent.best is not None
        bound = min(incumbent.bound, incumbent.least_objective)
        gap = relative_gap(incumbent.least_objective, bound)
        rivals = incumbent.rivals()
        simplest = incumbent.simplest(self.options.simplicity, self.evaluator.steps.runs(self.options))
        best, *others = (
            replace(each, solution=each.solution.held_to(bound), proven_gap=gap)
            for each in (incumbent.best, *rivals, *simplest)
        )
        is_spare, count = self._is_close(costed, incumbent), len(rivals)
        return replace(
            best,
            rivals=tuple(replace(each, is_spare=is_spare) for each in others[:count]),
            simpler=tuple(others[count:]),
        )

    def _is_slowed(self, best: Evaluated, optimum: Evaluated | None, free: Evaluated | None, fastest: Solution) -> bool:
        """Whether memory makes the best plan slower by much."""
        ratio = 1 + memory_bound_ratio(self.plain)
        if free is not None:  # what is simulated is compared with what is simulated
            unhindered = free.evaluation.step_time
            if size(self.plain) <= MAX_CANDIDATES_MODEST:  # others take long to simulate again
                unlimited = self._simulated(free.costed, free.solution, UNLIMITED)
                unhindered = min(unhindered, unlimited.evaluation.step_time)
            return best.evaluation.step_time > ratio * unhindered
        # Of a plan that the program does not find its bound tells nothing
        return optimum is None or best.solution.bound > ratio * fastest.bound

    def _under_limit(
        self,
        costed: Costed,
        incumbent: Incumbent,
        hint: Sequence[int] | None = None,
        kept: Kept | None = None,
        rough: bool = False,
        most: int = MAX_ANSWERS,
    ) -> float:
        """Propose so many of the program's answers under the limit at most, corrected by their simulated memory.

        Of the candidates in `kept`, if that is given. The first answer is solved roughly if `rough`, others always.

        Returns
        -------
        float
            The program's bound, in seconds, of all that were looked at.
        """
        limit = incumbent.limit
        asked = limit if kept is None else self._asked_at_most(incumbent)
        fits, margin, bound, counted = False, 1.0, math.inf, 0 if kept is None else int(incumbent.over_limit * limit)
        for _ in range(most):
            given = costed.limited(asked) if kept is None else _left(costed, kept, asked)
            try:
                solution = self.solver.solve(given, hint, incumbent.ceiling, rough)
            except InfeasibleError as error:
                if error.needed_bytes is None or error.needed_bytes >= counted:
                    return bound
                asked, counted = error.needed_bytes, error.needed_bytes
                continue
            except PlanError:
                if incumbent.ceiling < math.inf:
                    return bound  # none was found that is fast enough
                raise
            bound = min(bound, solution.bound) if asked >= limit else bound
            if solution.objective >= incumbent.ceiling:
                return bound
            if kept is None:
                hint = solution.choice
            else:
                solution = replace(solution, choice=invert(solution.choice, kept))
            is_known, before = solution.choice in self._evaluated, incumbent.step_time
            chosen = self._consider(costed, solution, incumbent)
            counted, too_much = chosen.counted_bytes, self._excess(chosen, limit)
            if fits or (too_much <= 0 and counted - too_much <= asked):
                return bound
            if too_much > 0 and ((kept is not None and is_known) or chosen.evaluation.step_time >= before):
                return bound  # with less memory it is not faster
            if too_much <= 0:  # what is left free may hold a faster one
                fits, asked = True, counted - too_much
            else:
                asked = counted - int(margin * too_much)
                margin += MARGIN_STEP
            rough = True
        return bound

    def _asked_at_most(self, incumbent: Incumbent) -> int:
        """The bytes that the program may count for a plan that fits, by what it has counted too much so far."""
        return int(min(self._counted_ratio, incumbent.over_limit) * incumbent.limit)

    def _excess(self, chosen: Evaluated, limit: int) -> int:
        """By how many bytes a plan misses the limit; by how many it would, where only a much slower order meets it."""
        evaluation, costed = chosen.evaluation, chosen.costed
        missed = evaluation.peak_memory - limit
        is_slow = evaluation.step_time > SQUEEZED_RATIO * chosen.solution.objective
        if missed > 0 or not is_slow or size(costed) > MAX_CANDIDATES_MODEST or 2 * evaluation.peak_memory < limit:
            return missed
        free = self._simulated(costed, chosen.solution, UNLIMITED).evaluation
        return free.peak_memory - limit if evaluation.step_time > SQUEEZED_RATIO * free.step_time else missed

    def _alike(self, costed: Costed, incumbent: Incumbent) -> None:
        """Propose plans that are alike in all layers, those first that the program says are fastest."""
        # The simplest, however close the best is
        self._propose(costed, data_parallel(costed), incumbent, MAX_SIMULATED_ALIKE)
        for kind in (recomputed_alike, gathered_once, partly_sharded, tensor_parallel):
            if self._is_close(costed, incumbent):
                return
            self._propose(costed, kind(costed), incumbent, MAX_SIMULATED_ALIKE)

    def _neighbours(self, best: Evaluated, incumbent: Incumbent) -> bool:
        """Propose plans in which all equal ops take another candidate than in a good one, the fastest first.

        Returns whether there are any.
        """
        costed = best.costed
        is_open = (1 + NEIGHBOUR_GAP) * incumbent.bound < incumbent.step_time < incumbent.ceiling
        if self._is_close(costed, incumbent) or not is_open:
            return False
        found = list[tuple[float, tuple[int, ...]]]()
        tables, most = Tables(costed.problem), self._asked_at_most(incumbent)
        for choice in neighbours(costed, best.solution.choice):
            seconds, size_bytes = tables.seconds_and_bytes(choice)
            if seconds < incumbent.ceiling and size_bytes <= most:
                found.append((seconds, choice))
        for seconds, choice in sorted(found)[:MAX_SIMULATED_NEIGHBOURS]:
            if seconds < incumbent.ceiling:
                self._consider(costed, known_choice(costed, choice), incumbent)
        return bool(found)

    def _simpler(self, best: Evaluated, incumbent: Incumbent) -> None:
        """Propose plans that are simpler than the best, which the program takes for nearly as fast."""
        limited = best.costed.limited(max(incumbent.limit, best.counted_bytes))
        if self.options.simplicity:
            for choice in simpler(limited.problem, self.solver.runs, best.solution.choice, self.options.simplicity):
                self._consider(best.costed, known_choice(best.costed, choice), incumbent)

    def _propose(self, costed: Costed, among: Iterable[Kept], incumbent: Incumbent, most: int) -> None:
        """Propose the program's optima of some restrictions: `most` of them, the fastest first.

        The restrictions come in the order of what they take at least, so that few are solved to the end.
        """
        found: list[tuple[float, int, Kept]] = []
        tables, limit = Tables(costed.problem), int(incumbent.over_limit * incumbent.limit)
        leasts = [(tables.least(kept), number, kept) for number, kept in enumerate(among)]
        left = [(int(tables.ticks(least)), number, kept) for least, number, kept in leasts
                if least[KEPT] <= limit - costed.problem.fixed_bytes]  # or so the solver would say
        for ticks, number, kept in sorted(left, key=lambda each: each[:2]):
            ceiling = min([incumbent.ceiling, *(seconds for seconds, _, _ in found[most - 1 : most])])
            if ticks / TICKS_PER_SECOND >= ceiling:
                break
            given = _left(costed, kept, limit)
            try:
                solution = self.solver.solve(given, None, ceiling, rough=True)
            except PlanError:
                continue
            if solution.objective < ceiling:
                insort(found, (solution.objective, number, kept), key=lambda each: each[:2])
        for objective, _, kept in found[:most]:
            if objective < incumbent.ceiling:
                self._under_limit(costed, incumbent, None, kept, rough=True)

    def _is_close(self, costed: Costed, incumbent: Incumbent) -> bool:
        """Whether the best plan of a large problem is so close to the bound that others are not looked at."""
        return size(costed) > MAX_CANDIDATES_MODEST and incumbent.step_time <= (1 + STOP_GAP) * incumbent.bound

    def _consider(self, costed: Costed, solution: Solution, incumbent: Incumbent) -> Evaluated:
        """Simulate an answer; it becomes the incumbent if it fits and is the fastest.

        One that does not fit is simulated with the same layers recomputed in another order, which may.
        """
        chosen = self._simulated(costed, solution, incumbent.limit)
        if chosen.evaluation.peak_memory > incumbent.limit:
            other = recomputed_first(costed.problem, solution.choice)
            if other != solution.choice:
                reordered = self._simulated(costed, replace(solution, choice=other), incumbent.limit)
                chosen = min(chosen, reordered, key=_peak)
        self._counted_ratio = max(self._counted_ratio, chosen.counted_bytes / max(1, chosen.evaluation.peak_memory))
        incumbent.offer(chosen)
        return chosen

    def _simulated(self, costed: Costed, solution: Solution, limit: int) -> Evaluated:
        """An answer with the evaluation of its step under a limit, or of one under another that tells as much."""
        known = self._evaluated.setdefault(solution.choice, {})
        # What does not meet a limit does not meet a smaller one, and what holds less than both meets either.
        for other, (evaluation, is_merged) in known.items():
            if limit <= other < evaluation.peak_memory or evaluation.peak_memory <= limit <= other:
                return Evaluated(costed, solution, evaluation, other, is_merged)
        self.progress("simulate", self._fastest, least_bytes=self._smallest)
        decided, options = decision(costed, solution.choice), replace(self.options, memory_limit=limit)
        evaluation, is_merged = self.evaluator(decided, options), False
        is_near = evaluation.step_time <= (1 + ESTIMATE_TOLERANCE) * self._fastest
        if self.merges_small and is_near and evaluation.peak_memory <= limit:
            merged = self.evaluator(decided, replace(options, buckets="small"))
            if merged.step_time <= evaluation.step_time and merged.peak_memory <= limit:
                evaluation, is_merged = merged, True
        known[limit] = evaluation, is_merged
        self._smallest = min(self._smallest, evaluation.peak_memory)
        if evaluation.peak_memory <= self.limit:
            self._fastest = min(self._fastest, evaluation.step_time)
        self.progress("simulate", self._fastest, least_bytes=self._smallest)
        return Evaluated(costed, solution, evaluation, limit, is_merged)

    def least(self) -> Evaluated:
        """What the program says is the smallest plan, simulated.

        Raises
        ------
        InfeasibleError
            None was found in the time there is.
        """
        return min((self._least(program) for program in self.programs), key=_peak)

    def smallest(self) -> Evaluated:
        """The plan with the smallest memory that is found, or one that fits after all."""
        found = [self._less(self._nearly_smallest(self._least(program)), program) for program in self.programs]
        least = min(found, key=_peak)
        if least.evaluation.peak_memory > self.limit:
            return least
        # It may be faster in an order for the user's limit than in one for less
        given = self._simulated(least.costed, least.solution, self.limit)
        incumbent = Incumbent(self.limit, 0.0, over_limit=max_over_limit(self.plain))
        incumbent.offer(given if given.evaluation.peak_memory <= self.limit else least)
        # Others fit, too, that the program counts as more than the limit
        best = self._propose_over_limit(incumbent)
        self._neighbours(best, incumbent)
        self._alike(best.costed, incumbent)
        self._simpler(incumbent.best or best, incumbent)
        return replace(self._with_others(best.costed, incumbent), is_memory_bound=True)

    def _propose_over_limit(self, incumbent: Incumbent) -> Evaluated:
        """Propose the fastest plan of those that may fit though the program counts them as more than the limit.

        By what it has counted too much so far, for the best plan too. The bound is that of all of these.
        """
        best = incumbent.best
        assert best is not None  # something fits
        asked = best.costed.limited(max(best.counted_bytes, self._asked_at_most(incumbent)))
        solution = self.solver.solve(asked, best.solution.choice, rough=True)
        incumbent.bound = solution.bound
        self._consider(asked, solution, incumbent)
        return incumbent.best or best

    def _least(self, program: Costed) -> Evaluated:
        choice = smallest(program.problem, self.solver.time_limit)
        if choice is None:
            raise InfeasibleError(
                f"no plan that fits into the memory limit of {readable_bytes(self.limit)} a device was found within "
                f"{self.solver.time_limit:g} s: raise memory_limit, or time_limit to search for longer"
            )
        objective = program.problem.objective(choice)
        bound = min(objective, self.solver.fastest(self.plain).bound)
        solution = Solution(choice, objective, bound, "feasible", 0.0)
        return self._simulated(program, solution, 1)  # in the order that holds least

    def _nearly_smallest(self, least: Evaluated) -> Evaluated:
        """What holds least of the fastest choices that count little more than the smallest, where that is less.

        The smallest of all in the program computes and gathers whatever saves a byte, and is simulated as more.
        """
        costed, low, high = least.costed, least.counted_bytes, least.evaluation.peak_memory
        for part in MEMORY_FRACTIONS if low < high else ():
            asked = costed.limited(low + int(part * (high - low)))
            solution = self.solver.solve(asked, least.solution.choice, rough=True)
            least = min(least, self._simulated(costed, solution, low), key=_peak)
        return least

    def _less(self, least: Evaluated, program: Costed) -> Evaluated:
        """The smallest plan that is found, or the first that fits: asked from above, the program comes by others.

        What is counted as more than the smallest may be simulated as less, and the smallest in another order, too.
        """
        while least.evaluation.peak_memory > self.limit:
            limit = least.evaluation.peak_memory - 1
            # In the end all that would be proposed under the limit is: none of it may fit into less than what is named
            below = self._below(least, program, limit) or self._best(program, limit)
            if below is None:
                break
            least = below
        return least

    def _below(self, least: Evaluated, program: Costed, limit: int) -> Evaluated | None:
        """A plan that needs less than the smallest so far."""
        incumbent = Incumbent(limit, 0.0)
        self._under_limit(program, incumbent, rough=not is_small(program))
        if incumbent.best is None:
            self._consider(least.costed, least.solution, incumbent)  # in another order
        if incumbent.best is None and size(program) <= MAX_CANDIDATES_MODEST:
            kinds = (data_parallel(program), partly_sharded(program), tensor_parallel(program))
            self._propose(program, chain(*kinds), incumbent, MAX_SIMULATED_ALIKE)
        return incumbent.best


def _left(costed: Costed, kept: Kept, limit: int) -> Costed:
    """With the candidates that a restriction leaves, under another memory limit."""
    given = costed.limited(limit)
    return replace(given, problem=restricted(given.problem, kept))


def _peak(chosen: Evaluated) -> int:
    return chosen.evaluation.peak_memory


def known_choice(costed: Costed, choice: Sequence[int]) -> Solution:
    """A choice that the solver was not asked for."""
    return Solution(tuple(choice), costed.problem.objective(choice), 0.0, "feasible", 0.0)


def _is_inexact(free: Evaluated | None) -> bool:
    """Whether the simulator differs from the program by more than what a rough answer may be slower than the best."""
    if free is None or is_small(free.costed):
        return False
    return abs(free.evaluation.step_time / free.solution.objective - 1) > MAX_ROUGH_GAP
