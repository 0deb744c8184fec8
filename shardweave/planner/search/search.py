"""The search for the best plan, and for the number of micro-batches where the user leaves it open.

Plans are proposed under a memory limit, and the one that is returned is simulated with all layers. With more
micro-batches fewer activations are held at once, but each micro-batch gathers parameters again, and its products are
smaller. So one micro-batch is best until memory makes the step slower. From there the number is doubled until two
successive doublings bring no gain; or, where no plan fits, until a doubling saves no memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf

from shardweave.cost_model import Timeline
from shardweave.ir import ParallelError, PlanError
from shardweave.passes import Annotated
from shardweave.planner.search.evaluation import Decision, Evaluation, Known, PlanEvaluator, StepLowering
from shardweave.planner.search.plan import ModelKey, Plan
from shardweave.planner.search.planning import Lacked, Made, Planning, first_feasible
from shardweave.report import Reporter

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
    lacked: list[Lacked] = []
    slower = 0
    for planning in _likely_first(iter(plannings)):
        try:
            made = planning.make(_seconds(best)) if best else planning.make()
        except ParallelError:
            if best is None and not lacked:
                raise
            break  # what needs the whole batch, say, does not go with a finer cut
        if isinstance(made, Lacked):
            lacked.append(made)
            # Two parts may need more than one, as sums of gradients do
            if len(lacked) > 2 and made.least_bytes >= lacked[-2].least_bytes:
                break
        elif made is None or (best is not None and _seconds(made) >= _seconds(best)):
            slower += 1
            if slower == MAX_CUTS_WITHOUT_GAIN:
                break
        else:
            best, slower = made, 0
            if not made.chosen.pressed:
                break
    return first_feasible([(each.least_bytes, each.last) for each in lacked]) if best is None else best


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


def _seconds(made: Made) -> float:
    return made.chosen.evaluation.step_time


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
            made = fastest(self.planning(count, start, margin) for count in counts)
            plan = made.planning.plan(made, self.key, begun)
            self.progress("simulate", incumbent=plan.step_time)
            found, off = self._kept_to(limit, plan)
            if found is not None:
                savings = made.planning.savings(made) if weigh else ()
                return replace(found, savings=savings, planning_seconds=time.monotonic() - begun)
            margin += off
            if margin >= limit:  # the smallest plan was simulated whole when it was found
                raise PlanError(
                    f"the memory limit of {limit} bytes a device is met by none of the plans that were simulated "
                    "whole: raise memory_limit a little, or force a strategy"
                )

    def planning(self, micro_batches: int, start: Plan | None = None, margin: int = 0) -> Planning:
        """Of a step of so many micro-batches, from an earlier plan, with so much of the memory limit left free."""
        limit = self.options.limit(self.cluster)
        options = replace(self.options, memory_limit=limit, micro_batches=micro_batches)
        return Planning(self.steps, self.cluster, options, self.evaluate, self.progress, self.model, start, margin)

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
            less = plan.schedule_limit - times * (most - limit)
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
