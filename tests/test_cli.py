"""The command line: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardweave import cli
from tests.models import mlp

SIZES = (8, 16, 32, 8)


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """A factory as a user would name it on the command line."""
    return mlp.build(SIZES), {"x": torch.zeros(8, SIZES[0]), "targets": torch.zeros(8, SIZES[-1])}


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of ``shardweave ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["shardweave", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--help") == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("demo", "plan", "compare", "validate", "explain", "diff"))


def test_plan_explain_and_diff(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A plan is made for machines that are not here, saved, shown again, and compared with itself."""
    saved, trace = str(tmp_path / "plan.json"), str(tmp_path / "trace.json")
    arguments = ["--cluster", "rtx3090-pcie", "--nodes", "1", "--out", saved, "--trace", trace]
    assert call(monkeypatch, "plan", "tests.test_cli:build", *arguments) == 0
    shown = capsys.readouterr().out
    assert "second" in shown and "optimal" in shown
    assert json.loads(Path(trace).read_text())
    assert call(monkeypatch, "explain", saved) == 0
    assert "second" in capsys.readouterr().out
    assert call(monkeypatch, "diff", saved, saved) == 0


def test_a_plan_may_be_quantized(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "plan", "tests.test_cli:build", "--cluster", "rtx3090-pcie", "--nodes", "1", "--quantize"
    assert call(monkeypatch, *arguments, "zero++") == 0
    assert "parameters in int8, gradients in int4" in capsys.readouterr().out
    assert call(monkeypatch, *arguments, "int8") == 1
    assert "quantize must be 'zero++'" in capsys.readouterr().err


def test_compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "tests.test_cli:build", "--cluster", "rtx3090-pcie", "--nodes", "1", "--only", "ddp"]
    assert call(monkeypatch, *arguments) == 0
    shown = capsys.readouterr().out
    assert "the best of 1 baselines" in shown and "arXiv 2006.15704" in shown


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["compare", "tests.test_cli:build", "--cluster", "rtx3090-pcie", "--only", "none"], "names none of"),
        (["plan", "nothing", "--cluster", "dgx-a100"], "expected module:function"),
        (["plan", "tests.no_module:build", "--cluster", "dgx-a100"], "no_module"),
        (["plan", "tests.test_cli:no_function", "--cluster", "dgx-a100"], "no_function"),
        (["plan", "tests.test_cli:build", "--cluster", "no-preset"], "no-preset"),
        (["plan", "tests.test_cli:build", "--cluster", "no.yaml"], "no.yaml"),
        (["plan", "tests.test_cli:build", "--cluster", "no.yaml", "--nodes", "2"], "--nodes"),
        (["explain", "no.json"], "no.json"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str
) -> None:
    assert call(monkeypatch, *arguments) == 1
    printed = capsys.readouterr().err
    assert wanted in printed and "Error: " in printed and "Traceback" not in printed
