"""Measured op times, by signature: what prices an op where it was run on the machine itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shardweave.cost_model.cluster_description import check_number, shown
from shardweave.cost_model.op_work import Product, Work
from shardweave.ir import ClusterError


@dataclass(frozen=True)
class OpTime:
    """What one op took at one shape, launch included.

    Parameters
    ----------
    seconds : float
        Median of its runs.
    work : Work
        What it does, with its signature.

    Raises
    ------
    ClusterError
        Where the seconds are no number above 0.
    """

    seconds: float
    work: Work

    def __post_init__(self) -> None:
        check_number(f"measured.ops.{self.work.signature}.seconds", self.seconds)


@dataclass(frozen=True)
class OpTable:
    """Measured ops.

    Parameters
    ----------
    times : mapping of str to OpTime
        By signature (`signature.signature`).
    skipped : mapping of str to str
        Why ops that were asked for have no time, by signature; no part of a comparison, and not kept in files.

    Examples
    --------
    >>> work = Work(2 * 64**3, 3 * 4 * 64**2, "float32", Product(64, 64, 64), "aten.mm.default(float32[64,64], ...)")
    >>> table = OpTable.of([OpTime(2e-5, work)])
    >>> table.seconds(work.signature)
    2e-05
    >>> table.seconds("aten.mm.default(float32[8,8], float32[8,8])") is None
    True
    >>> OpTable.from_dict(table.to_dict()) == table
    True
    """

    times: Mapping[str, OpTime] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, times: list[OpTime]) -> OpTable:
        """The table of these times; of one signature the last one counts."""
        return cls({time.work.signature: time for time in times})

    def seconds(self, signature: str) -> float | None:
        """Seconds of the op of that signature; None where it was not measured."""
        found = self.times.get(signature)
        return None if found is None else found.seconds

    def nearest(self, work: Work) -> OpTime | None:
        """The measured time of the same op, in the same dtype, at the shape most like that of `work`; None without one.

        Shapes differ by the sum of the ratios, as logarithms, of their FLOPs, their bytes and the dimensions of their
        product.

        >>> small, large = (Work(flops=8 * n, num_bytes=n, signature=f"op({n})") for n in (1000, 100_000))
        >>> table = OpTable.of([OpTime(1e-6, small), OpTime(1e-4, large)])
        >>> table.nearest(Work(flops=40_000, num_bytes=5000, signature="op(5000)")).work.signature
        'op(1000)'
        """
        found = self._by_op.get((work.op, work.dtype), ())
        return min(found, key=lambda time: (_distance(time.work, work), time.work.signature), default=None)

    def merged(self, other: OpTable) -> OpTable:
        """Both tables' times; where both have one, that of `other`."""
        times = {**self.times, **other.times}
        skipped = {**self.skipped, **other.skipped}
        return OpTable(times, {signature: why for signature, why in skipped.items() if signature not in times})

    def to_dict(self) -> dict[str, Any]:
        """The times as plain types; `from_dict` is its inverse."""
        return {
            signature: {
                "seconds": time.seconds,
                "flops": time.work.flops,
                "bytes": time.work.num_bytes,
                "dtype": time.work.dtype,
                "product": None if time.work.product is None else list(time.work.product),
                **({"computed": time.work.computed} if time.work.computed != 1.0 else {}),
            }
            for signature, time in self.times.items()
        }

    @classmethod
    def from_dict(cls, data: object) -> OpTable:
        """A table out of plain types, as a file gives them.

        Raises
        ------
        ClusterError
            Names the key, what was expected and what came.
        """
        if not isinstance(data, Mapping):
            raise ClusterError(f"measured.ops: expected a mapping of signature to its time, got {shown(data)}")
        return cls({str(signature): _time(str(signature), entry) for signature, entry in data.items()})

    @cached_property
    def _by_op(self) -> dict[tuple[str, str], tuple[OpTime, ...]]:
        found: dict[tuple[str, str], tuple[OpTime, ...]] = {}
        for time in self.times.values():
            key = time.work.op, time.work.dtype
            found[key] = *found.get(key, ()), time
        return found


def _distance(one: Work, other: Work) -> float:
    pairs = [(one.flops, other.flops), (one.num_bytes, other.num_bytes)]
    if one.product is not None and other.product is not None:
        pairs += list(zip(one.product, other.product))
    return sum(abs(math.log((left + 1) / (right + 1))) for left, right in pairs)


def _time(signature: str, entry: object) -> OpTime:
    key = f"measured.ops.{signature}"
    names = {"seconds", "flops", "bytes", "dtype", "product"}
    if not isinstance(entry, Mapping) or set(entry) - {"computed"} != names:
        raise ClusterError(f"{key}: expected a mapping with {', '.join(sorted(names))}, got {shown(entry)}")
    product = entry["product"]
    if product is not None and not (isinstance(product, list | tuple) and len(product) == 3):
        raise ClusterError(f"{key}.product: expected three sizes or nothing, got {shown(product)}")
    for name in ("flops", "bytes"):
        check_number(f"{key}.{name}", entry[name], whole=True, zero=True)
    for size in product or ():
        check_number(f"{key}.product", size, whole=True, zero=True)
    computed = entry.get("computed", 1.0)
    check_number(f"{key}.computed", computed, high=1)
    work = Work(entry["flops"], entry["bytes"], str(entry["dtype"]), Product(*product) if product else None)
    return OpTime(entry["seconds"], replace(work, signature=signature, computed=float(computed)))
