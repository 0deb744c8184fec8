"""A machine: its device, and the levels of links that join devices, innermost first.

A `Level` says what *one device* can send through the level's links. All devices of a unit (a node) share the links by
which the unit enters a level. A group of ranks gets the part of its members among the unit's devices, which is equation
10 of AxoNN (arXiv 2305.13525).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

from shardweave.cost_model.cluster_description import check_number, describe, points, short_repr
from shardweave.cost_model.measured_tables import Measured
from shardweave.ir import ClusterError, Mesh, readable_bytes

MAX_DEVICES = 2**24
"""The largest number of devices of a cluster."""
NODE_GROUP_NAMES = ("leaf", "pod", "zone", "area")
"""The names of levels above the nodes that are found by measuring."""
MAX_BYTES = 2**63 - 1
"""The largest number of bytes of a device: torch counts them in 64-bit integers."""


@dataclass(frozen=True)
class Level:
    """A level of the machine: a unit of `size` units of the level below, and the links that join these.

    Parameters
    ----------
    name : str
        The name of a unit of the level below (``"gpu"``, ``"node"``). The mesh axes are ``gpu0``, ``gpu1``, ...
    size : int
        The number of units of the level below in one unit; devices for the innermost.
    bandwidth : float
        Bytes/s in one direction, line rate, that one device can send through this level.
    latency : float
        Seconds of one hop of a ring between two units.
    shared_bandwidth : float, optional
        Bytes/s, one direction, of all links by which one unit of the level below enters this level (the NICs of a
        node). Its devices share them. By default each device has `bandwidth` for itself.
    efficiency : float
        The part of the line rate that collectives reach.
    links : {"switch", "mesh"}
        Through a switch a device has its full `bandwidth` to any peer. In a mesh it has ``1 / (size - 1)`` of it to
        each of its peers, so that a group of fewer gets less (the NVLinks of a Perlmutter node).
    group_bandwidth : float, optional
        Bytes/s, as reached and not line rate, that *one* group gets through the links of a unit if no other group uses
        them: one ring or one process cannot drive all NICs of a node. By default only the `bandwidth` of its members
        limits a group.

    Examples
    --------
    >>> Level("node", 4, bandwidth=25e9, latency=1e-5, shared_bandwidth=100e9).share(devices=8)
    12500000000.0
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    shared_bandwidth: float | None = None
    efficiency: float = 1.0
    links: Literal["switch", "mesh"] = "switch"
    group_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z]+(_[A-Za-z]+)*", self.name):
            raise ClusterError(f"levels.name: expected letters (digits number a level's axes), got {self.name!r}")
        key = f"levels.{self.name}"
        check_number(f"{key}.size", self.size, whole=True)
        check_number(f"{key}.size", self.size, whole=True, high=MAX_DEVICES)
        check_number(f"{key}.bandwidth", self.bandwidth)
        check_number(f"{key}.latency", self.latency, zero=True)
        check_number(f"{key}.efficiency", self.efficiency, high=1)
        for name in ("shared_bandwidth", "group_bandwidth"):
            if (value := getattr(self, name)) is not None:
                check_number(f"{key}.{name}", value)
        if self.links not in ("switch", "mesh"):
            raise ClusterError(f"{key}.links: expected 'switch' or 'mesh', got {self.links!r}")

    def share(self, devices: int) -> float:
        """Bytes/s that each of the `devices` of a unit of the level below gets if all send through this level."""
        shared = math.inf if self.shared_bandwidth is None else self.shared_bandwidth / devices
        return self.efficiency * min(self.bandwidth, shared)

    def scaled(self, factor: float, latency: float) -> Level:
        """With all bandwidths times `factor`, and another latency."""
        shared, group = (None if b is None else b * factor for b in (self.shared_bandwidth, self.group_bandwidth))
        bandwidth = self.bandwidth * factor
        return replace(self, bandwidth=bandwidth, latency=latency, shared_bandwidth=shared, group_bandwidth=group)


