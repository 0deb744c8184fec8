"""Forced strategies: what a user says of named modules holds, and the planner completes the rest."""

from __future__ import annotations

from collections import OrderedDict
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardweave as sw
from shardweave.planner.problem.space import forced_strategies, strategies
from tests.models import ZOO
from tests.passes.joint import joint
from tests.planner.planners import Planner, kind

OPS = (
    "tokens", "positions",
    *(f"blocks.{layer}.{op}" for layer in (0, 1) for op in ("attention.qkv", "attention.out", "up", "down")),
    "head",
)  # fmt: skip


@cache
def gpt(world: int = 8) -> Planner:
    case = ZOO["gpt"]
    return Planner(case.model(), sw.Cluster.local(world), case.batch(0))


def chosen(force: dict[str, Any], world: int = 8) -> dict[str, sw.Strategy]:
    return {name: choice.strategy for name, choice in gpt(world).plan(force=force).choices.items()}


def test_without_force_the_ops_are_those_of_the_model() -> None:
    assert tuple(chosen({})) == OPS


@pytest.mark.parametrize(
    ("word", "grid", "rest"),
    [
        ("dp", (1, 1, 1, 8), 1),
        ("zdp", (1, 1, 1, 8), 8),
        ("column:8", (8, 1, 1, 1), 1),
        ("row:8", (1, 8, 1, 1), 1),
        ((2, 2, 2, 1), (2, 2, 2, 1), 2),
        (sw.Grid(2, 1, 1, 4), (2, 1, 1, 4), None),
        (sw.Strategy(sw.Grid(2, 1, 2, 2), 2), (2, 1, 2, 2), 2),
    ],
)
def test_each_way_to_force_means_its_grid(word: Any, grid: tuple[int, ...], rest: int | None) -> None:
    strategy = chosen({"blocks.0.up": word})["blocks.0.up"]
    assert strategy.grid == sw.Grid(*grid)
    assert rest is None or strategy.rest == rest


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_column_and_row_take_a_degree(degree: int) -> None:
    found = chosen({"*.up": f"column:{degree}", "*.down": f"row:{degree}"})
    for layer in (0, 1):
        assert found[f"blocks.{layer}.up"].grid == sw.Grid(degree, 1, 1, 8 // degree)
        assert found[f"blocks.{layer}.down"].grid == sw.Grid(1, degree, 1, 8 // degree)


def test_without_a_degree_the_planner_picks_it() -> None:
    found = chosen({"*.up": "column", "*.down": "row", "*.qkv": "3d"})
    assert found["blocks.0.up"].grid.x > 1 and found["blocks.0.up"].grid.y == 1
    assert found["blocks.0.down"].grid.y > 1 and found["blocks.0.down"].grid.x == 1
    qkv = found["blocks.1.attention.qkv"]
    assert qkv.grid.x > 1 and qkv.grid.y > 1 and qkv.rest == qkv.grid.z


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("*", OPS),
        ("blocks", OPS[2:10]),
        ("blocks.1", OPS[6:10]),
        ("blocks.*.attention", (OPS[2], OPS[3], OPS[6], OPS[7])),
        ("*.qkv", (OPS[2], OPS[6])),
        ("blocks.[0].up", (OPS[4],)),
        ("head.weight", (OPS[10],)),
        ("*.weight", OPS),
    ],
)
def test_patterns_name_modules_what_is_in_them_and_parameters(pattern: str, meant: tuple[str, ...]) -> None:
    zdp, row = sw.Strategy(sw.Grid(data=8), 8), sw.Strategy(sw.Grid(1, 2, 1, 4))
    found = chosen({"*": row, pattern: "zdp"})
    assert {name for name, strategy in found.items() if strategy == zdp} == set(meant)


def test_the_last_pattern_that_matches_holds() -> None:
    found = chosen({"blocks.0": "zdp", "*.up": "dp"})
    assert kind(found["blocks.0.up"]) == "data" and kind(found["blocks.0.down"]) == "sharded"
    assert kind(chosen({"*.up": "dp", "blocks.0": "zdp"})["blocks.0.up"]) == "sharded"


def test_forcing_never_makes_a_plan_faster_and_is_told_in_it() -> None:
    free = gpt().plan()
    forced = gpt().plan(force={"*.up": "zdp"})
    assert forced.program_time >= free.program_time
    assert (forced.forced, free.forced) == (("*.up",), ())
    same = gpt().plan(force={name: choice.strategy for name, choice in free.choices.items()})
    assert same.step_time == pytest.approx(free.step_time)


