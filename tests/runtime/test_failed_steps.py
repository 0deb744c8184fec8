"""A step that fails on one rank, by its data, ends on all: no rank waits for one that does not come."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import shardweave as sw
from shardweave.ir.errors import LostRankError, ParallelError
from shardweave.runtime.call_checks import Agreement
from shardweave.runtime.execute import boxed
from shardweave.runtime.launch import WorkerPool

TOKENS = torch.randint(48, (12, 6), generator=torch.Generator().manual_seed(1))
NO_SUCH_ROW = 77


class Model(nn.Module):
    """Raises IndexError for a token past the table, on those ranks alone that compute its row.

    The index goes through a float: ranges of indices that are made of integers alone are checked before the step.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding((tokens + 0.25).long())).square().mean()


def compiled(force: str, checked_calls: int = 3) -> nn.Module:
    options = sw.Options(force={"*": force}, check_inputs=checked_calls)
    return sw.compile_parallel(Model(), sw.Cluster.local(dist.get_world_size()), TOKENS, options=options)


def fail(force: str, checked_calls: int) -> tuple[str, str]:
    """The error of a call in which one sample's token is past the table; then the one of the next call."""
    expected = Model()(TOKENS)
    parallel = compiled(force, checked_calls)
    torch.testing.assert_close(parallel(TOKENS), expected)
    broken = TOKENS.clone()
    broken[0, 2] = NO_SUCH_ROW
    errors = []
    for tokens in (broken, TOKENS):
        with pytest.raises((IndexError, ParallelError)) as caught:
            parallel(tokens)
        assert not isinstance(caught.value, LostRankError)
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
    # The world itself goes on, and so does a step that is compiled anew.
    count = torch.ones(())
    dist.all_reduce(count)
    assert int(count) == dist.get_world_size()
    torch.testing.assert_close(compiled(force)(TOKENS), expected)
    first, second = errors
    return first, second


@pytest.mark.parametrize(
    ("force", "ranks", "checked_calls"),
    [
        pytest.param("zero3", 3, 3, id="each rank has rows of its own"),
        pytest.param("tensor:2", 4, 3, id="two ranks fail, and two that wait for them"),
        pytest.param("dp", 3, 0, id="before the ranks have agreed on the call"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(
    pool: WorkerPool, force: str, ranks: int, checked_calls: int
) -> None:
    results = pool.run(fail, force, checked_calls, nprocs=ranks, timeout=60)
    cause = "IndexError: index out of range in self"
    failed = [rank for rank, (first, _) in enumerate(results) if first == cause]
    assert 0 in failed and len(failed) < ranks
    for rank, (first, second) in enumerate(results):
        if rank not in failed:
            assert first.startswith(f"ParallelError: rank {rank} cannot finish this step, as it failed on rank ")
            assert cause in first
        assert second.startswith("ParallelError: this step cannot run any more")
        assert cause in second


class Noisy(nn.Module):
    """Changes a buffer, and may draw random numbers, in its forward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.dropout = dropout
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        found = nn.functional.dropout(self.norm(self.first(x)), self.dropout, self.training)
        return self.head(found).square().mean()


def train(force: str, dropout: float, refused: bool) -> list[float]:
    """Losses and the buffer's sums of two steps. Between them rank 1 passes a batch that the step does not take."""
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = sw.Options(force={"*": force}, check_inputs=0, recompile_limit=1)
    parallel = sw.compile_parallel(Noisy(dropout), sw.Cluster.local(2), x, options=options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    found = []
    for step in range(2):
        if step and refused:
            with pytest.raises(ParallelError):
                parallel(x if dist.get_rank() == 0 else x.float())
        loss = parallel(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [float(loss.detach()), float(parallel.norm.running_mean.sum()), float(parallel.norm.running_var.sum())]
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["agreed on in the forward", "agreed on before random numbers"])
@pytest.mark.parametrize("force", ["dp", "tensor:2"])
def test_a_call_that_one_rank_refuses_changes_nothing(pool: WorkerPool, force: str, dropout: float) -> None:
    refused = pool.run(train, force, dropout, True, nprocs=2, timeout=60)
    undisturbed = pool.run(train, force, dropout, False, nprocs=2, timeout=60)
    assert refused == undisturbed


def refuse_and_fail() -> str:
    """The error of a call that rank 0 refuses, and that fails on rank 1 before its first collective."""
    parallel = compiled("dp", checked_calls=0)
    parallel(TOKENS)
    broken = torch.full_like(TOKENS, NO_SUCH_ROW)
    with pytest.raises(ParallelError) as caught:
        parallel(TOKENS.float() if dist.get_rank() == 0 else broken)
    parallel(TOKENS)  # no rank has started a collective of the refused call
    return str(caught.value)


def test_a_rank_that_fails_in_a_refused_call_hears_of_the_refusal(pool: WorkerPool) -> None:
    first, second = pool.run(refuse_and_fail, nprocs=2, timeout=60)
    assert "float32" in first and "float32" in second


def test_a_graph_agrees_right_before_its_first_collective() -> None:
    done: list[str] = []
    graph = fx.Graph()
    x = graph.placeholder("x")
    computed = graph.call_function(lambda value: done.append("compute") or value, (x,))
    start = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (computed, "sum", "none"))
    graph.output([start])
    agreement = Agreement()
    agreement.begin(lambda: done.append("agreed"))
    run = boxed(fx.GraphModule({}, graph), graph, agreement=agreement)
    with pytest.raises(RuntimeError):  # there is no such group
        run([torch.ones(2)])
    assert done == ["compute", "agreed"]