@dataclass(frozen=True)
class Device:
    """The device of one rank: its arithmetic, its memory and its launch overheads.

    Parameters
    ----------
    name : str
        The name in reports.
    flops : mapping of str to float
        Peak FLOP/s of a dense matmul by dtype. ``"float32"`` is required; it stands for dtypes not listed.
    memory : int
        Bytes.
    memory_bandwidth : float
        Bytes/s, line rate.
    launch_latency : float
        Seconds of every kernel in addition to its work.
    collective_latency : float
        Seconds of every collective in addition to its hops.
    collective_host_seconds : float
        Seconds of the host to launch a collective. Launches follow each other, ahead of the device; if they fall
        behind, the device waits.
    matmul_efficiency : float
        The part of the peak that a large matmul reaches; 0.4 to 0.8 in training.
    memory_efficiency : float
        The part of `memory_bandwidth` that a pointwise kernel reaches; 0.7 to 0.9 on GPUs.
    matmul_half : mapping of str to float
        By dtype, the size ``h`` of a dimension at which a product reaches half of `matmul_efficiency`: a product of
        ``m k, k n`` reaches the part ``m / (m + h) * n / (n + h) * k / (k + h)`` of it (`node_cost.formula_seconds`).
        That of float32 stands for dtypes not listed; without it, 0: every shape reaches the same efficiency.
    memory_half : float
        The bytes at which a kernel, without its launch, reaches half of `memory_efficiency`.
    memory_times : sequence of (bytes, seconds)
        Measured seconds of pointwise kernels, without their launch, for rising bytes. They replace `memory_bandwidth`
        (`node_cost.bytes_seconds`).
    overlap_slowdown : float
        The factor of a kernel's time while a collective runs: a collective uses cores and memory bandwidth, too.
    collective_slowdown : float
        The factor of a collective's time while a kernel runs.
    allocator : {"cuda", "cpu"}
        The allocator of its memory: how sizes are rounded, and what scratch kernels need (`kernel_scratch.py`).

    Raises
    ------
    ClusterError
        If a figure is missing, negative or no number.

    Examples
    --------
    >>> toy = Device("toy", {"float32": 1e12}, memory=2**30, memory_bandwidth=1e11, matmul_half={"bfloat16": 64.0})
    >>> toy.peak("bfloat16"), toy.half_dimension("bfloat16"), toy.half_dimension("float32")
    (1000000000000.0, 64.0, 0.0)
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    memory_bandwidth: float
    launch_latency: float = 0.0
    collective_latency: float = 0.0
    collective_host_seconds: float = 0.0
    matmul_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    matmul_half: Mapping[str, float] = field(default_factory=dict)
    memory_half: float = 0.0
    memory_times: tuple[tuple[float, float], ...] = ()
    overlap_slowdown: float = 1.0
    collective_slowdown: float = 1.0
    allocator: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ClusterError(
                f"device.flops: expected a mapping of dtype to FLOP/s with at least 'float32', got {dict(self.flops)}"
            )
        for dtype, peak in self.flops.items():
            check_number(f"device.flops.{dtype}", peak)
        check_number("device.memory", self.memory, whole=True)
        check_number("device.memory", self.memory, whole=True, high=MAX_BYTES)
        check_number("device.memory_bandwidth", self.memory_bandwidth)
        for name in ("launch_latency", "collective_latency", "collective_host_seconds", "memory_half"):
            check_number(f"device.{name}", getattr(self, name), zero=True)
        for name in ("matmul_efficiency", "memory_efficiency"):
            check_number(f"device.{name}", getattr(self, name), high=1)
        for name in ("overlap_slowdown", "collective_slowdown"):
            check_number(f"device.{name}", getattr(self, name), low=1)
        if not isinstance(self.matmul_half, Mapping):
            given = short_repr(self.matmul_half)
            raise ClusterError(f"device.matmul_half: expected a mapping of dtype to a size, got {given}")
        for dtype, half in self.matmul_half.items():
            check_number(f"device.matmul_half.{dtype}", half, zero=True)
        object.__setattr__(self, "memory_times", points("device.memory_times", self.memory_times))
        if self.allocator not in ("cuda", "cpu"):
            raise ClusterError(f"device.allocator: expected 'cuda' or 'cpu', got {short_repr(self.allocator)}")

    def __repr__(self) -> str:
        return f"<Device {self.name}: {readable_bytes(self.memory)}, {self.flops['float32']:.3g} FLOP/s in float32>"

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s for `dtype`; that of float32 if `dtype` is not listed."""
        return self.flops.get(dtype, self.flops["float32"])

    def half_dimension(self, dtype: str) -> float:
        """The size of a dimension at which a product in `dtype` reaches half of `matmul_efficiency`."""
        return self.matmul_half.get(dtype, self.matmul_half.get("float32", 0.0))


