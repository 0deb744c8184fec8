"""Block: what is named is waited for at once, and nothing else is."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import fx

import shardweave as sw
from shardweave.cost_model import Cluster
from shardweave.cost_model.options import Options
from shardweave.ir import Ablation, Grid, OverlapConfig, Strategy, Traffic
from shardweave.ir.errors import PlanError
from shardweave.passes.candidate_orders import WAIT
from shardweave.passes.pipeline import Compiled, lower
from shardweave.passes.schedule import traffic_of
from shardweave.passes.sharded_values import StateSharding
from shardweave.sharding.graphs import info
from tests.models import mlp
from tests.passes.harness import mesh_of
from tests.passes.joint import joint

# Parameters rest over two devices in a step, their states over four of eight
STRATEGY = Strategy(Grid(data=8), 2, states=4, gradients=2)


def lowered(blocking: tuple[Traffic, ...] = (), strategy: Strategy = STRATEGY) -> Compiled:
    """A step in several micro-batches, so that gradients are added up before they go to their states."""
    step = joint("gpt", size=16)
    strategies = {op.name: strategy for op in step.annotated.ops}
    options = Options(ablation=Ablation(blocking=blocking), micro_batches=2)
    return lower(step.annotated, strategies, mesh_of(8), options)


def kinds(module: fx.GraphModule, strategy: Strategy = STRATEGY) -> dict[fx.Node, Traffic]:
    """The traffic of each start."""
    axes = strategy.axes(mesh_of(8))
    return {
        node: traffic_of(what, StateSharding(*axes.stages))
        for node in module.graph.nodes
        if (what := info(node).collective)
    }


def between(module: fx.GraphModule) -> dict[fx.Node, int]:
    """How many nodes lie between each start and its wait."""
    at = {node: index for index, node in enumerate(module.graph.nodes)}
    return {wait.args[0]: at[wait] - at[wait.args[0]] - 1 for wait in at if wait.target is WAIT}


@pytest.mark.parametrize("kind", [kind for kind in get_args(Traffic) if kind != "activation"])
def test_what_is_named_is_waited_for_at_once(kind: Traffic) -> None:
    """Its starts have their waits right behind them; the collectives are the same; others still overlap."""
    compiled = lowered((kind,))
    before, after = compiled.graphs["schedule"], compiled.graphs["disable_overlap"]
    found, apart = kinds(after), between(after)
    assert kind in found.values()
    assert all(apart[start] == 0 for start, its in found.items() if its == kind)
    moved = [{node.name for node, its in kinds(each).items() if its != "activation"} for each in (before, after)]
    assert moved[0] == moved[1]  # of activations, what is summed ahead of all micro-batches is set apart
    others = {start.name for start, its in found.items() if its != kind and apart[start] > 0}
    assert others
    assert any(apart > 0 for start, apart in between(before).items() if kinds(before)[start] == kind)


def test_activations_are_traffic_of_their_own() -> None:
    strategy = Strategy(Grid(x=2, data=4))
    compiled = lowered(("activation",), strategy)
    found, apart = kinds(compiled.graphs["disable_overlap"], strategy), between(compiled.graphs["disable_overlap"])
    assert "activation" in found.values()
    assert all(apart[start] == 0 for start, its in found.items() if its == "activation")


def test_the_more_is_waited_for_the_longer_a_step_takes() -> None:
    """And what compute waits for is exposed, in full, in what the plan says of itself."""
    cluster = Cluster.preset("rtx3090-pcie", nodes=2)
    sizes = (512, 512, 2048, 512)
    model, batch = mlp.build(sizes), mlp.batch(torch.Generator(), 64, sizes)
    orders: list[tuple[Traffic, ...]] = [(), ("gather",), ("gather", "scatter"), ("gather", "scatter", "reduce")]
    plans = [
        sw.plan(model, cluster, batch, options=Options(force={"*": "hsdp"}, ablation=Ablation(blocking=each)))
        for each in orders
    ]
    exposed = [plan.exposed_communication for plan in plans]
    assert exposed == sorted(exposed) and exposed[0] < exposed[-1]
    assert plans[-1].overlap.ablation.blocking == orders[-1]
    assert "waiting for gather, scatter, reduce" in str(plans[-1].overlap)
    assert plans[-1].to_dict() == sw.Plan.from_dict(plans[-1].to_dict()).to_dict()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_whole_sums_are_reduced_by_all(whole: bool, micro_batches: int) -> None:
    """Where states rest further than gradients: the same parts of a sum in the end, over more links' bytes before."""
    step, strategy = joint("gpt", size=16), Strategy(Grid(data=8), 2, states=8, gradients=2)
    strategies = {op.name: strategy for op in step.annotated.ops}
    options = Options(ablation=Ablation(all_reduce_gradients=whole), micro_batches=micro_batches)
    compiled = lower(step.annotated, strategies, mesh_of(8), options)
    found = [what for node in compiled.graphs["schedule"].graph.nodes if (what := info(node).collective)]
    gradients = [(what.kind, len(what.axes)) for what in found if what.cause == "gradient"]
    scattered = ("reduce_scatter", 3) if micro_batches == 1 else ("reduce_scatter", 2)
    assert set(gradients) >= ({("reduce_scatter", 1), ("all_reduce", 2)} if whole else {scattered})
    assert (("all_reduce", 2) in gradients) == whole
    assert options.overlap.without().keys() == ({"all-reduced gradients"} if whole else set())


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(PlanError, match="kinds of traffic, gather.*got 'gathers'"):
        Ablation(blocking=("gathers",))  # type: ignore[arg-type]  # as a user may mistype it
    config = OverlapConfig(ablation=Ablation(blocking=("gather",)))
    assert OverlapConfig.from_dict(config.to_dict()).ablation.blocking == ("gather",)
