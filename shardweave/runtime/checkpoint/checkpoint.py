"""Checkpoints: saved under the model's own names and whole shapes, loaded by any plan on any number of ranks.

They are checkpoints of ``torch.distributed.checkpoint``, with checksums beside them.

- *Folders.* A save of ``name`` is written to ``.name.saving``, which takes its place when all ranks are done, so that
  one whole checkpoint exists whatever ends the program. Between two renames the older one is ``.name.old``.
- A load reads everything first, and changes the model only when all ranks have read their parts.
- Saves in the background run one at a time, and their errors are raised by the next save or `Saving.wait`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save

from shardweave.distributed import checkpoint_group, run_checkpoint_step
from shardweave.ir import CheckpointNotFound, LostRankError, ParallelError
from shardweave.ops import Seeds
from shardweave.runtime.checkpoint import state as states
from shardweave.runtime.checkpoint.files import CHECKSUMS, METADATA, SUFFIX, CheckpointFiles, ChecksummedWriter
from shardweave.runtime.checkpoint.state import Part, StatePath, Values, Writer, name_of, read
from shardweave.runtime.module import ParallelModule


def hidden_beside(target: Path) -> Path:
    """Where a save to `target` is written."""
    return target.with_name(f".{target.name}.saving")


def _old_beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def settle(target: Path) -> None:
    """Clean up after an interrupted save: restore the old checkpoint, delete a partial one."""
    old, hidden = _old_beside(target), hidden_beside(target)
    if old.exists() and not target.exists():
        os.rename(old, target)
    for rest in (old, hidden):
        if rest.exists():
            shutil.rmtree(rest)
    if target.exists():
        _check_is_folder(target)
        own = (METADATA, CHECKSUMS)
        others = [entry.name for entry in target.iterdir() if entry.name not in own and entry.suffix != SUFFIX]
        if others:
            raise ParallelError(
                f"{target} holds more than a checkpoint ({', '.join(sorted(others)[:5])}), which saving over it would "
                "remove: save to another folder"
            )


def install(hidden: Path, target: Path) -> None:
    """Put `hidden` in the place of `target`. Ended between the renames, the old one is found where it is then."""
    old = _old_beside(target)
    _sync(hidden)
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(hidden, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)  # the new one is in place; what stays is removed, or named, by the next save


def _check_is_folder(target: Path) -> None:
    if not target.is_dir():
        raise ParallelError(f"{target} is a file, and a checkpoint is a folder: name another one")


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find(target: Path) -> Path:
    """The checkpoint at `target`, or the one before it where a save was ended between its renames.

    Raises
    ------
    CheckpointNotFound
        If there is none.
    ParallelError
        If there is one without its metadata, or a file. That is not reported as a checkpoint that was not found:
        a program that begins anew then would save over what is left of it.
    """
    old = _old_beside(target)
    source = old if old.exists() and not target.exists() else target
    if (source / METADATA).exists():
        return source
    if source.exists():
        _check_is_folder(source)
        names = sorted(entry.name for entry in source.iterdir())
        if left := [name for name in names if name == CHECKSUMS or name.endswith(SUFFIX)]:
            raise ParallelError(
                f"the checkpoint {source} is damaged: {METADATA} is missing, and {', '.join(left[:3])} is there. "
                "Load another checkpoint"
            )
    raise CheckpointNotFound(f"there is no checkpoint at {target}: it needs a folder that save_checkpoint has written")


def save_checkpoint(
    folder: str | os.PathLike[str],
    parallel: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Save a parallel model, and the state of its optimizer, as a checkpoint that any plan and world can go on from.

    Collective: all ranks call it, with the same folder, on a file system that they share. A checkpoint that is there
    already stays whole until this one is. What a failed save left is removed by the next one to the same folder.

    Parameters
    ----------
    folder : path
        The checkpoint, in the format of ``torch.distributed.checkpoint``: tensors at ``model.<name>`` and
        ``optimizer.state.<name>.<key>``.
    parallel : ParallelModule
        Its parameters, persistent buffers and the state of its random draws are saved.
    optimizer : torch.optim.Optimizer, optional
        One on the model's parameters. Its state and its groups with their hyperparameters are saved.
    extra : mapping, optional
        Plain Python values, tensors and NumPy arrays, such as the step or a scheduler's state. Rank 0's is kept. Other
        classes have to be allowed, here and where it is loaded, with ``torch.serialization.add_safe_globals``.
    asynchronous : bool
        Return as soon as the tensors are copied to memory, and write in the background. What is saved is the state at
        the call. The next save or load waits for it.

    Returns
    -------
    Saving
        Its `wait` returns when the checkpoint is in place: at once, unless `asynchronous`.

    Raises
    ------
    ParallelError
        On all ranks, if something cannot be saved, if the disk is full or the folder cannot be written, or if the
        folder holds anything but a checkpoint. Also if the save before this one failed in the background. Nothing is
        saved then, and the checkpoint that was there stays as it was.

    Examples
    --------
    >>> save_checkpoint("runs/1000", parallel, optimizer, extra={"step": 1000})  # doctest: +SKIP
    """
    group = checkpoint_group(parallel.mesh)
    values: Values = {}

    def prepare() -> str:
        nonlocal values
        finish_saving()
        values = states.collect(parallel, optimizer, extra or {}, asynchronous)
        return str(Path(folder).resolve())

    where = run_checkpoint_step(group, prepare)
    if len(set(where)) > 1:
        raise ParallelError(f"the ranks give different folders to save to, {sorted(set(where))}: give all the same")
    target = Path(where[0])
    saving = Saving(target, lambda: _write(values, target, group, parallel.mesh.rank))
    saving.start()
    if not asynchronous:
        finish_saving()
    return saving


