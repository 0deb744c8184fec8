"""Several backwards of one call, as `retain_graph=True` allows: the gradients of one device, and nothing is kept."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.ir import ParallelError
from shardweave.runtime import WorkerPool


class TwoHeads(nn.Module):
    """Two losses that share a trunk, or the outputs that they are computed from."""

    def __init__(self, losses: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.first, self.second, self.losses = nn.Linear(16, 4), nn.Linear(16, 2), losses

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.norm(self.trunk(x)))
        first, second = self.first(hidden), self.second(hidden)
        return (first.square().mean(), second.exp().mean()) if self.losses else (first, second)


torch.manual_seed(1)
X = torch.randn(8, 6, dtype=torch.float64)


def each_loss(outputs: tuple[Tensor, Tensor]) -> None:
    first, second = (output.square().mean() for output in outputs)
    first.backward(retain_graph=True)
    second.backward()


def one_loss_twice(outputs: tuple[Tensor, Tensor]) -> None:
    loss = outputs[0].square().mean()
    loss.backward(retain_graph=True)
    (3 * loss).backward()


def grad_and_backward(outputs: tuple[Tensor, Tensor], parameters: list[Tensor]) -> None:
    loss = outputs[0].square().mean() + outputs[1].square().mean()
    for gradient in torch.autograd.grad(loss, parameters, retain_graph=True):
        gradient.mul_(0)  # the second backward does not read it
    loss.backward()


def compiled(model: nn.Module, **options: Any) -> Any:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    asked = sw.Options(**options)
    return sw.compile_parallel(copy.deepcopy(model), sw.Cluster.local(ranks), X, options=asked, progress=False)


def assert_same(parallel: Any, model: nn.Module, run: Callable[[nn.Module], object]) -> None:
    for module in (parallel, model):
        module.zero_grad()
        run(module)
    for name, parameter in model.named_parameters():
        mine: Any = parallel.get_parameter(name).grad
        assert (mine is None) == (parameter.grad is None), name
        if mine is not None:
            torch.testing.assert_close(mine.full_tensor() if hasattr(mine, "full_tensor") else mine, parameter.grad)


def like_one_device(force: Any) -> None:
    for losses in (False, True):
        model = TwoHeads(losses).double()
        parallel = compiled(model, force=force)
        for run in (each_loss, one_loss_twice):
            assert_same(parallel, model, lambda module: run(module(X)))  # noqa: B023
        assert_same(parallel, model, lambda module: grad_and_backward(module(X), [*module.parameters()]))
        # Under no_sync all of them add up.
        assert_same(parallel, model, lambda module: accumulated(module))


def accumulated(module: nn.Module) -> None:
    with module.no_sync() if isinstance(module, sw.ParallelModule) else nullcontext():
        each_loss(module(X))
    one_loss_twice(module(X))


def two_ranks() -> None:
    like_one_device({"*": "zdp"})
    model = Alone().double()
    parallel = compiled(model, force={"*": "dp"}, micro_batches=2)
    assert_same(parallel, model, lambda module: one_loss_twice((module(X), X)))


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.line(x).square().mean()
        return result


def test_several_backwards_equal_one_device(pool: WorkerPool) -> None:
    pool.run(two_ranks, nprocs=2)


def test_nothing_is_kept_after_the_last_backward() -> None:
    parallel = compiled(TwoHeads(True).double())
    first, second = parallel(X)
    saved = [weakref.ref(value) for value in first.grad_fn.saved if isinstance(value, Tensor)]
    first.backward(retain_graph=True)
    assert all(value() is not None for value in saved)
    second.backward()
    assert first.grad_fn.saved is None
    with pytest.raises(ParallelError, match="retain_graph=True to each backward but the last"):
        first.backward()
    kept = {id(tensor) for tensor in (X, *parallel.parameters(), *parallel.buffers())}
    gc.collect()
    assert not [value for ref in saved if (value := ref()) is not None and id(value) not in kept]
