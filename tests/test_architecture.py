"""The rooms of the package: imports go down only, by the names of a room, and in no circle.

Every import counts, those inside functions and under ``TYPE_CHECKING`` too. The order of the rooms stands in
pyproject.toml.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardweave"
ROOMS: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["shardweave"]["rooms"]
ON_TOP = ("", "cli")
"""The package's own public names, and its commands, which take several rooms' modules together."""


class Import(NamedTuple):
    """One name, or a whole module, that a file imports."""

    file: str
    line: int
    module: str
    name: str | None

    def __str__(self) -> str:
        return f"shardweave/{self.file}:{self.line} imports {self.module}" + (f".{self.name}" if self.name else "")


@cache
def modules() -> dict[str, Path]:
    """The files of the package, by the names of their modules without ``shardweave.``."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> tuple[Import, ...]:
    """What a module imports of the package."""
    return tuple(_imports(module))


def _imports(module: str) -> Iterator[Import]:
    path = modules()[module]
    file = str(path.relative_to(PACKAGE))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            if (node.module or "").split(".")[0] != "shardweave":
                continue
            base = (node.module or "").removeprefix("shardweave").removeprefix(".")
            for each in node.names:
                inner = f"{base}.{each.name}".removeprefix(".")
                is_module = inner in modules() and not _defines(base, each.name)
                yield Import(file, node.lineno, inner if is_module else base, None if is_module else each.name)
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "shardweave":
                    yield Import(file, node.lineno, each.name.removeprefix("shardweave").removeprefix("."), None)


def _defines(package: str, name: str) -> bool:
    """Whether a package has a name of its own that one of its modules has, too: `runtime.launch` is a function."""
    tree = ast.parse(modules()[package].read_text(encoding="utf-8"))
    return any(isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names) for node in tree.body)


def room(module: str) -> str:
    return module.partition(".")[0]


def test_every_file_stands_in_a_room() -> None:
    assert {room(module) for module in modules()} == {"", *ROOMS}


def test_tests_import_nothing_from_scripts() -> None:
    """Scripts of docs/ and benchmarks/ may use what tests have; their own tests are in benchmarks/tests."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path}:{node.lineno}: {name}" for name in names if name.split(".")[0] in ("docs", "benchmarks")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("upper", ROOMS)
def test_imports_go_down(upper: str) -> None:
    below = set(ROOMS[: ROOMS.index(upper) + 1])
    # What is run by users may use the package by its own name.
    allowed = below | ({""} if upper in ("demo", "validation", "cli") else set())
    up = [each for module in modules() if room(module) == upper for each in imports(module)]
    assert not [str(each) for each in up if room(each.module) not in allowed]


@pytest.mark.parametrize("name", [name for name in ROOMS if name not in ON_TOP])
def test_a_room_is_used_by_its_names(name: str) -> None:
    exported = importlib.import_module(f"shardweave.{name}").__all__
    outside = [each for module in modules() if room(module) not in (name, *ON_TOP) for each in imports(module)]
    used = [each for each in outside if room(each.module) == name]
    past = [str(each) for each in used if each.module != name or (each.name and each.name not in exported)]
    assert not past, f"import these from shardweave.{name} itself, and list them in its __all__"


@pytest.mark.parametrize("upper", ["demo", "validation"])
def test_programs_use_public_names(upper: str) -> None:
    """What users run shows how the package is used: by its own names where it exports one, as ``sw.plan``."""
    public = set(importlib.import_module("shardweave").__all__)
    found = []
    for module in (module for module in modules() if room(module) == upper):
        found += [str(each) for each in imports(module) if each.module not in ("", upper) and each.name in public]
        for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sw":
                found += [] if node.attr in public else [f"{module}:{node.lineno} uses sw.{node.attr}"]
    assert not found, "take these from `import shardweave as sw`, and only names of its __all__"


@pytest.mark.parametrize("name", [name for name in ROOMS if name not in ON_TOP])
def test_a_room_says_what_it_is_for(name: str) -> None:
    package = importlib.import_module(f"shardweave.{name}")
    assert len((inspect.getdoc(package) or "").split()) >= 10
    assert sorted(package.__all__) == sorted(set(package.__all__))
    assert not [each for each in package.__all__ if not hasattr(package, each)]


def test_no_imports_go_round() -> None:
    graph = nx.DiGraph((module, each.module) for module in modules() for each in imports(module))
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    assert not [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]


def test_no_folder_is_full() -> None:
    for folder in {path.parent for path in modules().values()}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 21, f"{folder.relative_to(ROOT)} has {len(files)} files"


def test_the_picture_shows_todays_imports() -> None:
    """Every dot of the picture has an identifier with the two rooms, such as ``planner-imports-ir``."""
    svg = ElementTree.parse(ROOT / "docs" / "images" / "architecture.svg")
    identifiers = [node.get("id", "").split("-imports-") for node in svg.iter()]
    drawn = {tuple(pair) for pair in identifiers if len(pair) == 2}
    edges = {(room(module), room(each.module)) for module in modules() for each in imports(module)}
    today = {(upper or "shardweave", lower or "shardweave") for upper, lower in edges if upper != lower}
    assert drawn == today, "run `make figures` and commit docs/images/architecture.svg"


def test_the_table_of_rooms_is_what_the_sources_say() -> None:
    command = [sys.executable, "-m", "docs.make_architecture", "--print"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert done.stdout and done.stdout in page, "run `make figures` and commit docs/architecture.md"
    assert [name for name in ROOMS if f"| [`{name}`]" not in page] == []
