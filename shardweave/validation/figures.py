"""A validation as figures: one a table, predicted over published, and how far each row is off."""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardweave.validation.rows import Result, Row, mean_error

COLOURS = ("#1f5fa8", "#c2571a", "#3a8f5c", "#7a4fa3", "#b0892b", "#5c6b7a", "#a83253", "#2a8c9c")


def drawn(name: str, rows: tuple[Row, ...]) -> Figure | None:
    """One table: predicted over published on the left, the error of each row on the right; None without a figure.

    Examples
    --------
    >>> rows = (Row("Table 1", "7B", "L0", "TGS", 100.0, 95.0), Row("Table 1", "7B", "L1", "TGS", 120.0, 130.0))
    >>> [axes.get_xlabel() for axes in drawn("Table 1", rows).axes]
    ['published, TGS', 'error, %']
    """
    found = [row for row in rows if row.predicted is not None]
    if not found:
        return None
    groups = list(dict.fromkeys(row.group for row in found))
    colour = {group: COLOURS[index % len(COLOURS)] for index, group in enumerate(groups)}
    # A table of many rows names none: its groups are what can be told apart.
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
        figure = drawn(name, rows)
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
