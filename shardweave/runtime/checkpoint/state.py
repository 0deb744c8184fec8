"""The state of a parallel model and its optimizer in a checkpoint: values by path, cut into chunks.

A rank's part of a tensor is one box of the whole tensor only where its layout is a plain shard. In general it is a
product of the pieces of each dimension (`parameters.ranges`). ``torch.distributed.checkpoint`` writes and reads each
piece as one chunk.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, product
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from shardweave.ir import Layout, Mesh, ParallelError
from shardweave.runtime.checkpoint.files import CheckpointFiles, load_object
from shardweave.runtime.module import ParallelModule
from shardweave.runtime.module_tree import is_extra_state, without_extra_state
from shardweave.runtime.parameters import local_tensor, ranges
from shardweave.runtime.tensor import distribute

StatePath = tuple[str, ...]
"""The keys of a value in the nested state dict. Joined by dots, they are its name in the checkpoint."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that a rank holds: offsets in the whole tensor, starts in the rank's part, and sizes."""

    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The view of the box in the rank's part."""
        return local[_slices(self.starts, self.sizes)]

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the box in the whole tensor."""
        return _slices(self.offsets, self.sizes)


def _slices(starts: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def pieces(layout: Layout, coordinates: Mapping[str, int]) -> list[Piece]:
    """The boxes that make up the part at `coordinates` (by axis name) of a tensor with `layout`.

    The list is empty for a device that has no rows of a padded dimension.

    Examples
    --------
    >>> from shardweave.ir import Axis
    >>> x = Axis("gpu0", 2)
    >>> for piece in pieces(Layout(((2, x, 3), (5,))), {"gpu0": 1}):
    ...     print(piece)
    Piece(offsets=(3, 0), starts=(0, 0), sizes=(3, 5))
    Piece(offsets=(9, 0), starts=(3, 0), sizes=(3, 5))
    """
    dims: list[list[tuple[slice, int]]] = []  # the pieces of each dimension, with their starts in the part
    for runs in ranges(layout, coordinates):
        starts = accumulate((run.stop - run.start for run in runs), initial=0)
        found = zip(runs, starts)
        dims.append([(run, at) for run, at in found if run.stop > run.start or layout.padding is None])
    return [
        Piece(
            tuple(run.start for run, _ in box),
            tuple(start for _, start in box),
            tuple(run.stop - run.start for run, _ in box),
        )
        for box in product(*dims)
    ]


@dataclass(frozen=True)
class Part:
    """This rank's part, `local`, of a tensor with `layout`."""

    local: torch.Tensor
    layout: Layout
    coordinates: Mapping[str, int]

    def chunks(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """The description and the view of each piece."""
        return [
            (ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)), piece.of(self.local))
            for piece in pieces(self.layout, self.coordinates)
        ]


Values = Mapping[StatePath, Part | bytes]
"""The values that a rank writes: its parts of tensors, and pickled objects."""


def is_writer(path: StatePath, layout: Layout, mesh: Mesh, rank: int) -> bool:
    """Whether this rank writes its part of the tensor at `path`: one of the ranks that hold the same part does.

    A hash of the name spreads the tensors over these ranks without communication.

    Examples
    --------
    >>> mesh = Mesh.of_levels([("gpu", 4)])
    >>> layout = Layout(((mesh.axes[0], 4),))
    >>> [[is_writer((name,), layout, mesh, rank) for rank in range(4)] for name in "ad"]
    [[True, True, False, False], [False, False, True, True]]
    """
    index = 0
    copies = [axis for axis in mesh.axes if axis not in layout.shard_axes]
    for axis in copies:
        index = index * axis.size + axis.coordinate(rank)
    hashed = int.from_bytes(sha256(name_of(path).encode()).digest()[:8])
    return index == hashed % math.prod(axis.size for axis in copies)


def name_of(path: StatePath) -> str:
    """The name of a value in the checkpoint, as torch's planners flatten a state dict."""
    return ".".join(path)


