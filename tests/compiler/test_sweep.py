"""Planning again: with other options, under other limits, on other clusters."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardweave as sw
from shardweave.compiler import compiler


def mlp() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        layers = (nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 8))
        return nn.Sequential(*layers), torch.zeros(64, 256)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each capture that is made."""
    made: list[str] = []
    capture = compiler.capture

    def counted(*args: Any) -> Any:
        made.append("capture")
        return capture(*args)

    monkeypatch.setattr(compiler, "capture", counted)
    return made


def test_a_plan_is_resolved_with_a_constraint_added(captures: list[str]) -> None:
    model, inputs = mlp()
    plan = sw.plan(model, sw.Cluster.local(4), inputs, options=sw.Options(force={"0": "column:4"}))
    again = plan.resolve(force={"2": "zero3"})
    assert captures == ["capture"]
    assert (again.choices["0"].strategy.grid.x, again.choices["2"].strategy.rest) == (4, 4)
    assert again.forced == ("0", "2") and again.program_time >= plan.program_time
    smaller = again.resolve(memory_limit=again.peak_memory)
    assert smaller.memory_limit == again.peak_memory and smaller.forced == again.forced
    assert captures == ["capture"]


def test_resolving_says_what_it_cannot_change(tmp_path: Path) -> None:
    model, inputs = mlp()
    plan = sw.plan(model, sw.Cluster.local(2), inputs)
    with pytest.raises(sw.PlanError, match="not memory_limits: plan anew"):
        plan.resolve(memory_limits=3)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(sw.PlanError, match="loaded cannot be resolved"):
        sw.Plan.load(tmp_path / "plan.json").resolve(memory_limit=10**9)


