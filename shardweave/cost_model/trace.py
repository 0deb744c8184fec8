"""A timeline as the events of a Chrome trace, the format that https://ui.perfetto.dev opens.

The format is that of Google's "Trace Event Format": ``X`` is a span, ``C`` a counter, ``M`` a name; times are in
microseconds. Spans of one thread may not overlap, so each group of ranks has a thread of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardweave.cost_model.timeline import COMPUTE, Timeline


def rows(timeline: Timeline) -> list[dict[str, Any]]:
    """The spans of all streams, and counters of memory by kind and of each level's load."""
    return [*_names(timeline), *_spans(timeline), *_memory(timeline), *_links(timeline)]


def threads(timeline: Timeline) -> dict[tuple[str, str], int]:
    """The number of the thread of each stream and group: compute, then the levels from the innermost."""
    used = {(event.stream, event.group): None for event in timeline.events} | {(COMPUTE, ""): None}
    return {key: number for number, key in enumerate(sorted(used, key=lambda key: timeline.streams.index(key[0])))}


def _names(timeline: Timeline) -> list[dict[str, Any]]:
    title = f"one rank (simulated): {timeline.title}"
    found: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for (stream, group), number in threads(timeline).items():
        title = stream if stream == COMPUTE else f"{stream} links, {group}"
        thread = {"ph": "M", "pid": 0, "tid": number}
        found.append({**thread, "name": "thread_name", "args": {"name": title}})
        found.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})
    return found


def _spans(timeline: Timeline) -> list[dict[str, Any]]:
    numbers = threads(timeline)
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


def _memory(timeline: Timeline) -> list[dict[str, Any]]:
    curve = timeline.memory
    last = np.append(np.diff(curve.seconds) > 0, True)  # of the changes at one moment only the last counts
    used = [kind for k, kind in enumerate(curve.kinds) if curve.bytes[:, k].any()]
    columns = [curve.kinds.index(kind) for kind in used]
    return [
        _counter("memory (bytes)", float(at), dict(zip(used, row.tolist(), strict=True)))
        for at, row in zip(curve.seconds[last], curve.bytes[last][:, columns], strict=True)
    ]


def _links(timeline: Timeline) -> list[dict[str, Any]]:
    levels = timeline.streams[1:]
    used = [k for k in range(len(levels)) if any(load[k] for _, load in timeline.loads)]
    return [
        _counter(f"{levels[k]} links (part in use)", at, {"load": load[k]}) for at, load in timeline.loads for k in used
    ]


def _counter(name: str, at: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "C", "pid": 0, "name": name, "ts": at * 1e6, "args": args}
