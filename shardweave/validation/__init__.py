"""Validation: published tables, built as forced plans of the compiler, simulated, and compared with the measurements.

`rows` reads the files of a folder. The module of each paper (`amsp`, ...) makes `Row`s of them, by plans on the cluster
that `clusters` describes. `docs/validation.md` discusses the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from shardweave.validation import amsp, axonn, memory_and_traffic, oases, osdp
from shardweave.validation.clusters import CalibratedCluster, Constant
from shardweave.validation.rows import Paper, Result, Row, load, save_figures, validation_report
from shardweave.validation.setting import Progress, Setting

__all__ = [
    "ROWS",
    "Constant",
    "CalibratedCluster",
    "Result",
    "Row",
    "Setting",
    "load",
    "save_figures",
    "validate",
    "validation_report",
]


def _amsp(paper: Paper, setting: Setting) -> Iterator[Row]:
    yield from amsp.rows(paper, setting)
    yield from memory_and_traffic.amsp(paper, setting)


ROWS: Mapping[str, Callable[[Paper, Setting], Iterator[Row]]] = {
    "amsp": _amsp,
    "axonn": axonn.rows,
    "oases": oases.rows,
    "osdp": memory_and_traffic.osdp,
    "osdp_profile": osdp.rows,
    "zeropp": memory_and_traffic.zeropp,
}
"""The rows of each paper, by the name of its file."""


def validate(papers: Mapping[str, Paper], progress: Progress = lambda _: None) -> Result:
    """Build and simulate every row of these papers that the compiler has a plan for.

    Parameters
    ----------
    papers : mapping of str to Paper
        From `load`.
    progress : callable
        Called with the name of each row before it is planned.
    """
    setting = Setting(progress)
    return Result(tuple(row for name, paper in papers.items() if name in ROWS for row in ROWS[name](paper, setting)))
