"""Conversion of cluster files: plain types to frozen dataclasses and back, with errors that name the key."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from shardweave.ir import ClusterError

_MIN_FIGURE, _MAX_FIGURE = 1e-30, 1e30
"""The limits of figures, so that costs computed from them are finite."""
_FIELDS_BY_DTYPE = {"flops": "FLOP/s", "matmul_half": "a size"}
"""Fields that map a dtype to a figure, and the figure's unit."""


def check_number(
    key: str, value: object, *, whole: bool = False, zero: bool = False, low: float = 0.0, high: float = math.inf
) -> None:
    """Raise an error unless a number is in ``(0, high]``; in ``[0, high]`` with `zero`, ``[low, high]`` with `low`.

    Raises
    ------
    ClusterError
        If a value is wrong; names `key`, the expected and the given value.

    Examples
    --------
    >>> check_number("levels.gpu.latency", 0.0, zero=True)
    """
    at_least = zero or low > 0
    expected = f"a {'whole ' if whole else ''}number {'of at least' if at_least else 'above'} {low:g}"
    if high < math.inf:
        expected += f" and at most {high:{',' if isinstance(high, int) else 'g'}}"
    number = isinstance(value, int) or (isinstance(value, float) and not whole)
    if isinstance(value, bool) or not number:
        raise ClusterError(f"{key}: expected {expected}, got {short_repr(value)}")
    assert isinstance(value, int | float)
    if not low <= value <= high or math.inf in (value, -value) or (value == 0 and not zero):  # NaN is in no range
        raise ClusterError(f"{key}: expected {expected}, got {short_repr(value)}")
    if value and not (0.0 if zero else _MIN_FIGURE) <= abs(value) <= _MAX_FIGURE:  # tiny ones count as 0
        raise ClusterError(
            f"{key}: expected a number between {_MIN_FIGURE:g} and {_MAX_FIGURE:g}, got {short_repr(value)}"
        )


def short_repr(value: object) -> str:
    """A value for an error message, cut to 80 characters.

    >>> short_repr(10**100), len(short_repr("x" * 1000))
    ('one of 333 bits', 80)
    """
    if isinstance(value, int) and value.bit_length() > 128:
        return f"one of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def points(key: str, value: object) -> tuple[tuple[float, float], ...]:
    """A list of pairs of positive rising numbers, as tuples.

    Raises
    ------
    ClusterError
        If a value is wrong; names `key`, the expected and the given value.

    Examples
    --------
    >>> points("device.memory_times", [[1e6, 1e-4], [1e8, 2e-2]])
    ((1000000.0, 0.0001), (100000000.0, 0.02))
    """
    pairs = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
    if pairs is None or any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in pairs):
        raise ClusterError(f"{key}: expected a list of pairs of numbers, got {short_repr(value)}")
    found = [(converted(key, first, float), converted(key, second, float)) for first, second in pairs]
    for pair in found:
        for number in pair:
            check_number(key, number)
    for before, after in itertools.pairwise(found):
        if not (before[0] < after[0] and before[1] <= after[1]):  # type: ignore[operator]
            raise ClusterError(f"{key}: expected rising pairs, got {before} before {after}")
    return tuple(found)  # type: ignore[arg-type]


def build(kind: type, data: object, key: str, keep: Sequence[str] = ()) -> dict[str, Any]:
    """The arguments of the dataclass `kind`, from the mapping `data`; fields in `keep` are not converted.

    Raises
    ------
    ClusterError
        If `data` is no mapping, or has an unknown or a missing key.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    at = f"{key}." if key else ""
    if not isinstance(data, Mapping):
        raise ClusterError(f"{key or 'the file'}: expected a mapping with {', '.join(fields)}, got {short_repr(data)}")
    for name in data:
        if name not in fields:
            raise ClusterError(f"{at}{name}: expected one of {', '.join(fields)}, got an unknown key")
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in data and not optional:
            raise ClusterError(f"{at}{name}: expected a value, got nothing: the key is missing")
    types = typing.get_type_hints(kind)
    built = {
        name: value if name in keep else converted(f"{at}{name}", value, types[name]) for name, value in data.items()
    }
    for name, unit in _FIELDS_BY_DTYPE.items():
        if name in built:
            figures = built[name]
            if not isinstance(figures, Mapping):
                raise ClusterError(f"{at}{name}: expected a mapping of dtype to {unit}, got {short_repr(figures)}")
            built[name] = {str(k): converted(f"{at}{name}.{k}", v, float) for k, v in figures.items()}
    return built


def converted(key: str, value: object, kind: object) -> object:
    """`value` as `kind`. YAML 1.1 reads ``312e12`` as text; ``80e9`` bytes are a whole number."""
    if kind not in (int, float, float | None):
        if kind is str and not isinstance(value, str):
            raise ClusterError(f"{key}: expected text, got {short_repr(value)}")
        return value
    if value is None and kind == (float | None):
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ClusterError(f"{key}: expected a number, got {short_repr(value)}") from None
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is not int and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_FIGURE:
        return float(value)
    return value


def describe(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as plain types, without those that have their default.

    >>> from shardweave.ir import Axis
    >>> describe(Axis("gpu0", 2))
    {'name': 'gpu0', 'size': 2}
    """

    def plain(item: Any) -> Any:
        if dataclasses.is_dataclass(item):
            return describe(item)
        if isinstance(item, Mapping):
            return dict(item)
        return [plain(entry) for entry in item] if isinstance(item, tuple) else item

    return {
        field.name: plain(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
        and not (field.default_factory is not dataclasses.MISSING and not getattr(value, field.name))
    }
