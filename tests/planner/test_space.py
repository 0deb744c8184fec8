"""The candidates of an op: AMSP's sharding factors are all among them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.ir import Axis, Mesh
from shardweave.planner.problem.space import strategies
from shardweave.sharding import Op
from tests.models import ZOO

MESH = Mesh.of_levels([("gpu", 8), ("node", 4)])


@pytest.mark.parametrize(("micro_batches", "count"), [(1, 21), (4, 36)])
def test_all_sharding_factors_of_amsp_are_candidates(micro_batches: int, count: int) -> None:
    """Equations 2 to 7 of arXiv 2311.00257: degrees that divide each other, gradients sharded as one of the others."""
    times = (Axis("micro", micro_batches, 32, "time"),) if micro_batches > 1 else ()
    mesh = replace(MESH, micro_batch_axes=times)
    data_parallel = [each for each in strategies(mesh) if each.degree == 1]
    found = {(each.rest, each.gradients, each.states) for each in data_parallel}
    degrees = [1, 2, 4, 8, 16, 32]
    factors = {
        (parameters, gradients, states)
        for parameters, gradients, states in product(degrees, repeat=3)
        if parameters <= states and gradients in ((parameters, states) if micro_batches > 1 else (states,))
    }
    assert found == factors and len(found) == count


def test_no_two_candidates_of_an_op_are_the_same() -> None:
    found = [*strategies(MESH)]
    assert len(found) == len({*found})
    assert {each.grid.size for each in found} == {32}
    assert sw.Strategy(sw.Grid(data=32), 8, states=16) in found


@cache
def compiler() -> Compiler:
    return Compiler(ZOO["gpt"].model(), sw.Cluster.local(4), ZOO["gpt"].batch(0), None, None)


def space(**options: Any) -> sw.Space:
    return compiler().with_(options=sw.Options(**options)).space


def meaning(given: sw.Space, op: Op, strategy: sw.Strategy) -> object:
    """What tells strategies of an op apart, whole or in slices: with one micro-batch no gradients add up."""
    axes = strategy.axes(given.mesh)
    gradients = axes.gradients if given.options.micro_batch_count > 1 else ()
    assignments = op.assignments(replace(strategy, slices=1), given.mesh)
    return tuple(assignments.values()), axes.rest, gradients, axes.states


@pytest.mark.parametrize("option", [
    {"force": {"*": "zdp"}}, {"force": {"*": ["dp", "tensor:2"]}}, {"micro_batches": 2}, {"sub_batches": 2},
    {"buckets": True}, {"keep_gathered": False}, {"operator_slices": 2}, {"recompute": "full"},
    dict(sw.baselines.megatron(2, zero=1).options), dict(sw.baselines.osdp(slices=4).options),
], ids=str)  # fmt: skip
def test_options_and_baselines_restrict_the_space(option: dict[str, Any]) -> None:
    """Nothing is left that is not in the space without them, but for slices, which options may ask for."""
    free, less = space(), space(**option)
    assert set(less.overlaps) <= set(free.overlaps) and set(less.micro_batches) <= set(free.micro_batches)
    assert set(less.recompute_modes("blocks.0")) <= set(free.recompute_modes("blocks.0"))
    assert less.has_recomputation <= free.has_recomputation
    for overlap in less.overlaps:
        every, own = (replace(each, options=each.setting(less.micro_batches[0], *overlap)) for each in (free, less))
        for op, same in zip(every.annotated.ops, own.annotated.ops, strict=True):
            known = {meaning(every, op, strategy) for strategy in every.strategies(op)}
            left = own.strategies(same)
            assert left and {meaning(own, same, strategy) for strategy in left} <= known
            for strategy in left:
                assert set(own.kept_slices(same, strategy, left)) <= {*range(strategy.slices + 1)}


def test_a_plan_is_a_point_of_the_space() -> None:
    found = space()
    plan = compiler().plan()
    setting = found.setting(plan.micro_batches, plan.overlap.sub_batches, plan.overlap.buckets)
    own = replace(found, options=setting)
    assert plan.micro_batches in found.micro_batches
    assert (plan.overlap.sub_batches, plan.overlap.buckets) in found.overlaps
    for op in own.annotated.ops:
        assert plan.choices[op.name].strategy in own.strategies(op)


def test_the_space_is_printed() -> None:
    lines = str(space(force={"head": "zero3"}, buckets=True)).splitlines()
    assert lines[0] == "the step: 1, 2, 4 or 8 micro-batches; 1 or 2 sub-batches; with buckets"
    assert lines[1:3] == ["each layer: recomputation none, fine or full", "each sum: whole or scattered"]
    assert lines[-1] == "head: (1, 1, 1, 4) ZDP"
    assert "each sum: scattered" in str(space(sequence_parallel=True))
