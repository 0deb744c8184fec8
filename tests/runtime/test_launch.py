"""Launching local ranks: results in order, and every kind of failure as one clear error."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from shardweave.ir.errors import LaunchError
from shardweave.runtime.launch import WorkerPool, launch


def summed(value: float) -> tuple[int, float]:
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def process(_: int = 0) -> int:
    return os.getpid()


def threads() -> int:
    return torch.get_num_threads()


def cores() -> set[int]:
    return os.sched_getaffinity(0)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the weights are gone")
    dist.barrier()


def die_on_two() -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave() -> None:
    os._exit(3)


def wait_for_ever() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()


def unpicklable() -> object:
    return lambda: 1


def tensors() -> torch.Tensor:
    return torch.full((2,), float(dist.get_rank()))


@pytest.mark.parametrize("nprocs", [1, 2, 8])
def test_results_come_in_the_order_of_ranks(pool: WorkerPool, nprocs: int) -> None:
    total = sum(range(1, nprocs + 1)) * 2.0
    assert pool.run(summed, 2.0, nprocs=nprocs) == [(rank, total) for rank in range(nprocs)]


def test_tensors_come_back(pool: WorkerPool) -> None:
    assert torch.stack(pool.run(tensors, nprocs=2)).tolist() == [[0, 0], [1, 1]]


def test_every_run_has_fresh_processes_of_one_thread(pool: WorkerPool) -> None:
    first, second = pool.run(process, nprocs=2), pool.run(process, nprocs=2)
    assert len({*first, *second, os.getpid()}) == 5
    assert pool.run(threads, nprocs=1) == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are not kept to cores")
@pytest.mark.parametrize("nprocs", [1, 4])
def test_ranks_that_share_cores_keep_to_one_each(pool: WorkerPool, nprocs: int) -> None:
    ours = sorted(cores())
    shared = [{ours[rank % len(ours)]} for rank in range(nprocs)]
    assert pool.run(cores, nprocs=nprocs) == (shared if nprocs >= len(ours) else [set(ours)] * nprocs)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (fail_on_one, ["rank 1 of 4", "ValueError: the weights are gone", "fail_on_one"]),
        (die_on_two, ["rank 2 of 4", "SIGKILL"]),
        (leave, ["exit status 3"]),
        (unpicklable, ["function", "cannot be pickled", "plain values and tensors"]),
    ],
)
def test_a_failing_rank_is_named_and_the_pool_survives(pool: WorkerPool, fn: object, words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        pool.run(fn, nprocs=4)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)
    assert pool.run(summed, 1.0, nprocs=2) == [(0, 3.0), (1, 3.0)]


def test_ranks_that_hang_are_ended(pool: WorkerPool) -> None:
    with pytest.raises(LaunchError, match="after 1 s rank 0, 1 of 2 is not done"):
        pool.run(wait_for_ever, nprocs=2, timeout=1.0)


def test_what_cannot_be_sent_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(LaunchError, match="importable by name"):
        pool.run(lambda: 1)
    with pytest.raises(LaunchError, match="at least 1"):
        pool.run(summed, 1.0, nprocs=0)


def test_launch_runs_functions_of_a_module() -> None:
    assert launch(summed, nprocs=2, args=(1.0,)) == [(0, 3.0), (1, 3.0)]


def test_launch_runs_functions_that_cannot_be_imported() -> None:
    """As in a notebook's cell; also after this process has run a backward."""
    offset = torch.ones(2, requires_grad=True)
    torch.autograd.backward(offset.sum())
    assert launch(lambda: (offset.detach() + dist.get_rank()).tolist(), nprocs=2) == [[1, 1], [2, 2]]
    with pytest.raises(LaunchError, match=r"rank \d of 2 failed: ZeroDivisionError"):
        launch(lambda: 1 / 0, nprocs=2)
