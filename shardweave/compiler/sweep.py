"""Sweeps: one model planned under several memory limits, on several clusters, or for growing batch sizes.

OSDP (arXiv 2209.13258, Algorithm 1) plans for one batch size after another until none fits, and takes the plan with
the most samples a second. Larger batches mostly spend less on communication for each sample, until memory forces
slower plans. So the batch size is doubled here until nothing fits or nothing is gained. Then the interval between the
best size and the next larger one, which is slower or does not fit, is halved a few times.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from shardweave.compiler.compiler import Compiler
from shardweave.cost_model import Cluster, ClusterLike, Options
from shardweave.ir import InfeasibleError, PlanError, brief, bytes_of, readable_bytes, readable_seconds
from shardweave.planner import Plan
from shardweave.report import Report, Reporter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SweepTarget = Literal["memory", "batch"] | Sequence[float | str] | Sequence[ClusterLike]
MEMORY_CURVE_POINTS = 8
"""The number of memory limits of a sweep over ``"memory"``, the first and the last one included."""


@dataclass(frozen=True)
class Point:
    """A memory limit (0 for the device's memory) and a cluster, with the plan or the reason why there is none.

    `batch` is the batch size in a sweep over batch sizes, else 0.
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
        """Seconds a step, or a sample in a sweep over batch sizes; infinite without a plan."""
        return self.plan.step_time / (self.batch or 1) if self.plan is not None else math.inf

    @property
    def memory(self) -> int:
        """The plan's peak memory, bytes a device."""
        return self.plan.peak_memory if self.plan is not None else 0

    def row(self, is_best: bool) -> tuple[str, ...]:
        """The cells of the point in `Sweep.explain`."""
        cluster = f"{self.cluster.name} ({self.cluster.world_size})"
        batch = (str(self.batch),) if self.batch else ()
        limit = readable_bytes(self.memory_limit) if self.memory_limit else "the device's"
        plan = self.plan
        if plan is None:
            return cluster, *batch, limit, "-", "-", "-", "-", "-", "nothing fits"
        return (
            cluster,
            *batch,
            limit,
            readable_seconds(plan.step_time),
            readable_bytes(plan.peak_memory),
            readable_seconds(plan.exposed_communication),
            f"{plan.tokens_per_second:,.0f}",
            f"{100 * plan.gap:.2g} %",
            "*" if is_best else "",
        )


@dataclass(frozen=True)
class Sweep:
    """Plans of one model under several memory limits, on several clusters or for several batch sizes.

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
        """The Pareto curve: plans with no other one that is as fast and as small, in the order of their memory.

        In a sweep over batch sizes, the time is that of one sample.
        """
        found: list[Plan] = []
        least = math.inf
        for point in sorted(self.points, key=lambda point: (point.memory, point.seconds)):
            if point.plan is not None and point.seconds < least:
                found.append(point.plan)
                least = point.seconds
        return tuple(found)

    @property
    def best(self) -> Plan:
        """The fastest plan; in a sweep over batch sizes, the fastest for each sample.

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
        """The batch size of the best plan; 0 in a sweep that is not over batch sizes."""
        return self._best.batch

    @property
    def _best(self) -> Point:
        return min(self.points, key=lambda point: (point.seconds, point.memory))

    def explain(self) -> Report:
        """A table of the points; a star marks the plans of the Pareto curve."""
        best = {id(plan) for plan in self.pareto}
        batch = ("batch ",) if self._has_batches else ()
        columns = ("cluster", *batch, "memory limit ", "step ", "memory ", "exposed comm. ", "tokens/s ", "gap ", "")
        rows = tuple(point.row(id(point.plan) in best) for point in self.points)
        title = f"{len(self.plans)} of {len(self.points)} points have a plan; * nothing is both faster and smaller"
        return Report((title,), columns, rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Save a picture of step time over memory, with the Pareto curve. matplotlib draws it."""
        self._figure().savefig(path, dpi=150, bbox_inches="tight")

    @property
    def _has_batches(self) -> bool:
        return any(point.batch for point in self.points)

    def _figure(self) -> Figure:
        """The points, one colour a cluster, and the Pareto curve."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4))
        axes = figure.add_subplot()
        planned = [(point, point.memory / 2**30, point.seconds * 1e3) for point in self.points if point.plan]
        for name, devices in dict.fromkeys((point.cluster.name, point.cluster.world_size) for point, _, _ in planned):
            own = [each for each in planned if (each[0].cluster.name, each[0].cluster.world_size) == (name, devices)]
            axes.scatter([x for _, x, _ in own], [y for _, _, y in own], label=f"{name}, {devices} devices", zorder=2)
            for point, memory, time in own:
                if point.batch:
                    axes.annotate(str(point.batch), (memory, time), xytext=(4, 4), textcoords="offset points")
        best = {id(plan) for plan in self.pareto}
        curve = sorted((memory, time) for point, memory, time in planned if id(point.plan) in best)
        axes.step([x for x, _ in curve], [y for _, y in curve], where="post", color="0.6", zorder=1)
        axes.set_xlabel("memory a device (GiB)")
        axes.set_ylabel("time a sample (ms)" if self._has_batches else "step time (ms)")
        axes.legend(frameon=False)
        return figure


def sweep_options(compiler: Compiler, what: SweepTarget) -> Sweep:
    """The plans of a captured model for several memory limits or clusters.

    The search for each plan starts at the plan of the point before.

    Raises
    ------
    PlanError
        `what` is not a target of a sweep.
    """
    if what == "memory":
        return Sweep(_with_fastest_plans([*_memory_curve(compiler)]))
    if isinstance(what, str) or not isinstance(what, Sequence) or not what:
        raise PlanError(
            f"sweep must be 'memory', 'batch', memory limits, or clusters, got {what!r}: for example "
            "sweep=['40GB', '80GB']"
        )
    found: list[Point] = []
    for each in what:
        last = found[-1].plan if found else None
        if isinstance(each, int | float) or (isinstance(each, str) and each[:1].isdigit()):
            found.append(_point(compiler, _bytes(each), last))
        else:
            found.append(_point(compiler.with_(Cluster.of(each)), None, None))
    return Sweep(_with_fastest_plans(found))


def _bytes(limit: float | str) -> int:
    try:
        return bytes_of(limit)
    except ValueError as error:
        raise PlanError(f"a memory limit of a sweep is in bytes, or a size such as '20GB': {error}") from error


def _with_fastest_plans(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points, each with the fastest of all plans on its cluster that fits its memory limit."""
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


def _memory_curve(compiler: Compiler) -> Iterator[Point]:
    """Points from the memory of the fastest plan down to the smallest possible memory, in equal ratios."""
    first = _plan(compiler, None)
    yield Point(first.memory_limit, compiler.cluster, first)
    try:
        least = _plan(compiler, 1).peak_memory
    except InfeasibleError as error:
        if error.needed_bytes is None:
            raise
        least = error.needed_bytes
    ratio = (least / first.peak_memory) ** (1 / (MEMORY_CURVE_POINTS - 1))
    last = first
    for index in range(1, MEMORY_CURVE_POINTS):
        limit = least if index == MEMORY_CURVE_POINTS - 1 else int(first.peak_memory * ratio**index)
        point = _point(compiler, limit, last)
        yield point
        last = point.plan or last


def _point(compiler: Compiler, limit: int | None, start: Plan | None) -> Point:
    try:
        plan = _plan(compiler, limit, start)
    except InfeasibleError as error:
        return Point(limit or 0, compiler.cluster, None, str(error))
    return Point(plan.memory_limit, compiler.cluster, plan)


def _plan(compiler: Compiler, limit: int | None, start: Plan | None = None) -> Plan:
    options = compiler.options if limit is None else replace(compiler.options, memory_limit=limit)
    limited = "" if limit is None else f", at most {readable_bytes(limit)}"
    compiler.progress.planned = f"{compiler.cluster.name}{limited}"
    return compiler.with_(options=options).plan(start=start)


MIN_DOUBLING_GAIN = 0.01
"""Doubling of the batch size stops when it saves less than this fraction of a sample's time."""

MAX_HALVINGS = 3
"""Halvings of the interval between the best batch size and the next larger one that is slower, or does not fit."""


def sweep_batches(
    model: nn.Module,
    cluster: ClusterLike,
    example_inputs: Callable[[int], Any],
    options: Options | None,
    progress: Reporter,
) -> Sweep:
    """The plans of several batch sizes, from the smallest on; `Sweep.batch` is the best.

    Parameters
    ----------
    example_inputs : callable
        From a global batch size, in samples, to a batch.
    options : Options, optional
        All plans have its memory limit. They have one micro-batch unless it says otherwise.
    """
    cluster, options = Cluster.of(cluster), options or Options()
    options = replace(options, micro_batches=options.micro_batch_count)
    points: dict[int, Point] = {}

    def seconds(size: int) -> float:
        """Seconds that a sample takes; infinite where nothing fits."""
        progress.planned = f"batch {size}"
        plan, reason = None, ""
        try:
            plan = Compiler(model, cluster, example_inputs(size), options, progress).plan()
        except InfeasibleError as error:
            reason = str(error)
        points[size] = Point(options.limit(cluster), cluster, plan, reason, size)
        return points[size].seconds

    # 1. Start with one sample a device, or with fewer where that does not fit. `high` is slower than `low`, or does not
    # fit.
    low, high = cluster.world_size, 0
    least = seconds(low)
    while least == math.inf and low > 1:
        low, high = low // 2, low
        least = seconds(low)
    # 2. Double until nothing fits or little is gained.
    gained = least < math.inf
    while gained and not high:
        found = seconds(2 * low)
        gained = found <= least * (1 - MIN_DOUBLING_GAIN)
        if found < least:
            low, least = 2 * low, found
        else:
            high = 2 * low
    # 3. Halve the interval between the best size and the first that is slower, or does not fit.
    for _ in range(MAX_HALVINGS if high and least < math.inf else 0):
        middle = (low + high) // 2
        middle -= middle % min(cluster.world_size, low)  # all devices get the same number of samples
        if not low < middle < high:
            break
        found = seconds(middle)
        if found < least:
            low, least = middle, found
        else:
            high = middle
    return Sweep(tuple(points[size] for size in sorted(points)))