@dataclass(frozen=True)
class Machine:
    """The figures of a machine. `Cluster` describes the fields, and adds how a machine is loaded or detected."""

    name: str
    levels: tuple[Level, ...]
    device: Device
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    measured: Measured | None = field(default=None, repr=False)
    library: Literal["nccl", "gloo"] = "nccl"

    def __post_init__(self) -> None:
        if self.library not in ("nccl", "gloo"):
            raise ClusterError(f"library: expected 'nccl' or 'gloo', got {short_repr(self.library)}")
        names = [level.name for level in self.levels]
        if not names or len(set(names)) != len(names):
            raise ClusterError(f"levels: expected at least one level, each with a name of its own, got {names}")
        if self.world_size > MAX_DEVICES:
            raise ClusterError(f"levels: expected at most {MAX_DEVICES:,} devices, got {self.world_size:,}")
        if self.measured is not None:
            self.measured.collectives.check([(level.name, level.size) for level in self.levels])
        # The hash is a key of caches, so it is computed once. It is the same in every process.
        object.__setattr__(self, "_hash", int(self.fingerprint, 16))

    def __repr__(self) -> str:
        sizes = " x ".join(f"{level.size} {level.name}" for level in reversed(self.levels))
        memory = readable_bytes(self.device.memory)
        devices = f"{sizes} = {self.world_size} devices, each {self.device.name}, {memory}"
        return f"<{type(self).__name__} {self.name}: {devices}>"

    def __hash__(self) -> int:
        return int(vars(self)["_hash"])

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return math.prod(level.size for level in self.levels)

    @property
    def fingerprint(self) -> str:
        """A hash of all figures, without names and sources, in twelve hex digits."""
        figures = self.to_dict()
        del figures["name"], figures["device"]["name"]
        figures.pop("sources", None)
        figures.get("measured", {}).pop("covered", None)
        return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()[:12]

    def mesh(self) -> Mesh:
        """The axes of this machine: one for each prime factor of each level's size."""
        return Mesh.of_levels([(level.name, level.size) for level in self.levels])

    def resized(self, **sizes: int) -> Self:
        """This cluster with other level sizes, as in ``cluster.resized(node=4)``.

        Measurements are kept if only the outermost level changes: the same groups share a link then.

        Raises
        ------
        ClusterError
            If there is no level of that name, or the size is no whole number above 0.
        """
        unknown = set(sizes) - {level.name for level in self.levels}
        if unknown:
            raise ClusterError(f"{self.name} has no level {sorted(unknown)}; it has {[v.name for v in self.levels]}")
        levels = tuple(replace(level, size=sizes.get(level.name, level.size)) for level in self.levels)
        inside = all(old.size == new.size for old, new in zip(self.levels[:-1], levels[:-1], strict=True))
        return replace(self, levels=levels, measured=self.measured if inside else None)

    def fitted(self, devices: int, nodes: int) -> Self:
        """This machine with `devices` devices on each of `nodes` nodes, filled from the innermost level.

        >>> from shardweave.cost_model import Cluster
        >>> [level.size for level in Cluster.preset("frontier").fitted(devices=4, nodes=3).levels]
        [2, 2, 3]
        """
        sizes: dict[str, int] = {}
        for level in self.levels[:-1]:
            last = level is self.levels[-2]
            sizes[level.name] = devices if last else math.gcd(devices, level.size)
            devices //= sizes[level.name]
        return self.resized(**sizes, **{self.levels[-1].name: nodes})

    def with_node_groups(self, groups: Sequence[tuple[int, float]]) -> Self:
        """This machine with its nodes on several switches: the outermost level in several, innermost first.

        Parameters
        ----------
        groups : sequence of (int, float)
            For each level the number of its units, and by what its transfers are slower than this outermost level says.

        >>> from shardweave.cost_model import Cluster
        >>> cluster = Cluster.preset("dgx-a100", nodes=16).with_node_groups([(4, 1.0), (4, 2.0)])
        >>> [(level.name, level.size) for level in cluster.levels]
        [('gpu', 8), ('node', 4), ('leaf', 4)]
        >>> cluster.levels[2].bandwidth / cluster.levels[1].bandwidth
        0.5
        """
        node, names = self.levels[-1], (self.levels[-1].name, *NODE_GROUP_NAMES)
        levels = [
            replace(node.scaled(1 / slowdown, node.latency), name=name, size=size)
            for name, (size, slowdown) in zip(names, groups)
        ]
        return replace(self, levels=(*self.levels[:-1], *levels), measured=None)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain types; `from_dict` is its inverse."""
        return describe(self) | ({} if self.measured is None else {"measured": self.measured.to_dict()})


M = TypeVar("M", bound=Machine)
"""A machine, for functions that return the class that they are given."""
