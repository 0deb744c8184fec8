"""Timelines: the trace that Perfetto opens and the figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardweave.cost_model import Cluster, Timeline, simulate
from shardweave.cost_model.timeline import MemoryCurve
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
    assert {threads[row["tid"]] for row in spans} == {"compute", "node links"}
    assert max(row["ts"] + row["dur"] for row in spans) == pytest.approx(timeline.step_time * 1e6)
    counters = [row for row in rows if row["ph"] == "C"]
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
