"""Checkpoints: saved under the model's own names and whole shapes, loaded by any plan on any number of ranks.

They are checkpoints of ``torch.distributed.checkpoint``, with checksums beside them.

- A save of ``name`` is written to the folder ``.name.saving``, which replaces ``name`` when all ranks are done. Between
  two renames the previous checkpoint is ``.name.old``. So a whole checkpoint exists whenever the program ends.
- A load reads everything first, and changes the model only when all ranks have read their parts.
- Saves in the background run one at a time; the next save or `Saving.wait` raises their errors.
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


def _unfinished(target: Path) -> Path:
    """The folder to which a save to `target` is written."""
    return target.with_name(f".{target.name}.saving")


def _previous(target: Path) -> Path:
    """The place of the previous checkpoint while a save to `target` replaces it."""
    return target.with_name(f".{target.name}.old")


def _recover(target: Path) -> None:
    """Clean up after an interrupted save: restore the previous checkpoint, delete an unfinished one."""
    previous, unfinished = _previous(target), _unfinished(target)
    if previous.exists() and not target.exists():
        os.rename(previous, target)
    for folder in (previous, unfinished):
        if folder.exists():
            shutil.rmtree(folder)
    if target.exists():
        _check_is_folder(target)
        names = [entry.name for entry in target.iterdir()]
        others = [name for name in names if name not in (METADATA, CHECKSUMS) and not name.endswith(SUFFIX)]
        if others:
            raise ParallelError(
                f"{target} holds more than a checkpoint ({', '.join(sorted(others)[:5])}), which saving over it would "
                "remove: save to another folder"
            )


def _commit(unfinished: Path, target: Path) -> None:
    """Replace `target` by the finished save. `_find_checkpoint` knows the state between the two renames."""
    previous = _previous(target)
    _sync(unfinished)
    if target.exists():
        os.rename(target, previous)
    try:
        os.rename(unfinished, target)
    except OSError:
        if previous.exists():
            os.rename(previous, target)
        raise
    _sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)  # the next save removes what is left, or says why it cannot


def _check_is_folder(target: Path) -> None:
    if not target.is_dir():
        raise ParallelError(f"{target} is a file, and a checkpoint is a folder: name another one")


def _sync(folder: Path) -> None:
    """Flush the directory entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _find_checkpoint(target: Path) -> Path:
    """The checkpoint at `target`, or the previous one if a save ended between its renames.

    Raises
    ------
    CheckpointNotFound
        If there is none.
    ParallelError
        If its metadata are missing, or `target` is a file. This is no CheckpointNotFound, on which a program may start
        again and save over the damaged checkpoint.
    """
    previous = _previous(target)
    source = previous if previous.exists() and not target.exists() else target
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
    """Save a parallel model and the state of its optimizer. Any plan and any number of ranks can load the checkpoint.

    Collective: all ranks call it, with the same folder, on a file system that they share. A checkpoint in `folder` is
    replaced when the new one is complete. The next save to the same folder removes the files of a failed save.

    Parameters
    ----------
    folder : path
        The checkpoint, in the format of ``torch.distributed.checkpoint``: tensors at ``model.<name>`` and
        ``optimizer.state.<name>.<key>``.
    parallel : ParallelModule
        Its parameters, persistent buffers and the state of its random draws are saved.
    optimizer : torch.optim.Optimizer, optional
        An optimizer of the model's parameters. Its state and its groups with their hyperparameters are saved.
    extra : mapping, optional
        Plain Python values, tensors and NumPy arrays of rank 0, such as the step or a scheduler's state. Other classes
        must be allowed with ``torch.serialization.add_safe_globals``, here and at the load.
    asynchronous : bool
        Return as soon as the tensors are copied to memory, and write in the background. The checkpoint has the state at
        the call. The next save or load waits for it.

    Returns
    -------
    Saving
        Its `wait` returns when the checkpoint is complete: at once, unless `asynchronous`.

    Raises
    ------
    ParallelError
        On all ranks, if a value cannot be saved, if the disk is full or the folder cannot be written, if the folder has
        other files than a checkpoint, or if the previous save failed in the background. Nothing is saved then, and the
        checkpoint in `folder` is not changed.

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

    folders = run_checkpoint_step(group, prepare)
    if len(set(folders)) > 1:
        raise ParallelError(f"the ranks give different folders to save to, {sorted(set(folders))}: give all the same")
    target = Path(folders[0])
    saving = Saving(target, lambda: _write(values, target, group, parallel.mesh.rank))
    saving.start()
    if not asynchronous:
        finish_saving()
    return saving


def load_checkpoint(
    folder: str | os.PathLike[str], parallel: ParallelModule, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load a checkpoint into a parallel model and its optimizer. Any plan and any number of ranks may have saved it.

    Collective. Every byte is compared with the checksums that `save_checkpoint` wrote. A checkpoint without checksums,
    from an older version or from torch alone, is loaded with one warning. No code in a checkpoint is run.

    Parameters
    ----------
    folder : path
        The folder of `save_checkpoint`.
    parallel : ParallelModule
        Gets the values; names, shapes and dtypes must be those of the checkpoint.
    optimizer : torch.optim.Optimizer, optional
        An optimizer of the same class and parameters, which gets the state and the hyperparameters. Without it only
        the model is loaded.

    Returns
    -------
    dict
        The saved `extra`, on every rank.

    Raises
    ------
    CheckpointNotFound
        On all ranks, if there is no checkpoint.
    ParallelError
        On all ranks, if the checkpoint is of another model or optimizer, or if a file is missing, damaged or from
        another save. Model and optimizer are not changed then.

    Examples
    --------
    >>> step = load_checkpoint("runs/1000", parallel, optimizer)["step"]  # doctest: +SKIP
    """
    group = checkpoint_group(parallel.mesh)
    is_first = parallel.mesh.rank == 0

    # 1. Rank 0 finds the folder for all ranks: a save by another program may come between two looks.
    def locate() -> str:
        finish_saving()
        return str(_find_checkpoint(Path(folder).resolve())) if is_first else ""

    source = Path(run_checkpoint_step(group, locate)[0])

    # 2. Open the checkpoint, and compare its names, shapes and dtypes with the model's.
    opened: list[CheckpointFiles] = []
    targets: dict[StatePath, Part | None] = {}

    def compare() -> None:
        opened.append(CheckpointFiles.open(source))
        if is_first:
            opened[0].check_folder()
        targets.update(states.model_targets(parallel, opened[0].metadata))

    run_checkpoint_step(group, compare)
    (files,) = opened
    if is_first and files.segments is None:
        warnings.warn(
            f"the checkpoint {source} has no checksums (it was written by an older shardweave, or by torch alone): "
            "whether its values are those that were saved cannot be checked",
            stacklevel=2,
        )

    # 3. Read the objects, then the tensors of the optimizer and the model, into new memory.
    objects: dict[StatePath, Any] = {}
    optimizer_state: dict[str, dict[str, torch.Tensor]] = {}

    def read_all() -> None:
        names = files.metadata.state_dict_metadata
        paths = (states.KIND, states.GROUPS, states.SEEDS, states.EXTRA, states.MODULES)
        objects.update(read(files, {path: None for path in paths if name_of(path) in names}))
        if optimizer is not None:
            states.check_optimizer(parallel, optimizer, objects)
            more, tensors = states.optimizer_targets(parallel, files.metadata)
            targets.update(more)
            optimizer_state.update(tensors)
        objects.update(read(files, targets))
        states.check_shared(parallel, targets)
        states.check_extra_state(parallel, objects.get(states.MODULES, {}))

    run_checkpoint_step(group, read_all)

    # 4. All ranks have read their parts: fill the optimizer and the model.
    def restore() -> None:
        if optimizer is not None:
            names = states.parameter_names(parallel, optimizer)
            states.restore_optimizer(optimizer, names, objects, optimizer_state)
        states.fill_model(parallel, targets)
        states.restore_extra_state(parallel, objects.get(states.MODULES, {}))

    run_checkpoint_step(group, restore)
    parallel.unset.difference_update(parallel.state_dict())
    if states.SEEDS in objects:
        parallel._seeds = Seeds(*objects[states.SEEDS])
    extra: dict[str, Any] = objects.get(states.EXTRA, {})
    return extra


