"""Small random problems, and the answer that brute force gives."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from shardweave.compiler.planner.problem import Candidate, Edge, Op, Problem

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

    def table(entries: st.SearchStrategy[float], *many: int) -> st.SearchStrategy[np.ndarray]:
        shape = (*many, PORTS, PORTS)
        whole = st.lists(entries, min_size=math.prod(shape), max_size=math.prod(shape))
        return whole.map(lambda row: np.array(row).reshape(shape))

    matrices = table(st.one_of(seconds, st.just(float("inf"))) if forbidden else seconds)
    loading = st.one_of(st.none(), table(seconds, streams)) if streams else st.none()
    keeping = st.one_of(st.none(), table(st.integers(0, 2**30)))
    pairs = [(i, j) for j in range(count) for i in range(j) if j == i + 1 or draw(st.integers(0, 3)) == 0]
    edges = tuple(Edge(i, j, draw(matrices), draw(loading), draw(keeping)) for i, j in pairs)
    problem = Problem(ops, edges, fixed_bytes=draw(sizes), fixed_seconds=draw(seconds), windows=windows)
    choice = [draw(st.integers(0, len(op.candidates) - 1)) for op in ops]
    return replace(problem, memory_limit=problem.memory(choice) - draw(st.integers(0, 1)))


def brute_force(problem: Problem) -> float | None:
    """The least objective of all feasible choices; None where there is none."""
    choices = itertools.product(*(range(len(op.candidates)) for op in problem.ops))
    return min((problem.objective(choice) for choice in choices if problem.feasible(choice)), default=None)
