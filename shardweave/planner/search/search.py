"""The search for the best plan over the settings of the step that the user leaves open.

A setting is a number of micro-batches, of sub-batches, and whether gradients are reduced in buckets. `PlanSearch.best`
takes these steps:

1. the fastest plan over the numbers of micro-batches. With more micro-batches fewer activations are held at once, but
   each gathers parameters again, and its products are smaller. So one is best until memory makes the step slower. From
   there the number is doubled until two successive doublings bring no gain; or, where no plan fits, until a doubling
   saves no memory;
2. where some of its communication is exposed, the other settings, each with strategies of its own;
3. the plan is simulated with all layers, and with it a few that are nearly as fast by their estimates. Where none of
   these keeps to the memory limit, all steps are done again with a margin; and once more where memory is so short that
   the whole step takes longer than said;
4. of plans that are at most a little slower with all layers (`Options.simplicity`), the simplest is taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import inf

from shardweave.cost_model import Timeline
from shardweave.ir import Buckets, InfeasibleError, ParallelError, PlanError
from shardweave.planner.problem.space import Space
from shardweave.planner.search.evaluation import Decision, Evaluation, Known, PlanEvaluator, StepLowering
from shardweave.planner.search.plan import ModelKey, OtherPlan, Plan
from shardweave.planner.search.setting_planner import SettingPlan, SettingPlanner
from shardweave.planner.search.setting_search import ESTIMATE_ERROR
from shardweave.planner.solver.solver import relative_gap
from shardweave.report import Reporter

MIN_GAIN_RATIO = 0.002
"""Sub-batches and buckets are taken if they save this part of the step's time."""

MARGIN_RATIO = 1.1
"""What the next plan leaves free, by what the estimate of the last one was too small: that of the next one differs."""

EXCESS_MULTIPLES = (1, 2, 4)
"""Where a whole step exceeds the limit, its schedule is tried under limits lowered by these multiples of the excess,
before other plans are tried."""

FREE_RATIO = 0.02
"""A step that takes longer with all layers than said is short of memory if it leaves less than this part of the limit
free: the next plan has to leave so much free by its estimate, which lets the order of its whole step be faster."""

MAX_WHOLE = 3
"""So many plans are simulated with all layers at most, those first that take least with a few."""

MAX_NEED_RATIO = 1.25
"""Micro-batch counts whose estimated need exceeds the smallest that was found by this ratio are not tried."""

MAX_COUNTS_WITHOUT_GAIN = 2
"""The search over micro-batch counts ends after so many in a row that are slower than the best."""

FIGURES = ("step_time", "compute_time", "exposed_communication", "peak_memory")
"""The figures of a plan's whole step."""

MAX_CACHED_SIMULATIONS = 256
"""The number of decisions whose simulated figures are cached."""


@dataclass(frozen=True)
class Attempt:
    """What was found with a margin.

    Parameters
    ----------
    best : SettingPlan
        The fastest plan with all layers, or else the fastest by its estimate.
    plan : Plan, optional
        The same with the figures of its whole step; None where none fits.
    lacking : int
        Bytes that another plan has to leave free to fit, or to take what its estimate says; 0 where nothing is missing.
    bound : float
        Seconds that the program says no plan takes less than.
    """

    best: SettingPlan
    plan: Plan | None = None
    lacking: int = 0
    bound: float = 0.0


