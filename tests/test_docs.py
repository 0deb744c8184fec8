"""The code of all pages runs, the generated pages are what the code says now, and what they promise of models holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardweave.runtime.launch import WorkerPool
from tests.models import TODAY
from tests.snippets import is_used, pages, run_on_a_rank, run_shell, snippets

ROOT = Path(__file__).parent.parent
PAGES = ("rules.md", "models.md", "zoo.md")
WITH_CODE = [page for page in pages() if any(block.language for block in snippets(page))]
NOT_EXECUTED: list[str] = []
"""The first lines of the blocks that no CPU can run; each is marked in its page."""


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.name))
def test_the_code_of_a_page_runs(
    page: Path, pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block, in an empty folder, in the order of the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SHARDWEAVE_CACHE", str(tmp_path / "cache"))
    loaded = set(sys.modules)
    blocks = [block for block in snippets(page) if block.executed]
    for block in blocks:
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
            assert is_used(block.file, blocks), f"{block}: no other block runs or reads {block.file}"
    names: dict[str, object] = {"__name__": "__main__"}
    ran: set[int] = set()
    try:
        for block in blocks:
            if block.ranks and block.ranks not in ran:  # with all that are behind it: the ranks keep their names
                together = [each for each in blocks if each.ranks == block.ranks]
                pool.run(run_on_a_rank, together, tmp_path, nprocs=block.ranks)
                ran.add(block.ranks)
            elif block.language == "python" and block.file is None and not block.ranks:
                block.run(names)
            elif block.language == "sh":
                run_shell(block, tmp_path)
    finally:
        for name in set(sys.modules) - loaded:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
                del sys.modules[name]


def test_what_is_not_executed_is_marked() -> None:
    skipped = [block.text.splitlines()[0] for page in pages() for block in snippets(page) if not block.executed]
    assert skipped == NOT_EXECUTED


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
