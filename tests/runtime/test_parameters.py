"""Layouts as DTensor placements: shards and their inverse agree with DTensor's own notion, and optimizers work."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardweave.distributed.process_groups import RuntimeMesh
from shardweave.ir import Axis, Digit, Layout, Mesh, Padding, normalise
from shardweave.ir.errors import LayoutError
from shardweave.ir.layout import state_layouts
from shardweave.runtime.checkpoint.state import pieces
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.parameters import (
    assemble,
    local_part,
    local_shard,
    local_tensor,
    padded,
    part_shape,
    placements,
    unpadded,
)
from shardweave.runtime.tensor import distribute, in_layout_of
from tests.passes.harness import examples

CUBE = Mesh.of_levels([("gpu", 4), ("node", 2)])
A, B, C = CUBE.axes
MIXED = Mesh((C, A, B))
LAYOUTS = [
    Layout.replicated((3, 4)),
    Layout.replicated(()),
    Layout.replicated((1,)),
    Layout(((A, 2), (4,))),
    Layout(((3, A, 2), (B, 2))),
    Layout(((A, B, C), ())),
    Layout(((C, 3, B, A),)),
    Layout(((2, B, 2, C), (), (3, A, 2))),
    Layout(((B, A, 2), (5, C, 2))),
    Layout(((3, A, B, 2), (C, 2))),
    Layout(((3, B, 2, A),)),
    Layout(((A, B, 2), (5,)), padding=Padding(0, 7, (2, 2))),
    Layout(((A, B), (C, 5)), padding=Padding(0, 3, (2, 2))),
    Layout(((B, A), (C, 3)), padding=Padding(1, 5, (2,))),
    Layout(((A, B, 3), (3, C, 2)), padding=Padding(0, 5, (2,))),
]


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh) -> Layout:
    dims: list[list[Digit]] = [
        list(draw(st.lists(st.integers(1, 3), max_size=3))) for _ in range(draw(st.integers(0, 3)))
    ]
    for axis in draw(st.permutations(mesh.axes)) if dims else []:
        dim = draw(st.sampled_from([None, *dims]))
        if dim is not None:
            dim.insert(draw(st.integers(0, len(dim))), axis)
    return Layout(tuple(normalise(dim) for dim in dims))


SIZES = Mesh((Axis("a", 2), Axis("b", 3, 2), Axis("c", 2, 6)))


@given(layouts(SIZES))
def test_assembling_undoes_sharding(layout: Layout) -> None:
    full = torch.arange(math.prod(layout.global_shape)).reshape(layout.global_shape)
    shards = {rank: local_shard(full, layout, SIZES.coordinates(rank)) for rank in range(SIZES.world_size)}
    assert all(shard.is_contiguous() and tuple(shard.shape) == layout.local_shape for shard in shards.values())
    assert torch.equal(assemble(shards, layout, SIZES), full)


@given(layouts(SIZES), st.permutations(SIZES.axes))
def test_placements_cut_as_the_layout_does(layout: Layout, axes: list[Axis]) -> None:
    """DTensor's documented cut, axis by axis of its mesh: in `split_factor` blocks, each into equal parts."""
    mesh = Mesh(tuple(axes))
    full = torch.arange(math.prod(layout.global_shape)).reshape(layout.global_shape)
    for rank in range(mesh.world_size):
        part = full
        for axis, placement in zip(mesh.axes, placements(layout, mesh), strict=True):
            if isinstance(placement, Replicate):
                continue
            dim = placement.dim  # type: ignore[attr-defined]
            blocks = part.chunk(getattr(placement, "split_factor", 1), dim)
            part = torch.cat([block.chunk(axis.size, dim)[axis.coordinate(rank)] for block in blocks], dim)
        assert torch.equal(part, local_shard(full, layout, mesh.coordinates(rank)))


@given(layouts(Mesh(SIZES.axes[:2])), st.sampled_from(["sum", "max"]))
def test_assembling_combines_partial_results(layout: Layout, op: str) -> None:
    axis = SIZES.axes[2]
    full = torch.arange(math.prod(layout.global_shape)).reshape(layout.global_shape)
    shards = {
        rank: local_shard(full, layout, SIZES.coordinates(rank)) + axis.coordinate(rank)
        for rank in range(SIZES.world_size)
    }
    expected = full * 2 + 1 if op == "sum" else full + 1
    assert torch.equal(assemble(shards, Layout(layout.dims, ((axis, op),)), SIZES), expected)


