"""The cache of profiles, keyed by the hardware and the versions.

What a rank runs on and with, as plain types: what measurements are kept under.

Where measurements are kept between runs: one JSON file a key, in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardweave.cost_model.measured_tables import Measured
from shardweave.ir import ClusterError


def hardware() -> dict[str, Any]:
    """What one rank runs on and with: where any of it differs, its times are others."""
    found: dict[str, Any] = {"torch": torch.__version__}
    if dist.is_available() and dist.is_initialized():
        found["backend"] = dist.get_backend()
    if torch.cuda.is_available() and found.get("backend") != "gloo":
        found["device"] = torch.cuda.get_device_name(torch.cuda.current_device())
        found |= {"cuda": torch.version.cuda or torch.version.hip, "nccl": _nccl()}
    else:
        found |= {"device": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return found


def _nccl() -> list[int]:
    return list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine()


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
        found = Measured.from_dict(load(f"cluster-{key}"))
    except ClusterError:
        return None
    return found if found.key == key else None


def write(measured: Measured) -> Path | None:
    """Keep `measured` under its key, as `store` does."""
    return store(f"cluster-{measured.key}", measured.to_dict())


def load(name: str) -> object:
    """What is kept under `name`; None where there is nothing, or the file is damaged."""
    try:
        found: object = json.loads(_path(name).read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError, RecursionError):  # RecursionError: lists within lists without end
        return None


def store(name: str, data: Mapping[str, Any]) -> Path | None:
    """Keep `data`, of plain types, under `name`; who reads at the same time sees all of it or nothing.

    Returns
    -------
    Path or None
        The file; None, with a warning, where it cannot be written: the next run then measures again.
    """
    path = _path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        warnings.warn(
            f"the cluster's measurements could not be kept in {path.parent}: {error.strerror or error}; "
            "set SHARDWEAVE_CACHE to a directory that can be written",
            stacklevel=2,
        )
        return None
    return path


def _path(name: str) -> Path:
    return cache_directory() / f"{name}.json"
