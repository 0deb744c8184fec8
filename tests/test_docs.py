"""The generated pages are what the code says now, and what they promise of models holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardweave as sw
from docs.measure_models import SLOWER, Measured, local
from tests.models import TODAY

ROOT = Path(__file__).parent.parent
PAGES = ("rules.md", "models.md")


def test_the_page_of_rules_is_what_the_code_says() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "docs.make_rules", "--print"]  # it loads the rules again: not in this process
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "docs" / "rules.md").read_text(encoding="utf-8"), "run `make rules` and commit it"


@pytest.mark.parametrize("page", PAGES)
def test_all_rows_of_a_table_have_as_many_cells_as_its_head(page: str) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert tables
    for table in tables:
        cells = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1, table


def test_the_page_of_models_has_all_of_them() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name in TODAY:
        assert text.count(f"\n| {name} | ") == 2, f"{name}: run `make models` and commit it"


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("cnn", local(8)), ("gpt2", local(4)),  # of the others, latencies make the planner leave a part replicated
        ("cnn", local(8, SLOWER)), ("gpt2", local(8, SLOWER)), ("mixtral", local(8, SLOWER)),
    ],
)  # fmt: skip
def test_nothing_is_replicated_by_the_planners_choice(name: str, cluster: sw.Cluster) -> None:
    """On devices with little arithmetic, whatever the planner leaves replicated is what rules do not allow."""
    case = TODAY[name]
    compiler = Measured.of(case.model(), case.batch(0), cluster)
    found = compiler.shared(compiler.plan())
    assert 0.99 <= found.share <= 1.0, found.alike