class PlanSearch:
    """Searches the plans of one step on one cluster.

    Parameters
    ----------
    lowering : StepLowering
        Of the step, on its cluster, with the options.
    evaluate : PlanEvaluator
        Simulates plans by a few of their layers.
    key : ModelKey
        Of the model that plans are made for.
    model : str
        Its name, for errors.
    progress : Reporter
    known : Known, optional
        What whole steps have taken so far; it grows.
    """

    def __init__(
        self,
        lowering: StepLowering,
        evaluate: PlanEvaluator,
        key: ModelKey,
        model: str,
        progress: Reporter,
        known: Known | None = None,
    ) -> None:
        self.lowering, self.evaluate, self.key, self.model, self.progress = lowering, evaluate, key, model, progress
        self.cluster, self.options, self.steps = lowering.cluster, lowering.options, lowering.steps
        self.limit = self.options.limit(self.cluster)
        self._known = Known(MAX_CACHED_SIMULATIONS) if known is None else known

    def best(self, weigh: bool = False, start: Plan | None = None) -> Plan:
        """The best plan whose whole step keeps to the memory limit when simulated.

        Plans are chosen by what few of their layers take. Where all of them take more, the next one is looked for
        under a limit that is smaller by what the estimate was off, until one keeps to the user's.

        Parameters
        ----------
        weigh : bool
            With what each choice for the whole step is worth, which takes as long again.
        start : Plan, optional
            A plan of the same model, to begin with.

        Raises
        ------
        InfeasibleError
            Nothing fits; with the smallest memory that would do.
        """
        begun, margin = time.monotonic(), 0
        found = self._with_margin(margin, start)
        while found.plan is None:
            margin += int(MARGIN_RATIO * found.lacking)
            if margin >= self.limit:  # the smallest plan was simulated whole when it was found
                raise PlanError(
                    f"the memory limit of {self.limit} bytes a device is met by none of the plans that were simulated "
                    "whole: raise memory_limit a little, or force a strategy"
                )
            found = self._with_margin(margin, start)
        best, plan = found.best, found.plan
        if found.lacking:
            try:
                other = self._with_margin(margin + found.lacking, start)
            except ParallelError:  # nothing leaves so much free
                other = found
            if other.plan is not None and other.plan.step_time < plan.step_time:
                best, plan = other.best, other.plan
        savings = best.planner.savings(best) if weigh else ()
        return replace(_held_to(plan, found.bound), savings=savings, planning_seconds=time.monotonic() - begun)

    def _with_margin(self, margin: int, start: Plan | None) -> Attempt:
        """Plan with so many bytes of the memory limit left free by estimates."""
        # 1. Micro-batches
        first = fastest(self.planner(count, start, margin) for count in self.space.micro_batches)
        # 2. Sub-batches and buckets
        ever_faster, bound = self._over_settings(first, margin)
        # 3. All layers
        found = self._fastest_whole(ever_faster)
        # 4. A simpler one
        return replace(self._simplest_whole(found, ever_faster), bound=bound)

    @cached_property
    def space(self) -> Space:
        """What may be chosen."""
        return Space(self.steps.whole, self.cluster, replace(self.options, memory_limit=self.limit))

    def planner(
        self,
        micro_batches: int,
        start: Plan | None = None,
        margin: int = 0,
        overlap: tuple[int, Buckets] | None = None,
    ) -> SettingPlanner:
        """The planner of a setting.

        Parameters
        ----------
        start : Plan, optional
            An earlier plan to begin with.
        margin : int
            Bytes of the memory limit that are left free.
        overlap : (int, bool or "small"), optional
            The number of sub-batches, and which collectives are merged; if left out, the first of the space.
        """
        options = self.space.setting(micro_batches, *(overlap or self.space.overlaps[0]))
        merges_small = self.space.merges_small and not options.buckets
        step = self.steps, self.cluster, options
        return SettingPlanner(*step, self.evaluate, self.progress, self.model, start, margin, merges_small)

    def _over_settings(self, first: SettingPlan, margin: int) -> tuple[list[SettingPlan], float]:
        """The first plan and those of other settings, each faster than the one before; and a bound of all, in seconds.

        Other settings are not priced where no communication is exposed: they could save next to nothing.
        """
        found, bound = [first], first.chosen.solution.bound
        for overlap in self.space.overlaps[1:]:
            best = found[-1]
            if not best.has_exposed_communication:
                break
            start = best.planner.plan(best, self.key)
            planner = self.planner(start.micro_batches, start, margin, overlap)
            enough = best.step_time * (1 - MIN_GAIN_RATIO)
            try:
                bound = min(bound, planner.bound(enough))
                other = planner.best_plan(enough, is_other=True)
            except ParallelError:  # what needs the whole batch, as a batch norm does, or strategies that take all of it
                continue
            if other is not None and other.step_time <= enough:
                bound = min(bound, other.chosen.solution.bound)
                found.append(other)
        return found, bound

    def _fastest_whole(self, ever_faster: Sequence[SettingPlan]) -> Attempt:
        """The fastest plan with all layers simulated. The next one is simulated as long as it may be faster."""
        all_found = (each for found in ever_faster for each in found.with_rivals)
        likely: list[SettingPlan] = []
        for each in sorted(all_found, key=lambda each: each.step_time):
            if not any(each.is_same_plan(other) for other in likely):  # a setting may find the best of another again
                likely.append(each)
        found, num_whole, missing = Attempt(likely[0]), 0, 0
        for each in likely:
            estimate = each.chosen.evaluation
            slowest = likely[0].step_time if found.plan is None else found.plan.step_time
            error = ESTIMATE_ERROR if estimate.is_estimate else 0.0
            if num_whole == MAX_WHOLE or (num_whole and estimate.step_time >= (1 + error) * slowest):
                break
            as_said = found.plan is not None and slowest <= (1 + ESTIMATE_ERROR) * likely[0].step_time
            if each.chosen.is_spare and as_said:
                continue
            if missing and estimate.peak_memory + missing > self.limit:  # as similar plans miss it by as much
                continue
            num_whole += 1
            self.progress("simulate", incumbent=slowest)
            plan, lacking = self._kept_to(each.planner.plan(each, self.key))
            missing = max(missing, lacking)
            if plan is not None and (found.plan is None or plan.step_time < found.plan.step_time):
                free = int(FREE_RATIO * self.limit)
                is_short = plan.peak_memory > self.limit - free
                is_slow = plan.step_time > (1 + ESTIMATE_ERROR) * estimate.step_time
                found = replace(found, best=each, plan=plan, lacking=free if is_slow and is_short else 0)
        return replace(found, lacking=missing) if found.plan is None else found

    def _simplest_whole(self, found: Attempt, ever_faster: Sequence[SettingPlan]) -> Attempt:
        """The simplest plan that is nearly as fast as the fastest with all layers, and what that costs or saves."""
        if found.plan is None or not self.options.simplicity:
            return found
        most, fastest = (1 + self.options.simplicity) * found.plan.step_time, found.best
        every = [simple for each in ever_faster for simple in each.simpler]
        simpler = [each for each in (*ever_faster, *every) if each.complexity < fastest.complexity]
        simpler.sort(key=lambda each: (each.complexity, each.step_time))
        other: OtherPlan | None = None
        for each in simpler:
            slowdown = each.step_time / fastest.step_time  # by their estimates
            if each.step_time <= (1 + ESTIMATE_ERROR) * most:
                plan, _ = self._kept_to(each.planner.plan(each, self.key))
                if plan is None:
                    continue
                if plan.step_time <= most:
                    beside = OtherPlan(len(fastest.strategies), found.plan.step_time / plan.step_time)
                    return replace(found, best=each, plan=replace(plan, other=beside))
                slowdown = plan.step_time / found.plan.step_time
            other = other or OtherPlan(len(each.strategies), slowdown)
        return replace(found, plan=replace(found.plan, other=other))

    def timeline(self, plan: Plan, sums: bool = True) -> Timeline:
        """The simulated schedule of a plan's whole step."""
        return self.lowering.timeline(self.lowering.lower(plan, not sums, draft=True), sums, plan)

    def _kept_to(self, plan: Plan) -> tuple[Plan | None, int]:
        """The plan as its whole step is simulated, if that keeps to the memory limit; and by how much it missed it.

        All of the limit is there for its order: a margin was for what its estimate left out. Where that misses the
        limit, its order is made for what its estimate was made for, and then for a little less.
        """
        limit = self.limit
        tried = replace(plan, schedule_limit=max(plan.schedule_limit, limit))
        whole = self._whole(tried)
        if whole.peak_memory > limit > plan.schedule_limit:
            tried, whole = plan, self._whole(plan)
        most = whole.peak_memory
        for times in EXCESS_MULTIPLES:
            if whole.peak_memory <= limit:
                break
            less = min(plan.schedule_limit, limit) - times * (most - limit)
            if less <= 0 or (times > 1 and whole.peak_memory >= most):
                break
            tried = replace(plan, schedule_limit=less)
            whole = self._whole(tried)
        if whole.peak_memory > limit:
            return None, max(most - limit, most - plan.peak_memory)
        figures = {name: getattr(whole, name) for name in FIGURES}
        return replace(tried, **figures), 0

    def _whole(self, plan: Plan) -> Evaluation:
        """Evaluate a plan's whole step; evaluations are cached."""
        strategies = {name: choice.strategy for name, choice in plan.choices.items()}
        asked = self.lowering.options_of(plan).key, Decision(strategies, self.lowering.joins_of(plan), {})
        return self._known.get(asked, lambda: Evaluation.of(self.timeline(plan)))


