"""Checkpoints: saved under the model's own names and whole shapes, loaded by any plan on any number of ranks.

They are ordinary ones of torch.distributed.checkpoint. A save is written to a hidden folder beside the one asked for,
which takes its place when all ranks are done, so that whatever ends the program leaves a whole checkpoint.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardweave.errors import ParallelError
from shardweave.runtime import checkpoint_state as states
from shardweave.runtime.agreement import own_group, together
from shardweave.runtime.checkpoint_folder import find, hidden_beside, install, settle
from shardweave.runtime.chunks import Part, Reader, Values, Writer, name_of
from shardweave.runtime.chunks import Path as Place
from shardweave.runtime.module import ParallelModule
from shardweave.runtime.random import Seeds
from shardweave.runtime.saving import Saving, finish_saving


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
        Anything that can be pickled, such as the step or a scheduler's state. Rank 0's is kept.
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
        On all ranks, if something cannot be saved, or if the folder holds anything but a checkpoint. Also if the save
        before this one failed in the background; nothing is saved then.

    Examples
    --------
    >>> save_checkpoint("runs/1000", parallel, optimizer, extra={"step": 1000})  # doctest: +SKIP
    """
    group = own_group(parallel.mesh)
    values: Values = {}

    def prepare() -> str:
        nonlocal values
        finish_saving()
        values = states.collect(parallel, optimizer, extra or {}, asynchronous)
        return str(Path(folder).resolve())

    where = together(group, prepare)
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

    Collective. Checkpoints hold pickled objects: load only what you trust.

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
        On all ranks, if it is of another model or optimizer; model and optimizer are as they were then. If the
        checkpoint's files cannot be read, the model may be loaded in part.

    Examples
    --------
    >>> step = load_checkpoint("runs/1000", parallel, optimizer)["step"]  # doctest: +SKIP
    """
    group = own_group(parallel.mesh)
    metadata = Metadata({})
    targets: dict[Place, Part | None] = {}
    state: dict[str, dict[str, torch.Tensor]] = {}

    def locate() -> str:
        finish_saving()
        return str(find(Path(folder).resolve())) if parallel.mesh.rank == 0 else ""

    source = Path(together(group, locate)[0])  # one for all: another program's save may come between two looks

    def compare() -> None:
        nonlocal metadata, targets
        metadata = FileSystemReader(source).read_metadata()
        targets = states.model_targets(parallel, metadata)

    together(group, compare)
    objects = (states.KIND, states.GROUPS, states.SEEDS, states.EXTRA)
    found = _read(source, {place: None for place in objects if name_of(place) in metadata.state_dict_metadata}, group)

    def compare_optimizer() -> None:
        nonlocal state
        if optimizer is not None:
            states.check_optimizer(parallel, optimizer, found)
            more, state = states.optimizer_targets(parallel, optimizer, metadata)
            targets.update(more)

    together(group, compare_optimizer)
    found.update(_read(source, targets, group))

    def restore() -> None:
        if optimizer is not None:
            states.restore(optimizer, states.parameter_names(parallel, optimizer), found, state)

    together(group, restore)
    parallel.unset.difference_update(parallel.state_dict())
    if states.SEEDS in found:
        parallel._seeds = Seeds(*found[states.SEEDS])
    extra: dict[str, Any] = found.get(states.EXTRA, {})
    return extra


def _write(values: Values, target: Path, group: dist.ProcessGroup | None, rank: int) -> None:
    """Write to the hidden folder, and put it in place."""
    hidden = hidden_beside(target)

    def clean() -> None:
        if rank == 0:
            settle(target)
            hidden.mkdir(parents=True)

    def look() -> None:
        if not hidden.is_dir():
            raise ParallelError(
                f"this rank does not see {hidden}: checkpoints go to a file system that all ranks share"
            )

    def write() -> None:
        save({}, storage_writer=FileSystemWriter(hidden), planner=Writer(values), **_of(group))

    def place() -> None:
        if rank == 0:
            install(hidden, target)

    for action in (clean, look, write, place):
        together(group, action)


def _read(source: Path, targets: Mapping[Place, Part | None], group: dist.ProcessGroup | None) -> dict[Place, Any]:
    """Fill the parts of `targets`; what of it is no tensor is returned."""
    reader = Reader(targets)
    try:
        together(group, lambda: load({}, storage_reader=FileSystemReader(source), planner=reader, **_of(group)))
    except ParallelError as error:
        raise ParallelError(f"the checkpoint {source} cannot be read: {error}") from error
    return reader.objects


def _of(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """How torch is told the group."""
    if group is None:  # not by catch_warnings, which other threads would see
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    return {"process_group": group, "no_dist": group is None}
