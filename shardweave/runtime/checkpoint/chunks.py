"""Parts of tensors as chunks of a checkpoint: what torch.distributed.checkpoint is told to write and to read.

A rank's part of a tensor is one box of the whole tensor only where its layout is a plain shard. In general it is a
product of the pieces of each dimension (`parameters.ranges`); each is a chunk.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, product
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
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

from shardweave.ir import Layout, Mesh, ParallelError
from shardweave.runtime.checkpoint.files import CheckpointFiles
from shardweave.runtime.parameters import ranges

Path = tuple[str, ...]
"""Where a value stands in the nested state dict; joined by dots, its name in the checkpoint."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that a rank holds: where it starts in the whole tensor and in the rank's part, and its size."""

    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The view of it in the rank's part."""
        return local[tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))]


def pieces(layout: Layout, coordinates: Mapping[str, int]) -> list[Piece]:
    """The boxes that make up the part at `coordinates` (by axis name) of a tensor that lies as `layout`.

    A device that has no rows of a padded dimension has none.

    Examples
    --------
    >>> from shardweave.ir import Axis
    >>> x = Axis("gpu0", 2)
    >>> for piece in pieces(Layout(((2, x, 3), (5,))), {"gpu0": 1}):
    ...     print(piece)
    Piece(offsets=(3, 0), starts=(0, 0), sizes=(3, 5))
    Piece(offsets=(9, 0), starts=(3, 0), sizes=(3, 5))
    """
    dims: list[list[tuple[slice, int]]] = []  # of each dimension the pieces, and where each starts in the part
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
    """This rank's part, `local`, of a tensor that lies as `layout`."""

    local: torch.Tensor
    layout: Layout
    coordinates: Mapping[str, int]

    def chunks(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """The description of each piece, and the view of it."""
        return [
            (ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)), piece.of(self.local))
            for piece in pieces(self.layout, self.coordinates)
        ]


Values = Mapping[Path, Part | bytes]
"""What a rank writes: its parts of tensors, and pickled objects."""


def is_writer(path: Path, layout: Layout, mesh: Mesh, rank: int) -> bool:
    """Whether, of all ranks that hold the same part of the tensor at `path`, this one writes it.

    The ranks take turns from tensor to tensor, without talking about it.

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
    turn = int.from_bytes(sha256(name_of(path).encode()).digest()[:8])
    return index == turn % math.prod(axis.size for axis in copies)


def name_of(path: Path) -> str:
    """The name in the checkpoint of what stands at `path`, as torch's own planners flatten a state dict."""
    return ".".join(path)


class Writer(DefaultSavePlanner):
    """Has each rank write `values`, which no other rank does; torch's planner checks that every tensor is covered."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values
        self._tensors: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: what is written is known already."""

    def create_local_plan(self) -> SavePlan:
        items = []
        self._bytes = {name_of(path): value for path, value in self._values.items() if isinstance(value, bytes)}
        for path, value in self._values.items():
            name = name_of(path)
            if isinstance(value, bytes):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            size = torch.Size(value.layout.global_shape)
            properties = TensorProperties(dtype=value.local.dtype)
            for chunk, view in value.chunks():
                index = MetadataIndex(name, chunk.offsets)
                self._tensors[index] = view
                data = TensorWriteData(chunk, properties, size)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data={name_of(path): path for path in self._values})

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._bytes[write_item.index.fqn])
        return self._tensors[write_item.index]


def read(files: CheckpointFiles, targets: Mapping[Path, Part | None]) -> dict[Path, Any]:
    """Fill the parts of `targets` from a checkpoint, reading each chunk once; what is no tensor is returned.

    Raises
    ------
    ParallelError
        If a file cannot be read, is damaged, or does not hold all of a part.
    """
    objects: dict[Path, Any] = {}
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
            _box(view, item.dest_offsets, item.lengths).copy_(_box(chunk, item.storage_offsets, item.lengths))
    return objects


def _box(tensor: torch.Tensor, offsets: torch.Size, lengths: torch.Size) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
