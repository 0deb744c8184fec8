"""Oases (arXiv 2305.16121): Table 3, what each part of its schedule adds to Megatron-LM's, on 32 RTX 3090.

Each cell is a forced plan of one tensor-parallel group: its degree by the baselines' best (Table 4), the planner's by
its Table 6. The rows fit with the all-reduce of data parallelism off the timed path, so that one group is planned
alone, on the nodes that it spans, its step timed without sums of gradients (there are some where a layer has a lower
degree than others), and its throughput counted for all of them; `data_parallel` brings the other groups back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import shardweave as sw
from shardweave.demo import GPTConfig
from shardweave.validation.rows import Paper, Row, table
from shardweave.validation.setting import Setting, captured

SEQUENCE, VOCABULARY = 1024, 51200  # GPT-2's, padded as Megatron-LM does
CLUSTERS = {"nvlink_3090": "oases-nvlink", "pcie_3090": "oases-pcie"}
MEGATRON = sw.Ablation(cross_pass=False, blocking=("activation",))
COLUMNS: dict[str, Mapping[str, Any]] = {
    "megatron_lm": {"sub_batches": 1, "recompute": "full", "ablation": MEGATRON},
    "merak": {"sub_batches": 2, "recompute": "full", "ablation": sw.Ablation(cross_pass=False)},
    "cross_pass": {"sub_batches": 2, "recompute": "full"},
    "fine_grained_recompute": {"sub_batches": 2, "recompute": "fine"},
    "planner": {"sub_batches": 2, "recompute": "fine"},
}
"""The overlap options of each column."""

Degrees = Sequence[tuple[int, int]]
"""Tensor-parallel degrees, each with its number of layers, from the first layer on."""


def rows(paper: Paper, setting: Setting) -> Iterator[Row]:
    """Table 3 in thousands of tokens per second, then the speedup of each column over Megatron-LM."""
    sizes = {row["hidden"]: row for row in table(paper, "oases", "models_table4")}
    planned = {
        (row["cluster"], row["hidden"]): row for row in table(paper, "oases", "planner_table6") if row["planner"]
    }
    columns = (paper.get("ablation_table3") or {}).get("columns", list(COLUMNS))
    for row in table(paper, "oases", "ablation_table3"):
        name, hidden = row["cluster"], row["hidden"]
        if name not in CLUSTERS or hidden not in sizes:
            raise sw.InputError(f"oases.yaml: expected one of {', '.join(CLUSTERS)} and a row of table 4, got {row}")
        model, cells = sizes[hidden], dict[str, Row]()
        for column, published in zip(columns, row["kts"], strict=True):
            if published is None or (column == "planner" and (name, hidden) not in planned):
                continue
            setting.progress(f"Oases Table 3: {name}, hidden {hidden}, {column}")
            degrees = planned[name, hidden]["strategy"] if column == "planner" else [(model["tmp"], model["layers"])]
            kts = partial(_kts, setting, CLUSTERS[name], model, degrees, COLUMNS[column])
            cells[column] = Row.of("Oases Table 3", f"{name}, hidden {hidden}", column, "k tokens/s", published, kts)
            yield cells[column]
        stated = dict(zip(columns, row.get("speedup") or [None] * len(columns), strict=True))
        yield from _speedups(cells, stated)


def _speedups(cells: Mapping[str, Row], stated: Mapping[str, float | None]) -> Iterator[Row]:
    """Speedups over the first column: published, and of the simulated steps."""
    first = cells.get(next(iter(stated)))
    for column, row in cells.items():
        published = stated[column]
        if published is not None and first is not None:
            gained = row.predicted / first.predicted if row.predicted and first.predicted else None
            yield replace(row, table="Oases Table 3, speedups", unit="x", published=published, predicted=gained)


def plan(
    setting: Setting,
    cluster: str,
    model: Mapping[str, Any],
    degrees: Degrees,
    overlap: Mapping[str, Any],
    *,
    data_parallel: bool = False,
) -> sw.Plan:
    """The forced plan of a row of Table 4."""
    whole, every = setting.cluster(cluster), model["tmp"] * model["dp"]
    gpus = every if data_parallel else max(model["tmp"], *(degree for degree, _ in degrees))
    in_node = whole.world_size // whole.levels[-1].size
    machine = whole.fitted(min(gpus, in_node), max(1, gpus // in_node))
    batch = model["global_batch"] * gpus // every
    config = GPTConfig(VOCABULARY, SEQUENCE, model["layers"], model["heads"], model["hidden"], bias=True)
    smallest = {degree: batch * degree // gpus for degree, _ in degrees}  # of what a device of such a layer has
    excluded = [name for name, degree in _degrees(degrees).items() if smallest[degree] % overlap["sub_batches"]]
    asked = {"force": _force(degrees), "micro_batches": 1, "sequence_parallel": False}
    asked["exclude_from_sub_batches"] = excluded
    return setting.plan(captured(config, batch, SEQUENCE), machine, **{**asked, **overlap})


def _kts(setting: Setting, cluster: str, model: Mapping[str, Any], *asked: Any) -> float:
    """Thousands of tokens per second on all devices."""
    seconds = plan(setting, cluster, model, *asked).timeline(sums=False).step_time
    return float(model["global_batch"] * SEQUENCE / seconds / 1e3)


def _force(degrees: Degrees) -> dict[str, str]:
    """The forced degree of the last layer, and of each module that differs from it."""
    last = degrees[-1][0]
    others = {name: f"tensor:{degree}" for name, degree in _degrees(degrees).items() if degree != last}
    others.pop("positions", None)  # it has no loop that is sharded
    return {"*": f"tensor:{last}", **others}


def _degrees(degrees: Degrees) -> dict[str, int]:
    """The degree of each layer, and of the modules before the first layer, which have its degree.

    >>> _degrees([(2, 1), (4, 2)])
    {'tokens': 2, 'positions': 2, 'blocks.0': 2, 'blocks.1': 4, 'blocks.2': 4}
    """
    every = [degree for degree, count in degrees for _ in range(count)]
    before = dict.fromkeys(("tokens", "positions"), every[0])
    return before | {f"blocks.{layer}": degree for layer, degree in enumerate(every)}
