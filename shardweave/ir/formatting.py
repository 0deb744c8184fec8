"""Values as users read and write them: bytes, seconds, ranges of numbers, dataclasses and type annotations."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Literal, Union, get_args, get_origin

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
        If `size` has another form, or is less than one byte.

    Examples
    --------
    >>> bytes_of("20GB"), bytes_of("1.5 GiB"), bytes_of(8e9)
    (20000000000, 1610612736, 8000000000)
    """
    number, unit = size, 1
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*)\s*", size.lower())
        if match is None or (match[2] or "b") not in _UNITS:
            raise ValueError(f"{size!r} is no size such as '20GB', '20 GiB' or '800MB'")
        number, unit = float(match[1]), _UNITS[match[2] or "b"]
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
    arguments = []
    for each in fields(value):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        current = getattr(value, each.name)
        if each.repr and current != default:
            arguments.append(f"{each.name}={current!r}")
    return f"{type(value).__name__}({', '.join(arguments)})"


def matches_annotation(value: object, annotation: Any) -> bool:
    """Whether `value` is of the type of `annotation`, with all that it contains.

    A bool is no number, a whole number is a float, and a str is no sequence of str.

    Parameters
    ----------
    annotation : type
        A class, None, ``Any``, a union, or a ``Literal``, ``Mapping``, ``Sequence`` or ``tuple`` of such.

    Examples
    --------
    >>> [matches_annotation({"head": value}, int | Mapping[str, int]) for value in (4, True)]
    [True, False]
    >>> matches_annotation(("a", "b"), Sequence[str]), matches_annotation("ab", Sequence[str])
    (True, False)
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(matches_annotation(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is Mapping:
        key, item = inner
        return isinstance(value, Mapping) and all(
            matches_annotation(k, key) and matches_annotation(v, item) for k, v in value.items()
        )
    if origin is Sequence:
        sequence = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return sequence and all(matches_annotation(each, inner[0]) for each in value)  # type: ignore[attr-defined]
    if origin is tuple and inner[-1] is ...:
        return isinstance(value, tuple) and all(matches_annotation(each, inner[0]) for each in value)
    if annotation is None or annotation is types.NoneType:
        return value is None
    if annotation in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole or (annotation is float and isinstance(value, float))
    return isinstance(value, annotation)


def readable_annotation(annotation: Any) -> str:
    """An annotation in words.

    >>> readable_annotation(int | Mapping[str, int] | None)
    'an int, a mapping from str to int or None'
    >>> readable_annotation(Literal["auto", "whole"])
    "'auto' or 'whole'"
    """
    *others, last = _parts(annotation)
    return f"{', '.join(others)} or {last}" if others else last


def _parts(annotation: Any) -> list[str]:
    """Each member of a union in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return [part for each in inner for part in _parts(each)]
    if origin is Literal:
        return [repr(each) for each in inner]
    if origin is Mapping:
        return [f"a mapping from {_name(inner[0])} to {_name(inner[1])}"]
    if origin is Sequence:
        return [f"a sequence of {_name(inner[0])}"]
    if origin is tuple:
        return [f"a tuple of {_name(inner[0])}"]
    name = _name(annotation)
    return [name if name == "None" else f"an {name}" if name[0] in "aeio" else f"a {name}"]


def _name(annotation: Any) -> str:
    if get_origin(annotation) is not None:
        return readable_annotation(annotation).removeprefix("a ")
    return "None" if annotation in (None, types.NoneType) else str(getattr(annotation, "__name__", annotation))
