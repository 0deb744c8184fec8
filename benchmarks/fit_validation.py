"""Fit the constants of a paper's clusters to its rows: ``python -m benchmarks.fit_validation FOLDER oases``.

Prints the values, which go into `shardweave/validation/clusters/` by hand, with `fitted: true`. A constant that several
clusters have with one range and one source is one constant. Rows without a plan are left out.

``--leave-out`` fits anew, from the committed values and to all rows but those of one model or size at a time, and
prints a Markdown table of the errors of the rows that were fitted to and of those that were not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import log

from shardweave.cost_model import Cluster
from shardweave.validation import ROWS, CalibratedCluster, Row, Setting, load
from shardweave.validation.clusters import Constant, fit
from shardweave.validation.rows import Paper, mean_error


@dataclass(frozen=True)
class Fitted:
    """What is fitted to: the clusters, the table, and of which model or size a row is."""

    clusters: tuple[str, ...]
    table: str
    part: Callable[[Row], str]


FITTED = {
    "amsp": Fitted(("amsp",), "AMSP Table V", lambda row: row.group),
    "axonn": Fitted(("axonn",), "AxoNN Table III", lambda row: row.name),
    "oases": Fitted(("oases-nvlink", "oases-pcie"), "Oases Table 3", lambda row: row.group.split(", ")[-1]),
    "osdp_profile": Fitted(("osdp-titan",), "OSDP profile, seconds", lambda row: row.group),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("paper", choices=sorted(FITTED))
    parser.add_argument("--constants", nargs="*", help="keys to fit; all of them by default, those fitted to leave out")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--leave-out", action="store_true", help="errors with one model or size left out")
    arguments = parser.parse_args()
    tables = load(arguments.folder)[arguments.paper]  # less what is not fitted to
    paper = {key: rows for key, rows in tables.items() if "ablation_20b" not in key and key != "mem_mb"}
    described = {name: CalibratedCluster.of(name) for name in FITTED[arguments.paper].clusters}
    chosen = arguments.constants
    if arguments.leave_out and chosen is None:
        chosen = [constant.key for each in described.values() for constant in each.constants if constant.fitted]
    constants, owners = constants_of(described, chosen)
    rows = Evaluated(arguments.paper, paper, described, owners)
    if arguments.leave_out:
        print_left_out(constants, rows, FITTED[arguments.paper].part)
    else:
        for key, value in fit(constants, lambda values: logarithms(rows(values)), arguments.rounds).items():
            print(key, f"{value:.4g}")


@dataclass
class Evaluated:
    """The rows of a paper's table at values of its clusters' constants; each set of values is simulated once."""

    paper: str
    tables: Paper
    described: Mapping[str, CalibratedCluster]
    owners: Mapping[str, tuple[str, ...]]
    known: dict[tuple[tuple[str, float], ...], list[Row]] = field(default_factory=dict)

    def __call__(self, values: Mapping[str, float]) -> list[Row]:
        key = tuple(sorted(values.items()))
        if key not in self.known:
            clusters = {name: with_values(each, name, values, self.owners) for name, each in self.described.items()}
            rows = ROWS[self.paper](self.tables, Setting(cluster=clusters.__getitem__))
            self.known[key] = [row for row in rows if row.table == FITTED[self.paper].table and row.predicted]
            shown = {key: float(f"{value:.3g}") for key, value in values.items()}
            print(f"{100 * (mean_error(self.known[key]) or 0):.2f} %", shown, flush=True)
        return self.known[key]


def print_left_out(constants: list[Constant], rows: Callable[[Mapping[str, float]], list[Row]],
                   part: Callable[[Row], str]) -> None:  # fmt: skip
    """A fit without each part, one step from where the constants are now."""
    first = {constant.key: constant.value for constant in constants}
    print("| left out | error of the others, fitted to | error of what is left out |\n| --- | --- | --- |")
    for out in dict.fromkeys(map(part, rows(first))):

        def errors(values: Mapping[str, float], out: str = out) -> list[float]:
            return logarithms([row for row in rows(values) if part(row) != out])

        found = rows(fit(constants, errors, rounds=1))
        kept, left = ([row for row in found if (part(row) == out) == side] for side in (False, True))
        print(f"| {out} | {100 * (mean_error(kept) or 0):.1f} % | {100 * (mean_error(left) or 0):.1f} % |", flush=True)


def logarithms(rows: list[Row]) -> list[float]:
    """Of predicted over published: a relative error counts alike in both directions."""
    return [log(row.predicted / row.published) for row in rows if row.predicted]


def constants_of(
    described: Mapping[str, CalibratedCluster], chosen: list[str] | None
) -> tuple[list[Constant], dict[str, tuple[str, ...]]]:
    """The constants to fit, each under a name of its own, and the clusters that each is of."""
    owners: dict[tuple[object, ...], list[str]] = {}
    first: dict[tuple[object, ...], Constant] = {}
    for name, each in described.items():
        for constant in each.constants:
            if chosen is None or constant.key in chosen:
                same = (constant.key, constant.low, constant.high, constant.source)
                owners.setdefault(same, []).append(name)
                first.setdefault(same, constant)
    named = {same: f"{'+'.join(names)}:{same[0]}" for same, names in owners.items()}
    constants = [replace(first[same], key=named[same]) for same in owners]
    return constants, {named[same]: tuple(names) for same, names in owners.items()}


def with_values(
    described: CalibratedCluster, name: str, values: Mapping[str, float], owners: Mapping[str, tuple[str, ...]]
) -> Cluster:
    """The cluster of a name with those of the values that are its own."""
    return described.with_values({key.split(":")[1]: value for key, value in values.items() if name in owners[key]})


if __name__ == "__main__":
    main()
