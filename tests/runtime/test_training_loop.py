"""Training loops as users write them: gradients, clipping, hooks, frozen and tied parameters, averages."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardweave as sw
from shardweave.ir.errors import ParallelError
from shardweave.runtime.launch import WorkerPool
from tests.compiler.packing import Packed
from tests.compiler.training import compile_ways
from tests.models import Case
from tests.runtime.loop import (
    CASE,
    DTYPE,
    WAYS,
    Scenario,
    gradients,
    loss_of,
    packed_ways,
    same_in_both_worlds,
    state_of,
    train,
    whole,
)  # fmt: skip

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, weight_decay=0.1)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.fixture(scope="module")
def steps() -> list[Packed]:
    return packed_ways()


def gradients_add_up(model: nn.Module) -> Any:
    seen = []
    for set_to_none in (True, False):
        for step in range(3):
            loss_of(model, step).backward()
        seen.append(gradients(model))
        model.zero_grad(set_to_none)
        seen.append(gradients(model))
    (loss_of(model, 0) + loss_of(model, 1)).backward()
    return seen


def gradients_are_edited(model: nn.Module) -> Any:
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        loss_of(model, step).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == parameter.dtype
                parameter.grad.mul_(0.5)
                parameter.grad += 0.01 * parameter.detach()
                parameter.grad = torch.sign(parameter.grad) if name == "up.weight" else parameter.grad
        model.get_parameter("norm.bias").grad = None
        optimizer.step()
        model.zero_grad()


def clipped(model: nn.Module) -> Any:
    optimizer, norms = SGD(model.parameters()), []
    for step, norm_type in enumerate((2.0, 1.0, float("inf"))):
        loss_of(model, step).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type, foreach=False))
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type))
        nn.utils.clip_grad_value_(model.parameters(), 0.002)
        optimizer.step()
        optimizer.zero_grad()
    assert all(float(norm) > 0 for norm in norms)
    return norms, [norm.item() for norm in map(whole, norms)]


def clipped_by_the_module(model: nn.Module) -> Any:
    loss_of(model).backward()
    own = model.clip_grad_norm_ if isinstance(model, sw.ParallelModule) else functools.partial(
        nn.utils.clip_grad_norm_, list(model.parameters()))  # fmt: skip
    return own(0.1), own(0.05, float("inf"))


def scheduled(model: nn.Module) -> Any:
    rates = []
    for make in (
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda count: 1 / (count + 1)),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=4),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    ):
        optimizer = SGD(model.parameters())
        scheduler = make(optimizer)
        for step in range(3):
            losses = train(model, optimizer, 1)
            scheduler.step(*losses if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else ())
            rates.append((step, *losses, optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    return rates


def grouped_by_name(model: nn.Module) -> Any:
    plain = [p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name]
    decayed = [p for name, p in model.named_parameters() if not (name.endswith("bias") or "norm" in name)]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0, "lr": 0.05}]
    return train(model, ADAMW(groups)), len(decayed), len(plain), sum(p.numel() for p in decayed)


def a_part_is_trained(model: nn.Module) -> Any:
    return train(model, ADAMW([*model.get_submodule("up").parameters(), model.get_parameter("embed.weight")]))


def frozen_and_thawed(model: nn.Module) -> Any:
    up, seen = model.get_submodule("up"), []
    optimizer = ADAMW(model.parameters())
    for frozen in (True, False, True):
        up.requires_grad_(not frozen)
        loss_of(model).backward()
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen.append(loss_of(model))
    return seen


def hooked(model: nn.Module) -> Any:
    """Gradients are scaled as they come, and each parameter has its own optimizer, which steps in backward."""
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = SGD([parameter])

        def step(p: Tensor, own: torch.optim.Optimizer = own, name: str = name) -> None:
            own.step()
            own.zero_grad()
            seen.append(name)

        parameter.register_hook(lambda grad: grad * 0.5)
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for index in range(3):
        loss = loss_of(model, index)
        loss.backward()
        losses.append(loss.item())
    return losses, sorted(seen)


def averaged(model: nn.Module) -> Any:
    names = [name for name, _ in model.named_parameters()]
    ema = {name: copy.deepcopy(p) for name, p in model.named_parameters()}
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = ADAMW(model.parameters())
    for _ in range(3):
        train(model, optimizer, 1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                ema[name].lerp_(p, 0.1)
                mean[name].mul_(0.5).add_(p, alpha=0.5)
            torch._foreach_mul_(list(mean.values()), 1.0)
    assert all(isinstance(p, nn.Parameter) for p in ema.values())
    before = state_of(model)
    with torch.no_grad():  # evaluate with the average, and go back
        for name, p in model.named_parameters():
            p.copy_(ema[name])
        found = loss_of(model).item()
    return names, ema, mean, before, found


def handled_as_tensors(model: nn.Module) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.ones_like(p))
            p.data.mul_(0.9)
            p.sub_(p.sign() * 0.001)
        nn.init.zeros_(model.get_parameter("norm.bias"))
    sizes = [(p.numel(), tuple(p.shape), p.dtype, p.ndim, p.is_leaf) for p in model.parameters()]
    norms = [p.norm().item() for p in map(whole, (p.detach().norm() for p in model.parameters()))]
    logged = sum(p.numel() for p in model.parameters() if p.requires_grad), norms
    return sizes, logged, loss_of(model).item()


def tied(model: nn.Module) -> Any:
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    names = [name for name, _ in model.named_parameters()]
    losses = train(model, SGD(model.parameters()))
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    return names, losses, train(model, SGD(model.parameters()))


def without_gradient(model: nn.Module) -> Any:
    """Neither what nothing uses nor what the loss does not need decays, and neither has a state."""
    before = state_of(model)
    optimizer = ADAMW(model.parameters())
    train(model, optimizer)
    after = state_of(model)
    kept = sorted(name for name in before if torch.equal(before[name], after[name]))
    assert kept == ["aside.bias", "aside.weight", "frozen.bias", "frozen.weight", "unused"]
    return kept, [bool(optimizer.state[p]) for p in model.parameters()]


def averaged_by_torch(model: nn.Module) -> Any:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = ADAMW(model.parameters())
    for _ in range(3):
        train(model, optimizer, 1)
        average.update_parameters(model)
    with torch.no_grad():
        found = loss_of(average).item()
    twin = copy.deepcopy(average.module)
    twin.load_state_dict({name: value * 0.5 for name, value in twin.state_dict().items()})
    found = found, loss_of(twin).item(), twin.get_parameter("head.weight") is twin.get_parameter("embed.weight")
    return found, state_of(twin), {n: p.detach() for n, p in average.named_parameters()}


SCENARIOS = [
    averaged_by_torch,
    gradients_add_up, gradients_are_edited, clipped, clipped_by_the_module, scheduled, grouped_by_name,
    a_part_is_trained, frozen_and_thawed, hooked, averaged, handled_as_tensors, tied, without_gradient,
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_loops_do_what_they_do_on_one_device(scenario: Scenario, steps: list[Packed], pool: WorkerPool) -> None:
    ranks = pool.run(same_in_both_worlds, scenario, steps, [way.name for way in WAYS], nprocs=4, timeout=120)
    assert not any(ranks), "\n\n".join(problem for found in ranks for problem in found)


def thawed(step: Packed) -> None:
    parallel = step.module(CASE.model(DTYPE))
    parallel.get_submodule("frozen").requires_grad_(True)
    with torch.no_grad():
        loss_of(parallel)
    with pytest.raises(ParallelError, match=r"frozen\.weight, frozen\.bias: 2 parameters .* frozen when the step was"):
        loss_of(parallel)


def test_what_was_frozen_when_compiled_stays_so(steps: list[Packed], pool: WorkerPool) -> None:
    pool.run(thawed, steps[2], nprocs=4, timeout=60.0)


class Twins(nn.Module):
    """Parameters that have one gradient between them, or one number for it; and an output that a loss may not need."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.one, self.other = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
        self.summed = nn.Parameter(torch.ones(8))
        self.head, self.aside = nn.Linear(8, 4), nn.Linear(8, 4)
        self.gate = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.up(x) + (self.one + self.other)) + self.summed
        return self.head(x), torch.tanh(self.aside(x * self.gate))


def twins(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 8, generator=generator)}


TWINS = Case("twins", Twins, twins)


def gradients_are_their_own(model: nn.Module) -> Any:
    """Losses are computed outside; one needs the first output only."""
    seen = []
    optimizer = ADAMW(model.parameters())
    for needs in ((0,), (1,), (0, 1)):
        for step in range(2):
            outputs = model(**TWINS.batch(step, dtype=DTYPE))
            sum((outputs[index].mean() for index in needs), torch.zeros(())).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_gradients_are_their_own(pool: WorkerPool) -> None:
    steps = compile_ways(TWINS.model(DTYPE), TWINS, DTYPE, 4, WAYS[:3])
    names = [way.name for way in WAYS[:3]]
    ranks = pool.run(same_in_both_worlds, gradients_are_their_own, steps, names, TWINS, nprocs=4, timeout=120)
    assert not any(ranks), "\n\n".join(problem for found in ranks for problem in found)
