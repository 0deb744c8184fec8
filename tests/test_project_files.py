"""The files that contributors rely on agree with each other: Makefile, hooks, changelog, glossary, requirements."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.findall(r"(?m)^\.PHONY: (.*)$", MAKEFILE)[0].split()
GLOSSARY = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| word", "| ---"))
]


def test_help_lists_every_target() -> None:
    printed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"(?m)^make ([\w-]+) ", printed)
    assert sorted(listed) == sorted(set(TARGETS) - {"help"})
    assert set(re.findall(r"(?m)^([a-z][\w-]*):", MAKEFILE)) == set(TARGETS)


def test_hooks_run_what_make_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert [hook["entry"] for hook in hooks] == ["make lint", "make types"]
    assert all(hook["language"] == "system" for hook in hooks)


def test_the_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    versions = re.findall(r"(?m)^## \[(.+?)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert versions and versions[0][0] == version
    assert all(re.fullmatch(r"Unreleased|\d{4}-\d{2}-\d{2}", date) for _, date in versions)


@pytest.mark.parametrize("row", GLOSSARY, ids=lambda row: str(row[0]))
def test_the_code_uses_the_words_of_the_glossary(row: list[str]) -> None:
    """Each word, or a word that begins with it, is in the file that the glossary names."""
    word, nearest, meaning, where = row
    assert nearest and meaning.endswith(".")
    file = where.strip("`")
    path = next(path for path in (ROOT / "shardweave" / file, ROOT / file) if path.exists())
    text = path.read_text(encoding="utf-8").lower()
    missing = [each for each in word.split(", ") if not re.search(rf"\b{re.sub('[ -]', '[ _-]?', each)}", text)]
    assert not missing, f"docs/glossary.md: {file} has no such word"
