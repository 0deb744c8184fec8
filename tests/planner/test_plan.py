"""Plans: saved, checked, explained, compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import shardweave as sw
from shardweave.cost_model.cluster import Cluster
from shardweave.ir import Grid, Strategy
from shardweave.ir.errors import PlanError
from shardweave.planner.search.plan import ModelKey, OpChoice, Plan, RunnerUp
from tests.models import mlp

DP, ZDP = Strategy(Grid(data=4)), Strategy(Grid(data=4), rest=4)
COLUMN = Strategy(Grid(x=2, data=2), rest=2)


def make_plan(cluster: Cluster | None = None, special: Strategy = ZDP) -> Plan:
    choices = {"embedding": OpChoice(DP, 1e-3, 5e-4, 2**20, 0, 0, RunnerUp(ZDP, 2e-4))}
    for layer in range(6):
        strategy = special if layer == 5 else ZDP
        choices[f"blocks.{layer}.qkv"] = OpChoice(
            strategy, 2e-3, 1e-3, 2**21, 2**22, 2**20, RunnerUp(DP, -3e-4, 2**21), (f"blocks.{layer}.qkv.weight",)
        )
    return Plan(
        model_key=ModelKey({"embedding.weight": (64, 8), "head.weight": (64, 8)}, {"tokens": (8, 32)}),
        cluster=cluster or Cluster.local(4),
        choices=choices,
        step_time=0.013,
        peak_memory=90 * 2**20,
        exposed_communication=1e-3,
        compute_time=0.012,
        tokens=256,
        model_flops=1e9,
        status="optimal",
        bound=0.013,
        memory_limit=96 * 2**20,
        forced=("blocks.*.qkv",),
    )


def test_save_and_load_are_inverse(tmp_path: Path) -> None:
    plan = make_plan(special=COLUMN)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert (loaded.mfu, loaded.tokens_per_second) == (plan.mfu, plan.tokens_per_second)
    assert str(loaded.explain()) == str(plan.explain())


def test_a_runner_up_that_saves_time_and_fits_is_explained() -> None:
    plan = make_plan()
    told = "the simulator took this plan for the fastest"
    assert told not in str(plan.explain())  # what it would save does not fit
    choices = {**plan.choices, "embedding": replace(plan.choices["embedding"], runner_up=RunnerUp(ZDP, -2e-4))}
    assert told in str(replace(plan, choices=choices).explain())


def test_figures_that_follow_from_others() -> None:
    plan = make_plan()
    assert plan.tokens_per_second == pytest.approx(256 / 0.013)
    assert plan.mfu == pytest.approx(1e9 / 0.013 / (4 * plan.cluster.device.peak("float32")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "plan as JSON"),
        ("[]", "saved by shardweave"),
        ('{"format": "shardweave plan", "version": 99}', "version 6, got 99"),
        ('{"format": "shardweave plan", "version": 6}', "lacks the key 'model'"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_its_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=message) as error:
        Plan.load(path)
    assert "broken.json" in str(error.value)


def test_every_missing_or_mistyped_part_of_a_file_is_a_plan_error(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    whole = make_plan().to_dict()
    for key in set(whole) - {"format"}:
        wrong: list[Any] = [None, "missing", 7, []]
        for value in wrong:
            broken = json.loads(json.dumps({**whole, key: value}))
            if value == "missing":
                del broken[key]
            path.write_text(json.dumps(broken))
            try:
                Plan.load(path)
            except PlanError:
                continue
            assert key not in ("version", "model", "cluster", "choices"), (key, value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json.*No such file"):
        Plan.load(tmp_path / "none.json")


def test_check_names_all_that_differs() -> None:
    plan = make_plan()
    plan.check(plan.model_key, Cluster.local(4))
    other = ModelKey({"embedding.weight": (64, 16), "norm.weight": (8,)}, {"tokens": (4, 32)})
    with pytest.raises(PlanError) as error:
        plan.check(other, Cluster.local(8))
    for part in (
        "embedding.weight has shape (64, 8) in the plan and (64, 16) here",
        "parameter head.weight is in the plan and not here",
        "parameter norm.weight is here and not in the plan",
        "input tokens has shape (8, 32) in the plan and (4, 32) here",
        "the plan is for 4 devices",
        "has 8",
        "shardweave.plan",
    ):
        assert part in str(error.value)


def test_a_plan_serves_another_machine_of_the_same_sizes_only() -> None:
    plan = make_plan(Cluster.preset("dgx-a100", nodes=1))
    plan.check(plan.model_key, Cluster.local(8))
    six = replace(plan, cluster=Cluster.local(6).resized())
    with pytest.raises(PlanError, match="for 6 devices"):
        six.check(plan.model_key, Cluster.local(8))


def test_explain_folds_equal_layers_and_says_why_not() -> None:
    text = str(make_plan().explain())
    assert "blocks.*.qkv ×6" in text and "embedding" in text
    assert "ZDP" in text and "DP" in text
    assert "DP: −300 µs, but 2.0 MiB too large" in text and "ZDP: +200 µs" in text
    for part in ("13.0 ms a step", "MFU", "tokens/s", "90.0 MiB of 96.0 MiB", "optimal", "forced: blocks.*.qkv"):
        assert part in text


def test_layers_that_differ_are_rows_of_their_own() -> None:
    text = str(make_plan(special=COLUMN).explain())
    assert "blocks.0-4.qkv ×5" in text and "blocks.5.qkv" in text


def test_a_plan_cut_short_is_not_called_optimal() -> None:
    text = str(replace(make_plan(), status="feasible", gap=0.012).explain())
    assert "feasible, at most 1.2 % from the optimum" in text and "optimal;" not in text


def test_reports_show_in_notebooks_and_rich_consoles() -> None:
    report = make_plan().explain()
    page = report._repr_html_()
    assert page.count("<tr>") == 4 and "blocks.*.qkv ×6" in page
    console = Console(record=True, width=132, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report)
    assert "blocks.*.qkv ×6" in console.export_text()
    assert repr(report) == str(report)
    assert report[:40] == str(report)[:40] and "blocks.*.qkv ×6" in report and "no such op" not in report


def test_diff_shows_only_what_differs() -> None:
    plan, other = make_plan(special=COLUMN), make_plan()
    other = replace(other, step_time=0.010, peak_memory=100 * 2**20)
    text = str(plan.diff(other))
    assert "1 of 7 ops differ" in text and "blocks.5.qkv" in text and "embedding" not in text
    assert "13.0 ms, the other 10.0 ms (+3.00 ms, +30.0 %)" in text
    assert "−10.0 MiB" in text
    assert "all 7 ops have the same strategy" in str(plan.diff(plan))


def test_a_loaded_plan_says_where_to_get_a_timeline() -> None:
    with pytest.raises(PlanError, match="compile_parallel"):
        make_plan().timeline()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_timeline_without_sums_of_gradients(micro_batches: int) -> None:
    """All else is there: gathers, compute, the optimizer's step."""
    model, batch = mlp.build(), mlp.batch(torch.Generator(), 8)
    options = sw.Options(force={"*": "zero1"}, micro_batches=micro_batches, buckets=False)
    plan = sw.plan(model, sw.Cluster.local(4), batch, options=options)
    found = {
        (sums, kind): [event for event in plan.timeline(sums).events if kind in (event.cause, event.kind)]
        for sums in (True, False)
        for kind in ("gradient", "parameter", "compute")
    }
    assert found[True, "gradient"] and not found[False, "gradient"]
    assert len(found[True, "parameter"]) == len(found[False, "parameter"]) > 0
    flops = {sums: sum(event.flops for event in found[sums, "compute"]) for sums in (True, False)}
    assert flops[True] == flops[False] > 0
    assert plan.timeline(sums=False).step_time < plan.timeline().step_time
