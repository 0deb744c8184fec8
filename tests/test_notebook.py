"""The notebook runs from top to bottom, and what is committed of it was made by such a run."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks" / "plan_on_a_laptop.ipynb"
SHARES, FEWER = "(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)", "(1.0, 0.7)"
"""Of memory, each of which is planned for; and those that are here: the smallest takes a minute."""


def test_runs_and_shows_its_figures() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = outputs(notebook)
    (swept,) = (cell for cell in notebook.cells if SHARES in cell.source)
    swept.source = swept.source.replace(SHARES, FEWER)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}})
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    ran = outputs(notebook)
    assert "image/png" in {kind for kinds in ran for kind in kinds}
    assert [bool(kinds) for kinds in committed] == [bool(kinds) for kinds in ran], "run `make notebook` and commit it"


def outputs(notebook: nbformat.NotebookNode) -> list[set[str]]:
    """For each code cell the kinds of what it shows."""
    return [
        {kind for output in cell.outputs for kind in output.get("data", {"text/plain": ""})}
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
