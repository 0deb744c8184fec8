"""What a checkpoint holds: the state of a parallel model and its optimizer, by path, and where it goes when loaded."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from shardweave.ir import Layout, ParallelError
from shardweave.runtime.checkpoint.chunks import Part, Path, Values, is_writer, name_of
from shardweave.runtime.checkpoint.files import load_object
from shardweave.runtime.module import ParallelModule
from shardweave.runtime.parameters import local_tensor
from shardweave.runtime.tensor import distribute

MODEL, STATE = "model", ("optimizer", "state")
KIND, GROUPS, SEEDS, EXTRA = ("optimizer", "kind"), ("optimizer", "param_groups"), ("seeds",), ("extra",)


def collect(
    parallel: ParallelModule, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], copy: bool
) -> Values:
    """What this rank writes: of each tensor its part, unless another rank writes it; rank 0 also what is no tensor.

    With `copy`, parts are copied to the CPU, so that training may go on.
    """
    check_values(parallel)
    mesh, rank = parallel.mesh.mesh, parallel.mesh.rank
    coordinates = mesh.coordinates(rank)
    tensors: dict[Path, tuple[torch.Tensor, Layout]] = {}
    objects: dict[Path, Any] = {SEEDS: parallel._seeds.state, EXTRA: dict(extra)}
    for name, tensor in parallel.state_dict(keep_vars=True).items():
        tensors[MODEL, name] = tensor, parallel.layout_of(name, tensor.shape)
    if optimizer is not None:
        names = parameter_names(parallel, optimizer)
        state = optimizer.state_dict()
        objects[KIND] = type(optimizer).__name__
        objects[GROUPS] = [{**g, "params": [names[index] for index in g["params"]]} for g in state["param_groups"]]
        parameters = dict(parallel.named_parameters())
        for index, values in state["state"].items():
            for key, value in values.items():
                path: Path = (*STATE, names[index], str(key))
                if isinstance(value, torch.Tensor):
                    tensors[path] = value, _state_layout(parallel, path, value, parameters[names[index]])
                else:
                    objects[path] = value
    copies: dict[int, torch.Tensor] = {}  # shared tensors are copied once
    written: dict[Path, Part | bytes] = {}
    for path, (tensor, layout) in tensors.items():
        if is_writer(path, layout, mesh, rank):
            local = local_tensor(tensor.detach())
            if copy:
                local = copies.setdefault(id(tensor), local.to("cpu", copy=True))
            written[path] = Part(local, layout, coordinates)
    if rank == 0:
        written.update({path: _pickled(path, value) for path, value in objects.items()})
    return written


def check_values(parallel: ParallelModule) -> None:
    """ParallelError if what is to be saved has no value yet, as the model was on the meta device."""
    if unset := sorted(parallel.unset.intersection(parallel.state_dict())):
        raise ParallelError(
            f"{_some(unset)} {'has' if len(unset) == 1 else 'have'} no value: the model was on the meta device. Give "
            "it values first, with shardweave.initialise, load_weights or load_checkpoint"
        )


def parameter_names(parallel: ParallelModule, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in the order in which its state dict numbers them."""
    names = {parameter: name for name, parameter in parallel.named_parameters()}
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(parameter not in names for parameter in found)
    if strangers:
        raise ParallelError(
            f"{strangers} of the {len(found)} parameters of the {type(optimizer).__name__} are not those of the "
            "parallel model: make the optimizer from parallel.parameters()"
        )
    return [names[parameter] for parameter in found]


def paths_of(metadata: Metadata) -> dict[str, Path]:
    """The path of every name in a checkpoint; a name is its own path where the writer noted none."""
    return {name: (metadata.planner_data or {}).get(name, (name,)) for name in metadata.state_dict_metadata}


def model_targets(parallel: ParallelModule, metadata: Metadata) -> dict[Path, Part | None]:
    """Fresh tensors on the CPU for this rank's parts of the model, which a checkpoint fills; then `fill` the model.

    Raises
    ------
    ParallelError
        If the checkpoint is of another model: names, shapes or dtypes differ.
    """
    stored = {
        path[1]: metadata.state_dict_metadata[name]
        for name, path in paths_of(metadata).items()
        if len(path) == 2 and path[0] == MODEL
    }
    state = parallel.state_dict(keep_vars=True)
    wrong = [f"{name!r} is missing in the checkpoint" for name in state if name not in stored]
    wrong += [f"the model has no {name!r}" for name in stored if name not in state]
    for name, tensor in state.items():
        if name in stored:
            kept = stored[name]
            here = f"{tuple(tensor.shape)} of {tensor.dtype}"
            there = (
                f"{tuple(kept.size)} of {kept.properties.dtype}"
                if isinstance(kept, TensorStorageMetadata)
                else "no tensor"
            )
            if here != there:
                wrong.append(f"{name!r} is {there} in the checkpoint and {here} in the model")
    if wrong:
        raise ParallelError(f"the checkpoint is of another model: {_some(wrong)}. Load it into the model that it is of")
    coordinates = parallel.mesh.mesh.coordinates(parallel.mesh.rank)
    return {
        (MODEL, name): Part(
            torch.empty_like(local_tensor(tensor.detach()), device="cpu"),
            parallel.layout_of(name, tensor.shape),
            coordinates,
        )
        for name, tensor in state.items()
    }


