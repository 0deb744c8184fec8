"""Checks of user-supplied values against type annotations."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin


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
