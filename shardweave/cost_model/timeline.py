"""The timeline of a simulated step: its events, exports for chrome://tracing and Perfetto, and pictures.

A `StreamOp` is one request of a step to a stream: a kernel, the start of a collective, or a wait. `replay` runs a list
of them again. A `Timeline` records when each of them ran on which stream, and the memory in use.

The export has Google's "Trace Event Format", which https://ui.perfetto.dev opens: ``X`` is a span, ``C`` a counter,
``M`` a name; times are in microseconds. Spans of one thread may not overlap, so each group of ranks has its own thread.
The picture has the streams above and memory below, on one time axis.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardweave.cost_model.machine import Device
from shardweave.cost_model.memory import MemoryCurve
from shardweave.cost_model.streams import Contention, Streams, Transfer
from shardweave.ir import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class StreamOp(NamedTuple):
    """A kernel, or the start of a collective, or a wait for one.

    Parameters
    ----------
    part : int
        The number of its graph, in the order in which the graphs run.
    op : str
        The module or parameter that it belongs to.
    seconds : float
        The time of a kernel alone.
    transfer : Transfer, optional
        The collective; None for a kernel.
    waits : bool
        It waits for the collective; else it starts it.
    """

    part: int
    op: str
    seconds: float = 0.0
    transfer: Transfer | None = None
    waits: bool = False


class ReplayTimes(NamedTuple):
    """Seconds of replayed operations, and the part of them in which kernels ran."""

    seconds: float
    compute: float


def replay(stream_ops: Sequence[StreamOp], device: Device) -> ReplayTimes:
    """The seconds that `stream_ops` take on an idle device (see `Streams`).

    Examples
    --------
    A kernel takes twice as long beside a collective of three seconds.

    >>> from shardweave.cost_model import Cluster
    >>> from shardweave.cost_model import Machine
    >>> from shardweave.cost_model.collectives import Demand
    >>> gather = Transfer("gpu0", Demand(latency=0.0, transfer=3.0, use={"gpu": 1.0}))
    >>> kernel, start = StreamOp(0, "", 1.0), StreamOp(0, "", transfer=gather)
    >>> replay([start, kernel, start._replace(waits=True), kernel], Cluster.local(2).device)
    ReplayTimes(seconds=4.0, compute=3.0)
    """
    streams = Streams(Contention.of(device), device.collective_host_seconds)
    started: dict[Transfer, Transfer] = {}
    compute = pending = 0.0  # neighbouring kernels run as one
    for op in stream_ops:
        if op.transfer is None:
            pending += op.seconds
            continue
        compute, pending = compute + streams.compute(pending), 0.0
        if op.waits:
            streams.wait(started[op.transfer])
        else:
            started[op.transfer] = Transfer(op.transfer.group, op.transfer.demand)
            streams.start(started[op.transfer])
    compute += streams.compute(pending)
    while streams.is_running:
        streams.advance()
    return ReplayTimes(streams.now, compute)


COMPUTE = "compute"
"""The name of the compute stream. The other streams have the names of the cluster's levels."""


