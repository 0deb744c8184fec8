"""A level of the machine: what one device can send through the links that join a level's units."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from shardweave.cost_model.description import check_number
from shardweave.errors import ClusterError

MAX_DEVICES = 2**24
"""Of a cluster."""


@dataclass(frozen=True)
class Level:
    """A level of the machine: `size` units of the level below, and the links that join them.

    Parameters
    ----------
    name : str
        What is counted (``"gpu"``, ``"node"``); the axes of the mesh are called ``gpu0``, ``gpu1``, ...
    size : int
        How many units of the level below one unit of this level has; devices for the innermost.
    bandwidth : float
        Bytes/s in one direction, line rate, that one device can send through this level.
    latency : float
        Seconds that one step of a ring takes between two units.
    shared_bandwidth : float, optional
        Bytes/s, one direction, of all links by which one unit of the level below enters this level (the NICs of a
        node). Its devices share them. Left out, each device has `bandwidth` for itself.
    efficiency : float
        Part of the line rate that collectives reach.
    links : {"switch", "mesh"}
        Through a switch a device has its full `bandwidth` to any peer. In a mesh it has ``1 / (size - 1)`` of it to
        each of its peers, so that a group of fewer gets less (the NVLinks of a Perlmutter node).
    group_bandwidth : float, optional
        Bytes/s, as reached and not line rate, that *one* group gets through one entrance of this level even where
        nothing else uses it: one ring or one process cannot drive all NICs of a node. Left out, a group is held back
        by its members' `bandwidth` alone.

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
        if self.shared_bandwidth is not None:
            check_number(f"{key}.shared_bandwidth", self.shared_bandwidth)
        check_number(f"{key}.efficiency", self.efficiency, high=1)
        if self.group_bandwidth is not None:
            check_number(f"{key}.group_bandwidth", self.group_bandwidth)
        if self.links not in ("switch", "mesh"):
            raise ClusterError(f"{key}.links: expected 'switch' or 'mesh', got {self.links!r}")

    def share(self, devices: int) -> float:
        """Bytes/s that each of the `devices` of one unit below gets when all of them send through this level."""
        shared = math.inf if self.shared_bandwidth is None else self.shared_bandwidth / devices
        return self.efficiency * min(self.bandwidth, shared)
