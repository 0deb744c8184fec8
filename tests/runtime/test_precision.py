"""What a user sees of mixed precision: masters, and nothing of the dtype that the step computes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardweave as sw
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.parameters import local_tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x))).float().square().mean()


def batch() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def compiled(precision: Any, word: str, meta: bool = False) -> sw.ParallelModule:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = Net()
    options = sw.Options(precision=precision, force={"*": word})
    found = sw.compile_parallel(model, sw.Cluster.local(dist.get_world_size()), batch(), options=options)
    assert isinstance(found, sw.ParallelModule)
    return found


def train(parallel: sw.ParallelModule, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = parallel(batch())
        loss.backward()
        assert {p.grad.dtype for p in parallel.parameters() if p.grad is not None} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_and_go_on(folder: Path) -> tuple[Any, ...]:
    """Train in bf16, save, and go on in bf16 under another plan, and in float32."""
    parallel = compiled("bf16", "zdp")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    train(parallel, optimizer, 2)
    sw.save_checkpoint(folder / "checkpoint", parallel, optimizer)
    expected = parallel.full_state_dict()
    onward = train(parallel, optimizer, 2)
    states: list[tuple[dict[str, Tensor], list[float]]] = []
    for precision, word in (("bf16", "zero2"), (None, "dp")):
        other = compiled(precision, word, meta=True)
        again = torch.optim.AdamW(other.parameters(), lr=1e-2)
        sw.load_checkpoint(folder / "checkpoint", other, again)
        states.append((other.full_state_dict(), train(other, again, 2)))
    return expected, onward, states


def test_checkpoints_hold_masters(pool: WorkerPool, tmp_path: Path) -> None:
    expected, onward, states = pool.run(save_and_go_on, tmp_path, nprocs=2)[0]
    for state, losses in states:
        for name, value in expected.items():
            assert value.dtype == state[name].dtype == torch.float32
            assert torch.equal(value, state[name]), name
        assert losses == pytest.approx(onward, rel=1e-2)
    assert any(bool((value != value.bfloat16().float()).any()) for value in expected.values())  # no copy of 8 bits


def first_values(folder: Path) -> tuple[Any, ...]:
    found = []
    for precision in ("bf16", None):
        parallel = compiled(precision, "zdp", meta=True)
        with torch.device("meta"):
            sw.initialise(parallel, Net(), seed=3)
        drawn = parallel.full_state_dict()
        path = folder / str(precision)
        sw.save_weights(parallel, path)
        other = compiled("fp16", "zero2", meta=True)
        sw.load_weights(other, path)
        found.append((drawn, other.full_state_dict()))
    return tuple(found)


def test_first_values_and_files_are_of_masters(pool: WorkerPool, tmp_path: Path) -> None:
    (drawn, loaded), (plain, _) = pool.run(first_values, tmp_path, nprocs=2)[0]
    for name, value in plain.items():
        assert value.dtype == torch.float32
        assert torch.equal(drawn[name], value) and torch.equal(loaded[name], value), name


def scaled(word: str) -> tuple[Any, ...]:
    """fp16 under a scale that is too large at first; in the third step only one entry of all gradients overflows."""
    parallel = compiled("fp16", word)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32)
    found = []
    for step in range(32):
        before = {name: local_tensor(p.detach()).clone() for name, p in parallel.named_parameters()}
        loss = parallel(batch())
        scaler.scale(loss).backward()
        if step == 30 and dist.get_rank() == dist.get_world_size() - 1:
            local_tensor(next(parallel.parameters()).grad).view(-1)[0] = torch.inf  # type: ignore[arg-type]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(before[n], local_tensor(p.detach())) for n, p in parallel.named_parameters())
        found.append((loss.item(), moved, scaler.get_scale()))
    return tuple(found)


@pytest.mark.parametrize("word", ["zdp", "zero2"])
def test_a_scaler_skips_steps_that_overflow_on_any_rank(word: str, pool: WorkerPool) -> None:
    ranks = pool.run(scaled, word, nprocs=2)
    assert all(rank == ranks[0] for rank in ranks)
    scales = [2.0**32, *(scale for _, _, scale in ranks[0])]
    for before, after, (_, moved, _) in zip(scales, scales[1:], ranks[0]):
        assert moved == (after >= before)
    assert not ranks[0][0][1] and not ranks[0][30][1] and ranks[0][29][1] and ranks[0][31][1]
    assert ranks[0][31][0] < ranks[0][0][0]
