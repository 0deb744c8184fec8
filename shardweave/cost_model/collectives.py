"""How long a collective takes, and how much of each link it uses: as measured, or by an alpha-beta formula.

The measured table of a profiled cluster (`Cluster.detect()`) replaces the formulas, as in AMSP (arXiv
2311.00257, section IV-A).

For a group of `G` ranks whose whole buffer has `N` bytes (Thakur, Rabenseifner and Gropp 2005, section 4):

    ring, all-gather or reduce-scatter   start + the latencies of the G - 1 hops     + (G - 1)/G * N / rate
    ring, all-reduce                     start + twice these hops                    + 2 (G - 1)/G * N / rate
    ring, broadcast                      start + the hops (chunks follow each other) + N / rate
    tree, all-reduce                     start + 2 * depth                           + 2 N / (0.9 rate)
    tree, all-gather or reduce-scatter   start + depth, recursive doubling or halving, the outermost level first
    tree, broadcast                      start + depth, binomial: every round passes all N bytes on
    pairs, all-to-all                    start + the hops                            + bytes that leave / rank's rate

The ring enters each unit of a level once, so as few of its hops as possible cross a level (NCCL's
``src/graph/tuning.cc`` counts them in the same way). A tree's depth is the logarithm of the units at each level. Its
0.9 of the rate, up and down at once, is NCCL's ("busBw*.9" and ratio .5 there; Sanders, Speck and Traeff 2009 for the
two trees). Within a node NCCL chains its devices, in a protocol of shorter hops for small messages. For 8 devices that
is 7 hops of 0.5 us where the depth is 3 of 3.4 us, so the formula does not underestimate it.

The rate is the least over the levels that the group crosses. All groups of a step run their collective at the same time
and share the links by which a unit enters a level. A group gets the part of its members among the unit's devices
(AxoNN, arXiv 2305.13525, equation 10), and no more than one group can drive (`Level.group_bandwidth`):
``min(cap, total / n)`` for `n` groups. Equation 10 divides the rate that one group reaches alone, which makes 4 and 8
groups a third too slow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from shardweave.cost_model.machine import Machine
from shardweave.cost_model.measured_tables import COLLECTIVE_KINDS, Curve
from shardweave.ir import Axis, ClusterError, axes_size

ALGORITHMS = dict.fromkeys(COLLECTIVE_KINDS, ("ring", "tree")) | {"all_to_all": ("pairs",)}
"""The algorithms that each kind of collective has a formula for."""

_TREE_RATE_SHARE = 0.9
"""The part of a link's rate that a tree all-reduce reaches: NCCL's ``src/graph/tuning.cc``."""


@dataclass(frozen=True)
class AlphaBetaCost:
    """The cost of an algorithm by the alpha-beta model: ``latency + seconds_per_byte * bytes``.

    Parameters
    ----------
    algorithm : str
        One of `ALGORITHMS`.
    latency : float
        Seconds of its hops, in which no link is busy.
    seconds_per_byte : float
    link_seconds_per_byte : tuple of float
        For each level of the cluster, the seconds a byte for which it would fill its links there on its own.
    """

    algorithm: str
    latency: float
    seconds_per_byte: float
    link_seconds_per_byte: tuple[float, ...]

    def seconds(self, num_bytes: float) -> float:
        """Seconds of a buffer of `num_bytes`."""
        return self.latency + self.seconds_per_byte * num_bytes


class _CrossedLevel(NamedTuple):
    """A level that a group crosses.

    Its members in one unit of the level below have `link` bytes/s of the unit's links, and can use at most `rate`.
    """

    level_index: int
    extent: int
    members: int
    link: float
    rate: float


def library_algorithms(kind: str, cluster: Machine) -> tuple[str, ...]:
    """The algorithms among which the cluster's library chooses by itself.

    NCCL (``src/graph/tuning.cc``) takes the ring or, for an all-reduce, the tree where it expects that to be faster.
    gloo has a ring (``allreduce.cc``, ``allgather.cc``) and, for a broadcast, a binomial tree (``broadcast.cc``).

    >>> from shardweave.cost_model import Cluster
    >>> library_algorithms("all_reduce", Cluster.preset("dgx-a100")), library_algorithms("all_reduce", Cluster.local(4))
    (('ring', 'tree'), ('ring',))
    """
    if kind == "all_to_all":
        return ("pairs",)
    if cluster.library == "gloo" and kind == "broadcast":
        return ("tree",)
    return ("ring", "tree") if cluster.library == "nccl" and kind == "all_reduce" else ("ring",)


def alpha_beta_cost(kind: str, algorithm: str, extents: Sequence[int], cluster: Machine) -> AlphaBetaCost:
    """The cost of an algorithm over a group that spans `extents` units of each level.

    Raises
    ------
    ClusterError
        Where `kind` is unknown or has no such algorithm.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("dgx-a100", nodes=2)
    >>> slow, fast = (alpha_beta_cost("all_gather", "ring", extents, cluster) for extents in ((8, 2), (8, 1)))
    >>> slow.seconds(1e6) > fast.seconds(1e6)
    True
    """
    if kind not in COLLECTIVE_KINDS:
        raise ClusterError(f"no collective is called {kind!r}; there are {', '.join(COLLECTIVE_KINDS)}")
    if algorithm not in ALGORITHMS[kind]:
        raise ClusterError(f"{kind} has no algorithm {algorithm!r}; it has {', '.join(ALGORITHMS[kind])}")
    if math.prod(extents) == 1:
        return AlphaBetaCost(algorithm, 0.0, 0.0, (0.0,) * len(extents))
    return {"ring": _ring, "tree": _tree, "pairs": _pairs}[algorithm](kind, extents, cluster)


def _crossed_levels(extents: Sequence[int], cluster: Machine) -> list[_CrossedLevel]:
    """The levels that a group crosses, innermost first."""
    crossed, members, devices = [], 1, 1
    for index, (level, extent) in enumerate(zip(cluster.levels, extents, strict=True)):
        if extent > 1:
            peers = (extent - 1) / (level.size - 1) if level.links == "mesh" else 1.0
            link = members * peers * level.share(devices)
            cap = math.inf if level.group_bandwidth is None else level.group_bandwidth
            crossed.append(_CrossedLevel(index, extent, members, link, min(link, cap)))
        members *= extent
        devices *= level.size
    return crossed


def _hops(extents: Sequence[int], cluster: Machine) -> float:
    """Seconds of the ``G - 1`` hops from the ring's first to its last member."""
    seconds, units = 0.0, 1
    for level, extent in zip(reversed(cluster.levels), reversed(extents), strict=True):
        seconds += units * (extent - 1) * level.latency  # `units` chains of `extent` members each
        units *= extent
    return seconds


