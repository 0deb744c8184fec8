"""Published tables as files: one YAML or JSON file a paper."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from shardweave.ir import InputError

Paper = Mapping[str, Any]
_READERS: Mapping[str, Callable[[str], Any]] = {".json": json.loads, ".yaml": yaml.safe_load}


def load(folder: str | os.PathLike[str]) -> dict[str, Paper]:
    """The papers of a folder by the names of their files: ``amsp.yaml`` is ``"amsp"``.

    Raises
    ------
    InputError
        Where there is no such folder, nothing in it, two files of one name, or one that is no mapping.
    """
    papers: dict[str, Paper] = {}
    for path in sorted(path for path in Path(folder).glob("*") if path.suffix in _READERS):
        if path.stem in papers:
            raise InputError(f"{path}: expected one file a paper, found one of this name in another format too")
        papers[path.stem] = _read(path)
    if not papers:
        raise InputError(
            f"{folder}: expected a folder with one YAML file a paper, such as amsp.yaml (or JSON); found none"
        )
    return papers


def _read(path: Path) -> Paper:
    try:
        data = _READERS[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: expected {path.suffix[1:].upper()}, got: {error}") from error
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: expected a mapping of tables by name, got {type(data).__name__}")
    return data


def table(paper: Paper, name: str, key: str) -> list[Mapping[str, Any]]:
    """The rows of the table `key` of a paper; none where its file leaves it out.

    Raises
    ------
    InputError
        Where there are rows that are not a list of mappings.
    """
    rows = (paper.get(key) or {}).get("rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise InputError(f"{name}.yaml, {key}.rows: expected a list of mappings, got {rows!r}")
    return rows
