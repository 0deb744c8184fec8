"""How long a collective takes, and what it takes of each link: by measurement where there is one, else by formula.

The formulas of the forms are in `forms`. The table of a profiled cluster (`Cluster.detect(profile=True)`) goes before
them, as in AMSP (arXiv 2311.00257, section IV-A).

The forms of the collectives, each as a latency and seconds a byte: alpha-beta over the group's placement.

For a group of `G` ranks whose whole buffer has `N` bytes (Thakur, Rabenseifner and Gropp 2005, section 4):

    ring, all-gather or reduce-scatter   start + the latencies of the G - 1 hops     + (G - 1)/G * N / rate
    ring, all-reduce                     start + twice these hops                    + 2 (G - 1)/G * N / rate
    ring, broadcast                      start + the hops (chunks follow each other) + N / rate
    tree, all-reduce                     start + 2 * depth                           + 2 N / (0.9 rate)
    tree, all-gather or reduce-scatter   start + depth, recursive doubling or halving, the outermost level first
    tree, broadcast                      start + depth, binomial: every round passes all N bytes on
    pairs, all-to-all                    start + the hops                            + what leaves / the rank's own rate
    hierarchical                         one collective a stage; see `hierarchical`

The ring enters each unit of a level once, so as few of its hops as possible cross a level (NCCL's
``src/graph/tuning.cc`` counts them in the same way). A tree's depth is the logarithm of the units at each level; its
0.9 of the rate, up and down at once, is NCCL's ("busBw*.9" and ratio .5 there; Sanders, Speck and Traeff 2009 for the
two trees). Within a node NCCL chains its devices, in a protocol of shorter hops for small messages; for 8 devices that
is 7 hops of 0.5 us where the depth is 3 of 3.4 us, so that the price stays on the safe side.

The rate is the least over the levels that the group crosses. All groups of a step run their collective at the same time
and share each entrance of a level, so of the links of an entrance a group gets the part of its members among the
devices behind it (AxoNN, arXiv 2305.13525, equation 10), and no more than one group can drive
(`Level.group_bandwidth`): ``min(cap, total / n)`` for `n` groups, where equation 10 divides the rate that one group
reaches alone and so prices 4 and 8 groups a third too slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from shardweave.cost_model.machine import Machine
from shardweave.cost_model.measured_tables import COLLECTIVE_KINDS
from shardweave.ir import Axis, ClusterError, axes_size

FORMS = dict.fromkeys(COLLECTIVE_KINDS, ("ring", "tree", "hierarchical")) | {"all_to_all": ("pairs", "hierarchical")}
"""The forms that each kind is priced in."""

_TREE_RATE = 0.9  # NCCL src/graph/tuning.cc


@dataclass(frozen=True)
class Line:
    """A form's price: ``latency + beta * bytes`` seconds.

    Parameters
    ----------
    form : str
        One of `FORMS`.
    latency : float
        Seconds in which it waits for hops, and no link is busy.
    beta : float
        Seconds a byte.
    links : tuple of float
        For each level of the cluster, the seconds a byte for which it would fill its links there on its own.
    """

    form: str
    latency: float
    beta: float
    links: tuple[float, ...]

    def seconds(self, num_bytes: float) -> float:
        """Seconds of a buffer of `num_bytes`."""
        return self.latency + self.beta * num_bytes


class _Entrance(NamedTuple):
    """A level that a group crosses: `members` behind an entrance, `link` bytes/s of it theirs, at most `rate` used."""

    level: int
    extent: int
    members: int
    link: float
    rate: float


def library_forms(kind: str, cluster: Machine) -> tuple[str, ...]:
    """The forms among which the cluster's library takes one by itself.

    NCCL (``src/graph/tuning.cc``) takes the ring or, for an all-reduce, the tree where it expects that to be faster.
    gloo has a ring (``allreduce.cc``, ``allgather.cc``) and, for a broadcast, a binomial tree (``broadcast.cc``).

    >>> from shardweave.cost_model import Cluster
    >>> library_forms("all_reduce", Cluster.preset("dgx-a100")), library_forms("all_reduce", Cluster.local(4))
    (('ring', 'tree'), ('ring',))
    """
    if kind == "all_to_all":
        return ("pairs",)
    if cluster.library == "gloo" and kind == "broadcast":
        return ("tree",)
    return ("ring", "tree") if cluster.library == "nccl" and kind == "all_reduce" else ("ring",)


def lines(kind: str, form: str, extents: Sequence[int], cluster: Machine) -> list[Line]:
    """The prices of a form over a group that spans `extents` units of each level; the least of them counts.

    Raises
    ------
    ClusterError
        Where `kind` is unknown or has no such form.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("dgx-a100", nodes=2)
    >>> [line.form for line in lines("all_gather", "ring", (8, 2), cluster)]
    ['ring']
    """
    if kind not in COLLECTIVE_KINDS:
        raise ClusterError(f"no collective is called {kind!r}; there are {', '.join(COLLECTIVE_KINDS)}")
    if form not in FORMS[kind]:
        raise ClusterError(f"{kind} has no form {form!r}; it has {', '.join(FORMS[kind])}")
    if math.prod(extents) == 1:
        return [Line(form, 0.0, 0.0, (0.0,) * len(extents))]
    if form == "hierarchical":
        return _hierarchical(kind, extents, cluster)
    return [{"ring": _ring, "tree": _tree, "pairs": _pairs}[form](kind, extents, cluster)]


def _entrances(extents: Sequence[int], cluster: Machine) -> list[_Entrance]:
    """The levels that a group crosses, innermost first."""
    crossed, members, devices = [], 1, 1
    for index, (level, extent) in enumerate(zip(cluster.levels, extents, strict=True)):
        if extent > 1:
            peers = (extent - 1) / (level.size - 1) if level.links == "mesh" else 1.0
            link = members * peers * level.share(devices)
            cap = math.inf if level.group_bandwidth is None else level.group_bandwidth
            crossed.append(_Entrance(index, extent, members, link, min(link, cap)))
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
    return (extent - 1).bit_length()


def _ring(kind: str, extents: Sequence[int], cluster: Machine) -> Line:
    group, phases = math.prod(extents), 2 if kind == "all_reduce" else 1
    volume = 1.0 if kind == "broadcast" else phases * (group - 1) / group
    crossed = _entrances(extents, cluster)
    latency = cluster.device.collective_latency + phases * _hops(extents, cluster)
    return _line("ring", latency, volume / min(e.rate for e in crossed), [(e, volume) for e in crossed], cluster)


def _tree(kind: str, extents: Sequence[int], cluster: Machine) -> Line:
    crossed = _entrances(extents, cluster)
    depth = sum(_rounds(extent) * level.latency for level, extent in zip(cluster.levels, extents, strict=True))
    start = cluster.device.collective_latency
    if kind == "all_reduce":
        volume = 2 / _TREE_RATE
        beta = volume / min(e.rate for e in crossed)
        return _line("tree", start + 2 * depth, beta, [(e, volume) for e in crossed], cluster)
    if kind == "broadcast":  # at each level one process sends, which has its own line and no other
        volumes = [(e, float(_rounds(e.extent))) for e in crossed]
        own = [cluster.levels[e.level].efficiency * cluster.levels[e.level].bandwidth for e in crossed]
        beta = sum(volume / min(e.rate, one) for (e, volume), one in zip(volumes, own, strict=True))
        return _line("tree", start + depth, beta, volumes, cluster)
    group, outside = math.prod(extents), 1
    volumes = []
    for e in reversed(crossed):  # each member sends to its own peers what has come to it from the levels further out
        volumes.append((e, e.members * outside * (e.extent - 1) / group))
        outside *= e.extent
    return _line("tree", start + depth, sum(volume / e.rate for e, volume in volumes), volumes, cluster)


def _pairs(kind: str, extents: Sequence[int], cluster: Machine) -> Line:
    """The part of a rank's bytes that leaves its unit goes through the rank's share of each level's links."""
    group = math.prod(extents)
    volumes = [(e, e.members * (group - e.members) / group) for e in _entrances(extents, cluster)]
    latency = cluster.device.collective_latency + _hops(extents, cluster)
    return _line("pairs", latency, max(volume / e.rate for e, volume in volumes), volumes, cluster)


