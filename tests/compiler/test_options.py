"""Options, and what a user calls a cluster: what is taken, and the one error for anything else."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardweave as sw

NAMES = [field.name for field in fields(sw.Options)]
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**25), st.floats(), st.text(max_size=5), st.binary(max_size=3),
    st.sampled_from(["auto", "full", "20GB", "adamw", "bf16", "zero++", "gather", "parameters", torch.half, object()]),
)  # fmt: skip
KEYS = st.one_of(st.text(max_size=3), st.integers(0, 2), st.sampled_from(["parameters", "gradients", "*"]))
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.lists(PLAIN, max_size=3).map(tuple) | st.dictionaries(KEYS, PLAIN)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(NAMES), value=VALUES)
def test_any_value_is_taken_or_refused_by_the_options_name(name: str, value: Any) -> None:
    """What is taken can be made use of."""
    try:
        options = sw.Options(**{name: value})
    except sw.PlanError as error:
        assert name in str(error)
        return
    assert options.limit(sw.Cluster.local(2)) > 0
    assert options.optimizer_bytes >= 0 and options.micro_batch_count >= 1
    precision = options.mixed_precision
    assert options.overlap.to_dict() and precision is None or isinstance(precision, sw.Precision)


@pytest.mark.parametrize("name", NAMES)
def test_no_option_takes_an_object(name: str) -> None:
    with pytest.raises(sw.PlanError, match=name):
        sw.Options(**{name: object()})


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("20GB", 20 * 10**9), ("20 GiB", 20 * 2**30), ("800MB", 8 * 10**8), ("1.5 gib", 3 * 2**29), ("4096", 4096),
     (8e9, 8 * 10**9), (7, 7), (" 2 TB ", 2 * 10**12), ("1e3 kB", 10**6)],
)  # fmt: skip
def test_a_memory_limit_may_have_a_unit(limit: float | str, expected: int) -> None:
    options = sw.Options(memory_limit=limit)
    assert options.memory_limit == expected == options.limit(sw.Cluster.local(1))
    assert options == sw.Options(memory_limit=expected)


@pytest.mark.parametrize("limit", ["", "GB", "20 G", "20 parsecs", "-1GB", "0", 0, -5, 0.5, float("nan"), float("inf")])
def test_nonsense_is_no_memory_limit(limit: float | str) -> None:
    with pytest.raises(sw.PlanError, match="memory_limit must be a positive number of bytes a device, or .*'20GB'"):
        sw.Options(memory_limit=limit)


def test_a_cluster_is_a_preset_a_file_or_itself(tmp_path: Path) -> None:
    local = sw.Cluster.local(2)
    local.save(tmp_path / "own.yaml")
    for given_, expected in (
        (local, local), (tmp_path / "own.yaml", local), (str(tmp_path / "own.yaml"), local),
        ("dgx-a100", sw.Cluster.preset("dgx-a100")),
    ):  # fmt: skip
        assert sw.Cluster.of(given_) == expected


@pytest.mark.parametrize(
    ("cluster", "message"),
    [("dgx_a10", "no preset is called 'dgx_a10': did you mean 'dgx-a100'.*there are dgx-a100, .*cluster.yaml"),
     ("laptop", "no preset is called 'laptop'.*there are dgx-a100"),
     ("none.yaml", "none.yaml: expected a readable cluster file"),
     (8, "expected a Cluster, a preset's name or the path of a cluster file, got int")],
)  # fmt: skip
def test_what_is_no_cluster(cluster: Any, message: str) -> None:
    with pytest.raises(sw.ClusterError, match=message):
        sw.plan(nn.Linear(8, 8), cluster, torch.zeros(8, 8))


def test_a_clusters_name_goes_wherever_a_cluster_does(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)), torch.zeros(16, 16)
    sw.Cluster.local(2).save(tmp_path / "two.yaml")
    sw.Cluster.local(1).save(tmp_path / "one.yaml")
    assert sw.plan(model, "dgx-a100", x).cluster == sw.Cluster.preset("dgx-a100")
    points = sw.plan(model, tmp_path / "two.yaml", x, sweep=["dgx-a100", tmp_path / "two.yaml"]).points
    assert [point.cluster.world_size for point in points] == [8, 2]
    points = sw.plan(model, tmp_path / "two.yaml", x, sweep=["1GB", 2 * 10**9]).points
    assert [point.memory_limit for point in points] == [10**9, 2 * 10**9]
    found = sw.compare(model, str(tmp_path / "two.yaml"), x, baselines=[sw.baselines.ddp()], micro_batches=[1])
    assert found.best is not None
    assert sw.baselines.ddp().plan(model, str(tmp_path / "two.yaml"), x).cluster == sw.Cluster.local(2)
    assert sw.compile_parallel(model, tmp_path / "one.yaml", x)(x).shape == (16, 8)
    compiled = torch.compile(model, backend="shardweave", options={"cluster": str(tmp_path / "one.yaml")})
    assert compiled(x).shape == (16, 8)


def test_what_a_user_meets_has_a_short_repr() -> None:
    """A line or two, whatever the model; explain() has the rest."""
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))), torch.zeros(16, 16)
    options = sw.Options(memory_limit="1GB", force={"0": "zero3"})
    plan = sw.plan(model, sw.Cluster.local(2), x, options=options)
    swept = sw.plan(model, sw.Cluster.local(2), x, sweep=["1GB"])
    choice = plan.choices["0"]
    shown = (
        plan, plan.cluster, plan.cluster.device, plan.model_key, plan.overlap, choice, choice.strategy, plan.timeline(),
        options, sw.Options(), swept, swept.points[0], sw.baselines.fsdp(), sw.Cluster.preset("dgx-h100", nodes=4),
    )  # fmt: skip
    for each in shown:
        assert type(each).__name__ in repr(each) and len(repr(each)) < 300, repr(each)
    assert repr(options) == "Options(memory_limit=1000000000, force={'0': 'zero3'})"
    assert repr(sw.Options()) == "Options()"
    names = dict(vars(sw))
    assert eval(repr(options), names) == options and eval(repr(choice.strategy), names) == choice.strategy
    assert "12 ops" in repr(plan) and "a step" in repr(plan) and "of 953.7 MiB a device" in repr(plan)
    assert str(plan) == repr(plan)


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [(torch.float32, None, 8), (torch.bfloat16, None, 4), (torch.float64, None, 16), (torch.float32, "bf16", 8)],
)
def test_states_of_a_named_optimizer_have_the_dtype_of_the_parameters(
    dtype: torch.dtype, precision: str | None, expected: int
) -> None:
    model, x = nn.Linear(64, 64, dtype=dtype), torch.ones(4, 64, dtype=dtype)
    plan = sw.plan(model, sw.Cluster.local(1), x, options=sw.Options(optimizer="adamw", precision=precision))
    assert plan.optimizer_bytes == expected
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    kept = sum(value.nbytes for value in optimizer.state[model.weight].values() if value.dim())
    assert kept == expected * model.weight.numel()
    assert plan.resolve(optimizer="momentum").optimizer_bytes == expected // 2
    given = sw.plan(model, sw.Cluster.local(1), x, options=sw.Options(optimizer=3, precision=precision))
    assert given.optimizer_bytes == 3
