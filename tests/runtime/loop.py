"""A training loop as a user writes it, run on one device and on many: a scenario is a function of the model alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import shardweave as sw
from tests.compiler.packing import Packed
from tests.compiler.training import Way, compile_ways
from tests.models import Case

DTYPE = torch.float64
WAYS = [
    Way("dp", {"*": "dp"}),
    Way("zero2", {"*": "zero2"}),
    Way("zero3", {"*": "zero3"}),
    Way("hpz", {"*": "hpz:2"}),
    Way("column", {"*": "column"}),
    Way("mixed", {"*": "zero3", "up": "column:2", "down": "row:2", "embed": "dp", "aside": "zero2"}),
]
Scenario = Callable[[nn.Module], Any]
"""Trains the model and returns whatever is to be the same in both worlds."""


class Model(nn.Module):
    """A tied embedding, a norm, biases, a frozen layer, a parameter that nothing uses, and a layer no loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(8))
        self.embed = nn.Embedding(32, 16)
        self.up = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.down = nn.Linear(32, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.aside = nn.Linear(16, 8)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        x = x + self.frozen(self.down(F.gelu(self.norm(self.up(x)))))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()), self.aside(x)


def _draw(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    text = torch.randint(0, 32, (size, 5), generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


CASE = Case("loop", Model, _draw)


def packed_ways(world: int = 4, ways: Sequence[Way] = WAYS) -> list[Packed]:
    """The model's step in each of these ways."""
    return compile_ways(CASE.model(DTYPE), CASE, DTYPE, world, ways)


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    """The model's own loss of a step's batch."""
    loss: Tensor = model(**CASE.batch(step, dtype=DTYPE))[0]
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """The loop of the README."""
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients as they are now."""
    return {name: None if p.grad is None else whole(p.grad.clone()) for name, p in model.named_parameters()}


def whole(value: Any) -> Any:
    """The whole of each DTensor in `value`."""
    return pytree.tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), value)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A whole state dict of its own."""
    state = model.full_state_dict() if isinstance(model, sw.ParallelModule) else model.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


def same_in_both_worlds(
    scenario: Scenario, steps: Sequence[Packed], names: Sequence[str], case: Case = CASE
) -> list[str]:
    """What differs on this rank: what the scenario returns, and the gradients and the state that it leaves."""

    def seen(model: nn.Module) -> list[tuple[str, Any]]:
        outcome = {"returned": scenario(model), "gradients": gradients(model), "state": state_of(model)}
        leaves, _ = pytree.tree_flatten_with_path(whole(outcome))
        return [(pytree.keystr(path), leaf) for path, leaf in leaves]

    found = []
    expected = seen(case.model(DTYPE))
    for name, packed in zip(names, steps, strict=True):
        got = seen(packed.module(case.model(DTYPE)))
        found += [
            f"{name}, rank {dist.get_rank()}: {where} is {leaf}, on one device {other_where} {other}"
            for (where, leaf), (other_where, other) in zip(got, expected, strict=True)
            if where != other_where or not _same(leaf, other)
        ]
    return found[:3]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, 1e-8, 1e-9)
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-8)
    return type(one) is type(other) and bool(one == other)
