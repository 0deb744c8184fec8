"""Profiling of collectives on the running world, and the latency and bandwidth of each level, fitted to it.

The fitted figures serve collectives that are not in the measured table. A full profile measures every kind of
collective, for every placement of a group on the world's mesh, with sizes from 4 KiB on by factors of 4. A brief one,
which is the default on a running world, measures the groups of each level alone, with factors of 16, and of 4 before a
size that takes too long. The functional collectives are those that generated graphs call, and all groups of a placement
run at the same time. All ranks begin each call together, as in a step: calls one after another would find the threads
awake.

A figure is the median of several samples. Kinds, placements and sizes are measured in rounds, so that other work of the
machine affects all of them equally. If a smaller size is slower than a larger one, both get the mean. Decisions by the
clock (how often to repeat, when the time is up) use numbers that are equal on all ranks.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardweave.cost_model.collectives import alpha_beta_cost, group_extents, library_algorithms
from shardweave.cost_model.machine import M, Machine
from shardweave.cost_model.measured_tables import COLLECTIVE_KINDS, CollectiveTable, Curve
from shardweave.distributed import all_gather_objects, exchange, gather, sends_directly, sum_of_parts
from shardweave.ir import Axis, ClusterError, axes_size, readable_bytes, readable_seconds

c10d = torch.ops._c10d_functional

PROFILE_TIMEOUT = timedelta(seconds=60)
"""The time that a rank waits for the others in one step of the profile."""
_BUFFER_BYTES = {"cpu": tuple(4**k * 1024 for k in range(1, 9)), "cuda": tuple(4**k * 1024 for k in range(1, 10))}
"""Bytes of the whole buffer: from 4 KiB to 64 MiB, and to 256 MiB on GPUs."""
_FIRST_SAMPLES_SHARE = 0.5
"""The part of the time for one sample of each size. More samples take the rest."""
_FIRST_SAMPLE_CALLS = 4
"""The first sample of a size takes about as long as this number of calls: three, of which the first are slower."""
_SAMPLE_SECONDS = 0.03
_TRANSFER_RATIO = 4.0
_MAX_CALLS_PER_SAMPLE = 8
_MAX_ROUNDS = 9
_NEIGHBOUR_BYTES = {"cpu": 2**20, "cuda": 2**25}
"""Bytes that a rank sends to its neighbour in the next node, to find leaf switches."""
_NEIGHBOUR_SAMPLES = 7
_LEAF_RATIO = 1.5
"""A transfer leaves a switch if it takes so many times as long as those that do not."""


@dataclass(frozen=True)
class ProfileEffort:
    """How much of the collectives a profile measures.

    Parameters
    ----------
    name : str
        In the key of the cache.
    seconds : float
        The time that it may take.
    every_nth_size : int
        1 for sizes by factors of 4, 2 for factors of 16 (of 4 where that would take too long).
    across_levels : bool
        Measures groups of every placement. Without, one for each level, of all its units: the figures of the levels are
        fitted to these, and say what others take.
    call_seconds : float
        Sizes whose calls are expected to take longer are left out where the one before takes `_TRANSFER_RATIO` times as
        long as the one before that: then the rate is known, and more samples are worth more.
    """

    name: str
    seconds: float
    every_nth_size: int
    across_levels: bool
    call_seconds: float = math.inf


BRIEF = ProfileEffort("brief", 5.0, 2, across_levels=False, call_seconds=0.05)
FULL = ProfileEffort("full", 30.0, 1, across_levels=True)


def fit_links(cluster: M) -> M:
    """`cluster` with the latencies and bandwidths that fit its measured collectives best.

    The time of a collective is linear in the latency of its start and, for each level, in the latency of a hop and in
    the seconds a byte. The fit has the least sum of squared relative errors over all points of groups that cross one
    level, each weighted by the square root of its seconds, without negative figures. So a rate comes from the large
    sizes: the links let small ones pass faster. Levels that were not measured keep theirs.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> from shardweave.cost_model import CollectiveTable, Curve, Measured
    >>> curves = [Curve("all_reduce", (n, 1), (1e3, 1e6, 1e9), tuple(
    ...     1e-4 + 2 * (n - 1) * 1e-5 + 2 * (n - 1) / n * size / 5e9 for size in (1e3, 1e6, 1e9))) for n in (2, 4)]
    >>> fitted = fit_links(replace(Cluster.local(4), measured=Measured(CollectiveTable(tuple(curves)))))
    >>> f"{fitted.levels[0].bandwidth:.2e} {fitted.levels[0].latency:.2e} {fitted.device.collective_latency:.2e}"
    '5.00e+09 1.00e-05 1.00e-04'
    """
    if cluster.measured is None:
        return cluster
    # 1. Write an equation for each point: its formula is its seconds, both divided by the root of the seconds.
    count = len(cluster.levels)
    rows, roots, unit = [], [], _with_unit_hops(cluster)
    for curve in cluster.measured.collectives.curves:
        crossed = [index for index, extent in enumerate(curve.members) if extent > 1]
        if len(crossed) != 1:
            continue
        cost = alpha_beta_cost(curve.kind, library_algorithms(curve.kind, unit)[0], curve.members, unit)
        hops = cost.latency - unit.device.collective_latency  # of one second each
        for size, seconds in zip(curve.bytes, curve.seconds, strict=True):
            row = np.zeros(1 + 2 * count)
            row[0], row[1 + crossed[0]], row[1 + count + crossed[0]] = 1, hops, cost.seconds_per_byte * size
            rows.append(row / math.sqrt(seconds))
            roots.append(math.sqrt(seconds))
    if not rows:
        return cluster
    # 2. Solve them, and write the figures into the levels.
    matrix = np.array(rows)
    constants = _non_negative_least_squares(matrix, np.array(roots))
    levels = []
    for index, level in enumerate(cluster.levels):
        latency, slower = float(constants[1 + index]), float(constants[1 + count + index])
        if matrix[:, 1 + count + index].any() and slower > 0:
            level = level.scaled(1 / slower, latency)
        levels.append(level)
    device = replace(cluster.device, collective_latency=float(constants[0]))
    return replace(cluster, levels=tuple(levels), device=device)


def _with_unit_hops(cluster: M) -> M:
    """`cluster` with hops of one second each, so that the latency of a collective is the number of its hops."""
    levels = tuple(replace(level, latency=1.0) for level in cluster.levels)
    return replace(cluster, levels=levels, device=replace(cluster.device, collective_latency=0.0), measured=None)


def _non_negative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ``x >= 0`` with the least ``|matrix @ x - target|``. It tries all sets of unknowns that are not 0.

    >>> _non_negative_least_squares(np.array([[1.0, 0.0], [0.0, 4.0]]), np.array([1.0, 1.0])).tolist()
    [1.0, 0.25]
    """
    columns = [index for index in range(matrix.shape[1]) if matrix[:, index].any()]
    best, least = np.zeros(matrix.shape[1]), float((target**2).sum())
    for size in range(1, len(columns) + 1):
        for used in itertools.combinations(columns, size):
            found = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
            error = float(((matrix[:, used] @ found - target) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(matrix.shape[1]), error
                best[list(used)] = found
    return best


@dataclass(frozen=True)
class Coverage:
    """The measured curves of a profile, and the missing ones with their reasons."""

    curves: tuple[Curve, ...]
    missed: tuple[tuple[str, tuple[int, ...], str], ...]
    seconds: float

    def text(self, cluster: Machine) -> str:
        """One line for each placement and each thing that was not measured."""
        names = [level.name for level in cluster.levels]
        lines = [f"collectives measured in {self.seconds:.0f} s, all groups of a placement at the same time:"]
        for members in dict.fromkeys(curve.members for curve in self.curves):
            mine = [curve for curve in self.curves if curve.members == members]
            spans = ", ".join(f"{c.kind} {_size_text(c.bytes[0])} to {_size_text(c.bytes[-1])}" for c in mine)
            lines.append(f"  groups of {_placement_text(members, names)}: {spans}")
        for kind, members, why in self.missed:
            lines.append(f"  not measured: {kind} in groups of {_placement_text(members, names)}: {why}")
        lines.append("  outside these sizes, and for other groups and kinds: by formula, its figures fitted to these")
        return "\n".join(lines)


def placements(cluster: Machine, across_levels: bool = True) -> list[tuple[Axis, ...]]:
    """The axes of one group for each distinct count of members per level; groups of the fewest levels first.

    Without `across_levels`, those of the groups that have all units of one level, and one of each other.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("perlmutter", nodes=2)
    >>> [group_extents(axes, cluster) for axes in placements(cluster)]
    [(4, 1), (2, 1), (1, 2), (4, 2), (2, 2)]
    >>> [group_extents(axes, cluster) for axes in placements(cluster, across_levels=False)]
    [(4, 1), (1, 2)]
    """
    mesh, choices, low = cluster.mesh(), [], 1
    for level in cluster.levels:
        axes = [axis for axis in mesh.axes if low <= axis.stride < low * level.size]
        subsets = [part for count in range(len(axes) + 1) for part in itertools.combinations(axes, count)]
        choices.append(list({axes_size(part): part for part in reversed(subsets)}.values()))
        low *= level.size
    groups = [tuple(itertools.chain(*parts)) for parts in itertools.product(*choices)]

    def order(axes: tuple[Axis, ...]) -> tuple[int, list[bool], int]:
        crossed = [extent > 1 for extent in group_extents(axes, cluster)]
        return sum(crossed), crossed[::-1], -axes_size(axes)

    def is_whole_level(axes: tuple[Axis, ...]) -> bool:
        spanned = [(n, level.size) for n, level in zip(group_extents(axes, cluster), cluster.levels) if n > 1]
        return len(spanned) == 1 and spanned[0][0] == spanned[0][1]

    return sorted((axes for axes in groups if axes and (across_levels or is_whole_level(axes))), key=order)


def profile_collectives(
    cluster: Machine, world: dist.ProcessGroup, effort: ProfileEffort = FULL
) -> tuple[CollectiveTable, Coverage]:
    """Measure collectives. All ranks of the running world must call it.

    Parameters
    ----------
    cluster : Machine
        The running world, as `Cluster.detect` finds it.
    world : ProcessGroup
        A group of all ranks, with a timeout, in which the ranks agree.
    effort : ProfileEffort
        What to measure, and for how long: each kind and placement gets an equal part of the rest of the first half.

    Returns
    -------
    CollectiveTable, Coverage
        The same on all ranks.

    Raises
    ------
    ClusterError
        If a rank fails or does not take part within `PROFILE_TIMEOUT`.
    """
    device = _collectives_device()
    agree = _RankAgreement(world, device)
    seconds = effort.seconds
    begin, first_end = agree.now(), _FIRST_SAMPLES_SHARE * seconds
    # 1. Take a first sample of each kind and placement, at rising sizes.
    groups, sizes = placements(cluster, effort.across_levels), _BUFFER_BYTES[device.type]
    left = [(axes, kind) for axes in groups for kind in COLLECTIVE_KINDS]
    found: list[tuple[_Samples, str, tuple[int, ...]]] = []
    missed, made = [], []
    for axes in groups:
        members = group_extents(axes, cluster)
        if agree.now() - begin > first_end:
            missed += [(kind, members, f"the {seconds:g} s were over") for kind in COLLECTIVE_KINDS]
            continue
        made.append(_group_over(axes, cluster))
        for kind in COLLECTIVE_KINDS:
            now = agree.now()
            share = (first_end - (now - begin)) / max(1, len(left))
            left.remove((axes, kind))
            is_direct = device.type == "cpu" and sends_directly(kind, axes, made[-1])
            samples = _Samples(kind, made[-1], device, is_direct)
            stopped = _measure_sizes(samples, agree, sizes, now + share, effort)
            found.append((samples, kind, members))
            if stopped:
                missed.append((kind, members, stopped))
    # 2. Take more samples of all of them in rounds, while the time lasts.
    turn = [(samples, size) for samples, _, _ in found for size in samples.seconds]
    for _ in range(_MAX_ROUNDS):
        if agree.now() + sum(samples.expected(size) for samples, size in turn) > begin + seconds:
            break
        for samples, size in turn:
            samples.take(size, agree)
    for group in made:
        dist.destroy_process_group(group)
    curves = tuple(samples.curve(members) for samples, _, members in found if samples.seconds)
    return CollectiveTable(curves), Coverage(curves, tuple(missed), agree.now() - begin)


def neighbour_seconds(cluster: Machine, world: dist.ProcessGroup) -> list[float]:
    """Seconds of a transfer from each node to the next one, and from the last to the first. Collective.

    All ranks of a node send at the same time, each to the rank of its number in the next node. Each is a median.
    """
    device = _collectives_device()
    agree, nodes = _RankAgreement(world, device), cluster.levels[-1].size
    per_node = cluster.world_size // nodes
    own, local = divmod(dist.get_rank(world), per_node)
    before, after = (own - 1) % nodes, (own + 1) % nodes
    buffer = torch.zeros(_NEIGHBOUR_BYTES[device.type], dtype=torch.uint8, device=device)
    receive = partial(dist.recv, buffer, before * per_node + local, group=world)
    # A node sends or receives in a round: even nodes send first, then odd ones, then the last one to the first.
    rounds = [range(0, nodes - 1, 2), range(1, nodes - 1, 2), range(nodes - 1, nodes)]
    samples = []
    for _ in range(1 + _NEIGHBOUR_SAMPLES):
        for senders in rounds:
            agree.largest(0.0)
            if own in senders:
                dist.send(buffer, after * per_node + local, group=world)
            elif before in senders:
                samples.append(_seconds(receive, 1, device))
    mine = before, median(samples[1:])  # the first makes the connections
    slowest = [0.0] * nodes
    for source, seconds in all_gather_objects(mine, world):
        slowest[source] = max(slowest[source], seconds)
    return slowest


@dataclass(frozen=True)
class NodeGroup:
    """A level of units of the level below, as nodes on one leaf switch: how many, and how a transfer is slowed down.

    Parameters
    ----------
    size : int
        The number of units of the level below in one of this level.
    slowdown : float
        How many times as long a transfer between two of its units takes as one within the innermost of these levels.
    """

    size: int
    slowdown: float


def node_groups(seconds: Sequence[float]) -> list[NodeGroup]:
    """The levels above a node, innermost first, by what a transfer from each node to the next one takes.

    Every so many nodes a transfer leaves a switch, and takes longer. One level where no such period is seen.

    Parameters
    ----------
    seconds : sequence of float
        As `neighbour_seconds`; the last is of the transfer from the last node to the first.

    Examples
    --------
    >>> [group.size for group in node_groups([1.0, 1.1, 1.0, 4.0, 1.0, 1.2, 1.0, 4.2])]
    [4, 2]
    >>> node_groups([1.0, 3.0, 1.0, 9.0, 1.0, 3.0, 1.0, 9.0])
    [NodeGroup(size=2, slowdown=1.0), NodeGroup(size=2, slowdown=3.0), NodeGroup(size=2, slowdown=9.0)]
    >>> [group.size for group in node_groups([1.0, 1.4, 1.0, 1.3])]
    [4]
    """
    groups, left, within = list[NodeGroup](), list(seconds), 0.0
    while len(left) > 1 or not groups:
        size = next((size for size in range(2, len(left) // 2 + 1) if _leaves_every(left, size)), len(left))
        inside = median([each for place, each in enumerate(left, 1) if place % size] or left)
        within = within or inside
        groups.append(NodeGroup(size, inside / within))
        left = left[size - 1 :: size] if size < len(left) else []
    return groups


def _leaves_every(seconds: Sequence[float], size: int) -> bool:
    """Whether each transfer that leaves one of so many nodes takes longer than all that do not."""
    if len(seconds) % size:
        return False
    inside = [each for place, each in enumerate(seconds, 1) if place % size]
    return min(seconds[size - 1 :: size]) >= _LEAF_RATIO * max(inside)


def isotonic_fit(values: Sequence[float]) -> list[float]:
    """The sequence that never falls and is nearest to the positive `values` in their logarithms.

    It is the pool-adjacent-violators algorithm (Ayer et al. 1955): falling neighbours get their mean.

    Examples
    --------
    >>> [round(value, 9) for value in isotonic_fit([1.0, 4.0, 1.0, 8.0])]
    [1.0, 2.0, 2.0, 8.0]
    """
    pools: list[tuple[float, int]] = []  # the mean and the number of some logarithms
    for value in values:
        mean, count = math.log(value), 1
        while pools and pools[-1][0] > mean:
            before, number = pools.pop()
            mean, count = (mean * count + before * number) / (count + number), count + number
        pools.append((mean, count))
    return [math.exp(mean) for mean, count in pools for _ in range(count)]


def _collectives_device() -> torch.device:
    """The device whose tensors this world's collectives move."""
    is_nccl = "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


class _RankAgreement:
    """Numbers that are equal on all ranks."""

    def __init__(self, world: dist.ProcessGroup, device: torch.device) -> None:
        self.world, self.device = world, device

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers; also a barrier."""
        return self._reduced(number, dist.ReduceOp.MAX)

    def mean(self, number: float) -> float:
        """The mean of the ranks' numbers; also a barrier."""
        return self._reduced(number, dist.ReduceOp.SUM) / dist.get_world_size(self.world)

    def _reduced(self, number: float, op: dist.ReduceOp.RedOpType) -> float:
        value = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, op, group=self.world)
        return float(value.item())

    def now(self) -> float:
        """Seconds of a clock, the same on all ranks."""
        return self.largest(time.perf_counter())

    def failed(self, error: Exception | None, call: str) -> str:
        """Why `call` failed on all ranks; "" if it worked on all; raises `ClusterError` if it failed on some."""
        least, most = -self.largest(-float(error is not None)), self.largest(float(error is not None))
        if most and not least:
            mine = f"rank {dist.get_rank()} failed: {error}" if error else f"not on this rank ({dist.get_rank()})"
            raise ClusterError(f"profiling {call}: expected all ranks to succeed, but some failed; {mine}") from error
        return str(error).splitlines()[0] if error is not None and most else ""


class _Samples:
    """Measured seconds of a call of one kind of collective in one group, by size; of direct sends if `is_direct`.

    A sample is the mean of the ranks; of a broadcast, of those that receive, as its source waits for no one.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup, device: torch.device, is_direct: bool) -> None:
        self.kind, self.group, self.device, self.is_direct = kind, group, device, is_direct
        waits, members = not (kind == "broadcast" and group.rank() == 0), group.size()
        self.weight = float(waits) * (members / (members - 1) if kind == "broadcast" else 1.0)
        self.bytes: dict[int, int] = {}
        self.seconds: dict[int, list[float]] = {}

    def take(self, size: int, agree: _RankAgreement) -> None:
        """Add a sample of a size that has samples."""
        call, _ = _prepared_call(self.kind, size, self.group, self.device, self.is_direct)
        _seconds(call, 1, self.device)
        took = []
        for _ in range(self._calls(size)):
            agree.largest(0.0)
            took.append(_seconds(call, 1, self.device))
        self.seconds[size].append(agree.mean(fmean(took) * self.weight))

    def expected(self, size: int) -> float:
        """An estimate of the seconds for one more sample: a first call, and those that are counted.

        Before each, the ranks agree, which takes about as long as a small call.
        """
        calls, least = self._calls(size), min(map(median, self.seconds.values()))
        return (1 + calls) * (median(self.seconds[size]) + least)

    def _calls(self, size: int) -> int:
        return max(1, min(_MAX_CALLS_PER_SAMPLE, int(_SAMPLE_SECONDS / median(self.seconds[size]))))

    def first(self, size: int, agree: _RankAgreement) -> str:
        """Take the first sample of a size; returns why it failed, or ""."""
        subject = f"{self.kind} of {_size_text(size)}"
        error, call, num_bytes = None, None, 0
        try:
            call, num_bytes = _prepared_call(self.kind, size, self.group, self.device, self.is_direct)
        except (RuntimeError, MemoryError) as caught:  # out of memory
            error = caught
        if why := agree.failed(error, subject):
            return why
        assert call is not None
        try:
            _seconds(call, 2, self.device)  # makes the connections
            once = _seconds(call, 1, self.device)
        except RuntimeError as caught:  # a backend without this collective
            error = caught
        if why := agree.failed(error, subject):
            return why
        once = agree.largest(once)
        if num_bytes not in self.bytes.values():
            self.bytes[size], self.seconds[size] = num_bytes, [once]
        return ""

    def curve(self, members: tuple[int, ...]) -> Curve:
        """The medians, as a curve that never falls."""
        typical = [median(samples[1:] or samples) for samples in self.seconds.values()]
        return Curve(self.kind, members, tuple(map(float, self.bytes.values())), tuple(isotonic_fit(typical)))


def _measure_sizes(
    samples: _Samples, agree: _RankAgreement, sizes: Sequence[int], until: float, effort: ProfileEffort
) -> str:
    """Take a first sample at rising sizes until the time is up; returns why sizes are missing, or "".

    The sizes rise by the step of `effort`, and by smaller ones where the next would take too long: a link lets the
    first tens of KiB pass faster than its rate, so a rate that is known from small sizes alone may be far too high.
    """
    place, before, is_rate_known = 0, math.inf, False
    while True:
        # 1. Take a sample of this size.
        size = sizes[place]
        if why := samples.first(size, agree):
            return f"{_size_text(size)} and more: {why}"
        took = samples.seconds.get(size, [0.0])[0]
        is_rate_known, before = is_rate_known or took > _TRANSFER_RATIO * before, took
        if place + effort.every_nth_size >= len(sizes):
            return ""
        # 2. Go on with the largest of the next sizes that is fast enough.
        left, reason = until - agree.now(), ""
        for following in range(place + effort.every_nth_size, place, -1):
            expected = took * sizes[following] / size
            if is_rate_known and expected > effort.call_seconds:
                reason = f"a call would take about {readable_seconds(expected)}"
            elif _FIRST_SAMPLE_CALLS * expected > left:
                reason = "its part of the time was over"
            else:
                place = following
                break
        else:
            return f"more than {_size_text(size)}: {reason}"


def _seconds(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Seconds of `times` calls, one after the other."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _prepared_call(
    kind: str, size: int, group: dist.ProcessGroup, device: torch.device, is_direct: bool
) -> tuple[Callable[[], torch.Tensor], int]:
    """A collective over `group` as generated graphs call it, and the bytes of its whole buffer, near `size`."""
    members, name = group.size(), group.group_name
    part = max(1, size // 4 // members)
    whole = torch.zeros(part * members, dtype=torch.float32, device=device)
    shard = whole[:part].clone()
    torch.empty_like(whole)  # fails if there is no memory for the result: the call itself could not report it
    starts: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: c10d.all_reduce(whole, "sum", name),
        "all_gather": lambda: c10d.all_gather_into_tensor(shard, members, name),
        "reduce_scatter": lambda: c10d.reduce_scatter_tensor(whole, "sum", members, name),
        "all_to_all": lambda: c10d.all_to_all_single(whole, [part] * members, [part] * members, name),
        "broadcast": lambda: c10d.broadcast(whole, 0, name),
    }
    if is_direct:
        own = [part] * members
        starts["all_gather"] = lambda: gather(shard, name)
        starts["all_to_all"] = starts["reduce_scatter"] = lambda: exchange(whole, own, own, name)
    start = starts[kind]
    if is_direct and kind == "reduce_scatter":
        return lambda: sum_of_parts(c10d.wait_tensor(start()).view(members, part)), 4 * part * members
    return lambda: c10d.wait_tensor(start()), 4 * part * members


def _group_over(axes: Sequence[Axis], cluster: Machine) -> dist.ProcessGroup:
    """The group of this rank over `axes`. All ranks make all groups, in one order.

    Groups that only their members make (``use_local_synchronization``) would be faster in a world of thousands. But
    torch names them by their ranks, so a later group of the same ranks finds the addresses of the destroyed one.
    """
    mesh = cluster.mesh()
    groups = sorted({mesh.group_ranks(axes, rank) for rank in range(mesh.world_size)})
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        [list(group) for group in groups], timeout=PROFILE_TIMEOUT
    )
    return mine


def _size_text(num_bytes: float) -> str:
    return readable_bytes(num_bytes).replace(".0 ", " ")


def _placement_text(members: Sequence[int], names: Sequence[str]) -> str:
    return " x ".join(f"{count} {name}" for count, name in zip(members, names, strict=True) if count > 1)
