"""Where measurements are kept between runs: one JSON file a key, in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardweave.cost_model.measured import Measured
from shardweave.errors import ClusterError


def cache_directory() -> Path:
    """``$SHARDWEAVE_CACHE``; without it ``$XDG_CACHE_HOME/shardweave``, or ``~/.cache/shardweave``.

    Examples
    --------
    >>> cache_directory().is_absolute()
    True
    """
    own = os.environ.get("SHARDWEAVE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG base directory specification: relative paths are to be ignored
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base).absolute() / "shardweave"


def key_of(what: Mapping[str, Any]) -> str:
    """Sixteen hex digits that differ where anything in `what`, of plain types, does.

    >>> key_of({"torch": "2.13", "ranks": 4}) == key_of({"ranks": 4, "torch": "2.13"}) != key_of({"torch": "2.13"})
    True
    """
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def read(key: str) -> Measured | None:
    """The measurements kept under `key`; None where there are none, or the file is damaged."""
    try:
        data = json.loads(_path(key).read_text(encoding="utf-8"))
        found = Measured.from_dict(data)
    except (OSError, ValueError, ClusterError):
        return None
    return found if found.key == key else None


def write(measured: Measured) -> Path | None:
    """Keep `measured` under its key; who reads at the same time sees all of it or nothing.

    Returns
    -------
    Path or None
        The file; None, with a warning, where it cannot be written: the next run then measures again.
    """
    path = _path(measured.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(measured.to_dict(), file, indent=1)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        warnings.warn(
            f"the cluster's measurements could not be kept in {path.parent}: {error.strerror or error}; "
            "set SHARDWEAVE_CACHE to a directory that can be written",
            stacklevel=2,
        )
        return None
    return path


def _path(key: str) -> Path:
    return cache_directory() / f"cluster-{key}.json"