def _rounds(extent: int) -> int:
    """The logarithm of `extent` to base 2, rounded up."""
    return (extent - 1).bit_length()


def _ring(kind: str, extents: Sequence[int], cluster: Machine) -> AlphaBetaCost:
    group, phases = math.prod(extents), 2 if kind == "all_reduce" else 1
    volume = 1.0 if kind == "broadcast" else phases * (group - 1) / group
    crossed = _crossed_levels(extents, cluster)
    latency = cluster.device.collective_latency + phases * _hops(extents, cluster)
    beta = volume / min(level.rate for level in crossed)
    return _cost("ring", latency, beta, [(level, volume) for level in crossed], cluster)


def _tree(kind: str, extents: Sequence[int], cluster: Machine) -> AlphaBetaCost:
    crossed = _crossed_levels(extents, cluster)
    depth = sum(_rounds(extent) * level.latency for level, extent in zip(cluster.levels, extents, strict=True))
    start = cluster.device.collective_latency
    if kind == "all_reduce":
        volume = 2 / _TREE_RATE_SHARE
        beta = volume / min(level.rate for level in crossed)
        return _cost("tree", start + 2 * depth, beta, [(level, volume) for level in crossed], cluster)
    if kind == "broadcast":  # at each level one process sends, over its own line only
        volumes = [(level, float(_rounds(level.extent))) for level in crossed]
        sending = [cluster.levels[level.level_index] for level in crossed]
        lines = [level.efficiency * level.bandwidth for level in sending]
        beta = sum(volume / min(level.rate, line) for (level, volume), line in zip(volumes, lines, strict=True))
        return _cost("tree", start + depth, beta, volumes, cluster)
    group, outside = math.prod(extents), 1
    volumes = []
    for level in reversed(crossed):  # each member sends its peers what it has received from the levels further out
        volumes.append((level, level.members * outside * (level.extent - 1) / group))
        outside *= level.extent
    return _cost("tree", start + depth, sum(volume / level.rate for level, volume in volumes), volumes, cluster)


