"""Micro-batches that the planner chooses: where memory presses, as many as make the step fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.planner.search.evaluation import Evaluation
from shardweave.planner.search.search import fastest, smallest_of
from shardweave.planner.search.setting_planner import SettingPlan, SettingPlanner
from shardweave.planner.search.setting_search import SettingSearch
from shardweave.runtime import ParallelModule
from tests.compiler.test_micro_batches import Loss
from tests.models.large import LARGE
from tests.planner.planners import WIDE, Planner, smallest_named


@cache
def mlp() -> Planner:
    """Its activations take as much as its parameters with all that is kept for them."""
    model = Loss(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return Planner(model, sw.Cluster.local(4), torch.randn(128, 32), recompute="none")


@cache
def split(limit: int | None) -> sw.Plan:
    return mlp().plan(memory_limit=limit)


@cache
def by_count(limit: int) -> dict[int, sw.Plan]:
    """The plans under a limit, by the number of micro-batches, of those that fit."""
    found = {}
    for count in (1, 2, 4, 8, 16, 32):
        try:
            found[count] = mlp().plan(memory_limit=limit, micro_batches=count)
        except sw.InfeasibleError:
            continue
    return found


def test_with_memory_to_spare_a_batch_stays_whole() -> None:
    assert split(None).micro_batches == 1
    assert split(split(None).peak_memory).micro_batches == 1


@pytest.mark.parametrize("part", [0.8, 0.6, 0.52])
def test_as_many_are_chosen_as_are_fastest(part: float) -> None:
    limit = int(part * split(None).peak_memory)
    plans, chosen = by_count(limit), split(limit)
    assert chosen.peak_memory <= limit and chosen.micro_batches in plans
    assert chosen.step_time <= 1.01 * min(plan.step_time for plan in plans.values())
    assert mlp().plan(memory_limit=limit, micro_batches=chosen.micro_batches).step_time == chosen.step_time


def test_what_memory_costs_is_told_from_a_step_that_has_all_it_asks_for() -> None:
    """The fastest plan of all, scheduled under a limit that it does not fit into, is itself 10 % slower here."""
    model, inputs = LARGE["bert (large)"]()
    cluster = sw.Cluster.preset("dgx-h100", nodes=2)
    compiler = Compiler(model, cluster, inputs, None, None)
    limit = int(0.75 * compiler.plan().peak_memory)
    chosen, *given = (
        compiler.with_(options=sw.Options(memory_limit=limit, micro_batches=count)).plan() for count in (None, 1, 2)
    )
    assert chosen.step_time == min(plan.step_time for plan in given) < 0.98 * given[0].step_time
    assert chosen.micro_batches == 2


def test_memory_presses_where_the_program_finds_nothing_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan that is alike in all layers, which fits all the same, the bound of all plans tells nothing."""
    under_limit = SettingSearch._under_limit

    def none_fits(self: SettingSearch, *given: Any, **said: Any) -> float:
        return under_limit(self, *given, **said) if len(given) > 3 else inf

    monkeypatch.setattr(SettingSearch, "_under_limit", none_fits)
    limit = int(0.9 * split(None).peak_memory)
    options = sw.Options(recompute="none", memory_limit=limit)
    found = mlp()._compiler.with_(options=options).search.planner(1).best_plan()
    assert found is not None and found.chosen.is_memory_bound


def test_what_fits_in_parts_alone_gets_a_plan_and_the_smallest_memory_is_that_of_parts() -> None:
    with pytest.raises(sw.InfeasibleError) as caught:
        mlp().plan(memory_limit=1, micro_batches=1)
    whole = smallest_named(caught.value)
    plan = split(whole - 1)
    assert plan.micro_batches > 1 and plan.timeline().peak_memory <= plan.peak_memory < whole
    with pytest.raises(sw.InfeasibleError) as caught:
        mlp().plan(memory_limit=1)
    smallest = smallest_named(caught.value)
    assert smallest <= plan.peak_memory and split(smallest).micro_batches > 1


class Normed(Loss):
    """Its batch norm needs the whole batch."""


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)), Normed(nn.Linear(8, 64), nn.BatchNorm1d(64))],
    ids=["loss outside", "batch norm"],
)
def test_what_cannot_be_cut_stays_whole(model: nn.Module) -> None:
    cluster, x = sw.Cluster.local(2), torch.randn(256, 8)
    with pytest.raises(sw.ParallelError, match="batch|loss"):
        sw.plan(model, cluster, x, options=sw.Options(micro_batches=2))
    free = sw.plan(model, cluster, x)
    with pytest.raises(sw.InfeasibleError) as caught:
        sw.plan(model, cluster, x, options=sw.Options(memory_limit=1))
    small = sw.plan(model, cluster, x, options=sw.Options(memory_limit=smallest_named(caught.value)))
    assert (small.micro_batches, free.micro_batches) == (1, 1) and small.peak_memory < free.peak_memory


