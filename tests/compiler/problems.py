"""Small random problems, and the answer that brute force gives."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from shardweave.compiler.planner.problem import Candidate, Edge, Op, Problem

PORTS = 3
seconds = st.one_of(st.integers(0, 6).map(float), st.floats(0, 2, allow_subnormal=False))
sizes = st.one_of(st.integers(0, 8), st.integers(0, 2**36))


@st.composite
def problems(draw: st.DrawFn, max_ops: int = 5, forbidden: bool = True) -> Problem:
    """Any graph over a few ops, with figures that often tie, sometimes equal layers and pairs that are forbidden."""
    count = draw(st.integers(1, max_ops))
    ports = st.integers(0, PORTS - 1)
    candidates = st.builds(Candidate, st.just("c"), seconds, sizes, sizes, sizes, ports, ports)
    tables = draw(st.lists(st.lists(candidates, min_size=1, max_size=4).map(tuple), min_size=1, max_size=count))
    ops = tuple(Op(f"op{i}", tables[i % len(tables)], f"group{i % len(tables)}") for i in range(count))
    cost = st.one_of(seconds, st.just(float("inf"))) if forbidden else seconds
    matrices = st.lists(cost, min_size=PORTS**2, max_size=PORTS**2).map(lambda row: np.array(row).reshape(PORTS, PORTS))
    pairs = [(i, j) for j in range(count) for i in range(j) if j == i + 1 or draw(st.integers(0, 3)) == 0]
    edges = tuple(Edge(i, j, draw(matrices)) for i, j in pairs)
    problem = Problem(ops, edges, fixed_bytes=draw(sizes), fixed_seconds=draw(seconds))
    choice = [draw(st.integers(0, len(op.candidates) - 1)) for op in ops]
    return replace(problem, memory_limit=problem.memory(choice) - draw(st.integers(0, 1)))


def brute_force(problem: Problem) -> float | None:
    """The least objective of all feasible choices; None where there is none."""
    choices = itertools.product(*(range(len(op.candidates)) for op in problem.ops))
    return min((problem.objective(choice) for choice in choices if problem.feasible(choice)), default=None)
