"""Checkpoints as files have them: names, shapes and dtypes at once, values piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardweave.errors import ParallelError
from shardweave.runtime.paths import path_inside

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
Part = list[list[slice]]
"""A part of a tensor: the contiguous pieces of each dimension; see `parameters.ranges`."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `read` takes a slice of each dimension and touches no more of the file than that."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[tuple[slice, ...]], torch.Tensor]

    def pieces(self, part: Part) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """The pieces of `part`, and where each lies within it; without those that are empty."""
        ends = [accumulate((piece.stop - piece.start for piece in pieces), initial=0) for pieces in part]
        places = [[slice(*bounds) for bounds in pairwise(of)] for of in ends]
        for place, index in zip(product(*places), product(*part)):
            if all(piece.stop > piece.start for piece in index):
                yield place, self.read(index)


def open_checkpoint(path: Path, files: ExitStack) -> dict[str, Stored]:
    """The tensors of a checkpoint, by name; their values are not read. Files stay open as long as `files`.

    Raises
    ------
    ParallelError
        For a file with something else in it, or one that is cut off, or whose index leads out of its folder.
    Exception
        Whatever the libraries raise that read files.
    """
    return _open_folder(path, files) if path.is_dir() else _open_file(path, files)


def _open_file(path: Path, files: ExitStack) -> dict[str, Stored]:
    if not path.is_file():
        raise ParallelError(f"{path} is {'no file' if path.exists() else 'not there'}")
    if path.suffix == ".safetensors":
        _check_length(path)
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ParallelError(f"{path.name} is damaged or no safetensors file: {error}") from error
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        return {name: Stored(tuple(it.get_shape()), _dtype(it), partial(_at, it)) for name, it in slices.items()}
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ParallelError("it is no state dict, a dictionary of nothing but tensors: save the state dict by itself")
    return {name: Stored(tuple(tensor.shape), tensor.dtype, partial(_at, tensor)) for name, tensor in state.items()}


def _open_folder(path: Path, files: ExitStack) -> dict[str, Stored]:
    if (path / INDEX).exists():
        names = _weight_map(path / INDEX)
        found: dict[str, Stored] = {}
        disagree: list[str] = []
        for file in sorted(set(names.values())):
            there = _open_file(path_inside(path, file), files)
            disagree += set(there) ^ {name for name, listed in names.items() if listed == file}
            found.update(there)
        if disagree:
            raise ParallelError(
                f"{INDEX} and the files that it lists do not agree about {', '.join(sorted(set(disagree)))}"
            )
        return found
    if (path / WHOLE).exists():
        return _open_file(path / WHOLE, files)
    raise ParallelError(f"the folder has neither {WHOLE} nor {INDEX}: name the file itself")


def _weight_map(path: Path) -> dict[str, str]:
    """In which file each tensor lies, as the index at `path` says."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ParallelError(f"{path.name} is no JSON: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ParallelError(f'{path.name} has no "weight_map" from names of tensors to names of files')
    return names


def _check_length(path: Path) -> None:
    """Compare the length of a safetensors file with what its header says, to tell a download that was cut off."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if not 2 <= header_size <= size - 8:
            raise ParallelError(
                f"{path.name} is cut off or no safetensors file: its header would have {header_size:,} bytes, the file "
                f"has {size:,}"
            )
        try:
            header = json.loads(file.read(header_size))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            expected = 8 + header_size + max(ends, default=0)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ParallelError(f"{path.name} is damaged or no safetensors file: its header is unreadable") from error
    if size != expected:
        raise ParallelError(
            f"{path.name} has {size:,} bytes, and {expected:,} by its header: it is cut off or damaged, get it again"
        )


def _at(tensor: Any, index: tuple[slice, ...]) -> torch.Tensor:
    piece: torch.Tensor = tensor[index]
    return piece


def _dtype(piece: Any) -> torch.dtype:
    """The dtype of a file's slice, from an empty part of it; a scalar has none, and is read."""
    return _at(piece, (slice(0, 0),) if piece.get_shape() else ()).dtype