class Writer(DefaultSavePlanner):
    """Lets each rank write its own `values`. torch's planner checks that every tensor is covered."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values
        self._data: dict[MetadataIndex, torch.Tensor | bytes] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the values are given to ``__init__``."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for path, value in self._values.items():
            name = name_of(path)
            if isinstance(value, bytes):
                self._data[MetadataIndex(name)] = value
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            size = torch.Size(value.layout.global_shape)
            properties = TensorProperties(dtype=value.local.dtype)
            for chunk, view in value.chunks():
                index = MetadataIndex(name, chunk.offsets)
                self._data[index] = view
                data = TensorWriteData(chunk, properties, size)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data={name_of(path): path for path in self._values})

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._data[write_item.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value


def read(files: CheckpointFiles, targets: Mapping[StatePath, Part | None]) -> dict[StatePath, Any]:
    """Fill the parts of `targets` from a checkpoint, and return the objects; each chunk is read once.

    Raises
    ------
    ParallelError
        If a file cannot be read, is damaged, or does not hold all of a part.
    """
    objects: dict[StatePath, Any] = {}
    wanted: dict[MetadataIndex, list[tuple[ReadItem, torch.Tensor]]] = {}  # by the chunk that is read
    for path, part in targets.items():
        name = name_of(path)
        stored = files.metadata.state_dict_metadata[name]
        if part is None:
            objects[path] = files.object(name)
            continue
        if not isinstance(stored, TensorStorageMetadata):
            raise ParallelError(f"the checkpoint {files.folder} has no tensor as {name!r}")
        views = {chunk.offsets: (chunk, view) for chunk, view in part.chunks()}
        items = create_read_items_for_chunk_list(name, stored, [chunk for chunk, _ in views.values()])
        found = sum(math.prod(item.lengths) for item in items)
        if found != sum(math.prod(chunk.sizes) for chunk, _ in views.values()):
            raise ParallelError(f"the checkpoint {files.folder} does not hold all of {name!r}")
        for item in items:
            _, view = views[item.dest_index.offset or torch.Size()]
            wanted.setdefault(item.storage_index, []).append((item, view))
    for index in sorted(wanted, key=files.place):
        chunk = files.tensor(index)
        for item, view in wanted[index]:
            source = chunk[_slices(item.storage_offsets, item.lengths)]
            view[_slices(item.dest_offsets, item.lengths)].copy_(source)
    return objects


MODEL, STATE = "model", ("optimizer", "state")
KIND, GROUPS, SEEDS, EXTRA = ("optimizer", "kind"), ("optimizer", "param_groups"), ("seeds",), ("extra",)
MODULES = ("modules",)
"""What modules return from ``get_extra_state``, by their names in the state dict."""


def collect(
    parallel: ParallelModule, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], copy: bool
) -> Values:
    """The values that this rank writes: its parts of tensors, on rank 0 also the objects.

    With `copy`, parts are copied to the CPU, so that training can continue.
    """
    check_values(parallel)
    mesh, rank = parallel.mesh.mesh, parallel.mesh.rank
    coordinates = mesh.coordinates(rank)
    tensors: dict[StatePath, tuple[torch.Tensor, Layout]] = {}
    objects: dict[StatePath, Any] = {SEEDS: parallel._seeds.state, EXTRA: dict(extra)}
    state_dict = parallel.state_dict(keep_vars=True)
    if of_modules := {name: value for name, value in state_dict.items() if is_extra_state(name)}:
        objects[MODULES] = of_modules
    for name, tensor in without_extra_state(state_dict).items():
        tensors[MODEL, name] = tensor, parallel.layout_of(name, tensor.shape)
    if optimizer is not None:
        names = parameter_names(parallel, optimizer)
        state = optimizer.state_dict()
        objects[KIND] = type(optimizer).__name__
        objects[GROUPS] = [{**g, "params": [names[index] for index in g["params"]]} for g in state["param_groups"]]
        parameters = dict(parallel.named_parameters())
        for index, values in state["state"].items():
            for key, value in values.items():
                path: StatePath = (*STATE, names[index], str(key))
                if isinstance(value, torch.Tensor):
                    tensors[path] = value, _state_layout(parallel, path, value, parameters[names[index]])
                else:
                    objects[path] = value
    copies: dict[int, torch.Tensor] = {}  # shared tensors are copied once
    written: dict[StatePath, Part | bytes] = {}
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
    """Raise ParallelError if a tensor has no value yet because the model was on the meta device."""
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


def paths_of(metadata: Metadata) -> dict[str, StatePath]:
    """The path of every name in a checkpoint; a name without a recorded path is its own path."""
    return {name: (metadata.planner_data or {}).get(name, (name,)) for name in metadata.state_dict_metadata}


def model_targets(parallel: ParallelModule, metadata: Metadata) -> dict[StatePath, Part | None]:
    """New tensors on the CPU for this rank's parts of the model. `read` fills them, `fill_model` copies them.

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
    state = without_extra_state(parallel.state_dict(keep_vars=True))
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


