"""A step that fails on one rank, by its data, ends on all: no rank waits for one that does not come."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardweave as sw
from shardweave.ir.errors import LostRankError, ParallelError
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


def compiled(force: str) -> nn.Module:
    world = dist.get_world_size()
    return sw.compile_parallel(Model(), sw.Cluster.local(world), TOKENS, options=sw.Options(force={"*": force}))


def fail(force: str) -> tuple[str, str]:
    """The error of a call in which one sample's token is past the table; then the one of the next call."""
    expected = Model()(TOKENS)
    parallel = compiled(force)
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
    ("force", "ranks"),
    [
        pytest.param("zero3", 3, id="each rank has rows of its own"),
        pytest.param("tensor:2", 4, id="two ranks fail, and two that wait for them"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(pool: WorkerPool, force: str, ranks: int) -> None:
    results = pool.run(fail, force, nprocs=ranks, timeout=60)
    cause = "IndexError: index out of range in self"
    failed = [rank for rank, (first, _) in enumerate(results) if first == cause]
    assert 0 in failed and len(failed) < ranks
    for rank, (first, second) in enumerate(results):
        if rank not in failed:
            assert first.startswith(f"ParallelError: rank {rank} cannot finish this step, as it failed on rank ")
            assert cause in first
        assert second.startswith("ParallelError: this step cannot run any more")
        assert cause in second