def _held_to(plan: Plan, bound: float) -> Plan:
    """The plan with a bound that holds for other settings, too."""
    gap = relative_gap(plan.program_time, bound)
    nearer = 1 - (1 - plan.proven_gap) * bound / plan.bound if plan.bound else 0.0  # of the program's own answer
    proven_gap = min(max(0.0, nearer), gap)
    return replace(plan, bound=bound, gap=gap, proven_gap=proven_gap, status="feasible" if gap else "optimal")


def fastest(planners: Iterable[SettingPlanner]) -> SettingPlan:
    """The fastest plan of some of `planners`, each for more micro-batches than the one before.

    Raises
    ------
    InfeasibleError
        Nothing fits; with the smallest memory that would do.
    """
    best: SettingPlan | None = None
    without_plan: list[SettingPlanner] = []
    num_slower = 0
    for planner in _likely_first(iter(planners)):
        try:
            found = planner.best_plan(inf if best is None else best.step_time)
            if found is None and best is None:
                needed = planner.least_bytes
                without_plan.append(planner)
                # Two micro-batches may need more than one, as sums of gradients do
                if len(without_plan) > 2 and needed >= without_plan[-2].least_bytes:
                    break
                continue
        except ParallelError:
            if best is None and not without_plan:
                raise
            break  # what needs the whole batch, say, does not go with more micro-batches
        if found is None or (best is not None and found.step_time >= best.step_time):
            num_slower += 1
            if num_slower == MAX_COUNTS_WITHOUT_GAIN:
                break
        else:
            best, num_slower = found, 0
            if not found.chosen.is_memory_bound:
                break
    return smallest_of(without_plan) if best is None else best


