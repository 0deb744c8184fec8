"""What was measured on the machine itself, and how it is read between and beyond the points that were measured.

AMSP (arXiv 2311.00257, section IV-A) prices collectives from a table of measurements, not from a formula; so does
`collectives.collective_seconds` where a `Cluster` carries one. `Cluster.detect(profile=True)` makes it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardweave.cost_model.cluster_description import build, check_number, shown
from shardweave.cost_model.op_tables import OpTable
from shardweave.ir import ClusterError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""The collectives that have a price."""


def interpolated(
    sizes: Sequence[float], seconds: Sequence[float], num_bytes: float, formula: Callable[[float], float]
) -> float:
    """Seconds for `num_bytes`, of what took `seconds` at the rising `sizes`.

    Between two points the logarithm of the seconds is linear in the logarithm of the bytes. Beyond the points it is
    `formula`, scaled so that it passes the nearest point: no jump, and the formula's own slope.

    Examples
    --------
    >>> round(interpolated([1e6, 1e8], [1e-3, 1e-1], 1e7, lambda size: size), 12)
    0.01
    """
    if not sizes[0] <= num_bytes <= sizes[-1]:
        near = 0 if num_bytes < sizes[0] else -1
        there = formula(sizes[near])
        return seconds[near] * (formula(num_bytes) / there if there > 0 else 1.0)
    right = bisect_left(sizes, num_bytes)
    if sizes[right] == num_bytes:
        return seconds[right]
    low, high = sizes[right - 1], sizes[right]
    way = math.log(num_bytes / low) / math.log(high / low)
    before, after = seconds[right - 1], seconds[right]
    between = before * math.exp(way * math.log(after / before))
    return min(max(between, min(before, after)), max(before, after))  # rounding may not leave the two points


@dataclass(frozen=True)
class Curve:
    """The measured seconds of one kind of collective in groups of one placement, at some sizes.

    Parameters
    ----------
    kind : str
        One of `collectives.KINDS`.
    members : tuple of int
        How many units of each level the group spans, innermost first: ``(4, 2)`` is four devices in each of two nodes.
    bytes : tuple of float
        Sizes of the whole buffer (as `collective_seconds` takes them), rising.
    seconds : tuple of float
        What each took, with all groups of this placement at work at the same time.

    Raises
    ------
    ClusterError
        Where there is no point, the sizes do not rise, or a figure is no number above 0.

    Examples
    --------
    >>> curve = Curve("all_reduce", (4,), (1e6, 1e8), (1e-3, 1e-1))
    >>> round(curve.at(1e7, lambda size: size), 12), curve.at(2e8, lambda size: size)
    (0.01, 0.2)
    """

    kind: str
    members: tuple[int, ...]
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        key = f"measured.collectives.{self.kind} over {'x'.join(map(str, self.members))}"
        if not self.bytes or len(self.bytes) != len(self.seconds):
            raise ClusterError(
                f"{key}: expected as many bytes as seconds, at least one, got {len(self.bytes)} and {len(self.seconds)}"
            )
        for name, values in (("bytes", self.bytes), ("seconds", self.seconds)):
            for value in values:
                check_number(f"{key}.{name}", value)
        if any(one >= other for one, other in zip(self.bytes, self.bytes[1:], strict=False)):
            raise ClusterError(f"{key}.bytes: expected rising sizes, got {list(self.bytes)}")

    def at(self, num_bytes: float, formula: Callable[[float], float]) -> float:
        """Seconds for `num_bytes`; see `interpolated`.

        Parameters
        ----------
        num_bytes : float
            Size of the whole buffer.
        formula : callable
            Seconds of a size, as they would be without a table.
        """
        return interpolated(self.bytes, self.seconds, num_bytes, formula)


