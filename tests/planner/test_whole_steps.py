"""Plans that take nearly as long by their estimates are compared with all layers simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.demo.model import GPT, GPTConfig
from shardweave.planner.problem.build_problem import ProblemBuilder
from shardweave.planner.search.evaluation import Decision, Evaluation
from shardweave.planner.search.search import Attempt, PlanSearch
from shardweave.planner.search.setting_planner import SettingPlan
from shardweave.planner.search.setting_search import Evaluated, Incumbent
from shardweave.planner.solver.solver import Solution
from shardweave.report import Reporter
from tests.models import ZOO

LIMIT, LACKING = 100, 20


@dataclass(frozen=True)
class Whole:
    """A plan that takes so many seconds, and bytes, with all layers."""

    step_time: float
    peak_memory: int


class Search(PlanSearch):
    """Knows what whole steps take, and which ones were asked for."""

    def __init__(self) -> None:
        self.progress, self.asked = Reporter(False), list[Whole]()
        self.key: Any = None
        self.limit = LIMIT

    def _kept_to(self, plan: Any) -> tuple[Any, int]:
        self.asked.append(plan)
        return (plan, 0) if plan.peak_memory <= LIMIT else (None, LACKING)


numbers = count(1)


def given(
    seconds: float,
    memory: int,
    whole: Whole,
    is_estimate: bool = True,
    is_spare: bool = False,
    number: int | None = None,
) -> SettingPlan:
    """A setting's plan that is said to take so much; plans of one number decide the same."""
    evaluation = Evaluation(seconds, seconds, 0.0, memory, {}, is_estimate)
    planner: Any = SimpleNamespace(plan=lambda *_: whole, options=sw.Options())
    decision = Decision({}, {}, {}, {"up.weight": next(numbers) if number is None else number})
    chosen: Any = SimpleNamespace(
        evaluation=evaluation, rivals=(), is_spare=is_spare, is_merged=False, decision=decision
    )
    return SettingPlan(planner, chosen)


CASES = {
    "the second is faster": ([given(1.0, 90, Whole(1.01, 90)), given(1.005, 90, Whole(0.99, 90))], 1, 2),
    "the second is too slow": ([given(1.0, 90, Whole(1.01, 90)), given(1.03, 90, Whole(0.99, 90))], 0, 1),
    "the first is slower than said": ([given(1.0, 90, Whole(1.2, 90)), given(1.1, 90, Whole(1.1, 90))], 1, 2),
    "as fast as said": ([given(1.0, 90, Whole(1.005, 90)), given(1.0, 90, Whole(0.9, 90), is_spare=True)], 0, 1),
    "slower than said": ([given(1.0, 90, Whole(1.2, 90)), given(1.1, 90, Whole(1.1, 90), is_spare=True)], 1, 2),
    "all layers": ([given(1.0, 90, Whole(1.0, 90), False), given(1.0, 90, Whole(0.9, 90), False)], 0, 1),
    "the first does not fit": ([given(1.0, 90, Whole(1.0, 110)), given(1.0, 80, Whole(1.0, 100))], 1, 2),
    "nor do those like it": ([given(1.0, 90, Whole(1.0, 110)), given(1.0, 89, Whole(1.0, 99))], None, 1),
    "one plan again": ([given(1.0, 90, Whole(1.0, 90), number=0), given(1.0, 90, Whole(0.9, 90)),
                        *[given(1.0, 90, Whole(0.8, 90), number=0)] * 2], 1, 2),
    "a few": ([given(1.0, 90, Whole(1.0 - number / 1000, 90)) for number in range(9)], 2, 3),
}
"""Plans, the place of the best one, and how many are simulated with all layers."""


@pytest.mark.parametrize(("plans", "best", "num_simulated"), CASES.values(), ids=CASES)
def test_what_may_be_the_fastest_is_simulated_with_all_layers(
    plans: list[SettingPlan], best: int | None, num_simulated: int
) -> None:
    search = Search()
    found = search._fastest_whole(plans)
    assert len(search.asked) == num_simulated
    if best is None:
        assert found.plan is None and found.lacking == LACKING
    else:
        assert found.best is plans[best] and found.plan is search.asked[best]


@pytest.mark.parametrize(("seconds", "memory", "lacking"), [(1.2, 99, 2), (1.2, 90, 0), (1.005, 99, 0)])
def test_a_step_that_memory_makes_slower_than_said_asks_for_room(seconds: float, memory: int, lacking: int) -> None:
    """Only where its memory is nearly all that there is. What is slow for another reason is not planned again."""
    search = Search()
    found = search._fastest_whole([given(1.0, memory, Whole(seconds, memory))])
    assert found.plan is search.asked[0] and found.lacking == lacking


