"""What the simulator saw: when what ran on which stream, and what memory held meanwhile."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardweave.cost_model.memory import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE = "compute"
"""The name of the stream that computes; the others are called after the cluster's levels."""


@dataclass(frozen=True)
class Event:
    """Something that takes time on a stream.

    Parameters
    ----------
    name : str
        The node's, or the collective's kind and owner.
    stream : str
        `COMPUTE` or the name of a level.
    start, seconds : float
        When it began after the start of the step, and how long it took.
    phase : str
        ``"forward"``, ``"backward"`` or ``"optimizer"``.
    kind : str
        ``"compute"``, ``"wait"`` or the kind of the collective.
    cause : str
        ``"parameter"``, ``"gradient"`` or ``"activation"`` for a collective and a wait for one.
    op : str
        The module or parameter that it belongs to.
    flops, bytes : int
        What it computed, what it moved (the whole buffer).
    """

    name: str
    stream: str
    start: float
    seconds: float
    phase: str
    kind: str
    cause: str = ""
    op: str = ""
    flops: int = 0
    bytes: int = 0

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Bytes in use over time, by what they are for.

    ``bytes[i, k]`` are in use for ``kinds[k]`` from ``seconds[i]`` on until ``seconds[i + 1]``.
    """

    seconds: NDArray[np.float64]
    bytes: NDArray[np.int64]
    kinds: tuple[str, ...] = KINDS

    @classmethod
    def of(cls, changes: Sequence[tuple[float, str, int]], end: float) -> MemoryCurve:
        """The curve of (seconds, kind, bytes more) in the order in which they happen.

        >>> MemoryCurve.of([(0.0, "saved", 5), (1.0, "saved", -2)], 2.0).total.tolist()
        [0, 5, 3, 3]
        """
        column = {kind: index for index, kind in enumerate(KINDS)}
        deltas = np.zeros((len(changes) + 2, len(KINDS)), dtype=np.int64)
        seconds = np.zeros(len(changes) + 2)
        for row, (at, kind, more) in enumerate(changes, start=1):
            deltas[row, column[kind]] = more
            seconds[row] = at
        seconds[-1] = end
        return cls(seconds, np.cumsum(deltas, axis=0))

    @property
    def total(self) -> NDArray[np.int64]:
        """Bytes in use at each of `seconds`."""
        return np.asarray(self.bytes.sum(axis=1), dtype=np.int64)

    @property
    def peak(self) -> int:
        """The most bytes in use at once."""
        return int(self.total.max())

    def at_peak(self) -> dict[str, int]:
        """What the peak consists of, largest first."""
        row = self.bytes[int(self.total.argmax())]
        return dict(sorted(((k, int(b)) for k, b in zip(self.kinds, row, strict=True) if b), key=lambda item: -item[1]))


@dataclass(frozen=True, eq=False)
class Timeline:
    """One simulated training step of one rank.

    Parameters
    ----------
    cluster : str
        The name of the machine.
    events : tuple of Event
        In the order in which they were issued.
    streams : tuple of str
        `COMPUTE`, then the levels of the cluster from the innermost.
    step_time : float
        Seconds from the start of the forward to the end of the optimizer step.
    memory : MemoryCurve
        Bytes in use.

    Notes
    -----
    ``step_time == compute_time + exposed_communication`` up to rounding.
    """

    cluster: str
    events: tuple[Event, ...]
    streams: tuple[str, ...]
    step_time: float
    memory: MemoryCurve = field(repr=False)

    @property
    def compute_time(self) -> float:
        """Seconds in which the compute stream computes, the optimizer step included."""
        return sum(event.seconds for event in self.events if event.kind == "compute")

    @property
    def exposed_communication(self) -> float:
        """Seconds in which the compute stream waits for collectives."""
        return sum(event.seconds for event in self.events if event.kind == "wait")

    @property
    def communication_time(self) -> float:
        """Seconds of all collectives, hidden or not, added up over the links."""
        return sum(event.seconds for event in self.events if event.stream != COMPUTE)

    @property
    def peak_memory(self) -> int:
        """The most bytes in use at once."""
        return self.memory.peak

    @property
    def flops(self) -> int:
        """FLOPs of one rank in the step, by `torch.utils.flop_counter`'s formulas."""
        return sum(event.flops for event in self.events)

    def exposed_by_cause(self) -> dict[str, float]:
        """Seconds of exposed communication for parameters, gradients and activations."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for event in self.events:
            if event.kind == "wait":
                seconds[event.cause] += event.seconds
        return dict(seconds)

    def plot(self, path: str | os.PathLike[str] | None = None, *, memory_limit: int | None = None) -> Figure:
        """Draw the streams and, below them, the memory.

        Parameters
        ----------
        path : path, optional
            Where to write the figure (``.png``, ``.svg``, ``.pdf``).
        memory_limit : int, optional
            Bytes, drawn as a line.
        """
        from shardweave.cost_model.drawing import draw

        return draw(self, path, memory_limit)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the step as a Chrome trace, which https://ui.perfetto.dev opens."""
        Path(path).write_text(json.dumps({"traceEvents": self._trace(), "displayTimeUnit": "ms"}), encoding="utf-8")

    def _trace(self) -> list[dict[str, Any]]:
        """The trace's events; their times are in microseconds, as the format wants them."""
        threads = {stream: number for number, stream in enumerate(self.streams)}
        rows: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"one rank of {self.cluster} (simulated)"}}
        ]
        for stream, number in threads.items():
            title = stream if stream == COMPUTE else f"{stream} links"
            rows.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": title}})
            rows.append(
                {"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
            )
        for event in self.events:
            notes = {key: getattr(event, key) for key in ("cause", "op", "flops", "bytes") if getattr(event, key)}
            rows.append(
                {"ph": "X", "pid": 0, "tid": threads[event.stream], "name": event.name, "args": notes}
                | {"cat": f"{event.phase},{event.kind}", "ts": event.start * 1e6, "dur": event.seconds * 1e6}
            )
        last = np.append(np.diff(self.memory.seconds) > 0, True)  # of the changes at one moment only the last counts
        used = [kind for k, kind in enumerate(self.memory.kinds) if self.memory.bytes[:, k].any()]
        columns = [self.memory.kinds.index(kind) for kind in used]
        for at, row in zip(self.memory.seconds[last], self.memory.bytes[last][:, columns], strict=True):
            sizes = dict(zip(used, row.tolist(), strict=True))
            rows.append({"ph": "C", "pid": 0, "name": "memory (bytes)", "ts": float(at) * 1e6, "args": sizes})
        return rows
