"""Progress: what is told while a plan is made, and how it is shown on a terminal, in a log, and not at all."""

from __future__ import annotations

import logging
import math
import os
import pty
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import shardweave as sw
from shardweave.report import progress
from shardweave.report.progress import Event, Reporter


def plan(told: Any = None, **options: Any) -> sw.Plan:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return sw.plan(model, sw.Cluster.local(4), torch.zeros(32, 64), options=sw.Options(**options), progress=told)


def test_a_function_is_told_how_far_planning_is() -> None:
    events: list[Event] = []
    found = plan(events.append)
    solved = [event for event in events if event.stage == "solve" and event.seconds_left < math.inf]
    assert solved and all(0 < event.bound <= event.incumbent < math.inf for event in solved[-1:])
    assert all(0 <= event.seconds_left <= 30 for event in solved)
    simulated = [event for event in events if event.stage == "simulate"]
    assert simulated[-1].incumbent >= found.step_time and "best step so far" in str(simulated[-1])


def test_where_nothing_fits_the_smallest_so_far_is_told() -> None:
    events: list[Event] = []
    with pytest.raises(sw.InfeasibleError) as error:
        plan(events.append, memory_limit=1000, micro_batches=1)
    told = [event for event in events if event.least_bytes < math.inf]
    assert told and all(event.incumbent == math.inf for event in told if event.stage == "simulate")
    assert min(event.least_bytes for event in told) >= (error.value.needed_bytes or 0)
    assert "nothing fits so far, the smallest needs" in str(next(e for e in told if e.stage == "simulate"))


def test_of_a_comparison_and_a_sweep_it_is_said_what_is_planned() -> None:
    model, x, events = nn.Linear(64, 64), torch.zeros(32, 64), list[Event]()
    sw.compare(model, sw.Cluster.local(2), x, baselines=[sw.baselines.ddp()], progress=events.append)
    assert {"shardweave", "DDP"} <= {event.planned for event in events}
    sw.plan(model, sw.Cluster.local(2), x, sweep=["1GB"], progress=events.append)
    assert events[-1].planned.startswith("local-cpu, at most 953.7 MiB") or "953.7 MiB" in events[-1].planned


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardweave")
    plan()
    assert not caplog.records  # it took no five seconds
    monkeypatch.setattr(progress, "LOG_INTERVAL_SECONDS", 0.0)
    plan()
    assert "capture" in caplog.messages[0] and any("simulate" in line for line in caplog.messages)
    caplog.clear()
    plan(False)
    assert not caplog.records


def test_without_logging_lines_go_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(progress.LOGGER, "propagate", False)
    with Reporter() as told:
        told("solve", 0.25, 0.2, 12.0)
    told("after it")
    captured = capsys.readouterr()
    line = "shardweave: solve, best step so far 250 ms, none below 200 ms, at most 12 s left (0 s so far)"
    assert captured.err == line + "\n" and not captured.out


def test_a_terminal_is_left_clean_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    main, terminal = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        with pytest.raises(KeyboardInterrupt), Reporter() as told:
            with told:  # as planning in a comparison does
                told("solve", 0.25)
            told._live and told._live.refresh()
            raise KeyboardInterrupt
    parts: list[bytes] = []
    with suppress(OSError):  # which is how a terminal says that nobody writes to it any more
        while part := os.read(main, 10_000):
            parts.append(part)
    os.close(main)
    shown = b"".join(parts).decode()
    assert "best step so far 250 ms" in shown
    hidden, at_last = shown.rindex("\x1b[?25l"), shown.rindex("\x1b[?25h")
    assert hidden < at_last and shown.endswith(("\x1b[2K", "\x1b[?25h", "\r"))


def test_what_is_no_progress_is_refused() -> None:
    with pytest.raises(sw.ParallelError, match="progress must be a function"):
        plan("bar")
