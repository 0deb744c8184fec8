"""The search for the best plan over the settings of the step that the user leaves open.

Plans are proposed under a memory limit, and the one that is returned is simulated with all layers. With more
micro-batches fewer activations are held at once, but each micro-batch gathers parameters again, and its products are
smaller. So one micro-batch is best until memory makes the step slower. From there the number is doubled until two
successive doublings bring no gain; or, where no plan fits, until a doubling saves no memory.

Where some communication of the best plan is exposed, strategies are chosen for the other settings, too: for sub-batches
and for gradients that are reduced in buckets. Each is searched for plans that are faster than the best so far.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf

from shardweave.cost_model import Timeline
from shardweave.ir import InfeasibleError, ParallelError, PlanError
from shardweave.passes import Annotated
from shardweave.planner.search.evaluation import Decision, Evaluation, Known, PlanEvaluator, StepLowering
from shardweave.planner.search.plan import ModelKey, Plan
from shardweave.planner.search.planning import Made, Planning
from shardweave.planner.solver.solver import relative_gap
from shardweave.report import Reporter

MAX_NEED_RATIO = 1.25
"""Settings whose estimated need exceeds the smallest need that was found by this ratio are not tried."""

MAX_CUTS_WITHOUT_GAIN = 2
"""The search over micro-batch counts ends after so many in a row that are slower than the best."""


def micro_batch_counts(annotated: Annotated) -> Iterator[int]:
    """The powers of two that divide the batch; one where there is none, or no loss to begin each backward from."""
    count, several = 1, not annotated.captured.whole and annotated.loss_inside and len(annotated.tangents) == 1
    while annotated.batch % count == 0 and (count == 1 or (several and annotated.batch)):
        yield count
        count *= 2


def fastest(plannings: Iterable[Planning]) -> Made:
    """The fastest that some of `plannings`, each of a finer cut than the one before, make.

    Raises
    ------
    InfeasibleError
        Nothing fits; with the smallest memory that would do.
    """
    best: Made | None = None
    lacking: list[Planning] = []
    slower = 0
    for planning in _likely_first(iter(plannings)):
        try:
            made = planning.make(inf if best is None else best.step_time)
            if made is None and best is None:
                needed = planning.least_bytes
                lacking.append(planning)
                # Two parts may need more than one, as sums of gradients do
                if len(lacking) > 2 and needed >= lacking[-2].least_bytes:
                    break
                continue
        except ParallelError:
            if best is None and not lacking:
                raise
            break  # what needs the whole batch, say, does not go with a finer cut
        if made is None or (best is not None and made.step_time >= best.step_time):
            slower += 1
            if slower == MAX_CUTS_WITHOUT_GAIN:
                break
        else:
            best, slower = made, 0
            if not made.chosen.is_memory_bound:
                break
    return smallest_of(lacking) if best is None else best


def smallest_of(lacking: Sequence[Planning]) -> Made:
    """A plan of the first that has one after all, or the error that names the smallest memory.

    Those that need the least come first, and none that need much more.
    """
    error: InfeasibleError | None = None
    for planning in sorted(lacking, key=lambda each: each.least_bytes):
        if error is not None and planning.least_bytes > MAX_NEED_RATIO * (error.needed_bytes or inf):
            break
        try:
            return planning.make_smallest()
        except InfeasibleError as other:
            error = min(error or other, other, key=lambda each: each.needed_bytes or inf)
    assert error is not None  # there is something lacking
    raise error


def _likely_first(plannings: Iterator[Planning]) -> Iterator[Planning]:
    """As they come; of a large step that memory makes slower, those first that the program says are the fastest.

    It says so in less time than simulating takes. Those that it has no plan for come only where it has none for any.
    """
    looked_at = [*islice(plannings, 2)]
    if len(looked_at) > 1 and looked_at[0].is_memory_bound:
        expected = [_expected(looked_at[0], inf)]
        expected.append(_expected(looked_at[1], expected[0][0]))
        while _goes_on(expected) and (finer := next(plannings, None)) is not None:
            looked_at.append(finer)
            expected.append(_expected(finer, min(expected)[0]))
        order = sorted(range(len(looked_at)), key=lambda index: expected[index][0])
        if fitting := [looked_at[index] for index in order if expected[index][0] < inf]:
            looked_at, plannings = fitting, iter(())
    yield from looked_at
    yield from plannings


def _goes_on(expected: Sequence[tuple[float, float]]) -> bool:
    """Whether a still finer cut may be faster; where nothing fits so far, whether it may need less.

    >>> _goes_on([(2.0, 9), (1.5, 9)]), _goes_on([(2.0, 9), (2.5, 9)]), _goes_on([(inf, 30), (inf, 20)])
    (True, False, True)
    """
    (coarser, before), (finest, needed) = expected[-2:]
    if coarser == finest == inf:
        return len(expected) == 2 or needed < before
    return finest < coarser


def _expected(planning: Planning, ceiling: float) -> tuple[float, float]:
    """`Planning.expected`; where the step cannot be cut so, nothing fits."""
    try:
        return planning.expected(ceiling)
    except ParallelError:
        return inf, inf


MIN_GAIN_RATIO = 0.002
"""Sub-batches and buckets are taken if they save this part of the step's time."""

SUB_BATCHES = 2
"""One computes while the other communicates (Oases, arXiv 2305.16121, section 3.1); more make smaller kernels."""

MARGIN_RATIO = 1.1
"""What the next plan leaves free, by what the estimate of the last one was too small: that of the next one differs."""

EXCESS_MULTIPLES = (1, 2, 4)
"""Where a whole step exceeds the limit, its schedule is tried under limits lowered by these multiples of the excess,
before other plans are tried."""

