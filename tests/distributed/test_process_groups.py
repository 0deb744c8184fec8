"""The running world as axes: rank tensors, groups by symbolic name, bound graphs."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from torch import fx

from shardweave.distributed.process_groups import RuntimeMesh, rank_tensor
from shardweave.ir import Axis, Mesh
from shardweave.ir.errors import LayoutError, ParallelError
from shardweave.runtime.launch import WorkerPool

CUBE = Mesh.of_levels([("gpu", 4), ("node", 2)])
MIXED = Mesh((CUBE.axes[1], CUBE.axes[2], CUBE.axes[0]))
"""The same machine in another layout order."""


def reducing_graph(*names: str) -> fx.GraphModule:
    """Sums its input over one group after the other and returns every result."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    results = []
    for name in names:
        start = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (value, "sum", name))
        results.append(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,)))
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def ranks_of_groups(mesh: Mesh) -> dict[str, list[int]]:
    running = RuntimeMesh(mesh)
    assert running.coordinates == tuple(axis.coordinate(dist.get_rank()) for axis in mesh.axes)
    names = ["gpu1.node0", "gpu0", "gpu0.gpu1.node0", "gpu0.node0", "node0"]
    return {name: dist.get_process_group_ranks(running.process_group(name)) for name in names}


@pytest.mark.parametrize("mesh", [CUBE, MIXED])
def test_groups_hold_the_ranks_that_differ_along_their_axes(pool: WorkerPool, mesh: Mesh) -> None:
    for rank, groups in enumerate(pool.run(ranks_of_groups, mesh, nprocs=8)):
        for name, ranks in groups.items():
            assert tuple(ranks) == CUBE.group_ranks([CUBE.axis(axis) for axis in name.split(".")], rank)


def run_bound(mesh: Mesh) -> tuple[list[float], str, str]:
    graph = reducing_graph("gpu0.node0", "gpu1", "gpu0.gpu1.node0")
    bound = RuntimeMesh(mesh).bind(graph)
    return [x.item() for x in bound(torch.tensor(float(dist.get_rank())))], graph.code, bound.code


def test_bound_graphs_run_in_the_groups_they_name(pool: WorkerPool) -> None:
    for rank, (sums, before, after) in enumerate(pool.run(run_bound, MIXED, nprocs=8)):
        axes = [["gpu0", "node0"], ["gpu1"], ["gpu0", "gpu1", "node0"]]
        assert sums == [sum(CUBE.group_ranks([CUBE.axis(name) for name in names], rank)) for names in axes]
        assert "'gpu0.node0'" in before and "'gpu0.node0'" not in after


class Commented(fx.graph.CodeGen):
    """Stands for the compiler's code generator."""

    def additional_globals(self) -> list[tuple[str, object]]:
        return [("mark", operator.add)]


def test_binding_keeps_code_generator_and_metadata() -> None:
    gm = reducing_graph()
    gm.graph.set_codegen(Commented())
    gm.meta["stage"] = "forward"
    next(iter(gm.graph.nodes)).meta["shardweave"] = "info"
    bound = RuntimeMesh(Mesh(())).bind(gm)
    assert isinstance(bound.graph._codegen, Commented)
    assert bound.meta["stage"] == "forward"
    assert next(iter(bound.graph.nodes)).meta["shardweave"] == "info"


def test_rank_tensor_follows_strides() -> None:
    for coordinates in torch.cartesian_prod(*[torch.arange(2)] * 3).tolist():
        rank = int(rank_tensor(MIXED)[tuple(coordinates)])
        assert [axis.coordinate(rank) for axis in MIXED.axes] == coordinates


def test_one_device_needs_no_process_group() -> None:
    mesh = RuntimeMesh(Mesh(()))
    assert (mesh.rank, mesh.coordinates, mesh.device_mesh) == (0, (), None)


def too_many() -> None:
    RuntimeMesh(Mesh((Axis("gpu0", 3),)))


def unknown_axis() -> None:
    with pytest.raises(LayoutError, match="no axis is called 'gpu7'"):
        RuntimeMesh(Mesh((Axis("gpu0", 2),))).process_group("gpu7")


def test_worlds_of_another_size_are_an_error(pool: WorkerPool) -> None:
    with pytest.raises(ParallelError, match=r"3 ranks.*not initialised"):
        too_many()
    with pytest.raises(ParallelError, match=r"compiled for 3 ranks \(gpu0:3\), but 2 ranks are running"):
        pool.run(too_many, nprocs=2)
    pool.run(unknown_axis, nprocs=2)


def fake_world() -> str:
    dist.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    bound = RuntimeMesh(MIXED).bind(reducing_graph("gpu0.node0"))
    bound(torch.ones(1))
    group = next(node for node in bound.graph.nodes if node.op == "call_function").args[2]
    dist.destroy_process_group()
    return str(group)


def test_works_in_a_fake_world(pool: WorkerPool) -> None:
    assert pool.run(fake_world, nprocs=1) != ["gpu0.node0"]
