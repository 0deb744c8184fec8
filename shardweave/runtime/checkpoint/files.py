"""The files of a checkpoint: written with checksums, and read without trust in their contents.

A checkpoint is a folder of ``torch.distributed.checkpoint``: ``*.distcp`` files with the values, and ``.metadata``, a
pickle that describes them. `save_checkpoint` also writes ``checksums.json``, which that format ignores:

- It lists the segments of every file, one for each tensor chunk or object, with their CRC-32. Checksums are computed
  from the bytes that are passed to the file. A rank that loads checks the segments that it reads.
- ``.metadata`` is unpickled with the few classes that such metadata need. Nothing else is imported or called.
- Paths in ``.metadata`` or in an index of weights are followed only within the folder of that file.
"""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from shardweave.distributed import error_text
from shardweave.ir import ParallelError


def path_inside(folder: Path, name: str) -> Path:
    """The file called `name` in `folder`.

    Links are followed within the folder, and from ``snapshots/<revision>`` to ``blobs`` of Hugging Face's cache.

    Raises
    ------
    ParallelError
        If `name` is absolute, has ``..`` in it, or is a link out of the folder.

    Examples
    --------
    >>> path_inside(Path("weights"), "model-00001-of-00002.safetensors").name
    'model-00001-of-00002.safetensors'
    """
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ParallelError(f"the file name {name!r} does not name a file in {folder}, and is not followed")
    path, root = folder / name, folder.resolve()
    roots = [root] + [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    target = path.resolve()
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise ParallelError(
            f"{name!r} in {folder} is a link to {target}, outside of the folder, and is not followed: put the file "
            "itself there, or name the folder that it is in"
        )
    return path


METADATA = ".metadata"
CHECKSUMS = "checksums.json"
SUFFIX = ".distcp"
"""The suffix of the files with the values."""

_BUFFER_BYTES = 2**22
_FORMAT, _VERSION = "shardweave checksums", 1


class Segment(NamedTuple):
    """The bytes ``[start, end)`` of a file, and their CRC-32."""

    start: int
    end: int
    crc32: int


@dataclass(frozen=True)
class _ChecksummedResult(WriteResult):
    """One written item, with its segments in the file."""

    segments: tuple[Segment, ...] = ()


class _ChecksummedStream:
    """A file that is written sequentially. A segment ends wherever the position is read."""

    def __init__(self, stream: Any, segments: list[Segment]) -> None:
        self._stream, self._segments = stream, segments
        self._start = self._end = self._crc = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            count: int = self._stream.write(data)
        except OSError as error:  # torch's writer raises another error about its position instead
            self.error = self.error or error
            raise
        self._crc = zlib.crc32(data, self._crc)
        self._end += count
        return count

    def tell(self) -> int:
        self.end_segment()
        return self._end

    def end_segment(self) -> None:
        if self._end > self._start:
            self._segments.append(Segment(self._start, self._end, self._crc))
            self._start, self._crc = self._end, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _ChecksummedFiles(FileSystem):
    """The file system of torch's writer, which records the segments of each file by its name."""

    def __init__(self, wanted_bytes: int) -> None:
        self.segments: dict[str, list[Segment]] = {}
        self._wanted_bytes = wanted_bytes

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        segments = self.segments[Path(path).name] = []
        stream: _ChecksummedStream | None = None
        try:
            with Path(path).open(mode) as file:
                stream = _ChecksummedStream(file, segments)
                yield stream
                stream.end_segment()
        except Exception as error:
            cause = error if isinstance(error, OSError) else stream and stream.error
            if not cause:
                raise
            raise ParallelError(_failed_write(Path(path), cause, self._wanted_bytes)) from error


class ChecksummedWriter(FileSystemWriter):
    """Writes a checkpoint as torch does, and ``checksums.json``.

    Errors show `wanted_bytes`, the bytes that this rank has to write.
    """

    def __init__(self, folder: Path, wanted_bytes: int) -> None:
        super().__init__(folder)
        self.fs = self._files = _ChecksummedFiles(wanted_bytes)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for result in super().write_data(plan, planner).wait():
            place = result.storage_data
            segments = tuple(
                segment
                for segment in self._files.segments[place.relative_path]
                if segment.start < place.offset + place.length and place.offset < segment.end
            )
            results.append(_ChecksummedResult(result.index, result.size_in_bytes, place, segments))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        found: dict[str, set[Segment]] = {METADATA: set(self._files.segments[f"{METADATA}.tmp"])}
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result, _ChecksummedResult):
                found.setdefault(result.storage_data.relative_path, set()).update(result.segments)
        files = {name: sorted(segments) for name, segments in sorted(found.items())}
        content = {"format": _FORMAT, "version": _VERSION, "files": files, "crc32": _crc32_of(files)}
        with self.fs.create_stream(Path(self.path) / CHECKSUMS, "wb") as stream:
            stream.write(json.dumps(content).encode())
            stream.flush()
            os.fsync(stream.fileno())


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint that is read."""

    folder: Path
    metadata: Metadata
    """The description of the values and their places in the files."""
    segments: Mapping[str, list[Segment]] | None
    """The segments of each file; None for a checkpoint without checksums."""

    @classmethod
    def open(cls, folder: Path) -> CheckpointFiles:
        """Read ``.metadata`` and the checksums; ParallelError if one of them is damaged or has unexpected contents."""
        segments = _read_checksums(folder)
        path = folder / METADATA
        with _opened(path) as file:
            if segments is not None:
                _check(path, file, segments.get(METADATA, []), "the list of what the checkpoint holds")
            file.seek(0)
            return cls(folder, _metadata_of(path, file), segments)

    def check_folder(self) -> None:
        """Raise ParallelError if files are missing, have another size than was written, or are from another save."""
        sizes = {
            file.name: file.stat().st_size
            for file in self.folder.iterdir()
            if file.suffix == SUFFIX or file.name == METADATA
        }
        wanted = {place.relative_path for place in self.metadata.storage_data.values()}
        wrong = [f"{name} is missing" for name in sorted(wanted) if not path_inside(self.folder, name).exists()]
        if self.segments is not None:
            for name, segments in self.segments.items():
                size = segments[-1].end if segments else 0
                if sizes.get(name, size) != size:
                    wrong.append(f"{name} has {sizes[name]:,} bytes, {size:,} were written")
            foreign = sorted(name for name, size in sizes.items() if size and name not in self.segments)
            wrong += [f"{name} is not from this save" for name in foreign]
        if wrong:
            shown = wrong[:5] + [f"and {len(wrong) - 5} more" for _ in wrong[5:6]]
            raise ParallelError(f"the checkpoint {self.folder} is damaged: {'; '.join(shown)}. {_WAY_OUT}")

    def place(self, index: MetadataIndex) -> tuple[str, int]:
        """The file of a chunk or object, and its offset there in bytes."""
        if index not in self.metadata.storage_data:
            raise ParallelError(f"the checkpoint {self.folder} does not say where {_described(index)} is stored")
        found = self.metadata.storage_data[index]
        return found.relative_path, found.offset

    def tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The chunk at `index`, on the CPU, with the shape and dtype of the metadata."""
        stored = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(stored, TensorStorageMetadata)  # `index` is of a chunk in the metadata
        sizes = next(chunk.sizes for chunk in stored.chunks if index.offset in (None, chunk.offsets))
        found = self._load(index)
        here = (tuple(found.shape), found.dtype) if isinstance(found, torch.Tensor) else type(found).__name__
        if here != (tuple(sizes), stored.properties.dtype):
            raise ParallelError(
                f"the checkpoint {self.folder} is damaged: {_described(index)} is {here} in its file and "
                f"{(tuple(sizes), stored.properties.dtype)} in {METADATA}. {_WAY_OUT}"
            )
        return found  # type: ignore[no-any-return]

    def object(self, name: str) -> Any:
        """The object saved as `name`: plain types and tensors, and classes that the user has allowed."""
        return self._load(MetadataIndex(name))

    def _load(self, index: MetadataIndex) -> Any:
        """The bytes stored at `index`, after their checksum was verified."""
        name, start = self.place(index)
        end, what = start + self.metadata.storage_data[index].length, _described(index)
        path = path_inside(self.folder, name)
        with _opened(path) as file:
            if self.segments is not None:
                found = self.segments.get(name, [])
                covering = [segment for segment in found if segment.start < end and start < segment.end]
                _check(path, file, covering, what)
            if os.fstat(file.fileno()).st_size < end:
                raise ParallelError(f"{path} is damaged: it ends before byte {end:,}, where {what} does. {_WAY_OUT}")
            try:
                return load_object(_create_file_view(file, start, end - start))
            except Exception as error:  # unpickling damaged bytes may raise anything
                if isinstance(error, ParallelError):
                    raise ParallelError(f"{what} of the checkpoint {self.folder}: {error}") from error
                raise ParallelError(
                    f"the checkpoint {self.folder} is damaged: {what} cannot be read "
                    f"({type(error).__name__}: {error}). {_WAY_OUT}"
                ) from error


