"""The law of reductions: inverting keeps objective and feasibility, and the optimum survives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.planner.problem.problem import Candidate, Edge, Op, Problem
from shardweave.planner.solver.reductions import DEFAULT_REDUCTIONS, Dominance, Reduction, invert, reduce
from tests.planner.problems import brute_force, problems

reductions = pytest.mark.parametrize("reduction", DEFAULT_REDUCTIONS, ids=lambda reduction: reduction.name)


@reductions
@settings(max_examples=60, deadline=None)
@given(problem=problems(), data=st.data())
def test_inverting_keeps_objective_and_feasibility(reduction: Reduction, problem: Problem, data: st.DataObject) -> None:
    smaller, kept = reduction.apply(problem)
    choice = tuple(data.draw(st.integers(0, len(op.candidates) - 1)) for op in smaller.ops)
    first = invert(choice, kept)
    assert smaller.ticks(choice) == problem.ticks(first)
    assert smaller.feasible(choice) == problem.feasible(first)


@reductions
@settings(max_examples=60, deadline=None)
@given(problem=problems(max_ops=4))
def test_some_optimum_survives(reduction: Reduction, problem: Problem) -> None:
    assert brute_force(reduction.apply(problem)[0]) == brute_force(problem)


@settings(max_examples=60, deadline=None)
@given(problems(max_ops=4), st.permutations(DEFAULT_REDUCTIONS))
def test_reductions_chain_in_any_order(problem: Problem, order: list[Reduction]) -> None:
    smaller, kept = reduce(problem, order)
    assert brute_force(smaller) == brute_force(problem)
    choice = tuple(0 for _ in smaller.ops)
    assert smaller.ticks(choice) == problem.ticks(invert(choice, kept))


def test_dominance_reckons_with_the_worst_neighbour() -> None:
    ops = (
        Op("up", (Candidate("a", 1.0, out_port=0), Candidate("b", 1.25, out_port=1))),
        Op("down", (Candidate("a", 1.0, in_port=0), Candidate("b", 1.0, in_port=1, state_bytes=1))),
    )
    near, far = (np.array([[0.0, change], [change, 0.0]]) for change in (0.125, 0.5))
    assert Dominance().apply(Problem(ops, (Edge(0, 1, near),)))[1] == ((0,), (0,))
    assert Dominance().apply(Problem(ops, (Edge(0, 1, far),)))[1] == ((0, 1), (0, 1))
