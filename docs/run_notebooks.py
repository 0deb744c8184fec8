"""Run every notebook from top to bottom and keep its outputs: ``make notebook``."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parent.parent


def main() -> None:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # wall times would differ in every run
        nbformat.write(notebook, path)
        print(f"{path.relative_to(ROOT)}: {len(notebook.cells)} cells")


if __name__ == "__main__":
    main()
