"""The demo, small: its text, its loop, and the whole job on two ranks."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardweave.demo.model import GPTConfig
from shardweave.demo.run import TOLERANCE, Recipe, Text, run_demo, train_single

SMALL = Recipe(model=GPTConfig(context=16, layers=2, heads=4, width=64), steps=4, batch=4)


def test_text_is_python_and_batches_repeat() -> None:
    text = Text.of_standard_library(batch=3, context=32)
    tokens, targets = text.draw(step=5)
    assert tokens.shape == targets.shape == (3, 32)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, text.draw(step=5)[0]) and not torch.equal(tokens, text.draw(step=6)[0])
    assert b"import " in bytes(text.tokens[:20_000].tolist())
    last = len(text.tokens) - 33
    assert last > 0 and int(text.tokens.max()) < 256


def test_training_on_one_device_repeats_and_learns() -> None:
    first, again = train_single(SMALL), train_single(SMALL)
    assert first.losses == again.losses
    assert first.losses[-1] < first.losses[0]


def test_the_main_job(tmp_path: Path) -> None:
    """A limit that data parallelism does not meet, the losses of one device, and every artifact in its place."""
    console = Console(file=io.StringIO(), width=140)
    result = run_demo(SMALL, ranks=2, out=tmp_path, console=console)
    assert result.plan.peak_memory <= result.plan.memory_limit < result.data_parallel.peak_memory
    # The bound is also one of plans with buckets, which hold their gradients longer than the program counts
    assert result.plan.gap <= 0.03
    assert result.difference <= TOLERANCE
    assert json.loads((tmp_path / "plan.json").read_text())
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    graphs = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert graphs[0] == "00_capture.py" and {"forward", "backward"} <= {name[3:-3] for name in graphs}
    for name in graphs:
        ast.parse((tmp_path / "graphs" / name).read_text())


def test_a_python_without_sources_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from shardweave.ir.errors import InputError

    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(InputError, match="installed with its sources"):
        Text.of_standard_library(batch=1, context=8)
