"""Checkpoints as files have them: names, shapes and dtypes at once, values piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

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
    Exception
        Whatever the libraries raise that read files, and ValueError for a file with something else in it.
    """
    if path.is_dir():
        return _open_folder(path, files)
    if path.suffix == ".safetensors":
        file = files.enter_context(safe_open(path, framework="pt"))
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        return {name: Stored(tuple(it.get_shape()), _dtype(it), partial(_at, it)) for name, it in slices.items()}
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError("it is no state dict, a dictionary of nothing but tensors: save the state dict by itself")
    return {name: Stored(tuple(tensor.shape), tensor.dtype, partial(_at, tensor)) for name, tensor in state.items()}


def _open_folder(path: Path, files: ExitStack) -> dict[str, Stored]:
    if (path / INDEX).exists():
        names: Mapping[str, str] = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
        found: dict[str, Stored] = {}
        for file in sorted(set(names.values())):
            found.update(open_checkpoint(path / file, files))
        if absent := sorted(set(names) ^ set(found)):
            raise ValueError(f"{INDEX} and the files that it lists do not agree about {', '.join(absent)}")
        return found
    if (path / WHOLE).exists():
        return open_checkpoint(path / WHOLE, files)
    raise FileNotFoundError(f"the folder has neither {WHOLE} nor {INDEX}: name the file itself")


def _at(tensor: Any, index: tuple[slice, ...]) -> torch.Tensor:
    piece: torch.Tensor = tensor[index]
    return piece


def _dtype(piece: Any) -> torch.dtype:
    """The dtype of a file's slice, from an empty part of it; a scalar has none, and is read."""
    return _at(piece, (slice(0, 0),) if piece.get_shape() else ()).dtype
