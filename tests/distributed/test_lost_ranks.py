"""Ranks that end, hang or fail: the others raise one clear error in time, which names the rank and the cause."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.distributed import agreement
from shardweave.distributed import failures as lost_ranks
from shardweave.ir.errors import LostRankError, ParallelError
from shardweave.runtime import module_tree as state
from shardweave.runtime.launch import WorkerPool
from tests.runtime.worlds import World, die, stop

X = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TIMEOUT = 3.0


class Model(nn.Module):
    """Two layers and a loss."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


@pytest.fixture(scope="module")
def plan() -> Callable[[int], sw.Plan]:
    """ZeRO-3, so that forward and backward have collectives."""
    made: dict[int, sw.Plan] = {}

    def of(ranks: int) -> sw.Plan:
        if ranks not in made:
            made[ranks] = sw.plan(Model(), sw.Cluster.local(ranks), X, options=sw.Options(force={"*": "zero3"}))
        return made[ranks]

    return of


def compiled(plan: sw.Plan, model: nn.Module | None = None, **options: Any) -> Any:
    asked = sw.Options(force={"*": "zero3"}, **options)
    return sw.compile_parallel(model or Model(), plan.cluster, X, plan=plan, options=asked)


def lost(call: Callable[[], Any]) -> tuple[str, float]:
    """The message of the LostRankError of a call, and its seconds."""
    begun = time.monotonic()
    with pytest.raises(LostRankError) as caught:
        call()
    assert isinstance(caught.value.__cause__, RuntimeError | LostRankError)
    return str(caught.value), time.monotonic() - begun


def lose_in_training(plan: sw.Plan, where: str, lose: Callable[[], None], last: int, folder: Path) -> Any:
    """Lose a rank before it calls the model, and in the collectives of the forward and backward that follow."""
    parallel = compiled(plan, check_inputs="never" if where == "forward" else 3)
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel(X).backward()
    optimizer.step()
    loss = parallel(X) if where == "backward" else None
    if dist.get_rank() == last:
        lose()
    message, seconds = lost(loss.backward if loss is not None else lambda: parallel(X))
    again = [
        lost(lambda: parallel(X)),
        lost(lambda: sw.save_checkpoint(folder, parallel, optimizer)),
        lost(lambda: compiled(plan)),
    ]
    return message, seconds, again


def check_training(world: World, where: str, last: int, how: str, ranks: list[int], most: float) -> None:
    for rank, (message, seconds, again) in zip(ranks, world.results(ranks), strict=True):
        if where == "call":
            assert f"rank {rank} could not finish agreeing on a call of the model, a collective of ranks " in message
        else:
            assert f"rank {rank} could not finish the all_gather of " in message or "the reduce_scatter of " in message
            assert f"in the {where}" in message and "a collective of ranks " in message and "axes cpu0" in message
        assert f"rank {last} (process {world.ranks[last].pid} on " in message and how in message
        assert "from its last checkpoint" in message and seconds < most
        assert all(f"a rank was lost before: rank {rank} could" in text and took < 2.0 for text, took in again)


@pytest.mark.parametrize("where", ["call", "forward", "backward"])
def test_a_killed_rank_is_named(plan: Callable[[int], sw.Plan], tmp_path: Path, where: str) -> None:
    with World(lose_in_training, plan(3), where, die, 1, tmp_path / "saved", size=3) as world:
        check_training(world, where, 1, "has ended", [0, 2], 20.0)


@pytest.mark.parametrize("where", ["call", "forward", "backward"])
def test_a_stopped_rank_is_named_after_the_timeout(
    plan: Callable[[int], sw.Plan], tmp_path: Path, where: str
) -> None:
    with World(lose_in_training, plan(2), where, stop, 0, tmp_path / "saved", size=2, timeout=TIMEOUT) as world:
        check_training(world, where, 0, "is stopped and does not answer", [1], 4 * TIMEOUT)