def smallest_of(planners: Sequence[SettingPlanner]) -> SettingPlan:
    """A plan of the first that has one after all, or the error that names the smallest memory.

    Those that need the least come first, and none that need much more.
    """
    error: InfeasibleError | None = None
    for planner in sorted(planners, key=lambda each: each.least_bytes):
        if error is not None and planner.least_bytes > MAX_NEED_RATIO * (error.needed_bytes or inf):
            break
        try:
            return planner.smallest_plan()
        except InfeasibleError as other:
            error = min(error or other, other, key=lambda each: each.needed_bytes or inf)
    assert error is not None  # there are planners
    raise error


def _likely_first(planners: Iterator[SettingPlanner]) -> Iterator[SettingPlanner]:
    """As they come; of a large step that memory makes slower, those first that the program says are the fastest.

    It says so in less time than simulating takes. Those that it has no plan for come only where it has none for any.
    """
    looked_at = [*islice(planners, 2)]
    if len(looked_at) > 1 and looked_at[0].is_memory_bound:
        expected = [_expected(looked_at[0], inf)]
        expected.append(_expected(looked_at[1], expected[0][0]))
        while _may_gain(expected) and (following := next(planners, None)) is not None:
            looked_at.append(following)
            expected.append(_expected(following, min(expected)[0]))
        order = sorted(range(len(looked_at)), key=lambda index: expected[index][0])
        if fitting := [looked_at[index] for index in order if expected[index][0] < inf]:
            looked_at, planners = fitting, iter(())
    yield from looked_at
    yield from planners


def _may_gain(expected: Sequence[tuple[float, float]]) -> bool:
    """Whether still more micro-batches may be faster; where nothing fits so far, whether they may need less.

    >>> _may_gain([(2.0, 9), (1.5, 9)]), _may_gain([(2.0, 9), (2.5, 9)]), _may_gain([(inf, 30), (inf, 20)])
    (True, False, True)
    """
    (before, needed_before), (last, needed) = expected[-2:]
    if before == last == inf:
        return len(expected) == 2 or needed < needed_before
    return last < before


def _expected(planner: SettingPlanner, ceiling: float) -> tuple[float, float]:
    """`SettingPlanner.expected`; where the step cannot be cut so, nothing fits."""
    try:
        return planner.expected(ceiling)
    except ParallelError:
        return inf, inf
