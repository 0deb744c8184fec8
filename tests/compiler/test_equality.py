"""Training on 4 and 8 ranks in every way gives the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardweave as sw
from shardweave.runtime.launch import WorkerPool
from tests.compiler.training import (
    ALL_CASES,
    Way,
    compile_ways,
    differences,
    model_of,
    only_with_all_cases,
    train,
    train_packed,
)  # fmt: skip
from tests.models import ZOO

TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-9, 1e-9)}
"""Of losses and of parameters (and gradients), relative."""

LINEAR = {
    "gpt": (("*.qkv", "*.up"), ("*.out", "*.down")),
    "llama": (("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"), ("*.o_proj", "*.down_proj")),
}
"""By family: what tensor parallelism splits by columns, and what by rows."""


def ways(name: str, world: int) -> list[Way]:
    """Each kind of parallelism, a mixture of them op by op, and what the planner chooses."""
    return [
        Way("dp", {"*": "dp"}),
        Way("zdp", {"*": "zdp"}),
        *(mlp_ways(world) if name == "mlp" else transformer_ways(name, world)),
        Way("planner"),
        Way("planner, little memory", tight=True),
    ]


def mlp_ways(world: int) -> list[Way]:
    """Of the sizes 6, 10, 15, 7 only the first layer's divide by 2 both ways."""
    half = world // 2
    return [
        Way("tensor", {"first": (2, 1, 1, half), "second": (1, 2, 1, half), "back": (2, 1, 1, half)}),
        Way("3d", {"first": (2, 2, half // 2, 1), "second": "dp", "back": "zdp", "last": "dp"}),
        Way(
            "mixed",
            {
                "first": sw.Strategy(sw.Grid(2, 2, 1, half // 2), 1, y_inside=True),
                "second": "zdp",
                "back": (2, 1, half, 1),
                "last": (1, 2, 1, half),
            },
        ),
    ]


def transformer_ways(name: str, world: int) -> list[Way]:
    half = world // 2
    columns, rows = LINEAR[name.split("-")[0]]
    layers = "blocks" if name.startswith("gpt") else "model.layers"
    mixed: dict[str, Any] = {
        "*": "zdp",
        f"{layers}.0.*": (1, 2, half, 1),
        columns[0]: (2, 2, 1, half // 2),
        columns[-1]: sw.Strategy(sw.Grid(2, 2, 1, half // 2), 1, y_inside=True),
        rows[0]: (2, 1, 1, half),
        rows[-1]: sw.Strategy(sw.Grid(1, half, 1, 2), 2),
    }
    return [
        Way("tensor", {**dict.fromkeys(columns, f"column:{world}"), **dict.fromkeys(rows, f"row:{world}")}),
        Way("tensor and data", {**dict.fromkeys(columns, "column:2"), **dict.fromkeys(rows, "row:2")}),
        Way("3d", {"*": (2, 2, half // 2, 1)}),
        Way("mixed", mixed),
    ]


WHOLE = {("gpt", 4, torch.float32)}
FEW = ("tensor", "3d", "mixed", "planner")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("name", list(ZOO))
def test_training_equals_one_device(name: str, world: int, dtype: torch.dtype, pool: WorkerPool) -> None:
    only_with_all_cases((world == 4) != (dtype == (torch.float64 if name == "mlp" else torch.float32)))
    only_with_all_cases(name == "llama-tied" or (name in ("llama", "gpt-tied") and world == 8))
    case, listed = ZOO[name], ways(name, world)
    if not (ALL_CASES or name == "mlp" or (name, world, dtype) in WHOLE):
        listed = [way for way in listed if way.name in FEW]
    model = model_of(case, dtype)
    steps = compile_ways(model, case, dtype, world, listed)
    expected = train(model, case, dtype)
    first, *others = pool.run(train_packed, name, dtype, steps, nprocs=world)
    failures = []
    for way, *ranks in zip(listed, first, *others, strict=True):
        failures += differences(way, expected, ranks, *TOLERANCES[dtype])
    assert not failures, "\n".join(failures)
