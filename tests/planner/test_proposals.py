"""Plans proposed beside the program's optimum: what is simpler fits, is hardly slower, and has less to know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import shardweave as sw
from shardweave.demo.model import GPT, GPTConfig
from shardweave.ir import Grid, Strategy
from shardweave.planner.problem.problem import Candidate, Op, Problem
from shardweave.planner.problem.variables import Costed, Variable
from shardweave.planner.search.evaluation import Decision, complexity
from shardweave.planner.search.plan import OtherPlan
from shardweave.planner.search.proposals import gathered_once, simpler
from tests.planner.planners import Planner
from tests.planner.problems import brute_force, problems

DP, ZERO3 = Strategy(Grid(data=8)), Strategy(Grid(data=8), rest=8)
OWN = Strategy(Grid(data=8), rest=2, states=4)
"""A strategy that no preset stands for."""


@hypothesis.given(problems(), st.data(), st.floats(0.0, 0.2))
def test_what_is_simpler_fits_and_is_at_most_so_much_slower(
    problem: Problem, data: st.DataObject, slowdown: float
) -> None:
    hypothesis.assume(brute_force(problem) is not None)
    choice = tuple(data.draw(st.integers(0, len(op.candidates) - 1)) for op in problem.ops)
    hypothesis.assume(problem.feasible(choice))
    most = problem.objective(choice) * (1 + slowdown) + 1e-11
    for found in simpler(problem, (), choice, slowdown):
        assert problem.feasible(found) and problem.objective(found) <= most


def candidates(**seconds: float) -> tuple[Candidate, ...]:
    strategies = {"dp": DP, "zero3": ZERO3, "own": OWN}
    return tuple(Candidate(name, taken, data=strategies[name]) for name, taken in seconds.items())


def test_ops_of_a_rare_strategy_take_one_that_there_is_or_a_preset() -> None:
    up, down = Op("up", candidates(own=1.0, dp=1.02, zero3=1.001)), Op("down", candidates(zero3=1.0, dp=1.001))
    problem = Problem((up, down, Op("head", candidates(dp=1.0, own=1.2, zero3=1.2))))
    assert simpler(problem, (), (0, 0, 0), 0.001)[1] == (2, 0, 0)  # a strategy with no name goes first
    assert simpler(problem, (), (0, 0, 0), 0.01)[1] == (1, 1, 0)  # all take one
    assert simpler(problem, (), (0, 0, 0), 0.0)[1] == (0, 0, 0)
    assert simpler(replace(problem, ops=(up,)), (), (0,), 0.002)[1] == (2,)  # a preset that there was not


def test_a_plan_is_the_more_complex_the_more_strategies_and_kinds_of_layers_it_has() -> None:
    alike, named, own = ({"up": ZERO3, "down": other} for other in (ZERO3, DP, OWN))
    assert [complexity(Decision(each, {}, {}), ()) for each in (alike, named, own)] == [1, 2, 3]


def test_what_is_gathered_once_is_whole_or_kept() -> None:
    strategies = [DP, ZERO3, ZERO3]
    variable = Variable("up", 0, strategies=strategies, kept_slices=[0, 0, 1])
    rows = tuple(Candidate(str(number), 1.0) for number in range(3))
    assert [*gathered_once(Costed(Problem((Op("up", rows),)), [variable]))] == [((0, 2),)]
    once = replace(variable, strategies=[DP], kept_slices=[0])
    assert [*gathered_once(Costed(Problem((Op("up", rows[:1]),)), [once]))] == []


@pytest.fixture(scope="module")
def planner() -> Planner:
    """Six layers and a head, under a limit that data parallelism does not meet."""
    with torch.device("meta"):
        tokens = torch.zeros(64, 256, dtype=torch.long)
        model = GPT(GPTConfig(vocabulary=50304, context=256, layers=6, heads=8, width=1024))
    return Planner(model, sw.Cluster.preset("dgx-a100", nodes=2), (tokens, tokens), micro_batches=1)


def test_the_simplest_of_plans_that_are_nearly_as_fast_is_taken(planner: Planner) -> None:
    fastest = planner.plan(simplicity=0.0)
    limit = {"memory_limit": int(0.8 * fastest.peak_memory)}
    fastest, simple = planner.plan(simplicity=0.0, **limit), planner.plan(simplicity=0.1, **limit)
    numbers = [len({choice.strategy for choice in plan.choices.values()}) for plan in (fastest, simple)]
    assert numbers[1] < numbers[0] and fastest.other is None
    assert fastest.step_time < simple.step_time <= 1.1 * fastest.step_time
    assert simple.other is not None and simple.other.num_strategies == numbers[0] and simple.other.slowdown < 1
    assert "slower than the fastest plan found, of" in str(simple.explain())


def test_what_another_plan_takes_is_saved_with_the_plan(planner: Planner, tmp_path: Path) -> None:
    plan = replace(planner.plan(), other=OtherPlan(2, 1.25))
    plan.save(tmp_path / "plan.json")
    loaded: Any = sw.Plan.load(tmp_path / "plan.json")
    assert loaded.other == plan.other
    assert "the simplest plan found, of 2 strategies, takes 25 % longer" in str(loaded.explain())


@pytest.mark.parametrize("simplicity", [-0.1, 1.0])
def test_what_simplicity_may_cost_is_a_part_of_the_step(simplicity: float) -> None:
    with pytest.raises(sw.PlanError, match="simplicity is a part of the step's time"):
        sw.Options(simplicity=simplicity)
