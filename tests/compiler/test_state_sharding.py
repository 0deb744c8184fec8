"""Where parameters and their states rest: presets and random factors, op by op, against one device."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardweave as sw
from shardweave.ir import Grid, Mesh, Strategy
from shardweave.ir.errors import LayoutError, PlanError
from shardweave.ir.strategy import PRESETS, preset
from shardweave.passes.step_boundary import mesh_for
from shardweave.planner.problem.space import forced_strategies
from shardweave.runtime.launch import WorkerPool
from shardweave.sharding.parallel_ops import Op
from tests.compiler.training import (
    ADAMW,
    ALL_CASES,
    STEPS,
    Way,
    compile_ways,
    differences,
    model_of,
    only_with_all_cases,
    train,
    train_packed,
)  # fmt: skip
from tests.models import ZOO
from tests.passes.harness import collectives, mesh_of
from tests.passes.joint import joint
from tests.passes.test_collectives import lowered, whole_bytes

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def random_factors(seed: int, ops: Sequence[Op], mesh: Mesh) -> dict[str, Strategy]:
    """For each op its own three factors, on data alone or beside tensor parallelism."""
    rng, found = random.Random(seed), {}
    for op in ops:
        x = rng.choice([size for size in (1, 2) if not op.outputs or op.sizes[op.outputs[0]] % size == 0])
        data = mesh.world_size // x
        states = rng.choice([size for size in (1, 2, 4, 8) if data % size == 0])
        gradients = rng.choice([size for size in (1, 2, 4, 8) if states % size == 0])
        rest = rng.choice([size for size in (1, 2, 4, 8) if gradients % size == 0])
        found[op.name] = Strategy(Grid(x=x, data=data), rest, states=states, gradients=gradients)
    return found


def ways(world: int, **several: int) -> list[Way]:
    """Presets, and the plans of AMSP's Table IV, a node of two devices; `several` is how often a step is run."""
    half, data = world // 2, Grid(data=world)
    forced: dict[str, Any] = {
        "LLaMA-7B": {"*": Strategy(data, 1, gradients=1, states=2)},
        "LLaMA-30B": {"*": Strategy(data, 2, gradients=2, states=world)},
        "zero1": {"*": "zero1"},
        "hsdp": {"*": f"hsdp:{half}"},
        "hpz": {"*": f"hpz:{half}"},
        "mixed": {"*": "zero3", "head": "dp", "*.up": "zero2", "*.down": f"mics:{half}"},
    }
    return [Way(name, force, **several) for name, force in forced.items()]


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_training_equals_one_device(
    micro_batches: int, world: int, optimizer: partial[torch.optim.Optimizer], pool: WorkerPool
) -> None:
    only_with_all_cases((optimizer is ADAMW) == (world == 4) or micro_batches * world == 32)
    every = ways(world, micro_batches=micro_batches)
    chosen = every if ALL_CASES else every[world // 8 :: 2]
    check_training(pool, world, chosen, optimizer, 8 * micro_batches)


@pytest.mark.parametrize("world", [4, 8])
def test_random_factors_equal_one_device(world: int, pool: WorkerPool) -> None:
    """Any legal factors, op by op."""

    @settings(max_examples=8 if ALL_CASES else 8 // world, deadline=None, suppress_health_check=list(HealthCheck))
    @given(seeds=st.tuples(st.integers(0, 9999), st.integers(0, 9999)), micro_batches=st.sampled_from([1, 4]))
    def law(seeds: tuple[int, int], micro_batches: int) -> None:
        chosen = [Way(f"random {seed}", partial(random_factors, seed), micro_batches=micro_batches) for seed in seeds]
        check_training(pool, world, chosen, ADAMW, 8 * micro_batches)

    law()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_calls_under_no_sync_equal_one_device(micro_batches: int, pool: WorkerPool) -> None:
    """Three calls a step, gradients in none of them but the last; one device adds up three losses."""
    chosen = ways(4, micro_batches=micro_batches, accumulates=3)
    random = Way("random", partial(random_factors, 1), micro_batches=micro_batches, accumulates=3)
    check_training(pool, 4, [*chosen[micro_batches - 1 :: 3], random], ADAMW, 8)


def check_training(
    pool: WorkerPool, world: int, chosen: list[Way], optimizer: partial[torch.optim.Optimizer], size: int
) -> None:
    """Train in each of these ways, `size` rows a call, and on one device."""
    name, dtype, count, accumulates = "gpt", torch.float64, STEPS, chosen[0].accumulates
    model = model_of(ZOO[name], dtype)
    steps = compile_ways(model, ZOO[name], dtype, world, chosen, size=size)
    expected = train(model, ZOO[name], dtype, optimizer, None, None, count, size, accumulates)
    given = name, dtype, steps, optimizer, count, size, accumulates
    first, *others = pool.run(train_packed, *given, nprocs=world, timeout=300)
    wrong: list[str] = []
    for index, way in enumerate(chosen):
        wrong += differences(way, expected, [first[index], *(other[index] for other in others)], 1e-9, 1e-8)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("word", ["zero1", "zero2", "zero3", "dp", "hsdp:2", "hpz:2"])
def test_what_a_preset_moves(word: str) -> None:
    """AMSP, section IV-C, without accumulation: each gather and reduction of a whole parameter, by its groups."""
    mesh = mesh_of(2, 2)
    name, _, degree = word.partition(":")
    strategy = preset(name, int(degree or 0), mesh)
    compiled = lowered(joint("chain"), mesh, lambda _: strategy)
    assert compiled.step.backward is not None
    moved: Counter[tuple[str, int]] = Counter()
    for graph in (compiled.step.forward, compiled.step.backward):
        for what in collectives(graph):
            if what.cause in ("parameter", "gradient"):
                moved[what.kind, 2 ** len(what.axes)] += what.bytes
    sizes = whole_bytes(compiled)
    whole = sum(sizes.values())
    first = joint("chain").annotated.ops[0]  # its input needs no gradient, so its backward no weight
    uses = 2 * whole - sum(sizes[parameter] for parameter in (first.parameter, *first.companions))
    expected = {
        "dp": {("all_reduce", 4): whole},
        "zero1": {("all_gather", 4): whole, ("reduce_scatter", 4): whole},
        "zero2": {("all_gather", 4): whole, ("reduce_scatter", 4): whole},
        "zero3": {("all_gather", 4): uses, ("reduce_scatter", 4): whole},
        # within a node for both uses; what is reduced there is a part of it between nodes
        "hsdp": {("all_gather", 2): uses, ("reduce_scatter", 2): whole, ("all_reduce", 2): whole // 2},
        # between nodes once in the step, within them for both uses
        "hpz": {("all_gather", 2): whole // 2 + uses, ("reduce_scatter", 4): whole},
    }
    assert moved == expected[name]


@pytest.mark.parametrize("word", PRESETS)
def test_states_at_rest_take_their_part(word: str) -> None:
    mesh = Mesh.of_levels([("gpu", 4), ("node", 2)])
    strategy = preset(word, 0, mesh)
    compiled = lowered(joint("mlp"), mesh, lambda _: strategy)
    for parameter in compiled.step.spec.parameters:
        local, whole = 1, 1
        for size in parameter.layout.local_shape:
            local *= size
        for size in parameter.layout.global_shape:
            whole *= size
        if whole % 8 == 0 and max(parameter.layout.global_shape) % 8 == 0:
            assert local * strategy.states == whole, parameter.name


def test_a_plan_remembers_its_factors() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    options = sw.Options(force={"0": "zero1", "2": "hpz:2"})
    plan = sw.plan(model, sw.Cluster.local(4), torch.randn(8, 16), options=options)
    found = [(c.strategy.rest, c.strategy.gradients, c.strategy.states) for c in plan.choices.values()]
    assert found == [(1, 1, 4), (2, 4, 4)]
    again = sw.Plan.from_dict(plan.to_dict())
    assert {name: c.strategy for name, c in again.choices.items()} == {n: c.strategy for n, c in plan.choices.items()}


@pytest.mark.parametrize("factors", [(4, 4, 2), (4, 2, 8), (1, 4, 2)])
def test_each_factor_is_a_multiple_of_the_one_before(factors: tuple[int, int, int]) -> None:
    rest, gradients, states = factors
    message = f"over {rest} devices, its gradient over {gradients} and the states over {states}"
    with pytest.raises(LayoutError, match=message):
        Strategy(Grid(data=8), rest, gradients=gradients, states=states)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("zero1:2", "takes no degree"),
        ("hsdp", "all 4 devices are in one: give a degree"),
        ("hpz:3", "does not divide the 4 devices"),
    ],
)
def test_presets_that_do_not_fit_are_refused(word: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        forced_strategies({"*": word}, joint("mlp").annotated.ops, Mesh.of_levels([("gpu", 4)]), 8)


def test_a_small_op_does_not_put_what_others_gather_out_of_order() -> None:
    """A table of positions that was tensor parallel made all other weights be copied after they were gathered."""
    mesh = sw.Cluster.preset("dgx-h100", nodes=2).mesh()
    sharded, tensor = Strategy(Grid(z=16), rest=16), Strategy(Grid(x=4, z=4), rest=4)
    plain = mesh_for(mesh, {"up": sharded}, {"up": 10**6})
    assert plain.axes == tuple(sorted(mesh.axes, key=lambda axis: -axis.stride))
    small = mesh_for(mesh, {"up": sharded, "positions": tensor}, {"up": 10**6, "positions": 10**3})
    assert small.axes == plain.axes
    large = mesh_for(mesh, {"up": sharded, "positions": tensor}, {"up": 10**3, "positions": 10**6})
    assert {axis.stride for axis in large.axes[:2]} == {1, 2}
