"""The folder of a checkpoint: a save is written beside it and takes its place, so that one of them is always whole.

Next to a checkpoint ``name`` are, while it is saved, ``.name.saving``, and for the moment between two renames
``.name.old``, the checkpoint that was there before.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from shardweave.ir import CheckpointNotFound, ParallelError
from shardweave.runtime.checkpoint.files import CHECKSUMS, METADATA, SUFFIX


def hidden_beside(target: Path) -> Path:
    """Where a save to `target` is written."""
    return target.with_name(f".{target.name}.saving")


def _old_beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def settle(target: Path) -> None:
    """Undo what a save that was ended has left: an old checkpoint goes back to its place, a half one away."""
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