def test_a_plan_with_more_room_is_taken_if_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(ZOO["mlp"].model(), sw.Cluster.local(4), ZOO["mlp"].batch(0), sw.Options(micro_batches=1), None)
    search, margins = compiler.search, list[int]()
    first = search._with_margin(0, None)
    assert first.plan is not None

    def with_margin(_: PlanSearch, margin: int, start: Any) -> Attempt:
        margins.append(margin)
        seconds = first.plan.step_time * (1.0 if margin else slower)
        return replace(first, plan=replace(first.plan, step_time=seconds), lacking=0 if margin else LACKING)

    monkeypatch.setattr(PlanSearch, "_with_margin", with_margin)
    for slower in (1.1, 0.9):
        margins.clear()
        assert search.best().step_time == min(1.0, slower) * first.plan.step_time
        assert margins == [0, LACKING]


def test_rivals_are_other_plans_that_fit_and_are_at_most_a_little_slower() -> None:
    def evaluated(name: str, seconds: float, memory: int = 90, is_estimate: bool = True) -> Evaluated:
        variable = SimpleNamespace(name=name, op=None, modes=("none",), ports=())
        costed: Any = SimpleNamespace(variables=[variable], problem=None)
        solution = Solution((0,), seconds, 0.0, "feasible", 0.0)
        return Evaluated(costed, solution, Evaluation(seconds, seconds, 0.0, memory, {}, is_estimate), LIMIT)

    incumbent = Incumbent(LIMIT, 0.9)
    plans = {
        "slow": evaluated("recompute a", 1.02),
        "third": evaluated("recompute b", 1.004),
        "again": evaluated("recompute c", 1.0),
        "best": evaluated("recompute c", 1.0),
        "large": evaluated("recompute d", 1.0, memory=101),
        "exact": evaluated("recompute e", 1.001, is_estimate=False),
        "fourth": evaluated("recompute f", 1.006),
        "second": evaluated("recompute g", 1.002),
    }
    for each in plans.values():
        incumbent.offer(each)
    assert incumbent.rivals() == (plans["second"], plans["third"])


def test_another_memory_limit_prices_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, priced = ZOO["mlp"].model(), ZOO["mlp"].batch(0), list[ProblemBuilder]()
    build = ProblemBuilder.build

    def counted(builder: ProblemBuilder) -> Any:
        priced.append(builder)
        return build(builder)

    monkeypatch.setattr(ProblemBuilder, "build", counted)
    given = sw.Options(micro_batches=1, sub_batches=1, buckets=False)
    compiler = Compiler(model, sw.Cluster.local(4), inputs, given, None)
    free = compiler.plan()
    assert len(priced) == 1
    less = compiler.with_(options=replace(given, memory_limit=free.peak_memory - 1)).plan()
    assert len(priced) == 1 and less.peak_memory < free.peak_memory
    compiler.with_(options=replace(given, buckets=True)).plan()
    assert len(priced) == 2


def test_patterns_in_another_order_are_other_options() -> None:
    """The last one that matches holds, though mappings in another order are equal."""
    recompute: dict[str, Any] = {"*": "none", "blocks.0": "full"}
    given = sw.Options(micro_batches=1, sub_batches=1, buckets=False, force={"*": "dp"}, recompute=recompute)
    compiler = Compiler(ZOO["gpt"].model(), sw.Cluster.local(2), ZOO["gpt"].batch(0), given, None)
    turned = replace(given, recompute=dict(reversed(recompute.items())))
    assert compiler.plan().compute_time > compiler.with_(options=turned).plan().compute_time


def test_few_layers_tell_what_memory_costs_where_gradients_pile_up() -> None:
    """Layers that are computed again save less than their gradients take: memory is shortest at the end."""
    with torch.device("meta"):
        model = GPT(GPTConfig(context=2048, layers=10, heads=16, width=2048)).to(torch.bfloat16)
        tokens = torch.zeros(16, 2048, dtype=torch.long)
    cluster = sw.Cluster.preset("dgx-h100", nodes=2)
    given = sw.Options(force={"*": "hsdp:2"}, recompute="full", micro_batches=1, sub_batches=1, buckets=False)
    compiler = Compiler(model, cluster, {"tokens": tokens, "targets": tokens}, given, None)
    plan = compiler.plan()
    strategies = {name: choice.strategy for name, choice in plan.choices.items()}
    decided = Decision(strategies, compiler.lowering.joins_of(plan), {})
    for part in (1.0, 0.95):
        options = replace(compiler.options, memory_limit=int(part * plan.peak_memory))
        few, whole = compiler.evaluate(decided, options), compiler.evaluate.whole(decided, options)
        assert few.is_estimate
        assert few.step_time == pytest.approx(whole.step_time, rel=0.01)
        assert few.peak_memory == pytest.approx(whole.peak_memory, rel=0.01)
