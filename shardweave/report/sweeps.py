"""Sweeps as a table and as a picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardweave.compiler.sweep import Point, Sweep
from shardweave.report.report import Report
from shardweave.units import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def explain(sweep: Sweep) -> Report:
    """Each point: its limit, what its plan takes and holds, and whether another one is both faster and smaller."""
    best = {id(plan) for plan in sweep.pareto}
    open_batch = any(point.batch for point in sweep.points)
    batch = ("batch ",) if open_batch else ()
    columns = ("cluster", *batch, "memory limit ", "step ", "memory ", "exposed comm. ", "tokens/s ", "gap ", "")
    rows = tuple(_row(point, point.plan is not None and id(point.plan) in best) for point in sweep.points)
    title = f"{len(sweep.plans)} of {len(sweep.points)} points have a plan; * nothing is both faster and smaller"
    return Report((title,), columns, rows)


def _row(point: Point, is_best: bool) -> tuple[str, ...]:
    cluster = f"{point.cluster.name} ({point.cluster.world_size})"
    of_batch = (str(point.batch),) if point.batch else ()
    limit = readable_bytes(point.memory_limit) if point.memory_limit else "the device's"
    plan = point.plan
    if plan is None:
        return cluster, *of_batch, limit, "-", "-", "-", "-", "-", "nothing fits"
    return (
        cluster,
        *of_batch,
        limit,
        readable_seconds(plan.step_time),
        readable_bytes(plan.peak_memory),
        readable_seconds(plan.exposed_communication),
        f"{plan.tokens_per_second:,.0f}",
        f"{100 * plan.gap:.2g} %",
        "*" if is_best else "",
    )


def plot(sweep: Sweep, path: str | os.PathLike[str]) -> None:
    """Step time over memory, of a sample where the batch size is open."""
    figure = draw(sweep)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def draw(sweep: Sweep) -> Figure:
    """The points, one colour a cluster, and the curve of those that nothing is both faster and smaller than."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    planned = [point for point in sweep.points if point.plan is not None]
    for name, devices in dict.fromkeys((point.cluster.name, point.cluster.world_size) for point in planned):
        own = [point for point in planned if (point.cluster.name, point.cluster.world_size) == (name, devices)]
        memory, times = [point.memory / 2**30 for point in own], [point.seconds * 1e3 for point in own]
        axes.scatter(memory, times, label=f"{name}, {devices} devices", zorder=2)
        for point in own:
            if point.batch:
                axes.annotate(str(point.batch), (point.memory / 2**30, point.seconds * 1e3), xytext=(4, 4),
                              textcoords="offset points")  # fmt: skip
    best = {id(plan) for plan in sweep.pareto}
    curve = sorted((point for point in planned if id(point.plan) in best), key=lambda point: point.memory)
    axes.step(
        [point.memory / 2**30 for point in curve],
        [point.seconds * 1e3 for point in curve],
        where="post",
        color="0.6",
        zorder=1,
    )
    axes.set_xlabel("memory a device (GiB)")
    axes.set_ylabel("time a sample (ms)" if any(point.batch for point in planned) else "step time (ms)")
    axes.legend(frameon=False)
    return figure
