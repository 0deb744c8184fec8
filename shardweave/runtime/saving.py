"""Saves in the background: one at a time, and no error of theirs is lost."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from shardweave.errors import LostRankError, ParallelError


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
