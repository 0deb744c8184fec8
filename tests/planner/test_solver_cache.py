"""What the program is asked, and what of that only once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis
import pytest

from shardweave.planner.problem.problem import Candidate, Op, Problem
from shardweave.planner.problem.variables import Costed
from shardweave.planner.search import proposals
from shardweave.planner.search import solver_cache as solver
from shardweave.planner.search.solver_cache import CachedSolver
from shardweave.planner.solver.solver import solve
from tests.planner.problems import brute_force, problems

FAST, SMALL = Candidate("fast", 1.0, state_bytes=8), Candidate("small", 1.5, state_bytes=4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The memory limits of the problems that the solver is given."""
    found: list[int] = []

    def noted(problem: Problem, *rest: Any) -> Any:
        found.append(problem.memory_limit)
        return solve(problem, *rest)

    monkeypatch.setattr(solver, "solve", noted)
    return found


def test_what_is_known_under_more_memory_is_not_asked_again(asked: list[int]) -> None:
    costed, given = Costed(Problem((Op("up", (FAST, SMALL)), Op("down", (FAST, SMALL)))), []), CachedSolver(10.0)
    found = [given.solve(costed.limited(limit)) for limit in (15, 13, 12, 11, 9)]
    assert asked == [15, 11]  # the first answer counts 12 bytes, the second one 8
    assert [each.objective for each in found] == [2.5, 2.5, 2.5, 3.0, 3.0]
    assert all(each.status == "optimal" for each in found)


def test_of_many_candidates_is_nothing_asked_again_either(asked: list[int]) -> None:
    """What is expected of them under a limit is the first answer that is simulated."""
    parts = range(1, 1 + 2**9)
    many = tuple(Candidate(f"in {count}", 1.0 + count / 2**10, state_bytes=2**15 // count) for count in parts)
    costed = Costed(Problem(tuple(Op(f"op {number}", many) for number in range(2**5 + 1)), memory_limit=2**16), [])
    given = CachedSolver(10.0)
    assert solver.size(costed) > solver.MAX_CANDIDATES_MODEST
    expected, _ = given.expects(costed, costed)
    before = len(asked)
    assert given.solve(costed).objective == given.solve(costed, rough=True).objective == expected
    assert len(asked) == before


def test_what_does_not_fit_or_takes_too_long_anyway_is_not_asked_again(asked: list[int]) -> None:
    given = CachedSolver(10.0)
    costed = Costed(Problem((Op("up", (FAST, SMALL)), Op("down", (FAST, SMALL))), memory_limit=7), [])
    assert [given.expects(costed, costed) for _ in range(2)] == [(math.inf, 8)] * 2
    assert asked == [solver.UNLIMITED, 7]
    wider = replace(costed, problem=replace(costed.problem, memory_limit=12))
    assert given.expects(wider, wider, ceiling=2.0) == (2.0, 16) and given.takes(12, 2.0)  # whatever fits takes as long
    assert asked == [solver.UNLIMITED, 7] and not given.takes(12, 2.1)


def test_a_bound_is_of_what_fits() -> None:
    given = CachedSolver(10.0)
    tight = Costed(Problem((Op("up", (FAST, SMALL)), Op("down", (FAST, SMALL))), memory_limit=12), [])
    assert given.bound(tight, tight) == 2.0  # of any choice, as nothing was asked under the limit
    given.expects(tight, tight)
    assert given.bound(tight, tight) == 2.5
    none = replace(tight, problem=replace(tight.problem, memory_limit=7))
    given.expects(none, none)
    assert given.bound(none, none) == math.inf


def test_of_choices_that_are_as_fast_the_one_is_taken_that_moves_least() -> None:
    """Up to a thousandth: what hides behind compute is free in the program, but less of it may hide in the step."""
    much, little = (Candidate(f"moves {moved}", 0.0, loads=(1.0, moved)) for moved in (0.9, 0.2))
    slower = Candidate("moves nothing", 0.0, loads=(1.01, 0.0))
    problem = Problem((Op("first", (much, little, slower)), Op("second", (slower, much, little))),
                      windows=(("way", "link"),))  # fmt: skip
    assert proposals.simplified(problem, (), (0, 1)) == (1, 2)
    nearly = Candidate("moves nothing", 0.0, loads=(1.0005, 0.0))
    assert proposals.simplified(Problem((Op("only", (much, nearly)),), windows=problem.windows), (), (0,)) == (1,)


@hypothesis.given(problems())
def test_what_is_made_simpler_fits_and_is_hardly_slower(problem: Problem) -> None:
    least = brute_force(problem)
    hypothesis.assume(least is not None)
    found = CachedSolver(10.0).solve(Costed(problem, [])).choice
    tolerance = (1 + proposals.MAX_SLOWDOWN_LESS_LOADED) * (1 + proposals.MAX_SLOWDOWN)
    assert least is not None and problem.feasible(found) and problem.objective(found) <= least * tolerance + 1e-11
