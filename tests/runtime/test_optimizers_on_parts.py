"""Optimizer steps on this rank's parts: the numbers of steps on parallel tensors, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardweave as sw
from shardweave.ir.errors import ParallelError
from shardweave.runtime import optimizers
from shardweave.runtime import tensor as parallel_tensors
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.tensor import ParallelTensor

X = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """A layer, a scale that is one number, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(12, 10), nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.tanh(self.up(x))) * self.scale).square().mean()


def compiled(force: str = "zero3") -> Any:
    options = sw.Options(force={"*": force})
    return sw.compile_parallel(Model(), sw.Cluster.local(dist.get_world_size()), X, options=options)


def take_steps(model: nn.Module, optimizer: optim.Optimizer, count: int) -> None:
    for _ in range(count):
        model(X).backward()
        optimizer.step()
        optimizer.zero_grad()


def num_ops(model: nn.Module, optimizer: optim.Optimizer) -> int:
    """How many ops of parallel tensors a step of the optimizer runs."""
    found, run = [], parallel_tensors._run

    def counted(func: Any, args: Any, kwargs: Any) -> Any:
        found.append(func)
        return run(func, args, kwargs)

    model(X).backward()
    parallel_tensors._run = counted
    try:
        optimizer.step()
    finally:
        parallel_tensors._run = run
    optimizer.zero_grad()
    return len(found)


MAKERS: list[Callable[..., optim.Optimizer]] = [
    partial(optim.Adadelta, lr=0.1), partial(optim.Adagrad, lr=0.1), partial(optim.Adam, lr=1e-2, amsgrad=True),
    partial(optim.Adamax, lr=1e-2), partial(optim.AdamW, lr=1e-2, foreach=True), partial(optim.ASGD, lr=1e-2),
    partial(optim.NAdam, lr=1e-2), partial(optim.RAdam, lr=1e-2), partial(optim.RMSprop, lr=1e-2, centered=True),
    partial(optim.Rprop, lr=1e-2), partial(optim.SGD, lr=0.1, momentum=0.9), partial(optim.AdamW, lr=1e-2, fused=True),
]  # fmt: skip


def runs_on_parts() -> list[str]:
    """What is wrong with which optimizer."""
    wrong = []
    for make in MAKERS:
        ways = compiled(), compiled()
        made = [make(model.parameters()) for model in ways]
        name = type(made[0]).__name__
        make_slow(made[1])
        for model, optimizer in zip(ways, made, strict=True):
            take_steps(model, optimizer, 1)
        counts = [num_ops(model, optimizer) for model, optimizer in zip(ways, made, strict=True)]
        if counts[0] or not counts[1]:
            wrong.append(f"{name}: {counts} ops")
        for model, optimizer in zip(ways, made, strict=True):
            take_steps(model, optimizer, 3)
        for one, other in zip(*(model.parameters() for model in ways), strict=True):
            if not torch.equal(one.full_tensor(), other.full_tensor()):
                wrong.append(f"{name}: other values")
        fast, slow = (optimizer.state_dict()["state"] for optimizer in made)
        kinds = [{key: {name: type(value) for name, value in state.items()} for key, state in each.items()}
                 for each in (fast, slow)]  # fmt: skip
        if kinds[0] != kinds[1] or any(parameter.grad is not None for parameter in ways[0].parameters()):
            wrong.append(f"{name}: {kinds}")
    return wrong


def make_slow(optimizer: optim.Optimizer) -> None:
    """A hook looks on, and sees the parameters themselves."""

    def look(optimizer: optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert all(isinstance(parameter, ParallelTensor) for parameter in parameters)

    optimizer.register_step_pre_hook(look)


def test_each_elementwise_optimizer_runs_on_parts(pool: WorkerPool) -> None:
    assert {type(make([nn.Parameter(X.clone())])) for make in MAKERS} == optimizers.ELEMENTWISE
    assert pool.run(runs_on_parts, nprocs=2) == [[], []]


def fails_in_a_step() -> None:
    model = compiled()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    take_steps(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    model(X).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [*model.parameters()]
    assert all(a is b.grad for a, b in zip(gradients, model.parameters(), strict=True))
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[name].full_tensor(), before["state"][key][name].full_tensor())
                   for name in ("exp_avg", "exp_avg_sq"))  # fmt: skip
    take_steps(model, optimizer, 1)


def notices_what_it_changes() -> None:
    """A step between forward and backward; a closure; parameters that come later; a schedule, made before and after."""
    model = compiled()
    optimizer = optim.SGD([model.up.weight, model.up.bias], lr=0.1, momentum=0.9)
    first = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    take_steps(model, optimizer, 2)
    second = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.add_param_group({"params": [model.down.weight, model.scale], "lr": 0.2})
    for _ in range(2):
        take_steps(model, optimizer, 1)
        first.step()
        second.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.25 * 0.81)
    assert isinstance(optimizer.state[model.down.weight]["momentum_buffer"], ParallelTensor)
    assert isinstance(optimizer.state[model.scale]["momentum_buffer"], ParallelTensor)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(X)
        loss.backward()
        return loss

    before = model.up.weight.detach().clone()
    optimizer.step(closure)
    assert not torch.equal(before.full_tensor(), model.up.weight.full_tensor())
    loss = model(X)
    optimizer.step()
    with pytest.raises(ParallelError, match="changed in place between forward and backward"):
        loss.backward()
    copied = copy.deepcopy(optimizer)
    assert not hasattr(copied.step, "runs_on_parts") and hasattr(optimizer.step, "runs_on_parts")


@pytest.mark.parametrize("scenario", [fails_in_a_step, notices_what_it_changes])
def test_nothing_is_left_behind(scenario: Callable[[], None], pool: WorkerPool) -> None:
    pool.run(scenario, nprocs=2)
