"""Fit the constants of a paper's clusters to its rows: ``python -m docs.fit_validation FOLDER oases``.

Prints the values, which go into `shardweave/validation/clusters/` by hand, with `fitted: true`. A constant that several
clusters have with one range and one source is one constant. Rows without a plan are left out. Half an hour for AMSP.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from math import log

from shardweave.cost_model import Cluster
from shardweave.validation import Described, Setting, load
from shardweave.validation.clusters import Constant
from shardweave.validation.fitting import fit
from shardweave.validation.papers import ROWS

FITTED = {
    "amsp": (("amsp",), "AMSP Table V"),
    "axonn": (("axonn",), "AxoNN Table III"),
    "oases": (("oases-nvlink", "oases-pcie"), "Oases Table 3"),
}
"""Of each paper the clusters, and the table that they are fitted to."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("paper", choices=sorted(FITTED))
    parser.add_argument("--constants", nargs="*", help="keys to fit; all of them by default")
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    names, table = FITTED[arguments.paper]
    paper = {key: rows for key, rows in load(arguments.folder)[arguments.paper].items() if "ablation_20b" not in key}
    described = {name: Described.of(name) for name in names}
    constants, owners = constants_of(described, arguments.constants)

    def errors(values: Mapping[str, float]) -> list[float]:
        clusters = {name: with_values(described[name], name, values, owners) for name in names}
        rows = ROWS[arguments.paper](paper, Setting(cluster=clusters.__getitem__))
        found = [log(row.predicted / row.published) for row in rows if row.table == table and row.predicted]
        mean = sum(map(abs, found)) / len(found)
        print(f"{100 * mean:.2f} %", {key: float(f"{value:.3g}") for key, value in values.items()}, flush=True)
        return found

    for key, value in fit(constants, errors, arguments.rounds).items():
        print(key, f"{value:.4g}")


def constants_of(
    described: Mapping[str, Described], chosen: list[str] | None
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
    described: Described, name: str, values: Mapping[str, float], owners: Mapping[str, tuple[str, ...]]
) -> Cluster:
    return described.with_values({key.split(":")[1]: value for key, value in values.items() if name in owners[key]})


if __name__ == "__main__":
    main()
