"""Smaller problems from larger ones: with fewer streams, other loads or fewer candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardweave.planner.problem.problem import TICKS_PER_SECOND, Candidate, Edge, Problem

Kept = tuple[tuple[int, ...], ...]
"""For each op, which of its candidates the smaller problem has (their indices in the first one)."""


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


def invert(choice: Sequence[int], kept: Kept) -> tuple[int, ...]:
    """The choice for the first problem that `choice` for the smaller one stands for.

    >>> invert((1, 0), kept=((0, 2), (1,)))
    (2, 1)
    """
    return tuple(indices[index] for index, indices in zip(choice, kept, strict=True))


def restricted(problem: Problem, kept: Kept) -> Problem:
    """`problem` with only the candidates `kept` of each op."""
    tables: dict[tuple[int, tuple[int, ...]], tuple[Candidate, ...]] = {}
    ops = []
    for op, indices in zip(problem.ops, kept, strict=True):
        if len(indices) < len(op.candidates):
            key = id(op.candidates), indices
            if key not in tables:  # equal layers share one table before and after
                tables[key] = tuple(op.candidates[index] for index in indices)
            op = replace(op, candidates=tables[key])
        ops.append(op)
    return replace(problem, ops=tuple(ops))
