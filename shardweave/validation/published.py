"""Published tables as files: one YAML file a paper."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shardweave.errors import InputError

Paper = Mapping[str, Any]


def load(folder: str | os.PathLike[str]) -> dict[str, Paper]:
    """The papers of a folder by the names of their files: ``amsp.yaml`` is ``"amsp"``.

    Raises
    ------
    InputError
        Where there is no such folder, nothing in it, or a file that is no mapping.
    """
    paths = sorted(Path(folder).glob("*.yaml"))
    if not paths:
        raise InputError(f"{folder}: expected a folder with one YAML file a paper, such as amsp.yaml; found none")
    return {path.stem: _read(path) for path in paths}


def _read(path: Path) -> Paper:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: expected YAML, got: {error}") from error
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
