"""Batches that the data ranks do not divide: fewer parts, computed by several ranks each; the numbers of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardweave as sw
from shardweave.runtime import WorkerPool

RANKS, PLANNED = 4, 16
Inputs = tuple[Tensor, ...]


class Pictures(nn.Module):
    """Batch norm, and the mean or the sum of a loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return found, nn.functional.mse_loss(found, y, reduction=self.reduction)


class Language(nn.Module):
    """A transformer layer, and a loss that ignores some tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.layer(self.embedding(tokens)))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


class Outside(nn.Module):
    """Its loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def pictures(rows: int, seed: int) -> Inputs:
    torch.manual_seed(seed)
    return torch.randn(rows, 3, 6, 6, dtype=torch.float64), torch.randn(rows, 4, dtype=torch.float64)


def words(rows: int, seed: int) -> Inputs:
    torch.manual_seed(seed)
    tokens, targets = torch.randint(32, (2, rows, 5))
    targets[:, 1:3] = 0
    return tokens, targets


def compiled(model: nn.Module, given: Inputs, force: Any, **options: Any) -> Any:
    asked = sw.Options(force={"*": force}, **options)
    return sw.compile_parallel(model, sw.Cluster.local(RANKS), given, options=asked, progress=False)


def is_equal(parallel: Any, model: nn.Module) -> None:
    """The parameters and buffers, and the gradients, are those of one device."""
    for name, value in parallel.full_state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], msg=name)
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), model.get_parameter(name).grad, msg=name)


@pytest.mark.filterwarnings("ignore:the model is compiled again", "ignore:a batch of")
def trained(make: Callable[[], nn.Module], draw: Callable[[int, int], Inputs], force: Any) -> None:
    """Steps of several batches: outputs, losses, gradients and buffers; then evaluation."""
    torch.manual_seed(0)
    model = make().double()
    parallel = compiled(model, draw(PLANNED, 0), force, outputs="whole")
    parts = parallel.data_world_size
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (parallel, model)]
    for seed, rows in enumerate((10, PLANNED, 10, 3, 1)):
        results = []
        for each, optimizer in zip((parallel, model), optimizers, strict=True):
            optimizer.zero_grad()
            outputs, loss = each(*draw(rows, seed))
            loss.backward()
            results.append((outputs.detach(), loss.detach()))
        torch.testing.assert_close(*results, msg=f"{rows} samples")
        is_equal(parallel, model)
        for optimizer in optimizers:
            optimizer.step()
        assert parallel.data_world_size == parts
    parallel.eval(), model.eval()
    with torch.no_grad():
        torch.testing.assert_close(parallel(*draw(6, 9)), model(*draw(6, 9)))


@pytest.mark.filterwarnings("ignore:the model is compiled again", "ignore:a batch of")
def outside(force: Any) -> None:
    """A loss outside the model, of this rank's part of the outputs; also under no_sync."""
    torch.manual_seed(0)
    model = Outside().double()
    parallel = compiled(model, (torch.zeros(PLANNED, 6, dtype=torch.float64),), force)
    for rows in (10, PLANNED, 3, 1):
        x, y = torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 4, dtype=torch.float64)
        for each in (parallel, model):
            each.zero_grad()
        with parallel.no_sync():
            nn.functional.mse_loss(parallel(x), parallel.local(y)).backward()
        nn.functional.mse_loss(parallel(x), parallel.local(y)).backward()
        (2 * nn.functional.mse_loss(model(x), y)).backward()
        is_equal(parallel, model)


@pytest.mark.parametrize("force, reduction", [("zero3", "mean"), ("dp", "sum"), ("column", "mean")])
def test_a_convolution(force: str, reduction: str, pool: WorkerPool) -> None:
    pool.run(trained, partial(Pictures, reduction), pictures, force, nprocs=RANKS, timeout=300)


@pytest.mark.parametrize("force", ["zero3", "tensor:2"])
def test_a_transformer(force: str, pool: WorkerPool) -> None:
    pool.run(trained, Language, words, force, nprocs=RANKS, timeout=300)


@pytest.mark.parametrize("force", ["zero3", "tensor:2"])
def test_a_loss_outside(force: str, pool: WorkerPool) -> None:
    pool.run(outside, force, nprocs=RANKS, timeout=300)


def told_and_parts() -> None:
    """Other strategies for each op, micro-batches and sub-batches; a warning; parts of ranks afterwards."""
    torch.manual_seed(0)
    model, whole = Language().double(), words(PLANNED, 0)
    force = {"*": "dp", "layer.linear1": "column:2", "layer.linear2": "row:2"}
    options = sw.Options(force=force, micro_batches=2, sub_batches=2)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(RANKS), whole, options=options, progress=False)
    parts, rank = parallel.data_world_size, parallel.data_rank
    assert parts == 2
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for seed, rows in enumerate((7, 10, 12, 10)):
            for each in (parallel, model):
                each.zero_grad()
                each(*words(rows, seed))[1].backward()
            is_equal(parallel, model)
    told = [str(each.message) for each in heard if "does not divide" in str(each.message)]
    assert len(told) == (rank == parallel.mesh.rank == 0), told
    assert all("a batch of 7 does not divide into the 2 parts of the plan: it is computed in 1, 2 ranks" in each
               for each in told)  # fmt: skip
    # Rows that are no part of an uneven batch: 5 of each rank are parts of 10, the size of a step that is there.
    given = words(10, 9)
    for each, inputs in ((parallel, tuple(value.chunk(parts)[rank] for value in given)), (model, given)):
        each.zero_grad()
        each(*inputs)[1].backward()
    is_equal(parallel, model)


def unequal_parts() -> None:
    """Ranks that pass parts of different sizes all raise an error that names both."""
    model, rows = Outside().double(), 3 if dist.get_rank() else 4
    parallel = compiled(model, (torch.zeros(PLANNED, 6, dtype=torch.float64),), "dp")
    parallel(torch.zeros(PLANNED // RANKS, 6, dtype=torch.float64))
    with pytest.raises(sw.InputError, match=r"rank 0 with x \(16, 6\).*ranks 1, 2, 3 with x \(3, 6\)"):
        parallel(torch.zeros(rows, 6, dtype=torch.float64))


class Deep(nn.Module):
    """Its activations take more memory than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.filterwarnings("ignore:the model is compiled again", "ignore:a batch of")
def within_memory() -> None:
    """Where a part takes more memory than there is, its samples are computed a few at a time."""
    torch.manual_seed(0)
    model, rows = Deep().double(), 2048
    example = (torch.zeros(rows, 16, dtype=torch.float64),)
    limit = compiled(model, example, "dp").plan.peak_memory * 5 // 4
    parallel = compiled(model, example, "dp", memory_limit=limit)
    for count, micro_batches in ((rows, 1), (1023, 3)):
        x = torch.randn(count, 16, dtype=torch.float64)
        for each in (parallel, model):
            each.zero_grad()
            each(x).backward()
        assert parallel.spec.micro_batches == micro_batches
        is_equal(parallel, model)


@pytest.mark.parametrize("check", [told_and_parts, unequal_parts, within_memory])
def test_on_ranks(check: Callable[[], None], pool: WorkerPool) -> None:
    pool.run(check, nprocs=RANKS, timeout=300)
