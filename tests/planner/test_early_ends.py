"""Searches that end early: what is known of their answers all the same."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardweave as sw
from shardweave.demo.model import GPTConfig
from shardweave.ir.errors import PlanError
from shardweave.planner.problem.problem import Kept, Problem, restricted
from shardweave.planner.problem.variables import Costed
from shardweave.planner.search.setting_search import Incumbent, SettingSearch
from shardweave.planner.solver.solver import solve
from tests.planner.planners import MetaGPT, Planner
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


def test_the_fastest_of_some_restrictions_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though few of them are solved to the end."""
    propose, num_proposed, num_restrictions = SettingSearch._propose, list[int](), list[int]()

    def seconds(search: SettingSearch, costed: Costed, kept: Kept, incumbent: Incumbent) -> float:
        limited = costed.limited(int(incumbent.over_limit * incumbent.limit))
        try:
            given = Costed(restricted(limited.problem, kept), costed.variables)
            return search.solver.solve(given, None, incumbent.ceiling, rough=True).objective
        except PlanError:
            return math.inf

    def compared(
        self: SettingSearch, costed: Costed, among: Iterable[Kept], incumbent: Incumbent, most: int
    ) -> None:
        every, proposed = list(among), list[Kept]()

        def noted(_: object, costed: Costed, incumbent: Incumbent, hint: None, kept: Kept, rough: bool) -> float:
            proposed.append(kept)
            return 0.0

        with monkeypatch.context() as patch:
            patch.setattr(SettingSearch, "_under_limit", noted)
            propose(self, costed, every, incumbent, most)
        solved = sorted(seconds(self, costed, kept, incumbent) for kept in every)
        expected = [each for each in solved if each < incumbent.ceiling][:most]
        assert [seconds(self, costed, kept, incumbent) for kept in proposed] == pytest.approx(expected)
        num_proposed.append(len(expected))
        num_restrictions.append(len(every))

    monkeypatch.setattr(SettingSearch, "_propose", compared)
    model = MetaGPT(GPTConfig(vocabulary=512, context=128, layers=2, heads=4, width=256), 64)
    network, inputs = model.build()
    options = {"micro_batches": 1, "sub_batches": 1, "buckets": False}
    Planner(network, sw.Cluster.preset("rtx3090-pcie", nodes=2), inputs).plan(**options)
    assert max(num_proposed) > 1 and max(num_restrictions) > max(num_proposed)
