"""Checkpoints on real ranks: saved by one plan and world, loaded by another, and whole whatever ends a save."""

from __future__ import annotations

import os
import pickle
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.demo.model import GPTConfig
from shardweave.ir import Layout, Mesh
from shardweave.ir.errors import CheckpointNotFound, LaunchError, ParallelError
from shardweave.runtime.checkpoint import checkpoint as checkpoint_folder
from shardweave.runtime.checkpoint.state import pieces
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.parameters import local_shard
from tests.compiler.packing import Packed
from tests.compiler.training import Way, compile_ways
from tests.models import ZOO, Case, gpt

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


def passes_on(step: Packed, folder: Path | None, then: Path, first: int) -> list[float]:
    """Two steps after a checkpoint (None: after none), and another checkpoint."""
    parallel, steps = made(step, seed=0 if folder is None else 1)
    if folder is not None:
        assert sw.load_checkpoint(folder, parallel, steps) == {"step": first}
    losses = trained(parallel, steps, first, 2)
    sw.save_checkpoint(then, parallel, steps, extra={"step": first + 2})
    return losses


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


def test_training_goes_from_world_to_world(
    pool: WorkerPool, plans: dict[tuple[int, str], Packed], tmp_path: Path
) -> None:
    """Two steps on each of 4, 8, 2 and 1 ranks are eight steps on one device."""
    losses: list[float] = []
    before: Path | None = None
    for index, (world, name) in enumerate([(4, "zdp"), (8, "row"), (2, "row"), (1, "dp")]):
        folder = tmp_path / str(world)
        losses += pool.run(passes_on, plans[world, name], before, folder, 2 * index, nprocs=world)[0]
        before = folder
    model = CASE.model(DOUBLE)
    assert losses == pytest.approx(trained(model, ADAMW(model.parameters()), 0, 8), rel=1e-9)


def test_pieces_are_the_shard() -> None:
    """Also of dimensions with axes between local digits, as a fused projection's are."""
    mesh = Mesh.of_levels([("gpu", 4), ("node", 3)])
    x, y, z = mesh.axes
    for dims in [
        (), ((), (5,)), ((x, 4), (3,)), ((3, x, y, 2), (4,)), ((2, x, 2, y), (3, z)), ((z, 2), (2, x, y, 2), (y,)),
    ]:  # fmt: skip
        layout = Layout(dims)
        whole = torch.arange(layout_size(layout)).reshape(layout.global_shape)
        for rank in range(mesh.world_size):
            coordinates = mesh.coordinates(rank)
            local = torch.full(layout.local_shape, -1)
            for piece in pieces(layout, coordinates):
                box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
                piece.of(local).copy_(whole[box])
            assert torch.equal(local, local_shard(whole, layout, coordinates))


def layout_size(layout: Layout) -> int:
    return int(torch.Size(layout.global_shape).numel())


def saves(step: Packed, folder: Path, optimizer: Optimizer = ADAMW, first: int = 0) -> dict[str, Any]:
    """Trains a step, saves, and gives what was saved, whole."""
    parallel, steps = made(step, optimizer)
    trained(parallel, steps, first, 1)
    sw.save_checkpoint(folder, parallel, steps, extra={"first": first})
    return state_of(parallel, steps)


def state_of(parallel: sw.ParallelModule, steps: torch.optim.Optimizer) -> dict[str, Any]:
    names = {parameter: name for name, parameter in parallel.named_parameters()}
    state = {
        names[parameter]: {
            key: value.full_tensor() if isinstance(value, DTensor) else value.clone() for key, value in values.items()
        }
        for parameter, values in steps.state.items()
    }
    return {"model": parallel.full_state_dict(), "optimizer": {"state": state}}


def loads(step: Packed, folder: Path, optimizer: Optimizer = ADAMW) -> tuple[dict[str, Any], dict[str, Any]]:
    parallel, steps = made(step, optimizer, seed=1)
    extra = sw.load_checkpoint(folder, parallel, steps)
    return extra, state_of(parallel, steps)


