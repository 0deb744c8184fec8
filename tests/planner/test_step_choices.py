"""What the planner chooses for the whole step where the user leaves it open."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model.options import Options
from shardweave.demo.model import GPTConfig
from shardweave.ir import OverlapConfig
from shardweave.ir.errors import PlanError
from shardweave.planner.search.evaluation import Evaluation
from shardweave.planner.search.planning import MIN_EXPOSED_RATIO, MIN_GAIN_RATIO, choices_for_the_whole
from shardweave.sharding.graphs import info
from tests.planner.planners import MetaGPT, Planner

CLOSED = {"sub_batches": 1, "buckets": False, "keep_gathered": False}
NARROW = MetaGPT(GPTConfig(vocabulary=512, context=128, layers=2, heads=4, width=256), 32)
"""Little to compute for each byte that is moved."""


def evaluation(seconds: float, exposed: float = 0.5, peak: int = 1) -> Evaluation:
    return Evaluation(seconds, seconds * (1 - exposed), seconds * exposed, peak, {})


def chosen(times: dict[str, Evaluation], options: Options, limit: int = 1) -> str:
    """What is chosen where each overlap takes that; what is not among them is refused."""

    def evaluate(overlap: OverlapConfig) -> Evaluation:
        if str(overlap) not in times:
            raise PlanError("the model does not allow this option")
        return times[str(overlap)]

    return str(choices_for_the_whole(options, OverlapConfig(), times[PLAIN], evaluate, limit)[0])


PLAIN, HALVES, BUCKETS, BOTH = "", "2 sub-batches", "buckets", "2 sub-batches, buckets"


def test_what_saves_time_is_chosen_on_top_of_what_did_before() -> None:
    times = {PLAIN: evaluation(1.0), HALVES: evaluation(0.9), BUCKETS: evaluation(0.8), BOTH: evaluation(0.7)}
    assert chosen(times, Options()) == BOTH
    assert chosen({**times, BOTH: evaluation(0.9 * (1 - MIN_GAIN_RATIO / 2))}, Options()) == HALVES


@pytest.mark.parametrize("asked", CLOSED)
def test_what_the_user_says_is_not_asked_again(asked: str) -> None:
    times = {PLAIN: evaluation(1.0), HALVES: evaluation(0.9), BUCKETS: evaluation(0.9)}
    found = chosen(times, Options(**{**CLOSED, asked: None}))
    assert found == {"sub_batches": HALVES, "buckets": BUCKETS, "keep_gathered": PLAIN}[asked]
    assert chosen(times, Options(**CLOSED)) == PLAIN


def test_nothing_is_tried_where_no_communication_is_exposed() -> None:
    assert chosen({PLAIN: evaluation(1.0, MIN_EXPOSED_RATIO / 2), HALVES: evaluation(0.9)}, Options()) == PLAIN


def test_what_does_not_fit_or_is_refused_is_not_chosen() -> None:
    assert chosen({PLAIN: evaluation(1.0), HALVES: evaluation(0.5, peak=2)}, Options()) == PLAIN
    assert chosen({PLAIN: evaluation(1.0), HALVES: evaluation(0.5, peak=2)}, Options(), limit=2) == HALVES


@pytest.mark.parametrize("preset, nodes", [("dgx-a100", 2), ("rtx3090-pcie", 1)])
def test_a_plan_is_never_slower_for_what_is_left_open(preset: str, nodes: int) -> None:
    planner = Planner(*_on_meta())
    on = planner.on(sw.Cluster.preset(preset, nodes=nodes))
    free, closed = on.plan(), on.plan(**CLOSED)
    assert closed.overlap == OverlapConfig()
    each = [on.plan(**{**CLOSED, **said}) for said in ({"sub_batches": 2}, {"buckets": True}, {"keep_gathered": True})]
    assert free.step_time <= min(plan.step_time for plan in each) * 1.02
    assert free.overlap != OverlapConfig() and free.step_time <= closed.step_time * (1 - MIN_GAIN_RATIO)


def test_what_is_chosen_is_lowered() -> None:
    planner = Planner(*_on_meta(), force={"*": "zero3"})
    on = planner.on(sw.Cluster.preset("dgx-a100", nodes=2))
    plan = on.plan(**{**CLOSED, "buckets": None})
    without = on.plan(**CLOSED)
    assert plan.overlap.buckets and plan.step_time < without.step_time
    assert on.lowered(plan).backward.code != on.lowered(without).backward.code


def test_what_is_kept_gathered_is_gathered_in_the_forward_alone() -> None:
    on = Planner(*_on_meta(), force={"*": "zero3"}).on(sw.Cluster.preset("rtx3090-pcie", nodes=2))
    plan, without = on.plan(**{**CLOSED, "keep_gathered": None}), on.plan(**CLOSED)
    assert plan.overlap.keep_gathered and plan.step_time < without.step_time
    assert plan.timeline().step_time == pytest.approx(plan.step_time, rel=0.02)
    assert _gathers(on.lowered(plan)) < _gathers(on.lowered(without))


def test_as_many_layers_stay_gathered_as_memory_allows() -> None:
    """Between the memory of none and of all, some do; the plan is faster than with none."""
    on = Planner(*_on_meta(), force={"*": "zero3"}).on(sw.Cluster.preset("rtx3090-pcie", nodes=2))
    said = {**CLOSED, "keep_gathered": None}
    most, none = on.plan(**said), on.plan(**CLOSED)
    between = on.plan(**said, memory_limit=(most.peak_memory + none.peak_memory) // 2)
    assert none.step_time > between.step_time > most.step_time
    assert between.overlap.keep_gathered
    assert _gathers(on.lowered(most)) < _gathers(on.lowered(between)) < _gathers(on.lowered(none))


def _gathers(step: Any) -> int:
    """Of parameters, in the backward."""
    found = [info(node).collective for node in step.backward.graph.nodes]
    return sum(each is not None and each.cause == "parameter" for each in found)


def test_what_is_chosen_goes_with_what_is_asked_for() -> None:
    model, cluster, inputs = _on_meta()
    cluster = sw.Cluster.preset("dgx-a100", nodes=2)
    compiler = Compiler(model, cluster, inputs, Options(recompute="fine", force={"*": "zero3"}), None)
    plan = compiler.plan()
    assert plan.overlap.buckets and plan.overlap.recompute == {"*": "fine"}
    compiler.lower(plan)
    other = Compiler(model, cluster, inputs, Options(recompute="full"), None)
    with pytest.raises(PlanError, match=r"the options ask for recomputation \* full"):
        other.lower(plan)


def test_a_model_that_cannot_be_woven_is_planned_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64 * 36, 1024))
    plan = sw.plan(model, sw.Cluster.preset("rtx3090-pcie"), torch.randn(64, 3, 8, 8))
    assert plan.overlap.sub_batches == 1


def _on_meta() -> tuple[nn.Module, sw.Cluster, tuple[torch.Tensor, torch.Tensor]]:
    model, inputs = NARROW.build()
    return model, sw.Cluster.local(1), inputs
