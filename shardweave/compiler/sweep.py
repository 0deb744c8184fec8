"""Sweeps: one model planned again and again, under other memory limits or on other clusters."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shardweave.brief import brief
from shardweave.compiler.plan import Plan
from shardweave.cost_model import Cluster, ClusterLike
from shardweave.errors import InfeasibleError, PlanError
from shardweave.units import bytes_of

if TYPE_CHECKING:
    from shardweave.report.report import Report

What = Literal["memory", "batch"] | Sequence[float | str] | Sequence[ClusterLike]
POINTS = 8
"""Memory limits of a curve that is asked for by ``"memory"``: the first and the last one, and some between."""


@dataclass(frozen=True)
class Point:
    """One planning: its memory limit (0: what the device has), cluster, and the plan or why there is none.

    `batch` is the batch size where that is open, else 0.
    """

    memory_limit: int
    cluster: Cluster
    plan: Plan | None
    reason: str = ""
    batch: int = 0

    def __repr__(self) -> str:
        return brief(self)

    @property
    def seconds(self) -> float:
        """What a step takes; a sample of it, where the batch size is open. Infinite without a plan."""
        return self.plan.step_time / (self.batch or 1) if self.plan is not None else math.inf

    @property
    def memory(self) -> int:
        """What the plan needs, bytes a device."""
        return self.plan.peak_memory if self.plan is not None else 0


@dataclass(frozen=True)
class Sweep:
    """What a model takes under several memory limits, on several clusters or in several batch sizes.

    Parameters
    ----------
    points : tuple of Point
        In the order they were asked for; of ``"memory"`` from the most memory to the least, of ``"batch"`` from the
        smallest batch to the largest.
    """

    points: tuple[Point, ...]

    def __repr__(self) -> str:
        fastest = f"; the fastest: {self.best!r}" if self.plans else ""
        return f"<Sweep of {len(self.points)} points, {len(self.plans)} with a plan{fastest}>"

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the points that have one."""
        return tuple(point.plan for point in self.points if point.plan is not None)

    @property
    def pareto(self) -> tuple[Plan, ...]:
        """The plans than which no other is both as fast (for each sample) and as small, from the smallest on."""
        found: list[Plan] = []
        least = math.inf
        for point in sorted(self.points, key=lambda point: (point.memory, point.seconds)):
            if point.plan is not None and point.seconds < least:
                found.append(point.plan)
                least = point.seconds
        return tuple(found)

    @property
    def best(self) -> Plan:
        """The fastest plan: of clusters of one price, the shape to take; of batch sizes, the fastest for each sample.

        Raises
        ------
        InfeasibleError
            No point has a plan.
        """
        plan = self._best.plan
        if plan is None:
            raise InfeasibleError(f"none of {len(self.points)} points has a plan: {self.points[0].reason}")
        return plan

    @property
    def batch(self) -> int:
        """The batch size of the best plan; 0 where it is not open."""
        return self._best.batch

    @property
    def _best(self) -> Point:
        return min(self.points, key=lambda point: (point.seconds, point.memory))

    def explain(self) -> Report:
        """The points as a table."""
        # As `Plan.explain`: a report knows plans, a plan no report.
        from shardweave.report.sweeps import explain

        return explain(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw step time over memory, and the curve that nothing is below, into a picture."""
        from shardweave.report.sweeps import plot

        plot(self, path)


Planned = Callable[[Cluster, int | None, Plan | None], Plan]
"""Plans on a cluster, under a memory limit, beginning at a plan."""


def sweep(what: What, cluster: Cluster, planned: Planned) -> Sweep:
    """The points of a sweep, each planned from the one before.

    Raises
    ------
    PlanError
        `what` is none of its kinds.
    """
    if what == "memory":
        return Sweep(_each_the_fastest([*_falling(cluster, planned)]))
    if isinstance(what, str) or not isinstance(what, Sequence) or not what:
        raise PlanError(
            f"sweep must be 'memory', 'batch', memory limits, or clusters, got {what!r}: for example "
            "sweep=['40GB', '80GB']"
        )
    found: list[Point] = []
    for each in what:
        last = found[-1].plan if found else None
        if isinstance(each, int | float) or (isinstance(each, str) and each[:1].isdigit()):
            found.append(_point(cluster, _bytes(each), last, planned))
        else:
            found.append(_point(Cluster.of(each), None, None, planned))
    return Sweep(_each_the_fastest(found))


def _bytes(limit: float | str) -> int:
    try:
        return bytes_of(limit)
    except ValueError as error:
        raise PlanError(f"a memory limit of a sweep is in bytes, or a size such as '20GB': {error}") from error


def _each_the_fastest(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points, each with the fastest plan found that fits it: one of less memory is a plan for more, too."""
    found = []
    for point in points:
        same = [other.plan for other in points if other.plan is not None and other.cluster is point.cluster]
        limit = point.memory_limit if point.plan is None else point.plan.memory_limit
        fits = [plan for plan in same if plan.peak_memory <= limit]
        fastest = min(fits, key=lambda plan: plan.step_time, default=None)
        if fastest is not None and (point.plan is None or fastest.step_time < point.plan.step_time):
            point = replace(point, plan=replace(fastest, memory_limit=limit), reason="")
        found.append(point)
    return tuple(found)


def _falling(cluster: Cluster, planned: Planned) -> Iterator[Point]:
    """From what the fastest plan needs down to the smallest memory of all, in equal ratios."""
    first = planned(cluster, None, None)
    yield Point(first.memory_limit, cluster, first)
    least = _smallest(cluster, planned)
    ratio = (least / first.peak_memory) ** (1 / (POINTS - 1))
    last = first
    for index in range(1, POINTS):
        limit = least if index == POINTS - 1 else int(first.peak_memory * ratio**index)
        point = _point(cluster, limit, last, planned)
        yield point
        last = point.plan or last


def _smallest(cluster: Cluster, planned: Planned) -> int:
    """The smallest memory that some plan does with."""
    try:
        return planned(cluster, 1, None).peak_memory
    except InfeasibleError as error:
        if error.needed_bytes is None:
            raise
        return error.needed_bytes


def _point(cluster: Cluster, limit: int | None, start: Plan | None, planned: Planned) -> Point:
    try:
        plan = planned(cluster, limit, start)
    except InfeasibleError as error:
        return Point(limit or 0, cluster, None, str(error))
    return Point(plan.memory_limit, cluster, plan)