def test_a_sweep_of_memory_goes_from_the_fastest_plan_to_the_smallest(captures: list[str], tmp_path: Path) -> None:
    model, _ = mlp()
    inputs = torch.zeros(512, 256)  # of 64 samples the fastest plan is the smallest, but for 32 bytes
    found = sw.plan(model, sw.Cluster.local(4), inputs, sweep="memory")
    assert captures == ["capture"]
    assert all(point.plan is not None for point in found.points)
    limits = [point.memory_limit for point in found.points[1:]]
    assert limits == sorted(limits, reverse=True)
    with pytest.raises(sw.InfeasibleError):
        sw.plan(model, sw.Cluster.local(4), inputs, options=sw.Options(memory_limit=limits[-1] - 1))
    for plan in found.plans:
        assert plan.peak_memory <= plan.memory_limit
    curve = found.pareto
    assert len(curve) > 1
    for smaller, larger in pairwise(curve):
        assert smaller.peak_memory <= larger.peak_memory and smaller.step_time > larger.step_time
    assert found.best in curve
    found.plot(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 1000
    assert str(found.explain()).count("*") >= len(curve)


def test_a_plan_of_less_memory_is_one_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found by chance under a smaller limit is not lost under a larger one."""
    model, inputs = mlp()
    plan = sw.plan(model, sw.Cluster.local(4), inputs)
    times = {10**9: 2.0, 10**8: 1.0, 10**7: 3.0}

    def planned(one: compiler.Compiler, start: sw.Plan | None = None) -> sw.Plan:
        limit = one.options.limit(one.cluster)
        return replace(plan, memory_limit=limit, peak_memory=limit // 2, step_time=times[limit])

    monkeypatch.setattr(compiler.Compiler, "plan", planned)
    found = sw.plan(model, plan.cluster, inputs, sweep=[*times])
    assert [point.plan and point.plan.step_time for point in found.points] == [1.0, 1.0, 3.0]
    assert [point.plan and point.plan.memory_limit for point in found.points] == [*times]
    assert found.best.step_time == 1.0


def test_a_sweep_of_limits_says_where_nothing_fits() -> None:
    model, inputs = mlp()
    found = sw.plan(model, sw.Cluster.local(2), inputs, sweep=[10**9, 1])
    assert [point.plan is None for point in found.points] == [False, True]
    assert "smallest memory" in found.points[1].reason and "nothing fits" in str(found.explain())


def test_a_sweep_of_clusters_finds_the_best_shape() -> None:
    model, inputs = mlp()
    clusters = [sw.Cluster.preset("dgx-a100", nodes=1), sw.Cluster.preset("rtx3090-pcie", nodes=1)]
    found = sw.plan(model, clusters[0], inputs, sweep=clusters)
    assert [plan.cluster.name for plan in found.plans] == [cluster.name for cluster in clusters]
    assert found.best.step_time == min(plan.step_time for plan in found.plans)


@pytest.mark.parametrize("what", ["time", []])
def test_what_is_no_sweep_is_refused(what: Any) -> None:
    model, inputs = mlp()
    with pytest.raises(sw.PlanError, match="sweep must be"):
        sw.plan(model, sw.Cluster.local(2), inputs, sweep=what)


def batch_of(size: int) -> torch.Tensor:
    return torch.zeros(size, 256, device="meta")


def assert_best_of_all(found: sw.Sweep, options: sw.Options) -> None:
    """Its batch size is the best that was looked at, planned as it would be alone, and none between them is missed."""
    cluster, fits = found.points[0].cluster, [point for point in found.points if point.plan is not None]
    best = min(fits, key=lambda point: point.seconds)
    assert (found.batch, found.best) == (best.batch, best.plan) and found.best.tokens == found.batch >= 40
    assert all(point.memory <= point.memory_limit == options.memory_limit for point in fits)
    options = replace(options, micro_batches=1)
    alone = sw.plan(mlp()[0], cluster, batch_of(found.batch), options=options)
    assert alone.step_time == pytest.approx(found.best.step_time)
    for size in range(8, fits[-1].batch + 1, 20):
        other = sw.plan(mlp()[0], cluster, batch_of(size), options=options)
        assert best.seconds <= 1.05 * other.step_time / size


def test_an_open_batch_size_is_the_one_of_which_a_sample_takes_the_least_time(tmp_path: Path) -> None:
    """Of plans with whole parameters: that memory ends, as no other strategy takes less."""
    model, cluster, force = mlp()[0], sw.Cluster.local(4), {"*": "dp"}
    limit = sw.plan(model, cluster, batch_of(40), options=sw.Options(force=force)).peak_memory
    options = sw.Options(memory_limit=limit, recompute="none", force=force)
    found = sw.plan(model, cluster, batch_of, options=options, sweep="batch")
    sizes = [point.batch for point in found.points]
    assert sizes == sorted(set(sizes)) and sizes[0] == cluster.world_size
    fits = [point for point in found.points if point.plan is not None]
    assert all("smallest memory" in point.reason for point in found.points if point.plan is None)
    # Between the largest that fits and the smallest that does not lies no other that each device has a part of
    assert [point.plan is None for point in found.points] == sorted(point.plan is None for point in found.points)
    assert len(fits) < len(sizes) and sizes[len(fits)] - fits[-1].batch <= max(cluster.world_size, fits[-1].batch // 4)
    assert_best_of_all(found, options)
    assert str(found.batch) in str(found.explain())
    found.plot(tmp_path / "batches.png")
    assert (tmp_path / "batches.png").stat().st_size > 0


def test_where_memory_makes_a_larger_batch_slower_the_best_is_between_the_two() -> None:
    """Doubling ended there, with a batch of which a sample takes 32 % longer than of the best."""
    model, cluster = mlp()[0], sw.Cluster.local(4)
    limit = sw.plan(model, cluster, batch_of(40)).peak_memory
    options = sw.Options(memory_limit=limit, recompute="none")
    found = sw.plan(model, cluster, batch_of, options=options, sweep="batch")
    assert all(point.plan is not None for point in found.points)
    assert found.batch < found.points[-1].batch
    assert_best_of_all(found, options)


def test_a_batch_that_is_larger_than_memory_is_halved_first() -> None:
    model, cluster = mlp()[0], sw.Cluster.local(8)
    limit = sw.plan(model, cluster, batch_of(2), options=sw.Options(micro_batches=1)).peak_memory
    found = sw.plan(model, cluster, batch_of, options=sw.Options(memory_limit=limit), sweep="batch")
    assert found.points[0].batch <= 8 and found.best.peak_memory <= limit
    with pytest.raises(sw.InfeasibleError, match="none of"):
        _ = sw.plan(model, cluster, batch_of, options=sw.Options(memory_limit=1), sweep="batch").best


def test_twice_the_batch_is_planned_as_long_as_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sw.plan(mlp()[0], sw.Cluster.local(2), batch_of(2))
    asked = []

    def planned(one: compiler.Compiler) -> sw.Plan:
        (shape,) = one.model_key.inputs.values()
        asked.append(size := shape[0])
        return replace(plan, step_time=size * (1.0 + 1.0 / size if size < 32 else 2.0))

    monkeypatch.setattr(compiler.Compiler, "plan", planned)
    found = sw.plan(mlp()[0], plan.cluster, batch_of, sweep="batch")
    assert asked == [2, 4, 8, 16, 32, 24, 28, 30] and found.batch == 30


@pytest.mark.parametrize(("inputs", "sweep"), [(batch_of, None), (batch_of, "memory"), (batch_of(4), "batch")])
def test_an_open_batch_size_needs_a_function(inputs: Any, sweep: Any) -> None:
    with pytest.raises(sw.PlanError, match="lambda size"):
        sw.plan(mlp()[0], sw.Cluster.local(2), inputs, sweep=sweep)
