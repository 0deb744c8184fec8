"""Checkpoints on real ranks: saved by one plan and world, loaded by another, and whole whatever ends a save."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load

import shardweave as sw
from shardweave.demo.model import GPTConfig
from shardweave.errors import LaunchError, ParallelError
from shardweave.ir import Layout, Mesh
from shardweave.runtime import checkpoint_folder
from shardweave.runtime.chunks import pieces
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.parameters import local_shard
from tests.compiler.packing import Packed
from tests.compiler.training import Way, compile_ways
from tests.models import Case, gpt

DOUBLE = torch.float64
CONFIG = GPTConfig(vocabulary=16, context=8, layers=1, heads=4, width=16, bias=True, tied=True)
CASE = Case("small", partial(gpt.build, CONFIG), partial(gpt.batch, config=CONFIG))
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}

Optimizer = Callable[..., torch.optim.Optimizer]


def steps_of(world: int, *names: str) -> dict[str, Packed]:
    ways = [Way(name, {"*": name}) for name in names]
    return dict(zip(names, compile_ways(CASE.model(DOUBLE), CASE, DOUBLE, world, ways), strict=True))


@pytest.fixture(scope="module")
def plans() -> dict[tuple[int, str], Packed]:
    """Steps of the same model, for other worlds and in other ways; made once."""
    wanted = {4: ("column", "row", "zdp", "dp"), 8: ("zdp", "row"), 2: ("row",), 1: ("dp",)}
    return {(world, name): step for world, names in wanted.items() for name, step in steps_of(world, *names).items()}


def made(step: Packed, optimizer: Optimizer = ADAMW, seed: int = 0) -> tuple[sw.ParallelModule, torch.optim.Optimizer]:
    parallel = step.module(CASE.model(DOUBLE, seed))
    return parallel, optimizer(parallel.parameters())


def trained(parallel: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int = 3) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = parallel(**CASE.batch(step, 8, DOUBLE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# The functions below run on every rank.


def goes_on(step: Packed, folder: Path, optimizer: Optimizer) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps, a checkpoint, and what three more give."""
    parallel, steps = made(step, optimizer)
    trained(parallel, steps, 0)
    steps.param_groups[0]["lr"] = 0.03  # as a scheduler does
    sw.save_checkpoint(folder, parallel, steps, extra={"step": 3, "rank": dist.get_rank()})
    losses = trained(parallel, steps, 3)
    return losses, parallel.full_state_dict()


def resumes(step: Packed, folder: Path, optimizer: Optimizer) -> tuple[list[float], dict[str, Tensor]]:
    """The same three steps, from the checkpoint."""
    parallel, steps = made(step, optimizer, seed=1)
    extra = sw.load_checkpoint(folder, parallel, steps)
    assert extra == {"step": 3, "rank": 0} and steps.param_groups[0]["lr"] == 0.03
    losses = trained(parallel, steps, 3)
    return losses, parallel.full_state_dict()


def alone(optimizer: Optimizer) -> tuple[list[float], dict[str, Tensor]]:
    """What one device sees."""
    model = CASE.model(DOUBLE)
    steps = optimizer(model.parameters())
    trained(model, steps, 0)
    steps.param_groups[0]["lr"] = 0.03
    return trained(model, steps, 3), dict(model.state_dict())


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_any_plan_and_world_goes_on_as_if_nothing_had_happened(
    pool: WorkerPool, plans: dict[tuple[int, str], Packed], tmp_path: Path, optimizer: Optimizer
) -> None:
    folder = tmp_path / "run" / "checkpoint"
    (losses, parameters), *_ = pool.run(goes_on, plans[4, "column"], folder, optimizer, nprocs=4)
    for world, name in [(4, "column"), (4, "row"), (4, "zdp"), (8, "zdp"), (2, "row"), (1, "dp")]:
        again, then = pool.run(resumes, plans[world, name], folder, optimizer, nprocs=world)[0]
        torch.testing.assert_close(again, losses, **CLOSE)
        torch.testing.assert_close(then, parameters, **CLOSE)
    expected, whole = alone(optimizer)
    torch.testing.assert_close((losses, parameters), (expected, whole), rtol=1e-9, atol=1e-9)
