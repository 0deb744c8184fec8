"""Ops on parallel tensors give one device's numbers, whatever the layout, or say why they do not."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.distributed import gather_from_ranks
from shardweave.distributed.process_groups import RuntimeMesh
from shardweave.ir import Axis, Layout, Mesh
from shardweave.ir.errors import ParallelError
from shardweave.ir.layout import Padding
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.module_tree import shard_state_dict
from shardweave.runtime.parameters import local_shard
from shardweave.runtime.tensor import ParallelTensor, distribute

A, B = Axis("gpu0", 2), Axis("gpu1", 2, 2)
MESH = Mesh((A, B))
SHAPE = (12, 10)
LAYOUTS = {
    "rows": Layout(((A, B, 3), (10,))),
    "columns": Layout(((12,), (B, 5))),
    "strided": Layout(((3, A, 2), (10,))),
    "both": Layout(((A, 6), (5, B))),
    "uneven": Layout(((12,), (A, B, 3)), padding=Padding(1, 10, (2, 2))),
    "whole": Layout(((12,), (10,))),
}

Change = Callable[[Tensor], Any]


def init_embedding(w: Tensor) -> None:
    """As `transformers` initialises an embedding with a padding row."""
    w.data.normal_(0.0, 0.02)
    w.data[3].zero_()


def prune(w: Tensor) -> None:
    with torch.no_grad():
        w[w.abs() < 0.5] = 0
        w[1:3, 2] *= 2
        w.view(-1)[5:50].add_(1)
        w.t()[0] = 7


def spectral(w: Tensor) -> None:
    with torch.no_grad():
        w.div_(torch.linalg.matrix_norm(w, 2))
        w.sub_(w.mean(0, keepdim=True))
        w.copy_(F.normalize(w, dim=1))


def draw(w: Tensor) -> None:
    nn.init.trunc_normal_(w)
    w.data.add_(torch.rand_like(w) + F.dropout(w.detach(), 0.5))


def assign(w: Tensor) -> None:
    w.data = torch.arange(120.0, dtype=w.dtype).reshape(SHAPE)
    w.data.copy_(w.data * 2)
    w.data[2] = torch.ones(10, dtype=w.dtype)
    w.data.mul_(torch.linspace(0, 1, 120, dtype=w.dtype).reshape(SHAPE))


CHANGES: list[Change] = [
    nn.init.normal_,
    nn.init.xavier_uniform_,
    nn.init.kaiming_normal_,
    nn.init.orthogonal_,
    nn.init.eye_,
    lambda w: nn.init.sparse_(w, 0.3),
    lambda w: nn.init.constant_(w, 0.3),
    init_embedding,
    prune,
    spectral,
    draw,
    assign,
]

VALUES: list[Callable[[Tensor], Any]] = [
    lambda w: (w * 2).sum() + w.mean() + w.norm() + w.abs().max(),
    lambda w: w @ torch.ones(10, 2, dtype=w.dtype),
    lambda w: F.linear(torch.linspace(0, 1, 30, dtype=w.dtype).reshape(3, 10), w, w[:, 0]),
    lambda w: F.embedding(torch.tensor([[1, 2], [5, 1]]), w),
    lambda w: (w[2:5].softmax(0) * w.std(dim=0)).sum(),
    lambda w: F.cross_entropy(w, torch.arange(12) % 10) * w[0, 0],
    lambda w: torch.cat([w.view(-1), w.t().reshape(-1)]).dot(torch.ones(240, dtype=w.dtype)),
    lambda w: torch.tensor(2.0, dtype=w.dtype, requires_grad=True) * w,
]


def plain(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def one(layout: Layout, mesh: RuntimeMesh) -> tuple[nn.Parameter, nn.Parameter]:
    whole = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    local = local_shard(whole, layout, MESH.coordinates(mesh.rank))
    return nn.Parameter(whole), nn.Parameter(distribute(local, layout, mesh))


def changed_alike() -> None:
    mesh = RuntimeMesh(MESH)
    for name, layout in LAYOUTS.items():
        for index, change in enumerate(CHANGES):
            whole, parallel = one(layout, mesh)
            torch.manual_seed(index)
            change(whole)
            torch.manual_seed(index + 100 * dist.get_rank())  # rank 0's numbers are drawn
            change(parallel)
            torch.testing.assert_close(parallel.full_tensor(), whole, msg=f"{name}, change {index}: {whole}")  # type: ignore[attr-defined]


def computed_alike() -> None:
    mesh = RuntimeMesh(MESH)
    for name, layout in LAYOUTS.items():
        for index, compute in enumerate(VALUES):
            whole, parallel = one(layout, mesh)
            expected, found = compute(whole), compute(parallel)
            torch.testing.assert_close(plain(found), expected, msg=f"{name}, value {index}")
            expected.sum().backward()
            plain(found).sum().backward()
            assert type(parallel.grad) is ParallelTensor
            torch.testing.assert_close(plain(parallel.grad), whole.grad, msg=f"{name}, gradient {index}")


def gradients_are_averaged() -> None:
    """Each rank computes with a batch of its own, as under DistributedDataParallel."""
    mesh = RuntimeMesh(MESH)
    whole, parallel = one(LAYOUTS["strided"], mesh)
    batches = [torch.full((2, 10), float(rank), dtype=torch.float64) for rank in range(4)]
    torch.stack([F.linear(x, whole).square().sum() for x in batches]).mean().backward()
    F.linear(batches[mesh.rank], parallel).square().sum().backward()
    torch.testing.assert_close(plain(parallel.grad), whole.grad)


def copied() -> None:
    mesh = RuntimeMesh(MESH)
    for layout in LAYOUTS.values():
        whole, parallel = one(layout, mesh)
        parallel.square().sum().backward()
        twin = copy.deepcopy(parallel)
        with torch.no_grad():
            twin.zero_()
        assert isinstance(twin, nn.Parameter) and type(twin) is ParallelTensor
        torch.testing.assert_close(plain(parallel), whole.detach())
        torch.testing.assert_close(plain(twin.grad), 2 * whole.detach())


def saved_by_another_rank() -> None:
    """A file has one rank's part, which ranks with the same part may read, and no others."""
    mesh = RuntimeMesh(MESH)
    for name, layout in LAYOUTS.items():
        _, parallel = one(layout, mesh)
        file = io.BytesIO()
        torch.save(parallel, file)
        files = gather_from_ranks(file.getvalue())
        for rank, content in enumerate(files):
            read = torch.load(io.BytesIO(content), weights_only=True)
            theirs = mesh.mesh.coordinates(rank)
            same = all(theirs[axis.name] == parallel.sharding.coordinates[axis.name] for axis in layout.shard_axes)
            state, module = {"weight": read}, nn.Module()
            module.register_buffer("weight", parallel)
            refusal = pytest.raises(ParallelError, match=f"that rank {rank} has saved")
            with contextlib.nullcontext() if same else refusal:
                shard_state_dict(state, "", module, mesh)
                assert torch.equal(read._local_tensor, parallel._local_tensor), name


def refused() -> None:
    _, parallel = one(LAYOUTS["both"], RuntimeMesh(MESH))
    with pytest.raises(ParallelError, match="assigned to its data"):
        parallel.data = torch.zeros(3)
    with pytest.raises(ParallelError, match="change the shape"):
        parallel.data.t_()
    with pytest.raises(ParallelError, match="cannot be moved"):
        parallel.to("meta")


CHECKS = [changed_alike, computed_alike, gradients_are_averaged, copied, saved_by_another_rank, refused]


@pytest.mark.parametrize("check", CHECKS)
def test_parallel_tensors(check: Callable[[], None], pool: WorkerPool) -> None:
    pool.run(check, nprocs=4, timeout=120)
