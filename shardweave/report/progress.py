"""Progress of planning and compiling: the events, and their display if the user passes no callback.

On a terminal, one live line shows the current stage. Otherwise a line is written every few seconds: to the logger
``"shardweave"`` at level INFO if logging is configured, else to standard error.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from shardweave.ir import ParallelError, readable_bytes, readable_seconds

LOGGER = logging.getLogger("shardweave")

LOG_INTERVAL_SECONDS = 5.0
"""Seconds between two lines of a log. Work that takes less is not logged."""


@dataclass(frozen=True)
class Event:
    """The state of planning or compiling.

    Parameters
    ----------
    stage : str
        ``"capture"``, ``"measure ops"``, ``"annotate"``, ``"price"``, ``"solve"``, ``"simulate"``, ``"weave"``,
        ``"weigh"``, or the name of a pass that generates the step.
    incumbent : float
        The step time of the best plan so far, in seconds: the solver's objective while it runs, else the simulated time
        of the best plan that fits into the limit. Infinite if there is none yet.
    bound : float
        While the solver runs, its lower bound of the step time, in seconds; else 0.
    seconds_left : float
        While the solver runs, the seconds until its time limit; else infinite.
    least_bytes : float
        The bytes per device of the smallest plan that was simulated so far; infinite if there is none yet.
    planned : str
        The thing that is being planned, if there are several: a baseline, a memory limit, a cluster, a batch size.

    Examples
    --------
    >>> print(Event("solve", incumbent=0.012, bound=0.0118, seconds_left=20, planned="FSDP"))
    FSDP: solve, best step so far 12.0 ms, none below 11.8 ms, at most 20 s left
    """

    stage: str
    incumbent: float = math.inf
    bound: float = 0.0
    seconds_left: float = math.inf
    least_bytes: float = math.inf
    planned: str = ""

    def __str__(self) -> str:
        parts = [self.stage]
        if self.incumbent < math.inf:
            parts.append(f"best step so far {readable_seconds(self.incumbent)}")
        elif self.least_bytes < math.inf:
            parts.append(f"nothing fits so far, the smallest needs {readable_bytes(self.least_bytes)} a device")
        if self.bound > 0.0:
            parts.append(f"none below {readable_seconds(self.bound)}")
        if self.seconds_left < math.inf:
            parts.append(f"at most {self.seconds_left:.0f} s left")
        return f"{self.planned}: {', '.join(parts)}" if self.planned else ", ".join(parts)


Progress = Callable[[Event], None]
"""The type of a user's progress callback."""


class Reporter:
    """Passes each event to a user's callback, or displays it while the reporter is entered. It may be entered again.

    Parameters
    ----------
    given : callable or bool, optional
        A callable is called with every event. By default events are displayed; with False they are not.

    Raises
    ------
    ParallelError
        If `given` is neither a callable nor a bool.
    """

    def __init__(self, given: Progress | bool | None = None) -> None:
        if given is not None and not isinstance(given, bool) and not callable(given):
            raise ParallelError(
                f"progress must be a function that takes an event, or False for no display, got {given!r}"
            )
        self._callback = given if callable(given) else None
        self._displays = given is None or given is True
        self._live: Live | None = None
        self._depth = 0
        self._started = self._last = 0.0
        self.planned = ""
        """The thing that is being planned, if there are several."""

    @classmethod
    def of_ranks(cls, given: Progress | bool | None) -> Reporter:
        """A reporter for one rank of a world: ranks that wait for the plan of rank 0 display nothing."""
        waits = dist.is_initialized() and dist.get_rank() > 0 and not callable(given)
        return cls(False if waits else given)

    def __call__(
        self,
        stage: str,
        incumbent: float = math.inf,
        bound: float = 0.0,
        seconds_left: float = math.inf,
        least_bytes: float = math.inf,
    ) -> None:
        """Report an `Event`."""
        event = Event(stage, incumbent, bound, seconds_left, least_bytes, self.planned)
        if self._callback is not None:
            self._callback(event)
        elif self._live is not None:
            self._live.update(Spinner("dots", f"shardweave: {event} ({self._seconds:.0f} s)"))
        elif self._depth and self._displays and time.monotonic() - self._last >= LOG_INTERVAL_SECONDS:
            self._last = time.monotonic()
            self._log(f"{event} ({self._seconds:.0f} s so far)")

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _log(self, line: str) -> None:
        if LOGGER.hasHandlers():
            LOGGER.info(line)
        else:
            print(f"shardweave: {line}", file=sys.stderr, flush=True)

    def __enter__(self) -> Reporter:
        self._depth += 1
        if self._depth == 1:
            self._started = self._last = time.monotonic()
            self.planned = ""
            console = Console(stderr=True)
            if self._displays and console.is_terminal:
                line = Spinner("dots", "shardweave: planning")
                self._live = Live(line, console=console, transient=True, redirect_stdout=False)
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self._live is not None:
            self._live.stop()  # also after Ctrl-C: the line is cleared, the cursor shown
            self._live = None
