"""The command line: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardweave import cli
from shardweave.ir.errors import InputError
from tests.models import mlp

SIZES = (8, 16, 32, 8)


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """A factory as a user would name it on the command line."""
    return mlp.build(SIZES), {"x": torch.zeros(8, SIZES[0]), "targets": torch.zeros(8, SIZES[-1])}


def model_alone() -> nn.Module:
    return mlp.build(SIZES)


def nothing() -> None:
    """A factory that forgets to return."""


def needs_arguments(width: int, depth: int, bias: bool = True) -> None:
    """A factory that nobody can call."""


def raises() -> float:
    return 1 / 0


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
        (["plan", "tests.test_cli:build", "--cluster", "dgx-a10"], "did you mean 'dgx-a100'"),
        (["plan", "tests.test_cli:bild", "--cluster", "dgx-a100"], "did you mean 'build'"),
        (["plan", "tests.test_cli:model_alone", "--cluster", "dgx-a100"], "(model, inputs), it returned a"),
        (["plan", "tests.test_cli:nothing", "--cluster", "dgx-a100"], "it returned None; return both"),
        (["plan", "tests.test_cli:needs_arguments", "--cluster", "dgx-a100"], "but it needs width, depth"),
        (["plan", "tests.test_cli:raises", "--cluster", "dgx-a100"], "raised ZeroDivisionError: division by zero ("),
        (["plan", "tests.test_cli:SIZES", "--cluster", "dgx-a100"], "got a tuple of (int, int, int, int)"),
        (["compare", "tests.test_cli:nothing", "--cluster", "dgx-a100"], "it returned None"),
        (["plan", "tests.test_cli:build", "--cluster", "dgx-a100", "--memory-limit", "20 GX"], "20GB"),
        (["plan", "tests.test_cli:build", "--cluster", "dgx-a100", "--memory-limit", "-1"], "memory_limit"),
        (["plan", "tests.test_cli:build", "--cluster", "dgx-a100", "--precision", "bf17"], "bf17"),
        (["plan", "tests.test_cli:build", "--cluster", "dgx-a100", "--recompute", "some"], "recompute"),
        (["plan", "tests.test_cli:build", "--cluster", "dgx-a100", "--out", "tests"], "tests is a folder"),
        (["plan", "tests.test_cli:build", "--cluster", "dgx-a100", "--out", "README.md/a.json"], "cannot write README"),
        (["plan", "tests.test_cli:build", "--cluster", "dgx-a100", "--trace", "/proc/none/a.json"], "cannot write /"),
        (["explain", "no.json"], "no.json"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str
) -> None:
    assert call(monkeypatch, *arguments) == 1
    printed = capsys.readouterr().err
    assert wanted in printed and "Error: " in printed and "Traceback" not in printed
    assert printed.count("\n") == 1


def test_the_traceback_of_the_users_code_is_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["plan", "--verbose"], ["--verbose", "plan"]):
        monkeypatch.setattr(sys, "argv", ["shardweave", *arguments, "tests.test_cli:raises", "--cluster", "dgx-a100"])
        with pytest.raises(InputError) as raised:
            cli.main()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_the_folder_of_a_plan_is_made_before_planning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "new" / "folder" / "plan.json"
    arguments = ["plan", "tests.test_cli:build", "--cluster", "local-cpu", "--memory-limit", "1GB", "--out", str(saved)]
    assert call(monkeypatch, *arguments) == 0
    assert saved.exists()
    assert call(monkeypatch, *arguments[:-1], str(tmp_path / "other" / "plan.json"), "--quantize", "int8") == 1
    assert "quantize" in capsys.readouterr().err
    assert not (tmp_path / "other" / "plan.json").exists()
