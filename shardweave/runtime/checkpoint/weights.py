"""Weights in HuggingFace's file formats: each rank reads only its own part, and all ranks write one model together.

Names, shapes and dtypes of a file are read first, values piece by piece.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from shardweave.distributed import error_text, gather_from_ranks
from shardweave.ir import ParallelError
from shardweave.runtime.checkpoint.files import path_inside
from shardweave.runtime.checkpoint.state import Piece, check_values, pieces
from shardweave.runtime.initialise import initialise_tensors, run_on_parallel_module
from shardweave.runtime.module import ParallelModule
from shardweave.runtime.module_tree import is_extra_state, without_extra_state
from shardweave.runtime.parameters import local_tensor
from shardweave.runtime.tensor import gather

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `read` takes an index and reads only that part of the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[tuple[slice, ...]], torch.Tensor]


def open_checkpoint(path: Path, files: ExitStack) -> dict[str, Stored]:
    """The tensors of a checkpoint, by name; their values are not read yet. `files` keeps the files open.

    Raises
    ------
    ParallelError
        If a file has other contents, is cut off, or its index names a file outside of its folder.
    Exception
        Any error of the libraries that read the files.
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
    if isinstance(state, dict) and (of_modules := sorted(name for name in state if is_extra_state(str(name)))):
        raise ParallelError(
            f"it has the extra state of modules ({', '.join(of_modules)}): load it with "
            "parallel.load_state_dict(torch.load(path, mmap=True))"
        )
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
    if (path / SINGLE_FILE).exists():
        return _open_file(path / SINGLE_FILE, files)
    raise ParallelError(f"the folder has neither {SINGLE_FILE} nor {INDEX}: name the file itself")


def _weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor, from the index at `path`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ParallelError(f"{path.name} is no JSON: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ParallelError(f'{path.name} has no "weight_map" from names of tensors to names of files')
    return names


def _check_length(path: Path) -> None:
    """Compare the length of a safetensors file with its header, to detect a download that was cut off."""
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
    """The dtype of a file's slice, from an empty part of it; of a scalar, from its value."""
    return _at(piece, (slice(0, 0),) if piece.get_shape() else ()).dtype


TiedTensor = tuple[list[str], torch.Tensor]
"""A tensor of a state dict, with all its names."""


def load_weights(parallel: nn.Module, path: str | os.PathLike[str], model: nn.Module | None = None) -> None:
    """Load a file of the whole model's weights into `parallel`; each rank reads only its own part. Collective.

    Values are cast to the parameters' dtypes. The file needs one of the names of a tied parameter.

    Parameters
    ----------
    parallel : ParallelModule
        The result of `compile_parallel`.
    path : path
        A ``.safetensors`` file; a folder with ``model.safetensors``, or with several files and
        ``model.safetensors.index.json``; or a state dict that ``torch.save`` wrote.
    model : nn.Module, optional
        The model that `parallel` was compiled from. It is needed if it was on the meta device and has buffers that are
        not persistent, such as a rotary embedding's frequencies: the initialisers compute them, see `initialise`.

    Raises
    ------
    ParallelError
        On all ranks, before anything is changed: if the file cannot be read, lacks a tensor, has one that the model
        lacks, or has one of another shape or kind of dtype; or if a buffer would have no value.

    Examples
    --------
    >>> import shardweave as sw, tempfile
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    >>> parallel = sw.compile_parallel(model, sw.Cluster.local(1), torch.randn(4, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sw.save_weights(parallel, folder + "/saved")
    ...     sw.load_weights(parallel, folder + "/saved")
    """
    run_on_parallel_module(parallel, "load_weights", lambda module: _load(module, Path(path), model))


def _load(parallel: ParallelModule, path: Path, model: nn.Module | None) -> None:
    tensors = _by_tensor(parallel)
    known = {name for names, _ in tensors for name in names}
    left = sorted(parallel.unset - known)
    problems: list[str] = []
    if left and model is None:
        problems.append(
            f"no file holds {', '.join(left)}, which the meta device gave no value: pass the model as third argument"
        )
    with ExitStack() as files, torch.no_grad():
        try:
            stored = open_checkpoint(path, files)
            problems += _mismatches(parallel, tensors, stored)
        except Exception as error:  # unpickling may raise anything
            problems.append(f"it cannot be read ({error_text(error)})")
        _raise_on_all_ranks(parallel, problems, f"{path} cannot be loaded")
        if left and model is not None:
            initialise_tensors(parallel, model, 0, None, left)
        try:
            for names, tensor in tensors:
                found = stored[next(name for name in names if name in stored)]
                for piece in _local_pieces(parallel, names[0], tensor):
                    piece.of(local_tensor(tensor.detach())).copy_(found.read(piece.index))
        except Exception as error:
            problems.append(f"reading failed on the way, after some of it was loaded ({type(error).__name__}: {error})")
        _raise_on_all_ranks(parallel, problems, f"{path} is not loaded")
    parallel.unset.difference_update(known)


def save_weights(
    parallel: nn.Module, folder: str | os.PathLike[str], max_shard_bytes: float = 5e9, config: Any = None
) -> None:
    """Write the whole model's weights in HuggingFace's format. Collective; rank 0 writes, one file at a time.

    Small models make ``model.safetensors``; larger ones ``model-00001-of-000NN.safetensors`` and so on, and
    ``model.safetensors.index.json``. Tied parameters are written once. A rank holds at most one file's tensors.

    Parameters
    ----------
    parallel : ParallelModule
        The result of `compile_parallel`.
    folder : path
        A new or empty folder. It appears when all files are written.
    max_shard_bytes : float
        The most bytes of tensors in a file; a larger tensor gets a file of its own.
    config : optional
        ``model.config`` of a model of `transformers`, written as ``config.json`` for ``from_pretrained(folder)``.

    Raises
    ------
    ParallelError
        On all ranks, if the folder is not empty or cannot be written. No files are left then.
    """

    run_on_parallel_module(
        parallel, "save_weights", lambda module: _save(module, Path(folder), max_shard_bytes, config)
    )


def _save(parallel: ParallelModule, folder: Path, max_shard_bytes: float, config: Any) -> None:
    folder = folder.absolute()
    scratch = folder.with_name(f".{folder.name}.unfinished")
    shards = _shards(parallel, max_shard_bytes)
    first = parallel.mesh.rank == 0
    problem: list[str] = []

    def attempt(write: Callable[[], object]) -> None:
        """Run `write` on rank 0. After a failure it only takes part in the gathers; all ranks raise at the end."""
        if first and not problem:
            try:
                write()
            except Exception as error:
                shutil.rmtree(scratch, ignore_errors=True)
                problem.append(f"{folder} cannot be written: {error_text(error)}")

    def begin() -> None:
        check_values(parallel)
        if of_modules := sorted(name for name in parallel.state_dict() if is_extra_state(name)):
            raise ParallelError(
                f"safetensors files have no place for the extra state of modules ({', '.join(of_modules)}): use "
                "save_checkpoint, or torch.save(parallel.full_state_dict(), path) on one rank"
            )
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError("it is there already: name a new folder, or remove this one first")
        shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
        scratch.mkdir(parents=True)

    # 1. Make a hidden folder.
    attempt(begin)
    _raise_on_all_ranks(parallel, problem, "nothing is saved")
    # 2. Gather and write one file after another.
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        whole: dict[str, torch.Tensor] = {}
        for key, tensor in shard:
            value = gather(tensor, parallel.layout_of(key, tensor.shape), parallel.mesh, key)
            if first and not problem:
                whole[key] = value.cpu().contiguous()
            index[key] = name
        attempt(partial(save_file, whole, scratch / name, metadata={"format": "pt"}))

    # 3. Write the index and the config, and rename the folder.
    def finish() -> None:
        if len(shards) > 1:
            size = sum(tensor.nbytes for shard in shards for _, tensor in shard)
            text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2) + "\n"
            (scratch / INDEX).write_text(text, encoding="utf-8")
        if config is not None:
            config.save_pretrained(scratch)
        os.replace(scratch, folder)

    attempt(finish)
    _raise_on_all_ranks(parallel, problem, "nothing is saved")