def load_object(file: Any) -> Any:
    """Load a file of `torch.save` with plain types, tensors, NumPy arrays, and classes that the user has allowed.

    ParallelError names any other classes and functions in it.
    """
    with torch.serialization.safe_globals(_numpy_globals()):
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            file.seek(0)
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            if not refused:
                raise
            raise ParallelError(
                f"it is made with {', '.join(sorted(refused))}, and only plain Python types, tensors and NumPy arrays "
                "are read from checkpoints, since anything else can run code: save a state dict of plain values "
                "instead, or allow what you trust with torch.serialization.add_safe_globals([...])"
            ) from error


_WAY_OUT = (
    f"Load another checkpoint. (If you know that its files were changed on purpose, remove {CHECKSUMS}: "
    "it is then loaded without being checked.)"
)


def _numpy_globals() -> list[Any]:
    """The functions and classes in pickles of NumPy's arrays and numbers."""
    import numpy as np

    array: Any = np.zeros(1).__reduce__()[0]
    number: Any = np.float64(0).__reduce__()[0]
    dtypes = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFDSU"}
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")  # of NumPy 1 and 2
    arrays, numbers = ([(f, f"{m}.{n}") for m in modules] for f, n in [(array, "_reconstruct"), (number, "scalar")])
    return [np.ndarray, np.dtype, *arrays, *numbers, *dtypes]


