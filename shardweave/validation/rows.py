"""Rows: a published figure beside the predicted one. They are read from files, and shown as tables and figures."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

import shardweave as sw
from shardweave.report import Report

Paper = Mapping[str, Any]
_READERS: Mapping[str, Callable[[str], Any]] = {".json": json.loads, ".yaml": yaml.safe_load}


def load(folder: str | os.PathLike[str]) -> dict[str, Paper]:
    """The papers of a folder by the names of their files: ``amsp.yaml`` is ``"amsp"``.

    Raises
    ------
    InputError
        If there is no such folder, it is empty, two files have one name, or a file is no mapping.
    """
    papers: dict[str, Paper] = {}
    for path in sorted(path for path in Path(folder).glob("*") if path.suffix in _READERS):
        if path.stem in papers:
            raise sw.InputError(f"{path}: expected one file a paper, found one of this name in another format too")
        papers[path.stem] = _read(path)
    if not papers:
        raise sw.InputError(
            f"{folder}: expected a folder with one YAML file a paper, such as amsp.yaml (or JSON); found none"
        )
    return papers


def _read(path: Path) -> Paper:
    try:
        data = _READERS[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        raise sw.InputError(f"{path}: expected {path.suffix[1:].upper()}, got: {error}") from error
    if not isinstance(data, Mapping):
        raise sw.InputError(f"{path}: expected a mapping of tables by name, got {type(data).__name__}")
    return data


def table(paper: Paper, name: str, key: str) -> list[Mapping[str, Any]]:
    """The rows of the table `key` of a paper; none if its file has no such table.

    Raises
    ------
    InputError
        If the rows are not a list of mappings.
    """
    rows = (paper.get(key) or {}).get("rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise sw.InputError(f"{name}.yaml, {key}.rows: expected a list of mappings, got {rows!r}")
    return rows


@dataclass(frozen=True)
class Row:
    """One published figure and its prediction.

    Parameters
    ----------
    table : str
        The published table: ``"AMSP Table V"``.
    group : str
        The group of rows that are ranked together, such as a model on a cluster.
    name : str
        The row's own name in its group.
    unit : str
    published : float
    predicted : float, optional
        None if there is no plan.
    reason : str
        Why there is no plan.
    """

    table: str
    group: str
    name: str
    unit: str
    published: float
    predicted: float | None
    reason: str = ""

    @classmethod
    def of(cls, table: str, group: str, name: str, unit: str, published: float, predict: Callable[[], float]) -> Row:
        """A row with the result of `predict()`, or without a prediction if that finds no plan."""
        try:
            return cls(table, group, name, unit, published, predict())
        except sw.InfeasibleError:
            reason = "does not fit"
        except (sw.PlanError, sw.InputError) as error:  # the plan cannot be built, or the paper lacks a value for it
            reason = str(error)
        return cls(table, group, name, unit, published, None, reason)

    @property
    def error(self) -> float | None:
        """The relative error: 0.1 if the prediction is a tenth too high.

        >>> Row("Table 1", "7B", "L0", "TGS", 100.0, 75.0).error
        -0.25
        """
        return None if self.predicted is None else self.predicted / self.published - 1


@dataclass(frozen=True)
class Result:
    """All rows of a validation. It prints as a table."""

    rows: tuple[Row, ...]

    @property
    def tables(self) -> dict[str, tuple[Row, ...]]:
        """The rows by their table."""
        names = dict.fromkeys(row.table for row in self.rows)
        return {name: tuple(row for row in self.rows if row.table == name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """As plain types, with the errors and rank correlations of each table."""
        return {
            name: {
                "rows": [{**vars(row), "error": row.error} for row in rows],
                "mean_error": mean_error(rows),
                "rank_correlation": rank_correlations(rows),
            }
            for name, rows in self.tables.items()
        }

    def __str__(self) -> str:
        return str(validation_report(self))


def mean_error(rows: Sequence[Row]) -> float | None:
    """The mean of the absolute relative errors; None if no row has a prediction.

    >>> mean_error([Row("", "", "", "", 100.0, predicted) for predicted in (95.0, 115.0, None)])
    0.1
    """
    errors = [abs(row.error) for row in rows if row.error is not None]
    return round(float(np.mean(errors)), 12) if errors else None


def rank_correlations(rows: Sequence[Row]) -> dict[str, float]:
    """Spearman's correlation of predicted with published, for each group of at least three rows that differ.

    >>> rows = [Row("", "7B", "", "", published, predicted) for published, predicted in ((1, 2), (2, 3), (3, 9))]
    >>> rank_correlations(rows)
    {'7B': 1.0}
    """
    found = {}
    for group in dict.fromkeys(row.group for row in rows):
        pairs = [(row.published, row.predicted) for row in rows if row.group == group and row.predicted is not None]
        published, predicted = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
        if len(pairs) > 2 and published.std() > 0 and predicted.std() > 0:
            found[group] = round(float(np.corrcoef(published, predicted)[0, 1]), 12)
    return found


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """The rank of each value; equal values share their mean rank."""
    given = np.array([float(f"{value:.9g}") for value in values])  # differences by rounding do not count
    return np.array([(given < value).sum() + (given == value).sum() / 2 for value in given], dtype=np.float64)


def validation_report(result: Result) -> Report:
    """A table of all figures, below a line for each published table and for each row without a plan."""
    lines = [_summary(name, rows) for name, rows in result.tables.items()]
    lines += [f"{row.table}, {row.group}, {row.name}: {row.reason}" for row in result.rows if row.reason]
    columns = ("table", "group", "row", "unit", "published ", "predicted ", "error ")
    return Report((f"{len(result.rows)} published figures", *lines), columns, tuple(map(_row, result.rows)))


def _summary(name: str, rows: tuple[Row, ...]) -> str:
    mean = mean_error(rows)
    accuracy = "no row has a plan" if mean is None else f"mean error {100 * mean:.1f} %"
    ranks = ", ".join(f"{group} {value:.3f}" for group, value in rank_correlations(rows).items())
    return f"{name}: {accuracy}" + (f", rank correlation {ranks}" if ranks else "")


def _row(row: Row) -> tuple[str, ...]:
    predicted = "no plan" if row.predicted is None else f"{row.predicted:.4g}"
    error = "" if row.error is None else f"{100 * row.error:+.1f} %"
    return row.table, row.group, row.name, row.unit, f"{row.published:.4g}", predicted, error


COLOURS = ("#1f5fa8", "#c2571a", "#3a8f5c", "#7a4fa3", "#b0892b", "#5c6b7a", "#a83253", "#2a8c9c")


def draw_table(name: str, rows: tuple[Row, ...]) -> Figure | None:
    """One table: predicted over published on the left, the error of each row on the right; None without a figure.

    Examples
    --------
    >>> rows = (Row("Table 1", "7B", "L0", "TGS", 100.0, 95.0), Row("Table 1", "7B", "L1", "TGS", 120.0, 130.0))
    >>> [axes.get_xlabel() for axes in draw_table("Table 1", rows).axes]
    ['published, TGS', 'error, %']
    """
    found = [row for row in rows if row.predicted is not None]
    if not found:
        return None
    groups = list(dict.fromkeys(row.group for row in found))
    colour = {group: COLOURS[index % len(COLOURS)] for index, group in enumerate(groups)}
    # In a table of many rows only groups are labelled.
    named = len(found) <= 40
    figure = Figure(figsize=(11, max(4.0, 0.19 * len(found) + 1.2) if named else 5.5), layout="constrained")
    figure.suptitle(f"{name}: mean error {100 * (mean_error(rows) or 0.0):.1f} %")
    left, right = figure.subplots(1, 2)
    _against(left, found, groups, colour)
    _errors(right, found, colour, named)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def save_figures(result: Result, folder: Path) -> list[Path]:
    """Draw every table of a validation into `folder`, which is made; the files, as ``amsp-table-v.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    for name, rows in result.tables.items():
        figure = draw_table(name, rows)
        if figure is not None:
            saved.append(folder / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.png")
            figure.savefig(saved[-1], dpi=110)
    return saved


def _against(axes: Axes, rows: list[Row], groups: list[str], colour: dict[str, str]) -> None:
    for group in groups:
        points = [(row.published, row.predicted) for row in rows if row.group == group]
        axes.plot(*zip(*points), "o", color=colour[group], markersize=5, alpha=0.8, label=group)
    values = [value for row in rows for value in (row.published, row.predicted) if value]
    if values and min(values) > 0:
        axes.set_xscale("log")
        axes.set_yscale("log")
    if values:
        low, high = min(values), max(values)
        axes.plot([low, high], [low, high], color="#5c6b7a", linewidth=1)
    units = " and ".join(dict.fromkeys(row.unit for row in rows))
    axes.set_xlabel(f"published, {units}")
    axes.set_ylabel(f"predicted, {units}")
    axes.legend(frameon=False, fontsize=8)


def _errors(axes: Axes, rows: list[Row], colour: dict[str, str], named: bool) -> None:
    errors = [100 * (row.error or 0.0) for row in rows]
    axes.barh(range(len(rows)), errors, color=[colour[row.group] for row in rows], height=0.8 if named else 1.0)
    axes.axvline(0, color="#5c6b7a", linewidth=1)
    axes.invert_yaxis()
    axes.set_yticks(range(len(rows)) if named else [], [row.name for row in rows] if named else [], fontsize=7)
    axes.set_xlabel("error, %")