def load_checkpoint(
    folder: str | os.PathLike[str], parallel: ParallelModule, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load a checkpoint into a parallel model, and its optimizer, whatever plan and number of ranks saved it.

    Collective. Every byte that is read is compared with the checksums that `save_checkpoint` wrote; there is one
    warning for a checkpoint without them, of an older version or of torch alone. No code in a checkpoint is run.

    Parameters
    ----------
    folder : path
        What `save_checkpoint` was given.
    parallel : ParallelModule
        Gets the values; names, shapes and dtypes must be those of the checkpoint.
    optimizer : torch.optim.Optimizer, optional
        One of the same kind, on the same parameters, gets the state and the hyperparameters. Without one only the
        model is loaded.

    Returns
    -------
    dict
        What was saved as `extra`, on every rank.

    Raises
    ------
    CheckpointNotFound
        On all ranks, if there is no checkpoint.
    ParallelError
        On all ranks, if it is of another model or optimizer, or if one of its files is missing, damaged or from
        elsewhere. Model and optimizer are then as they were.

    Examples
    --------
    >>> step = load_checkpoint("runs/1000", parallel, optimizer)["step"]  # doctest: +SKIP
    """
    group = checkpoint_group(parallel.mesh)
    first = parallel.mesh.rank == 0
    targets: dict[StatePath, Part | None] = {}
    found: dict[StatePath, Any] = {}
    state: dict[str, dict[str, torch.Tensor]] = {}

    def locate() -> str:
        finish_saving()
        return str(find(Path(folder).resolve())) if first else ""

    # One for all: another program's save may come between two looks.
    source = Path(run_checkpoint_step(group, locate)[0])
    files: CheckpointFiles | None = None

    def compare() -> None:
        nonlocal files
        files = CheckpointFiles.open(source)
        if first:
            files.check_folder()
        targets.update(states.model_targets(parallel, files.metadata))

    run_checkpoint_step(group, compare)
    assert files is not None  # compare() raises, or makes it
    stored = files
    if first and stored.segments is None:
        warnings.warn(
            f"the checkpoint {source} has no checksums (it was written by an older shardweave, or by torch alone): "
            "whether its values are those that were saved cannot be checked",
            stacklevel=2,
        )

    def read_all() -> None:
        objects = (states.KIND, states.GROUPS, states.SEEDS, states.EXTRA)
        there = stored.metadata.state_dict_metadata
        found.update(read(stored, {place: None for place in objects if name_of(place) in there}))
        if optimizer is not None:
            states.check_optimizer(parallel, optimizer, found)
            more, tensors = states.optimizer_targets(parallel, optimizer, stored.metadata)
            targets.update(more)
            state.update(tensors)
        found.update(read(stored, targets))
        states.check_shared(parallel, targets)

    run_checkpoint_step(group, read_all)

    def restore() -> None:
        if optimizer is not None:
            states.restore(optimizer, states.parameter_names(parallel, optimizer), found, state)
        states.fill(parallel, targets)

    run_checkpoint_step(group, restore)
    parallel.unset.difference_update(parallel.state_dict())
    if states.SEEDS in found:
        parallel._seeds = Seeds(*found[states.SEEDS])
    extra: dict[str, Any] = found.get(states.EXTRA, {})
    return extra


def _write(values: Values, target: Path, group: dist.ProcessGroup | None, rank: int) -> None:
    """Write to the hidden folder, and put it in place."""
    hidden = hidden_beside(target)
    wanted_bytes = sum(len(value) if isinstance(value, bytes) else value.local.nbytes for value in values.values())

    def clean() -> None:
        if rank == 0:
            try:
                settle(target)
                hidden.mkdir(parents=True)
            except OSError as error:
                raise ParallelError(
                    f"the folder {error.filename or target} cannot be written: {error.strerror or error}. Save to "
                    "another folder, or have this one made writable"
                ) from error

    def look() -> None:
        if not hidden.is_dir():
            raise ParallelError(
                f"this rank does not see {hidden}: checkpoints go to a file system that all ranks share"
            )

    def write() -> None:
        save({}, storage_writer=ChecksummedWriter(hidden, wanted_bytes), planner=Writer(values), **_of(group))

    def place() -> None:
        if rank == 0:
            install(hidden, target)

    try:
        for action in (clean, look, write, place):
            run_checkpoint_step(group, action, uses_group=action is write)
    except ParallelError:
        if rank == 0:  # what is half written takes room, perhaps on a disk that is full
            shutil.rmtree(hidden, ignore_errors=True)
        raise


def _of(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """How torch is told the group."""
    if group is None:  # not by catch_warnings, which other threads would see
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    return {"process_group": group, "no_dist": group is None}


class Saving:
    """A save, perhaps still under way; `save_checkpoint` makes them.

    Attributes
    ----------
    folder : Path
        Where the checkpoint is once `wait` has returned.
    """

    def __init__(self, folder: Path, work: Callable[[], None]) -> None:
        self.folder = folder
        self._work = work
        self._error: ParallelError | None = None
        self._told = False
        self._thread: threading.Thread | None = None

    def wait(self) -> None:
        """Return when the checkpoint is in place.

        Raises
        ------
        ParallelError
            If it could not be saved. What was in `folder` before is still there.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # kept for wait(): in a thread nobody would see it
            kept = " The checkpoint that was there before is as it was." if os.path.isdir(self.folder) else ""
            told = str(error).removesuffix(".")
            kind = LostRankError if isinstance(error, LostRankError) else ParallelError
            self._error = kind(f"the checkpoint {self.folder} could not be saved: {told}.{kept}")
            self._error.__cause__ = error
        self._work = _nothing  # lets go of the copies

    def start(self) -> None:
        """Begin, in a thread; `finish_saving` waits for it."""
        global _last
        _last = self
        self._thread = threading.Thread(target=self._run, name="shardweave-checkpoint")
        self._thread.start()


_last: Saving | None = None


def finish_saving() -> None:
    """Wait for a save in the background; its ParallelError, unless `Saving.wait` has raised it already."""
    global _last
    saving, _last = _last, None
    if saving is not None and not saving._told:
        saving.wait()


def _nothing() -> None:
    """The work of a save that is done."""


@atexit.register
def _tell() -> None:
    """The error of a save that nobody waited for, on the way out."""
    try:
        finish_saving()
    except ParallelError as error:
        print(f"shardweave: {error}", file=sys.stderr)
