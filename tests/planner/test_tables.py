"""Tables against sums taken one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.planner.problem.problem import Problem
from shardweave.planner.solver.elimination import KEPT, Tables
from tests.planner.problems import problems

Choice = tuple[int, ...]


def drawn(problem: Problem, data: st.DataObject) -> Choice:
    return tuple(data.draw(st.integers(0, len(op.candidates) - 1)) for op in problem.ops)


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_tables_add_up_what_a_problem_does(problem: Problem, data: st.DataObject) -> None:
    tables, choice = Tables(problem), drawn(problem, data)
    figures = tables.total(choice)
    assert (None if figures is None else tables.ticks(figures)) == problem.ticks(choice)
    seconds, size = tables.seconds_and_bytes(choice)
    assert seconds == problem.objective(choice) and (figures is None or size == problem.memory(choice))
    for op in range(len(choice)):
        around, allowed = tables.around(op, choice)
        for other in range(len(problem.ops[op].candidates)):
            then = tables.total((*choice[:op], other, *choice[op + 1 :]))
            assert then is None or allowed[other]
            if figures is not None and then is not None:
                assert (then - figures == around[:, other] - around[:, choice[op]]).all()


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_no_choice_takes_less_than_its_ops_take_at_least(problem: Problem, data: st.DataObject) -> None:
    tables, choice = Tables(problem), drawn(problem, data)
    kept = tuple(
        tuple(sorted({own, *data.draw(st.sets(st.integers(0, len(op.candidates) - 1)))}))
        for own, op in zip(choice, problem.ops, strict=True)
    )
    least, figures = tables.least(kept), tables.total(choice)
    assert (least >= tables.least(tuple(tuple(range(len(op.candidates))) for op in problem.ops))).all()
    if figures is not None:
        assert (least <= figures).all()
        assert int(tables.ticks(least)) <= (problem.ticks(choice) or 0)
        assert least[KEPT] + problem.fixed_bytes <= problem.memory(choice)


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=2, max_size=2))
def test_the_time_of_a_difference_is_the_most_that_it_can_take(columns: list[tuple[int, ...]]) -> None:
    tables = Tables(Problem((), windows=(("compute", "link"),)))
    a, b = (np.array(column, dtype=np.int64) for column in columns)
    assert tables.time(a) <= tables.time(b) + tables.time(a - b)
