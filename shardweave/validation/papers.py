"""The papers whose tables the compiler reproduces: from the name of a paper's file to its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from shardweave.validation import amsp, axonn, exact, oases, osdp
from shardweave.validation.rows import Paper, Result, Row
from shardweave.validation.setting import Progress, Setting


def _amsp(paper: Paper, setting: Setting) -> Iterator[Row]:
    yield from amsp.rows(paper, setting)
    yield from exact.amsp(paper, setting)


ROWS: Mapping[str, Callable[[Paper, Setting], Iterator[Row]]] = {
    "amsp": _amsp,
    "axonn": axonn.rows,
    "oases": oases.rows,
    "osdp": exact.osdp,
    "osdp_profile": osdp.rows,
    "zeropp": exact.zeropp,
}


def validate(papers: Mapping[str, Paper], progress: Progress = lambda _: None) -> Result:
    """Build and simulate every row of these papers that the compiler has a plan for.

    Parameters
    ----------
    papers : mapping of str to Paper
        As `load` reads them.
    progress : callable
        Told each row as its turn comes.
    """
    setting = Setting(progress)
    return Result(tuple(row for name, paper in papers.items() if name in ROWS for row in ROWS[name](paper, setting)))