def test_a_chosen_split_trains() -> None:
    """Behind `compile_parallel`, with the loss and the gradients of the whole batch."""
    torch.manual_seed(0)
    model, x = Loss(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16)), torch.randn(1024, 16)
    cluster = sw.Cluster.local(1)
    free = sw.plan(model, cluster, x)
    options = sw.Options(memory_limit=free.peak_memory * 6 // 10, recompute="none")
    parallel = sw.compile_parallel(model, cluster, x, options=options)
    assert isinstance(parallel, ParallelModule) and parallel.plan is not None and parallel.plan.micro_batches > 1
    loss: Tensor = parallel(x)
    loss.backward()
    ours = [parameter.grad.clone() for parameter in parallel.parameters() if parameter.grad is not None]
    expected = model(x)
    model.zero_grad()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for mine, parameter in zip(ours, model.parameters(), strict=True):
        whole = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        torch.testing.assert_close(whole, parameter.grad)


def test_micro_batches_in_sub_batches_take_what_is_said() -> None:
    """What is decided of joins is said of devices: the axis of micro-batches is another one beside sub-batches."""
    model, inputs = WIDE.build()
    options = sw.Options(micro_batches=2, buckets=False)
    compiler = Compiler(model, sw.Cluster.preset("rtx3090-pcie", nodes=2), inputs, options, None)
    made = compiler.search.planner(2).best_plan()
    assert made is not None
    plan = made.planner.plan(made, compiler.model_key)
    for sub_batches in (1, 2):
        overlap = replace(plan.overlap, sub_batches=sub_batches)
        said = made.planner.evaluated(made.chosen, overlap)
        taken = compiler.lowering.timeline(compiler.lower(replace(plan, overlap=overlap)))
        assert said.compute_time == pytest.approx(taken.compute_time, rel=0.01)
        assert said.step_time == pytest.approx(taken.step_time, rel=0.01)


class Asked(SettingPlanner):
    """The planner of a number of micro-batches that knows the seconds of its plan, as the program says, and bytes."""

    def __init__(self, seconds: float, needs: int) -> None:
        self.seconds, self.needs, self.least_bytes, self.made = seconds, needs, needs, 0

    @property
    def is_memory_bound(self) -> bool:
        return True

    def expected(self, ceiling: float = inf) -> tuple[float, int]:
        return self.seconds, self.needs

    def best_plan(self, ceiling: float = inf, is_other: bool = False) -> SettingPlan | None:
        self.made += 1
        chosen: Any = SimpleNamespace(evaluation=Evaluation(self.seconds, 0.0, 0.0, 0, {}), is_memory_bound=True)
        return SettingPlan(self, chosen) if self.seconds < ceiling else None

    def smallest_plan(self) -> SettingPlan:
        raise sw.InfeasibleError.needing(self.needs, f"needs {self.needs}")


@pytest.mark.parametrize(
    ("expected", "best", "looked_at"),
    [
        ([5.0, 4.0, 3.0, 3.5, 1.0], 2, 4),  # the last is not asked: its coarser neighbour is slower
        ([1.0, 2.0, 0.5], 0, 2),
        ([inf, inf, 4.0, 3.0, 5.0], 3, 5),
        ([inf, 3.0, 2.0], 2, 3),
    ],
)
def test_of_a_large_step_what_the_program_says_is_the_fastest_is_simulated_first(
    expected: list[float], best: int, looked_at: int
) -> None:
    asked = [Asked(seconds, 100 - number) for number, seconds in enumerate(expected)]
    given: list[Asked] = []

    def one_by_one() -> Iterator[Asked]:
        for each in asked:
            given.append(each)
            yield each

    made = fastest(one_by_one())
    assert made.planner is asked[best]
    assert len(given) == looked_at and not any(each.made for each in asked[looked_at:])
    assert all(each.made == (each is asked[best]) for each in asked if each.seconds == inf)


def test_where_the_program_knows_of_no_cut_that_fits_the_coarsest_is_tried_first() -> None:
    """Until finer ones need no less: what the program says of memory is rough."""
    asked = [Asked(inf, needs) for needs in (50, 60, 40, 40, 10)]
    with pytest.raises(sw.InfeasibleError, match="40"):
        fastest(asked)
    assert [each.made for each in asked] == [1, 1, 1, 1, 0]


def test_of_what_does_not_fit_the_least_is_looked_at_first_and_what_is_hopeless_not_at_all() -> None:
    tried: list[int] = []

    class Smallest(Asked):
        def smallest_plan(self) -> SettingPlan:
            tried.append(self.needs)
            chosen: Any = None
            return SettingPlan(self, chosen) if self.needs == 7 else super().smallest_plan()

    with pytest.raises(sw.InfeasibleError, match="needs 100"):
        smallest_of([Smallest(inf, size) for size in (110, 126, 100)])
    assert tried == [100, 110]
    assert smallest_of([Smallest(inf, 110), Smallest(inf, 7)]).planner.least_bytes == 7 and tried[-1] == 7
