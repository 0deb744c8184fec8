"""Bytes, seconds and numbers as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_UNITS = {"b": 1} | {
    prefix.lower() + unit: base**power
    for power, prefix in enumerate("KMGTP", 1)
    for unit, base in (("b", 1000), ("ib", 1024))
}
"""The bytes of a unit, by its name in small letters."""
_SECONDS = ("s", "ms", "µs", "ns")


def readable_bytes(size: float) -> str:
    """`size` bytes in powers of 1024.

    >>> readable_bytes(1536), readable_bytes(80 * 2**30), readable_bytes(12)
    ('1.5 KiB', '80.0 GiB', '12 B')
    """
    power = 0
    while abs(size) >= (1023.95 if power else 1024) and power < len(_BYTES) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.{min(power, 1)}f} {_BYTES[power]}"


def bytes_of(size: float | str) -> int:
    """The bytes that a user gives as a number, or as a text such as ``"20GB"`` or ``"20 GiB"``.

    kB, MB, GB, TB and PB are powers of 1000, as on a GPU's datasheet; KiB, MiB, GiB, TiB and PiB are powers of 1024, as
    `readable_bytes` and ``nvidia-smi`` count. A number without a unit is bytes.

    Raises
    ------
    ValueError
        If `size` is neither of these, or less than one byte.

    Examples
    --------
    >>> bytes_of("20GB"), bytes_of("1.5 GiB"), bytes_of(8e9)
    (20000000000, 1610612736, 8000000000)
    """
    number, unit = size, 1
    if isinstance(size, str):
        said = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*)\s*", size.lower())
        if said is None or (said[2] or "b") not in _UNITS:
            raise ValueError(f"{size!r} is no size such as '20GB', '20 GiB' or '800MB'")
        number, unit = float(said[1]), _UNITS[said[2] or "b"]
    if isinstance(number, bool) or not isinstance(number, int | float) or not 1 <= number * unit < 2**63:
        raise ValueError(f"{size!r} is not between a byte and 8 EiB")
    return int(number * unit)


def readable_seconds(seconds: float) -> str:
    """`seconds` in three digits.

    >>> readable_seconds(0.01234), readable_seconds(12e-6), readable_seconds(0), readable_seconds(75)
    ('12.3 ms', '12.0 µs', '0 s', '75.0 s')
    """
    if not seconds or not math.isfinite(seconds):
        return f"{seconds:.0f} s"
    power = 0
    while abs(seconds) < 0.9995 and power < len(_SECONDS) - 1:
        seconds, power = seconds * 1000, power + 1
    digits = 2 if abs(seconds) < 9.995 else 1 if abs(seconds) < 99.95 else 0
    return f"{seconds:.{digits}f} {_SECONDS[power]}"


def readable_ranges(numbers: Iterable[int]) -> str:
    """Integers as text, with consecutive ones as a range.

    >>> readable_ranges([6, 0, 1, 2, 3])
    '0-3,6'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def brief(value: Any) -> str:
    """A frozen dataclass as the call that makes it, without the fields that have their default values.

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
