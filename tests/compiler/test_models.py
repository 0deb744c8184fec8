"""Models as people train them, on 4 and 8 ranks: the planner's choice and plans unlike it give one device's numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from shardweave.ir import Mesh, Strategy
from shardweave.planner.problem.space import legal
from shardweave.runtime.launch import WorkerPool
from shardweave.sharding.parallel_ops import Op
from tests.compiler.training import (
    ALL_CASES,
    Forced,
    Way,
    compile_ways,
    differences,
    model_of,
    most,
    only_with_all_cases,
    train,
    train_packed,
)  # fmt: skip
from tests.models import TODAY

STEPS = 3 if ALL_CASES else 2
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
"""Not Adam, which makes steps of rounding where a gradient is next to zero: test_equality.py has it."""

DOUBLE = {"bert", "vit", "unet", "cnn", "classic"}
"""The models that compute in float64 if asked to; in the others some modules turn to float32."""
TOLERANCES = {torch.float32: (1e-5, 1e-4, 1e-2), torch.float64: (1e-9, 1e-8, 1e-5)}
"""Of losses; of parameters and gradients, relative to a tensor's largest entry, or to this share of the largest of all:
the bias of a key or before a batch norm has a gradient of zero but for rounding."""


def any_of(seed: int) -> Forced:
    """Any legal strategy, op by op."""

    def force(ops: Sequence[Op], mesh: Mesh) -> dict[str, Strategy]:
        rng = random.Random(seed)
        return {op.name: rng.choice(legal(op, mesh)) for op in ops}

    return force


WAYS = [
    Way("planner"),
    Way("columns", most(lambda s: (s.grid.x > 1, s.grid.y == 1, s.grid.x > 2))),
    Way("rows", most(lambda s: (s.grid.y > 1, s.grid.x == 1, s.grid.y > 2))),
    Way("3d", most(lambda s: (s.grid.x > 1 and s.grid.y > 1, s.rest > 1, s.grid.x > 1, s.grid.y > 1))),
    Way("any", any_of(0)),
]
EXPERTS = Way("experts", most(lambda s: (s.grid.experts > 1, s.grid.x > 1, s.grid.data > 1)))


@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("name", list(TODAY))
def test_training_equals_one_device(name: str, world: int, pool: WorkerPool) -> None:
    only_with_all_cases((world == 8) != (name in DOUBLE - {"unet"}))  # on eight ranks the U-Net takes minutes
    case = TODAY[name]
    dtype = torch.float64 if world == 8 and name in DOUBLE else torch.float32
    model = model_of(case, dtype)
    ways = WAYS if ALL_CASES else [WAYS[0], *WAYS[2 - list(TODAY).index(name) % 2 :: 2]]
    if name == "mixtral":
        ways = [*ways, EXPERTS]
    steps = compile_ways(model, case, dtype, world, ways)
    planned, *forced = [{name: choice["strategy"] for name, choice in step.plan["choices"].items()} for step in steps]
    assert len({str(choices) for choices in forced if choices != planned}) >= len(forced) - 1
    expected = train(model, case, dtype, MOMENTUM, count=STEPS)
    first, *others = pool.run(train_packed, name, dtype, steps, MOMENTUM, STEPS, nprocs=world, timeout=300)
    failures = []
    for way, *ranks in zip(ways, first, *others, strict=True):
        failures += differences(way, expected, ranks, *TOLERANCES[dtype])
    assert not failures, "\n".join(failures)
