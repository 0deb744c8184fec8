"""The planner's problem: figures that are checked, sums that are exact."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardweave.ir.errors import PlanError
from shardweave.planner.problem.problem import TICKS_PER_SECOND, Candidate, Edge, Op, Problem, to_ticks
from shardweave.planner.solver.solver import alternatives
from tests.planner.problems import problems

ONLY = Candidate("only", 1.0)


@pytest.mark.parametrize("field", ["seconds", "state_bytes", "saved_bytes", "transient_bytes", "in_port"])
def test_a_negative_figure_is_refused_with_its_op_and_candidate(field: str) -> None:
    figures: dict[str, Any] = {field: -1}
    broken = replace(ONLY, **figures)
    with pytest.raises(PlanError, match="candidate 'only' of op up"):
        Problem((Op("up", (broken,)),))


def test_an_op_without_candidates_is_refused() -> None:
    with pytest.raises(PlanError, match="op up has no candidates"):
        Problem((Op("up", ()),))


@pytest.mark.parametrize(("producer", "consumer"), [(0, 0), (0, 2), (-1, 0)])
def test_an_edge_joins_two_ops(producer: int, consumer: int) -> None:
    with pytest.raises(PlanError, match="expected two different ones"):
        Problem((Op("up", (ONLY,)), Op("down", (ONLY,))), (Edge(producer, consumer, np.zeros((1, 1))),))


def test_an_edge_has_a_place_for_every_port() -> None:
    ops = (Op("up", (replace(ONLY, out_port=2),)), Op("down", (ONLY,)))
    with pytest.raises(PlanError, match=r"up -> down has a table of shape \(2, 1\), expected at least \(3, 1\)"):
        Problem(ops, (Edge(0, 1, np.zeros((2, 1))),))
    for wrong in (-1.0, math.nan):
        with pytest.raises(PlanError, match="negative or undefined"):
            Problem(ops, (Edge(0, 1, np.full((3, 1), wrong)),))


def test_a_cluster_in_wrong_units_is_found() -> None:
    with pytest.raises(PlanError, match="SI units"):
        Problem((Op("up", (replace(ONLY, seconds=1e9),)),))


@given(st.floats(0, 1000), st.floats(0, 1000))
def test_ticks_are_monotone_and_closer_than_a_picosecond(a: float, b: float) -> None:
    assert abs(to_ticks(a) / TICKS_PER_SECOND - a) < 1e-12
    assert (a <= b) <= (to_ticks(a) <= to_ticks(b))


@given(problems(), st.randoms())
def test_the_order_of_ops_changes_nothing(problem: Problem, random: object) -> None:
    order = list(range(len(problem.ops)))
    random.shuffle(order)  # type: ignore[attr-defined]
    where = {op: place for place, op in enumerate(order)}
    shuffled = replace(
        problem,
        ops=tuple(problem.ops[op] for op in order),
        edges=tuple(replace(e, producer=where[e.producer], consumer=where[e.consumer]) for e in problem.edges),
    )
    choice = tuple(len(op.candidates) - 1 for op in problem.ops)
    moved = tuple(choice[op] for op in order)
    assert shuffled.objective(moved) == problem.objective(choice)
    assert shuffled.memory(moved) == problem.memory(choice)


@given(problems(), st.data())
def test_an_alternative_is_what_the_change_of_one_op_does(problem: Problem, data: st.DataObject) -> None:
    choice = tuple(data.draw(st.integers(0, len(op.candidates) - 1)) for op in problem.ops)
    now = problem.objective(choice)
    assume(math.isfinite(now))
    for op, other in enumerate(alternatives(problem, choice)):
        others = [i for i in range(len(problem.ops[op].candidates)) if i != choice[op]]
        times = [problem.objective((*choice[:op], i, *choice[op + 1 :])) for i in others]
        if not any(map(math.isfinite, times)):
            assert other is None
            continue
        assert other is not None and now + other.seconds == pytest.approx(min(times), abs=1e-9)
        then = (*choice[:op], other.candidate, *choice[op + 1 :])
        assert other.missing_bytes == max(0, problem.memory(then) - problem.memory_limit)


def test_a_window_takes_as_long_as_its_busiest_stream() -> None:
    """Two windows; what an edge loads on a stream and keeps counts as a candidate's does."""
    hidden = Candidate("gathers", 1.0, state_bytes=4, loads=(2.0, 1.0, 0.0))
    plain = Candidate("computes", 0.0, loads=(3.0, 0.0, 5.0))
    loads = np.array([[[0.0]], [[4.5]], [[0.0]]])
    edge = Edge(0, 1, np.array([[0.25]]), loads, np.array([[7]]))
    windows = ("compute", "link"), ("compute",)
    problem = Problem((Op("up", (hidden,)), Op("down", (plain,))), (edge,), windows=windows)
    assert problem.objective((0, 0)) == 1.0 + 0.25 + max(2.0 + 3.0, 1.0 + 4.5) + 5.0
    assert problem.memory((0, 0)) == 4 + 7


@pytest.mark.parametrize("loads", [(1.0,), (1.0, -1.0)])
def test_loads_that_are_undefined_are_refused(loads: tuple[float, ...]) -> None:
    with pytest.raises(PlanError, match="loads|negative"):
        Problem((Op("up", (Candidate("", 1.0, loads=loads),)),), windows=(("compute", "link"),))