FIGURES = ("step_time", "compute_time", "exposed_communication", "peak_memory")
"""The figures of a plan's whole step."""

MAX_CACHED_SIMULATIONS = 256
"""The number of decisions whose simulated figures are cached."""


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
        self._known: Known = deque(maxlen=MAX_CACHED_SIMULATIONS) if known is None else known

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
        given, limit = self.options.micro_batches, self.options.limit(self.cluster)
        while True:
            counts = micro_batch_counts(self.steps.whole) if given is None else [given]
            faster_and_faster, bound = self._over_settings(
                fastest(self.planning(count, start, margin) for count in counts), margin
            )
            made, found, off = self._fastest_whole(limit, faster_and_faster)
            if found is not None:
                savings = made.planning.savings(made) if weigh else ()
                found = _held_to(found, bound)
                return replace(found, savings=savings, planning_seconds=time.monotonic() - begun)
            margin += int(MARGIN_RATIO * off)
            if margin >= limit:  # the smallest plan was simulated whole when it was found
                raise PlanError(
                    f"the memory limit of {limit} bytes a device is met by none of the plans that were simulated "
                    "whole: raise memory_limit a little, or force a strategy"
                )

    def planning(
        self,
        micro_batches: int,
        start: Plan | None = None,
        margin: int = 0,
        sub_batches: int | None = None,
        buckets: bool | None = None,
    ) -> Planning:
        """Of a step of so many micro-batches and sub-batches, with buckets or without (None: as the options say).

        From an earlier plan, with so much of the memory limit left free.
        """
        options = replace(
            self.options,
            memory_limit=self.options.limit(self.cluster),
            micro_batches=micro_batches,
            sub_batches=self.options.sub_batches if sub_batches is None else sub_batches,
            buckets=self.options.buckets if buckets is None else buckets,
        )
        return Planning(self.steps, self.cluster, options, self.evaluate, self.progress, self.model, start, margin)

    def _other_settings(self) -> Iterator[tuple[int, bool]]:
        """Sub-batches and buckets where the options leave them open, but one sub-batch without buckets."""
        options = self.options
        has_buckets = options.buckets is None and not options.ablation.flat_parameter
        for sub_batches in (1, SUB_BATCHES) if options.sub_batches is None else (options.sub_batches,):
            for buckets in (False, True) if has_buckets else (options.overlap.buckets,):
                if sub_batches > options.overlap.sub_batches or buckets > options.overlap.buckets:
                    yield sub_batches, buckets

    def _over_settings(self, made: Made, margin: int) -> tuple[list[Made], float]:
        """The best plan and those of other settings, each faster than the one before; and a bound of all, in seconds.

        Other settings are not priced where no communication is exposed: they could save next to nothing.
        """
        found, bound = [made], made.chosen.solution.bound
        for sub_batches, buckets in self._other_settings():
            best = found[-1]
            if not best.has_exposed_communication:
                break
            start = best.planning.plan(best, self.key)
            planning = self.planning(start.micro_batches, start, margin, sub_batches, buckets)
            try:
                other_bound = planning.bound
                faster = self._faster(best, planning)
            except ParallelError:  # what needs the whole batch, as a batch norm does, or strategies that take all of it
                continue
            bound = min(bound, other_bound, *(made.chosen.solution.bound for made in faster))
            found += faster
        return found, bound

    def _faster(self, made: Made, planning: Planning) -> list[Made]:
        """The best plan of another setting, if it is faster."""
        enough = made.step_time * (1 - MIN_GAIN_RATIO)
        other = planning.make(enough, is_other=True)
        return [] if other is None or other.step_time > enough else [other]

    def _fastest_whole(self, limit: int, faster_and_faster: Sequence[Made]) -> tuple[Made, Plan | None, int]:
        """What is the fastest with all layers simulated, with its plan; None where the last misses the memory limit.

        And by how much it misses it. The others are simulated where the estimate of a faster one was too low.
        """
        best, found = faster_and_faster[-1], None
        for made in reversed(faster_and_faster):
            if found is not None and found.step_time <= made.step_time:
                break
            self.progress("simulate", incumbent=made.step_time)
            plan, off = self._kept_to(limit, made.planning.plan(made, self.key))
            if found is None and plan is None:
                return best, None, off
            if plan is not None and (found is None or plan.step_time < found.step_time):
                best, found = made, plan
        return best, found, 0

    def timeline(self, plan: Plan, sums: bool = True) -> Timeline:
        """The simulated schedule of a plan's whole step."""
        return self.lowering.timeline(self.lowering.lower(plan, not sums, draft=True), sums, plan)

    def _kept_to(self, limit: int, plan: Plan) -> tuple[Plan | None, int]:
        """The plan as its whole step is simulated, if that keeps to a memory limit; and by how much it missed it.

        Its order is made for a little less where it misses the limit by a little.
        """
        whole = self._whole(plan)
        most, tried = whole.peak_memory, plan
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
        asked = self.lowering.options_of(plan), Decision(strategies, self.lowering.joins_of(plan), {})
        found = next((evaluation for other, evaluation in self._known if other == asked), None)
        if found is None:
            found = Evaluation.of(self.timeline(plan))
            self._known.append((asked, found))
        return found


def _held_to(plan: Plan, bound: float) -> Plan:
    """The plan with a bound that holds for other settings, too."""
    gap = relative_gap(plan.program_time, bound)
    nearer = 1 - (1 - plan.proven_gap) * bound / plan.bound if plan.bound else 0.0  # of the program's own answer
    proven_gap = min(max(0.0, nearer), gap)
    return replace(plan, bound=bound, gap=gap, proven_gap=proven_gap, status="feasible" if gap else "optimal")
