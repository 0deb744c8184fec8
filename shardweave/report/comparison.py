"""A comparison with other systems as a table."""

from __future__ import annotations

from shardweave.compiler.comparison import Comparison, Entry
from shardweave.report.report import Report
from shardweave.units import readable_bytes, readable_seconds


def comparison_report(comparison: Comparison, every: bool = False) -> Report:
    """The planner's own plan, then the fastest setting of each system, or `every` one; how much longer each takes."""
    own, best = comparison.own, comparison.best
    assert own.plan is not None
    title = f"{own.plan.cluster.name}, {own.plan.cluster.world_size} devices: {readable_seconds(own.step_time)} a step"
    gained = "no baseline fits" if best is None else f"{100 * comparison.gain:+.1f} % for {best.baseline}"
    shown = comparison.baselines if every else _of_each_system(comparison.baselines)
    lines = title, f"the best of {len(comparison.baselines)} baselines: {gained}"
    columns = ("system", "micro-batches ", "a step ", "longer ", "exposed comm. ", "memory ", "source, or why not")
    return Report(lines, columns, tuple(_row(entry, own) for entry in (own, *shown)))


def _of_each_system(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    first: dict[str, Entry] = {}
    for entry in entries:
        first.setdefault(entry.baseline.name, entry)
    return tuple(first.values())


def _row(entry: Entry, own: Entry) -> tuple[str, ...]:
    if entry.plan is None:
        return str(entry.baseline), "", "", "", "", "", entry.reason
    return (
        str(entry.baseline),
        str(entry.plan.micro_batches),
        readable_seconds(entry.step_time),
        f"{100 * (entry.step_time / own.step_time - 1):+.1f} %",
        readable_seconds(entry.plan.exposed_communication),
        readable_bytes(entry.plan.peak_memory),
        entry.baseline.source,
    )
