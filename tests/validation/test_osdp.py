"""OSDP's profile: each cell is the plan that its code describes, and what is missing or wrong in a file is handled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardweave.ir.errors import InputError
from shardweave.validation import CalibratedCluster, Setting, osdp, validate
from shardweave.validation.setting import per_layer_increase

HIDDEN = 2048
PROFILE: dict[str, Any] = {
    "hidden": [HIDDEN, 1024],
    "time_s": [[[0.1, 0.2, 0.3, 0.4], [0.1, None, None, 0.2], None], None],
    "mem_mb": [[[1.0, 1.0, 1.0, 1.0]], [[None, 2.0]]],
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of batch size is two sequences a GPU."""
    monkeypatch.setattr(osdp, "SEQUENCES", 2)


def test_each_cell_is_a_row() -> None:
    """What is null has none. ZDP takes longer than DP, and longest where it gathers three times; it holds less: two
    bytes a parameter at rest, and 14 where it is in the flat parameter, when the gradient of that is put together."""
    told: list[str] = []
    result = validate({"osdp_profile": PROFILE}, told.append)
    seconds = {row.name: row.predicted or 0.0 for row in result.tables["OSDP profile, seconds"]}
    assert list(seconds) == [f"{level}, row 0" for level in osdp.LEVELS] + ["DP, row 1", "all ZDP, row 1"]
    first, *zdp, most = (seconds[f"{level}, row 0"] for level in osdp.LEVELS)
    assert 0 < first < min(zdp) and max(zdp) < most
    assert 1.8 < most / first < 2.0  # gathered three times and scattered once, for once each, and as much compute
    assert 1.3 < seconds["all ZDP, row 1"] / seconds["DP, row 1"] < 1.5
    *memory, last = result.tables["OSDP profile, memory"]
    assert (last.group, last.name) == ("hidden 1024", "attention ZDP, row 0")
    flat = {"DP": 12, "attention ZDP": 8, "MLP ZDP": 4, "all ZDP": 0}  # in squares of it
    expected = {f"{level}, row 0": HIDDEN**2 * (2 * 12 + 12 * weights) / 2**20 for level, weights in flat.items()}
    assert {row.name: row.predicted for row in memory} == pytest.approx(expected, rel=0.02)
    assert all(row.error is not None for row in result.rows)
    assert told[-1] == "OSDP profile: hidden 1024, row 0, attention ZDP" and len(told) == 7


@pytest.mark.parametrize("level", list(osdp.LEVELS))
def test_a_cell_is_the_plan_of_its_level(level: str) -> None:
    """The linear layers of its parts are ZDP, all else is flat; nothing but gathers is overlapped, one at a time."""
    plan = osdp.plan(Setting(), 2, HIDDEN, 1, level)
    assert plan.cluster.world_size == 8 and plan.tokens == 8 * 2 * 6 and plan.micro_batches == 1
    strategies = {name: str(choice.strategy).split()[-1] for name, choice in plan.choices.items()}
    sharded = {name for name, word in strategies.items() if word == "ZDP"}
    assert set(strategies.values()) - {"ZDP"} == {"ZeRO-2"} and plan.overlap.ablation.flat_parameter
    linear = {"attn": {"query", "key", "value", "proj"}, "mlp": {"0", "2"}}
    parts = {"DP": (), "attention ZDP": ("attn",), "MLP ZDP": ("mlp",), "all ZDP": ("attn", "mlp")}[level]
    assert sharded == {f"blocks.{n}.{part}.{name}" for n in (0, 1) for part in parts for name in linear[part]}
    assert plan.overlap.ablation.blocking == ("broadcast", "reduce", "scatter") and plan.overlap.max_prefetch == 1
    assert set(plan.overlap.recompute.values()) == {"none"} and not plan.overlap.ablation.regather_in_recompute


def test_row_0_has_one_sequence_and_recomputes() -> None:
    plan = osdp.plan(Setting(), 1, HIDDEN, 0, "all ZDP")
    assert plan.tokens == 8 * 6
    assert set(plan.overlap.recompute.values()) == {"full"} and plan.overlap.ablation.regather_in_recompute


@pytest.mark.parametrize("row", [0, 2])
def test_a_layer_costs_the_same_in_models_of_any_depth(row: int) -> None:
    def figures(layers: int) -> tuple[float, float]:
        plan = osdp.plan(Setting(), layers, HIDDEN, row, "all ZDP")
        return plan.step_time, plan.peak_memory

    assert per_layer_increase(figures, fewest=2) == pytest.approx(per_layer_increase(figures, fewest=1), rel=0.01)


def test_what_does_not_fit_has_no_figure() -> None:
    cluster = CalibratedCluster.of("osdp-titan").cluster
    tiny = replace(cluster, device=replace(cluster.device, memory=2**16))
    profile = {"hidden": [64], "time_s": [[[0.1]]], "mem_mb": [[[1.0]]]}
    rows = list(osdp.rows(profile, Setting(cluster=lambda _: tiny)))
    assert [(row.predicted, row.reason) for row in rows] == [(None, "does not fit")] * 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": 512}, "hidden: expected a list of sizes, got 512"),
        ({"hidden": [512, None]}, r"hidden: expected a list of sizes, got \[512, None\]"),
        ({"time_s": [[[0.1]]]}, "time_s: expected rows for each of 2 hidden sizes, got 1"),
        ({"mem_mb": [[0.5], None]}, "mem_mb: expected lists by hidden size, row and level, got 0.5"),
        ({"time_s": [[["fast"]], None]}, "time_s: expected positive numbers or null, got 'fast'"),
        ({"mem_mb": [None, [[1.0, 0]]]}, "mem_mb: expected positive numbers or null, got 0"),
    ],
)
def test_a_profile_that_is_none_names_its_key(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"osdp_profile.json, {message}"):
        list(osdp.cells({**PROFILE, **changed}))


def test_a_profile_without_tables_has_no_cells() -> None:
    assert not list(osdp.cells({})) and not list(osdp.cells({"hidden": [64]}))
