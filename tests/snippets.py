"""The code in the pages of the documentation, and how the tests run it.

A fenced block of a page is run as its first line says:

=============================  ====================================================================================
```` ```python ````            in this process; all of a page share their names, as cells of a notebook do
```` ```python ranks=2 ````    on as many local ranks, in a running world; all of a page share their names on each
```` ```python file=a.py ````  written to that file of an empty folder, which another block of the page runs or imports
```` ```yaml file=a.yaml ````  the same
```` ```sh ````                line by line, in that folder; of `make` only that there are such targets, and of
                               `source` nothing: the tests run in an environment already
```` ```sh in=repository ````  the same, in the folder of the repository
```` ``` ````                  not code: something that is printed
=============================  ====================================================================================

What no CPU can run stands behind a line that begins with `NOT_EXECUTED`, for the reader to see.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave import cli

ROOT = Path(__file__).parent.parent
NOT_EXECUTED = "*Not executed by the tests:"
LANGUAGES = {"python", "yaml", "sh", ""}
ATTRIBUTES = {"file", "in", "ranks"}


@dataclass(frozen=True)
class Snippet:
    """A fenced block of a page.

    Parameters
    ----------
    page : Path
    line : int
        Of its fence.
    language : str
    attributes : mapping of str to str
        What else the fence says: ``file``, ``in``, ``ranks``.
    text : str
    executed : bool
        Whether the page does not say that it is not.
    """

    page: Path
    line: int
    language: str
    attributes: Mapping[str, str]
    text: str
    executed: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def ranks(self) -> int:
        """On how many ranks it runs; 0 in this process."""
        return int(self.attributes.get("ranks", 0))

    @property
    def file(self) -> str | None:
        """The file that it is written to."""
        return self.attributes.get("file")

    def run(self, names: dict[str, Any]) -> None:
        """Run Python code with these names; a traceback shows the lines of the page."""
        if self.text.startswith(">>> "):
            test = doctest.DocTestParser().get_doctest(self.text, names, str(self), str(self.page), self.line)
            doctest.DebugRunner().run(test, clear_globs=False)
        else:
            exec(compile("\n" * self.line + self.text, str(self.page), "exec"), names)


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and all pages of docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page: Path) -> list[Snippet]:
    """The fenced blocks of a page, from the first to the last."""
    found: list[Snippet] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    begun: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if begun is None:
            begun = number
            continue
        language, *others = lines[begun].removeprefix("```").split() or [""]
        attributes = dict(each.split("=", 1) for each in others)
        assert language in LANGUAGES and ATTRIBUTES.issuperset(attributes), f"{page}:{begun + 1}: {lines[begun]}"
        before = "\n".join(lines[:begun]).rstrip().rpartition("\n\n")[2]
        text = "\n".join(lines[begun + 1 : number]) + "\n"
        executed = not before.startswith(NOT_EXECUTED)
        found.append(Snippet(page, begun + 1, language, attributes, text, executed))
        begun = None
    assert begun is None, f"{page}:{(begun or 0) + 1}: the block has no end"
    return found


def run_on_a_rank(blocks: Sequence[Snippet], folder: Path) -> None:
    """Run blocks one after another; on every rank of a running world."""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        block.run(names)


def run_shell(block: Snippet, folder: Path) -> None:
    """Run each line of a shell block in a folder: ``shardweave`` in this process, others as processes of their own."""
    if block.attributes.get("in") == "repository":
        folder = ROOT
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words or words[0] == "source":
            continue
        if words[0] == "shardweave":
            _run_shardweave(words, f"{block}: {line}")
            continue
        if words[0] == "make":
            words, folder = [words[0], "--dry-run", *words[1:]], ROOT
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{block}: {line}\n{done.stdout}{done.stderr}"


def _run_shardweave(words: Sequence[str], what: str) -> None:
    given, sys.argv = sys.argv, [*words]
    try:
        cli.main()
    except SystemExit as exit_:
        assert not exit_.code, what
    finally:
        sys.argv = given


def is_used(file: str, blocks: Sequence[Snippet]) -> bool:
    """Whether some other block names a file, or imports it."""
    names = re.compile(rf"\b{re.escape(file)}\b|\b(from|import) {re.escape(file.partition('.')[0])}\b")
    return any(block.file != file and names.search(block.text) for block in blocks)