def _line(form: str, latency: float, beta: float, volumes: Sequence[tuple[_Entrance, float]], cluster: Machine) -> Line:
    """A line with what of the links it fills: `volumes` are bytes through one entrance for each byte of the buffer."""
    links = [0.0] * len(cluster.levels)
    for entrance, volume in volumes:
        links[entrance.level] = volume / entrance.link
    return Line(form, latency, beta, tuple(links))


def _hierarchical(kind: str, extents: Sequence[int], cluster: Machine) -> list[Line]:
    """One collective for each of several stages, every stage one level or some neighbours, in its best flat form.

    An all-reduce scatters inside, reduces the parts across and gathers inside; a broadcast scatters, broadcasts the
    parts and gathers; an all-to-all exchanges inside and then across. A stage works on the part of the buffer that the
    stages inside it leave. One stage over all levels is a flat form, so that hierarchical is never dearer than these.
    """
    crossed = [index for index, extent in enumerate(extents) if extent > 1]
    found: list[Line] = []
    for stages in _cuts(crossed):
        sums = [Line("hierarchical", 0.0, 0.0, (0.0,) * len(extents))]
        for inside, levels in enumerate(stages):
            part = tuple(extent if index in levels else 1 for index, extent in enumerate(extents))
            left = math.prod(extents[index] for stage in stages[:inside] for index in stage)
            for step, share in _steps(kind, left, last=inside == len(stages) - 1):
                flats = [line for form in FORMS[step][:-1] for line in lines(step, form, part, cluster)]
                sums = _least([_plus(one, line, share) for one in sums for line in flats])
        found += sums
    return _least(found)


