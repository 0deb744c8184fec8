"""What the planner chooses for the whole step where the user leaves it open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model.options import Options
from shardweave.demo.model import GPTConfig
from shardweave.ir import Collective, OverlapConfig
from shardweave.ir.errors import PlanError
from shardweave.planner.search.evaluation import Decision, Evaluation, PlanEvaluator
from shardweave.planner.search.search import MIN_GAIN_RATIO
from shardweave.planner.search.setting_planner import MIN_EXPOSED_RATIO
from shardweave.sharding.graphs import info
from tests.planner.planners import MetaGPT, Planner

CLOSED = {"sub_batches": 1, "buckets": False, "keep_gathered": False}
NARROW = MetaGPT(GPTConfig(vocabulary=512, context=128, layers=2, heads=4, width=256), 32)
"""Little to compute for each byte that is moved."""


def slowed(monkeypatch: pytest.MonkeyPatch, is_so: Callable[[OverlapConfig], bool], ratio: float) -> None:
    """Every simulated step whose overlap options are so takes `ratio` times as long from now on."""
    evaluate = PlanEvaluator.__call__

    def slower(self: PlanEvaluator, decision: Decision, options: Options) -> Evaluation:
        found = evaluate(self, decision, options)
        return replace(found, step_time=found.step_time * ratio) if is_so(options.overlap) else found

    monkeypatch.setattr(PlanEvaluator, "__call__", slower)


def test_what_saves_too_little_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without buckets and sub-batches is simpler; it is kept where they save next to nothing."""
    on = Planner(*_on_meta(), force={"*": "zero3"}).on(sw.Cluster.preset("dgx-a100", nodes=2))
    closed, free = on.plan(**CLOSED), on.plan(**{**CLOSED, "buckets": None})
    small = on.plan(**{**CLOSED, "buckets": "small"})
    assert free.overlap.buckets is True and closed.step_time >= small.step_time >= free.step_time
    ratio = small.step_time / free.step_time * (1 - MIN_GAIN_RATIO / 2)
    slowed(monkeypatch, lambda overlap: overlap.buckets is True, ratio)
    assert on.plan(**{**CLOSED, "buckets": None}).overlap == OverlapConfig(buckets="small")


@pytest.mark.parametrize("asked", CLOSED)
def test_what_the_user_says_is_not_asked_again(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the simulator would say that it is faster."""
    found: list[OverlapConfig] = []
    slowed(monkeypatch, lambda overlap: bool(found.append(overlap)), 1.0)
    Planner(*_on_meta(), **{**CLOSED, asked: None}).on(sw.Cluster.preset("rtx3090-pcie", nodes=2)).plan()
    tried = {
        "sub_batches": any(each.sub_batches > 1 for each in found),
        "buckets": any(each.buckets for each in found),
        "keep_gathered": any(each.keep_gathered for each in found),
    }
    assert not any(is_so for name, is_so in tried.items() if name != asked)
    assert tried[asked] or asked == "keep_gathered"  # which depends on the strategies


def test_nothing_is_tried_where_no_communication_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[OverlapConfig] = []
    slowed(monkeypatch, lambda overlap: bool(found.append(overlap)), 1.0)
    plan = Planner(*_on_meta()).on(sw.Cluster.local(1)).plan()
    assert plan.exposed_communication <= MIN_EXPOSED_RATIO * plan.step_time
    assert not any(overlap.buckets is True or overlap.sub_batches > 1 for overlap in found)


@pytest.mark.parametrize("preset, nodes", [("dgx-a100", 2), ("rtx3090-pcie", 1)])
def test_a_plan_is_never_slower_for_what_is_left_open(preset: str, nodes: int) -> None:
    planner = Planner(*_on_meta())
    on = planner.on(sw.Cluster.preset(preset, nodes=nodes))
    free, closed = on.plan(), on.plan(**CLOSED)
    assert closed.overlap == OverlapConfig()
    each = [on.plan(**{**CLOSED, **said}) for said in ({"sub_batches": 2}, {"buckets": True}, {"keep_gathered": True})]
    assert free.step_time <= min(plan.step_time for plan in each) * 1.02
    assert free.step_time <= closed.step_time


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
    planner = Planner(*_on_meta(), force={"*": "zero3"}, recompute="none")
    on = planner.on(sw.Cluster.preset("rtx3090-pcie", nodes=2))
    said = {**CLOSED, "keep_gathered": None}
    most, none = on.plan(**said), on.plan(**CLOSED)
    between = on.plan(**said, memory_limit=(most.peak_memory + none.peak_memory) // 2)
    assert none.step_time > between.step_time > most.step_time
    assert between.overlap.keep_gathered
    assert _gathers(on.lowered(most)) < _gathers(on.lowered(between)) < _gathers(on.lowered(none))


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_small_collective_is_left_alone(ranks: int) -> None:
    """In the sizes of the demo: what moves less than 64 KiB has no other of its kind, group and dtype to go with."""
    model, batch = MetaGPT(GPTConfig(layers=3), 16).build()
    open_buckets = {"force": {"*": "zero3"}, "keep_gathered": False, "micro_batches": 1}
    on = Planner(model, sw.Cluster.local(ranks), batch, **open_buckets)
    plan, plain = on.plan(), on.plan(buckets=False)
    assert plan.step_time < plain.step_time and plan.timeline().step_time == plan.step_time
    step, before = on.lowered(plan), on.lowered(plain)
    for module, other in ((step.forward, before.forward), (step.backward, before.backward)):
        assert module is not None and other is not None
        found, earlier = _of_states(module), _of_states(other)
        assert len(found) < len(earlier)
        assert sum(what.bytes for what, _ in found) == sum(what.bytes for what, _ in earlier)
        kinds = Counter((what.kind, what.axes, dtype) for what, dtype in found)
        assert all(kinds[what.kind, what.axes, dtype] == 1 for what, dtype in found if what.bytes < 2**16)


def _of_states(module: fx.GraphModule) -> list[tuple[Collective, torch.dtype]]:
    """The collectives of parameters and gradients, and their dtypes."""
    found = [(info(node).collective, node.meta.get("val")) for node in module.graph.nodes]
    return [(what, value.dtype) for what, value in found if what is not None and what.cause != "activation"]


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
