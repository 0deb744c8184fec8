"""Plain types with one value changed: what tests of files read."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

DELETED, RENAMED, DOUBLED = object(), object(), object()
WRONG: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 1.5, -0.5, math.nan, math.inf, -math.inf, 1e308, 1e-308, 1e31, 2**31,
    2**63, 10**18 + 9, 10**400, "", "x", "1e400", "nan", "*", "fine", [], [0], [1, 2], [[1, 2], [3, 4]], {}, {"a": 1},
    {"a": {}}, DELETED, RENAMED, DOUBLED,
]  # fmt: skip
"""Values that are right in few places."""

Path = tuple[str | int, ...]


def paths(node: Any, at: Path = ()) -> Iterator[Path]:
    """Where the values of nested mappings and lists stand, but the outermost one."""
    if at:
        yield at
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        yield from paths(value, (*at, key))


def mutated(data: Any, path: Path, value: Any) -> Any:
    """A copy in which the value at `path` is another one, or is gone, or has another name, or is there twice."""
    data = copy.deepcopy(data)
    holder, key = data, path[-1]
    for step in path[:-1]:
        holder = holder[step]
    if value is DELETED:
        del holder[key]
    elif value is RENAMED and isinstance(holder, dict):
        holder["renamed"] = holder.pop(key)
    elif value is RENAMED:
        holder.reverse()
    elif value is DOUBLED and isinstance(holder, dict):
        holder["doubled"] = copy.deepcopy(holder[key])
    elif value is DOUBLED:
        holder.append(copy.deepcopy(holder[key]))
    else:
        holder[key] = copy.deepcopy(value)
    return data
