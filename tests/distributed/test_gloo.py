"""Gloo groups of one thread: with two, collectives that end together corrupt the heap (torch 2.13)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardweave.distributed.process_groups import RuntimeMesh, allows_concurrent_collectives, single_threaded_gloo
from shardweave.ir import Mesh
from shardweave.runtime.launch import WorkerPool

c10d = torch.ops._c10d_functional


def gather_often(rounds: int, at_once: int) -> list[float]:
    """Many all-gathers of the world's group under way at the same time; the sums of their results."""
    mesh = Mesh.of_levels([("cpu", dist.get_world_size())])
    group = RuntimeMesh(mesh).group_over(mesh.axes)
    part, found = torch.full((16,), 1.0 + dist.get_rank()), set()
    for _ in range(rounds):
        started = [c10d.all_gather_into_tensor(part, group.size(), group.group_name) for _ in range(at_once)]
        found.update(float(c10d.wait_tensor(start).sum()) for start in started)
    return sorted(found)


def gather_often_in_a_users_world(rounds: int, at_once: int) -> tuple[bool, list[float]]:
    """The same where the world was made by torch alone, as under torchrun."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    return allows_concurrent_collectives(dist.group.WORLD), gather_often(rounds, at_once)


def test_many_gathers_of_one_group_at_once(pool: WorkerPool) -> None:
    assert pool.run(gather_often, 600, 20, nprocs=2) == [[48.0]] * 2


def test_the_users_own_world_is_not_used_for_them(pool: WorkerPool) -> None:
    assert pool.run(gather_often_in_a_users_world, 600, 20, nprocs=2) == [(False, [48.0])] * 2


def test_torch_is_left_as_it_was() -> None:
    before = dist.distributed_c10d.ProcessGroupGloo
    with single_threaded_gloo():
        assert dist.distributed_c10d.ProcessGroupGloo is not before
    assert dist.distributed_c10d.ProcessGroupGloo is before
