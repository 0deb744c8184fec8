"""Plans that a second run takes over from the first."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardweave as sw
from shardweave.compiler import plan_cache
from shardweave.compiler.capture import capture
from shardweave.compiler.plan_cache import SWITCH, plan_key, save_plan
from shardweave.ir import Captured
from shardweave.report.progress import Event
from shardweave.runtime.launch import WorkerPool
from shardweave.sharding.annotate import checkpoint_of
from shardweave.sharding.graphs import op_name

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
    assert sorted(path.name.split("-")[0] for path in cache.iterdir()) == ["graph", "plan"]
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


def test_what_was_not_used_for_the_longest_time_is_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles()
    for path in cache.iterdir():
        os.utime(path, (1.0, 1.0))
    first = {*cache.iterdir()}
    monkeypatch.setattr(plan_cache, "MAX_CACHED_FILES", 4)
    compiles(model=Model(width=128))
    assert not compiles()[1]  # which uses the first again
    compiles(model=Model(width=256))
    assert first < {*cache.iterdir()} and len([*cache.iterdir()]) == 4
    monkeypatch.setattr(plan_cache, "MAX_CACHED_BYTES", 1)
    save_plan("key", replace(compiles()[0].plan, planning_seconds=0.0), sw.Options())
    assert [path.name for path in cache.iterdir()] == ["plan-key.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 6}', "\x00\xff"])
def test_a_file_that_is_none_of_ours_is_replaced_after_one_warning(cache: Path, content: str) -> None:
    parallel, _ = compiles()
    (path,) = cache.glob("plan-*")
    path.write_text(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again, planned = compiles()
    assert [str(each.message)[:32] for each in caught] == ["the cached plan is not used, and"]
    assert planned and again.plan.choices == parallel.plan.choices and not compiles()[1]


def test_a_plan_for_another_model_is_not_taken(cache: Path) -> None:
    compiles()
    (path,) = cache.glob("plan-*")
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


class Other(nn.Module):
    """A model whose variants have Dynamo graphs that are alike."""

    def __init__(self, kind: str = "", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(32, 32, dtype=dtype), nn.Linear(32, 32, dtype=dtype)
        self.kind = kind
        if kind == "tied":
            self.two.weight = self.one.weight
        if kind == "frozen":
            self.two.bias.requires_grad_(False)
        if kind == "strides":
            self.two.weight = nn.Parameter(self.two.weight.detach().t().contiguous().t())

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.two(self.one(x)))

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "checkpoint":
            return {"loss": checkpoint(self.inner, x, use_reentrant=False).square().mean()}
        y = Doubled.apply(self.inner(x)) if self.kind == "function" else self.inner(x)
        a, b = y.square().mean(), y.abs().mean().detach()
        if self.kind == "names":
            return {"other": a, "loss": b}
        return {"loss": b, "other": a} if self.kind == "order" else {"loss": a, "other": b}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


@pytest.fixture
def traces(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an item with each call of AOTAutograd."""
    from torch._functorch import aot_autograd

    calls: list[int] = []
    inner = aot_autograd.aot_export_joint_with_descriptors

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    monkeypatch.setattr(aot_autograd, "aot_export_joint_with_descriptors", counted)
    return calls


def described(step: Captured) -> list[object]:
    """All that the package reads of a captured step."""
    nodes = [
        (node.name, node.op, node.target, str((node.args, node.kwargs)), plan_cache._described(node.meta.get("val")),
         op_name(node), bool(checkpoint_of(node)), node.meta.get("stack_trace"), node.meta.get("partitioner_tag"))
        for node in step.graph.graph.nodes
    ]  # fmt: skip
    assert step.call is not None
    return [*nodes, step.parameters, step.inputs, step.outputs, step.gradients, step.aliases, step.call.output_spec]


