"""Searches that end early: what is known of their answers all the same."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shardweave.ir.errors import PlanError
from shardweave.planner.problem.problem import Problem
from shardweave.planner.solver.solver import solve
from tests.planner.problems import brute_force, problems

WINDOWS = (("compute", "inner", "outer"), ("host", "memory"))


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
