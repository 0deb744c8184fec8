"""Experts: a loop of their own in the grid, with what they cost."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from torch import fx

import shardweave as sw
from shardweave.planner.problem.op_costs import where_summed
from shardweave.sharding.graphs import info
from tests.models import TODAY
from tests.models.hub import LENGTH
from tests.planner.planners import Planner

UP, DOWN = (f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))


@cache
def mixtral(world: int = 8) -> Planner:
    case = TODAY["mixtral"]
    return Planner(case.model(), sw.Cluster.local(world), case.batch(0))


def test_each_op_of_a_module_with_several_is_named_by_its_parameter() -> None:
    ops = mixtral().ops
    assert {UP, DOWN} <= set(ops)
    assert not any(name.endswith(".experts") for name in ops)
    assert [ops[UP].sizes[atom] for atom in ops[UP].experts] == [4]
    assert not set(ops[UP].experts) & {*ops[UP].outputs, *ops[UP].contracted}
    assert not any(op.experts for name, op in ops.items() if name not in (UP, DOWN))


def test_experts_columns_and_rows_are_three_things() -> None:
    found = mixtral().plan(force={UP: "column:4", DOWN: "row:4"}).choices
    assert found[UP].strategy.grid == sw.Grid(x=4, data=2)
    assert found[DOWN].strategy.grid == sw.Grid(y=4, data=2)
    found = mixtral().plan(force={"*.experts.*": "expert:4"}).choices
    assert found[UP].strategy.grid == found[DOWN].strategy.grid == sw.Grid(data=2, experts=4)
    found = mixtral().plan(force={UP: (2, 1, 1, 1, 4), DOWN: sw.Grid(y=2, experts=4)}).choices
    assert found[UP].strategy.grid == sw.Grid(x=2, experts=4)


def test_a_plan_with_experts_is_saved_and_read(tmp_path: Path) -> None:
    plan = mixtral().plan(force={"*.experts.*": "expert:4"})
    plan.save(tmp_path / "plan.json")
    assert sw.Plan.load(tmp_path / "plan.json").choices[UP].strategy == plan.choices[UP].strategy
    assert "experts 4" in str(plan.explain())


def test_an_op_without_experts_says_so() -> None:
    with pytest.raises(sw.PlanError, match=r"q_proj.*experts = \d, but it has no such loop"):
        mixtral().plan(force={"*.q_proj": "expert"})


def test_a_gradient_of_experts_is_summed_where_a_token_is_whole_again() -> None:
    """Between two products with experts nothing is; before the first one, after the sum over a token's choices."""
    ops = mixtral().ops

    def input_gradient(name: str) -> fx.Node:
        return next(role.node for role in ops[name].roles if info(role.node).backward and "mm" in str(role.node.target))

    assert where_summed(input_gradient(DOWN)) is None
    summed = where_summed(input_gradient(UP))
    assert summed is not None and tuple(summed.meta["val"].shape) == (8, LENGTH, 32)
