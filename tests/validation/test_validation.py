"""Published tables: every row is a forced plan, its error is counted right, and constants keep to their ranges."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardweave import cli
from shardweave.cost_model import Cluster, Options
from shardweave.ir import Grid, Strategy
from shardweave.ir.errors import ClusterError, InputError
from shardweave.validation import CalibratedCluster, Row, Setting, amsp, load, validate
from shardweave.validation.rows import draw_table, mean_error, rank_correlations
from shardweave.validation.setting import HOST_SECONDS_PER_RANK, Llama, Sizes, captured, with_deepspeed_host

SMALL = {"LLaMA-7B": Sizes(2, 512, 4)}
PAPER: dict[str, Any] = {
    "models": {"recompute": {"LLaMA-7B": False}},
    "strategies_table4": {
        "rows": [
            {"model": "LLaMA-7B", "approach": "AMSP", "p": [1, 1], "g": [1, 1], "os": [8, 1]},
            {"model": "LLaMA-7B", "approach": "ZeRO++", "p": ["R", "N"], "g": ["R", "N"], "os": ["R", "N"],
             "secondary_p": [8, 1]},
        ]
    },
    "overlap_table5": {
        "gpus": 16,
        "M": [1, 2],
        "rows": [{"model": "LLaMA-7B", "level": level, "tgs": [1000.0, 2000.0]} for level in ("L3", "L2", "L1", "L0")],
    },
    "end_to_end_text": {
        "rows": [
            {"model": "LLaMA-7B", "gpus": 1024, "approach": "ZeRO++", "mfu": 0.04},
            {"model": "LLaMA-7B", "gpus": 1024, "approach": "another", "mfu": 0.5},
            {"model": "LLaMA-7B", "gpus": 1024, "approach": "AMSP", "mfu": None},
        ]
    },
}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the paper's models a small one, with short sequences."""
    monkeypatch.setattr(amsp, "MODELS", SMALL)
    monkeypatch.setattr(amsp, "SEQUENCE", 64)


def test_rows_of_a_paper_are_simulated_plans(small: None) -> None:
    """Each level of overlap is at most as fast as the one above it; what cannot be built is no row."""
    told: list[str] = []
    result = validate({"amsp": PAPER, "unknown": {}}, told.append)
    rows = {row.name: row for row in result.rows}
    assert len(rows) == len(told) == 10
    assert "expected a row for another of LLaMA-7B" in rows["another, 1024 GPUs"].reason
    for count in (1, 2):
        speeds = [rows[f"{level}, M={count}"].predicted or 0.0 for level in ("L3", "L2", "L1", "L0")]
        assert speeds == sorted(speeds, reverse=True) and speeds[0] > speeds[1] > speeds[2]
        assert speeds[2] == pytest.approx(speeds[3], rel=1e-3)  # parameters and gradients are whole: nothing is left
    published = result.to_dict()["AMSP Table V"]
    assert [row["published"] for row in published["rows"]] == [1000.0] * 4 + [2000.0] * 4
    assert rows["ZeRO++, 1024 GPUs"].published == 0.04


def test_both_figures_of_a_cell_are_rows(small: None) -> None:
    """TGS and MFU of one cell are two rows of one plan: where a table contradicts itself, both are kept."""
    rows = [{"model": "LLaMA-7B", "level": "L3", "tgs": [1000.0, None], "mfu": [0.5, 0.6]}]
    paper = {**PAPER, "overlap_table5": {**PAPER["overlap_table5"], "rows": rows}, "end_to_end_text": {"rows": []}}
    tgs, mfu = validate({"amsp": paper}).rows
    assert (tgs.unit, mfu.unit, mfu.published) == ("tokens/GPU/s", "MFU", 0.5)
    assert mfu.predicted == pytest.approx((tgs.predicted or 0) * SMALL["LLaMA-7B"].flops_per_token(64) / 312e12)


