"""Modules left out of sub-batches: the numbers are one device's, and their collectives those of the whole batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.ir import OverlapConfig
from shardweave.ir.errors import LayoutError, PlanError
from shardweave.runtime.launch import WorkerPool
from shardweave.sharding.annotate import layer_of
from shardweave.sharding.graphs import info
from tests.compiler.test_overlap import check, lowered, moved, ways
from tests.compiler.training import ALL_CASES, Way
from tests.models import gpt
from tests.passes.harness import examples

MODULES = ["tokens", "positions", "blocks.0", "blocks.1", "blocks.*.attention", "blocks.*.down", "head"]
MIXED = {"*": "tensor:4", "blocks.0": "dp"}
"""A block whose devices have a sample each of four, before one whose devices have all four."""


def test_training_equals_one_device(pool: WorkerPool) -> None:
    @examples(12 if ALL_CASES else 2, shrink=False)
    @given(
        exclude_from_sub_batches=st.sets(st.sampled_from(MODULES), min_size=1).map(sorted),
        recompute=st.sampled_from(["fine", "full", "none"]),
        buckets=st.booleans(),
    )
    def law(**options: Any) -> None:
        tensor, _, mixed = ways("gpt", sub_batches=2, **options)
        check("gpt", [tensor, mixed], pool)

    law()


def test_what_is_too_small_to_be_cut_equals_one_device(pool: WorkerPool) -> None:
    options = {"sub_batches": 2, "exclude_from_sub_batches": ["tokens", "positions", "blocks.0"], "recompute": "fine"}
    check("gpt", [Way("mixed", MIXED, options=options), Way("plain", MIXED, options={"sub_batches": 1})], pool, rows=4)
    with pytest.raises(PlanError, match="blocks.0.*4 \\* 2 sub-batches does not divide the batch of 4"):
        plan(exclude_from_sub_batches=["tokens", "positions"])


def plan(**options: Any) -> sw.Plan:
    model, batch = gpt.build(), gpt.batch(torch.Generator(), 4)
    return sw.plan(model, sw.Cluster.local(4), batch, options=sw.Options(sub_batches=2, force=MIXED, **options))


def test_a_plan_says_what_is_left_out() -> None:
    made = plan(exclude_from_sub_batches=["tokens", "positions", "blocks.0"])
    assert "2 sub-batches but for tokens and positions and blocks.0" in str(made.explain())
    assert OverlapConfig.from_dict(made.overlap.to_dict()) == made.overlap


def test_a_layer_left_out_has_the_collectives_of_the_whole_batch() -> None:
    """And others those of halves."""
    options: dict[str, Any] = {"exclude_from_sub_batches": ["blocks.1"]}
    once, halves, mixed = (
        lowered("deep", {"*": "tensor:4"}, **asked).step
        for asked in ({}, {"sub_batches": 2}, {"sub_batches": 2, **options})
    )
    for part in ("forward", "backward"):
        whole, half, found = (
            {
                layer: Counter((kind, size) for kind, size, node in moved(module) if layer_of(info(node).op) == layer)
                for layer in ("blocks.0", "blocks.1", "blocks.2")
            }
            for module in (getattr(step, part) for step in (once, halves, mixed))
        )
        assert whole["blocks.1"] and whole["blocks.1"] != half["blocks.1"]
        assert found == {**half, "blocks.1": whole["blocks.1"]}


def test_layers_of_unlike_degrees_meet_in_one_gather() -> None:
    """The residual stream is gathered for itself and for its norm at once, and for both sub-batches."""
    model, batch = gpt.build(), gpt.batch(torch.Generator(), 4)
    cluster, force = sw.Cluster.preset("rtx3090-pcie", nodes=1), {"*": "tensor:4", "tokens": "dp", "blocks.0": "dp"}
    plain = sw.Options(force=force, sequence_parallel=False, micro_batches=1, recompute="none", sub_batches=1)
    for options in (plain, replace(plain, sub_batches=2, exclude_from_sub_batches=["tokens", "positions", "blocks.0"])):
        made = sw.plan(model, cluster, batch, options=options)
        moves = [event for event in made.timeline().events if event.phase == "forward" and event.bytes]
        assert [event.kind for event in moves if event.cause == "activation"].count("all_gather") == 1, options


def test_where_ops_meet_a_step_may_be_too_small_for_the_axes_of_the_plan() -> None:
    """Joins are chosen for the whole batch: in a sub-batch devices that would have less than a sample do the same."""
    model, batch = gpt.build(), gpt.batch(torch.Generator(), 4)
    options = sw.Options(sub_batches=2, force=MIXED, exclude_from_sub_batches=["tokens", "positions", "blocks.0"])
    compiler = Compiler(model, sw.Cluster.local(4), batch, options, None)
    made = compiler.plan()
    assert len(made.joins["blocks.0:add:0"]) == 2
    spread = replace(made, joins={**made.joins, "blocks.1:add:0": made.joins["blocks.0:add:0"]})
    assert compiler.lower(spread).step.forward.code != compiler.lower(made).step.forward.code


class Normed(nn.Module):
    """Convolutions about a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()).square().mean()


def test_a_batch_norm_may_be_left_out(pool: WorkerPool) -> None:
    """Its statistics are those of the whole batch."""
    x = torch.randn(8, 3, 8, 8)
    with pytest.raises(LayoutError, match="norm.*whole batch.*sub-batches"):
        sw.plan(Normed(), sw.Cluster.local(2), x, options=sw.Options(sub_batches=2))
    for found, expected in pool.run(normed, nprocs=2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def normed() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model, x = Normed().double(), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    whole = Normed().double()
    whole.load_state_dict(model.state_dict())
    options = sw.Options(sub_batches=2, exclude_from_sub_batches=["norm"], force={"*": "dp"})
    parallel = sw.compile_parallel(model, sw.Cluster.local(2), x, options=options)
    loss = parallel(x)
    loss.backward()
    expected = whole(x)
    expected.backward()
    mine = [p.grad.full_tensor() for p in parallel.parameters() if isinstance(p.grad, DTensor)]
    state = parallel.state_dict()
    running = [value.full_tensor() if hasattr(value, "full_tensor") else value
               for name, value in state.items() if "running" in name]  # fmt: skip
    return (
        [loss.detach(), *mine, *running],
        [expected.detach(), *(p.grad for p in whole.parameters()), *(whole.norm.running_mean, whole.norm.running_var)],
    )