@dataclass(frozen=True)
class Event:
    """A kernel, a collective or a wait on a stream.

    Parameters
    ----------
    name : str
        The name of the node, or the kind and the owner of the collective.
    stream : str
        `COMPUTE` or the name of a level.
    start, seconds : float
        Its start, counted from the start of the step, and its duration, in seconds.
    phase : str
        ``"forward"``, ``"backward"`` or ``"optimizer"``.
    kind : str
        ``"compute"``, ``"wait"`` or the kind of the collective.
    cause : str
        ``"parameter"``, ``"gradient"`` or ``"activation"`` for a collective and a wait for one.
    op : str
        The module or parameter that it belongs to.
    flops, bytes : int
        The FLOPs of a kernel, the bytes of a collective's whole buffer.
    alone : float
        Seconds without any contention: compute without a slowdown, a collective that shares no link.
    group : str
        The group of ranks of a collective. Collectives of different groups may overlap.
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
        In the order in which the step issues them.
    streams : tuple of str
        `COMPUTE`, then the levels of the cluster from the innermost.
    step_time : float
        Seconds from the start of the forward to the end of the optimizer step.
    memory : MemoryCurve
        Bytes in use.
    busy : mapping of str to float
        Seconds of each level's links at full use; half of the links count half.
    loads : tuple of (float, tuple of float)
        The part of each level's links in use from a time on.
    stream_ops : tuple of StreamOp
        The requests to the streams, for `replay`.
    micro_batches : int
        The number of micro-batches of the step. The timeline shows all of them.
    reduces_gradients : bool
        Whether the gradients are reduced, as in a training step. Else they stay accumulated on each rank.

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
    stream_ops: tuple[StreamOp, ...] = field(default=(), repr=False)
    micro_batches: int = 1
    reduces_gradients: bool = True

    @property
    def title(self) -> str:
        """The title of a picture or a trace.

        >>> from shardweave.cost_model.memory import MemoryCurve
        >>> Timeline("dgx", (), (), 0.0, MemoryCurve.of([], 0.0), micro_batches=2, reduces_gradients=False).title
        'one training step on dgx, in 2 micro-batches, without the reduction of gradients'
        """
        cut = f", in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        without = "" if self.reduces_gradients else ", without the reduction of gradients"
        return f"one training step on {self.cluster}{cut}{without}"

    def __repr__(self) -> str:
        return (
            f"<Timeline on {self.cluster}: {readable_seconds(self.step_time)} a step, of which exposed communication "
            f"{readable_seconds(self.exposed_communication)}; at most {readable_bytes(self.peak_memory)}>"
        )

    @property
    def compute_time(self) -> float:
        """Seconds of kernels and of the optimizer step, with the slowdown by collectives."""
        return sum(event.seconds for event in self.events if event.kind == "compute")

    @property
    def exposed_communication(self) -> float:
        """Seconds in which the compute stream waits for collectives."""
        return sum(event.seconds for event in self.events if event.kind == "wait")

    @property
    def communication_time(self) -> float:
        """Seconds of all collectives, hidden or exposed, each without contention."""
        return sum(event.alone for event in self.events if event.stream != COMPUTE)

    @property
    def slowdown_time(self) -> float:
        """Seconds by which collectives slow down the kernels: a part of `compute_time`."""
        return self.compute_time - sum(event.alone for event in self.events if event.kind == "compute")

    @property
    def utilisation(self) -> dict[str, float]:
        """The part of the step, in [0, 1], for which each stream, or all links of a level, are in use."""
        used = {COMPUTE: self.compute_time, **self.busy}
        seconds = self.step_time or 1.0
        return {name: min(1.0, used.get(name, 0.0) / seconds) for name in self.streams}

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
        """A report of the peak of memory: bytes, time, bytes by kind, and the `count` largest values."""
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
        """The phase and the op on the compute stream at a time; both are "" if it is idle."""
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
        return draw(self, path, memory_limit)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the step as a Chrome trace, which https://ui.perfetto.dev opens."""
        Path(path).write_text(
            json.dumps({"traceEvents": trace_events(self), "displayTimeUnit": "ms"}), encoding="utf-8"
        )


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The spans of all streams, and counters of memory by kind and of each level's load."""
    return [*_names(timeline), *_spans(timeline), *_memory_counters(timeline), *_link_counters(timeline)]


def _thread_numbers(timeline: Timeline) -> dict[tuple[str, str], int]:
    """The number of the thread of each stream and group: compute, then the levels from the innermost."""
    used = {(event.stream, event.group): None for event in timeline.events} | {(COMPUTE, ""): None}
    return {key: number for number, key in enumerate(sorted(used, key=lambda key: timeline.streams.index(key[0])))}


def _names(timeline: Timeline) -> list[dict[str, Any]]:
    title = f"one rank (simulated): {timeline.title}"
    found: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for (stream, group), number in _thread_numbers(timeline).items():
        title = stream if stream == COMPUTE else f"{stream} links, {group}"
        thread = {"ph": "M", "pid": 0, "tid": number}
        found.append({**thread, "name": "thread_name", "args": {"name": title}})
        found.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})
    return found


def _spans(timeline: Timeline) -> list[dict[str, Any]]:
    numbers = _thread_numbers(timeline)
    return [
        {
            "ph": "X",
            "pid": 0,
            "tid": numbers[event.stream, event.group],
            "name": event.name,
            "cat": f"{event.phase},{event.kind}",
            "ts": event.start * 1e6,
            "dur": event.seconds * 1e6,
            "args": {key: getattr(event, key) for key in ("cause", "op", "flops", "bytes") if getattr(event, key)}
            | {"alone (us)": event.alone * 1e6},
        }
        for event in timeline.events
    ]


