"""The `torch.compile` door: on real ranks, the numbers of one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.backend import shardweave
from shardweave.passes.annotate import info
from shardweave.runtime.launch import WorkerPool
from tests.models import ZOO

RANKS, STEPS, BATCH = 4, 3, 8
TENSOR = {"blocks.*.qkv": "column:4", "blocks.*.out": "row:4", "blocks.*.up": "column:2", "blocks.*.down": "row:2"}


@dataclass
class Run:
    """What training gave: the losses, the first gradients, the parameters in the end, the collectives by kind."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    collectives: set[tuple[str, str]]


def train(name: str, dtype: torch.dtype, outside: bool, options: Mapping[str, Any] | None, sizes: tuple[int, ...]) -> Run:
    """Train a model of the zoo with AdamW; without options as it is, else compiled."""
    torch._dynamo.reset()
    case = ZOO[name]
    model = case.model(dtype)
    collectives: set[tuple[str, str]] = set()

    def inspect(_: sw.Plan, graphs: Mapping[str, torch.fx.GraphModule]) -> None:
        for stage in ("forward", "backward"):
            found = [info(node).collective for node in graphs[stage].graph.nodes]
            collectives.update((what.kind, what.cause) for what in found if what is not None)

    step = model
    if options is not None:
        step = torch.compile(model, backend="shardweave", options={"inspect": inspect, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], {}
    for number in range(STEPS):
        batch = case.batch(number, sizes[number % len(sizes)], dtype)
        targets = batch.pop("targets") if outside else None
        output = step(**batch)
        loss = case.loss(output) if targets is None else loss_outside(output, targets)
        loss.backward()
        if not gradients:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, gradients, {name: p.detach() for name, p in model.named_parameters()}, collectives)


def loss_outside(output: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return F.mse_loss(output, targets)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def assert_same(runs: list[Run], alone: Run, dtype: torch.dtype) -> None:
    loose = 1e-9 if dtype == torch.float64 else 1e-4
    for run in runs:
        assert run.losses == pytest.approx(alone.losses, rel=1e-9 if dtype == torch.float64 else 1e-5)
        for found, expected in ((run.gradients, alone.gradients), (run.parameters, alone.parameters)):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name].shape == value.shape
                torch.testing.assert_close(found[name], value, rtol=loose, atol=loose * float(value.abs().max()), msg=name)
    for name in alone.parameters:  # every rank steps its own copy: they must not drift apart
        assert all(torch.equal(run.parameters[name], runs[0].parameters[name]) for run in runs), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("name", "outside", "force", "expected"),
    [
        ("gpt", False, {"*": "dp"}, {("all_reduce", "gradient")}),
        ("gpt", False, TENSOR, {("all_reduce", "activation"), ("all_gather", "gradient")}),
        ("gpt", True, {"*": (2, 2, 1, 1)}, {("all_reduce", "activation"), ("all_gather", "gradient")}),
        ("gpt-tied", False, {}, set()),
        ("gpt", True, {}, set()),
        ("mlp", True, {"first": "column:2", "last": "dp"}, {("all_gather", "gradient"), ("all_reduce", "gradient")}),
    ],
    ids=["data", "tensor", "mixed", "tied", "planned", "outside"],
)
def test_the_numbers_of_one_device(
    pool: WorkerPool, name: str, outside: bool, force: dict[str, Any], expected: set[Any], dtype: torch.dtype
) -> None:
    (alone,) = pool.run(train, name, dtype, outside, None, (BATCH,), nprocs=1)
    options = {"cluster": sw.Cluster.local(RANKS), "force": force}
    runs = pool.run(train, name, dtype, outside, options, (BATCH,), nprocs=RANKS)
    assert_same(runs, alone, dtype)
    assert expected <= runs[0].collectives
