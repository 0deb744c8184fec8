"""Why not another candidate: what each op's best other one would change, all other ops left as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardweave.compiler.planner.problem import FORBIDDEN, TICKS_PER_SECOND, Edge, Problem


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
    chosen = problem.chosen(choice)
    total = problem.memory(choice) - max((candidate.transient_bytes for candidate in chosen), default=0)

    def edge_ticks(edge: Edge, op: int, index: int) -> int:
        out = (problem.ops[op].candidates[index] if edge.producer == op else chosen[edge.producer]).out_port
        into = (problem.ops[op].candidates[index] if edge.consumer == op else chosen[edge.consumer]).in_port
        return int(edge.ticks[out, into])

    def ticks(op: int, index: int) -> int | None:
        edges = [edge_ticks(edge, op, index) for edge in problem.edges_of[op]]
        return None if FORBIDDEN in edges else problem.ops[op].candidates[index].ticks + sum(edges)

    peaks = sorted((candidate.transient_bytes for candidate in chosen), reverse=True)
    found: list[Alternative | None] = []
    for op, own in enumerate(choice):
        now = ticks(op, own)
        others_peak = peaks[0] if chosen[op].transient_bytes < peaks[0] else max(peaks[1:], default=0)
        options = []
        for index, candidate in enumerate(problem.ops[op].candidates):
            then = ticks(op, index)
            if index == own or then is None or now is None:
                continue
            memory = total - chosen[op].kept_bytes + candidate.kept_bytes + max(others_peak, candidate.transient_bytes)
            missing = max(0, memory - problem.memory_limit)
            options.append(Alternative(index, (then - now) / TICKS_PER_SECOND, missing))
        found.append(min(options, key=lambda option: (option.seconds, option.missing_bytes), default=None))
    return tuple(found)