def test_what_is_forced_counts_against_the_memory_limit() -> None:
    dp = gpt(4).plan(force={"*": "dp"})
    with pytest.raises(sw.InfeasibleError):
        gpt(4).plan(force={"*": "dp"}, memory_limit=dp.peak_memory * 2 // 3)
    assert gpt(4).plan(force={"head": "dp"}, memory_limit=dp.peak_memory - 1).choices["head"].strategy.rest == 1


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_strategy_that_fits_can_be_forced(data: st.DataObject) -> None:
    world = data.draw(st.sampled_from([2, 4, 8]))
    mesh = sw.Cluster.local(world).mesh()
    planner = gpt(8).on(sw.Cluster.local(world))
    wanted = {
        name: data.draw(st.sampled_from(list(strategies(mesh)))) for name in data.draw(st.sets(st.sampled_from(OPS)))
    }
    try:
        plan = planner.plan(force=wanted)
    except sw.PlanError as error:
        assert "does not divide" in str(error) or "does not fit" in str(error)
        return
    for name, strategy in wanted.items():
        assert plan.choices[name].strategy == strategy


def test_a_layer_may_have_fewer_strategies_than_its_equals() -> None:
    # Rivals of the best plan have fewer again, in other places of the list
    strategy = sw.Strategy(sw.Grid(4, 1, 1, 2), 2, states=2, gradients=2)
    assert gpt().plan(force={"blocks.0.attention.qkv": strategy}).choices["blocks.0.attention.qkv"].strategy == strategy


def test_several_strategies_leave_the_planner_the_choice() -> None:
    either = gpt().plan(force={"*": ["dp", "zdp"]})
    assert {choice.strategy.grid for choice in either.choices.values()} == {sw.Grid(data=8)}
    alone = [gpt().plan(force={"*": word}).step_time for word in ("dp", "zdp")]
    assert either.step_time <= min(alone)


FORMS = {
    "gpt": {"column": "*.qkv *.up head", "row": "*.out *.down tokens", "": "positions"},
    "gpt2": {"column": "*.c_attn *.c_fc *.wte", "row": "*.c_proj", "": "*.wpe"},
    "llama": {
        "column": "*.q_proj *.k_proj *.v_proj *.gate_proj *.up_proj lm_head",
        "row": "*.o_proj *.down_proj *.embed_tokens",
    },
    "bert": {
        "column": "*.query *.key *.value *.intermediate.dense *.word_embeddings",
        "row": "*.output.dense *.token_type_embeddings",
        "": "*.position_embeddings *.transform.dense",
    },
    "vit": {"column": "*.[qkv]_proj *.fc1 classifier", "row": "*.o_proj *.fc2 *.projection"},
    "t5": {
        "column": "*Attention.[qkv] *.wi shared",
        "row": "*Attention.o *.wo",
        "": "*.relative_attention_bias",
    },
    "mixtral": {
        "column": "*.[qkv]_proj *.gate_up_proj lm_head",
        "row": "*.o_proj *.down_proj *.embed_tokens",
        "": "*.mlp.gate",
    },
}
"""What Megatron-LM splits how."""


@pytest.mark.parametrize("name", list(FORMS))
def test_columns_and_rows_are_found_in_the_structure_of_a_model(name: str) -> None:
    ops = joint(name).annotated.ops
    listed = {form: patterns.split() for form, patterns in FORMS[name].items()}
    meant = {op.name: form for op in ops for form, patterns in listed.items() for pattern in patterns
             if fnmatchcase(op.name, pattern)}  # fmt: skip
    assert meant == {op.name: op.form for op in ops if op.name in meant}
    assert len(meant) == len(ops)


@pytest.mark.parametrize(
    ("wanted", "column", "row", "neither"),
    [
        ("tensor:2", "(2, 1, 1, 4) DP", "(1, 2, 1, 4) DP", "(1, 1, 1, 8) DP"),
        ("tensor:4+zero1", "(4, 1, 1, 2) ZeRO-1", "(1, 4, 1, 2) ZeRO-1", "(1, 1, 1, 8) ZeRO-1"),
        ("tensor:2+zero3", "(2, 1, 1, 4) ZDP", "(1, 2, 1, 4) ZDP", "(1, 1, 1, 8) ZDP"),
        ("tensor:4x2", "(4, 2, 1, 1)", "(2, 4, 1, 1) y inside", "(1, 1, 1, 8) DP"),
        ("tensor:2x1x2", "(2, 1, 2, 2) rest/2", "(1, 2, 2, 2) rest/2", "(1, 1, 1, 8) DP"),
    ],
)
def test_tensor_parallelism_takes_turns(wanted: str, column: str, row: str, neither: str) -> None:
    ops = list(gpt().ops.values())
    found = forced_strategies({"*": wanted}, ops, sw.Cluster.local(8).mesh(), 8)
    assert {op.name: str(*found[op.name]) for op in ops} == {
        op.name: {"column": column, "row": row, "": neither}[op.form] for op in ops
    }


def test_what_tensor_parallelism_does_not_fit_is_data_parallel() -> None:
    mlp = Planner(ZOO["mlp"].model(), sw.Cluster.local(4), ZOO["mlp"].batch(0))
    found = mlp.plan(force={"*": "tensor:2"}).choices
    assert {name: str(choice.strategy) for name, choice in found.items()} == {
        "first": "(1, 2, 1, 2) DP", "second": "(1, 1, 1, 4) DP", "back": "(1, 1, 1, 4) DP", "last": "(1, 1, 1, 4) DP",
    }  # fmt: skip
    with pytest.raises(sw.PlanError, match=r"first cannot be 'tensor:4' .* does not divide its loops of sizes \[6\]"):
        mlp.plan(force={"*": "tensor:4"})


def refused(force: dict[str, Any], world: int = 8) -> str:
    with pytest.raises(sw.PlanError) as caught:
        gpt(world).plan(force=force)
    return str(caught.value)


def test_a_pattern_that_names_nothing_is_told_with_near_names() -> None:
    text = refused({"blocks.*.upp": "dp"})
    assert "force['blocks.*.upp'] matches no op" in text
    assert "blocks.0.up" in text


def test_a_norm_is_told_whose_companion_it_is() -> None:
    text = refused({"blocks.0.norm2": "zdp"})
    assert "blocks.0.norm2" in text and "name blocks.0.up instead" in text


def test_the_second_of_two_modules_that_share_a_weight_is_told_whose_op_it_has() -> None:
    model = nn.Sequential(OrderedDict(one=nn.Linear(8, 8), other=nn.Linear(8, 8)))
    model.get_submodule("other").weight = model.get_submodule("one").weight
    with pytest.raises(sw.PlanError, match=r"force\['other'\] matches no op .*name one instead.*share a weight"):
        sw.plan(model, sw.Cluster.preset("dgx-h100"), torch.randn(8, 8), options=sw.Options(force={"other": "row"}))


@pytest.mark.parametrize(
    "value", ["fsdp", "column:x", "column:3", "tensor:3", "tensor", ("dp", 3), (2, 2), (2, 2, 2, 1, 1, 1), 3, None]
)
def test_a_value_that_is_no_strategy_is_told_with_what_is(value: Any) -> None:
    text = refused({"head": value})
    assert "force['head']" in text
    assert "'dp', 'zdp', 'column', 'row', 'expert', '3d'" in text or "no grid of 8 devices" in text


def test_a_grid_of_another_size_is_told() -> None:
    assert "has 4 devices, the cluster 8" in refused({"head": (2, 2, 1, 1)})
    assert "has 4 devices, the cluster 8" in refused({"head": sw.Strategy(sw.Grid(2, 2))})


def test_a_strategy_that_does_not_divide_is_told_with_the_op_and_its_sizes() -> None:
    mlp = Planner(ZOO["mlp"].model(), sw.Cluster.local(4), ZOO["mlp"].batch(0))
    for force in ({"second": "column:2"}, {"last": (4, 1, 1, 1)}):
        with pytest.raises(
            sw.PlanError, match=r"(second|last) cannot be .* does not divide its loops of sizes \[(15|7)\]"
        ):
            mlp.plan(force=force)


def test_a_batch_that_does_not_divide_is_told() -> None:
    odd = Planner(nn.Linear(8, 8), sw.Cluster.local(4), torch.zeros(6, 8))
    with pytest.raises(sw.PlanError, match=r"z \* data = 4 does not divide the batch of 6 .*4 devices"):
        odd.plan(force={"*": "dp"})
    assert odd.plan().choices  # it still has tensor parallel forms


def test_a_grid_that_cuts_an_axis_is_told() -> None:
    cluster = sw.Cluster.preset("dgx-a100", nodes=2).resized(gpu=3)  # axes of 3 and 2, the 3 innermost
    planner = Planner(nn.Sequential(nn.Linear(18, 18)), cluster, torch.zeros(18, 18))
    with pytest.raises(
        sw.PlanError, match=r"force\['0'\]: x = 2 of the grid \(2, 1, 1, 3\) does not fit the axes .*gpu0:3"
    ):
        planner.plan(force={"0": (2, 1, 1, 3)})
