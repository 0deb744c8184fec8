"""Smaller problems: their choices are choices of the first problem that take and keep as much."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.planner.problem.problem import Problem, invert, restricted
from tests.planner.problems import problems


@settings(max_examples=60, deadline=None)
@given(problem=problems(), data=st.data())
def test_a_choice_of_fewer_candidates_takes_and_keeps_as_much_as_the_one_that_it_stands_for(
    problem: Problem, data: st.DataObject
) -> None:
    kept = tuple(
        tuple(sorted(data.draw(st.sets(st.integers(0, len(op.candidates) - 1), min_size=1)))) for op in problem.ops
    )
    smaller = restricted(problem, kept)
    choice = tuple(data.draw(st.integers(0, len(op.candidates) - 1)) for op in smaller.ops)
    first = invert(choice, kept)
    assert smaller.ticks(choice) == problem.ticks(first)
    assert smaller.memory(choice) == problem.memory(first)
    assert smaller.feasible(choice) == problem.feasible(first)
