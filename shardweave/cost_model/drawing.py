"""The picture of a timeline: streams above, memory below, on one axis of time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardweave.cost_model.curve import MemoryCurve
from shardweave.cost_model.timeline import COMPUTE, Event, Timeline
from shardweave.units import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {  # of what a stream does
    "forward": "#4C78A8",
    "backward": "#2F4B6E",
    "optimizer": "#8C6BB1",
    "exposed wait": "#F3D2CE",
    "parameter traffic": "#59A14F",
    "gradient traffic": "#E69F37",
    "activation traffic": "#D1495B",
}
_MEMORY = {
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
_INK, _FAINT = "#333338", "#E4E4E8"


def draw(timeline: Timeline, path: str | os.PathLike[str] | None, memory_limit: int | None) -> Figure:
    """What `Timeline.plot` returns; see there."""
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
                facecolor=_COLOURS[colour],
                edgecolor="#C8786E" if wait else "white",
                linewidth=0.0 if len(spans) > 400 else 0.3,
                hatch="////" if wait and len(spans) <= 400 else None,
                zorder=2,
            )
    axes.set_yticks(range(len(streams)), [s if s == COMPUTE else f"{s} links" for s in streams])
    axes.set_ylim(len(streams) - 0.5, -0.5)
    _legend(axes, [(name, _COLOURS[name]) for name in _COLOURS if name in present])


def _merged(events: Sequence[Event], timeline: Timeline) -> dict[str, list[tuple[float, float]]]:
    """By colour the (start, seconds) of neighbouring events in one: gaps below a pixel would hide them."""
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
    used = [k for k in range(len(curve.kinds)) if curve.bytes[:, k].max() > 2e-3 * peak]  # others would not be seen
    shown = _outline(curve)
    times, floor = curve.seconds[shown] / scale, np.zeros(len(shown))
    for k in used:
        roof = floor + curve.bytes[shown][:, k] / size
        axes.fill_between(times, floor, roof, color=_MEMORY[curve.kinds[k]], step="post", linewidth=0)
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
        axes.axhline(limit / size, color="#B03A48", linewidth=1.2, linestyle=(0, (5, 3)))
        axes.annotate(
            f"limit {readable_bytes(limit)}",
            (0, limit / size),
            xycoords=("axes fraction", "data"),
            xytext=(5, -11),
            textcoords="offset points",
            fontsize=9,
            color="#B03A48",
        )
    axes.set_ylim(0, max(high, (limit or 0) / size) * 1.12 or 1.0)
    axes.set_ylabel(f"memory ({unit})", color=_INK, fontsize=9)
    _legend(axes, [(curve.kinds[k], _MEMORY[curve.kinds[k]]) for k in reversed(used)])


def _outline(curve: MemoryCurve, pixels: int = 2000) -> list[int]:
    """The rows to draw: of those that fall into one pixel the largest, so that no peak is lost, and the last."""
    total, end = curve.total, curve.seconds[-1] or 1.0
    pixel = np.floor(curve.seconds / end * pixels)
    edges = [0, *(np.flatnonzero(np.diff(pixel)) + 1).tolist(), len(total)]
    rows: list[int] = []
    for first, last in pairwise(edges):
        rows += sorted({first + int(total[first:last].argmax()), last - 1})
    return rows


def _legend(axes: Axes, entries: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, label=name, edgecolor="#C8786E", hatch="////", linewidth=0)
        if name == "exposed wait"
        else Patch(facecolor=colour, label=name)
        for name, colour in entries
    ]
    axes.legend(
        handles=handles,
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
    """The first of `units` that `value` reaches, as (scale, name); the last where it reaches none."""
    for name, scale in units:
        if value >= scale:
            return scale, name
    return units[-1][1], units[-1][0]
