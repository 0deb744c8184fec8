"""Measured tables of a machine: times of collectives and ops, their interpolation, and the cache on disk.

Like AMSP (arXiv 2311.00257, section IV-A), `collectives.collective_seconds` takes the time of a collective from a table
if the `Cluster` has one. `Cluster.detect()` makes the table. The key of an op is its signature. The cache
has one JSON file for each hardware and set of versions, in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardweave.cost_model.cluster_description import build, check_number, short_repr
from shardweave.cost_model.op_work import Product, Work
from shardweave.ir import ClusterError


@dataclass(frozen=True)
class OpTime:
    """The measured time of one op at one shape, launch included.

    Parameters
    ----------
    seconds : float
        The median of its runs.
    work : Work
        Its work, with its signature.

    Raises
    ------
    ClusterError
        If the seconds are no number above 0.
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
        By signature (`sharding.signature`).
    skipped : mapping of str to str
        The reason for each op without a time, by signature; no part of a comparison, and not saved.

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
        """The table of `times`; the last one counts if a signature is repeated."""
        return cls({time.work.signature: time for time in times})

    def seconds(self, signature: str) -> float | None:
        """Seconds of the op of that signature; None if it was not measured."""
        found = self.times.get(signature)
        return None if found is None else found.seconds

    def nearest(self, work: Work) -> OpTime | None:
        """The time of the same op and dtype at the shape nearest to that of `work`; None if there is none.

        The distance is the sum of the logarithms of the ratios of FLOPs, bytes and dimensions of the product.

        >>> small, large = (Work(flops=8 * n, num_bytes=n, signature=f"op({n})") for n in (1000, 100_000))
        >>> table = OpTable.of([OpTime(1e-6, small), OpTime(1e-4, large)])
        >>> table.nearest(Work(flops=40_000, num_bytes=5000, signature="op(5000)")).work.signature
        'op(1000)'
        """
        found = self._by_op.get((work.op, work.dtype), ())
        return min(found, key=lambda time: (_distance(time.work, work), time.work.signature), default=None)

    def merged(self, other: OpTable) -> OpTable:
        """The times of both tables. Where both have a time, `other`'s is taken."""
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
        """The table that plain types describe, as they come from a file.

        Raises
        ------
        ClusterError
            If a value is wrong; names the key, the expected and the given value.
        """
        if not isinstance(data, Mapping):
            raise ClusterError(f"measured.ops: expected a mapping of signature to its time, got {short_repr(data)}")
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
        raise ClusterError(f"{key}: expected a mapping with {', '.join(sorted(names))}, got {short_repr(entry)}")
    product = entry["product"]
    if product is not None and not (isinstance(product, list | tuple) and len(product) == 3):
        raise ClusterError(f"{key}.product: expected three sizes or nothing, got {short_repr(product)}")
    for name in ("flops", "bytes"):
        check_number(f"{key}.{name}", entry[name], whole=True, zero=True)
    for size in product or ():
        check_number(f"{key}.product", size, whole=True, zero=True)
    computed = entry.get("computed", 1.0)
    check_number(f"{key}.computed", computed, high=1)
    work = Work(entry["flops"], entry["bytes"], str(entry["dtype"]), Product(*product) if product else None)
    return OpTime(entry["seconds"], replace(work, signature=signature, computed=float(computed)))


COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""The collectives that have a cost."""


def interpolated(
    sizes: Sequence[float], seconds: Sequence[float], num_bytes: float, formula: Callable[[float], float]
) -> float:
    """Seconds for `num_bytes`, from measured `seconds` at the rising `sizes`.

    Between two points the logarithm of the seconds is linear in the logarithm of the bytes. Beyond the points it is
    `formula`, scaled to pass through the nearest point.

    Examples
    --------
    >>> round(interpolated([1e6, 1e8], [1e-3, 1e-1], 1e7, lambda size: size), 12)
    0.01
    """
    if not sizes[0] <= num_bytes <= sizes[-1]:
        return _extrapolated(sizes, seconds, num_bytes, formula)
    right = bisect_left(sizes, num_bytes)
    if sizes[right] == num_bytes:
        return seconds[right]
    low, high = sizes[right - 1], sizes[right]
    position = math.log(num_bytes / low) / math.log(high / low)
    before, after = seconds[right - 1], seconds[right]
    between = before * math.exp(position * math.log(after / before))
    return min(max(between, min(before, after)), max(before, after))  # rounding errors may not leave the interval


def _extrapolated(
    sizes: Sequence[float], seconds: Sequence[float], num_bytes: float, formula: Callable[[float], float]
) -> float:
    """Seconds beyond the points: `formula`, scaled to pass through the nearest point."""
    near = 0 if num_bytes < sizes[0] else -1
    there = formula(sizes[near])
    return seconds[near] * (formula(num_bytes) / there if there > 0 else 1.0)


@dataclass(frozen=True)
class Curve:
    """The measured seconds of one kind of collective in groups of one placement, at some sizes.

    Parameters
    ----------
    kind : str
        One of `COLLECTIVE_KINDS`.
    members : tuple of int
        The units of each level that the group spans, innermost first: ``(4, 2)`` is four devices in each of two nodes.
    bytes : tuple of float
        Sizes of the whole buffer (as of `collective_seconds`), rising.
    seconds : tuple of float
        The time at each size, with all groups of this placement at work at the same time.

    Raises
    ------
    ClusterError
        If there is no point, the sizes do not rise, or a figure is no number above 0.

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
        """Seconds for a whole buffer of `num_bytes`.

        They are linear in the bytes between two points: a latency, and a transfer. Beyond the points they are
        `formula`, scaled to pass through the nearest point.
        """
        if not self.bytes[0] <= num_bytes <= self.bytes[-1]:
            return _extrapolated(self.bytes, self.seconds, num_bytes, formula)
        return float(np.interp(num_bytes, self.bytes, self.seconds))

    def latency(self, num_bytes: float) -> float | None:
        """The part of the seconds that does not depend on the bytes, near this size; None for a curve of one point.

        It is where the line through the two points around the size, or nearest to it, meets no bytes.

        >>> Curve("all_reduce", (4,), (1e6, 3e6), (3e-3, 5e-3)).latency(2e6)
        0.002
        """
        if len(self.bytes) == 1:
            return None
        right = min(max(1, bisect_left(self.bytes, num_bytes)), len(self.bytes) - 1)
        (low, high), (before, after) = self.bytes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return max(0.0, before - low * (after - before) / (high - low))


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
        If a kind and placement is repeated.

    Examples
    --------
    >>> table = CollectiveTable((Curve("all_gather", (2, 1), (1e6,), (2e-3,)),))
    >>> table.curve("all_gather", (2, 1)).at(2e6, lambda size: 1e-9 * size)
    0.004
    >>> table.curve("all_gather", (1, 2)) is None
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
        """Raise `ClusterError` if a curve has an unknown kind, or no group of a machine with these levels has it."""
        for curve in self.curves:
            if curve.kind not in COLLECTIVE_KINDS:
                raise ClusterError(
                    f"measured.collectives: no collective is called {curve.kind!r}; "
                    f"there are {', '.join(COLLECTIVE_KINDS)}"
                )
            names = [name for name, _ in levels[:-1]]
            sizes = [size for _, size in levels[:-1]]  # the outermost level may have another size, see Cluster.resized
            fits = all(size % count == 0 for size, count in zip(sizes, curve.members[:-1], strict=False))
            if len(curve.members) != len(levels) or not fits:
                raise ClusterError(
                    f"measured.collectives.{curve.kind}.members: expected one count for each of the levels "
                    f"{', '.join((*names, levels[-1][0]))}, a divisor of its size, got {list(curve.members)}"
                )

    def curve(self, kind: str, members: tuple[int, ...]) -> Curve | None:
        """The curve of a kind and placement; None if it was not measured."""
        return self._by_placement.get((kind, members))