def _described(index: MetadataIndex) -> str:
    at = f" from {tuple(index.offset)} on" if index.offset is not None and any(index.offset) else ""
    return f"{index.fqn!r}{at}"


def _failed_write(path: Path, error: OSError, wanted_bytes: int) -> str:
    try:
        usage = shutil.disk_usage(path.parent)
        room = f"; its disk has {usage.free:,} of {usage.total:,} bytes free"
    except OSError:
        room = ""
    return (
        f"writing {path} failed: {error.strerror or error} (this rank has {wanted_bytes:,} bytes to write{room}). "
        "Make room, or save to another folder"
    )


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ParallelError(f"{path} cannot be read: {error.strerror or error}") from error


def _check(path: Path, file: BufferedReader, segments: list[Segment], what: str) -> None:
    """Compare segments of a file with their checksums."""
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, max((end - start for start, end, _ in segments), default=0))))
    for start, end, crc32 in segments:
        file.seek(start)
        found, left = 0, end - start
        while left and (count := file.readinto(buffer[:left])):
            found, left = zlib.crc32(buffer[:count], found), left - count
        if left or found != crc32:
            raise ParallelError(
                f"{path} is damaged: bytes {start:,} to {end:,}, which hold {what}, are not those that were written "
                f"(by their checksum). {_WAY_OUT}"
            )
    if not segments:
        raise ParallelError(f"{path} is not from this save: {CHECKSUMS} does not list it. {_WAY_OUT}")


def _crc32_of(files: Mapping[str, list[Segment]]) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


