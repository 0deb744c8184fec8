"""All ranks of a generated graph in one process, under torch's `LocalTensorMode`: its collectives are torch's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardweave.ir import META, SEED, Axis, Mesh


@contextlib.contextmanager
def world(size: int) -> Iterator[None]:
    """A process group of this size, of which no rank but this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(module: fx.GraphModule, mesh: Mesh, inputs: Sequence[Sequence[Any]], seed: int = 0) -> list[Any]:
    """As `lockstep.run`: one value a rank for each placeholder after the coordinates and the seed."""
    ranks = range(mesh.world_size)
    with world(mesh.world_size), LocalTensorMode(frozenset(ranks)):
        program = _with_groups(module, mesh)
        given = iter(inputs)
        arguments: list[Any] = []
        for node in program.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name.startswith("coord_"):
                axis = mesh.axis(node.name.removeprefix("coord_"))
                arguments.append(torch.SymInt(LocalIntNode({rank: axis.coordinate(rank) for rank in ranks})))
            elif node.name == SEED:
                arguments.append(seed)
            else:
                arguments.append(LocalTensor(dict(enumerate(next(given)))))
        results = fx.Interpreter(program).run(*arguments)
    return [[_of_rank(value, rank) for value in results] for rank in ranks]


def _with_groups(module: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
    """The graph with process groups in the place of symbolic names: this rank's, from which torch finds the others."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    groups: dict[tuple[Axis, ...], str] = {}
    for node, copy in copies.items():
        info = node.meta.get(META)
        if info is not None and info.collective is not None:
            axes = info.collective.axes
            if axes not in groups:
                groups[axes] = dist.new_group(list(mesh.group_ranks(axes, 0))).group_name
            copy.args = (*copy.args[:-1], groups[axes])
    return fx.GraphModule(module, graph)


def _of_rank(value: Any, rank: int) -> Any:
    return value._local_tensors[rank] if isinstance(value, LocalTensor) else value