@dataclass(frozen=True)
class Measured:
    """All measurements of a machine.

    Parameters
    ----------
    collectives : CollectiveTable
        Replaces the formulas for its kinds and placements.
    ops : OpTable
        Replaces the roofline for its ops.
    key : str
        A hash of the hardware and the versions of the measurement; names its file in the cache.
    covered : str
        A description of what was measured and what was not; no part of a comparison.
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
        """The measurements that plain types describe, as they come from a file.

        Raises
        ------
        ClusterError
            If a value is wrong; names the key, the expected and the given value.

        Examples
        --------
        >>> table = Measured(CollectiveTable((Curve("broadcast", (2,), (8.0,), (0.5,)),)), key="here")
        >>> Measured.from_dict(table.to_dict()) == table
        True
        """
        raw = build(cls, data, "measured", keep=("collectives", "ops"))
        curves, ops = raw.pop("collectives", []), raw.pop("ops", {})
        if not isinstance(curves, list | tuple):
            raise ClusterError(f"measured.collectives: expected a list of curves, got {short_repr(curves)}")
        table = CollectiveTable(tuple(_curve(f"measured.collectives[{i}]", curve) for i, curve in enumerate(curves)))
        return cls(table, OpTable.from_dict(ops), **raw)


def _curve(key: str, data: object) -> Curve:
    raw = build(Curve, data, key)
    for name in ("members", "bytes", "seconds"):
        if not isinstance(raw[name], list | tuple):
            raise ClusterError(f"{key}.{name}: expected a list of numbers, got {short_repr(raw[name])}")
    for member in raw["members"]:
        check_number(f"{key}.members", member, whole=True)
    sizes, seconds = (tuple(map(_number, raw[name])) for name in ("bytes", "seconds"))
    return Curve(raw["kind"], tuple(raw["members"]), sizes, seconds)


def _number(value: Any) -> Any:
    """A number that YAML 1.1 reads as text, such as ``1e-3``; `Curve` checks other values."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def hardware() -> dict[str, Any]:
    """The hardware and the versions of this rank. Measurements hold only for equal ones."""
    found: dict[str, Any] = {"torch": torch.__version__}
    if dist.is_initialized():
        found["backend"] = dist.get_backend()
    if torch.cuda.is_available() and found.get("backend") != "gloo":
        found["device"] = torch.cuda.get_device_name(torch.cuda.current_device())
        found |= {"cuda": torch.version.cuda or torch.version.hip}
        found["nccl"] = list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    else:
        found |= {"device": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return found


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine()


def cache_directory() -> Path:
    """``$SHARDWEAVE_CACHE``; without it ``$XDG_CACHE_HOME/shardweave``, or ``~/.cache/shardweave``.

    Examples
    --------
    >>> cache_directory().is_absolute()
    True
    """
    own = os.environ.get("SHARDWEAVE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG base directory specification: relative paths are to be ignored
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base).absolute() / "shardweave"


def key_of(data: Mapping[str, Any]) -> str:
    """A hash of `data`, a mapping of plain types, in sixteen hex digits.

    >>> key_of({"torch": "2.13", "ranks": 4}) == key_of({"ranks": 4, "torch": "2.13"}) != key_of({"torch": "2.13"})
    True
    """
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def read(key: str) -> Measured | None:
    """The saved measurements of `key`; None if there are none, or the file is damaged."""
    try:
        found = Measured.from_dict(load_cached(f"cluster-{key}"))
    except ClusterError:
        return None
    return found if found.key == key else None


def write(measured: Measured) -> Path | None:
    """Save `measured` under its key, as `store_cached` does."""
    return store_cached(f"cluster-{measured.key}", measured.to_dict())


def load_cached(name: str) -> object:
    """The saved data of `name`; None if there is none, or the file is damaged."""
    try:
        found: object = json.loads(_path(name).read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError, RecursionError):  # RecursionError: lists within lists without end
        return None


def store_cached(name: str, data: Mapping[str, Any]) -> Path | None:
    """Save `data`, of plain types, under `name`, as `store_file` does."""
    return store_file(_path(name).name, json.dumps(data, indent=1).encode())


def store_file(name: str, content: bytes) -> Path | None:
    """Write a file of the cache. A reader at the same time sees the old or the new file.

    Returns
    -------
    Path or None
        The file; None, with a warning, if it cannot be written: the next run measures again.
    """
    path = cache_directory() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        warnings.warn(
            f"{path.name} could not be kept in {path.parent}: {error.strerror or error}; what it holds is measured or "
            "planned again in the next run. Set SHARDWEAVE_CACHE to a directory that can be written",
            stacklevel=2,
        )
        return None
    return path


def _path(name: str) -> Path:
    return cache_directory() / f"{name}.json"