@st.composite
def uneven(draw: st.DrawFn, mesh: Mesh) -> Layout:
    """Where states of a parameter rest whose sizes the axes may not divide, beside the axes of its op."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 7, 9, 10, 25]), min_size=1, max_size=3))
    dims = [list(dim) for dim in Layout.replicated(sizes).dims]
    axes = list(mesh.axes)
    for _ in range(draw(st.integers(0, 2))):
        dim = draw(st.sampled_from(dims))
        dim.insert(sum(isinstance(digit, Axis) for digit in dim), axes.pop(0))
    free = draw(st.permutations(axes))
    return state_layouts(Layout(tuple(normalise(dim) for dim in dims)), [free[1:], free[:1]], mesh)[-1]


@examples(150)
@given(uneven(SIZES))
def test_uneven_parts_are_dtensors(layout: Layout) -> None:
    """Parts in their places make up the whole; they are what DTensor cuts, and what checkpoints have in pieces."""
    full = torch.arange(1, math.prod(layout.global_shape) + 1).reshape(layout.global_shape)
    shards, covered = {}, torch.zeros_like(full)
    for rank in range(SIZES.world_size):
        coordinates = SIZES.coordinates(rank)
        part = local_part(full, layout, coordinates)
        assert part_shape(layout, coordinates) == tuple(part.shape)
        assert torch.equal(part, _cut(full, layout, rank))
        place = local_shard(full, layout, coordinates)
        assert place.is_contiguous() and tuple(place.shape) == layout.local_shape
        mine = unpadded(place, part.shape)
        assert torch.equal(mine, part) and mine.is_contiguous()
        assert padded(mine, layout).data_ptr() == place.data_ptr() and padded(mine, layout).shape == place.shape
        assert torch.equal(unpadded(padded(mine.clone(), layout), part.shape), part)
        shards[rank] = place
        place[place == 0] = -1  # behind a part may be anything
        for piece in pieces(layout, coordinates):
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            assert torch.equal(full[box], piece.of(part)) and full[box].numel()
            covered[box] += 1
    assert torch.equal(assemble(shards, layout, SIZES), full)
    copies = SIZES.world_size // math.prod(axis.size for axis in layout.shard_axes)
    assert bool((covered == copies).all())


def _cut(part: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What DTensor gives `rank` of a whole tensor: `torch.chunk`, axis by axis, with nothing where chunks run out.

    Strided shards are even ones.
    """
    for axis, placement in zip(SIZES.axes, placements(layout, SIZES), strict=True):
        if isinstance(placement, Replicate):
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        strided = not isinstance(placement, Shard)
        blocks = part.chunk(placement.split_factor, dim) if strided else [part]  # type: ignore[attr-defined]
        chunks = [block.chunk(axis.size, dim) if block.shape[dim] else () for block in blocks]
        assert not strided or all(len(found) == axis.size for found in chunks)
        index = axis.coordinate(rank)
        empty = part.narrow(dim, 0, 0)
        part = torch.cat([found[index] if index < len(found) else empty for found in chunks], dim)
    return part


def test_errors_name_shapes_and_parts() -> None:
    layout = Layout(((A, 2),))
    with pytest.raises(LayoutError, match=r"\(5,\).*\(4,\)"):
        local_shard(torch.ones(5), layout, {"gpu0": 0})
    with pytest.raises(LayoutError, match="do not hold all 2 parts"):
        assemble({0: torch.ones(2)}, layout, CUBE)
    with pytest.raises(LayoutError, match="rank 1 has a part"):
        assemble({0: torch.ones(2), 1: torch.ones(3)}, layout, CUBE)
    with pytest.raises(LayoutError, match="partial"):
        placements(Layout(((4,),), ((A, "sum"),)), CUBE)


def values(layout: Layout, seed: int) -> torch.Tensor:
    return torch.randn(layout.global_shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(mesh: RuntimeMesh, layout: Layout, seed: int) -> torch.Tensor:
    return distribute(local_shard(values(layout, seed), layout, mesh.mesh.coordinates(mesh.rank)), layout, mesh)


def gather(mesh: Mesh) -> None:
    running = RuntimeMesh(mesh)
    for seed, layout in enumerate(LAYOUTS):
        tensor = make(running, layout, seed)
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), values(layout, seed)), (layout, tensor.placements)


@pytest.mark.parametrize("mesh", [CUBE, MIXED], ids=["ranks", "mixed"])
def test_dtensor_gathers_what_was_sharded(pool: WorkerPool, mesh: Mesh) -> None:
    pool.run(gather, mesh, nprocs=8, timeout=40.0)


OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"foreach": True, "weight_decay": 0.1}),
]


def optimise(mesh: Mesh, index: int, max_norm: float) -> None:
    kind, options = OPTIMIZERS[index]
    running = RuntimeMesh(mesh)
    whole = [torch.nn.Parameter(values(layout, seed)) for seed, layout in enumerate(LAYOUTS)]
    parts = [torch.nn.Parameter(make(running, layout, seed)) for seed, layout in enumerate(LAYOUTS)]
    plain, sharded = (kind(parameters, lr=0.1, **options) for parameters in (whole, parts))
    for step in range(3):
        for seed, layout in enumerate(LAYOUTS):
            whole[seed].grad = values(layout, 100 * step + seed)
            parts[seed].grad = in_layout_of(local_tensor(make(running, layout, 100 * step + seed)), parts[seed])
        norms = [torch.nn.utils.clip_grad_norm_(parameters, max_norm) for parameters in (whole, parts)]
        total = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
        torch.testing.assert_close(total, norms[0])
        plain.step()
        sharded.step()
    for one, part, layout in zip(whole, parts, LAYOUTS, strict=True):
        expected = local_part(one.detach(), layout, mesh.coordinates(running.rank))
        torch.testing.assert_close(local_tensor(part), expected)
        torch.testing.assert_close(part.full_tensor(), one)  # type: ignore[attr-defined]
        for key, state in sharded.state[part].items():
            torch.testing.assert_close(
                state.full_tensor() if isinstance(state, DTensor) else state, plain.state[one][key]
            )


@pytest.mark.parametrize("index", range(len(OPTIMIZERS)))
def test_torch_optimizers_and_clipping_work_on_every_layout(pool: WorkerPool, index: int) -> None:
    pool.run(optimise, MIXED, index, 1.0, nprocs=8, timeout=40.0)


def test_placements_are_plain_where_they_can_be() -> None:
    assert placements(Layout(((C, A, 4), (B,))), MIXED) == (Shard(0), Shard(0), Shard(1))
    assert [str(p) for p in placements(Layout(((A, C, 4),)), MIXED)] == ["_S(0, 2)", "S(0)", "R"]
