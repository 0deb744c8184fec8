"""Dropout on real ranks: replicas agree, a fixed seed repeats, and without it the numbers are one device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardweave as sw
from shardweave.cost_model import node_work
from shardweave.ops.seeded_random import seeded
from shardweave.report import listing
from shardweave.runtime.launch import WorkerPool

DOUBLE = torch.float64
WAYS: list[dict[str, Any]] = [{"*": "dp"}, {"*": "zdp"}, {"first": "column:4", "last": "row:4"}, {"*": (2, 1, 1, 2)}]
RANKS, STEPS = 4, 3


class Dropped(nn.Module):
    """Dropout on what is sharded in every way, and noise that depends on no input."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(p)
        self.noise = p

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.drop(F.gelu(self.first(x)))
        hidden = hidden + self.noise * torch.randn(16, dtype=x.dtype)
        return F.mse_loss(self.drop(self.last(hidden)), targets)


def build(p: float = 0.3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Dropped(p).to(DOUBLE)


def batch(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, 8, generator=generator, dtype=DOUBLE) for name in ("x", "targets")}


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled(force: dict[str, Any], seed: int = 0, p: float = 0.3) -> Any:
    torch.manual_seed(seed + 100 * dist.get_rank())  # rank 0's is the one that counts
    options = sw.Options(force=force)
    return sw.compile_parallel(build(p), sw.Cluster.local(RANKS), batch(), options=options)


def assert_ranks_agree(value: Any) -> None:
    """The same bits on all ranks: had replicas drawn different numbers, their parameters would drift apart."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    for other in everyones:
        torch.testing.assert_close(other, value, rtol=0, atol=0)


# Each of these runs on every rank, and asserts there.


def a_fixed_seed_repeats() -> None:
    for force in WAYS:
        first, again, other = compiled(force), compiled(force), compiled(force, seed=1)
        losses = train(first)
        assert_ranks_agree(losses)
        assert_ranks_agree(first.full_state_dict())
        assert train(again) == losses
        assert train(other) != losses


def each_call_draws_anew_until_it_is_seeded() -> None:
    parallel = compiled(WAYS[2])
    with torch.no_grad():
        first, second = parallel(**batch()).item(), parallel(**batch()).item()
    third = parallel(**batch()).item()
    assert len({first, second, third}) == 3
    for seed in (5, 6):
        parallel.manual_seed(seed)
        seeded_once = [parallel(**batch()).item() for _ in range(2)]
        parallel.manual_seed(seed)
        assert [parallel(**batch()).item() for _ in range(2)] == seeded_once
        assert not {first, second, third} & set(seeded_once)


def seeds_that_differ_are_refused() -> None:
    parallel = compiled(WAYS[0])
    with pytest.raises(sw.ParallelError, match=r"one seed on all ranks, got \[0, 1, 2, 3\]"):
        parallel.manual_seed(dist.get_rank())


def the_callers_generator_is_left_alone() -> None:
    parallel = compiled(WAYS[0])
    state = torch.random.get_rng_state()
    parallel(**batch()).backward()
    assert torch.equal(torch.random.get_rng_state(), state)


def no_dropout_is_one_device() -> None:
    for force in WAYS:
        model = build(0.0)
        expected = train(model)
        parallel = compiled(force, p=0.0)
        assert parallel.training
        assert train(parallel) == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(parallel.full_state_dict(), dict(model.state_dict()), rtol=1e-11, atol=1e-13)


def behind_torch_compile_too() -> None:
    runs = []
    for seed in (0, 0, 1):
        torch._dynamo.reset()
        torch.manual_seed(seed + 100 * dist.get_rank())
        model = build()
        options = {"cluster": sw.Cluster.local(RANKS), "force": {"first": "column:4", "last": "dp"}}
        step = torch.compile(model, backend="shardweave", options=options)
        runs.append(train(step))  # type: ignore[arg-type]
        assert len(set(runs[-1])) == STEPS
        assert_ranks_agree(runs[-1])
        assert_ranks_agree(model.state_dict())
    assert runs[0] == runs[1] != runs[2]


class Broken(Dropped):
    """Drops between two graph breaks, where there is nothing to spread."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        hidden = self.drop(hidden)
        torch._dynamo.graph_break()
        return F.mse_loss(self.last(hidden), targets)


