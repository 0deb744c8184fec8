"""The search for the number of micro-batches.

With more micro-batches fewer activations are held at once, but each micro-batch gathers parameters again, and its
products are smaller. So one micro-batch is best until memory makes the step slower. From there the number is doubled
until two successive doublings bring no gain; or, where no plan fits, until a doubling saves no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import inf

from shardweave.ir import InfeasibleError, ParallelError
from shardweave.planner.search.setting_planner import SettingPlan, SettingPlanner

MAX_NEED_RATIO = 1.25
"""Micro-batch counts whose estimated need exceeds the smallest that was found by this ratio are not tried."""

MAX_COUNTS_WITHOUT_GAIN = 2
"""The search over micro-batch counts ends after so many in a row that are slower than the best."""


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
