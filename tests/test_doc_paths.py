"""What the pages name exists: files, folders, links, headings, and names of the package."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.snippets import ROOT, pages, snippets

CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]*\w\.(?:py|md|yaml|toml|svg|ipynb)|\w[\w./-]*/")
"""A file by its ending, a folder by the slash at its end."""
DOTTED = re.compile(r"(?<![\w./@-])shardweave(?:\.\w+)+")
LINK = re.compile(r"\]\(([^)\s]+)\)")
OTHERS = {"comm_model.py", "hybrid_zero_optim.py", "stage_1_and_2.py"}
"""Files of AxoNN, InternEvo and DeepSpeed."""
FOLDERS = ("shardweave", "docs", "tests", "benchmarks", "examples", "notebooks")


@cache
def texts(page: Path) -> str:
    """The page without its blocks of code, which run in tests of their own."""
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"))


@cache
def ours() -> frozenset[str]:
    """The names of all files of the repository, and of those that blocks of the pages write."""
    named = {block.file for page in pages() for block in snippets(page) if block.file}
    return frozenset({path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*")} | named)


def has_file(page: Path, name: str) -> bool:
    """Whether a page's name for a file is one: from the page, the repository, or the package.

    Of ``folder/NAME.yaml`` the folder has to exist.
    """
    folder, _, last = name.rpartition("/")
    if last == "NAME.yaml":
        name = f"{folder}/"
    if "/" not in name:
        return name in ours() | OTHERS or (ROOT / name).exists()
    return any((folder / name).exists() for folder in (page.parent, ROOT, ROOT / "shardweave"))


def has_name(name: str) -> bool:
    """Whether a dotted name is a module of the package, something in one, or one of its operators."""
    found: object = importlib.import_module("shardweave")
    at = "shardweave"
    for part in name.split(".")[1:]:
        at = f"{at}.{part}"
        if not hasattr(found, part) and isinstance(found, ModuleType):
            try:
                importlib.import_module(at)
            except ModuleNotFoundError:
                return hasattr(torch.ops.shardweave, name.split(".")[1])
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize(("name", "there"), [
    ("shardweave.passes.pipeline.PASSES", True), ("shardweave.passes.split", False), ("shardweave.expert_mm", True),
    ("shardweave.ir.Captured", True), ("shardweave.compiler.planner", False),
])  # fmt: skip
def test_names_that_are_gone_are_found(name: str, there: bool) -> None:
    assert has_name(name) == there


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.name))
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    named = {code for code in CODE.findall(texts(page)) if FILE.fullmatch(code)}
    assert not sorted(name for name in named if not has_file(page, name))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.name))
def test_the_names_of_the_package_that_a_page_uses_exist(page: Path) -> None:
    named = {name for name in DOTTED.findall(texts(page)) if not name.endswith((".py", ".plan"))}
    assert not sorted(name for name in named if not has_name(name))


def anchors(page: Path) -> set[str]:
    """The headings of a page as the anchors that a link may name."""
    titles = re.findall(r"(?m)^#+ (.*)$", texts(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.name))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(texts(page)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken
