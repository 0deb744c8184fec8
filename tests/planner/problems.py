"""Small random problems, and the answer that brute force gives."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from shardweave.planner.problem.problem import Candidate, Edge, Op, Problem

PORTS = 3
seconds = st.one_of(st.integers(0, 6).map(float), st.floats(0, 2, allow_subnormal=False))
sizes = st.one_of(st.integers(0, 8), st.integers(0, 2**36))


@st.composite
def problems(
    draw: st.DrawFn, max_ops: int = 5, forbidden: bool = True, windows: tuple[tuple[str, ...], ...] | None = None
) -> Problem:
    """Any graph over a few ops, with figures that often tie, sometimes equal layers and pairs that are forbidden.

    Up to two windows of up to three streams, unless `windows` says which; edges may load them and keep bytes.
    """
    if windows is None:
        windows = tuple(draw(st.lists(st.integers(1, 3).map(lambda many: tuple("abc"[:many])), max_size=2)))
    streams = sum(map(len, windows))
    count = draw(st.integers(1, max_ops))
    ports = st.integers(0, PORTS - 1)
    loads = st.one_of(st.just(()), st.tuples(*[seconds] * streams)) if streams else st.just(())
    candidates = st.builds(Candidate, st.just("c"), seconds, sizes, sizes, sizes, ports, ports, st.none(), loads)
    tables = draw(st.lists(st.lists(candidates, min_size=1, max_size=4).map(tuple), min_size=1, max_size=count))
    ops = tuple(Op(f"op{i}", tables[i % len(tables)], f"group{i % len(tables)}") for i in range(count))

    def table(entries: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
        whole = st.lists(entries, min_size=PORTS**2, max_size=PORTS**2)
        return whole.map(lambda row: np.array(row).reshape(PORTS, PORTS))

    matrices = table(st.one_of(seconds, st.just(float("inf"))) if forbidden else seconds)
    # Put together from few tables: to draw them for each edge would take most of the time.
    some = draw(st.lists(table(seconds), min_size=1, max_size=2)) if streams else []
    loading = st.none() if not streams else st.one_of(
        st.none(), st.tuples(*[st.sampled_from(some)] * streams).map(np.stack)
    )  # fmt: skip
    keeping = st.sampled_from([None, draw(table(st.integers(0, 2**30)))])
    pairs = [(i, j) for j in range(count) for i in range(j) if j == i + 1 or draw(st.integers(0, 3)) == 0]
    edges = tuple(Edge(i, j, draw(matrices), draw(loading), draw(keeping)) for i, j in pairs)
    problem = Problem(ops, edges, fixed_bytes=draw(sizes), fixed_seconds=draw(seconds), windows=windows)
    choice = [draw(st.integers(0, len(op.candidates) - 1)) for op in ops]
    return replace(problem, memory_limit=problem.memory(choice) - draw(st.integers(0, 1)))


def brute_force(problem: Problem) -> float | None:
    """The least objective of all feasible choices; None where there is none."""
    choices = itertools.product(*(range(len(op.candidates)) for op in problem.ops))
    fitting = (choice for choice in choices if problem.memory(choice) <= problem.memory_limit)
    return min((time for choice in fitting if (time := problem.objective(choice)) < math.inf), default=None)
