"""How long a collective takes, and what it takes of each link: by measurement where there is one, else by formula.

The formulas of the forms are in `forms`. The table of a profiled cluster (`Cluster.detect(profile=True)`) goes before
them, as in AMSP (arXiv 2311.00257, section IV-A).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from shardweave.cost_model.forms import FORMS, Line, library_forms, lines
from shardweave.cost_model.machine import Machine
from shardweave.cost_model.measured import KINDS
from shardweave.errors import ClusterError
from shardweave.ir import Axis, axes_size

__all__ = [
    "FORMS",
    "KINDS",
    "Demand",
    "collective_demand",
    "collective_form",
    "collective_seconds",
    "crossed_level",
    "group_extents",
]


@dataclass(frozen=True)
class Demand:
    """What a collective asks of the links, for who lets several run at the same time.

    For `latency` seconds it uses no link. Then it is a fluid that flows for `transfer` seconds if it is let: it needs
    ``use[level]`` of the capacity of each level meanwhile. Several that run at the same time, on the same ranks, all go
    at full speed while at every level their uses add up to at most 1; where they add up to more, they share the level
    and go slower.

    Parameters
    ----------
    latency : float
        Seconds.
    transfer : float
        Seconds when it has its links for itself; ``latency + transfer == collective_seconds(...)``.
    use : mapping of str to float
        By the level's name, for the levels that it crosses: in (0, 1].
    """

    latency: float
    transfer: float
    use: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of the whole when nothing else uses its links."""
        return self.latency + self.transfer


def collective_seconds(
    kind: str, num_bytes: float, axes: Sequence[Axis], cluster: Machine, form: str | None = None
) -> float:
    """Seconds that a collective takes when nothing else uses its links.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    num_bytes : float
        Size of the whole buffer on one rank: gathered, or not yet scattered (as in `ir.Collective.bytes`).
    axes : sequence of Axis
        The group, as axes of the cluster's mesh; none means no communication and 0 seconds.
    cluster : Machine
        The machine.
    form : str, optional
        One of ``FORMS[kind]``, priced by its formula. Left out, what was measured (`Cluster.measured`); where nothing
        was, the fastest of the forms that the cluster's library takes by itself.

    Raises
    ------
    ClusterError
        Where `kind` is unknown or has no such form, or an axis does not fit the cluster.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("dgx-a100", nodes=2)
    >>> mesh = cluster.mesh()
    >>> inside = collective_seconds("all_reduce", 1e9, mesh.axes[:3], cluster)
    >>> across = collective_seconds("all_reduce", 1e9, mesh.axes[3:], cluster)
    >>> across > 4 * inside
    True
    >>> collective_seconds("all_reduce", 1e9, mesh.axes, cluster, form="ring") < 1.2 * across
    True
    """
    found = _lines(kind, tuple(axes), cluster, form)
    if form is None and cluster.measured is not None and axes:
        measured = _measured(kind, num_bytes, tuple(axes), cluster, found)
        if measured is not None:
            return measured
    return min(line.latency + line.beta * num_bytes for line in found)


def collective_form(kind: str, num_bytes: float, axes: Sequence[Axis], cluster: Machine) -> str:
    """Which form `collective_seconds` prices by itself: one of `FORMS`, ``"measured"``, or "" for a group of one.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("dgx-a100", nodes=16)
    >>> [collective_form("all_reduce", size, cluster.mesh().axes, cluster) for size in (1e3, 1e9)]
    ['tree', 'ring']
    """
    found = _lines(kind, tuple(axes), cluster, None)
    if axes_size(axes) == 1:
        return ""
    if cluster.measured is not None and _measured(kind, num_bytes, tuple(axes), cluster, found) is not None:
        return "measured"
    return min(found, key=lambda line: line.seconds(num_bytes)).form


def collective_demand(
    kind: str, num_bytes: float, axes: Sequence[Axis], cluster: Machine, form: str | None = None
) -> Demand:
    """What a collective asks of each level's links; arguments and errors are those of `collective_seconds`.

    All groups over `axes` are one collective here: together they have all links of the machine. A collective that one
    group's cap holds back (`Level.group_bandwidth`), or a slower level, leaves the rest of a link to others. Of a
    measured collective the seconds are measured, and the formula says which part of them is latency.

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
    line = min(_lines(kind, tuple(axes), cluster, form), key=lambda line: line.seconds(num_bytes))
    seconds, priced = collective_seconds(kind, num_bytes, axes, cluster, form), line.seconds(num_bytes)
    if line.beta == 0:
        return Demand(seconds, 0.0, {})
    latency = seconds * (line.latency / priced) if priced > 0 else seconds
    used = zip(cluster.levels, line.links, strict=True)
    use = {level.name: min(1.0, link / line.beta) for level, link in used if link > 0}
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


def _measured(
    kind: str, num_bytes: float, axes: tuple[Axis, ...], cluster: Machine, found: tuple[Line, ...]
) -> float | None:
    if cluster.measured is None:
        return None
    members = group_extents(axes, cluster)
    return cluster.measured.collectives.seconds(
        kind, num_bytes, members, lambda size: min(line.seconds(size) for line in found)
    )


@cache
def _lines(kind: str, axes: tuple[Axis, ...], cluster: Machine, form: str | None) -> tuple[Line, ...]:
    """The prices among which the least counts: of `form`, or of the forms that the library takes."""
    if kind not in KINDS:
        raise ClusterError(f"no collective is called {kind!r}; there are {', '.join(KINDS)}")
    forms = library_forms(kind, cluster) if form is None else (form,)
    extents = group_extents(axes, cluster)
    return tuple(line for one in forms for line in lines(kind, one, extents, cluster))
