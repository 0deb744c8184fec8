"""Tables, runs of choices, changes and dominance: each against sums taken one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.planner.problem.problem import Candidate, Op, Problem
from shardweave.planner.solver.elimination import KEPT, Floats, Tables
from shardweave.planner.solver.lagrangian import Column
from shardweave.planner.solver.primal_heuristics import all_runs, mix, runs, tune
from shardweave.planner.solver.reductions import undominated
from tests.planner.problems import problems

Choice = tuple[int, ...]


def drawn(problem: Problem, data: st.DataObject) -> Choice:
    return tuple(data.draw(st.integers(0, len(op.candidates) - 1)) for op in problem.ops)


def weights_of(problem: Problem) -> Floats:
    return np.ones(2 + problem.num_streams)


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_tables_add_up_what_a_problem_does(problem: Problem, data: st.DataObject) -> None:
    tables, choice = Tables(problem), drawn(problem, data)
    figures = tables.total(choice)
    assert (None if figures is None else tables.ticks(figures)) == problem.ticks(choice)
    for op in range(len(choice)):
        around, allowed = tables.around(op, choice)
        for other in range(len(problem.ops[op].candidates)):
            then = tables.total((*choice[:op], other, *choice[op + 1 :]))
            assert then is None or allowed[other]
            if figures is not None and then is not None:
                assert (then - figures == around[:, other] - around[:, choice[op]]).all()


@settings(max_examples=100, deadline=None)
@given(problems(max_ops=7), st.data())
def test_the_figures_of_all_runs_are_those_of_their_choices(problem: Problem, data: st.DataObject) -> None:
    tables = Tables(problem)
    first, middle, last = (drawn(problem, data) for _ in range(3))
    found = all_runs(tables, weights_of(problem), first, middle, last)
    times = []
    for i, j in np.ndindex(found.allowed.shape):
        begin, end = found.begins[i], found.ends[j]
        if begin > end:
            assert not found.allowed[i, j]
            continue
        choice = (*first[:begin], *middle[begin:end], *last[end:])
        total = tables.total(choice)
        assert bool(found.allowed[i, j]) == (total is not None)
        if total is not None:
            assert (found.figures[:, i, j] == total).all()
            assert found.peak[i, j] + total[KEPT] + problem.fixed_bytes == problem.memory(choice)
            if problem.feasible(choice):
                times.append(problem.ticks(choice))
    fastest = runs(tables, weights_of(problem), first, middle, last)
    if first == last or middle not in (first, last):
        assert (fastest is None) == (not times)
        assert fastest is None or fastest[0] == problem.ticks(fastest[1]) == min(times)


@settings(max_examples=60, deadline=None)
@given(problems(max_ops=7), st.data())
def test_mixing_and_tuning_offer_ever_faster_choices_that_fit(problem: Problem, data: st.DataObject) -> None:
    tables = Tables(problem)
    choices = [drawn(problem, data) for _ in range(3)]
    columns = [column for choice in choices if (column := Column.of(tables, choice)) is not None]
    offered: list[Choice] = []
    mixed = mix(tables, weights_of(problem), columns, offered.append)
    assert mixed == (offered[-1] if offered else None)
    if mixed is not None:
        tune(tables, weights_of(problem), columns, mixed, 0.0, 0.0, offered.append)
    assert all(problem.feasible(choice) for choice in offered)
    times = [problem.ticks(choice) or 0 for choice in offered]
    assert times == sorted(times, reverse=True)


def test_tuning_pairs_a_change_that_frees_memory_with_one_that_uses_it() -> None:
    """No single change fits and gains: the first op must get smaller for the second to get faster."""
    small = Candidate("small", 1.25), Candidate("large", 1.0, state_bytes=4)
    fast = Candidate("slow", 2.0), Candidate("fast", 1.0, state_bytes=4)
    problem = Problem((Op("a", small), Op("b", fast)), memory_limit=4)
    offered: list[Choice] = []
    tune(Tables(problem), np.array([1.0, 0.0]), [], (1, 0), 0.0, 0.0, offered.append)
    assert offered == [(1, 0), (0, 1)]


def test_runs_of_equal_layers_come_close_to_a_mixture() -> None:
    """Half of the memory that the fast choice wants: half of the layers take it, whatever their number."""
    op = Op("layer", (Candidate("fast", 1.0, state_bytes=2), Candidate("small", 2.0)))
    problem = Problem((op,) * 64, memory_limit=64)
    found = runs(Tables(problem), np.array([1.0, 0.5]), (0,) * 64, (1,) * 64, (0,) * 64)
    assert found is not None and found[0] == 96 * 2**40


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 60), st.lists(st.integers(1, 3), max_size=2))
def test_only_labels_go_that_another_dominates(data: st.DataObject, count: int, streams: list[int]) -> None:
    problem = replace(Problem(()), windows=tuple(tuple("abc"[:many]) for many in streams))
    tables, rows = Tables(problem), 2 + sum(streams)
    values = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    figures = np.array([data.draw(values) for _ in range(rows)], dtype=np.int64)
    peak, key = (np.array(data.draw(values), dtype=np.int64) for _ in range(2))

    def dominates(b: int, a: int) -> bool:
        more = figures[:, b] - figures[:, a]
        return bool(tables.time(more) <= 0 and more[KEPT] <= 0 and peak[b] <= peak[a] and key[a] == key[b])

    stay = undominated(tables, figures, peak, key).tolist()
    assert len(set(stay)) == len(stay)
    assert all(any(dominates(b, a) for b in stay) for a in range(count))
    if count <= 32:  # few labels are compared in pairs, all of them
        assert not any(dominates(b, a) for a in stay for b in stay if a != b)


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=2, max_size=2))
def test_the_time_of_a_difference_is_the_most_that_it_can_take(columns: list[tuple[int, ...]]) -> None:
    tables = Tables(Problem((), windows=(("compute", "link"),)))
    a, b = (np.array(column, dtype=np.int64) for column in columns)
    assert tables.time(a) <= tables.time(b) + tables.time(a - b)
