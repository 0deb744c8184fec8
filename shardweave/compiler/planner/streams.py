"""Streams: which of a window's streams matter, as most never are the busiest.

The fewer streams a problem has, the more candidates dominate others, and the better its bound is. So streams that
cannot be the busiest are dropped (`IdleStreams`), and `solver.solve` begins with one stream of each window, and adds
those that are the busiest in what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardweave.compiler.planner.problem import TICKS_PER_SECOND, Candidate, Edge, Problem
from shardweave.compiler.planner.tables import LOADS, Tables


@dataclass(frozen=True)
class IdleStreams:
    """Drop streams that another one of their window is never below, and windows that have one stream left.

    Stream s is never above t if the sum of the largest ``load_s - load_t`` of each op and edge is at most 0. What a
    window of one stream loads is time.

    >>> from shardweave.compiler.planner.problem import Op
    >>> op = Op("up", (Candidate("", 1.0, loads=(2.0, 1.0)), Candidate("", 0.5, loads=(2.5, 2.5))))
    >>> smaller, _ = IdleStreams().apply(Problem((op,), windows=(("compute", "link"),)))
    >>> smaller.windows, [candidate.seconds for candidate in smaller.ops[0].candidates]
    ((), [3.0, 3.0])
    """

    name = "idle streams"

    def apply(self, problem: Problem) -> tuple[Problem, tuple[tuple[int, ...], ...]]:
        tables = Tables(problem)
        busy = {row - LOADS for rows in tables.windows for row in _busy(tables, range(rows.start, rows.stop))}
        return with_streams(problem, busy), tuple(tuple(range(len(op.candidates))) for op in problem.ops)


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
        if given.loads is None or given.load_ticks is None:
            return given
        more = given.load_ticks[merged].sum(axis=0) / TICKS_PER_SECOND
        return replace(given, seconds=given.seconds + more, loads=np.ascontiguousarray(given.loads[loaded]))

    candidates = {key: tuple(map(candidate, table)) for key, table in
                  {id(op.candidates): op.candidates for op in problem.ops}.items()}  # fmt: skip
    edges = {key: edge(each) for key, each in {_key(each): each for each in problem.edges}.items()}
    return replace(
        problem,
        ops=tuple(replace(op, candidates=candidates[id(op.candidates)]) for op in problem.ops),
        edges=tuple(
            replace(each, seconds=edges[_key(each)].seconds, loads=edges[_key(each)].loads) for each in problem.edges
        ),
        windows=tuple(windows),
    )


def _key(edge: Edge) -> tuple[int, int]:
    return id(edge.seconds), id(edge.loads)


def _busy(tables: Tables, streams: Sequence[int]) -> list[int]:
    """Those of a window's streams, by their rows, that no other one is always at least as busy as."""
    ops = np.bincount(tables.op_of, minlength=len(tables.ops))
    edges = np.bincount(tables.edge_of, minlength=len(tables.edges))

    def never_above(one: int, other: int) -> bool:
        most = sum(int(count) * int((op.figures[one] - op.figures[other]).max()) for count, op in zip(ops, tables.ops))
        for count, edge in zip(edges, tables.edges):
            more = (edge.figures[one] - edge.figures[other])[edge.allowed]
            most += int(count) * int(more.max()) if more.size else 0
        return most <= 0

    found = list(streams)
    for one in streams:
        if any(other != one and never_above(one, other) for other in found):
            found.remove(one)
    return found
