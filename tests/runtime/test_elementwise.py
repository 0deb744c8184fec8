"""Elementwise ops on parallel tensors: equal to those on whole tensors, and quick on meshes of many axes."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardweave.distributed.process_groups import RuntimeMesh
from shardweave.ir import Axis, Layout, Mesh, ParallelError
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.optimizers import register_hook
from shardweave.runtime.parameters import local_shard, local_tensor
from shardweave.runtime.tensor import ParallelTensor, distribute, elementwise

MESH = Mesh.of_levels([("gpu", 4)])
A, B = MESH.axes
aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.add.Tensor, True),
        (aten.mul_.Scalar, True),
        (aten.lerp_.Scalar, True),
        (aten._foreach_addcdiv_.ScalarList, True),
        (aten._foreach_sqrt.default, True),
        (aten._fused_adamw_.default, True),
        (aten._foreach_copy_.default, True),
        (aten.sum.dim_IntList, False),
        (aten.add.out, False),
        (aten.normal_.default, False),
        (aten._foreach_norm.Scalar, False),
        (aten.stack.default, False),
    ],
)
def test_elementwise_ops_are_told_by_their_tags(op: torch._ops.OpOverload, expected: bool) -> None:
    assert elementwise(op) is expected


def mixed_layouts() -> None:
    """Ops on tensors of different layouts, broadcast tensors and reduced tensors give the whole tensors' results."""
    mesh = RuntimeMesh(MESH)
    whole = [torch.arange(24.0).reshape(12, 2) + shift for shift in (0, 1)]
    plain, strided, rows = Layout(((A, 6), (2,))), Layout(((3, B, 2), (2,))), Layout(((12,), (A,)))

    def make(full: torch.Tensor, layout: Layout) -> torch.Tensor:
        return distribute(local_shard(full, layout, MESH.coordinates(mesh.rank)), layout, mesh)

    for first in (plain, strided, rows):
        one = make(whole[0], first)
        for second in (plain, strided, rows):
            total = one + make(whole[1], second)
            assert isinstance(total, DTensor) and torch.equal(total.full_tensor(), whole[0] + whole[1])
        row = make(whole[0].mean(0), Layout(((2,),)))
        assert torch.equal((one * row).full_tensor(), whole[0] * whole[0].mean(0))  # type: ignore[attr-defined]
        assert torch.equal((one * 2.0).full_tensor(), whole[0] * 2)  # type: ignore[attr-defined]
        mean = (one * one).sum() / 2  # of a partial result
        assert mean.full_tensor() == whole[0].square().sum() / 2  # type: ignore[attr-defined]


def test_other_ops_are_left_to_dtensor(pool: WorkerPool) -> None:
    pool.run(mixed_layouts, nprocs=4, timeout=60.0)


def masks_and_indices() -> None:
    """A write through a mask of the tensor's shape, and one through indices, which has another meaning."""
    mesh = RuntimeMesh(MESH)
    whole = torch.arange(12.0)
    for digits in ((A, 6), (3, B, 2), (12,)):
        layout = Layout((digits,))

        def make(full: torch.Tensor, layout: Layout = layout) -> torch.Tensor:
            return distribute(local_shard(full, layout, MESH.coordinates(mesh.rank)), layout, mesh)

        masked = make(whole)
        masked[make(whole % 2 == 0)] = -1.0
        expected = torch.where(whole % 2 == 0, -1.0, whole)
        assert torch.equal(masked.full_tensor(), expected)  # type: ignore[attr-defined]
        indexed, places = make(whole), torch.tensor([11, 0] * 6)
        try:
            indexed[make(places)] = -1.0
        except RuntimeError:
            continue  # DTensor does not write to a shard through a list
        expected = whole.index_fill(0, places, -1.0)
        assert torch.equal(indexed.full_tensor(), expected)  # type: ignore[attr-defined]


def test_writing_through_masks_and_indices(pool: WorkerPool) -> None:
    pool.run(masks_and_indices, nprocs=4, timeout=60.0)


def buffers_among_parameters() -> None:
    """Averages of a model's state: its buffers are computed as plain tensors, its parameters on the parts."""
    mesh = RuntimeMesh(MESH)
    layout, whole = Layout(((A, B, 3),)), torch.arange(12.0)

    def make(full: torch.Tensor) -> torch.Tensor:
        return distribute(local_shard(full, layout, MESH.coordinates(mesh.rank)), layout, mesh)

    mean, now = [make(whole), whole + mesh.rank], [make(whole * 2), whole * 3]
    torch._foreach_lerp_(mean, now, weight=0.25)
    assert torch.equal(mean[0].full_tensor(), whole * 1.25)  # type: ignore[attr-defined]
    assert torch.equal(mean[1], (whole + mesh.rank).lerp(whole * 3, 0.25)) and not isinstance(mean[1], DTensor)
    torch._foreach_mul_(mean, 2.0)
    assert torch.equal(mean[0].full_tensor(), whole * 2.5)  # type: ignore[attr-defined]
    with pytest.raises(ParallelError, match="meets a Tensor of shape"):
        torch._foreach_lerp_(mean, [now[0], make(whole)], weight=0.25)  # the second writes a plain one


def test_buffers_among_parameters(pool: WorkerPool) -> None:
    pool.run(buffers_among_parameters, nprocs=4, timeout=60.0)


def step_in_a_large_world(world: int, reloaded: bool) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
    mesh = Mesh.of_levels([("gpu", 8), ("node", world // 8)])
    running = RuntimeMesh(mesh)
    register_hook()  # as a parallel module does
    axes: tuple[Axis, ...] = mesh.axes
    layouts = [Layout(((3, axes[0], axes[5], 2), (axes[1], 4))), Layout(((axes[2], 4),)), Layout(())]
    full = [torch.ones(layout.global_shape) for layout in layouts]
    adamw = partial(torch.optim.AdamW, lr=0.5, weight_decay=0.0, amsgrad=reloaded)
    for foreach in (False, True):
        parameters = []
        for value, layout in zip(full, layouts, strict=True):
            local = local_shard(value, layout, mesh.coordinates(running.rank))
            parameters.append(torch.nn.Parameter(distribute(local, layout, running)))
            parameters[-1].grad = distribute(local.clone(), layout, running)
        optimizer = adamw(parameters, foreach=foreach)
        optimizer.step()
        expected = 0.5
        if reloaded:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            state = torch.load(file, weights_only=False)
            assert type(state["state"][0]["exp_avg"]) is DTensor  # such a file is read without shardweave
            optimizer = adamw(parameters, foreach=foreach)
            optimizer.load_state_dict(state)
            optimizer.step()
            assert all(type(values["exp_avg_sq"]) is ParallelTensor for values in optimizer.state.values())
            expected = 0.0
        for parameter in parameters:
            part = local_tensor(parameter)
            torch.testing.assert_close(part, torch.full_like(part, expected), atol=1e-6, rtol=0)
    dist.destroy_process_group()


@pytest.mark.parametrize("reloaded", [False, True])
def test_an_optimizer_steps_on_a_mesh_of_ten_axes(reloaded: bool, pool: WorkerPool) -> None:
    """With states of its own, and with states that ``torch.load`` has read."""
    pool.run(step_in_a_large_world, 1024, reloaded, nprocs=1, timeout=60.0)
