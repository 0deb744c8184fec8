"""Gloo groups of one thread (with two, collectives that end together corrupt the heap in torch 2.13); direct sends."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from shardweave.distributed.gloo import (
    allows_concurrent_collectives,
    exchange,
    gather,
    sends_directly,
    single_threaded_gloo,
)
from shardweave.distributed.process_groups import RuntimeMesh
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


def direct_and_by_torch(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """What several exchanges and gathers under way at once give, and what torch's collectives give."""
    mesh = Mesh.of_levels([("cpu", dist.get_world_size())])
    group = RuntimeMesh(mesh).group_over(mesh.axes)
    rank, size, name = group.rank(), group.size(), group.group_name
    # What rank i sends to rank j has i * j rows: the first rank sends and gets nothing.
    sizes = [rank * other for other in range(size)]
    values = [torch.arange(sum(sizes) * 3).view(-1, 3).add(100 * rank + turn).to(dtype) for turn in range(3)]
    values[1] = values[1].t().contiguous().t()  # the columns are whole in memory, not the rows
    mine = [x.new_full((2, 3), rank) if turn else x.new_full((3, 2), rank).t() for turn, x in enumerate(values)]
    started = [(exchange(x, sizes, sizes, name), gather(own, name)) for x, own in zip(values, mine, strict=True)]
    ours = [c10d.wait_tensor(start) for pair in started for start in pair]
    theirs = []
    for x, own in zip(values, mine, strict=True):
        theirs.append(c10d.wait_tensor(c10d.all_to_all_single(x, sizes, sizes, name)))
        theirs.append(c10d.wait_tensor(c10d.all_gather_into_tensor(own, size, name)))
    return list(zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_direct_sends_give_what_torchs_collectives_give(dtype: torch.dtype, pool: WorkerPool) -> None:
    for pairs in pool.run(direct_and_by_torch, dtype, nprocs=3):
        for ours, theirs in pairs:
            assert ours.dtype is dtype and torch.equal(ours, theirs)


def bound_reductions(placement: list[tuple[str, int]]) -> list[tuple[list[str], Tensor]]:
    """The ops of bound graphs that reduce by a sum and by a maximum, and what each gives."""
    mesh = Mesh.of_levels(placement)
    runtime, found = RuntimeMesh(mesh), []
    for op in ("sum", "max"):
        graph = fx.Graph()
        args = graph.placeholder("x"), op, mesh.world_size, ".".join(axis.name for axis in mesh.axes)
        start = graph.call_function(c10d.reduce_scatter_tensor.default, args)
        wait = graph.call_function(c10d.wait_tensor.default, (start,))
        graph.output((wait, graph.call_function(torch.add, (wait, 1))))
        bound = runtime.bind(fx.GraphModule(torch.nn.Module(), graph))
        part, and_one = bound(torch.arange(4 * mesh.world_size).view(-1, 2) * (1 + runtime.rank))
        assert torch.equal(part + 1, and_one)
        called = [node for node in bound.graph.nodes if node.op == "call_function"]
        found.append(([getattr(node.target, "__name__", "") for node in called], part))
    return found


def test_a_sum_is_sent_directly_and_a_maximum_is_not(pool: WorkerPool) -> None:
    for rank, found in enumerate(pool.run(bound_reductions, [("cpu", 2)], nprocs=2)):
        (summing, total), (comparing, largest) = found
        assert summing == ["unflatten", "exchange", "wait_tensor.default", "sum_of_parts", "add"]
        assert comparing == ["reduce_scatter_tensor.default", "wait_tensor.default", "add"]
        own = torch.arange(4 * rank, 4 * rank + 4).view(2, 2)
        assert torch.equal(total, 3 * own) and torch.equal(largest, 2 * own)


def direct_kinds(placement: list[tuple[str, int]]) -> set[str]:
    """The kinds of collectives over all ranks that are sent directly."""
    mesh = Mesh.of_levels(placement)
    group = RuntimeMesh(mesh).group_over(mesh.axes)
    kinds = "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
    return {kind for kind in kinds if sends_directly(kind, mesh.axes, group)}


@pytest.mark.parametrize(
    ("placement", "direct"),
    [
        ([("node", 2)], {"all_gather", "reduce_scatter", "all_to_all"}),
        ([("cpu", 4)], {"all_gather", "reduce_scatter", "all_to_all"}),
        ([("cpu", 2), ("node", 2)], {"reduce_scatter", "all_to_all"}),
        ([("cpu", 4), ("node", 2)], {"all_to_all"}),
    ],
    ids=["2 nodes of 1", "one node", "2 nodes of 2", "2 nodes of 4"],
)
def test_members_behind_one_link_send_directly_what_loads_it_no_more_than_a_ring(
    placement: list[tuple[str, int]], direct: set[str], pool: WorkerPool
) -> None:
    nprocs = math.prod(size for _, size in placement)
    assert pool.run(direct_kinds, placement, nprocs=nprocs) == [direct] * nprocs