def check_shared(parallel: ParallelModule, targets: Mapping[StatePath, Part | None]) -> None:
    """Raise ParallelError if a tied tensor has different values under its names in the checkpoint."""
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in without_extra_state(parallel.state_dict(keep_vars=True)).items():
        part = targets[MODEL, name]
        assert part is not None  # model_targets has tensors only
        other, value = seen.setdefault(id(tensor), (name, part.local))
        if value is not part.local and not torch.equal(_bytes_of(value), _bytes_of(part.local)):
            raise ParallelError(f"{other!r} and {name!r} are one tensor in the model, and differ in the checkpoint")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, to compare: NaN differs from itself."""
    return tensor.contiguous().flatten().view(torch.uint8)


@torch.no_grad()
def fill_model(parallel: ParallelModule, targets: Mapping[StatePath, Part | None]) -> None:
    """Copy the loaded values into the model."""
    for name, tensor in without_extra_state(parallel.state_dict(keep_vars=True)).items():
        part = targets[MODEL, name]
        assert part is not None  # model_targets has tensors only
        local_tensor(tensor.detach()).copy_(part.local)


def check_extra_state(parallel: ParallelModule, stored: Mapping[str, Any]) -> None:
    """Raise ParallelError if other modules have extra state in the checkpoint than in the model."""
    here = {name for name in parallel.state_dict() if is_extra_state(name)}
    if differing := sorted(here.symmetric_difference(stored)):
        raise ParallelError(
            f"the checkpoint is of another model: the extra state of modules differs, {_some(differing)} is only in "
            f"{'the model' if differing[0] in here else 'the checkpoint'}. Load it into the model that it is of"
        )


def restore_extra_state(parallel: ParallelModule, values: Mapping[str, Any]) -> None:
    """Give modules what they returned from ``get_extra_state`` when the checkpoint was saved."""
    for name, value in values.items():
        parallel.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def check_optimizer(
    parallel: ParallelModule, optimizer: torch.optim.Optimizer, objects: Mapping[StatePath, Any]
) -> None:
    """Raise ParallelError if the checkpoint's optimizer is of another class, or has other parameters in its groups."""
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
    parallel: ParallelModule, metadata: Metadata
) -> tuple[dict[StatePath, Part | None], dict[str, dict[str, torch.Tensor]]]:
    """New tensors for an optimizer's state, which `read` fills: as parts by path, and by parameter and key.

    States of their parameter's shape get its layout; others are replicated. Scalars (a `step`) are plain tensors, also
    those of scalar parameters.
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
    targets: dict[StatePath, Part | None] = {}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for (name, key), stored in kept.items():
        path: StatePath = (*STATE, name, key)
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


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Iterable[str],
    objects: Mapping[StatePath, Any],
    state: dict[str, dict[str, torch.Tensor]],
) -> None:
    """Load the state and the hyperparameters of the groups into the optimizer."""
    values: dict[str, dict[str, Any]] = {name: dict(tensors) for name, tensors in state.items()}
    for path, value in objects.items():
        if path[:2] == STATE:
            values.setdefault(path[2], {})[path[3]] = value
    numbers = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in objects[GROUPS]]
    optimizer.load_state_dict({"state": {numbers[name]: v for name, v in values.items()}, "param_groups": groups})


def _state_layout(parallel: ParallelModule, path: StatePath, value: torch.Tensor, parameter: torch.Tensor) -> Layout:
    """The layout of a tensor of the optimizer's state."""
    if not isinstance(value, DTensor) or all(placement.is_replicate() for placement in value.placements):
        return Layout.replicated(value.shape)
    if isinstance(parameter, DTensor) and (value.shape, value.placements) == (parameter.shape, parameter.placements):
        return parallel.layout_of(path[2], parameter.shape)
    raise ParallelError(
        f"the optimizer's {path[3]!r} of {path[2]!r}, of shape {tuple(value.shape)}, has the placements "
        f"{value.placements}; checkpoints take states with the placements of their parameter, or replicated ones"
    )


def _pickled(path: StatePath, value: Any) -> bytes:
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
