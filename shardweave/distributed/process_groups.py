"""Process groups: a torch DeviceMesh over the axes of a mesh, and a group for every symbolic name."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from shardweave.distributed.failures import FailureNotice, collective, run_with_timeout, timeout_of
from shardweave.distributed.gloo import (
    allows_concurrent_collectives,
    exchange,
    gather,
    group_named,
    send_directly,
    single_threaded_gloo,
)
from shardweave.ir import Axis, Mesh, ParallelError, group_name

COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")
"""The namespaces of the ops that run in process groups."""


class RuntimeMesh:
    """The running ``torch.distributed`` world as the axes of `mesh`.

    Methods that create process groups are collective: all ranks must call them, in the same order. A mesh of one device
    needs no ``torch.distributed``.

    Parameters
    ----------
    mesh : Mesh
        The axes that the step was compiled for.
    device_type : str, optional
        ``"cpu"`` or ``"cuda"``; by default that of the world's backend.
    timeout : timedelta, optional
        The time that a collective may wait for the other ranks; by default that of the world's own group.

    Attributes
    ----------
    rank : int
        This process' rank, in ``[0, mesh.world_size)``.
    coordinates : tuple of int
        This rank's coordinate on each axis, in the mesh's order: the first inputs of generated graphs.
    device_mesh : DeviceMesh or None
        One dimension for each axis, in the mesh's order and with the axes' names; None without axes.
    timeout : timedelta
        The timeout of the groups of this mesh.
    closed : str or None
        The rank and the cause of a failed step, after which the groups are closed.

    Raises
    ------
    ParallelError
        If no ``torch.distributed`` world is running, or its size differs from the mesh's.
    LostRankError
        If a rank does not take part in making the groups.

    Examples
    --------
    >>> RuntimeMesh(Mesh(())).coordinates
    ()
    """

    def __init__(self, mesh: Mesh, device_type: str | None = None, timeout: timedelta | None = None) -> None:
        running = dist.is_initialized()
        world_size = dist.get_world_size() if running else 1
        if world_size != mesh.world_size:
            axes = ", ".join(map(str, mesh.axes)) or "no axes"
            found = f"{world_size} ranks are running" if running else "torch.distributed is not initialised"
            raise ParallelError(
                f"the step was compiled for {mesh.world_size} ranks ({axes}), but {found}. Start as many ranks as the "
                "plan has (torchrun --nproc-per-node, or shardweave.launch), or plan for the cluster that is running"
            )
        self.mesh = mesh
        self.rank = dist.get_rank() if running else 0
        self.coordinates = tuple(axis.coordinate(self.rank) for axis in mesh.axes)
        self.device_type = device_type or ("cuda" if running and "nccl" in dist.get_backend() else "cpu")
        self.device_mesh: DeviceMesh | None = None
        self.closed: str | None = None
        self._groups: dict[str, dist.ProcessGroup] = {}
        world = dist.group.WORLD
        self.timeout = timeout or (timedelta(0) if world is None else timeout_of(world))
        self._world = world if world is not None and timeout_of(world) == self.timeout else None
        self._notice = FailureNotice.of_next_mesh()
        self._failures = 0
        if mesh.axes:
            cuda: Any = torch.cuda
            if self.device_type == "cuda" and not cuda.is_initialized() and "LOCAL_RANK" in os.environ:
                cuda.set_device(int(os.environ["LOCAL_RANK"]))  # as init_device_mesh does
            names = tuple(axis.name for axis in mesh.axes)
            groups = [self.process_group(name) for name in names]
            self.device_mesh = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0], self.device_type, rank_tensor(mesh), mesh_dim_names=names
            )

    def process_group(self, name: str) -> dist.ProcessGroup:
        """The group of this rank over the axes of the symbolic `name` (see `ir.group_name`), made on first use.

        Raises
        ------
        LayoutError
            If the mesh has no axis of that name.
        """
        if name not in self._groups:
            axes = [self.mesh.axis(axis) for axis in name.split(".")]
            world = tuple(range(self.mesh.world_size))
            groups = sorted({self.mesh.group_ranks(axes, rank) for rank in world})
            # On CPUs a step that fails closes its groups (see `close`), which the world's own group must not be.
            reused = self._world if groups == [world] and self.device_type != "cpu" else None
            if reused is not None and allows_concurrent_collectives(reused):
                self._groups[name] = reused
            else:
                self._groups[name] = self._make_group([list(group) for group in groups], name)
        return self._groups[name]

    def _make_group(self, groups: list[list[int]], name: str) -> dist.ProcessGroup:
        def make() -> dist.ProcessGroup:
            mine: dist.ProcessGroup
            mine, _ = dist.new_subgroups_by_enumeration(groups, timeout=self.timeout)  # type: ignore[no-untyped-call]
            return mine

        with collective(f"making the groups over {axes_in_words(name)}", timeout=self.timeout), single_threaded_gloo():
            if self.device_type == "cuda":  # another thread would not have this thread's CUDA device
                return make()
            return run_with_timeout(make, self.timeout + timedelta(seconds=len(groups)))

    def all_failed_at(self, place: str) -> bool:
        """Whether a step fails on all ranks at this place of its graph. If so, no rank waits for another."""
        self._failures += 1
        return self._notice.all_failed_at(f"{self._failures}/{place}", self.mesh.world_size, self.timeout)

    def close(self, error: Exception) -> None:
        """Tell the other ranks that a step failed on this rank by `error`, and close the groups of this mesh.

        Other ranks that wait for a collective of the step then fail at once, and `failure` tells them the cause. Only
        gloo closes connections so: on GPUs the other ranks wait until the timeout.
        """
        if self.device_mesh is None or self.closed is not None:
            return
        self.closed = self._notice.post(f"rank {self.rank}: {type(error).__name__}: {error}", self.timeout)
        if self.device_type != "cpu":
            return
        vars(self.device_mesh).get("_pg_registry", {}).clear()  # connections close with the last reference to a group
        while self._groups:
            dist.destroy_process_group(self._groups.popitem()[1])

    def failure(self) -> str | None:
        """The rank and the cause if a step of this mesh has failed on some rank, else None."""
        if self.closed is None and self.device_mesh is not None:
            return self._notice.read(self.timeout)
        return self.closed

    def group_over(self, axes: Iterable[Axis]) -> dist.ProcessGroup:
        """The group of this rank over `axes`, at least one."""
        return self.process_group(group_name(axes))

    def world_group(self) -> dist.ProcessGroup:
        """A group of all ranks, of which there must be several. It runs one collective at a time."""
        return self._world or self.group_over(self.mesh.axes)

    def bind(self, gm: fx.GraphModule) -> fx.GraphModule:
        """A copy of a generated graph that this rank can run: see `bind_graph`."""
        module = fx.GraphModule(gm, self.bind_graph(gm.graph))
        module.meta.update(gm.meta)
        return module

    def bind_graph(self, graph: fx.Graph) -> fx.Graph:
        """A copy of a generated graph with the real names of process groups in place of the symbolic ones.

        The groups are made in the order of their names, so all ranks make them in the same order.
        """
        found = copy.deepcopy(graph)
        starts = [(node, *place) for node in found.nodes if (place := _group_argument(node))]
        for name in sorted({name for _, _, name in starts}):
            self.process_group(name)
        for node, index, name in starts:
            group = self.process_group(name)
            node.update_arg(index, group.group_name)
            if self.device_type == "cpu":
                send_directly(node, [self.mesh.axis(axis) for axis in name.split(".")], group)
        return found


def axes_in_words(name: str) -> str:
    """The axes of a symbolic group name, for messages.

    >>> axes_in_words("gpu0.node0"), axes_in_words("gpu0")
    ('the axes gpu0, node0', 'the axis gpu0')
    """
    names = name.split(".")
    return f"the {'axis' if len(names) == 1 else 'axes'} {', '.join(names)}"


def rank_tensor(mesh: Mesh) -> torch.Tensor:
    """The global rank at each coordinate: one dimension an axis, in the mesh's order.

    >>> rank_tensor(Mesh((Axis("node0", 2, stride=2), Axis("gpu0", 2)))).tolist()
    [[0, 1], [2, 3]]
    >>> rank_tensor(Mesh((Axis("gpu0", 2), Axis("node0", 2, stride=2)))).tolist()
    [[0, 2], [1, 3]]
    """
    ranks = torch.zeros([axis.size for axis in mesh.axes], dtype=torch.int)
    for dim, axis in enumerate(mesh.axes):
        steps = torch.arange(axis.size, dtype=torch.int) * axis.stride
        ranks += steps.view([-1 if other == dim else 1 for other in range(len(mesh.axes))])
    return ranks


def is_collective(node: fx.Node) -> bool:
    """Whether a node of a generated graph, bound or not, runs in a process group: it starts, or waits."""
    return getattr(node.target, "namespace", "") in COLLECTIVES or node.target in (exchange, gather)


def group_of(node: fx.Node) -> dist.ProcessGroup | None:
    """The group in which a collective of a bound graph runs; None for any other node."""
    place = _group_argument(node)
    return None if place is None else group_named(place[1])


def _group_argument(node: fx.Node) -> tuple[int, str] | None:
    """Position and symbolic name of the group that a node's collective runs in; None for any other node."""
    if not is_collective(node):
        return None
    if not isinstance(node.target, torch._ops.OpOverload):
        return len(node.args) - 1, str(node.args[-1])
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == "group_name":
            return index, str(node.args[index])
    return None
