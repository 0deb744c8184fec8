"""How long a collective takes: alpha-beta rings over the group's placement on the machine.

For a group of `G` ranks whose whole buffer has `N` bytes, a ring all-gather or reduce-scatter takes

    t = collective_latency + sum over the G - 1 hops of the hop's latency + (G - 1) / G * N / bandwidth

and an all-reduce is a reduce-scatter and an all-gather in one start (Thakur, Rabenseifner and Gropp 2005; NCCL's
``src/graph/tuning.cc`` counts its latencies in the same way). The ring enters each unit of a level once, so
of its hops as few as possible cross a level. Its bandwidth is the least over the levels it crosses; at a level,
the `m` members in one unit below drive `m` devices' shares of that unit's links, since all groups of a step run
their collective at the same time (AxoNN equation 10).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from shardweave.cost_model.cluster import Cluster
from shardweave.errors import ClusterError
from shardweave.ir import Axis, axes_size

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def collective_seconds(kind: str, num_bytes: float, axes: Sequence[Axis], cluster: Cluster) -> float:
    """Seconds that a collective takes when nothing else uses its links.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    num_bytes : float
        Size of the whole buffer on one rank: gathered, or not yet scattered (as in `ir.Collective.bytes`).
    axes : sequence of Axis
        The group, as axes of the cluster's mesh; none means no communication and 0 seconds.
    cluster : Cluster
        The machine.

    Raises
    ------
    ClusterError
        Where `kind` is unknown or an axis does not fit the cluster.

    Examples
    --------
    >>> cluster = Cluster.preset("dgx-a100", nodes=2)
    >>> mesh = cluster.mesh()
    >>> inside = collective_seconds("all_reduce", 1e9, mesh.axes[:3], cluster)
    >>> across = collective_seconds("all_reduce", 1e9, mesh.axes[3:], cluster)
    >>> across > 4 * inside
    True
    """
    alpha, beta = _alpha_beta(kind, tuple(axes), cluster)
    return alpha + beta * num_bytes


def crossed_level(axes: Sequence[Axis], cluster: Cluster) -> str:
    """The name of the outermost level whose links a group over `axes` uses; "" for a group of one rank.

    >>> cluster = Cluster.preset("dgx-a100", nodes=2)
    >>> crossed_level(cluster.mesh().axes[1:], cluster)
    'node'
    """
    extents = _extents(tuple(axes), cluster)
    crossed = [level.name for level, extent in zip(cluster.levels, extents, strict=True) if extent > 1]
    return crossed[-1] if crossed else ""


@cache
def _extents(axes: tuple[Axis, ...], cluster: Cluster) -> tuple[int, ...]:
    """How many units of each level a group over `axes` spans, innermost first."""
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


@cache
def _alpha_beta(kind: str, axes: tuple[Axis, ...], cluster: Cluster) -> tuple[float, float]:
    """Seconds, and seconds a byte: every collective here is linear in its bytes."""
    if kind not in KINDS:
        raise ClusterError(f"no collective is called {kind!r}; there are {', '.join(KINDS)}")
    group = axes_size(axes)
    if group == 1:
        return 0.0, 0.0
    extents = _extents(axes, cluster)
    start = cluster.device.collective_latency
    hops = _ring_latency(extents, cluster)
    scatter = (group - 1) / group
    ring = 1 / _ring_bandwidth(extents, cluster)
    if kind == "all_reduce":
        return start + 2 * hops, 2 * scatter * ring
    if kind in ("all_gather", "reduce_scatter"):
        return start + hops, scatter * ring
    if kind == "broadcast":
        return start + hops, ring
    return start + hops, _all_to_all_beta(extents, cluster)


def _ring_latency(extents: Sequence[int], cluster: Cluster) -> float:
    """Seconds of the ``G - 1`` hops from the ring's first to its last member."""
    seconds, units = 0.0, 1
    for level, extent in zip(reversed(cluster.levels), reversed(extents), strict=True):
        seconds += units * (extent - 1) * level.latency  # `units` chains of `extent` members each
        units *= extent
    return seconds


def _shares(extents: Sequence[int], cluster: Cluster) -> list[tuple[int, float]]:
    """For each level crossed: the members behind one of its entrances, and the bytes/s that each of them gets."""
    shares, members, devices = [], 1, 1
    for level, extent in zip(cluster.levels, extents, strict=True):
        if extent > 1:
            peers = (extent - 1) / (level.size - 1) if level.links == "mesh" else 1.0
            shares.append((members, peers * level.share(devices)))
        members *= extent
        devices *= level.size
    return shares


def _ring_bandwidth(extents: Sequence[int], cluster: Cluster) -> float:
    return min(members * share for members, share in _shares(extents, cluster))


def _all_to_all_beta(extents: Sequence[int], cluster: Cluster) -> float:
    """Of a rank's bytes the part that leaves the unit goes through the rank's own share of each level."""
    group = math.prod(extents)
    return max((group - members) / group / share for members, share in _shares(extents, cluster))
