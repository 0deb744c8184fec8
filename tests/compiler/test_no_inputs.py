"""Models whose forward takes nothing, and products of two parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardweave as sw
from shardweave.runtime.launch import WorkerPool

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Factors(nn.Module):
    """A loss of its parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Parameter(torch.randn(16, 8, dtype=torch.float64))
        self.right = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self) -> Tensor:
        return (self.left @ self.right).square().mean()


class Merged(nn.Module):
    """A product of two parameters is added to a third one, as merged low-rank adapters are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 16, dtype=torch.float64)
        self.a = nn.Parameter(torch.randn(16, 4, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(4, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.a @ self.b, self.base.bias).square().mean()


def trains_as_one_device(kind: type[nn.Module], example: Any, force: dict[str, Any]) -> None:
    """In the steps of its parameters; without inputs also where the first call is captured."""
    cluster = sw.Cluster.local(dist.get_world_size())
    call = example if isinstance(example, tuple) else ()
    options = sw.Options(force=force)
    for given in (example, None) if example == {} else (example,):
        parallel: Any = sw.compile_parallel(kind(), cluster, given, options=options)
        model = kind()
        torch.testing.assert_close(parallel(*call), model(*call), **CLOSE)
        for module in (parallel, model):
            module(*call).backward()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
        state: dict[str, Tensor] = parallel.full_state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, **CLOSE)


CASES: list[tuple[type[nn.Module], Any]] = [
    (Factors, {}),
    (Merged, (torch.ones(12, 8, dtype=torch.float64),)),
]


def in_turn(force: dict[str, Any]) -> None:
    for kind, example in CASES:
        trains_as_one_device(kind, example, force)


@pytest.mark.parametrize(("force", "world"), [({}, 2), ({"*": "zdp"}, 3)])
def test_training(force: dict[str, Any], world: int, pool: WorkerPool) -> None:
    pool.run(in_turn, force, nprocs=world)


@pytest.mark.parametrize("example", [(), {}])
def test_planning(example: Any) -> None:
    plan = sw.plan(Factors(), sw.Cluster.local(4), example)
    assert set(plan.choices) == {"left"}  # the product's other parameter goes with it


@pytest.mark.parametrize("cut", [{"micro_batches": 2}, {"sub_batches": 2}])
def test_without_a_batch_none_is_cut(cut: dict[str, int]) -> None:
    with pytest.raises(sw.PlanError, match="no batch to cut"):
        sw.compile_parallel(Factors(), sw.Cluster.local(1), (), options=sw.Options(**cut))
