"""Passes run in the order of the list, each on a graph that has what it requires, and each is verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import fx

import shardweave as sw
from shardweave.passes.base import Pass, PassManager, Property
from shardweave.passes.partition import Shard
from shardweave.passes.pipeline import PASSES, lower
from shardweave.passes.recompute import Recompute
from shardweave.passes.schedule import Schedule
from shardweave.planner.problem.space import forced_strategies
from tests.passes.joint import joint

CLUSTER = sw.Cluster.local(4)
JOINT: frozenset[Property] = frozenset({"joint"})


@dataclass(frozen=True)
class Drops(Pass):
    """Drops every wait: what it gives is no graph that may run."""

    name = "drops"

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        for node in list(graph_module.graph.nodes):
            if node.target is torch.ops._c10d_functional.wait_tensor.default:
                node.replace_all_uses_with(node.all_input_nodes[0])
                graph_module.graph.erase_node(node)
        return graph_module


def stages(
    options: sw.Options, told: Callable[[str, fx.GraphModule], None] | None = None
) -> dict[str, fx.GraphModule]:
    """The graph after each pass of a small step."""
    annotated = joint("mlp").annotated
    mesh = CLUSTER.mesh()
    force = forced_strategies({"*": "zdp"}, annotated.ops, mesh, annotated.batch)
    return lower(annotated, {op.name: force[op.name][0] for op in annotated.ops}, mesh, options, told).graphs


@pytest.mark.parametrize(
    "options",
    [
        sw.Options(),
        sw.Options(sub_batches=2, keep_gathered=True, buckets=True, recompute="full"),
        sw.Options(quantize="zero++", ablation=sw.Ablation(blocking=["gather"])),
    ],
    ids=str,
)
def test_passes_run_in_the_order_of_the_list(options: sw.Options) -> None:
    names = [each.name for each in PASSES]
    ran = [name for name in stages(options) if name in names]
    assert ran == sorted(ran, key=names.index)
    assert {"shard", "recompute", "schedule"} <= set(ran)
    assert ("bucket" in ran) == bool(options.buckets) and ("quantize" in ran) == bool(options.quantize)
    assert ("disable_overlap" in ran) == bool(options.ablation.blocking)


def test_a_pass_is_not_given_a_graph_that_lacks_what_it_requires() -> None:
    graph_module = stages(sw.Options())["shard"]
    with pytest.raises(sw.VerifyError, match="the pass recompute requires a graph that is local, got one that is noth"):
        PassManager().run(graph_module, [Recompute()])


def test_only_a_joint_graph_is_sharded_and_a_sharded_graph_is_not_joint() -> None:
    shard, graph_module = Shard(CLUSTER.mesh(), {}, {}, [None] * 9), joint("mlp").copy()
    with pytest.raises(sw.VerifyError, match="the pass shard requires a graph that is joint, got one that is nothing"):
        PassManager().run(graph_module, [shard])
    with pytest.raises(sw.VerifyError, match="the pass shard requires a graph that is joint, got one that is nothing"):
        PassManager().resume(Shard, stages(sw.Options())["shard"])
    manager = PassManager(properties=JOINT)
    manager.resume(Shard, stages(sw.Options())["shard"])
    with pytest.raises(sw.VerifyError, match="the pass shard requires a graph that is joint, got one that is local"):
        manager.run(graph_module, [shard])


def test_a_sharded_graph_that_breaks_a_law_names_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Shard` is verified as all passes are."""
    shard = Shard.__call__
    monkeypatch.setattr(Shard, "__call__", lambda each, graph_module: Drops()(shard(each, graph_module)))
    with pytest.raises(sw.VerifyError, match="after shard"):
        stages(sw.Options())


def test_passes_before_buckets_run_once_where_buckets_do_not_fit() -> None:
    told: list[str] = []
    graphs = stages(sw.Options(buckets=True, memory_limit=1), lambda name, _: told.append(name))
    assert told[:5] == ["shard", "recompute", "bucket", "schedule", "schedule"]
    assert "bucket" not in graphs and "schedule" in graphs


def test_a_result_that_breaks_a_law_names_the_pass() -> None:
    manager = PassManager(properties=JOINT)
    manager.resume(Shard, stages(sw.Options())["shard"])
    with pytest.raises(sw.VerifyError, match="after drops"):
        manager.run(stages(sw.Options())["shard"], [Drops()])


def test_the_graph_after_each_pass_is_kept_as_it_was() -> None:
    told: list[str] = []
    manager = PassManager(properties=JOINT, on_pass=lambda name, _: told.append(name))
    sharded = stages(sw.Options())["shard"]
    manager.resume(Shard, sharded)
    before = manager.history["shard"].code
    last = manager.run(sharded, [Recompute({"*": "full"}), Schedule(CLUSTER)])
    assert told == manager.names == list(manager.history) == ["shard", "recompute", "schedule"]
    assert manager.history["shard"].code == before and manager.history["schedule"] is last
    draft = PassManager(verifies=False, properties=JOINT)
    draft.resume(Shard, sharded)
    assert not draft.history