def _write(values: Values, target: Path, group: dist.ProcessGroup | None, rank: int) -> None:
    """Write `values` to the unfinished folder, and commit it. Collective."""
    unfinished = _unfinished(target)
    wanted_bytes = sum(len(value) if isinstance(value, bytes) else value.local.nbytes for value in values.values())

    def make_folder() -> None:
        if rank == 0:
            try:
                _recover(target)
                unfinished.mkdir(parents=True)
            except OSError as error:
                raise ParallelError(
                    f"the folder {error.filename or target} cannot be written: {error.strerror or error}. Save to "
                    "another folder, or have this one made writable"
                ) from error

    def check_folder() -> None:
        if not unfinished.is_dir():
            raise ParallelError(
                f"this rank does not see {unfinished}: checkpoints go to a file system that all ranks share"
            )

    def write() -> None:
        if group is None:  # not by catch_warnings, which other threads would see
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        writer = ChecksummedWriter(unfinished, wanted_bytes)
        save({}, storage_writer=writer, planner=Writer(values), process_group=group, no_dist=group is None)

    def commit() -> None:
        if rank == 0:
            _commit(unfinished, target)

    try:
        for action in (make_folder, check_folder, write, commit):
            run_checkpoint_step(group, action, uses_group=action is write)
    except ParallelError:
        if rank == 0:  # unfinished files take room, perhaps on a full disk
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


class Saving:
    """A save that may still be running; `save_checkpoint` returns it.

    Attributes
    ----------
    folder : Path
        The checkpoint, once `wait` has returned.
    """

    def __init__(self, folder: Path, work: Callable[[], None]) -> None:
        self.folder = folder
        self._work = work
        self._error: ParallelError | None = None
        self._reported = False
        self._thread: threading.Thread | None = None

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises
        ------
        ParallelError
            If it could not be saved. A checkpoint that was in `folder` before is still there.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._reported = True
            raise self._error

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # `wait` raises it
            kept = " The checkpoint that was there before is as it was." if os.path.isdir(self.folder) else ""
            told = str(error).removesuffix(".")
            kind = LostRankError if isinstance(error, LostRankError) else ParallelError
            self._error = kind(f"the checkpoint {self.folder} could not be saved: {told}.{kept}")
            self._error.__cause__ = error
        del self._work  # frees the copies

    def start(self) -> None:
        """Begin in a thread; `finish_saving` waits for it."""
        global _last
        _last = self
        self._thread = threading.Thread(target=self._run, name="shardweave-checkpoint")
        self._thread.start()


_last: Saving | None = None


def finish_saving() -> None:
    """Wait for a save in the background, and raise its error unless `Saving.wait` has raised it."""
    global _last
    saving, _last = _last, None
    if saving is not None and not saving._reported:
        saving.wait()


@atexit.register
def _print_unraised_error() -> None:
    """At exit, print the error of a save for which nobody waited."""
    try:
        finish_saving()
    except ParallelError as error:
        print(f"shardweave: {error}", file=sys.stderr)