def _shards(parallel: ParallelModule, limit: float) -> list[list[tuple[str, torch.Tensor]]]:
    """The tensors of each file, in the model's order."""
    shards: list[list[tuple[str, torch.Tensor]]] = [[]]
    size = 0
    for names, tensor in _by_tensor(parallel):
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append((names[0], tensor))
        size += tensor.nbytes
    return shards


def _by_tensor(parallel: ParallelModule) -> list[TiedTensor]:
    """Each tensor of the state dict, with all its names."""
    found: dict[int, TiedTensor] = {}
    for name, tensor in without_extra_state(parallel.state_dict(keep_vars=True)).items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _local_pieces(parallel: ParallelModule, name: str, tensor: torch.Tensor) -> list[Piece]:
    return pieces(parallel.layout_of(name, tensor.shape), parallel.mesh.mesh.coordinates(parallel.mesh.rank))


def _mismatches(parallel: ParallelModule, tensors: list[TiedTensor], stored: Mapping[str, Stored]) -> Iterator[str]:
    """The differences between the file's tensors and the model's. Tied tensors must be equal in the file."""
    if missing := [" or ".join(names) for names, _ in tensors if stored.keys().isdisjoint(names)]:
        yield f"it lacks {', '.join(missing)}"
    if unexpected := sorted(set(stored).difference(*(names for names, _ in tensors))):
        yield f"the model has no {', '.join(unexpected)}"
    for names, tensor in tensors:
        present = [name for name in names if name in stored]
        wrong = [f"{name} {text}" for name in present if (text := _difference(stored[name], tensor))]
        yield from wrong
        if not wrong and len(present) > 1:
            indices = [piece.index for piece in _local_pieces(parallel, names[0], tensor)]
            first = stored[present[0]]
            for other in present[1:]:
                if not all(torch.equal(first.read(index), stored[other].read(index)) for index in indices):
                    yield f"{present[0]} and {other} are one tensor in the model, and differ there"


def _difference(stored: Stored, tensor: torch.Tensor) -> str:
    if stored.shape != tuple(tensor.shape):
        return f"has the shape {stored.shape} there, and {tuple(tensor.shape)} in the model"
    if stored.dtype != tensor.dtype and not (stored.dtype.is_floating_point and tensor.is_floating_point()):
        return f"is of {stored.dtype} there, which is not converted into the model's {tensor.dtype}"
    return ""


def _raise_on_all_ranks(parallel: ParallelModule, problems: list[str], what: str) -> None:
    """Raise ParallelError on all ranks with the problems of the first rank that has some. Collective."""
    everywhere = gather_from_ranks(problems, parallel.mesh.timeout)
    for rank, found in enumerate(everywhere):
        if found:
            where = "" if found == everywhere[0] else f" (on rank {rank})"
            raise ParallelError(f"{what}{where}: {'; '.join(found)}")
