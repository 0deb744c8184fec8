"""Optimizers and gradient scalers on parameters at rest do what they do on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.parameters import local_tensor
from tests.compiler.packing import Packed
from tests.runtime.loop import WAYS, Scenario, loss_of, packed_ways, same_in_both_worlds, train

EPS = 1e-4  # so that rounding is not blown up to a step: see tests.compiler.training
ADAMW = partial(optim.AdamW, lr=1e-2, eps=EPS, weight_decay=0.1)
USED = [way for way in WAYS if way.name in ("zero3", "hpz", "mixed")]
NAMES = [way.name for way in USED]


@pytest.fixture(scope="module")
def steps() -> list[Packed]:
    return packed_ways(ways=USED)


class Lion(optim.Optimizer):
    """As people write their own, in plain ops on tensors."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            slow, fast = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * 0.1)
                    p.add_(torch.tanh(1e3 * (slow * mean + (1 - slow) * p.grad)), alpha=-group["lr"])
                    mean.mul_(fast).add_(p.grad, alpha=1 - fast)


MAKERS = [
    partial(ADAMW, foreach=False),
    partial(ADAMW, foreach=True),
    partial(ADAMW, fused=True),
    partial(optim.Adam, lr=1e-2, eps=EPS, weight_decay=0.1, fused=True, amsgrad=True),
    partial(optim.Adam, lr=torch.tensor(1e-2), eps=EPS, amsgrad=True, maximize=True),
    partial(optim.RMSprop, lr=1e-2, eps=EPS, momentum=0.9, centered=True),
    partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False),
    partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    partial(optim.Adagrad, lr=0.1, fused=True),
    partial(optim.Adagrad, lr=0.1),
    partial(optim.NAdam, lr=1e-2, eps=EPS, foreach=True),
    partial(optim.RAdam, lr=1e-2, eps=EPS),
    partial(optim.Adamax, lr=1e-2, eps=EPS, foreach=True),
    partial(optim.Adadelta, lr=1e-2, eps=EPS),
    partial(optim.ASGD, lr=1e-2),
    partial(optim.Rprop, lr=1e-2, foreach=False),
    partial(optim.Rprop, lr=1e-2, foreach=True),
    partial(optim.Adafactor, lr=1e-2),
    Lion,
]


def all_in_turn(model: nn.Module) -> Any:
    """Each for two steps on the same model."""
    return [train(model, make(model.parameters()), 2) for make in MAKERS]


def state_goes_round(model: nn.Module) -> Any:
    """Into a new optimizer, in the middle of training; and a state that is whole tells the same in both worlds."""
    losses = []
    for make in (ADAMW, partial(optim.SGD, lr=0.1, momentum=0.9), partial(ADAMW, fused=True)):
        optimizer = make(model.parameters())
        losses.append(train(model, optimizer))
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = make(model.parameters(), lr=1.0)
        optimizer.load_state_dict(state)
        losses.append(train(model, optimizer))
    return losses, optimizer.state_dict()


@pytest.mark.parametrize("scenario", [all_in_turn, state_goes_round])
def test_optimizers(scenario: Scenario, steps: list[Packed], pool: WorkerPool) -> None:
    ranks = pool.run(same_in_both_worlds, scenario, steps, NAMES, nprocs=4, timeout=120)
    assert not any(ranks), "\n\n".join(problem for found in ranks for problem in found)


def has_the_end(tensor: Tensor) -> bool:
    """Whether this rank has the last entry of a tensor."""
    if not isinstance(tensor, DTensor):
        return True
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert place is not None
    return all(p.is_replicate() or place[dim] == mesh.size(dim) - 1 for dim, p in enumerate(tensor.placements))


def scaled(kind: Callable[[Any], optim.Optimizer], clip: bool, model: nn.Module) -> Any:
    """Of one parameter and another the last entry of a gradient is infinite: only some ranks see it."""
    optimizer, scaler = kind(model.parameters()), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    seen = []
    for name in (None, "embed.weight", None, "up.weight", "norm.bias", None, None, "down.bias"):
        loss = loss_of(model)
        scaler.scale(loss).backward()
        if name is not None:
            grad = model.get_parameter(name).grad
            assert grad is not None
            if has_the_end(grad):
                local_tensor(grad).view(-1)[-1] = float("inf")
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = model.get_parameter("up.weight").detach().clone()
        scaler.step(optimizer)
        scaler.update()
        moved = model.get_parameter("up.weight").detach() - before
        seen.append((loss.item(), scaler.get_scale(), bool(local_tensor(moved).any())))
        optimizer.zero_grad()
    return seen, scaler.state_dict()


@pytest.mark.parametrize(
    "scenario",
    [partial(scaled, ADAMW, True), partial(scaled, partial(ADAMW, fused=True), False),
     partial(scaled, partial(optim.SGD, lr=0.1), False)],
    ids=["clipped", "fused", "sgd"],
)  # fmt: skip
def test_scaled_gradients(scenario: Scenario, steps: list[Packed], pool: WorkerPool) -> None:
    ranks = pool.run(same_in_both_worlds, scenario, steps, NAMES, nprocs=4, timeout=120)
    assert not any(ranks), "\n\n".join(problem for found in ranks for problem in found)


@pytest.mark.parametrize("world", [2, 8])
def test_scaled_gradients_in_other_worlds(world: int, pool: WorkerPool) -> None:
    packed = packed_ways(world, [WAYS[-1]])
    ranks = pool.run(same_in_both_worlds, partial(scaled, ADAMW, True), packed, ["mixed"], nprocs=world, timeout=120)
    assert not any(ranks), "\n\n".join(problem for found in ranks for problem in found)


class Configured(nn.Linear):
    """A model that makes its own optimizer, as those of GPT training scripts do."""

    def configure_optimizers(self, lr: float) -> optim.Optimizer:
        decayed = [parameter for _, parameter in self.named_parameters() if parameter.dim() > 1]
        return optim.AdamW([{"params": decayed}, {"params": [self.bias], "weight_decay": 0.0}], lr=lr)


@pytest.mark.parametrize("lazy", [False, True])
def test_an_optimizer_from_before_compiling_is_refused(lazy: bool) -> None:
    """It would train the parameters of the model, which the parallel module does not read."""
    model, x = Configured(4, 2), torch.ones(2, 4)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), None if lazy else x)
    early = (parallel if lazy else model).configure_optimizers(0.1)
    parallel(x).sum().backward()
    with pytest.raises(sw.ParallelError, match="before it was compiled.*example_inputs"):
        early.step()
    model(x).sum().backward()  # the model itself may go on
    early.step()
    before = [value.detach().clone() for value in parallel.parameters()]
    parallel.configure_optimizers(0.1).step()
    assert all(not torch.equal(value, now) for value, now in zip(before, parallel.parameters(), strict=True))
