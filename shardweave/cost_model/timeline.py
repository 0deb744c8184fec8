"""What the simulator saw: when what ran on which stream, and what memory held meanwhile."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardweave.cost_model.acts import Act
from shardweave.cost_model.curve import MemoryCurve
from shardweave.units import readable_bytes, readable_seconds

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
    alone : float
        Seconds that it would take alone: compute without a slowdown, a collective with its links for itself.
    group : str
        Whose collective it is: those of one group come one after another, those of several may overlap.
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
    alone: float = 0.0
    group: str = ""

    @property
    def end(self) -> float:
        return self.start + self.seconds


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
    busy : mapping of str to float
        Seconds for which all the links of each level have been in use; half of them count half.
    loads : tuple of (float, tuple of float)
        From when on, which part of each level's links was in use.
    acts : tuple of Act
        What was asked of the streams.
    micro_batches : int
        Into how many parts the step's batch is cut; the timeline shows all of them.
    sums : bool
        Whether gradients are brought to the optimizer's states, as in a training step; without, they stay where they
        are added up.

    Notes
    -----
    ``step_time == compute_time + exposed_communication`` up to rounding.
    """

    cluster: str
    events: tuple[Event, ...]
    streams: tuple[str, ...]
    step_time: float
    memory: MemoryCurve = field(repr=False)
    busy: Mapping[str, float] = field(default_factory=dict, repr=False)
    loads: tuple[tuple[float, tuple[float, ...]], ...] = field(default=(), repr=False)
    acts: tuple[Act, ...] = field(default=(), repr=False)
    micro_batches: int = 1
    sums: bool = True

    @property
    def title(self) -> str:
        """What was simulated, for a picture or a trace.

        >>> from shardweave.cost_model.curve import MemoryCurve
        >>> Timeline("dgx", (), (), 0.0, MemoryCurve.of([], 0.0), micro_batches=2, sums=False).title
        'one training step on dgx, in 2 micro-batches, without the reduction of gradients'
        """
        cut = f", in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"one training step on {self.cluster}{cut}{'' if self.sums else ', without the reduction of gradients'}"

    def __repr__(self) -> str:
        return (
            f"<Timeline on {self.cluster}: {readable_seconds(self.step_time)} a step, of which exposed communication "
            f"{readable_seconds(self.exposed_communication)}; at most {readable_bytes(self.peak_memory)}>"
        )

    @property
    def compute_time(self) -> float:
        """Seconds in which the compute stream computes, optimizer step and slowdown by communication included."""
        return sum(event.seconds for event in self.events if event.kind == "compute")

    @property
    def exposed_communication(self) -> float:
        """Seconds in which the compute stream waits for collectives."""
        return sum(event.seconds for event in self.events if event.kind == "wait")

    @property
    def communication_time(self) -> float:
        """Seconds of all collectives, hidden or not, each as if it were alone."""
        return sum(event.alone for event in self.events if event.stream != COMPUTE)

    @property
    def slowdown_time(self) -> float:
        """The part of `compute_time` that compute takes longer because communication runs beside it, in seconds."""
        return self.compute_time - sum(event.alone for event in self.events if event.kind == "compute")

    @property
    def utilisation(self) -> dict[str, float]:
        """The part of the step, in [0, 1], for which each stream is in use: of a level, all its links."""
        used = {COMPUTE: self.compute_time, **self.busy}
        whole = self.step_time or 1.0
        return {name: min(1.0, used.get(name, 0.0) / whole) for name in self.streams}

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

    def exposed_by_op(self) -> dict[tuple[str, str], float]:
        """Seconds of exposed communication by (cause, parameter or op), largest first."""
        seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        for event in self.events:
            if event.kind == "wait":
                seconds[event.cause, event.op] += event.seconds
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def memory_report(self, count: int = 8) -> str:
        """The peak of memory: how much, when, what it consists of by kind, and the `count` largest values in it."""
        phase, running = self._at(self.memory.peak_seconds)
        during = f", in the {phase} of {running}" if phase else ""
        lines = [
            f"peak {readable_bytes(self.peak_memory)} after {readable_seconds(self.memory.peak_seconds)} "
            f"of {readable_seconds(self.step_time)}{during}"
        ]
        for kind, size in self.memory.at_peak().items():
            lines.append(f"  {kind:<10} {readable_bytes(size):>10}  {size / self.peak_memory:6.1%}")
        lines.append("largest values:")
        for owner, kind, size in self.memory.largest_at_peak(count):
            lines.append(f"  {readable_bytes(size):>10}  {kind:<10} {owner}")
        return "\n".join(lines)

    def _at(self, seconds: float) -> tuple[str, str]:
        """The phase, and what computes or is waited for, at a moment; empty where nothing does."""
        for event in self.events:
            if event.stream == COMPUTE and event.start <= seconds < event.end:
                return event.phase, event.op or event.name
        return "", ""

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
        from shardweave.cost_model.trace import rows

        Path(path).write_text(json.dumps({"traceEvents": rows(self), "displayTimeUnit": "ms"}), encoding="utf-8")