def test_deepspeeds_host_is_what_a_step_takes_on_many_ranks(small: None) -> None:
    """Its collectives are launched one after another, each for as long as there are ranks; other systems' are not."""
    factors = {(row["model"], row["approach"]): row for row in PAPER["strategies_table4"]["rows"]}
    strategy = amsp.strategy(factors, "LLaMA-7B", "ZeRO++", 1024)
    systems = None, with_deepspeed_host
    few, many = (amsp.plan(Setting(), "LLaMA-7B", 1024, strategy, 1, system=system) for system in systems)
    calls = many.step_time / (HOST_SECONDS_PER_RANK * 1024)
    assert 4 * 20 < calls < 6 * 20 and few.step_time < many.step_time / 2  # of 18 matrices and norms, and two tables
    assert Setting().cluster("amsp").device.collective_host_seconds == 0


def test_a_row_is_the_plan_that_the_paper_describes(small: None) -> None:
    """Its strategy, micro-batches and memory are those of the plan; what does not fit has no figure."""
    cluster = CalibratedCluster.of("amsp").cluster
    factors = {(row["model"], row["approach"]): row for row in PAPER["strategies_table4"]["rows"]}
    strategy = amsp.strategy(factors, "LLaMA-7B", "ZeRO++", 16)
    assert strategy == Strategy(Grid(data=16), 8, states=16, gradients=16)
    found = amsp.plan(Setting(), "LLaMA-7B", 16, strategy, 2, recompute="none")
    assert {choice.strategy for choice in found.choices.values()} == {strategy}
    assert found.micro_batches == 2 and found.peak_memory < cluster.device.memory
    assert found.tokens == 16 * 2 * 64
    tiny = Cluster.from_dict({**cluster.to_dict(), "device": {**cluster.to_dict()["device"], "memory": 2**20}})
    rows = [row for row in amsp.rows(PAPER, Setting(cluster=lambda _: tiny)) if not row.name.startswith("another")]
    assert {(row.predicted, row.reason) for row in rows} == {(None, "does not fit")}


@pytest.mark.parametrize("gibibytes", [22, 28])
def test_what_the_planner_chooses_is_as_fast_as_amsps_partition(gibibytes: int) -> None:
    """Of LLaMA-30B on 1,024 GPUs, with tight memory and with more: its partition is one of what can be chosen."""
    gpus = 1024
    cluster = Setting().cluster("amsp").fitted(8, gpus // 8)
    compiler = captured(amsp.MODELS["LLaMA-30B"], gpus, amsp.SEQUENCE, amsp.PRECISION).with_(cluster)
    options = Options(
        memory_limit=gibibytes * 2**30, micro_batches=1, sub_batches=1, recompute="full", precision=amsp.PRECISION
    )
    partition = Strategy(Grid(data=gpus), 8, gradients=8, states=32)
    forced = compiler.with_(options=replace(options, force={"*": partition})).plan()
    chosen = compiler.with_(options=options).plan()
    assert chosen.step_time <= 1.002 * forced.step_time
    assert chosen.peak_memory <= gibibytes * 2**30


def test_the_model_has_the_flops_that_the_paper_counts() -> None:
    """Six for each weight of a product, and attention in full."""
    sizes = Sizes(2, 768, 4)  # of which 8/3 is a multiple of 256
    weights = sum(p.numel() for p in Llama(sizes).parameters() if p.dim() == 2) - sizes.vocabulary * sizes.width
    assert sizes.flops_per_token(0) == pytest.approx(6 * weights, rel=1e-9)
    assert amsp.MODELS["LLaMA-30B"].flops_per_token(4096) == pytest.approx(181e9, rel=0.02)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=3, max_size=9))
def test_errors_and_ranks(pairs: list[tuple[float, float]]) -> None:
    """No error and full correlation where all is predicted right; a common factor changes no rank."""
    right = [Row("t", "g", "", "", published, published) for published, _ in pairs]
    assert mean_error(right) == 0
    assert all(value == pytest.approx(1.0) for value in rank_correlations(right).values())
    rows, doubled = ([Row("t", "g", "", "", one, factor * other) for one, other in pairs] for factor in (1, 2))
    assert rank_correlations(rows) == rank_correlations(doubled)
    reversed_ = [Row("t", "g", "", "", one, 1 / one) for one, _ in pairs]
    assert all(value == pytest.approx(-1.0) for value in rank_correlations(reversed_).values())


