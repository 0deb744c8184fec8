"""Plan files: whatever a value in them is changed to, they are refused by its key, or are another plan that lowers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.ir import Ablation, Grid, OverlapConfig, Strategy
from shardweave.ir.errors import ParallelError, PlanError
from shardweave.planner.search.plan import VERSION, OpChoice, Plan
from tests.mutations import DOUBLED, RENAMED, WRONG, mutated, paths


class Residual(nn.Module):
    """Two products, and a sum of both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.norm(self.up(x)).relu()) + x).square().mean()


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(Residual(), sw.Cluster.local(4), torch.randn(16, 8), sw.Options(), None)


@pytest.fixture(scope="module")
def plan(compiler: Compiler) -> Plan:
    """A plan in which every field has something."""
    made = compiler.plan(weigh=True)
    zero = Strategy(Grid(data=4), rest=4)
    choices = {name: replace(choice, strategy=zero) for name, choice in made.choices.items()}
    overlap = OverlapConfig(
        sub_batches=2, recompute={"*": "fine"}, operator_slices={"up": 2}, keep_gathered={"up": 1}, buckets=True,
        max_prefetch=1, ablation=Ablation(blocking=("gather",)), quantize={"parameters": 8},
        exclude_from_sub_batches=("down",),
    )  # fmt: skip
    joins = {":add:0": {"cpu0": "i0", "cpu1": "i0"}}
    cluster = replace(made.cluster, sources={})
    return replace(made, cluster=cluster, choices=choices, overlap=overlap, joins=joins, forced=("up",))


@pytest.fixture(scope="module")
def data(plan: Plan) -> Any:
    return json.loads(json.dumps(plan.to_dict()))


def test_every_change_of_one_value_is_refused_by_its_key_or_another_plan(plan: Plan, data: Any) -> None:
    refused = loaded = 0
    for at in paths(data):
        if at[0] == "cluster" and len(at) > 2:
            continue  # the cluster's own tests go through these
        for value in WRONG:
            try:
                found = Plan.from_dict(mutated(data, at, value))
            except PlanError as error:
                refused += 1
                text = str(error)
                assert str(at[0]) in text or at[0] == "format", (at, value, text)
                assert "expected" in text or "lacks" in text, text
                assert len(text) < 600, text
                continue
            loaded += 1
            assert found == plan or at[0] not in ("format", "version")
    assert refused > 2000 and loaded > 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(draw=st.data())
def test_any_changes_load_or_are_refused(data: Any, draw: st.DataObject) -> None:
    changed = data
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.sampled_from(list(paths(changed))))
        changed = mutated(changed, at, draw.draw(JSON | st.sampled_from(WRONG)))
    try:
        Plan.from_dict(changed)
    except PlanError as error:
        assert str(error)


DECIDES = ("overlap", "joins", "micro_batches", "choices")


@settings(max_examples=300, deadline=None)
@given(draw=st.data())
def test_what_loads_is_lowered_or_refused(compiler: Compiler, data: Any, draw: st.DataObject) -> None:
    """Also with axes, grids and counts that fit the mesh and not the model."""
    values = [0, 1, 2, 3, 4, 7, 64, 2**31, True, False, None, "i0", "i1", "k", "fine", "full", "none", "flat", {}, [],
              [4, 1, 1, 1], [1, 4, 1, 1], [1, 1, 4, 1], [2, 2, 1, 1], [2, 1, 1, 2], {"cpu0": "i1"},
              RENAMED, DOUBLED]  # fmt: skip
    changed = data
    for _ in range(draw.draw(st.integers(1, 2))):
        there = paths({key: changed[key] for key in DECIDES if key in changed})
        places = [at for at in there if at[0] != "choices" or "strategy" in at]
        changed = mutated(changed, draw.draw(st.sampled_from(places)), draw.draw(st.sampled_from(values)))
    try:
        found = Plan.from_dict(changed)
        found.check(compiler.model_key, compiler.cluster)
        compiler.lower(found)
    except ParallelError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("micro_batches",), -1, "micro_batches: expected a whole number of at least 1 and at most 2,147,483,648, got"),
        (("peak_memory",), 10**60, "peak_memory: expected a whole number of at least 0 .*, got one of 200 bits"),
        (("step_time",), float("nan"), "step_time: expected a number of at least 0 .*, got nan"),
        (("status",), "proven", "status: expected one of 'optimal', 'feasible', got 'proven'"),
        (("model", "parameters", "up.weight", 0), 1.5, r"model\.parameters\.up\.weight\[0\]: expected a whole number"),
        (("overlap", "sub_batch"), 2, r"overlap\.sub_batch: expected one of the keys .*, got an unknown key"),
        (("overlap", "recompute", "*"), "most", r"overlap\.recompute\.\*: expected one of 'none', 'fine', 'full', got"),
        (("choices", "up", "strategy", "grid"), [2, 1, 1, 1], r"choices\.up\.strategy: expected one that fits"),
        (("choices", "up", "strategy", "rest"), 3, r"choices\.up: .*multiple"),
        (("joins", ":add:0"), {"gpu7": "i0"}, r"joins\.:add:0: expected axes of local-cpu, cpu0, cpu1, got 'gpu7'"),
        (("cluster", "levels", 0, "size"), -4, r"cluster: levels\.cpu\.size: expected a whole number above 0, got -4"),
        (("version",), VERSION + 1, f"expected a plan of version {VERSION}, got {VERSION + 1}, made by shardweave 0"),
    ],
)  # fmt: skip
def test_absurd_values_are_named(data: Any, tmp_path: Path, at: tuple[str, ...], value: Any, message: str) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(mutated(data, at, value)))
    with pytest.raises(PlanError, match=f"plan.json: {message}"):
        Plan.load(tmp_path / "plan.json")


def test_a_key_that_comes_twice(data: Any, tmp_path: Path) -> None:
    """The second strategy of an op would be taken for the only one."""
    text = json.dumps(data)
    choices = json.dumps(data["choices"])
    twice = choices[:-1] + ", " + json.dumps({"up": data["choices"]["down"]})[1:]
    assert choices in text and json.loads(twice)["up"] == data["choices"]["down"]
    (tmp_path / "plan.json").write_text(text.replace(choices, twice))
    with pytest.raises(PlanError, match=r"plan\.json: the key 'up' comes twice"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["", "[" * 10_000, "9" * 6000, '{"a": 1', "\x00", "null", "\ud800"])
def test_what_is_no_plan_at_all(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(PlanError, match=r"plan\.json: expected a plan"):
        Plan.load(tmp_path / "plan.json")


def test_plans_of_this_version_without_a_maker_load(compiler: Compiler, plan: Plan, data: Any) -> None:
    assert compiler.lower(plan).graphs, "what is changed above is a plan that lowers"
    assert Plan.from_dict({key: value for key, value in data.items() if key != "made_by"}) == plan
    assert isinstance(plan.choices["up"], OpChoice)