def _read_checksums(folder: Path) -> dict[str, list[Segment]] | None:
    """The segments of each file; None if the checkpoint has no checksums."""
    path = folder / CHECKSUMS
    if not path.exists():
        return None
    try:
        with _opened(path) as file:
            content = json.load(file)
        if content["version"] != _VERSION:
            raise ParallelError(
                f"{path} is of version {content['version']!r}, this shardweave reads version {_VERSION}: update "
                "shardweave, or remove the file to load the checkpoint without being checked"
            )
        files = {str(name): [Segment(*map(int, each)) for each in found] for name, found in content["files"].items()}
        whole = content["format"] == _FORMAT and content["crc32"] == _crc32_of(files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParallelError(f"{path} is damaged ({type(error).__name__}: {error}). {_WAY_OUT}") from error
    for segments in files.values():
        whole &= all(before.end == after.start for before, after in pairwise(segments))
    if not whole:
        raise ParallelError(f"{path} is damaged: it is not what was written (by its own checksum). {_WAY_OUT}")
    return files


_CLASSES: Mapping[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")
        if isinstance(getattr(metadata, name), type)
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): kind
        for module in ("pathlib", "pathlib._local")  # the second since Python 3.13
        for name, kind in [("PosixPath", pathlib.PurePosixPath), ("WindowsPath", pathlib.PureWindowsPath)]
    },
    **{
        ("torch", str(value).removeprefix("torch.")): value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
    },
}
"""The classes that metadata may contain, by module and name."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the classes of checkpoint metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise ParallelError(
                f"it asks for {module}.{name}, which is none of the classes that the metadata of a checkpoint "
                "consist of: the file can be made to run code and is not read"
            )
        return _CLASSES[module, name]


def _metadata_of(path: Path, file: BufferedReader) -> Metadata:
    """Unpickle ``.metadata`` and check its contents."""
    try:
        found = _MetadataUnpickler(file).load()
        problem = _problem_of(path.parent, found)
    except Exception as error:  # unpickling damaged bytes may raise anything
        raise ParallelError(f"{path} cannot be read: {error_text(error)}") from error
    if problem:
        raise ParallelError(f"{path} is damaged or no checkpoint's: {problem}")
    assert isinstance(found, Metadata)  # _problem_of has checked it
    return found


def _problem_of(folder: Path, found: object) -> str | None:
    """The problem with unpickled metadata; None if there is none."""
    if not isinstance(found, Metadata):
        return f"expected torch's Metadata, got {type(found).__name__}"
    if not isinstance(found.state_dict_metadata, dict) or not isinstance(found.storage_data, dict):
        return "it lacks the tables of values and of files"
    paths = found.planner_data or {}
    if not isinstance(paths, dict) or not all(isinstance(path, tuple) and path for path in paths.values()):
        return "its names have no paths"
    for name, stored in found.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(stored, TensorStorageMetadata | BytesStorageMetadata):
            return f"{name!r} is described by {type(stored).__name__}"
        if not isinstance(stored, TensorStorageMetadata):
            continue
        size = tuple(stored.size)
        if not isinstance(stored.properties.dtype, torch.dtype) or any(n < 0 for n in size):
            return f"{name!r} has the dtype {stored.properties.dtype!r} and the shape {size}"
        for chunk in stored.chunks:
            ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes)]
            fits = len(chunk.offsets) == len(chunk.sizes) == len(size)
            if not fits or min([*chunk.offsets, *chunk.sizes, 0]) < 0 or any(e > n for e, n in zip(ends, size)):
                return f"a chunk of {name!r}, {tuple(chunk.sizes)} at {tuple(chunk.offsets)}, is outside of {size}"
        if sum(prod(chunk.sizes) for chunk in stored.chunks) != prod(size):
            return f"the chunks of {name!r} do not make up its shape {size}"
    for index, place in found.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(place, filesystem._StorageInfo):
            return f"the place of {index!r} is {place!r}"
        if not isinstance(place.relative_path, str) or min(place.offset, place.length) < 0:
            return f"{_described(index)} is at {place!r}"
        if getattr(place, "transform_descriptors", None):
            return f"{_described(index)} was written with {place.transform_descriptors}, which shardweave does not read"
    for name in {place.relative_path for place in found.storage_data.values()}:
        path_inside(folder, name)
    return None
