"""Measures the collectives of the running process group, as a training step runs them.

For every kind, every placement of a group that the world's mesh has, and sizes from 4 KiB on by factors of 4: the same
functional collectives that generated graphs call, with all groups of a placement at work at the same time, one call
after the other. A figure is the median of a few batches, each as long as its slowest rank took; as other work on the
machine only ever adds time, it is also at most the figure of any larger size. Whatever the ranks decide by the clock
(how often to repeat, when the time is up) they decide by numbers that they have agreed on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shardweave.cost_model.cluster import Cluster
from shardweave.cost_model.collectives import group_extents
from shardweave.cost_model.measured import KINDS, CollectiveTable, Curve
from shardweave.errors import ClusterError
from shardweave.ir import Axis, axes_size

PATIENCE = timedelta(seconds=60)
"""How long a rank waits for the others in one step of the profile before it fails."""

SIZES = {"cpu": tuple(4**k * 1024 for k in range(1, 9)), "cuda": tuple(4**k * 1024 for k in range(1, 10))}
"""Bytes of the whole buffer: from 4 KiB to 64 MiB, and to 256 MiB on GPUs."""

_BATCHES = 5
_BATCH_SECONDS = 0.03
_MOST_CALLS = 20

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Coverage:
    """What a profile measured, and what not: for the reader."""

    curves: tuple[Curve, ...]
    missed: tuple[tuple[str, tuple[int, ...], str], ...]
    seconds: float

    def text(self, cluster: Cluster) -> str:
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


def placements(cluster: Cluster) -> list[tuple[Axis, ...]]:
    """Axes for each distinct count of members per level that a group over the mesh can have; fewest levels first.

    Examples
    --------
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
    cluster: Cluster, world: dist.ProcessGroup, *, seconds: float = 30.0, sizes: Sequence[int] | None = None
) -> tuple[CollectiveTable, Coverage]:
    """Measure the collectives of all placements; every rank of the running world must call it.

    Parameters
    ----------
    cluster : Cluster
        The running world, as `Cluster.detect` sees it.
    world : ProcessGroup
        All ranks, with a timeout: in it the ranks agree.
    seconds : float
        Time that may be spent, in all. Each kind and placement gets an equal part of what is left.
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
    left = [(axes, kind) for axes in groups for kind in KINDS]
    curves, missed = [], []
    for axes in groups:
        members = group_extents(axes, cluster)
        spent = agree.now() - begin
        if spent > seconds:
            missed += [(kind, members, f"the {seconds:g} s were over") for kind in KINDS]
            continue
        group = _own_group(axes, cluster)
        for kind in KINDS:
            now = agree.now()
            share = (seconds - (now - begin)) / max(1, len(left))
            left.remove((axes, kind))
            points, stopped = _points(kind, group, agree, device, sizes or SIZES[device.type], now + share)
            if points:
                xs, ys = zip(*points, strict=True)
                least = tuple(itertools.accumulate(reversed(ys), min))[::-1]
                curves.append(Curve(kind, members, tuple(map(float, xs)), least))
            if stopped:
                missed.append((kind, members, stopped))
        dist.destroy_process_group(group)
    return CollectiveTable(tuple(curves)), Coverage(tuple(curves), tuple(missed), agree.now() - begin)


class _Agreement:
    """Numbers that all ranks have: the largest of theirs."""

    def __init__(self, world: dist.ProcessGroup, device: torch.device) -> None:
        self.world, self.device = world, device

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers; also a barrier."""
        value = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.world)
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


def _points(
    kind: str,
    group: dist.ProcessGroup,
    agree: _Agreement,
    device: torch.device,
    sizes: Sequence[int],
    until: float,
) -> tuple[list[tuple[int, float]], str]:
    """(bytes, seconds) at rising sizes until the time is up, and why the largest are missing if they are."""
    points: list[tuple[int, float]] = []
    for size in sizes:
        what = f"{kind} of {_size(size)}"
        error, call, num_bytes = None, None, 0
        try:
            call, num_bytes = _prepare(kind, size, group, device)
        except (RuntimeError, MemoryError) as caught:  # out of memory
            error = caught
        if why := agree.failed(error, what):
            return points, f"{_size(size)} and more: {why}"
        assert call is not None
        try:
            _seconds(call, 2, device)  # makes the connections
            once = _seconds(call, 1, device)
        except RuntimeError as caught:  # a backend without this collective
            error = caught
        if why := agree.failed(error, what):
            return points, f"{_size(size)} and more: {why}"
        once = agree.largest(once)
        calls = max(1, min(_MOST_CALLS, int(_BATCH_SECONDS / once)))
        batches = [agree.largest(_seconds(call, calls, device)) / calls for _ in range(_BATCHES)]
        if not points or num_bytes > points[-1][0]:
            points.append((num_bytes, median(batches)))
        if agree.now() + 4 * (3 + _BATCHES) * median(batches) > until and size != sizes[-1]:
            return points, f"more than {_size(size)}: its part of the time was over"
    return points, ""


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


def _own_group(axes: Sequence[Axis], cluster: Cluster) -> dist.ProcessGroup:
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
