"""The machine at run time: a torch DeviceMesh over the axes, and a process group for every symbolic name."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from shardweave.errors import ParallelError
from shardweave.ir import Axis, Mesh, group_name
from shardweave.runtime.gloo import is_safe, one_at_a_time

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")


class RuntimeMesh:
    """The running ``torch.distributed`` world, seen as the axes of `mesh`.

    Everything here that creates process groups is collective: all ranks must do it, in the same order. A mesh of one
    device needs no ``torch.distributed`` at all.

    Parameters
    ----------
    mesh : Mesh
        The axes that the step was compiled for.
    device_type : str, optional
        ``"cpu"`` or ``"cuda"``; by default the one that the world's backend serves.

    Attributes
    ----------
    rank : int
        This process' rank, in ``[0, mesh.world_size)``.
    coordinates : tuple of int
        This rank's coordinate on each axis, in the mesh's order: what generated graphs take first.
    device_mesh : DeviceMesh or None
        One dimension an axis, in the mesh's order and under the axes' names; None without axes.

    Raises
    ------
    ParallelError
        If no ``torch.distributed`` world is running, or one of another size than the mesh has.

    Examples
    --------
    >>> RuntimeMesh(Mesh(())).coordinates
    ()
    """

    def __init__(self, mesh: Mesh, device_type: str | None = None) -> None:
        running = dist.is_available() and dist.is_initialized()
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
        self._groups: dict[str, dist.ProcessGroup] = {}
        if mesh.axes:
            names = tuple(axis.name for axis in mesh.axes)
            with one_at_a_time():
                self.device_mesh = DeviceMesh(self.device_type, rank_tensor(mesh), mesh_dim_names=names)
            for name in names:
                if is_safe(group := self.device_mesh.get_group(name)):  # the user's own world may not be
                    self._groups[name] = group

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
            if groups == [world] and dist.group.WORLD is not None and is_safe(dist.group.WORLD):
                self._groups[name] = dist.group.WORLD
            else:
                enumeration = [list(group) for group in groups]
                with one_at_a_time():
                    self._groups[name], _ = dist.new_subgroups_by_enumeration(enumeration)  # type: ignore[no-untyped-call]
        return self._groups[name]

    def group_over(self, axes: Iterable[Axis]) -> dist.ProcessGroup:
        """The group of this rank over `axes`; there must be at least one."""
        return self.process_group(group_name(axes))

    def bind(self, gm: fx.GraphModule) -> fx.GraphModule:
        """A generated graph that this rank can run: see `bound`."""
        module = fx.GraphModule(gm, self.bound(gm.graph))
        module.meta.update(gm.meta)
        return module

    def bound(self, graph: fx.Graph) -> fx.Graph:
        """A copy of a generated graph with the real names of process groups in place of the symbolic ones.

        The groups are made in the order of their names, so all ranks make them in the same order.
        """
        found = copy.deepcopy(graph)
        starts = [(node, *place) for node in found.nodes if (place := _group_argument(node))]
        for name in sorted({name for _, _, name in starts}):
            self.process_group(name)
        for node, index, name in starts:
            node.update_arg(index, self.process_group(name).group_name)
        return found


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


def _group_argument(node: fx.Node) -> tuple[int, str] | None:
    """Position and symbolic name of the group that a node's collective runs in; None for any other node."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in _COLLECTIVES:
        return None
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == "group_name":
            return index, str(node.args[index])
    return None
