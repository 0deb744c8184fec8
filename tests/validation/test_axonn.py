"""AxoNN: its table's cells are the plans that it describes, grids are ranked by where they lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.demo.model import GPTConfig
from shardweave.ir import Grid
from shardweave.ir.errors import InfeasibleError, InputError
from shardweave.validation import CalibratedCluster, Setting, axonn
from shardweave.validation.axonn import communication_seconds, ranking

SMALL = GPTConfig(512, 64, layers=3, heads=8, width=256, bias=True)
PAPER: dict[str, Any] = {
    "models_table1": {"rows": [{"name": "GPT-20B", "layers": 3, "hidden": 256, "heads": 8}]},
    "training_setup": {"batch_sequences_assumed": 256},
    "code_comm_model": {"min_tensor_parallel_degree": {"GPT-20B": 4}},
    "weak_scaling_table3": {
        "rows": [{"gpus": 16, "model": "GPT-20B", "megatron_lm": 0.4, "zero3": 0.5, "axonn": 0.6, "deepspeed_3d": None}]
    },
    "overlap_ablation_20b_16gpu": {
        "steps": {"overlap_all_reduce": 0.05, "overlap_reduce_scatter": 0.08, "overlap_all_gather": 0.19,
                  "cache_all_gather": 0.09},
        "total": 0.34,
        "cached_layers": 2,
    },
}  # fmt: skip


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axonn, "SEQUENCE", 64)
    monkeypatch.setattr(axonn, "VOCABULARY", 512)


def test_each_system_is_a_row(short: None) -> None:
    """What is pipeline-parallel says so; the ablation's steps multiply to its total, and overlap never costs."""
    told: list[str] = []
    rows = list(axonn.rows(PAPER, Setting(told.append)))
    table = {row.group: row for row in rows if row.table == "AxoNN Table III"}
    assert list(table) == ["zero3", "axonn", "megatron_lm"]
    assert "pipeline" in table["megatron_lm"].reason and table["megatron_lm"].predicted is None
    assert all(0 < (table[system].predicted or 0.0) < 1 for system in ("zero3", "axonn"))
    *steps, total = [row for row in rows if row.table == "AxoNN section IV"]
    left = 1.0
    for row in steps:
        assert row.predicted is not None and row.predicted > -1e-3
        left *= 1 - row.predicted
    assert total.predicted == pytest.approx(1 - left)
    assert left < 1
    assert len(told) == 8
    with pytest.raises(InputError, match="models_table1 for 'GPT-20B'"):
        list(axonn.rows({**PAPER, "models_table1": {"rows": []}}, Setting()))


def test_the_plans_are_those_of_their_systems(short: None) -> None:
    """ZeRO-3 waits for what it moves, in micro-batches; AxoNN's plan is the fastest of the first grids that fit."""
    plan = axonn.zero3(Setting(), SMALL, gpus=8, batch=128)
    assert {str(choice.strategy) for choice in plan.choices.values()} == {"(1, 1, 1, 8) ZDP"}
    assert plan.micro_batches == 2 and plan.overlap.ablation.blocking == axonn.ZERO3_BLOCKING
    assert set(plan.overlap.recompute.values()) == {"full"}
    best = axonn.fastest(Setting(), SMALL, gpus=8, batch=64, degree=4)
    grid = best.choices["blocks.0.up"].strategy.grid
    assert grid.x * grid.y * grid.z >= 4 and best.cluster.world_size == 8
    cluster = CalibratedCluster.of("axonn").cluster
    device = replace(cluster.device, memory=2**20)
    with pytest.raises(InfeasibleError, match="at least 4 of 4 devices"):
        axonn.fastest(Setting(cluster=lambda _: replace(cluster, device=device)), SMALL, gpus=4, batch=4, degree=4)


@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 4, 16]), st.sampled_from([64, 128]))
def test_grids_are_ranked_whole(nodes: int, degree: int, batch: int) -> None:
    """Each grid once, spread over all devices, by rising seconds; more bandwidth takes no more of them."""
    cluster = CalibratedCluster.of("axonn").cluster.fitted(4, nodes)
    ranked = ranking(cluster, SMALL, batch, min(degree, 4 * nodes))
    seconds = [communication_seconds(cluster, SMALL, batch, grid) for grid in ranked]
    assert seconds == sorted(seconds) and len(set(ranked)) == len(ranked) > 0
    assert all(grid.size == 4 * nodes and grid.x * grid.y * grid.z >= min(degree, 4 * nodes) for grid in ranked)
    faster = replace(cluster, levels=tuple(replace(v, bandwidth=2 * v.bandwidth) for v in cluster.levels))
    for grid, slow in zip(ranked, seconds, strict=True):
        assert communication_seconds(faster, SMALL, batch, grid) <= slow


def test_the_authors_table_ranks_where_there_is_one(short: None) -> None:
    """A table whose links between nodes are slow keeps sums inside; a group that it does not know is named."""
    cluster = CalibratedCluster.of("axonn").cluster.fitted(4, 4)
    slow = [{"ip": 1, "my": ">=2", "bw": 100.0}, {"ip": "any", "my": "any", "bw": 0.01}]
    assert ranking(cluster, SMALL, 64, 4, slow)[0] in (Grid(z=16), Grid(y=16), Grid(x=16))
    with pytest.raises(InputError, match=r"groups of \d+ devices that are \d+ apart"):
        ranking(cluster, SMALL, 64, 4, slow[:1])