def test_constants_keep_to_their_ranges() -> None:
    """Each is a figure of its cluster inside of its range; one outside, or unknown, is refused by name."""
    described = CalibratedCluster.of("amsp")
    assert 0 < len(described.constants) <= 8
    assert all(each.low <= each.value <= each.high and each.source for each in described.constants)
    node = described.cluster.levels[-1]
    assert node.shared_bandwidth == 800e9 / 8
    said = {"range": [0.4, 0.5], "source": "", "fitted": False}
    data = {"cluster": described.cluster.to_dict(), "constants": {"device.matmul_efficiency": said}}
    with pytest.raises(ClusterError, match=r"device.matmul_efficiency: expected 0.4 to 0.5"):
        CalibratedCluster.from_dict(data)
    with pytest.raises(ClusterError, match="device.speed is no figure"):
        CalibratedCluster.from_dict({**data, "constants": {"device.speed": said}})


def test_the_command_prints_a_table_and_json(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = {**PAPER["overlap_table5"], "M": [1], "rows": [{"model": "LLaMA-7B", "level": "L3", "tgs": [1000.0]}]}
    paper = {**PAPER, "overlap_table5": table, "end_to_end_text": {"rows": []}}
    (tmp_path / "amsp.yaml").write_text(yaml.safe_dump(paper))

    def printed(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["shardweave", "validate", str(tmp_path), *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert not exit_.value.code
        return capsys.readouterr().out

    assert "AMSP Table V: mean error" in printed()
    (row,) = json.loads(printed("--json"))["AMSP Table V"]["rows"]
    assert row["error"] == pytest.approx(row["predicted"] / 1000 - 1)
    printed("--figures", str(tmp_path / "figures"))
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["amsp-table-v.png"]


def test_a_figure_shows_each_row_and_its_error() -> None:
    """Rows without a plan are left out; a table that has none has no figure."""
    rows = (
        Row("t", "g", "a", "GB", 10.0, 11.0),
        Row("t", "h", "b", "GB", 20.0, 18.0),
        Row("t", "h", "c", "GB", 1.0, None),
    )
    figure = draw_table("t", rows)
    assert figure is not None and "10.0 %" in figure.get_suptitle()
    points, errors = figure.axes
    assert [line.get_label() for line in points.lines[:2]] == ["g", "h"]
    assert [bar.get_width() for bar in errors.patches] == pytest.approx([10.0, -10.0])
    assert draw_table("t", rows[2:]) is None


def test_a_folder_that_holds_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one YAML file a paper"):
        load(tmp_path)
    (tmp_path / "amsp.yaml").write_text("- 1\n")
    with pytest.raises(InputError, match=r"amsp.yaml: expected a mapping"):
        load(tmp_path)
    with pytest.raises(InputError, match="sizes of 'LLaMA-65B' are not known"):
        amsp.plan(Setting(), "LLaMA-65B", 8, Strategy(Grid(data=8)), 1)


def test_papers_are_read_from_json_too(tmp_path: Path) -> None:
    """By the names of their files; other formats are left alone, what cannot be read is named."""
    (tmp_path / "README.md").write_text("# Tables")
    (tmp_path / "amsp.yaml").write_text("models: {}")
    (tmp_path / "osdp_profile.json").write_text(json.dumps({"hidden": [512]}))
    assert load(tmp_path) == {"amsp": {"models": {}}, "osdp_profile": {"hidden": [512]}}
    (tmp_path / "amsp.json").write_text("{}")
    with pytest.raises(InputError, match=r"amsp\.yaml: expected one file a paper"):
        load(tmp_path)
    (tmp_path / "amsp.json").write_text("[1]")
    with pytest.raises(InputError, match=r"amsp\.json: expected a mapping of tables by name, got list"):
        load(tmp_path)
    (tmp_path / "amsp.json").write_text("{'models': 1}")
    with pytest.raises(InputError, match=r"amsp\.json: expected JSON, got: .*line 1 column 2"):
        load(tmp_path)
