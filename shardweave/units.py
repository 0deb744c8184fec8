"""Bytes, seconds and numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
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
    """Whole numbers, those in a row by the first and the last.

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
