"""Profiling of collectives on the running world, and the latency and bandwidth of each level, fitted to it.

The fitted figures are for what the measured table does not hold. Every kind of collective is measured, for every
placement of a group on the world's mesh, with sizes from 4 KiB on by factors of 4. The functional collectives are those
that generated graphs call, and all groups of a placement run at the same time. All ranks begin each call together, as
after an op that takes all of them equally long: calls in a row would meet warm threads.

A figure is the median of several batches of calls. Kinds, placements and sizes are measured in rounds, so that other
work of the machine affects all of them alike. Where a smaller size is slower than a larger one, both are noise about
one figure, which is taken for both. Decisions by the clock (how often to repeat, when the time is up) are made from
numbers on which the ranks have agreed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardweave.cost_model.collectives import alpha_beta_costs, group_extents, library_algorithms
from shardweave.cost_model.machine import M, Machine
from shardweave.cost_model.measured_tables import COLLECTIVE_KINDS, CollectiveTable, Curve
from shardweave.ir import Axis, ClusterError, axes_size


def fitted_links(cluster: M) -> M:
    """`cluster` with the links that explain its measured collectives best.

    A price is linear in the start's latency and, for each level, in a hop's latency and in the seconds a byte. Fitted
    are the constants, none negative, with the least sum of squared relative errors over all points of groups that cross
    one level. Levels that were not measured keep theirs.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> from shardweave.cost_model import CollectiveTable, Curve, Measured
    >>> curves = [Curve("all_reduce", (n, 1), (1e3, 1e6, 1e9), tuple(
    ...     1e-4 + 2 * (n - 1) * 1e-5 + 2 * (n - 1) / n * size / 5e9 for size in (1e3, 1e6, 1e9))) for n in (2, 4)]
    >>> fitted = fitted_links(replace(Cluster.local(4), measured=Measured(CollectiveTable(tuple(curves)))))
    >>> f"{fitted.levels[0].bandwidth:.2e} {fitted.levels[0].latency:.2e} {fitted.device.collective_latency:.2e}"
    '5.00e+09 1.00e-05 1.00e-04'
    """
    if cluster.measured is None:
        return cluster
    count = len(cluster.levels)
    rows, unit = [], _unit(cluster)
    for curve in cluster.measured.collectives.curves:
        crossed = [index for index, extent in enumerate(curve.members) if extent > 1]
        if len(crossed) != 1:
            continue
        (cost,) = alpha_beta_costs(curve.kind, library_algorithms(curve.kind, unit)[0], curve.members, unit)
        hops = cost.latency - unit.device.collective_latency  # of one second each
        for size, seconds in zip(curve.bytes, curve.seconds, strict=True):
            row = np.zeros(1 + 2 * count)
            row[0], row[1 + crossed[0]], row[1 + count + crossed[0]] = 1, hops, cost.seconds_per_byte * size
            rows.append(row / seconds)
    if not rows:
        return cluster
    matrix = np.array(rows)
    constants = _non_negative(matrix)
    levels = []
    for index, level in enumerate(cluster.levels):
        latency, slower = float(constants[1 + index]), float(constants[1 + count + index])
        if matrix[:, 1 + count + index].any() and slower > 0:
            shared = None if level.shared_bandwidth is None else level.shared_bandwidth / slower
            level = replace(level, latency=latency, bandwidth=level.bandwidth / slower, shared_bandwidth=shared)
        levels.append(level)
    device = replace(cluster.device, collective_latency=float(constants[0]))
    return replace(cluster, levels=tuple(levels), device=device)


def _unit(cluster: M) -> M:
    """`cluster` with hops of one second each, so that a price's latency counts them."""
    levels = tuple(replace(level, latency=1.0) for level in cluster.levels)
    return replace(cluster, levels=levels, device=replace(cluster.device, collective_latency=0.0), measured=None)


