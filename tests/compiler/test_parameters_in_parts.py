"""A parameter that the model cuts into parts itself: each of its products is an op of the one parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardweave.runtime.launch import WorkerPool
from tests.compiler.packing import Packed
from tests.compiler.test_state_sharding import MOMENTUM
from tests.compiler.training import Run, Way, compile_ways, differences, train
from tests.models import Case

DOUBLE = torch.float64


class Parts(nn.Module):
    """Two products with the halves of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(32, 16) / 4)
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        one, other = self.both.split(16)
        return F.mse_loss(self.last(F.linear(x, one) * F.linear(x, other)), targets)


def draw(generator: torch.Generator, size: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(size, 16, generator=generator, dtype=DOUBLE),
        "targets": torch.randn(size, 8, generator=generator, dtype=DOUBLE),
    }


CASE = Case("parts", Parts, draw)


def train_all(steps: Sequence[Packed]) -> list[Run]:
    return [train(packed.module(CASE.model(DOUBLE)), CASE, DOUBLE, MOMENTUM) for packed in steps]


def test_training_equals_one_device(pool: WorkerPool) -> None:
    ways = [Way(name, {"*": name}) for name in ("dp", "zdp", "tensor:2")] + [Way("free", {})]
    steps = compile_ways(CASE.model(DOUBLE), CASE, DOUBLE, 4, ways)
    expected = train(CASE.model(DOUBLE), CASE, DOUBLE, MOMENTUM)
    first, *others = pool.run(train_all, steps, nprocs=4, timeout=300)
    wrong: list[str] = []
    for index, way in enumerate(ways):
        runs: list[Run | list[float]] = [first[index], *(other[index].losses for other in others)]
        wrong += differences(way, expected, runs, 1e-10, 1e-10)
    assert not wrong, "\n".join(wrong)
