"""Rows: what a paper measured beside what the compiler predicts, and how far the two are apart.

A validation as a table: predicted beside published, with the errors of each table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.ir import InfeasibleError, InputError, PlanError
from shardweave.report import Report


@dataclass(frozen=True)
class Row:
    """One figure.

    Parameters
    ----------
    table : str
        Where it is published: ``"AMSP Table V"``.
    group : str
        Within which rows are ranked, as a model on a cluster.
    name : str
        The row's own name in its group.
    unit : str
    published : float
    predicted : float, optional
        None where there is no plan.
    reason : str
        Why there is none.
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
        """A row as the call `predict()` has it; where that finds no plan, without a figure."""
        try:
            return cls(table, group, name, unit, published, predict())
        except InfeasibleError:
            reason = "does not fit"
        except (PlanError, InputError) as error:  # what cannot be built, or is not said of the row
            reason = str(error)
        return cls(table, group, name, unit, published, None, reason)

    @property
    def error(self) -> float | None:
        """Relative: 0.1 is predicted a tenth too high.

        >>> Row("Table 1", "7B", "L0", "TGS", 100.0, 75.0).error
        -0.25
        """
        return None if self.predicted is None else self.predicted / self.published - 1


@dataclass(frozen=True)
class Result:
    """All rows of a validation; it prints as a table."""

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

        return str(validated(self))


def mean_error(rows: Sequence[Row]) -> float | None:
    """The mean of the absolute errors; None without rows that have one.

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
    """The place of each among all, equal ones sharing the mean of theirs."""
    given = np.array([float(f"{value:.9g}") for value in values])  # what differs by rounding alone is equal
    return np.array([(given < value).sum() + (given == value).sum() / 2 for value in given], dtype=np.float64)


def validated(result: Result) -> Report:
    """A row for each figure; above them a line for each table, and for each row without a plan."""
    lines = [_summary(name, rows) for name, rows in result.tables.items()]
    lines += [f"{row.table}, {row.group}, {row.name}: {row.reason}" for row in result.rows if row.reason]
    columns = ("table", "group", "row", "unit", "published ", "predicted ", "error ")
    return Report((f"{len(result.rows)} published figures", *lines), columns, tuple(map(_row, result.rows)))


def _summary(name: str, rows: tuple[Row, ...]) -> str:
    mean = mean_error(rows)
    said = "no row has a plan" if mean is None else f"mean error {100 * mean:.1f} %"
    ranks = ", ".join(f"{group} {value:.3f}" for group, value in rank_correlations(rows).items())
    return f"{name}: {said}" + (f", rank correlation {ranks}" if ranks else "")


def _row(row: Row) -> tuple[str, ...]:
    predicted = "no plan" if row.predicted is None else f"{row.predicted:.4g}"
    error = "" if row.error is None else f"{100 * row.error:+.1f} %"
    return row.table, row.group, row.name, row.unit, f"{row.published:.4g}", predicted, error