def _memory_counters(timeline: Timeline) -> list[dict[str, Any]]:
    curve = timeline.memory
    last = np.append(np.diff(curve.seconds) > 0, True)  # the last change at each time
    used = [kind for k, kind in enumerate(curve.kinds) if curve.bytes[:, k].any()]
    columns = [curve.kinds.index(kind) for kind in used]
    return [
        _counter("memory (bytes)", float(at), dict(zip(used, row.tolist(), strict=True)))
        for at, row in zip(curve.seconds[last], curve.bytes[last][:, columns], strict=True)
    ]


def _link_counters(timeline: Timeline) -> list[dict[str, Any]]:
    levels = timeline.streams[1:]
    used = [k for k in range(len(levels)) if any(load[k] for _, load in timeline.loads)]
    return [
        _counter(f"{levels[k]} links (part in use)", at, {"load": load[k]}) for at, load in timeline.loads for k in used
    ]


def _counter(name: str, at: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "C", "pid": 0, "name": name, "ts": at * 1e6, "args": args}


_EVENT_COLOURS = {
    "forward": "#4C78A8",
    "backward": "#2F4B6E",
    "optimizer": "#8C6BB1",
    "exposed wait": "#F3D2CE",
    "parameter traffic": "#59A14F",
    "gradient traffic": "#E69F37",
    "activation traffic": "#D1495B",
}
_MEMORY_COLOURS = {
    "parameters": "#59A14F",
    "optimizer": "#8C6BB1",
    "copies": "#7DBE76",
    "buffers": "#9D9DA1",
    "inputs": "#C4C4C8",
    "saved": "#4C78A8",
    "gathered": "#A6D49F",
    "working": "#B7D0E8",
    "scratch": "#E3C9E0",
    "gradients": "#E69F37",
    "outputs": "#D8D8DC",
}
_INK, _FAINT, _WAIT_HATCH, _LIMIT = "#333338", "#E4E4E8", "#C8786E", "#B03A48"


