"""The folder of a checkpoint: a save is written beside it and takes its place, so that one of them is always whole.

Next to a checkpoint ``name`` are, while it is saved, ``.name.saving``, and for the moment between two renames
``.name.old``, the checkpoint that was there before.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from shardweave.errors import CheckpointNotFound, ParallelError

_METADATA = ".metadata"


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
        others = [entry.name for entry in target.iterdir() if entry.name != _METADATA and entry.suffix != ".distcp"]
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
    os.rename(hidden, target)
    _sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


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
    """
    old = _old_beside(target)
    source = old if old.exists() and not target.exists() else target
    if not (source / _METADATA).exists():
        raise CheckpointNotFound(
            f"there is no checkpoint at {target}: it needs a folder that save_checkpoint has written"
        )
    return source
