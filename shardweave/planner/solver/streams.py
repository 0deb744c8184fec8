"""Streams: which of a window's streams matter, as most never are the busiest.

The fewer streams a problem has, the more candidates dominate others, and the fewer choices no other is better than in
all figures. So the solver begins with the first stream of each window, and takes in what its answers turn out to wait
for: without some streams no choice takes longer, so a bound that was proven without them holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardweave.planner.problem.problem import TICKS_PER_SECOND, Candidate, Edge, Problem


def first_of_each(problem: Problem) -> set[int]:
    """The first stream of each window, by number, and the second where all candidates of an op load the first alike.

    Of the two, the answer would not mind the second if it did not count, and wait for it.

    >>> first_of_each(Problem((), windows=(("compute", "link"), ("host", "memory"))))
    {0, 2}
    """
    tables = {id(op.candidates): op.candidates for op in problem.ops}.values()
    loads = [np.array([candidate.loads or (0.0,) * problem.num_streams for candidate in table]) for table in tables]
    found, first = set[int](), 0
    for names in problem.windows:
        if names:
            found.add(first)
        alike = all(np.ptp(table[:, first]) == 0.0 for table in loads) if len(names) > 1 else False
        if alike and any(table[0, first] for table in loads):
            found.add(first + 1)
        first += len(names)
    return found


def with_streams(problem: Problem, streams: set[int]) -> Problem:
    """The problem with only these streams, by number; what a window of one stream loads becomes time.

    No choice takes longer in it, and one of which these streams are the busiest takes as long.
    """
    loaded: list[int] = []
    merged: list[int] = []
    windows, first = [], 0
    for names in problem.windows:
        left = [stream for stream in range(first, first + len(names)) if stream in streams]
        if len(left) == 1:
            merged += left
        elif left:
            loaded += left
            windows.append(tuple(names[stream - first] for stream in left))
        first += len(names)
    if len(loaded) == problem.num_streams:
        return problem

    def candidate(given: Candidate) -> Candidate:
        ticks = given.ticks + sum(given.load_ticks[stream] for stream in merged if given.loads)
        loads = tuple(given.loads[stream] for stream in loaded if given.loads)
        return replace(given, seconds=ticks / TICKS_PER_SECOND, loads=loads)

    def edge(given: Edge) -> Edge:
        ticks = given.ticks_of_loads(merged)
        if given.loads is None or ticks is None:
            return given
        more = ticks.sum(axis=0) / TICKS_PER_SECOND
        return replace(given, seconds=given.seconds + more, loads=np.ascontiguousarray(given.loads[loaded]))

    return _changed(problem, candidate, edge, tuple(windows))


def with_loads(problem: Problem, mixed: NDArray[np.float64]) -> Problem:
    """The problem with other loads on the same streams: each is a sum of the loads there were, one row a stream."""

    def candidate(given: Candidate) -> Candidate:
        return replace(given, loads=tuple((mixed @ given.loads).tolist())) if given.loads else given

    def edge(given: Edge) -> Edge:
        return given if given.loads is None else replace(given, loads=np.tensordot(mixed, given.loads, axes=1))

    return _changed(problem, candidate, edge, problem.windows)


def _changed(
    problem: Problem,
    candidate: Callable[[Candidate], Candidate],
    edge: Callable[[Edge], Edge],
    windows: tuple[tuple[str, ...], ...],
) -> Problem:
    """The problem with candidates and edges that are made once for each table, as equal layers share theirs."""
    candidates = {key: tuple(map(candidate, table)) for key, table in
                  {id(op.candidates): op.candidates for op in problem.ops}.items()}  # fmt: skip
    edges = {key: edge(each) for key, each in {_key(each): each for each in problem.edges}.items()}
    return replace(
        problem,
        ops=tuple(replace(op, candidates=candidates[id(op.candidates)]) for op in problem.ops),
        edges=tuple(
            replace(each, seconds=edges[_key(each)].seconds, loads=edges[_key(each)].loads) for each in problem.edges
        ),
        windows=windows,
    )


def _key(edge: Edge) -> tuple[int, int]:
    return id(edge.seconds), id(edge.loads)