def check_shared(parallel: ParallelModule, targets: Mapping[Path, Part | None]) -> None:
    """ParallelError if a tensor that the model has under several names has several values in the checkpoint."""
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in parallel.state_dict(keep_vars=True).items():
        part = targets[MODEL, name]
        assert part is not None  # model_targets has tensors only
        other, value = seen.setdefault(id(tensor), (name, part.local))
        if value is not part.local and not torch.equal(_bytes_of(value), _bytes_of(part.local)):
            raise ParallelError(f"{other!r} and {name!r} are one tensor in the model, and differ in the checkpoint")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """To compare: NaN differs from itself."""
    return tensor.contiguous().flatten().view(torch.uint8)


@torch.no_grad()
def fill(parallel: ParallelModule, targets: Mapping[Path, Part | None]) -> None:
    """Copy what was read for the model into it."""
    for name, tensor in parallel.state_dict(keep_vars=True).items():
        part = targets[MODEL, name]
        assert part is not None  # model_targets has tensors only
        local_tensor(tensor.detach()).copy_(part.local)


def check_optimizer(parallel: ParallelModule, optimizer: torch.optim.Optimizer, objects: Mapping[Path, Any]) -> None:
    """ParallelError if the checkpoint's optimizer is of another kind, or has other parameters in its groups."""
    if KIND not in objects or GROUPS not in objects:
        raise ParallelError("the checkpoint has no optimizer: load it without one, or save it with one")
    if objects[KIND] != type(optimizer).__name__:
        raise ParallelError(
            f"the checkpoint's optimizer is of the kind {objects[KIND]}, but {type(optimizer).__name__} is to be "
            "loaded: make one of the same kind, or load without an optimizer"
        )
    names = iter(parameter_names(parallel, optimizer))
    ours = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in objects[GROUPS]]
    if ours != theirs:
        differ = sorted(set(sum(ours, [])) ^ set(sum(theirs, [])))
        how = f"only one has {_some(differ)}" if differ else "or their order differs"
        raise ParallelError(
            f"the checkpoint's optimizer has groups of {[len(group) for group in theirs]} parameters, this one of "
            f"{[len(group) for group in ours]}; {how}"
        )


def optimizer_targets(
    parallel: ParallelModule, optimizer: torch.optim.Optimizer, metadata: Metadata
) -> tuple[dict[Path, Part | None], dict[str, dict[str, torch.Tensor]]]:
    """Fresh tensors for an optimizer's state, which a checkpoint fills: as parts by path, and by parameter and key.

    What has the shape of its parameter lies as the parameter does, as optimizers make it; the rest is replicated.
    Scalars (a `step`) are plain tensors, also those of parameters that are scalars themselves.
    """
    mesh = parallel.mesh
    parameters = dict(parallel.named_parameters())
    kept = {
        (path[2], path[3]): metadata.state_dict_metadata[name]
        for name, path in paths_of(metadata).items()
        if path[:2] == STATE
    }
    scalars = {"step"} | {
        key
        for (name, key), stored in kept.items()
        if isinstance(stored, TensorStorageMetadata) and not stored.size and parameters[name].ndim
    }
    targets: dict[Path, Part | None] = {}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for (name, key), stored in kept.items():
        path: Path = (*STATE, name, key)
        if not isinstance(stored, TensorStorageMetadata):
            targets[path] = None
            continue
        plain = not stored.size and key in scalars
        same = not plain and stored.size == parameters[name].shape
        layout = parallel.layout_of(name, parameters[name].shape) if same else Layout.replicated(stored.size)
        local = torch.empty(
            layout.local_shape, dtype=stored.properties.dtype, device="cpu" if plain else mesh.device_type
        )
        value = local if plain else distribute(local, layout, mesh)
        targets[path] = Part(local_tensor(value), layout, mesh.mesh.coordinates(mesh.rank))
        state.setdefault(name, {})[key] = value
    return targets, state


def restore(
    optimizer: torch.optim.Optimizer,
    names: Iterable[str],
    objects: Mapping[Path, Any],
    state: dict[str, dict[str, torch.Tensor]],
) -> None:
    """Give the optimizer the state that was read, and its groups' hyperparameters."""
    values: dict[str, dict[str, Any]] = {name: dict(tensors) for name, tensors in state.items()}
    for path, value in objects.items():
        if path[:2] == STATE:
            values.setdefault(path[2], {})[path[3]] = value
    numbers = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in objects[GROUPS]]
    optimizer.load_state_dict({"state": {numbers[name]: v for name, v in values.items()}, "param_groups": groups})


def _state_layout(parallel: ParallelModule, path: Path, value: torch.Tensor, parameter: torch.Tensor) -> Layout:
    """Where a tensor of an optimizer lies."""
    if not isinstance(value, DTensor) or all(placement.is_replicate() for placement in value.placements):
        return Layout.replicated(value.shape)
    if isinstance(parameter, DTensor) and (value.shape, value.placements) == (parameter.shape, parameter.placements):
        return parallel.layout_of(path[2], parameter.shape)
    raise ParallelError(
        f"the optimizer's {path[3]!r} of {path[2]!r}, of shape {tuple(value.shape)}, lies as {value.placements}; "
        "checkpoints take what lies as its parameter does, or is replicated"
    )


def _pickled(path: Path, value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # whatever an object's __reduce__ raises
        raise ParallelError(f"{name_of(path)!r} cannot be pickled into the checkpoint: {error}") from error
    buffer.seek(0)
    try:
        load_object(buffer)
    except ParallelError as error:
        raise ParallelError(f"{name_of(path)!r} could be saved, but not be loaded again: {error}") from error
    return buffer.getvalue()


def _some(items: list[str], most: int = 5) -> str:
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")
