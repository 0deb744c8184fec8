"""Recomputation and the all-gathers of parameters: whole ones are shared with the backward, those of slices are not."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import fx

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model import Options
from shardweave.demo.model import GPTConfig
from shardweave.sharding import info
from tests.planner.planners import MetaGPT

GPT = MetaGPT(GPTConfig(vocabulary=256, context=64, layers=2, heads=4, width=64), batch=8)


def backward_gathers(slices: int) -> Counter[str]:
    """How many all-gathers of each parameter the backward of a recomputed ZeRO-3 step starts."""
    model, inputs = GPT.build()
    options = Options(force={"*": "zdp"}, recompute="full", operator_slices=slices, sub_batches=1, keep_gathered=False,
                      micro_batches=1, buckets=False)  # fmt: skip
    compiler = Compiler(model, sw.Cluster.local(2), inputs, options, None)
    graph: fx.Graph = compiler.lower(compiler.plan()).step.backward.graph
    collectives = [known.collective for node in graph.nodes if (known := info(node)).collective is not None]
    return Counter(each.owner for each in collectives if each is not None and each.cause == "parameter")


@pytest.mark.parametrize(("slices", "gathers"), [(1, 1), (4, 8)])
def test_only_parameters_that_are_gathered_whole_are_shared_with_the_recomputation(slices: int, gathers: int) -> None:
    found = backward_gathers(slices)
    products = {name: count for name, count in found.items() if name.startswith("blocks.0") and "up.weight" in name}
    assert set(products.values()) == {gathers}, found
