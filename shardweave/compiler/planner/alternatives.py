"""Why not another candidate: what each op's best other one would change, all other ops left as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardweave.compiler.planner.problem import TICKS_PER_SECOND, Problem
from shardweave.compiler.planner.tables import KEPT, Tables


class Alternative(NamedTuple):
    """Another candidate of an op.

    Parameters
    ----------
    candidate : int
        Which one.
    seconds : float
        How much longer the step would take with it (negative: shorter).
    missing_bytes : int
        How much the memory limit would have to be raised for it; 0 where it fits.
    """

    candidate: int
    seconds: float
    missing_bytes: int


def alternatives(problem: Problem, choice: Sequence[int]) -> tuple[Alternative | None, ...]:
    """For each op the fastest candidate that was not chosen, whether it fits or not (a faster one never does).

    None where the op has no other candidate whose layouts go with its neighbours'.

    >>> from shardweave.compiler.planner.problem import Candidate, Op
    >>> op = Op("up", (Candidate("fast", 1.0, state_bytes=8), Candidate("small", 1.5, state_bytes=4)))
    >>> alternatives(Problem((op,), memory_limit=6), (1,))
    (Alternative(candidate=0, seconds=-0.5, missing_bytes=2),)
    """
    tables, chosen = Tables(problem), problem.chosen(choice)
    total, _ = tables.sums(choice)
    now = tables.ticks(total)
    peaks = sorted((candidate.transient_bytes for candidate in chosen), reverse=True)
    found: list[Alternative | None] = []
    for op, own in enumerate(choice):
        mine, allowed = tables.around(op, choice)
        then = (total - mine[:, own])[:, None] + mine
        seconds = (tables.ticks(then) - now) / TICKS_PER_SECOND
        others_peak = peaks[0] if chosen[op].transient_bytes < peaks[0] else max(peaks[1:], default=0)
        peak = np.maximum(others_peak, tables.ops[tables.op_of[op]].transient)
        missing = np.maximum(0, then[KEPT] + peak - tables.room)
        options = [
            Alternative(index, float(seconds[index]), int(missing[index]))
            for index in range(len(mine[0]))
            if index != own and allowed[index] and allowed[own]
        ]
        found.append(min(options, key=lambda option: (option.seconds, option.missing_bytes), default=None))
    return tuple(found)
