"""What each effect is worth to the tables of docs/validation.md.

python -m benchmarks.measure_validation FOLDER oases

Prints a Markdown table: the mean error of each table and the rank correlation within its groups, with everything the
simulator knows and with one effect left out, without fitting anew; draws the mean errors with ``--figure``. Four
minutes an effect for AMSP, one or two for the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from shardweave.cost_model import Cluster
from shardweave.validation import ROWS, Result, Row, Setting, load
from shardweave.validation.clusters import cluster_of
from shardweave.validation.rows import mean_error, rank_correlations


@dataclass(frozen=True)
class Effect:
    """One thing left out: of the machine, or of what is asked of the compiler."""

    cluster: Callable[[Cluster], Cluster] = lambda cluster: cluster
    options: Mapping[str, Any] = field(default_factory=dict)
    ablation: Mapping[str, Any] = field(default_factory=dict)

    def setting(self) -> Setting:
        cluster = self.cluster
        return Setting(cluster=lambda name: cluster(cluster_of(name)), options=self.options, ablation=self.ablation)


def _alone(cluster: Cluster) -> Cluster:
    """Each device has the links by which its whole node enters a level for itself."""
    levels, devices = [], 1
    for level in cluster.levels:
        whole = level.shared_bandwidth or level.bandwidth * devices
        levels.append(replace(level, bandwidth=whole, shared_bandwidth=None))
        devices *= level.size
    return replace(cluster, levels=tuple(levels))


def _prompt(cluster: Cluster) -> Cluster:
    levels = tuple(replace(level, latency=0.0) for level in cluster.levels)
    return replace(cluster, levels=levels, device=replace(cluster.device, collective_latency=0.0))


def _undisturbed(cluster: Cluster) -> Cluster:
    return replace(cluster, device=replace(cluster.device, overlap_slowdown=1.0, collective_slowdown=1.0))


EFFECTS = {
    "nothing left out": Effect(),
    "sharing of a node's NICs": Effect(_alone),
    "latency of collectives": Effect(_prompt),
    "slowdown of what overlaps": Effect(_undisturbed),
    "recomputation": Effect(options={"recompute": "none", "memory_limit": 2**50}),
    "optimizer's moments": Effect(options={"optimizer": "sgd"}),
    "gradient all-reduces": Effect(ablation={"all_reduce_gradients": False}),
}


Errors = dict[str, dict[str, float]]
"""For each table what was left out, and the mean error then."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("paper", choices=sorted(ROWS))
    parser.add_argument("--figure", type=Path, help="where to draw the mean errors")
    arguments = parser.parse_args()
    paper = load(arguments.folder)[arguments.paper]
    errors: Errors = {}
    print("| left out | table | mean error | largest error | rank correlation |\n| --- | --- | --- | --- | --- |")
    for name, effect in EFFECTS.items():
        for table, rows in Result(tuple(ROWS[arguments.paper](paper, effect.setting()))).tables.items():
            errors.setdefault(table, {})[name] = mean_error(rows) or 0.0
            print(f"| {name} | {table} | {_said(rows)} |", flush=True)
    if arguments.figure is not None:
        drawn(errors).savefig(arguments.figure, dpi=110)


def drawn(errors: Errors) -> Figure:
    """A bar for each effect in each table, the table as it is as a line; tables that nothing changes are left out."""
    shown = {table: found for table, found in errors.items() if len(set(found.values())) > 1}
    figure = Figure(figsize=(4.5 + 3.2 * max(1, len(shown)), 3), layout="constrained")
    for axes, (table, found) in zip(
        figure.subplots(1, max(1, len(shown)), sharey=True, squeeze=False)[0], shown.items()
    ):
        first, *others = found
        axes.barh(others, [100 * found[each] for each in others], color="#1f5fa8")
        axes.axvline(100 * found[first], color="#c2571a", label=first)
        axes.set_title(table, fontsize=9)
        axes.set_xlabel("mean error, %")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _said(rows: tuple[Row, ...]) -> str:
    mean, errors = mean_error(rows), [row.error for row in rows if row.error is not None]
    ranks = ", ".join(f"{group} {value:.2f}" for group, value in rank_correlations(rows).items())
    return f"{100 * (mean or 0):.1f} % | {100 * max(errors, key=abs, default=0):+.0f} % | {ranks}"


if __name__ == "__main__":
    main()