def _pairs(kind: str, extents: Sequence[int], cluster: Machine) -> AlphaBetaCost:
    """The part of a rank's bytes that leaves its unit goes through the rank's share of each level's links."""
    group = math.prod(extents)
    volumes = [(level, level.members * (group - level.members) / group) for level in _crossed_levels(extents, cluster)]
    latency = cluster.device.collective_latency + _hops(extents, cluster)
    return _cost("pairs", latency, max(volume / level.rate for level, volume in volumes), volumes, cluster)


def _cost(
    algorithm: str, latency: float, beta: float, volumes: Sequence[tuple[_CrossedLevel, float]], cluster: Machine
) -> AlphaBetaCost:
    """A cost with its use of links: `volumes` are the bytes that enter a unit for each byte of the buffer."""
    links = [0.0] * len(cluster.levels)
    for level, volume in volumes:
        links[level.level_index] = volume / level.link
    return AlphaBetaCost(algorithm, latency, beta, tuple(links))


@dataclass(frozen=True)
class Demand:
    """The demand of a collective on the links, for models in which several collectives run at the same time.

    For `latency` seconds it uses no link. Then it moves bytes for `transfer` seconds, and uses ``use[level]`` of the
    capacity of each level meanwhile. Collectives that run at the same time go at full speed while at every level their
    uses add up to at most 1. Where they add up to more, they share the level and are slower.

    Parameters
    ----------
    latency : float
        Seconds.
    transfer : float
        Seconds when nothing else uses its links; ``latency + transfer == collective_seconds(...)``.
    use : mapping of str to float
        By the level's name, for the levels that it crosses: in (0, 1].
    """

    latency: float
    transfer: float
    use: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of latency and transfer, when nothing else uses its links."""
        return self.latency + self.transfer


def collective_seconds(
    kind: str, num_bytes: float, axes: Sequence[Axis], cluster: Machine, algorithm: str | None = None
) -> float:
    """Seconds that a collective takes when nothing else uses its links.

    Parameters
    ----------
    kind : str
        One of `COLLECTIVE_KINDS`.
    num_bytes : float
        Size of the whole buffer on one rank: gathered, or not yet scattered (as in `ir.Collective.bytes`).
    axes : sequence of Axis
        The group, as axes of the cluster's mesh; none means no communication and 0 seconds.
    cluster : Machine
        The machine.
    algorithm : str, optional
        One of ``ALGORITHMS[kind]``, by its formula. By default the measured time (`Cluster.measured`); without one,
        the time of the fastest algorithm that the cluster's library chooses by itself.

    Raises
    ------
    ClusterError
        Where `kind` is unknown or has no such algorithm, or an axis does not fit the cluster.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("dgx-a100", nodes=2)
    >>> mesh = cluster.mesh()
    >>> inside = collective_seconds("all_reduce", 1e9, mesh.axes[:3], cluster)
    >>> across = collective_seconds("all_reduce", 1e9, mesh.axes[3:], cluster)
    >>> across > 4 * inside
    True
    >>> collective_seconds("all_reduce", 1e9, mesh.axes, cluster, algorithm="ring") < 1.2 * across
    True
    """
    return _cheapest(kind, num_bytes, axes, cluster, algorithm)[1]


def collective_algorithm(kind: str, num_bytes: float, axes: Sequence[Axis], cluster: Machine) -> str:
    """The algorithm that `collective_seconds` takes by default.

    One of `ALGORITHMS`, or ``"measured"``, or "" for a group of one rank.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("dgx-a100", nodes=16)
    >>> [collective_algorithm("all_reduce", size, cluster.mesh().axes, cluster) for size in (1e3, 1e9)]
    ['tree', 'ring']
    """
    cost, _, curve = _cheapest(kind, num_bytes, axes, cluster, None)
    if axes_size(axes) == 1:
        return ""
    return cost.algorithm if curve is None else "measured"


def collective_demand(
    kind: str, num_bytes: float, axes: Sequence[Axis], cluster: Machine, algorithm: str | None = None
) -> Demand:
    """The demand of a collective on the links of each level. Arguments and errors are those of `collective_seconds`.

    All groups over `axes` count as one collective: together they have all links of the machine. A collective that is
    limited by `Level.group_bandwidth`, or by a slower level, leaves the rest of a link to others. Which part of a
    measured time is latency the measured sizes around it say (`Curve.latency`), or the formula where there is only one.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("dgx-a100", nodes=2)
    >>> demand = collective_demand("all_gather", 1e9, cluster.mesh().axes, cluster)
    >>> demand.use["node"], 0 < demand.use["gpu"] < 1
    (1.0, True)
    >>> demand.seconds == collective_seconds("all_gather", 1e9, cluster.mesh().axes, cluster)
    True
    """
    cost, seconds, curve = _cheapest(kind, num_bytes, axes, cluster, algorithm)
    if cost.seconds_per_byte == 0:
        return Demand(seconds, 0.0, {})
    latency = None if curve is None else curve.latency(num_bytes)
    if latency is None:
        by_formula = cost.seconds(num_bytes)
        latency = seconds * (cost.latency / by_formula) if by_formula > 0 else seconds
    latency = min(latency, seconds)
    used = zip(cluster.levels, cost.link_seconds_per_byte, strict=True)
    use = {level.name: min(1.0, link / cost.seconds_per_byte) for level, link in used if link > 0}
    return Demand(latency, seconds - latency, use)


def crossed_level(axes: Sequence[Axis], cluster: Machine) -> str:
    """The name of the outermost level whose links a group over `axes` uses; "" for a group of one rank.

    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("dgx-a100", nodes=2)
    >>> crossed_level(cluster.mesh().axes[1:], cluster)
    'node'
    """
    extents = group_extents(tuple(axes), cluster)
    crossed = [level.name for level, extent in zip(cluster.levels, extents, strict=True) if extent > 1]
    return crossed[-1] if crossed else ""


@cache
def group_extents(axes: tuple[Axis, ...], cluster: Machine) -> tuple[int, ...]:
    """How many units of each level a group over `axes` spans, innermost first.

    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("dgx-a100", nodes=2)
    >>> group_extents(cluster.mesh().axes[1:], cluster)
    (4, 2)
    """
    extents, low, fits = [], 1, True
    for level in cluster.levels:
        high, extent = low * level.size, 1
        for axis in axes:
            inside = max(low, min(high, axis.stride * axis.size)) / min(high, max(low, axis.stride))
            extent *= int(inside)
            fits &= inside.is_integer()
        fits &= level.size % extent == 0
        extents.append(extent)
        low = high
    if not fits or math.prod(extents) != axes_size(axes):
        raise ClusterError(
            f"the axes {', '.join(f'{axis} of stride {axis.stride}' for axis in axes)} do not fit {cluster.name} "
            f"with its levels {', '.join(f'{level.name}:{level.size}' for level in cluster.levels)}: use cluster.mesh()"
        )
    return tuple(extents)


def _cheapest(
    kind: str, num_bytes: float, axes: Sequence[Axis], cluster: Machine, algorithm: str | None
) -> tuple[AlphaBetaCost, float, Curve | None]:
    """The cheapest cost by formula, the seconds, and the measured curve that these are from, if there is one."""
    costs, curve = _costs(kind, tuple(axes), cluster, algorithm), None
    cost = min(costs, key=lambda each: each.seconds(num_bytes))
    if algorithm is None and axes and cluster.measured is not None:
        curve = cluster.measured.collectives.curve(kind, group_extents(tuple(axes), cluster))
    if curve is None:
        return cost, cost.seconds(num_bytes), None
    return cost, curve.at(num_bytes, lambda size: min(each.seconds(size) for each in costs)), curve


@cache
def _costs(kind: str, axes: tuple[Axis, ...], cluster: Machine, algorithm: str | None) -> tuple[AlphaBetaCost, ...]:
    """The costs among which the least counts: of `algorithm`, or of those that the library chooses from."""
    algorithms = library_algorithms(kind, cluster) if algorithm is None else (algorithm,)
    extents = group_extents(axes, cluster)
    return tuple(alpha_beta_cost(kind, each, extents, cluster) for each in algorithms)
