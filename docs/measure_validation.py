"""What each effect is worth to the tables of docs/validation.md: ``python -m docs.measure_validation FOLDER oases``.

Prints a Markdown table: the mean error of each table and the rank correlation within its groups, with everything the
simulator knows and with one effect left out, without fitting anew. Four minutes an effect for AMSP, one for the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardweave.cost_model import Cluster
from shardweave.validation import Result, Row, Setting, load
from shardweave.validation.clusters import cluster_of
from shardweave.validation.papers import ROWS
from shardweave.validation.rows import mean_error, rank_correlations


@dataclass(frozen=True)
class Effect:
    """One thing left out: of the machine, or of what is asked of the compiler."""

    cluster: Callable[[Cluster], Cluster] = lambda cluster: cluster
    options: Mapping[str, Any] = field(default_factory=dict)

    def setting(self) -> Setting:
        return Setting(cluster=lambda name: self.cluster(cluster_of(name)), options=self.options)


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
    return replace(cluster, device=replace(cluster.device, overlap_slowdown=1.0))


EFFECTS = {
    "nothing left out": Effect(),
    "sharing of a node's NICs": Effect(_alone),
    "latency of collectives": Effect(_prompt),
    "slowdown of overlapped compute": Effect(_undisturbed),
    "recomputation": Effect(options={"recompute": "none", "memory_limit": 2**50}),
    "optimizer's moments": Effect(options={"optimizer": "sgd"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("paper", choices=sorted(ROWS))
    arguments = parser.parse_args()
    paper = load(arguments.folder)[arguments.paper]
    print("| left out | table | mean error | largest error | rank correlation |\n| --- | --- | --- | --- | --- |")
    for name, effect in EFFECTS.items():
        for table, rows in Result(tuple(ROWS[arguments.paper](paper, effect.setting()))).tables.items():
            print(f"| {name} | {table} | {_said(rows)} |", flush=True)


def _said(rows: tuple[Row, ...]) -> str:
    mean, errors = mean_error(rows), [row.error for row in rows if row.error is not None]
    ranks = ", ".join(f"{group} {value:.2f}" for group, value in rank_correlations(rows).items())
    return f"{100 * (mean or 0):.1f} % | {100 * max(errors, key=abs, default=0):+.0f} % | {ranks}"


if __name__ == "__main__":
    main()
