"""Micro-batches in a call and calls under `no_sync`: the numbers of one device, and what is moved when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from shardweave.compiler.planner.ops import Op
from shardweave.ir import Grid, Mesh, Strategy
from shardweave.runtime.launch import WorkerPool
from tests.compiler.training import ADAMW, Way, compile_ways, differences, model_of, train, train_packed
from tests.models import ZOO

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SIZE = 32
FORCED = {"zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "dp": "dp", "hsdp": "hsdp:2", "hpz": "hpz:2"}


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


def ways(**several: int) -> list[Way]:
    forced = [Way(name, {"*": word}, **several) for name, word in FORCED.items()]  # type: ignore[arg-type]
    drawn = [Way(f"random {seed}", partial(random_factors, seed), **several) for seed in range(3)]  # type: ignore[arg-type]
    return [*forced, *drawn, Way("planned", **several)]  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize("world", [4, 8])
def test_micro_batches_train_as_one_device(
    world: int, optimizer: partial[torch.optim.Optimizer], pool: WorkerPool
) -> None:
    name, dtype = "gpt", torch.float64
    model = model_of(ZOO[name], dtype)
    chosen = ways(micro_batches=4)
    steps = compile_ways(model, ZOO[name], dtype, world, chosen, SIZE)
    expected = train(model, ZOO[name], dtype, optimizer, size=SIZE)
    first, *others = pool.run(train_packed, name, dtype, steps, optimizer, 5, SIZE, nprocs=world, timeout=300)
    wrong: list[str] = []
    for index, way in enumerate(chosen):
        wrong += differences(way, expected, [first[index], *(other[index] for other in others)], 1e-9, 1e-8)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_calls_under_no_sync_train_as_one_device(micro_batches: int, pool: WorkerPool) -> None:
    name, dtype, world = "gpt", torch.float64, 4
    model = model_of(ZOO[name], dtype)
    chosen = ways(micro_batches=micro_batches, accumulates=3)
    steps = compile_ways(model, ZOO[name], dtype, world, chosen)
    expected = train(model, ZOO[name], dtype, accumulates=3)
    first, *others = pool.run(train_packed, name, dtype, steps, ADAMW, 5, 8, 3, nprocs=world, timeout=300)
    wrong: list[str] = []
    for index, way in enumerate(chosen):
        wrong += differences(way, expected, [first[index], *(other[index] for other in others)], 1e-9, 1e-8)
    assert not wrong, "\n".join(wrong)
