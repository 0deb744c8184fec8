"""Plans that a second run takes over from the first."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardweave as sw
from shardweave.compiler import plan_cache
from shardweave.compiler.capture import capture
from shardweave.compiler.plan_cache import SWITCH, plan_key, save_plan
from shardweave.report.progress import Event
from shardweave.runtime.launch import WorkerPool

X = torch.ones(16, 32)


class Model(nn.Module):
    def __init__(self, width: int = 64, slope: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.slope = nn.Linear(32, width), nn.Linear(width, 32), slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)) * self.slope).square().mean()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWEAVE_CACHE", str(tmp_path))
    monkeypatch.setenv(SWITCH, "1")
    return tmp_path


def compiles(model: nn.Module | None = None, **options: Any) -> tuple[Any, bool]:
    """The parallel module, and whether a plan was made for it."""
    stages: list[str] = []

    def told(event: Event) -> None:
        stages.append(event.stage)

    world = sw.Cluster.local(torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
    parallel = sw.compile_parallel(model or Model(), world, X, options=sw.Options(**options), progress=told)
    return parallel, "solve" in stages


def test_a_second_run_takes_the_plan_of_the_first(cache: Path) -> None:
    parallel, planned = compiles()
    again, planned_again = compiles()
    assert planned and not planned_again and again.plan == parallel.plan
    assert again.plan.timeline().step_time == pytest.approx(again.plan.step_time)
    assert again.plan.resolve(force={"up": "dp"}).choices["up"].strategy.degree == 1
    assert [path.name for path in cache.iterdir()] == [path.name for path in cache.glob("plan-*.json")]
    torch.testing.assert_close(again(X), parallel(X))


def test_what_a_plan_depends_on_is_in_its_key(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles()
    assert not compiles(timeout=60.0)[1], "how long ranks wait is no part of a plan"
    assert not compiles(model=Model())[1]
    assert compiles(memory_limit=2**30)[1]
    assert compiles(model=Model(width=128))[1]
    assert compiles(model=Model(slope=2.0))[1]
    frozen = Model()
    frozen.up.requires_grad_(False)
    assert compiles(model=frozen)[1]
    monkeypatch.setattr(plan_cache, "version", lambda package: "another")
    assert compiles()[1]
    assert len([*cache.glob("plan-*.json")]) == 6


def test_the_cache_can_be_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles()
    monkeypatch.setenv(SWITCH, "0")
    assert compiles()[1]


def test_a_plan_that_time_ended_is_not_saved(cache: Path) -> None:
    plan = compiles()[0].plan
    for path in cache.iterdir():
        path.unlink()
    save_plan("key", replace(plan, planning_seconds=9.0), sw.Options(time_limit=8.0))
    assert not [*cache.iterdir()]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 6}', "\x00\xff"])
def test_a_file_that_is_none_of_ours_is_replaced_after_one_warning(cache: Path, content: str) -> None:
    parallel, _ = compiles()
    (path,) = cache.iterdir()
    path.write_text(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again, planned = compiles()
    assert [str(each.message)[:32] for each in caught] == ["the cached plan is not used, and"]
    assert planned and again.plan.choices == parallel.plan.choices and not compiles()[1]


def test_a_plan_for_another_model_is_not_taken(cache: Path) -> None:
    compiles()
    (path,) = cache.iterdir()
    other = compiles(model=Model(width=128))[0].plan
    path.write_text("")
    other.save(path)
    with pytest.warns(UserWarning, match="the cached plan is not used, and made again: .*up"):
        assert compiles()[1]


def ranks_compile(folder: str) -> tuple[bool, float]:
    os.environ["SHARDWEAVE_CACHE"] = folder
    os.environ[SWITCH] = "1"
    parallel, planned = compiles()
    loss = parallel(X)
    loss.backward()
    return planned, loss.item()


def test_rank_zero_takes_it_for_all(pool: WorkerPool, tmp_path: Path) -> None:
    first = pool.run(ranks_compile, str(tmp_path), nprocs=2)
    second = pool.run(ranks_compile, str(tmp_path), nprocs=2)
    assert first[0][0] and not second[0][0]
    assert [loss for _, loss in first] == [loss for _, loss in second] == pytest.approx([Model()(X).item()] * 2)


KEY = """
from tests.compiler.test_plan_cache import *
print(plan_key(capture(Model(), X), sw.Cluster.local(2), sw.Options(force={"up": "dp"}, recompute={"*": "full"})))
"""


def test_a_key_is_the_same_in_each_process() -> None:
    keys = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", KEY], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        keys.add(done.stdout.strip())
    options = sw.Options(force={"up": "dp"}, recompute={"*": "full"})
    assert keys == {plan_key(capture(Model(), X), sw.Cluster.local(2), options)}
