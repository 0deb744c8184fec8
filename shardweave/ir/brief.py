"""The repr of frozen values with many fields: what differs from the defaults."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any


def brief(value: Any) -> str:
    """A frozen dataclass as the call that makes it, without the fields that stand at their defaults.

    >>> from shardweave.ir import Grid
    >>> brief(Grid(x=2, data=4))
    'Grid(x=2, data=4)'
    """
    said = []
    for each in fields(value):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        held = getattr(value, each.name)
        if each.repr and held != default:
            said.append(f"{each.name}={held!r}")
    return f"{type(value).__name__}({', '.join(said)})"
