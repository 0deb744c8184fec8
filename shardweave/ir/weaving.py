"""Weaving: what a plan says of the whole step, beside each op's strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardweave.errors import PlanError

Mode = Literal["none", "full", "fine"]
MODES: tuple[Mode, ...] = ("none", "full", "fine")
"""How a layer is recomputed in the backward: not at all, all of it, or all but the results of its collectives."""

ALL = 2**31
"""As many as there are."""


@dataclass(frozen=True)
class Weaving:
    """How communication is hidden, and memory saved, in a step; `Options` describes each field.

    Raises
    ------
    PlanError
        Where a count is not positive, or a mode unknown.

    Examples
    --------
    >>> str(Weaving(sub_batches=2, recompute={"*": "fine"}))
    '2 sub-batches, recomputation * fine'
    >>> Weaving.from_dict(Weaving(buckets=True).to_dict()) == Weaving(buckets=True)
    True
    """

    sub_batches: int = 1
    recompute: Mapping[str, Mode] = field(default_factory=dict)
    operator_slices: Mapping[str, int] = field(default_factory=dict)
    keep_gathered: Mapping[str, int] = field(default_factory=dict)
    buckets: bool = False
    cross_pass: bool = True
    lookahead: int | None = None

    def __post_init__(self) -> None:
        for pattern, mode in self.recompute.items():
            if mode not in MODES:
                raise PlanError(f"recompute[{pattern!r}] must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
        for pattern, slices in self.operator_slices.items():
            if slices < 1:
                raise PlanError(f"operator_slices[{pattern!r}] must be a positive number of parts, got {slices}")
        for pattern, kept in self.keep_gathered.items():
            if kept < 0:
                raise PlanError(f"keep_gathered[{pattern!r}] must be a bool or a number of slices, got {kept}")
        if self.sub_batches < 1:
            raise PlanError(f"sub_batches counts parts of a batch and must be positive, got {self.sub_batches}")
        if self.lookahead is not None and self.lookahead < 0:
            raise PlanError(f"lookahead counts gathers and cannot be negative, got {self.lookahead}")

    def to_dict(self) -> dict[str, Any]:
        """As plain types; `from_dict` is its inverse."""
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Weaving:
        return cls(**data)

    def __str__(self) -> str:
        parts = [f"{self.sub_batches} sub-batches"] if self.sub_batches > 1 else []
        parts += [f"recomputation {pattern} {mode}" for pattern, mode in self.recompute.items()]
        parts += [f"{pattern} in {count} slices" for pattern, count in self.operator_slices.items()]
        parts += [f"{pattern} kept gathered{'' if kept == ALL else f' in {kept} slices'}"
                  for pattern, kept in self.keep_gathered.items() if kept]  # fmt: skip
        parts += ["buckets"] if self.buckets else []
        parts += [] if self.cross_pass else ["a barrier between recomputation and backward"]
        parts += [] if self.lookahead is None else [f"at most {self.lookahead} gathered ahead"]
        return ", ".join(parts)
