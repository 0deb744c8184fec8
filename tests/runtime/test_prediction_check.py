"""The first steps beside what the plan predicts."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardweave as sw
from shardweave.compiler.compiler import predicted_step
from shardweave.cost_model import cluster as cluster_module
from shardweave.cost_model import collective_profile
from shardweave.runtime import call_checks
from shardweave.runtime.call_checks import SKIPPED_STEPS, TIMED_STEPS, PredictedStep, PredictionCheck
from shardweave.runtime.launch import WorkerPool

NUM_STEPS = SKIPPED_STEPS + TIMED_STEPS + 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that shows its one number."""
    now = [0.0]
    monkeypatch.setattr(call_checks.time, "perf_counter", lambda: now[0])
    yield now


def told(check: PredictionCheck, clock: list[float], steps: list[tuple[float, float]]) -> list[str]:
    """What is said of steps of so many seconds each, forward with backward and after that."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for compute, rest in steps:
            check.forward_begins()
            clock[0] += compute
            check.backward_ends()
            clock[0] += rest
    return [str(each.message) for each in caught]


def test_compiled_steps_may_take_less_than_is_said(clock: list[float]) -> None:
    for seconds, is_told in ((0.1, False), (1.4, True)):
        check = PredictionCheck(PredictedStep(1.0, "By guess.", may_take_less=True), torch.device("cpu"))
        assert bool(told(check, clock, [(seconds, 0.0)] * NUM_STEPS)) == is_told


@pytest.mark.parametrize(
    ("compute", "rest", "message"),
    [
        (1.2, 0.1, ""),
        (0.5, 0.4, ""),
        (0.5, 9.0, ""),  # the loop waits for data
        (1.4, 0.0, "the plan predicts 1.00 s a step, but its forward and backward alone take 1.40 s"),
        (0.5, 0.2, "the plan predicts 1.00 s a step, but the first ones take 700 ms, with all that lies between"),
    ],
)
def test_only_what_is_off_for_sure_is_said(clock: list[float], compute: float, rest: float, message: str) -> None:
    check = PredictionCheck(PredictedStep(1.0, "By guess."), torch.device("cpu"))
    slow = [(50.0, 50.0)] * SKIPPED_STEPS
    said = told(check, clock, slow + [(compute, rest)] * 3 * NUM_STEPS)
    assert len(said) == bool(message) and all(each.startswith(message) and each.endswith("By guess.") for each in said)
    assert check.is_done


def test_calls_without_a_backward_and_backwards_of_several_calls_are_no_steps(clock: list[float]) -> None:
    check = PredictionCheck(PredictedStep(1.0, ""), torch.device("cpu"))
    for _ in range(5 * NUM_STEPS):  # the loss is looked at, and no more
        check.forward_begins()
        clock[0] += 50.0
    check.backward_ends()
    check.backward_ends()
    assert not check.is_done and told(check, clock, [(1.0, 0.1)] * NUM_STEPS) == []


def test_a_plan_for_other_devices_predicts_nothing_here() -> None:
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    plan = sw.plan(model, sw.Cluster.local(1), x)
    found = predicted_step(plan, sw.Options())
    assert found is not None and found.seconds == plan.step_time
    assert "figures are those of 'local-cpu', and nothing was measured: plan for Cluster.detect()" in found.source
    other = sw.plan(model, sw.Cluster.preset("dgx-a100", nodes=1), torch.ones(8, 8))
    assert predicted_step(other, sw.Options()) is None


class Loss(nn.Module):
    """A layer and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def train(parallel: nn.Module, x: torch.Tensor, count: int, together: bool) -> None:
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    for _ in range(count):
        if together:
            with parallel.no_sync():
                parallel(x).backward()
        parallel(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            parallel(x)


def trains(cache: str, micro_batches: int) -> tuple[list[str], list[str]]:
    """What is said in training with accumulated gradients, which no plan predicts, and then without."""
    x = torch.ones(16, 64)
    plan = sw.plan(Loss(), sw.Cluster.local(2), x, options=sw.Options(micro_batches=micro_batches))
    plan = replace(plan, step_time=3600.0)
    parallel = sw.compile_parallel(Loss(), sw.Cluster.local(2), x, plan=plan)
    said = []
    for together in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(parallel, x, 2 * NUM_STEPS, together)
        said.append([str(each.message) for each in caught if "the plan predicts" in str(each.message)])
    return said[0], said[1]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_rank_zero_says_once_that_steps_are_not_as_predicted(
    pool: WorkerPool, tmp_path: Path, micro_batches: int
) -> None:
    (nothing, said), *others = pool.run(trains, str(tmp_path), micro_batches, nprocs=2)
    assert not nothing and len(said) == 1 and said[0].startswith("the plan predicts 3600 s a step, but the first ones")
    assert others == [([], [])]


def compiles_for_the_running_world(cache: str) -> list[str]:
    """The second door, and without a cluster: Dynamo's modes must not reach what is measured."""
    os.environ["SHARDWEAVE_CACHE"] = cache
    cluster_module.BRIEF = replace(collective_profile.BRIEF, seconds=1.0)  # type: ignore[misc]
    plans: list[sw.Plan] = []
    options = {"inspect": lambda plan, _: plans.append(plan)}
    model = torch.compile(nn.Linear(64, 64), backend="shardweave", options=options)
    model(torch.ones(16, 64)).sum().backward()
    (plan,) = plans
    assert plan.cluster.world_size == dist.get_world_size() and plan.cluster.measured is not None
    return [f"{curve.kind} {curve.members}" for curve in itertools.islice(plan.cluster.measured.collectives.curves, 1)]


def test_torch_compile_plans_for_the_measured_world(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(compiles_for_the_running_world, str(tmp_path), nprocs=2) == [["all_reduce (2, 1)"]] * 2
