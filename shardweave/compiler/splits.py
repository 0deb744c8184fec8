"""Into how many micro-batches a call's batch is cut, where the user leaves it open.

The finer the cut, the fewer activations are held at once; but each part gathers and waits anew, and its products are
smaller. So one part is best until memory makes the step slower. From there on twice as many are looked at, again and
again, until that is no faster; where nothing fits, until it needs no less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardweave.compiler.pipeline import Annotated
from shardweave.compiler.plan import Plan
from shardweave.compiler.planning import Lacked, Made, Planning, first
from shardweave.errors import ParallelError


def powers(annotated: Annotated) -> Iterator[int]:
    """The powers of two that divide the batch; one where the model has no loss to begin each backward from."""
    count, several = 1, not annotated.captured.whole and annotated.loss_inside and len(annotated.tangents) == 1
    while annotated.batch % count == 0 and (count == 1 or several):
        yield count
        count *= 2


def fastest(plannings: Iterable[Planning], start: Plan | None = None) -> Made:
    """The fastest that some of `plannings`, each of a finer cut than the one before, make.

    Parameters
    ----------
    start : Plan, optional
        A plan of the same model, to begin with.

    Raises
    ------
    InfeasibleError
        Nothing fits; with the smallest memory that would do.
    """
    best: Made | None = None
    lacked: list[Lacked] = []
    for planning in plannings:
        try:
            made = planning.make(start, _seconds(best)) if best else planning.make(start)
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
            break
        else:
            best = made
            if not made.chosen.pressed:
                break
    return first([each.last for each in lacked]) if best is None else best


def _seconds(made: Made) -> float:
    return made.chosen.judged.step_time
