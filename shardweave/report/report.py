"""Reports: a table with lines above it, which prints itself in a terminal, in a notebook, and as plain text."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

_WIDTH = 140


@dataclass(frozen=True, repr=False)
class Report:
    """A table with lines above it.

    Parameters
    ----------
    lines : tuple of str
        What is said before the table; the first one is its title.
    columns : tuple of str
        Headings; one that ends in a blank is of figures, which are set flush right.
    rows : tuple of tuple of str
        As many cells each as there are columns.
    total : tuple of str
        A last row, or none.
    """

    lines: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    total: tuple[str, ...] = ()

    def __rich__(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", border_style="dim", padding=(0, 1, 0, 0))
        for number, column in enumerate(self.columns):
            right = column.endswith(" ")
            table.add_column(
                column.strip(), justify="right" if right else "left", no_wrap=number < len(self.columns) - 1
            )
        for row in self.rows:
            table.add_row(*map(Text, row))
        if self.total:
            table.add_section()
            table.add_row(*(Text(cell, style="bold") for cell in self.total))
        title, *others = self.lines
        return Group(Text(title, style="bold"), *map(Text, others), *([table] if self.rows else []))

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=_WIDTH, color_system=None, force_terminal=False, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        align = ["right" if column.endswith(" ") else "left" for column in self.columns]

        def cells(tag: str, row: Sequence[str]) -> str:
            style = "padding: 2px 10px; white-space: nowrap; text-align:"
            pairs = zip(row, align, strict=True)
            return "".join(f'<{tag} style="{style} {side}">{html.escape(cell.strip())}</{tag}>' for cell, side in pairs)

        title, *others = self.lines
        head = f"<p><b>{html.escape(title)}</b>{''.join(f'<br>{html.escape(line)}' for line in others)}</p>"
        if not self.rows:
            return head
        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        foot = f"<tfoot><tr>{cells('th', self.total)}</tr></tfoot>" if self.total else ""
        return f"{head}<table><thead><tr>{cells('th', self.columns)}</tr></thead><tbody>{body}</tbody>{foot}</table>"