def _non_negative(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The `x >= 0` with the least ``|matrix @ x - 1|``: the best of the unbounded solutions of all sets of unknowns.

    >>> _non_negative(np.array([[1.0, 0.0], [0.0, 4.0]])).tolist()
    [1.0, 0.25]
    """
    columns = [index for index in range(matrix.shape[1]) if matrix[:, index].any()]
    best, least = np.zeros(matrix.shape[1]), float(len(matrix))
    for size in range(1, len(columns) + 1):
        for used in itertools.combinations(columns, size):
            found = np.linalg.lstsq(matrix[:, used], np.ones(len(matrix)), rcond=None)[0]
            error = float(((matrix[:, used] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(matrix.shape[1]), error
                best[list(used)] = found
    return best


PATIENCE = timedelta(seconds=60)
"""How long a rank waits for the others in one step of the profile before it fails."""

SIZES = {"cpu": tuple(4**k * 1024 for k in range(1, 9)), "cuda": tuple(4**k * 1024 for k in range(1, 10))}
"""Bytes of the whole buffer: from 4 KiB to 64 MiB, and to 256 MiB on GPUs."""

_FIRST_PART = 0.5  # of the time, to find the sizes that can be measured; the rest is for more samples of them
_GROWTH = 16  # calls of this size, for the next one: three of four times the bytes
_BATCH_SECONDS = 0.03
_MOST_CALLS = 8
_MOST_TURNS = 9

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Coverage:
    """What a profile covers, printed for users."""

    curves: tuple[Curve, ...]
    missed: tuple[tuple[str, tuple[int, ...], str], ...]
    seconds: float

    def text(self, cluster: Machine) -> str:
        """One line for each placement and each thing that was not measured."""
        names = [level.name for level in cluster.levels]
        lines = [f"collectives measured in {self.seconds:.0f} s, all groups of a placement at the same time:"]
        for members in dict.fromkeys(curve.members for curve in self.curves):
            mine = [curve for curve in self.curves if curve.members == members]
            spans = ", ".join(f"{c.kind} {_size(c.bytes[0])} to {_size(c.bytes[-1])}" for c in mine)
            lines.append(f"  groups of {_place(members, names)}: {spans}")
        for kind, members, why in self.missed:
            lines.append(f"  not measured: {kind} in groups of {_place(members, names)}: {why}")
        lines.append("  outside these sizes, and for other groups and kinds: by formula")
        return "\n".join(lines)


def placements(cluster: Machine) -> list[tuple[Axis, ...]]:
    """Axes for each distinct count of members per level that a group over the mesh can have; fewest levels first.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("perlmutter", nodes=2)
    >>> [group_extents(axes, cluster) for axes in placements(cluster)]
    [(4, 1), (2, 1), (1, 2), (4, 2), (2, 2)]
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

    return sorted((axes for axes in groups if axes), key=order)


def profile_collectives(
    cluster: Machine, world: dist.ProcessGroup, *, seconds: float = 30.0, sizes: Sequence[int] | None = None
) -> tuple[CollectiveTable, Coverage]:
    """Measure the collectives of all placements; every rank of the running world must call it.

    Parameters
    ----------
    cluster : Machine
        The running world, as `Cluster.detect` sees it.
    world : ProcessGroup
        All ranks, with a timeout: in it the ranks agree.
    seconds : float
        Time that may be spent, in all. Each kind and placement gets an equal part of what is left of the first half.
    sizes : sequence of int, optional
        Bytes of the whole buffer; `SIZES` if not given.

    Returns
    -------
    CollectiveTable, Coverage
        The same on all ranks.

    Raises
    ------
    ClusterError
        Where a rank fails or does not come: after `PATIENCE`, never a hang.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
    agree = _Agreement(world, device)
    begin = agree.now()
    groups = placements(cluster)
    left = [(axes, kind) for axes in groups for kind in COLLECTIVE_KINDS]
    found: list[tuple[_Samples, str, tuple[int, ...]]] = []
    missed, made = [], []
    for axes in groups:
        members = group_extents(axes, cluster)
        spent = agree.now() - begin
        if spent > _FIRST_PART * seconds:
            missed += [(kind, members, f"the {seconds:g} s were over") for kind in COLLECTIVE_KINDS]
            continue
        made.append(_own_group(axes, cluster))
        for kind in COLLECTIVE_KINDS:
            now = agree.now()
            share = (_FIRST_PART * seconds - (now - begin)) / max(1, len(left))
            left.remove((axes, kind))
            samples = _Samples(kind, made[-1], device)
            stopped = _sizes(samples, agree, sizes or SIZES[device.type], now + share)
            found.append((samples, kind, members))
            if stopped:
                missed.append((kind, members, stopped))
    turn = [(samples, size) for samples, _, _ in found for size in samples.seconds]
    for _ in range(_MOST_TURNS):
        if agree.now() + sum(samples.expected(size) for samples, size in turn) > begin + seconds:
            break
        for samples, size in turn:
            samples.take(size, agree)
    for group in made:
        dist.destroy_process_group(group)
    curves = tuple(samples.curve(members) for samples, _, members in found if samples.seconds)
    return CollectiveTable(curves), Coverage(curves, tuple(missed), agree.now() - begin)


def never_falling(values: Sequence[float]) -> list[float]:
    """The sequence that never falls and is nearest to `values` (above 0) in their logarithms.

    Neighbours that fall are pooled into their mean (Ayer et al. 1955, the pool-adjacent-violators algorithm).

    Examples
    --------
    >>> [round(value, 9) for value in never_falling([1.0, 4.0, 1.0, 8.0])]
    [1.0, 2.0, 2.0, 8.0]
    """
    pools: list[tuple[float, int]] = []  # the mean of some logarithms, and how many they are
    for value in values:
        mean, count = math.log(value), 1
        while pools and pools[-1][0] > mean:
            before, number = pools.pop()
            mean, count = (mean * count + before * number) / (count + number), count + number
        pools.append((mean, count))
    return [math.exp(mean) for mean, count in pools for _ in range(count)]


class _Agreement:
    """Numbers that all ranks have: the largest of theirs."""

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
        """Seconds of a clock that all ranks read alike."""
        return self.largest(time.perf_counter())

    def failed(self, error: Exception | None, what: str) -> str:
        """Why `what` did not work on any rank; "" where it worked on all; `ClusterError` where it worked on some."""
        least, most = -self.largest(-float(error is not None)), self.largest(float(error is not None))
        if most and not least:
            mine = f"rank {dist.get_rank()} failed: {error}" if error else f"not on this rank ({dist.get_rank()})"
            raise ClusterError(f"profiling {what}: expected all ranks to succeed, but some failed; {mine}") from error
        return str(error).splitlines()[0] if error is not None and most else ""


class _Samples:
    """Measured seconds a call of one kind of collective in one group, by size; the slowest rank's."""

    def __init__(self, kind: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.kind, self.group, self.device = kind, group, device
        self.bytes: dict[int, int] = {}
        self.seconds: dict[int, list[float]] = {}

    def take(self, size: int, agree: _Agreement) -> None:
        """Take one more sample of a size that has samples."""
        call, _ = _prepare(self.kind, size, self.group, self.device)
        calls = max(1, min(_MOST_CALLS, int(_BATCH_SECONDS / median(self.seconds[size]))))
        _seconds(call, 1, self.device)
        took = []
        for _ in range(calls):
            agree.largest(0.0)
            took.append(_seconds(call, 1, self.device))
        self.seconds[size].append(agree.mean(fmean(took)))

    def expected(self, size: int) -> float:
        """Seconds that one more sample will take, about."""
        return 3 * max(_BATCH_SECONDS, median(self.seconds[size]))

    def first(self, size: int, agree: _Agreement) -> str:
        """The first sample of a size; why there is none, where there is none."""
        what = f"{self.kind} of {_size(size)}"
        error, call, num_bytes = None, None, 0
        try:
            call, num_bytes = _prepare(self.kind, size, self.group, self.device)
        except (RuntimeError, MemoryError) as caught:  # out of memory
            error = caught
        if why := agree.failed(error, what):
            return why
        assert call is not None
        try:
            _seconds(call, 2, self.device)  # makes the connections
            once = _seconds(call, 1, self.device)
        except RuntimeError as caught:  # a backend without this collective
            error = caught
        if why := agree.failed(error, what):
            return why
        once = agree.largest(once)
        if num_bytes not in self.bytes.values():
            self.bytes[size], self.seconds[size] = num_bytes, [once]
        return ""

    def curve(self, members: tuple[int, ...]) -> Curve:
        """The medians, as a curve that never falls."""
        typical = [median(samples[1:] or samples) for samples in self.seconds.values()]
        return Curve(self.kind, members, tuple(map(float, self.bytes.values())), tuple(never_falling(typical)))


def _sizes(samples: _Samples, agree: _Agreement, sizes: Sequence[int], until: float) -> str:
    """A first sample at rising sizes until the time is up; why the largest are missing if they are."""
    for size in sizes:
        if why := samples.first(size, agree):
            return f"{_size(size)} and more: {why}"
        took = samples.seconds.get(size, [0.0])[0]
        if agree.now() + _GROWTH * took > until and size != sizes[-1]:
            return f"more than {_size(size)}: its part of the time was over"
    return ""


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


def _prepare(
    kind: str, size: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Callable[[], torch.Tensor], int]:
    """A collective over `group` as generated graphs call it, and the bytes of its whole buffer, near `size`."""
    members, name = group.size(), group.group_name
    part = max(1, size // 4 // members)
    whole = torch.zeros(part * members, dtype=torch.float32, device=device)
    shard = whole[:part].clone()
    torch.empty_like(whole)  # is there room for the result too? A lack of it can be told here, but not in the call
    starts: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: c10d.all_reduce(whole, "sum", name),
        "all_gather": lambda: c10d.all_gather_into_tensor(shard, members, name),
        "reduce_scatter": lambda: c10d.reduce_scatter_tensor(whole, "sum", members, name),
        "all_to_all": lambda: c10d.all_to_all_single(whole, [part] * members, [part] * members, name),
        "broadcast": lambda: c10d.broadcast(whole, 0, name),
    }
    start = starts[kind]
    return lambda: c10d.wait_tensor(start()), 4 * part * members


def _own_group(axes: Sequence[Axis], cluster: Machine) -> dist.ProcessGroup:
    """The group of this rank over `axes`; all ranks make all groups, in one order.

    Groups that their members make alone (``use_local_synchronization``) would be quicker in a world of thousands, but
    torch names these by their ranks: the next of the same ranks then finds the addresses of one that is gone.
    """
    mesh = cluster.mesh()
    groups = sorted({mesh.group_ranks(axes, rank) for rank in range(mesh.world_size)})
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        [list(group) for group in groups], timeout=PATIENCE
    )
    return mine


def _size(num_bytes: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes:g} B"


def _place(members: Sequence[int], names: Sequence[str]) -> str:
    return " x ".join(f"{count} {name}" for count, name in zip(members, names, strict=True) if count > 1)
