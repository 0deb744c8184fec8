"""Streams that are left out, searches that end early: what is known of their answers all the same."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.ir.errors import PlanError
from shardweave.planner.problem.problem import Problem
from shardweave.planner.solver.reductions import with_streams
from shardweave.planner.solver.solver import solve
from tests.planner.problems import brute_force, problems

WINDOWS = (("compute", "inner", "outer"), ("host", "memory"))


@given(problems(max_ops=3, windows=WINDOWS), st.sets(st.integers(0, 4)))
def test_without_some_streams_nothing_takes_longer_and_what_waits_for_the_others_takes_as_long(
    problem: Problem, streams: set[int]
) -> None:
    fewer = with_streams(problem, streams)
    for choice in itertools.product(*(range(len(op.candidates)) for op in problem.ops)):
        assert fewer.memory(choice) == problem.memory(choice)
        ticks, less = problem.ticks(choice), fewer.ticks(choice)
        assert (ticks is None) == (less is None)
        if ticks is not None and less is not None:
            assert less <= ticks
            if set(problem.busiest(choice)) <= streams:
                assert less == ticks


@given(problems(windows=WINDOWS), st.sampled_from([(), ("compute",), ("outer", "memory"), ("host",)]))
def test_whatever_streams_it_begins_with_the_solver_finds_the_fastest(problem: Problem, names: tuple[str, ...]) -> None:
    expected = brute_force(problem)
    if expected is None:
        with pytest.raises(PlanError):
            solve(problem, waits_for=names)
        return
    found = solve(problem, waits_for=names)
    assert (found.objective, found.status) == (expected, "optimal")
    assert set(found.waits_for) <= {name for window in WINDOWS for name in window}


@given(problems(windows=WINDOWS), st.floats(0.5, 2.0))
def test_under_a_ceiling_the_fastest_is_found_or_none_is_faster(problem: Problem, part: float) -> None:
    expected = brute_force(problem)
    if expected is None:
        return
    ceiling = part * expected
    try:
        found = solve(problem, ceiling=ceiling)
    except PlanError:
        assert expected >= ceiling * (1 - 1e-9)
        return
    assert found.bound <= expected <= found.objective
    assert found.objective == expected or expected >= ceiling * (1 - 1e-9)


@given(problems(windows=WINDOWS))
def test_a_rough_answer_fits_and_its_bound_holds(problem: Problem) -> None:
    expected = brute_force(problem)
    if expected is None:
        return
    found = solve(problem, rough=True)
    assert problem.feasible(found.choice) and math.isfinite(found.objective)
    assert found.bound <= expected * (1 + 1e-12) and expected <= found.objective
