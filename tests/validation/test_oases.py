"""Oases: its table's cells have the overlap of their systems, and constants can be fitted to them."""

from __future__ import annotations

from functools import partial
from math import log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.cost_model import Cluster
from shardweave.ir import Grid
from shardweave.ir.errors import InputError
from shardweave.validation import CalibratedCluster, Constant, Setting, oases
from shardweave.validation.clusters import fit

MODEL = {"hidden": 256, "layers": 3, "heads": 8, "tmp": 4, "dp": 8, "global_batch": 32}
PAPER: dict[str, Any] = {
    "models_table4": {"rows": [MODEL]},
    "ablation_table3": {
        "columns": list(oases.COLUMNS),
        "rows": [{"cluster": "pcie_3090", "hidden": 256, "kts": [10.0, 11.0, 12.0, None, 14.0],
                  "speedup": [None, 1.1, 1.2, 1.3, None]}],
    },
    "planner_table6": {
        "rows": [{"cluster": "pcie_3090", "hidden": 256, "planner": True, "strategy": [[2, 1], [4, 2]]}]
    },
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oases, "SEQUENCE", 64)
    monkeypatch.setattr(oases, "VOCABULARY", 512)


def test_each_column_is_a_row() -> None:
    """What is not published is left out; two sub-batches that communicate in turn are no slower than Megatron-LM."""
    found = list(oases.rows(PAPER, Setting()))
    rows = {row.name: row for row in found if row.table == "Oases Table 3"}
    assert list(rows) == ["megatron_lm", "merak", "cross_pass", "planner"]
    assert all(row.predicted is not None and row.published >= 10 for row in rows.values())
    gained = {row.name: row for row in found if row.table == "Oases Table 3, speedups"}
    assert {name: row.published for name, row in gained.items()} == {"merak": 1.1, "cross_pass": 1.2}
    first = rows["megatron_lm"].predicted or 0.0
    assert all(row.predicted == pytest.approx((rows[name].predicted or 0.0) / first) for name, row in gained.items())
    with pytest.raises(InputError, match="a row of table 4"):
        list(oases.rows({**PAPER, "models_table4": {"rows": []}}, Setting()))


def test_one_group_stands_for_all() -> None:
    """By default no gradient is reduced over data-parallel groups; layers have the degrees that they are given."""
    plan = partial(oases.plan, Setting(), "oases-pcie", MODEL)
    alone = plan([(4, 3)], oases.COLUMNS["fine_grained_recompute"])
    every = plan([(4, 3)], oases.COLUMNS["fine_grained_recompute"], data_parallel=True)
    mixed = plan([(2, 1), (4, 2)], oases.COLUMNS["planner"])
    assert (alone.cluster.world_size, every.cluster.world_size) == (4, 32)
    assert every.tokens == 8 * alone.tokens and every.step_time > alone.step_time
    assert alone.overlap.sub_batches == 2 and set(alone.overlap.recompute.values()) == {"fine"}
    wide = plan([(4, 2), (8, 1)], oases.COLUMNS["planner"])  # a group is as large as its largest degree
    assert (wide.cluster.world_size, wide.tokens) == (8, 2 * alone.tokens)
    degrees = [mixed.choices[f"blocks.{layer}.up"].strategy.grid for layer in range(3)]
    assert degrees == [Grid(x=2, data=2), Grid(x=4), Grid(x=4)]


def test_layers_too_small_for_sub_batches_are_left_out_of_them() -> None:
    """Of a batch of two, a device of a layer of degree 2 has one sample; sums over its other half are not timed."""
    small = {**MODEL, "global_batch": 16}
    *built, planner = (row for row in oases.rows({**PAPER, "models_table4": {"rows": [small]}}, Setting())
                       if row.table == "Oases Table 3")  # fmt: skip
    assert all(row.predicted is not None and not row.reason for row in (*built, planner))
    plan = oases.plan(Setting(), "oases-pcie", small, [(2, 1), (4, 2)], oases.COLUMNS["planner"])
    assert plan.overlap.exclude_from_sub_batches == ("tokens", "positions", "blocks.0")
    assert plan.overlap.sub_batches == 2
    assert planner.predicted == pytest.approx(16 * oases.SEQUENCE / plan.timeline(sums=False).step_time / 1e3)
    assert plan.timeline(sums=False).step_time < plan.timeline().step_time


def test_what_cannot_be_built_has_no_figure() -> None:
    table = {"rows": [{**PAPER["planner_table6"]["rows"][0], "strategy": [[3, 1], [4, 2]]}]}
    *built, planner = (row for row in oases.rows({**PAPER, "planner_table6": table}, Setting())
                       if row.table == "Oases Table 3")  # fmt: skip
    assert planner.predicted is None and "'tensor:3'" in planner.reason
    assert all(row.predicted is not None and not row.reason for row in built)


@given(st.floats(0.5, 3.0), st.floats(0.5, 3.0))
def test_a_fit_finds_what_made_the_rows(speed: float, width: float) -> None:
    """Where the rows decide the constants; no error is larger than it was."""
    constants = [Constant(key, 1.2, 0.5, 3.0, "", True) for key in ("speed", "width")]

    def errors(values: Any) -> list[float]:
        made = [(values["speed"], speed), (values["speed"] * values["width"], speed * width)]
        return [log((1 + one) / (1 + other)) for one, other in made]

    found = fit(constants, errors, rounds=8)
    assert found["speed"] == pytest.approx(speed, rel=0.05) and found["width"] == pytest.approx(width, rel=0.1)
    assert sum(e * e for e in errors(found)) <= sum(e * e for e in errors({"speed": 1.2, "width": 1.2})) + 1e-6


def test_another_value_is_another_cluster() -> None:
    described = CalibratedCluster.of("oases-nvlink")
    slower = described.with_values({"levels.pair.efficiency": 0.1, "device.matmul_efficiency": 0.4})
    assert slower.levels[1].efficiency == 0.1 and slower.device.matmul_efficiency == 0.4
    assert isinstance(slower, Cluster) and slower.levels[0] == described.cluster.levels[0]