@dataclass(frozen=True)
class CollectiveTable:
    """Measured collectives: for a kind and a placement, seconds at some sizes.

    Parameters
    ----------
    curves : tuple of Curve
        One for each kind and placement that was measured.

    Raises
    ------
    ClusterError
        Where a kind and placement come twice.

    Examples
    --------
    >>> table = CollectiveTable((Curve("all_gather", (2, 1), (1e6,), (2e-3,)),))
    >>> table.seconds("all_gather", 2e6, (2, 1), lambda size: 1e-9 * size)
    0.004
    >>> table.seconds("all_gather", 2e6, (1, 2), lambda size: 1e-9 * size) is None
    True
    """

    curves: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        if len(self._by_placement) != len(self.curves):
            raise ClusterError(
                "measured.collectives: expected each kind and placement once, got "
                f"{[(curve.kind, curve.members) for curve in self.curves]}"
            )

    @cached_property
    def _by_placement(self) -> dict[tuple[str, tuple[int, ...]], Curve]:
        return {(curve.kind, curve.members): curve for curve in self.curves}

    def check(self, levels: Sequence[tuple[str, int]]) -> None:
        """`ClusterError` where a curve is of no known kind, or of no group of a machine with these names and sizes."""
        for curve in self.curves:
            if curve.kind not in KINDS:
                raise ClusterError(
                    f"measured.collectives: no collective is called {curve.kind!r}; there are {', '.join(KINDS)}"
                )
            names = [name for name, _ in levels[:-1]]
            sizes = [size for _, size in levels[:-1]]  # the outermost level may have been another, see Cluster.resized
            fits = all(size % count == 0 for size, count in zip(sizes, curve.members[:-1], strict=False))
            if len(curve.members) != len(levels) or not fits:
                raise ClusterError(
                    f"measured.collectives.{curve.kind}.members: expected one count for each of the levels "
                    f"{', '.join((*names, levels[-1][0]))}, a divisor of its size, got {list(curve.members)}"
                )

    def seconds(
        self, kind: str, num_bytes: float, members: tuple[int, ...], formula: Callable[[float], float]
    ) -> float | None:
        """Seconds of a collective, or None where its kind and placement were not measured; see `Curve.at`."""
        curve = self._by_placement.get((kind, members))
        return None if curve is None else curve.at(num_bytes, formula)


@dataclass(frozen=True)
class Measured:
    """All that was measured on a machine.

    Parameters
    ----------
    collectives : CollectiveTable
        Used in place of the formulas where it has the kind and placement.
    ops : OpTable
        Used in place of the roofline where it has the op.
    key : str
        Of the hardware and the versions it was measured with; the name of its file in the cache.
    covered : str
        What was measured and what was not, in words; no part of a comparison.
    """

    collectives: CollectiveTable = field(default_factory=CollectiveTable)
    ops: OpTable = field(default_factory=OpTable)
    key: str = ""
    covered: str = field(default="", compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain types; `from_dict` is its inverse."""
        curves = [
            {"kind": c.kind, "members": list(c.members), "bytes": list(c.bytes), "seconds": list(c.seconds)}
            for c in self.collectives.curves
        ]
        return {"collectives": curves, "ops": self.ops.to_dict(), "key": self.key, "covered": self.covered}

    @classmethod
    def from_dict(cls, data: object) -> Measured:
        """Measurements out of plain types, as a file gives them.

        Raises
        ------
        ClusterError
            Names the key, what was expected and what came.

        Examples
        --------
        >>> table = Measured(CollectiveTable((Curve("broadcast", (2,), (8.0,), (0.5,)),)), key="here")
        >>> Measured.from_dict(table.to_dict()) == table
        True
        """
        raw = build(cls, data, "measured", keep=("collectives", "ops"))
        curves, ops = raw.pop("collectives", []), raw.pop("ops", {})
        if not isinstance(curves, list | tuple):
            raise ClusterError(f"measured.collectives: expected a list of curves, got {shown(curves)}")
        table = CollectiveTable(tuple(_curve(f"measured.collectives[{i}]", curve) for i, curve in enumerate(curves)))
        return cls(table, OpTable.from_dict(ops), **raw)


def _curve(key: str, data: object) -> Curve:
    raw = build(Curve, data, key)
    for name in ("members", "bytes", "seconds"):
        if not isinstance(raw[name], list | tuple):
            raise ClusterError(f"{key}.{name}: expected a list of numbers, got {shown(raw[name])}")
    for member in raw["members"]:
        check_number(f"{key}.members", member, whole=True)
    return Curve(
        raw["kind"],
        tuple(raw["members"]),
        tuple(_number(size) for size in raw["bytes"]),
        tuple(_number(seconds) for seconds in raw["seconds"]),
    )


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-3`` as text; what is no number is left for the checks to name."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value
