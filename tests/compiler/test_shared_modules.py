"""A module that a model registers under several names: planned, compiled and trained as tied weights are."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.capture import capture
from shardweave.runtime.launch import WorkerPool


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).pow(2).mean()


class Later(Direct):
    """Only the second name is used."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x).pow(2).mean()


class Block(nn.Module):
    """Has a module of its own, and one that it shares with another, with buffers that each call changes."""

    def __init__(self, shared: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.own, self.shared, self.norm = nn.Linear(16, 16), shared, norm

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(torch.tanh(self.shared(self.own(x))))
        return result


class Nested(nn.Module):
    """As TabNet: layers that are shared between blocks; a BatchNorm too."""

    def __init__(self) -> None:
        super().__init__()
        shared, norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList([Block(shared, norm), Block(shared, norm)])
        self.head = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean() + x.mean()


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(16, 16)
        self.layers = nn.ModuleList([layer, layer])
        self.named = nn.ModuleDict({"first": layer})
        self.by_hand = [layer]

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.by_hand, *self.layers]:
            x = torch.tanh(layer(x))
        return self.named["first"](x).pow(2).mean()


class Buffered(nn.Module):
    """Two modules with one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
        self.layer = nn.Linear(16, 16)
        self.b.running_mean = self.a.running_mean

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.layer(x)))).pow(2).mean() + self.b.running_mean.sum()


MODELS = [Direct, Later, Nested, Listed, Buffered]
WAYS = [*((kind, "zdp") for kind in MODELS), (Direct, "tensor:2"), (Listed, "tensor:2")]


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batch(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def trains_as_one_device(kind: type[nn.Module], way: str) -> None:
    model, given = build(kind), build(kind)
    parallel: Any = sw.compile_parallel(given, sw.Cluster.local(2), batch(0), options=sw.Options(force={"*": way}))
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
    ours, theirs = adamw(parallel.parameters()), adamw(model.parameters())
    for step in range(3):
        losses = parallel(batch(step)), model(batch(step))
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)
        for loss, optimizer in zip(losses, (ours, theirs), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert list(parallel.state_dict()) == list(model.state_dict())
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(parallel.full_state_dict(), dict(model.state_dict()), rtol=1e-9, atol=1e-12)
    parallel.load_state_dict(given.state_dict())
    torch.testing.assert_close(parallel.full_state_dict(), dict(build(kind).state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_a_shared_module_trains_as_on_one_device(kind: type[nn.Module], way: str, pool: WorkerPool) -> None:
    pool.run(trains_as_one_device, kind, way, nprocs=2)


@pytest.mark.parametrize("kind", MODELS)
def test_a_capture_leaves_a_shared_module_as_it_was(kind: type[nn.Module]) -> None:
    model = build(kind)
    before = dict(model.named_parameters(remove_duplicate=False))
    captured = capture(model, batch(0))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)
    names = [*captured.parameters.values(), *(name for names in captured.aliases.values() for name in names)]
    assert sorted(names) == sorted(before)