@pytest.mark.parametrize("kind", ["", "names", "order", "tied", "frozen", "strides", "checkpoint", "function"])
def test_a_saved_graph_is_that_of_its_model(traces: list[int], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    fresh = described(capture(Other(kind), X))
    monkeypatch.setenv(SWITCH, "1")
    capture(Other(), X)
    assert described(capture(Other(kind), X)) == fresh
    known = kind in ("", "names")  # another name in the result changes nothing in the graph
    assert len(traces) == (2 if known else 3)
    assert described(capture(Other(kind), X)) == fresh
    parallel: Any = sw.compile_parallel(Other(kind), sw.Cluster.local(1), X)
    alone = Other(kind)
    (result,) = (value for value in parallel(X).values() if value.requires_grad)
    result.backward()
    (expected,) = (value for value in alone(X).values() if value.requires_grad)
    expected.backward()
    torch.testing.assert_close(parallel.one.weight.grad, alone.one.weight.grad)
    assert len(traces) == (2 if known else 3)


def test_ops_of_a_saved_graph_are_decomposed_on_their_own_arguments(traces: list[int]) -> None:
    """The vectors of a batch norm have one shape, and nodes of a saved graph share their fake values by shape."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0)).double()

    x = torch.randn(16, 32, dtype=torch.float64)
    alone: nn.Module = model()
    alone(x).sum().backward()
    for _ in range(2):
        parallel: Any = sw.compile_parallel(model(), sw.Cluster.local(1), x)
        parallel(x).sum().backward()
        for mine, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        torch.testing.assert_close(parallel[1].running_mean, alone.get_buffer("1.running_mean"))
    assert len(traces) == 1


def test_what_a_joint_graph_depends_on_is_in_its_key(traces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    capture(Model(), X)
    capture(Model(), X)
    assert len(traces) == 1
    capture(Model(slope=2.0), X)
    capture(Model(width=128), X)
    capture(Model(), torch.ones(8, 32))
    capture(Model().double(), X.double())
    with torch.autocast("cpu"):
        capture(Model(), X)
    assert len(traces) == 6
    monkeypatch.setattr(torch.version, "git_version", "another")
    capture(Model(), X)
    monkeypatch.undo()


def test_a_graph_with_what_no_key_covers_is_not_saved(traces: list[int], cache: Path) -> None:
    class Custom(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.shardweave_tests.scaled(super().forward(x))

    library = torch.library.Library("shardweave_tests", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", lambda x: x * 2, "CompositeImplicitAutograd")
    capture(Custom(), X)
    capture(Custom(), X)
    assert len(traces) == 2 and not [*cache.iterdir()]


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["SHARDWEAVE_CACHE"] + "/executed",)


def bad_files() -> dict[str, bytes]:
    body = pickle.dumps(Payload())
    signed = plan_cache._HEADER + hashlib.sha256(body).digest()
    return {"empty": b"", "foreign": b"\x00\xff" * 99, "code": signed + body, "torn": (signed + body)[:-4]}


@pytest.mark.parametrize("name", [*bad_files(), "half"])
def test_a_graph_file_that_is_none_of_ours_is_replaced_after_one_warning(
    traces: list[int], cache: Path, name: str
) -> None:
    first = capture(Model(), X)
    (path,) = cache.iterdir()
    path.write_bytes(bad_files()[name] if name != "half" else path.read_bytes()[:1000])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = capture(Model(), X)
    assert ["the cached graph" in str(each.message) for each in caught] == [True]
    assert described(again) == described(first) and len(traces) == 2 and [*cache.iterdir()] == [path]
    capture(Model(), X)
    assert len(traces) == 2


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owner here")
def test_a_graph_file_that_others_may_write_is_not_read(traces: list[int], cache: Path) -> None:
    capture(Model(), X)
    (path,) = cache.iterdir()
    path.chmod(0o666)
    with pytest.warns(UserWarning, match="another user owns it or may write it"):
        capture(Model(), X)
    assert len(traces) == 2


def test_the_cache_of_graphs_can_be_switched_off(
    traces: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    capture(Model(), X)
    capture(Model(), X)
    assert len(traces) == 2 and not [*cache.iterdir()]