def test_files_are_an_ordinary_checkpoint(
    pool: WorkerPool, plans: dict[tuple[int, str], Packed], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    step = plans[4, "column"]
    assert any("_StridedShard" in placed for placed in pool.run(placements_of, step)[0])
    saved = pool.run(saves, step, folder)[0]
    model = CASE.model(DOUBLE, seed=1)
    read = emptied({"model": dict(model.state_dict()), "optimizer": {"state": saved["optimizer"]["state"]}})
    load(read, checkpoint_id=folder, no_dist=True)
    torch.testing.assert_close(read, saved, rtol=0, atol=0)
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    model.load_state_dict(whole["model"])
    torch.testing.assert_close(dict(model.state_dict()), saved["model"], rtol=0, atol=0)
    torch.testing.assert_close(whole["optimizer"]["state"], saved["optimizer"]["state"], rtol=0, atol=0)
    assert whole["extra"] == {"first": 0} and whole["optimizer"]["kind"] == "AdamW"
    size = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    held = sum(v.numel() * v.element_size() for v in tensors_in(saved))
    assert held < size < held + 2000 * chunks_in(folder), "replicas are written once"


def chunks_in(folder: Path) -> int:
    """How many chunks of tensors and objects a checkpoint consists of."""
    return len(FileSystemReader(folder).read_metadata().storage_data)


def emptied(state: Any) -> Any:
    return {k: emptied(v) for k, v in state.items()} if isinstance(state, dict) else torch.zeros_like(state)


def tensors_in(state: Any) -> list[Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_in(value)]
    return [state] if isinstance(state, Tensor) else []


def placements_of(step: Packed) -> list[str]:
    parallel, _ = made(step)
    return [repr(parameter.placements) for parameter in parallel.parameters() if isinstance(parameter, DTensor)]


def dies(step: Packed, folder: Path, point: str, rank: int) -> None:
    """A second save over the first, in which a rank is killed."""
    parallel, steps = made(step)
    trained(parallel, steps, 7, 1)

    def before(owner: Any, name: str, call: int = 1) -> None:
        original, calls = getattr(owner, name), [0]

        def killed(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, killed)

    if dist.get_rank() == rank:
        before(*{
            "before writing": (FileSystemWriter, "write_data"),
            "before the metadata": (FileSystemWriter, "finish"),
            "before the renames": (checkpoint_folder.os, "rename", 2),
            "between the renames": (checkpoint_folder.os, "rename", 3),
            "before the old one goes": (checkpoint_folder.shutil, "rmtree"),
        }[point])  # fmt: skip
    sw.save_checkpoint(folder, parallel, steps, extra={"first": 7})


@pytest.mark.parametrize(
    ("point", "rank", "found"),
    [
        ("before writing", 1, 0),
        ("before writing", 0, 0),
        ("before the metadata", 0, 0),
        ("before the renames", 0, 0),
        ("between the renames", 0, 0),
        ("before the old one goes", 0, 7),
    ],
)
def test_whatever_kills_a_save_leaves_a_whole_checkpoint(
    pool: WorkerPool, plans: dict[tuple[int, str], Packed], tmp_path: Path, point: str, rank: int, found: int
) -> None:
    folder, step = tmp_path / "checkpoint", plans[2, "row"]
    saved = pool.run(saves, step, folder, nprocs=2)[0]
    with pytest.raises(LaunchError, match="SIGKILL"):
        pool.run(dies, step, folder, point, rank, nprocs=2)
    extra, state = pool.run(loads, step, folder, nprocs=2)[0]
    assert extra == {"first": found}
    if not found:
        torch.testing.assert_close(state, saved, rtol=0, atol=0)
    pool.run(saves, step, folder, ADAMW, 3, nprocs=2)
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert pool.run(loads, step, folder, nprocs=2)[0][0] == {"first": 3}


def in_the_background(step: Packed, folder: Path) -> None:
    parallel, steps = made(step)
    trained(parallel, steps, 0, 1)
    then = state_of(parallel, steps)
    saving = sw.save_checkpoint(folder, parallel, steps, extra={"losses": [1.0]}, asynchronous=True)
    losses = trained(parallel, steps, 1)
    second = sw.save_checkpoint(folder.with_name("second"), parallel, steps, asynchronous=True)
    assert saving.done
    saving.wait()
    other, fresh = made(step, seed=1)
    assert sw.load_checkpoint(folder, other, fresh) == {"losses": [1.0]}
    assert second.done  # a load waits as well
    torch.testing.assert_close(state_of(other, fresh), then, rtol=0, atol=0)
    assert trained(other, fresh, 1) == losses
    write = FileSystemWriter.write_data

    def fails(*_: Any) -> Any:
        raise OSError("the disk is full")

    if dist.get_rank() == 1:
        FileSystemWriter.write_data = fails  # type: ignore[method-assign]
    for at_wait in (True, False):
        failed = sw.save_checkpoint(folder, parallel, steps, asynchronous=True)
        with pytest.raises(ParallelError, match="the disk is full"):
            failed.wait() if at_wait else sw.save_checkpoint(folder, parallel, steps)
    FileSystemWriter.write_data = write  # type: ignore[method-assign]
    assert sw.load_checkpoint(folder, other, fresh) == {"losses": [1.0]}
    sw.save_checkpoint(folder, parallel, steps, extra={"left": "to the end"}, asynchronous=True)


def test_saves_in_the_background(pool: WorkerPool, plans: dict[tuple[int, str], Packed], tmp_path: Path) -> None:
    pool.run(in_the_background, plans[4, "zdp"], tmp_path / "checkpoint", timeout=60.0)
    assert pool.run(loads, plans[4, "row"], tmp_path / "checkpoint")[0][0] == {"left": "to the end"}


def refuses(step: Packed, other: Packed, folder: Path) -> None:
    """Every one of these is told on all ranks."""
    parallel, steps = made(step)
    load_, save_ = sw.load_checkpoint, sw.save_checkpoint
    with pytest.raises(CheckpointNotFound, match=r"there is no checkpoint at .*nowhere"):
        load_(folder / "nowhere", parallel)
    save_(folder, parallel)
    with pytest.raises(ParallelError, match="has no optimizer"):
        load_(folder, parallel, steps)
    trained(parallel, steps, 0, 1)
    save_(folder, parallel, steps)
    before = state_of(parallel, steps)
    with pytest.raises(ParallelError, match="of the kind AdamW, but SGD"):
        load_(folder, parallel, SGD(parallel.parameters()))
    decayed, plain = list(parallel.parameters())[:3], list(parallel.parameters())[3:]
    with pytest.raises(ParallelError, match=r"groups of \[\d+\] parameters, this one of \[3, \d+\]"):
        load_(folder, parallel, ADAMW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}]))
    with pytest.raises(ParallelError, match=r"not those of the parallel model"):
        save_(folder, parallel, ADAMW(CASE.model().parameters()))
    model = mlp_model()
    with pytest.raises(ParallelError, match=r"'first.weight' is missing in the checkpoint; .*and \d+ more"):
        load_(folder, other.module(model))
    wider = other.module(model)
    save_(folder.with_name("mlp"), wider)
    wider.scale = torch.zeros(3)
    with pytest.raises(ParallelError, match=r"'scale' is \(10,\) of torch.float64 in the checkpoint and \(3,\)"):
        load_(folder.with_name("mlp"), wider)
    extra = {"no": lambda: 0} if dist.get_rank() == 0 else {}
    with pytest.raises(ParallelError, match="'extra' cannot be pickled"):
        save_(folder, parallel, steps, extra=extra)
    with pytest.raises(ParallelError, match="different folders"):
        save_(folder.with_name(f"to{dist.get_rank()}"), parallel)
    mine = folder.with_name("mine")
    if dist.get_rank() == 0:
        mine.mkdir()
        (mine / "notes.txt").write_text("keep")
    with pytest.raises(ParallelError, match=r"holds more than a checkpoint \(notes.txt\)"):
        save_(mine, parallel)
    assert (mine / "notes.txt").read_text() == "keep"
    load_(folder, parallel, steps)
    torch.testing.assert_close(state_of(parallel, steps), before, rtol=0, atol=0)
    dist.barrier()
    if dist.get_rank() == 0:
        (file, *_) = sorted(folder.glob("__1_*.distcp"))
        file.write_bytes(b"")
    dist.barrier()
    with pytest.raises(ParallelError, match=r"checkpoint is damaged: __1_0.distcp has 0 bytes, [\d,]+ were written"):
        load_(folder, parallel, steps)


