"""Sequence parallelism: sums of tensor parallelism scattered where values meet, counted and against one device."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.demo.model import GPT, GPTConfig
from shardweave.runtime.launch import WorkerPool
from shardweave.sharding import info
from tests.compiler.training import ADAMW, Way, compile_ways, differences, model_of, train, train_packed
from tests.models import TODAY, ZOO
from tests.passes.harness import collectives
from tests.planner.planners import Planner

TENSOR = {"*": "tensor:2"}
WANTED = None, False, True
TWO = min(sw.Cluster.local(4).mesh().axes, key=lambda axis: axis.stride)


@cache
def gpt(batch: int) -> Planner:
    """Two layers of 4 devices' GPT, of which 2 share a sample of a batch of 2."""
    case = ZOO["gpt"]
    return Planner(case.model(), sw.Cluster.local(4), case.batch(0, batch))


def exchanged(planner: Planner, plan: sw.Plan) -> list[Counter[str]]:
    """How often the forward and the backward exchange the values between two layers."""
    shape = next(iter(planner.ops.values())).roles[0].node.meta["val"].shape
    step, size = planner.lowered(plan), shape.numel() * 4 // 2  # of the half of the batch that two devices have
    return [
        Counter(
            what.kind
            for what in collectives(graph)
            if (what.cause, what.axes, what.bytes) == ("activation", (TWO,), size)
        )
        for graph in (step.forward, step.backward)
    ]


@pytest.mark.parametrize(("batch", "loop"), [(2, "i1"), (8, "i0")])
def test_each_all_reduce_becomes_a_reduce_scatter_and_a_gather(batch: int, loop: str) -> None:
    """Megatron-LM's two a layer and pass, and one for the embedding and the head; on the sequence of a small batch."""
    whole, parts = (gpt(batch).plan(force=TENSOR, sequence_parallel=wanted) for wanted in (False, True))
    assert exchanged(gpt(batch), whole) == [{"all_reduce": 5}, {"all_reduce": 5}]
    assert exchanged(gpt(batch), parts) == [
        {"reduce_scatter": 5, "all_gather": 5},
        {"reduce_scatter": 5, "all_gather": 5 + (loop == "i1")},  # the positions have a sequence, too
    ]
    assert {join.get(TWO.name) for join in whole.joins.values()} == {None}
    assert {parts.joins[name].get(TWO.name) for name in whole.joins} == {loop}


@pytest.mark.parametrize(("batch", "loop"), [(4, "i1"), (8, "i0")])
def test_sums_are_scattered_over_what_sub_batches_leave_of_the_batch(batch: int, loop: str) -> None:
    """Two devices share a sample of each sub-batch of a batch of 4: they take halves of its sequence."""
    whole, parts = (gpt(batch).plan(force=TENSOR, sequence_parallel=wanted, sub_batches=2) for wanted in (False, True))
    sums = [name for name, join in whole.joins.items() if TWO.name not in join]
    assert sums and {parts.joins[name].get(TWO.name) for name in sums} == {loop}


def test_the_planner_chooses_where_nothing_is_asked_for() -> None:
    """No bias comes before these residual connections, and the batch is too small to be cut for all devices."""
    with torch.device("meta"):
        model, inputs = GPT(GPTConfig(64, 256, 2, 4, 64, bias=False)), torch.zeros(2, 256, dtype=torch.long)
    cluster = sw.Cluster.preset("rtx3090-nvlink", nodes=1)
    planner = Planner(model, cluster, (inputs, inputs))
    free, whole, parts = (planner.plan(force={"*": "tensor:4"}, sequence_parallel=wanted) for wanted in WANTED)
    assert free.step_time <= min(whole.step_time, parts.step_time) * (1 + 1e-6)  # whole ticks of the program


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_training_equals_one_device(name: str, pool: WorkerPool) -> None:
    """A batch of 2, so that the sequence is cut; with biases, which the sums are scattered before."""
    case, dtype = ZOO[name], torch.float64
    model = model_of(case, dtype)
    way = Way("sequence parallel", TENSOR, options={"sequence_parallel": True})
    steps = compile_ways(model, case, dtype, 4, [way], size=2)
    expected = train(model, case, dtype, count=3, size=2)
    first, *others = pool.run(train_packed, name, dtype, steps, ADAMW, 3, 2, nprocs=4)
    assert not differences(way, expected, [first[0], *(other[0] for other in others)], 1e-9, 1e-8)


@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_no_layout_divides_the_batch_further_than_sub_batches_allow(name: str) -> None:
    """Of a batch of 4 in two sub-batches two devices have different samples: sums and masks are over no more either."""
    case = {**TODAY, **ZOO}[name]
    options = sw.Options(micro_batches=1, sub_batches=2, buckets=False)
    compiler = Compiler(case.model(), sw.Cluster.local(4), case.batch(0, 4), options, None)
    builder = compiler.search.planner(1).layers.builder
    checked = 0
    for node, layouts in builder.layouts.items():
        rule = info(node).rule
        if rule is None:
            continue
        dims = [dim for dim, names in enumerate(rule.outputs[0]) if names == (builder.facts.batch_factor(node),)]
        for layout, dim in product((port[0] for port in layouts), dims):
            parts = layout.global_shape[dim] // layout.local_shape[dim]
            assert parts <= 2, f"{node.name} lies in {layout}"
            checked += parts == 2
    assert checked
