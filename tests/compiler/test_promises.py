"""What a plan promises is what its whole generated step takes: simulated, drawn, and measured on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.planner.search.evaluation import Evaluation, PlanEvaluator
from shardweave.runtime.launch import WorkerPool
from tests.compiler.test_memory import CONFIG, rows
from tests.compiler.test_micro_batches import Loss
from tests.compiler.training import ALL_CASES
from tests.measured_memory import measure_all
from tests.models import TODAY, ZOO, Case, gpt

DEEP = Case("deep gpt", partial(gpt.build, replace(CONFIG, layers=6)), rows)
"""Of which two layers are simulated when plans are chosen, and all of them when one is returned."""
CASES = {**ZOO, **TODAY, DEEP.name: DEEP}
CLUSTERS = {
    "2 ranks": sw.Cluster.local(2),
    "8 A100": sw.Cluster.preset("dgx-a100", nodes=1),
    "16 RTX 3090": sw.Cluster.preset("rtx3090-pcie", nodes=2),
}
CELLS = [(DEEP.name, "8 A100"), ("llama", "8 A100")]
if ALL_CASES:
    CELLS = [(name, machine) for name in CASES for machine in CLUSTERS]
MEASURED = [*CASES] if ALL_CASES else ["mlp", DEEP.name]
PARTS = (0.9, 0.7, 0.55) if ALL_CASES else (0.7,)
"""Memory limits, as parts of what the fastest plan takes."""


def planned(compiler: Compiler, parts: Sequence[float] = PARTS) -> list[sw.Plan]:
    """The fastest plan, and those that there are under parts of its memory."""
    found = [compiler.plan()]
    for part in parts:
        limit = int(part * found[0].peak_memory)
        try:
            found.append(compiler.with_(options=replace(compiler.options, memory_limit=limit)).plan())
        except sw.InfeasibleError as error:
            assert error.needed_bytes is not None and error.needed_bytes > limit
    return found


def check(plan: sw.Plan) -> None:
    timeline = plan.timeline()
    assert plan.peak_memory == timeline.peak_memory <= plan.memory_limit
    promised = plan.step_time, plan.exposed_communication, plan.compute_time
    assert promised == (timeline.step_time, timeline.exposed_communication, timeline.compute_time)


@pytest.mark.parametrize(("name", "machine"), CELLS)
def test_figures_are_those_of_the_whole_step(name: str, machine: str) -> None:
    case = CASES[name]
    plans = planned(Compiler(case.model(), CLUSTERS[machine], case.batch(0, 16), None, None))
    for plan in plans:
        check(plan)
        check(replace(sw.Plan.from_dict(plan.to_dict()), _timeline=plan._timeline))


@pytest.mark.parametrize("name", MEASURED)
def test_ranks_keep_to_the_limit(name: str, pool: WorkerPool) -> None:
    """Compiled from the plan alone: what it is ordered for is in the plan, not in the options of the call."""
    case = CASES[name]
    plans = planned(Compiler(case.model(), sw.Cluster.local(2), case.batch(0), None, None))[1:]
    ranks = pool.run(measure_all, case, 2, [plan.to_dict() for plan in plans], nprocs=2, timeout=900.0)
    for plan, *figures in zip(plans, *ranks, strict=True):
        check(plan)
        for found in figures:
            assert found.peak <= plan.memory_limit, (plan.peak_memory, plan.overlap, plan.micro_batches)
            assert found.peak <= 1.02 * plan.peak_memory


def compiler() -> Compiler:
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    options = sw.Options(sub_batches=1, buckets=False, recompute="none", micro_batches=1)
    return Compiler(Loss(*layers), sw.Cluster.local(4), torch.zeros(512, 64), options, None)


def test_where_few_layers_tell_too_little_another_plan_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the estimates leave out, whatever it is, does not end in a plan that breaks the limit."""
    made = compiler()
    free = made.plan()
    limit = int(0.8 * free.peak_memory)
    of_few = PlanEvaluator._simulated

    def too_little(evaluate: PlanEvaluator, *asked: object) -> Evaluation:
        found = of_few(evaluate, *asked)  # type: ignore[arg-type]
        return replace(found, peak_memory=int(0.8 * found.peak_memory))

    monkeypatch.setattr(PlanEvaluator, "_simulated", too_little)
    other = compiler().with_(options=replace(made.options, memory_limit=limit))
    plan = other.plan()
    check(plan)
    assert plan.memory_limit == limit and plan.step_time >= free.step_time
    with pytest.raises(sw.InfeasibleError) as error:
        compiler().with_(options=replace(made.options, memory_limit=1)).plan()
    needed = error.value.needed_bytes
    assert needed is not None
    least = compiler().with_(options=replace(made.options, memory_limit=needed)).plan()
    check(least)
    assert least.peak_memory <= needed


def test_a_plan_is_compiled_for_its_own_limit_and_optimizer() -> None:
    made = compiler()
    options = replace(made.options, memory_limit=int(0.8 * made.plan().peak_memory), optimizer="momentum")
    plan = made.with_(options=options).plan()
    again = sw.Plan.from_dict(plan.to_dict())
    assert again == plan and again.schedule_limit <= plan.memory_limit
    timeline = made.lowering.timeline(made.lower(again), plan=again)  # the options say neither
    assert (timeline.peak_memory, timeline.step_time) == (plan.peak_memory, plan.step_time)
    smaller = made.with_(options=replace(made.options, memory_limit=plan.peak_memory - 1))
    with pytest.raises(sw.PlanError, match=r"the plan takes \d+ bytes .*allows less"):
        smaller.lower(again)


def test_a_timeline_says_what_it_shows() -> None:
    made = compiler()
    plan = made.with_(options=replace(made.options, micro_batches=2)).plan()
    whole, apart = plan.timeline(), plan.timeline(sums=False)
    assert (whole.micro_batches, whole.reduces_gradients) == (2, True)
    assert (apart.micro_batches, apart.reduces_gradients) == (2, False)
    assert "in 2 micro-batches" in whole.plot().axes[0].get_title(loc="left")
    assert "without the reduction of gradients" in apart.plot().axes[0].get_title(loc="left")
