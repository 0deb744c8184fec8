"""The choices of a plan that concern the whole step, not one op: overlap, recomputation, buckets, quantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from shardweave.ir.errors import PlanError
from shardweave.ir.step_signature import Traffic
from shardweave.ir.units import brief, readable_ranges

Mode = Literal["none", "fine", "full"]
MODES: tuple[Mode, ...] = ("none", "fine", "full")
"""How a layer is recomputed in the backward: not at all, all but the results of its collectives, or all of it. Of
equally good modes, the planner takes the first."""

Quantized = Literal["parameters", "gradients"]
BITS: Mapping[Quantized, tuple[int, ...]] = {"parameters": (8,), "gradients": (8, 4)}
"""The kinds of traffic that may be quantized, and the bits that each allows."""

UNLIMITED = 2**31
"""A count that is no limit."""
_UNDER = "recomputation under other gradients"
_AGAIN = "parameters gathered again for the backward of what was recomputed"


@dataclass(frozen=True)
class OverlapConfig:
    """How a step hides communication and saves memory. `Options` describes each field.

    Raises
    ------
    PlanError
        If a count is not positive, or a mode is unknown.

    Examples
    --------
    >>> str(OverlapConfig(sub_batches=2, recompute={"*": "fine"}))
    '2 sub-batches, recomputation * fine'
    >>> OverlapConfig.from_dict(OverlapConfig(buckets=True).to_dict()) == OverlapConfig(buckets=True)
    True
    """

    sub_batches: int = 1
    recompute: Mapping[str, Mode] = field(default_factory=dict)
    operator_slices: Mapping[str, int] = field(default_factory=dict)
    keep_gathered: Mapping[str, int] = field(default_factory=dict)
    buckets: bool | Literal["flat"] = False
    cross_pass: bool = True
    lookahead: int | None = None
    blocking: tuple[Traffic, ...] = ()
    whole_sums: bool = False
    gather_again: bool = False
    quantize: Mapping[Quantized, int] = field(default_factory=dict)
    undivided: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocking", tuple(self.blocking))
        object.__setattr__(self, "undivided", tuple(self.undivided))
        if unknown := [kind for kind in self.blocking if kind not in get_args(Traffic)]:
            raise PlanError(f"blocking names kinds of traffic, {', '.join(get_args(Traffic))}, got {unknown[0]!r}")
        if self.buckets not in (True, False, "flat"):
            raise PlanError(f"buckets must be True, False or 'flat', got {self.buckets!r}")
        for pattern, mode in self.recompute.items():
            if mode not in MODES:
                raise PlanError(f"recompute[{pattern!r}] must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
        for pattern, slices in self.operator_slices.items():
            if slices < 1:
                raise PlanError(f"operator_slices[{pattern!r}] must be a positive number of parts, got {slices}")
        for pattern, kept in self.keep_gathered.items():
            if kept < 0:
                raise PlanError(f"keep_gathered[{pattern!r}] must be a bool or a number of slices, got {kept}")
        for kind, bits in self.quantize.items():
            if kind not in BITS:
                raise PlanError(f"quantize names what moves in few bits, {', '.join(BITS)}, got {kind!r}")
            if bits not in BITS[kind]:
                raise PlanError(f"quantize[{kind!r}] is {' or '.join(map(str, BITS[kind]))} bits, got {bits!r}")
        if self.sub_batches < 1:
            raise PlanError(f"sub_batches counts parts of a batch and must be positive, got {self.sub_batches}")
        if self.lookahead is not None and self.lookahead < 0:
            raise PlanError(f"lookahead counts gathers and cannot be negative, got {self.lookahead}")

    def without(self) -> dict[str, OverlapConfig]:
        """Each choice that was made, in words, with the configuration that is left without it.

        >>> list(OverlapConfig(sub_batches=2, recompute={"*": "fine"}).without())
        ['2 sub-batches', 'recomputation * fine', 'recomputation under other gradients']
        """
        found: dict[str, OverlapConfig] = {}
        if self.sub_batches > 1:
            besides = f" but for {' and '.join(self.undivided)}" if self.undivided else ""
            found[f"{self.sub_batches} sub-batches{besides}"] = replace(self, sub_batches=1, undivided=())
        if self.recompute:
            found[f"recomputation {_by_mode(self.recompute)}"] = replace(self, recompute={})
            if self.gather_again:
                found[_AGAIN] = replace(self, gather_again=False)
            if self.cross_pass:
                found[_UNDER] = replace(self, cross_pass=False)
        sliced = [f"{pattern} in {count} slices" for pattern, count in self.operator_slices.items() if count > 1]
        if sliced:
            found[" and ".join(sliced)] = replace(self, operator_slices={})
        if kept := [f"{pattern} kept gathered{'' if count == UNLIMITED else f' in {count} slices'}"
                    for pattern, count in self.keep_gathered.items() if count]:  # fmt: skip
            found[" and ".join(kept)] = replace(self, keep_gathered={})
        if self.buckets:
            found["flat buckets" if self.buckets == "flat" else "buckets"] = replace(self, buckets=False)
        if not self.cross_pass:
            found["a barrier between recomputation and backward"] = replace(self, cross_pass=True)
        if self.lookahead is not None:
            found[f"at most {self.lookahead} gathered ahead"] = replace(self, lookahead=None)
        for kind, bits in self.quantize.items():
            left = {other: each for other, each in self.quantize.items() if other != kind}
            found[f"{kind} in int{bits}"] = replace(self, quantize=left)
        if self.blocking:
            found[f"waiting for {', '.join(self.blocking)}"] = replace(self, blocking=())
        if self.whole_sums:
            found["whole sums of gradients"] = replace(self, whole_sums=False)
        return found

    def within(self, other: OverlapConfig) -> bool:
        """Whether `other` has all choices that this one makes.

        >>> OverlapConfig(buckets=True).within(OverlapConfig(2, buckets=True))
        True
        >>> OverlapConfig(2).within(OverlapConfig(4))
        False
        """
        plain = OverlapConfig()
        return all(value in (getattr(plain, name), getattr(other, name)) for name, value in vars(self).items())

    def to_dict(self) -> dict[str, Any]:
        """As plain types; `from_dict` is its inverse."""
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OverlapConfig:
        return cls(**data)

    def __repr__(self) -> str:
        return brief(self)

    def __str__(self) -> str:
        return ", ".join(choice for choice in self.without() if choice != _UNDER)


def _by_mode(recompute: Mapping[str, Mode]) -> str:
    """Patterns and their modes, those that differ in a layer's number together.

    >>> _by_mode({"*": "fine", "h.0": "none", "h.1": "none", "h.2": "none", "h.7": "full"})
    '* fine and h.0-2 none and h.7 full'
    """
    groups: dict[tuple[str, str, Mode], list[int]] = {}
    for pattern, mode in recompute.items():
        stem, dot, number = pattern.rpartition(".")
        if number.isdecimal():
            groups.setdefault((stem, dot, mode), []).append(int(number))
        else:
            groups.setdefault((pattern, "", mode), [])
    said = ((f"{stem}{dot}{readable_ranges(numbers)}", mode) for (stem, dot, mode), numbers in groups.items())
    return " and ".join(f"{pattern} {mode}" for pattern, mode in said)
