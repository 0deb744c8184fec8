"""A validation as a table: predicted beside published, with the errors of each table."""

from __future__ import annotations

from shardweave.report.report import Report
from shardweave.validation.rows import Result, Row, mean_error, rank_correlations


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
