"""What docs/models.md promises of models holds."""

from __future__ import annotations

import pytest

import shardweave as sw
from benchmarks.measure_models import SLOWER, Measured, local, replicated_ops, sharded_share
from shardweave.cost_model import flops_by_op
from shardweave.sharding.graphs import info
from tests.cost_model.handmade import Builder, aten
from tests.cost_model.test_flops import graph_of
from tests.models import TODAY


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("cnn", local(8)), ("gpt2", local(4)),  # of the others, latencies make the planner leave a part replicated
        ("cnn", local(8, SLOWER)), ("gpt2", local(8, SLOWER)), ("mixtral", local(8, SLOWER)),
    ],
)  # fmt: skip
def test_nothing_is_replicated_by_the_planners_choice(name: str, cluster: sw.Cluster) -> None:
    """On devices with little arithmetic, whatever the planner leaves replicated is what rules do not allow."""
    case = TODAY[name]
    compiler = Measured.of(case.model(), case.batch(0), cluster)
    found = compiler.shared(compiler.plan())
    assert 0.99 <= found.share <= 1.0, found.alike


def test_a_share_is_what_one_device_would_do_over_what_all_do() -> None:
    whole, local = Builder([]), Builder([])
    for builder, wide in ((whole, 64), (local, 16)):
        x, up, out = builder.tensor("x", 8, 32), builder.tensor("up", 32, wide), builder.tensor("out", 8, 4)
        hidden = builder.call(aten.mm.default, x, up, op="up")  # its columns are on 4 devices
        builder.call(aten.relu.default, hidden, op="up")
        builder.call(aten.mm.default, builder.tensor("z", 4, 8), out, op="down")  # whole on each
    counted = flops_by_op(whole.graph), flops_by_op([local.graph])
    up, down = 2 * 8 * 32 * 64, 2 * 4 * 8 * 4
    assert sharded_share(*counted, devices=4) == (up + down) / (up + 4 * down)
    assert replicated_ops(*counted, devices=4) == [(("down", False), 3 * down / (up + 4 * down))]
    assert info(next(iter(local.graph.nodes))).op == ""


def test_a_share_is_not_capped() -> None:
    whole, local = graph_of(aten.mm.default, (8, 8), (8, 8)), graph_of(aten.mm.default, (1, 8), (8, 8))
    assert sharded_share(flops_by_op(whole), flops_by_op(local), devices=4) == 2.0
