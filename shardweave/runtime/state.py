"""A model's parameters and buffers under its own names: taken over as DTensors, found again, loaded and gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardweave.errors import ParallelError
from shardweave.ir import Layout, ParameterSpec
from shardweave.runtime.agreement import everyone
from shardweave.runtime.lost import collective
from shardweave.runtime.mesh import RuntimeMesh
from shardweave.runtime.parameters import assemble, distribute, in_place, local_shard, local_tensor


def adopt(target: nn.Module, model: nn.Module, specs: Iterable[ParameterSpec], mesh: RuntimeMesh) -> dict[str, Layout]:
    """Give `target` the model's tree of names, and under them its parameters and buffers at the layouts of `specs`.

    Values are rank 0's; on the meta device there are none, and the tensors are left unset. Tensors that no spec names
    are replicated. What the model shares between names is shared here. Collective, unless the model is on the meta
    device.

    The tree's dictionaries are filled directly, as a model may name a part of itself like one of target's methods.

    Returns
    -------
    dict of str to Layout
        Where each DTensor lies, by every name that it has.

    Raises
    ------
    ParallelError
        If the model lacks a tensor of `specs`, or has it in another shape.
    """
    wanted = {spec.name: spec.layout for spec in specs}
    layouts: dict[str, Layout] = {}
    for path, source in model.named_modules(remove_duplicate=False):
        container = _submodule(target, path)
        container.training = source.training
        container._non_persistent_buffers_set = set(source._non_persistent_buffers_set)
    adopted: dict[torch.Tensor, tuple[torch.Tensor, Layout]] = {}
    for name, tensor in named_tensors(model):
        if tensor not in adopted:
            layout = wanted.pop(name, None) or Layout.replicated(tensor.shape)
            if layout.global_shape != tuple(tensor.shape):
                raise ParallelError(
                    f"the step was compiled for {name!r} of shape {layout.global_shape}, but this model has it of "
                    f"shape {tuple(tensor.shape)}: compile the step for this model"
                )
            adopted[tensor] = _place(name, tensor, layout, mesh), layout
        placed, layout = adopted[tensor]
        if isinstance(placed, DTensor):
            layouts[name] = layout
        path, _, leaf = name.rpartition(".")
        container = _submodule(target, path)
        if isinstance(tensor, nn.Parameter):
            container._parameters[leaf] = placed  # type: ignore[assignment]
        else:
            container._buffers[leaf] = placed
    if wanted:
        raise ParallelError(
            f"the step was compiled for another model: this one has no {', '.join(sorted(wanted))}; compile it again"
        )
    return layouts


def without_values(model: nn.Module) -> set[str]:
    """The names of the tensors that are on the meta device."""
    return {name for name, tensor in named_tensors(model) if tensor.is_meta}


def finder(
    root: nn.Module, specs: Iterable[ParameterSpec], kind: Literal["_parameters", "_buffers"]
) -> Callable[[], list[torch.Tensor]]:
    """A function that returns the current tensors of `specs`, in order: users may put others in their place."""
    places: list[tuple[dict[str, torch.Tensor], str]] = []
    for spec in specs:
        path, _, leaf = spec.name.rpartition(".")
        places.append((getattr(_submodule(root, path), kind), leaf))
    return lambda: [tensors[leaf] for tensors, leaf in places]


def shard_whole(state: dict[str, Any], prefix: str, layouts: Mapping[str, Layout], mesh: RuntimeMesh) -> None:
    """Put this rank's parts in the place of the whole tensors of a state dict that is about to be loaded."""
    for name, layout in layouts.items():
        value = state.get(prefix + name)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if tuple(value.shape) == layout.global_shape:  # of any other shape torch complains by itself
            part = local_shard(value.detach(), layout, mesh.mesh.coordinates(mesh.rank))
            state[prefix + name] = distribute(part.to(mesh.device_type), layout, mesh)


def gather(tensor: torch.Tensor, layout: Layout, mesh: RuntimeMesh, name: str = "a tensor") -> torch.Tensor:
    """The whole of `tensor`, which lies as `layout`, on every rank; `name` is for an error. Collective."""
    local = in_place(local_tensor(tensor.detach()), layout)
    if not layout.shard_axes:
        return local.clone()
    group = mesh.group_over(layout.shard_axes)
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    with collective(f"the all_gather of {name}", group):
        dist.all_gather(parts, local.contiguous(), group=group)
    return assemble(dict(zip(dist.get_process_group_ranks(group), parts, strict=True)), layout, mesh.mesh)


def _place(name: str, tensor: torch.Tensor, layout: Layout, mesh: RuntimeMesh) -> torch.Tensor:
    """This rank's part of rank 0's `tensor`: a DTensor parameter, or a buffer (plain where it is replicated)."""
    if tensor.is_meta:
        local = torch.empty(layout.local_shape, dtype=tensor.dtype, device=mesh.device_type)
    else:
        whole = tensor.detach().to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
        if mesh.device_mesh is not None:
            flat = whole.view(-1).view(torch.uint8)  # as bytes: backends lack some dtypes
            with collective(f"the broadcast of rank 0's {name}", everyone(mesh)):
                dist.broadcast(flat, src=0, group=everyone(mesh))
        local = local_shard(whole, layout, mesh.mesh.coordinates(mesh.rank))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(distribute(local, layout, mesh), requires_grad=tensor.requires_grad)
    return local if layout.is_replicated else distribute(local, layout, mesh)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers, under all names that each has."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """The container at `path` below `root`, made where there is none."""
    for name in filter(None, path.split(".")):
        child = root._modules.get(name)
        if child is None:
            child = root._modules[name] = nn.Module()
        root = child
    return root