def draw(timeline: Timeline, path: str | os.PathLike[str] | None, memory_limit: int | None) -> Figure:
    """The figure that `Timeline.plot` returns."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: its global state would leak figures and pick a display

    used = {event.stream for event in timeline.events} | {COMPUTE}
    streams = [stream for stream in timeline.streams if stream in used]
    figure = Figure(figsize=(12, 3.9 + 0.5 * len(streams)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[0.75 * len(streams) + 0.4, 2.6])
    scale, unit = _unit(timeline.step_time, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))
    _draw_streams(top, timeline, streams, scale)
    _draw_memory(bottom, timeline, memory_limit, scale)
    bottom.set_xlim(0, max(timeline.step_time / scale, 1e-9))
    bottom.set_xlabel(f"time ({unit})", color=_INK)
    share = timeline.exposed_communication / timeline.step_time if timeline.step_time else 0.0
    top.set_title(
        f"O{timeline.title[1:]}: {readable_seconds(timeline.step_time)}, of which "
        f"{readable_seconds(timeline.exposed_communication)} ({share:.1%}) exposed communication",
        loc="left",
        fontsize=11,
        color=_INK,
    )
    for axes in (top, bottom):
        axes.tick_params(colors=_INK, labelsize=9, length=0)
        axes.grid(axis="x", color=_FAINT, linewidth=0.7)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _draw_streams(axes: Axes, timeline: Timeline, streams: Sequence[str], scale: float) -> None:
    present: dict[str, None] = {}
    for row, stream in enumerate(streams):
        axes.axhspan(row - 0.36, row + 0.36, color="#F6F6F8", zorder=0)
        mine = [event for event in timeline.events if event.stream == stream]
        groups = list(dict.fromkeys(event.group for event in mine))  # their spans may overlap: each has a lane
        lanes = [(lane, _merged([e for e in mine if e.group == group], timeline)) for lane, group in enumerate(groups)]
        for lane, colour, spans in ((lane, *item) for lane, found in lanes for item in found.items()):
            present[colour] = None
            bars = [(start / scale, seconds / scale) for start, seconds in spans]
            wait = colour == "exposed wait"
            axes.broken_barh(
                bars,
                (row - 0.36 + 0.72 * lane / len(groups), 0.72 / len(groups)),
                facecolor=_EVENT_COLOURS[colour],
                edgecolor=_WAIT_HATCH if wait else "white",
                linewidth=0.0 if len(spans) > 400 else 0.3,
                hatch="////" if wait and len(spans) <= 400 else None,
                zorder=2,
            )
    axes.set_yticks(range(len(streams)), [s if s == COMPUTE else f"{s} links" for s in streams])
    axes.set_ylim(len(streams) - 0.5, -0.5)
    _legend(axes, [(name, _EVENT_COLOURS[name]) for name in _EVENT_COLOURS if name in present])


def _merged(events: Sequence[Event], timeline: Timeline) -> dict[str, list[tuple[float, float]]]:
    """The (start, seconds) of spans by colour. Compute events less than a pixel apart become one span."""
    merged: dict[str, list[tuple[float, float]]] = {}
    pixel = timeline.step_time / 4000
    for event in events:
        colour = "exposed wait" if event.kind == "wait" else f"{event.cause} traffic" if event.cause else event.phase
        spans = merged.setdefault(colour, [])
        if spans and event.stream == COMPUTE and event.start - sum(spans[-1]) < pixel:
            spans[-1] = (spans[-1][0], event.end - spans[-1][0])
        elif event.seconds > 0:
            spans.append((event.start, event.seconds))
    return merged


def _draw_memory(axes: Axes, timeline: Timeline, limit: int | None, scale: float) -> None:
    curve = timeline.memory
    peak = curve.peak
    size, unit = _unit(max(peak, limit or 0), (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)))
    used = [k for k in range(len(curve.kinds)) if curve.bytes[:, k].max() > 2e-3 * peak]  # smaller ones are invisible
    shown = _outline(curve)
    times, floor = curve.seconds[shown] / scale, np.zeros(len(shown))
    for k in used:
        roof = floor + curve.bytes[shown][:, k] / size
        axes.fill_between(times, floor, roof, color=_MEMORY_COLOURS[curve.kinds[k]], step="post", linewidth=0)
        floor = roof
    at = int(curve.total.argmax())
    when, high = curve.seconds[at] / scale, peak / size
    axes.plot([when], [high], marker="o", markersize=4, color=_INK, clip_on=False, zorder=4)
    right = curve.seconds[at] > timeline.step_time / 2
    axes.annotate(
        f"peak {readable_bytes(peak)}",
        (when, high),
        xytext=(-7 if right else 7, 3),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=9,
        color=_INK,
        bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 1.5},
        zorder=5,
    )
    if limit is not None:
        axes.axhline(limit / size, color=_LIMIT, linewidth=1.2, linestyle=(0, (5, 3)))
        axes.annotate(
            f"limit {readable_bytes(limit)}",
            (0, limit / size),
            xycoords=("axes fraction", "data"),
            xytext=(5, -11),
            textcoords="offset points",
            fontsize=9,
            color=_LIMIT,
        )
    axes.set_ylim(0, max(high, (limit or 0) / size) * 1.12 or 1.0)
    axes.set_ylabel(f"memory ({unit})", color=_INK, fontsize=9)
    _legend(axes, [(curve.kinds[k], _MEMORY_COLOURS[curve.kinds[k]]) for k in reversed(used)])


def _outline(curve: MemoryCurve, pixels: int = 2000) -> list[int]:
    """The rows of the curve to draw: the largest and the last of each pixel, so that no peak is lost."""
    total, end = curve.total, curve.seconds[-1] or 1.0
    pixel = np.floor(curve.seconds / end * pixels)
    edges = [0, *(np.flatnonzero(np.diff(pixel)) + 1).tolist(), len(total)]
    rows: list[int] = []
    for first, last in pairwise(edges):
        rows += sorted({first + int(total[first:last].argmax()), last - 1})
    return rows


def _legend(axes: Axes, entries: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    hatched: dict[str, Any] = {"edgecolor": _WAIT_HATCH, "hatch": "////", "linewidth": 0}
    axes.legend(
        handles=[
            Patch(facecolor=colour, label=name, **hatched if name == "exposed wait" else {}) for name, colour in entries
        ],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.02),
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
        handlelength=1.1,
        handleheight=1.0,
        borderaxespad=0.0,
    )


def _unit(value: float, units: Sequence[tuple[str, float]]) -> tuple[float, str]:
    """The first of `units` that `value` reaches, or else the last one, as (scale, name)."""
    for name, scale in units:
        if value >= scale:
            return scale, name
    return units[-1][1], units[-1][0]