def mlp_model() -> nn.Module:
    return ZOO["mlp"].model(DOUBLE)


def test_what_does_not_fit_is_refused_on_all_ranks(
    pool: WorkerPool, plans: dict[tuple[int, str], Packed], tmp_path: Path
) -> None:
    (other,) = compile_ways(mlp_model(), ZOO["mlp"], DOUBLE, 2, [Way("dp", {"*": "dp"})])
    pool.run(refuses, plans[2, "row"], other, tmp_path / "checkpoint", nprocs=2, timeout=60.0)


def test_one_device_without_process_group(
    pool: WorkerPool, plans: dict[tuple[int, str], Packed], tmp_path: Path
) -> None:
    saved = saves(plans[1, "dp"], tmp_path / "one")
    extra, state = loads(plans[1, "dp"], tmp_path / "one")
    torch.testing.assert_close(state, saved, rtol=0, atol=0)
    many = pool.run(loads, plans[2, "row"], tmp_path / "one", nprocs=2)[0]
    torch.testing.assert_close(many[1], saved, rtol=0, atol=0)
    assert pickle.dumps(extra) == pickle.dumps(many[0])


class Dropping(nn.Module):
    """A model that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.drop(self.up(x))) - x).square().mean()


def draws_go_on(step: Packed, folder: Path) -> None:
    x = torch.linspace(-1, 1, 64).view(8, 8)
    parallel = step.module(Dropping())
    parallel(x)
    sw.save_checkpoint(folder, parallel)
    losses = [parallel(x).item() for _ in range(3)]
    assert len(set(losses)) == 3
    torch.manual_seed(5)
    other = step.module(Dropping())
    sw.load_checkpoint(folder, other)
    assert [other(x).item() for _ in range(3)] == losses


class Counting(Dropping):
    """A model whose layers have state that is no tensor."""

    calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def extra_state_goes_on(step: Packed, folder: Path) -> None:
    parallel = step.module(Counting())
    parallel.calls = 3
    sw.save_checkpoint(folder, parallel)
    other, single = step.module(Counting()), Counting()
    sw.load_checkpoint(folder, other)
    single.load_state_dict(parallel.full_state_dict())
    assert other.calls == single.calls == 3
    with pytest.raises(ParallelError, match="no place for the extra state of modules"):
        sw.save_weights(parallel, folder.with_name("weights"))
    torch.save(single.state_dict(), path := folder.with_name(f"{dist.get_rank()}.pt"))
    with pytest.raises(ParallelError, match=r"extra state of modules .*parallel\.load_state_dict"):
        sw.load_weights(parallel, path)
    plain = step.module(Dropping())
    with pytest.raises(ParallelError, match="extra state of modules differs, _extra_state is only in the checkpoint"):
        sw.load_checkpoint(folder, plain)
    sw.save_checkpoint(folder, plain)
    with pytest.raises(ParallelError, match="extra state of modules differs, _extra_state is only in the model"):
        sw.load_checkpoint(folder, other)


def test_the_extra_state_of_modules_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    case = Case("counting", Counting, dropping_batch)
    (step,) = compile_ways(case.model(), case, torch.float32, 2, [Way("zdp", {"*": "zdp"})])
    pool.run(extra_state_goes_on, step, tmp_path / "checkpoint", nprocs=2)


def dropping_batch(generator: torch.Generator, size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 8, generator=generator)}


def test_random_draws_go_on(pool: WorkerPool, tmp_path: Path) -> None:
    case = Case("dropping", Dropping, dropping_batch)
    (step,) = compile_ways(case.model(), case, torch.float32, 2, [Way("dp", {"*": "dp"})])
    pool.run(draws_go_on, step, tmp_path / "checkpoint", nprocs=2)


def page(directory: Path) -> None:
    """The examples of the page, run in an empty folder."""
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python(?: ranks=2)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    train, _, convert, allow = blocks
    os.chdir(directory)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(train, names)
    first = names["train"](3, "runs/latest")
    assert len(names["train"](6)) == 3
    torch.manual_seed(0)
    whole = names["train"](6, "runs/whole")
    assert whole[:3] == first
    if dist.get_rank() == 0:
        exec(convert, names)
        with torch.serialization.safe_globals([]):  # what is allowed in it is forgotten after it
            exec(allow, names)
            assert names["Progress"] in torch.serialization.get_safe_globals()
        parameters = torch.load("whole.pt", weights_only=False)["optimizer"]
        assert parameters["state"]["0.weight"]["step"] == 6


def test_the_examples_of_the_page_run(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(page, tmp_path, nprocs=2)