def _cuts(levels: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """All ways to cut a sequence into neighbours, that without a cut included."""
    yield [levels]
    for at in range(1, len(levels)):
        for rest in _cuts(levels[at:]):
            yield [levels[:at], *rest]


def _steps(kind: str, left: int, *, last: bool) -> list[tuple[str, float]]:
    """The collectives of one stage, and the part of the whole buffer that each works on."""
    if kind == "all_to_all":
        return [(kind, 1.0)]
    if last or kind in ("all_gather", "reduce_scatter"):
        return [(kind, 1 / left)]
    return [("reduce_scatter", 1 / left), ("all_gather", 1 / left)]


def _plus(one: Line, other: Line, share: float) -> Line:
    links = tuple(a + share * b for a, b in zip(one.links, other.links, strict=True))
    return Line(one.form, one.latency + other.latency, one.beta + share * other.beta, links)


def _least(found: list[Line]) -> list[Line]:
    """The lines that are the least at some size: from the least latency on, each with a smaller beta."""
    kept: list[Line] = []
    for line in sorted(found, key=lambda line: (line.latency, line.beta)):
        if not kept or line.beta < kept[-1].beta:
            kept.append(line)
    return kept


@dataclass(frozen=True)
class Demand:
    """The demand of a collective on the links, for models in which several collectives run at the same time.

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
        One of `COLLECTIVE_KINDS`.
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
    """The demand of a collective on the links of each level. Arguments and errors are those of `collective_seconds`.

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
    if kind not in COLLECTIVE_KINDS:
        raise ClusterError(f"no collective is called {kind!r}; there are {', '.join(COLLECTIVE_KINDS)}")
    forms = library_forms(kind, cluster) if form is None else (form,)
    extents = group_extents(axes, cluster)
    return tuple(line for one in forms for line in lines(kind, one, extents, cluster))
