"""Bytes of a parameter in mixed precision: 2 of its working copy, 12 of its states, and its gradient.

AMSP (arXiv 2311.00257), section IV-D, counts ``2 / s_p + 2 / s_g + 12 / s_os`` bytes. Here the gradient of a float32
master is float32 and lies as the states do, 4 bytes over s_os, and it comes where the copy goes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.ir import Grid, Strategy
from shardweave.runtime.launch import WorkerPool
from tests.measured_memory import settled_peak
from tests.peak_memory import held_bytes

RANKS, LAYERS, WIDTH = 4, 24, 256
FACTORS = [(1, 1), (1, 4), (2, 4), (4, 4)]
NUMEL = LAYERS * WIDTH**2
BF16 = torch.bfloat16


class Deep(nn.Module):
    """Parameters, and hardly any activations."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))  # so that the backward needs the first layer's weight, too
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for layer in self.layers:
            x = F.relu(layer(x))
        return x.float().mean()


class Bytes(NamedTuple):
    """Bytes a parameter on one rank."""

    states: float
    """Master and moments."""
    copies: float
    gradients: float
    at_once: float
    """The most of all three together."""
    peak: float
    """Of everything."""


def compiler() -> Compiler:
    options = sw.Options(precision=sw.Precision(BF16))
    return Compiler(Deep(), sw.Cluster.local(RANKS), torch.randn(RANKS, WIDTH), options, None)


def planned(rest: int, states: int) -> tuple[sw.Plan, Bytes]:
    found = compiler()
    force = {"*": Strategy(Grid(data=RANKS), rest, states=states)}
    found.options = sw.Options(precision=sw.Precision(BF16), force=force, keep_gathered=False)
    plan = found.plan()
    timeline = plan.timeline()
    memory = timeline.memory
    of = {kind: memory.bytes[:, column] / NUMEL for column, kind in enumerate(memory.kinds)}
    own = of["parameters"] + of["optimizer"]
    together = (own + of["copies"] + of["gradients"]).max()
    figures = own[-1], of["copies"].max(), of["gradients"].max(), together, timeline.peak_memory / NUMEL
    return plan, Bytes(*map(float, figures))


def measure(plans: list[dict[str, Any]]) -> list[Bytes]:
    """On a rank: what really lies in memory at each moment of a step."""
    return [_measure(compiler().compile(Deep(), sw.Plan.from_dict(plan))) for plan in plans]


def _measure(parallel: sw.ParallelModule) -> Bytes:
    optimizer = torch.optim.AdamW(parallel.parameters())
    x = torch.randn(RANKS, WIDTH)[dist.get_rank() :][:1].clone()

    def step() -> tuple[int, int]:
        loss = parallel(x)
        saved = [value for value in loss.grad_fn.saved if isinstance(value, Tensor)]
        copies = held_bytes(value for value in saved if value.numel() >= WIDTH**2 // RANKS)
        del saved
        loss.backward()
        gradients = held_bytes(p.grad for p in parallel.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        return copies, gradients

    step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    held = [*parallel.parameters(), *states]
    copies, gradients = step()
    peak = settled_peak(step, [*held, x])
    own = held_bytes(held)
    at_once = own + max(copies, gradients)  # a gradient comes where a copy goes: one after another, in equal layers
    return Bytes(*(size / NUMEL for size in (own, copies, gradients, at_once, peak)))


def test_the_bytes_of_a_parameter(pool: WorkerPool) -> None:
    predicted = [planned(*factors) for factors in FACTORS]
    ranks = pool.run(measure, [plan.to_dict() for plan, _ in predicted], nprocs=RANKS, timeout=300.0)
    for (rest, states), (plan, told), *found in zip(FACTORS, predicted, *ranks, strict=True):
        formula = 12 / states, 2 / rest, 4 / states, 12 / states + max(2 / rest, 4 / states)
        amsp = 2 / rest + 2 / states + 12 / states  # with s_g = s_os
        assert formula[-1] <= amsp and (formula[-1] == amsp) == (rest == states)
        assert told[:4] == pytest.approx(formula, rel=0.01), (rest, states)
        priced = sum(choice.state_bytes for choice in plan.choices.values()) / NUMEL
        assert priced == pytest.approx(formula[-1], rel=0.01), (rest, states)
        for bytes_ in found:
            assert bytes_[:4] == pytest.approx(formula, rel=0.01), (rest, states)
            assert told.peak == pytest.approx(bytes_.peak, rel=0.02), (rest, states)