def what_is_not_spread_agrees_too() -> None:
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        torch.manual_seed(100 * dist.get_rank())
        model = Broken(0.3).to(DOUBLE)
        model.load_state_dict(build().state_dict())
        step = torch.compile(model, backend="shardweave", options={"cluster": sw.Cluster.local(RANKS)})
        runs.append(train(step))  # type: ignore[arg-type]
        assert_ranks_agree(runs[-1])
        assert_ranks_agree(model.state_dict())
    assert runs[0] == runs[1]


ON_FOUR_RANKS: list[Callable[[], None]] = [
    a_fixed_seed_repeats,
    each_call_draws_anew_until_it_is_seeded,
    seeds_that_differ_are_refused,
    the_callers_generator_is_left_alone,
    no_dropout_is_one_device,
    behind_torch_compile_too,
    what_is_not_spread_agrees_too,
]


@pytest.mark.parametrize("check", ON_FOUR_RANKS, ids=lambda check: check.__name__)
def test_on_four_ranks(check: Callable[[], None], pool: WorkerPool) -> None:
    pool.run(check, nprocs=RANKS)


class Rounded(torch.autograd.Function):
    """Keeps half of its gradient, drawn in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * (torch.rand_like(grad) < 0.5)


class Draws(nn.Module):
    """Draws in its backward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 64, bias=False, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = Rounded.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return kept.sum()


def test_a_backward_draws_from_the_seed_of_its_forward() -> None:
    x = torch.ones(2, 4, dtype=DOUBLE)
    parallel = sw.compile_parallel(Draws(), sw.Cluster.local(1), x)
    (weight,) = parallel.parameters()

    def gradient() -> Tensor:
        parallel.zero_grad()
        parallel(x).backward()
        assert weight.grad is not None
        return weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad

    parallel.manual_seed(3)
    first, second = gradient(), gradient()
    assert first.unique().tolist() == [0, 1, 2] and not torch.equal(first, second)
    parallel.manual_seed(3)
    assert torch.equal(gradient(), first)


def test_a_backward_that_draws_is_refused_behind_torch_compile() -> None:
    torch._dynamo.reset()
    model = torch.compile(Draws(), backend="shardweave", options={"cluster": sw.Cluster.local(1)})
    with pytest.raises(sw.ParallelError, match="draws random numbers in its backward.*compile_parallel"):
        model(torch.ones(2, 4, dtype=DOUBLE)).backward()


def test_the_mean_over_seeds_is_the_step_without_dropout() -> None:
    """Dropout keeps the expected value of a linear layer: shards and replicas draw from the right distribution."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 4)).to(DOUBLE)
    x = torch.randn(2, 8, dtype=DOUBLE)
    parallel = sw.compile_parallel(layer, sw.Cluster.local(1), x)
    with torch.no_grad():
        mean = torch.stack([parallel(x) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, layer[1](x).detach(), rtol=0, atol=0.05)


def test_a_drawing_op_is_priced_and_listed_as_itself() -> None:
    plan_of = sw.compile_parallel(build(), sw.Cluster.local(1), batch())
    drawing = [node for node in plan_of.graphs["forward"].graph.nodes if node.target is seeded]
    assert len(drawing) == 3
    work = node_work(drawing[0])
    assert work is not None and work.num_bytes == 8 * 16 * (8 + 8 + 1)  # reads a value, writes it and its mask
    text = listing(plan_of.graphs["forward"])
    assert "native_dropout = native_dropout(gelu, 0.3, True, draw=0)" in text
    assert "seeded" not in text