def stop_in(plan: sw.Plan, stage: str, last: int, folder: Path) -> tuple[str, float]:
    """One rank stops before, or in, a stage that the others begin."""
    mine = dist.get_rank() == last

    def halt(owner: Any, name: str) -> None:
        assert hasattr(owner, name)
        if mine:
            setattr(owner, name, lambda *_, **__: stop())

    if stage == "planning":  # rank 0's
        halt(Compiler, "plan")
        return lost(lambda: sw.compile_parallel(Model(), plan.cluster, X, options=sw.Options(timeout=TIMEOUT)))
    if stage == "placing":
        halt(state, "_distributed")
        return lost(lambda: compiled(plan, timeout=timedelta(seconds=TIMEOUT)))
    parallel = compiled(plan, timeout=TIMEOUT)
    if stage == "load_checkpoint":
        sw.save_checkpoint(folder, parallel)
    if mine:
        stop()
    if stage == "initialise":
        return lost(lambda: sw.initialise(parallel, Model()))
    if stage == "load_checkpoint":
        return lost(lambda: sw.load_checkpoint(folder, parallel))
    return lost(lambda: sw.save_checkpoint(folder, parallel))


@pytest.mark.parametrize("stage", ["planning", "placing", "initialise", "save_checkpoint", "load_checkpoint"])
def test_every_stage_ends_after_the_timeout_of_the_options(
    plan: Callable[[int], sw.Plan], tmp_path: Path, stage: str
) -> None:
    with World(stop_in, plan(2), stage, 0, tmp_path / "saved", size=2, timeout=300.0) as world:
        [(message, seconds)] = world.results([1])
    assert "rank 1 could not finish" in message and f"within {TIMEOUT:g} s" in message
    assert "rank 0 (process" in message and "is stopped and does not answer" in message
    assert seconds < 10 * TIMEOUT


def plan_slowly(cluster: sw.Cluster) -> float:
    original = Compiler.plan

    def slow(compiler: Compiler) -> sw.Plan:
        time.sleep(2.5 * TIMEOUT)
        return original(compiler)

    Compiler.plan = slow  # type: ignore[method-assign,assignment]
    parallel = sw.compile_parallel(Model(), cluster, X)
    return float(parallel(X))


