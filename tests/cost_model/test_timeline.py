"""Timelines: the trace that Perfetto opens and the figure."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from shardweave.cost_model import Cluster, Timeline, simulate
from shardweave.cost_model.memory import MemoryCurve
from tests.cost_model.handmade import mlp


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    cluster = Cluster.preset("dgx-a100", nodes=2)
    return simulate(*mlp(cluster, cluster.mesh().axes, layers=4, width=2048, rows=256), cluster)


def test_the_trace_holds_every_event_once(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save_trace(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [row for row in rows if row["ph"] == "X"]
    assert len(spans) == len(timeline.events)
    threads = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert {threads[row["tid"]] for row in spans} == {"compute", "node links, gpu0.gpu1.gpu2.node0"}
    for thread in threads:  # spans of a thread may not overlap
        mine = sorted((row["ts"], row["ts"] + row["dur"]) for row in spans if row["tid"] == thread)
        assert all(after >= end - 1e-6 for (_, end), (after, _) in pairwise(mine))
    assert max(row["ts"] + row["dur"] for row in spans) == pytest.approx(timeline.step_time * 1e6)
    loads = [row for row in rows if row["ph"] == "C" and row["name"] == "node links (part in use)"]
    assert {0.0, 1.0} == {row["args"]["load"] for row in loads}, "one group uses all of its links, or none"
    counters = [row for row in rows if row["ph"] == "C" and row["name"] == "memory (bytes)"]
    times = [row["ts"] for row in counters]
    assert times == sorted(set(times)), "one sample a moment"
    assert all(isinstance(value, int) for row in counters for value in row["args"].values())


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_figure_is_written_and_names_what_it_shows(timeline: Timeline, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"timeline.{suffix}"
    figure = timeline.plot(path, memory_limit=2**30)
    assert path.stat().st_size > 5_000
    top, bottom = figure.axes
    assert [label.get_text() for label in top.get_yticklabels()] == ["compute", "node links"]
    assert "exposed communication" in top.get_title(loc="left")
    assert any("peak" in text.get_text() for text in bottom.texts)
    assert any("limit 1" in text.get_text() for text in bottom.texts)


def test_an_empty_timeline_can_be_drawn(tmp_path: Path) -> None:
    nothing = Timeline("toy", (), ("compute",), 0.0, MemoryCurve.of([], 0.0))
    nothing.plot(tmp_path / "nothing.png")
    nothing.save_trace(tmp_path / "nothing.json")
    assert nothing.peak_memory == 0


def test_the_peak_is_told_apart(timeline: Timeline) -> None:
    parts = timeline.memory.at_peak()
    assert sum(parts.values()) == timeline.peak_memory
    assert list(parts.values()) == sorted(parts.values(), reverse=True)
    assert timeline.peak_memory == timeline.memory.total.max()


def test_the_report_of_the_peak_names_the_largest_values(timeline: Timeline) -> None:
    report = timeline.memory_report(3).splitlines()
    assert report[0].startswith("peak ") and "backward of layers." in report[0]
    largest = timeline.memory.largest_at_peak(10_000)
    assert sum(size for _, _, size in largest) == timeline.peak_memory
    assert [line.split()[-1] for line in report[-3:]] == [owner.split()[-1] for owner, _, _ in largest[:3]]
    by_kind: dict[str, int] = {}
    for _, kind, size in largest:
        by_kind[kind] = by_kind.get(kind, 0) + size
    assert by_kind == timeline.memory.at_peak()
