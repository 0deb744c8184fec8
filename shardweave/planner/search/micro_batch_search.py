"""Into how many micro-batches a call's batch is cut, where the user leaves it open.

The finer the cut, the fewer activations are held at once; but each part gathers and waits anew, and its products are
smaller. So one part is best until memory makes the step slower. From there on twice as many are looked at, again and
again, until that is no faster, twice; where nothing fits, until it needs no less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import inf

from shardweave.ir import ParallelError
from shardweave.passes import Annotated
from shardweave.planner.search.planning import Lacked, Made, Planning, first_of

PATIENCE = 2
"""Cuts in a row that have to be slower than the best for no others to be looked at."""


def powers(annotated: Annotated) -> Iterator[int]:
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
            if slower == PATIENCE:
                break
        else:
            best, slower = made, 0
            if not made.chosen.pressed:
                break
    return first_of([(each.least_bytes, each.last) for each in lacked]) if best is None else best


def _likely_first(plannings: Iterator[Planning]) -> Iterator[Planning]:
    """As they come; of a large step that memory makes slower, those first that the program says are the fastest.

    It says so in less time than simulating takes. Those that it has no plan for come only where it has none for any.
    """
    looked_at = [*islice(plannings, 2)]
    if len(looked_at) > 1 and looked_at[0].presses:
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
    return made.chosen.judged.step_time
