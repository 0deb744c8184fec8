"""Parameters and buffers that the forward itself changes: new values are those of one device, on any rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardweave as sw
from shardweave.runtime import WorkerPool


class Momentum(nn.Module):
    """A contrastive loss with a momentum encoder, its queue of earlier keys, and a codebook of moving averages.

    The encoder is changed in both ways that are usual, the codebook in training alone. So are trained parameters, each
    element by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.key = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).requires_grad_(False)
        self.codes = nn.Embedding(4, 8).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.arange(128.0).cos().view(8, 16), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.query[0].weight.data.clamp_(-0.3, 0.3)
        with torch.no_grad():
            self.query[2].bias.mul_(0.9).add_(0.01)
        query = self.query(x)
        with torch.no_grad():
            for new, old in zip(self.query[0].parameters(), self.key[0].parameters()):
                old.data = old.data * 0.9 + new.data * 0.1
            for new, old in zip(self.query[2].parameters(), self.key[2].parameters()):
                old.mul_(0.9).add_(new, alpha=0.1)
            key = F.normalize(self.key(x.flip(1)), dim=1)
            nearest = torch.cdist(query, self.codes.weight).argmin(1)
            if self.training:
                own = F.one_hot(nearest, 4).to(x.dtype)
                self.codes.weight.lerp_(own.T @ query, 0.1)
                self.queue = torch.cat([key.T, self.queue], 1)[:, :16]
        quantized = self.codes(nearest)
        return (F.normalize(query, dim=1) @ self.queue.clone()).logsumexp(1).mean() + F.mse_loss(query, quantized)


class Magnitudes(nn.Linear):
    """A layer whose rows are kept at one norm while it trains, as those of EDM2."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.training:
            with torch.no_grad():
                self.weight.copy_(F.normalize(weight, dim=1))
        return F.linear(x, F.normalize(weight, dim=1) / weight[0].numel() ** 0.5, self.bias)


class Normalized(nn.Module):
    """Trained parameters of which each element of the new value depends on others, in all ways that are usual.

    A layer of one norm, a table with `max_norm`, a weight that is assigned, and a scale that the first call takes from
    its batch, as flows do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(12, 8, max_norm=0.5), Magnitudes(8, 16)
        self.is_ready, self.scale = nn.Buffer(torch.tensor(0)), nn.Parameter(torch.ones(16))
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x + self.table(x.argmax(1)))
        self.initialise(hidden)
        self.down.weight.data = self.down.weight.data / self.down.weight.data.norm()
        return (self.down(F.silu(hidden * self.scale)) - x).square().mean()

    def initialise(self, hidden: Tensor) -> None:
        if not self.is_ready:
            with torch.no_grad():
                self.scale.copy_(1 / (hidden.std(0) + 1e-6))
            self.is_ready.fill_(1)


class Initialised(Normalized):
    """The same without a first call of another kind, which needs a whole batch."""

    def initialise(self, hidden: Tensor) -> None:
        pass


class Uneven(nn.Module):
    """Sizes that two ranks do not divide, and a table with `max_norm` that is the weight of the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(11, 8, max_norm=0.5), Magnitudes(8, 13), Magnitudes(13, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        words = x.argmax(1)
        return F.cross_entropy(self.head(self.down(F.silu(self.up(x + self.table(words))))), words)


def batches() -> Iterator[Tensor]:
    for size in (8, 4, 8):
        yield torch.randn(size, 8, generator=torch.Generator().manual_seed(size)).double()


def trains_as_on_one_device(kind: type[nn.Module], force: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    asked = sw.Options(force=force, **options)
    cluster = sw.Cluster.local(dist.get_world_size())
    parallel: Any = sw.compile_parallel(model, cluster, next(batches()), options=asked, progress=False)
    seen = []
    for each in (model, parallel):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for x in batches():
            each.train()
            losses.append(each(x))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            each.eval()
            with torch.no_grad():
                losses.append(each(x))
        seen.append([loss.detach() for loss in losses])
    torch.testing.assert_close(seen[1], seen[0])
    again = copy.deepcopy(parallel)
    torch.testing.assert_close(again(x), parallel(x))  # each changes its own
    model(x)
    torch.testing.assert_close(dict(parallel.full_state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("kind, tensor", [(Momentum, "query.2"), (Normalized, "up")])
@pytest.mark.parametrize("way", ["dp", "zdp", "column"])
def test_states_that_the_forward_changes(kind: type[nn.Module], tensor: str, way: str, pool: WorkerPool) -> None:
    force = {tensor: way} if way == "column" else {"*": way}
    pool.run(trains_as_on_one_device, kind, force, {}, nprocs=2, timeout=300)


def test_parameters_that_ranks_do_not_divide(pool: WorkerPool) -> None:
    pool.run(trains_as_on_one_device, Uneven, {"*": "zdp"}, {}, nprocs=2, timeout=300)


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"sub_batches": 2}], ids=str)
def test_parameters_that_the_forward_changes_in_parts_of_a_batch(options: dict[str, Any], pool: WorkerPool) -> None:
    pool.run(trains_as_on_one_device, Initialised, {"*": "zdp"}, options, nprocs=2, timeout=300)


def of_own_samples() -> None:
    """Each rank reads samples of its own, and gradients of two calls are added up."""
    torch.manual_seed(0)
    model, (x, *_) = Normalized().double(), batches()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, asked = x.chunk(size)[rank], sw.Options(force={"*": "zdp"})
    parallel: Any = sw.compile_parallel(
        model, sw.Cluster.local(size), mine, options=asked, batch="local", progress=False
    )
    with parallel.no_sync():
        parallel(mine).backward()
    parallel(mine + 1).backward()
    model(x).backward()
    model(x + 1).backward()
    torch.testing.assert_close(dict(parallel.full_state_dict()), dict(model.state_dict()))
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), model.get_parameter(name).grad, msg=name)


def test_ranks_with_samples_of_their_own_change_parameters_alike(pool: WorkerPool) -> None:
    pool.run(of_own_samples, nprocs=2, timeout=300)