def test_planning_may_take_longer_than_the_timeout() -> None:
    with World(plan_slowly, sw.Cluster.local(2), size=2, timeout=TIMEOUT) as world:
        assert world.results([0, 1]) == pytest.approx([Model()(X).item()] * 2, rel=1e-12)


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(ParallelError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


class Unlike(Model):
    """Cannot be captured on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("not on this rank")
        return super().forward(x)


def failures(made: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Whatever fails on one rank, as it is told on this one. The world can still be used afterwards."""
    plan = sw.Plan.from_dict(made)
    rank, cluster = dist.get_rank(), plan.cluster
    found: dict[str, tuple[str, str]] = {}

    def compile_(model: nn.Module | None = None, inputs: Tensor = X, **options: Any) -> Any:
        return sw.compile_parallel(model or Model(), cluster, inputs, options=sw.Options(**options))

    found["capture"] = raised(lambda: compile_(Unlike()))
    found["options"] = raised(lambda: compile_(time_limit=10.0 + (rank == 1)))
    found["model"] = raised(lambda: compile_(Model(12 - 2 * (rank == 1))))
    found["inputs"] = raised(lambda: compile_(inputs=X[: 12 - 6 * (rank == 2)]))
    found["plan"] = raised(lambda: compiled(plan, Model(12 - 2 * (rank == 1))))
    found["limit"] = raised(lambda: compile_(memory_limit=1000))

    original = Compiler.plan
    if rank == 0:
        Compiler.plan = lambda *_: {}["a key"]  # type: ignore[method-assign,assignment]
    found["planning"] = raised(compile_)
    Compiler.plan = original  # type: ignore[method-assign]

    original_lower = Compiler.lower
    if rank == 2:
        Compiler.lower = lambda *_: 1 // 0  # type: ignore[method-assign,assignment]
    found["lowering"] = raised(lambda: compiled(plan))
    with_backend = torch.compile(Model(), backend="shardweave", options={"cluster": cluster})
    found["backend"] = raised(lambda: with_backend(X))
    Compiler.lower = original_lower  # type: ignore[method-assign]

    parallel = compiled(plan)

    def init(module: nn.Module) -> None:
        if rank == 1 and isinstance(module, nn.Linear):
            raise RuntimeError("no numbers today")
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    found["initialise"] = raised(lambda: sw.initialise(parallel, Model(), init=init))
    found["load_weights"] = raised(lambda: sw.load_weights(nn.Linear(2, 2) if rank == 1 else parallel, "/nowhere"))
    return found


def test_what_fails_on_one_rank_is_raised_on_all(pool: WorkerPool, plan: Callable[[int], sw.Plan]) -> None:
    told = pool.run(failures, plan(3).to_dict(), nprocs=3, timeout=100.0)
    assert all(other == told[0] for other in told)
    expected = {
        "capture": ("CaptureError", ["the capture of the model failed on rank 1: ", "not on this rank"]),
        "options": ("ParallelError", ["time_limit is 10.0 on rank 0 and 11.0 on rank 1"]),
        "model": ("ParallelError", ["parameter up.weight has shape (12, 8) on rank 0 and (10, 8) on rank 1"]),
        "inputs": ("ParallelError", ["input x has shape (12, 8) on rank 0 and (6, 8) on rank 2"]),
        "plan": ("PlanError", ["the capture of the model failed on rank 1: ", "up.weight", "(10, 8)"]),
        "limit": ("InfeasibleError", ["memory"]),
        "planning": ("ParallelError", ["planning failed on rank 0: KeyError: 'a key'"]),
        "lowering": ("ParallelError", ["generating the step failed on rank 2: ZeroDivisionError: "]),
        "backend": ("ParallelError", ["generating the step failed on rank 2: ZeroDivisionError: "]),
        "load_weights": ("ParallelError", ["load_weights failed on rank 1: expected what compile_parallel returns"]),
        "initialise": ("ParallelError", ["initialise failed on rank 1: RuntimeError: no numbers today"]),
    }
    for name, (kind, words) in expected.items():
        found, message = told[0][name]
        assert found == kind and all(word in message for word in words), (name, found, message)


def fail_between_collectives(plan: sw.Plan) -> str:
    """Rank 1 has no memory for a parameter that the others wait for."""
    original, calls = state._distributed, []

    def place(*args: Any) -> Tensor:
        calls.append(args)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise MemoryError("the device is full")
        return original(*args)

    state._distributed = place
    _, message = raised(lambda: compiled(plan))
    state._distributed = original
    assert float(compiled(plan)(X)) == pytest.approx(Model()(X).item(), rel=1e-12), "all ranks are there: go on"
    return message


def test_a_failure_between_two_collectives_reaches_the_ranks_that_wait(plan: Callable[[int], sw.Plan]) -> None:
    with World(fail_between_collectives, plan(2), size=2, timeout=600.0) as world:
        for message in world.results([0, 1], within=100.0):
            assert message == "placing the parameters failed on rank 1: MemoryError: the device is full"


def talks_to_nobody() -> None:
    assert agreement.control() is None


def test_one_rank_agrees_with_itself(pool: WorkerPool) -> None:
    pool.run(talks_to_nobody, nprocs=1)
    assert agreement.run_on_all_ranks(None, "alone", lambda: 3) == [3]


def elsewhere(plan: sw.Plan) -> str:
    """Rank 1 stops, and is on another machine as far as rank 0 can see."""
    parallel = compiled(plan)
    if dist.get_rank() == 1:
        stop()
    world = dist.group.WORLD
    assert world is not None
    here = lost_ranks._processes[world][0]
    lost_ranks._processes[world] = (here, lost_ranks.RankProcess("host-b", "another machine", 7, "0"))
    return lost(lambda: parallel(X))[0]


def test_of_a_rank_on_another_host_its_host_is_named(plan: Callable[[int], sw.Plan]) -> None:
    with World(elsewhere, plan(2), size=2, timeout=TIMEOUT) as world:
        [message] = world.results([0])
    assert "rank 1 on host-b has ended, hangs, or cannot be reached: look there" in message


SCRIPT = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
import shardweave as sw
dist.init_process_group("gloo", timeout=timedelta(seconds=4))
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4)), torch.ones(4, 8)
parallel = sw.compile_parallel(model, sw.Cluster.local(2), x, options=sw.Options(force={"*": "zero3"}))
parallel(x).sum().backward()
if dist.get_rank() == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
parallel(x).sum().backward()
"""


def test_a_program_that_lost_a_rank_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py")],
            env={**shared, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, error = processes[1].communicate(timeout=150)
        assert processes[1].returncode == 1
        assert "shardweave.ir.errors.LostRankError: rank 1 could not finish" in error
        assert f"rank 0 (process {processes[0].pid} on " in error
    finally:
        for process in processes:
            process.kill()
            process.communicate()
