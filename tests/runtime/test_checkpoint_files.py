"""The files of a checkpoint: damage is named on all ranks, nothing in them is run, and a failed write loses nothing."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.ir.errors import CheckpointNotFound, ParallelError
from shardweave.runtime.checkpoint.files import CHECKSUMS, METADATA
from shardweave.runtime.launch import WorkerPool

X = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)


def made(seed: int, world: int = 1, width: int = 16) -> tuple[sw.ParallelModule, torch.optim.Optimizer]:
    """A parallel model and its optimizer, after one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)).double()
    parallel = sw.compile_parallel(model, sw.Cluster.local(world), (X,), options=sw.Options(force={"*": "zero3"}))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    parallel(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return parallel, optimizer


def state_of(parallel: sw.ParallelModule, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [optimizer.state[parameter] for parameter in parallel.parameters()]
    values = [*parallel.state_dict().values(), *(state[key] for state in states for key in sorted(state))]
    return [(v.to_local() if isinstance(v, DTensor) else v).detach().clone() for v in values]


def flipped(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 0x10
    path.write_bytes(raw)


def swapped(folder: Path) -> None:
    one, other = folder / "__0_0.distcp", folder / "__1_0.distcp"
    one.rename(folder / "third")
    other.rename(one)
    (folder / "third").rename(other)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def only_metadata_of(folder: Path, other: Path) -> None:
    shutil.copy(other / METADATA, folder / METADATA)


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a byte of a value": (
        lambda folder, _: flipped(folder / "__1_0.distcp", (folder / "__1_0.distcp").stat().st_size // 2),
        r"__1_0.distcp is damaged: bytes [\d,]+ to [\d,]+, which hold '[\w.]+'.*not those that were written",
    ),
    "a byte of the metadata": (lambda folder, _: flipped(folder / METADATA, 200), r"\.metadata is damaged: bytes"),
    "a byte of the checksums": (lambda folder, _: flipped(folder / CHECKSUMS, 90), r"checksums.json is damaged"),
    "files swapped": (lambda folder, _: swapped(folder), r"__0_0.distcp"),
    "a file cut off": (
        lambda folder, _: truncated(folder / "__1_0.distcp"),
        r"damaged: __1_0.distcp has [\d,]+ bytes, [\d,]+ were written",
    ),
    "a file gone": (lambda folder, _: (folder / "__1_0.distcp").unlink(), r"damaged: __1_0.distcp is missing"),
    "the metadata gone": (lambda folder, _: (folder / METADATA).unlink(), r"damaged: .metadata is missing"),
    "a file of another checkpoint": (
        lambda folder, other: shutil.copy(other / "__1_0.distcp", folder / "__1_0.distcp"),
        r"__1_0.distcp is damaged",
    ),
    "one file too many": (
        lambda folder, other: shutil.copy(other / "__1_0.distcp", folder / "__9_0.distcp"),
        r"__9_0.distcp is not from this save",
    ),
    "metadata of another checkpoint": (
        lambda folder, other: only_metadata_of(folder, other),
        r"\.metadata is damaged",
    ),
}


def damaged_in_every_way(folder: Path) -> None:
    """Every one of these is told on all ranks, and leaves the model as it was."""
    parallel, optimizer = made(0, 2)
    other, other_optimizer = made(1, 2)
    sw.save_checkpoint(folder / "whole", parallel, optimizer, asynchronous=True).wait()
    sw.save_checkpoint(folder / "other", other, other_optimizer)
    before = state_of(other, other_optimizer)
    for name, (damage, message) in DAMAGES.items():
        target = folder / name
        if dist.get_rank() == 0:
            shutil.copytree(folder / "whole", target)
            damage(target, folder / "other")
        dist.barrier()
        with pytest.raises(ParallelError, match=message) as told:
            sw.load_checkpoint(target, other, other_optimizer)
        assert type(told.value) is ParallelError, "not CheckpointNotFound, after which training begins anew"
        for value, kept in zip(state_of(other, other_optimizer), before, strict=True):
            assert torch.equal(value, kept), name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.load_checkpoint(folder / "whole", other, other_optimizer)
    for value, wanted in zip(state_of(other, other_optimizer), state_of(parallel, optimizer), strict=True):
        assert torch.equal(value, wanted)


def test_damage_is_named_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(damaged_in_every_way, tmp_path, nprocs=2, timeout=120.0)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, sw.ParallelModule, torch.optim.Optimizer]:
    """A checkpoint of one device, and what it was saved from."""
    parallel, optimizer = made(0)
    folder = tmp_path_factory.mktemp("one") / "checkpoint"
    sw.save_checkpoint(folder, parallel, optimizer, extra={"step": 7})
    return folder, parallel, optimizer


def test_no_flipped_bit_is_loaded(
    one: tuple[Path, sw.ParallelModule, torch.optim.Optimizer], tmp_path: Path
) -> None:
    whole, parallel, optimizer = one
    generator = random.Random(0)
    for name in ("__0_0.distcp", METADATA, CHECKSUMS):
        size = (whole / name).stat().st_size
        for position in {0, size - 1, *generator.sample(range(size), 40)}:
            folder = tmp_path / f"{name}{position}"
            shutil.copytree(whole, folder)
            flipped(folder / name, position)
            with pytest.raises(ParallelError, match="damaged|version|cannot be read"):
                sw.load_checkpoint(folder, parallel, optimizer)


def test_checkpoints_without_checksums_load_with_one_warning(
    one: tuple[Path, sw.ParallelModule, torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Those of older versions, and of torch alone; torch alone reads ours."""
    whole, parallel, _ = one
    folder = tmp_path / "old"
    shutil.copytree(whole, folder)
    (folder / CHECKSUMS).unlink()
    other, optimizer = made(1)
    with pytest.warns(UserWarning, match="has no checksums") as told:
        assert sw.load_checkpoint(folder, other, optimizer) == {"step": 7}
    assert len(told) == 1
    torch.testing.assert_close(other.full_state_dict(), parallel.full_state_dict(), rtol=0, atol=0)
    plain = {"model": {name: value.clone() for name, value in parallel.full_state_dict().items()}}
    save(plain, checkpoint_id=tmp_path / "plain", no_dist=True)
    other, _ = made(1)
    with pytest.warns(UserWarning, match="has no checksums"):
        assert sw.load_checkpoint(tmp_path / "plain", other) == {}
    torch.testing.assert_close(other.full_state_dict(), plain["model"], rtol=0, atol=0)
    read = {"model": {name: torch.zeros_like(value) for name, value in plain["model"].items()}}
    load(read, checkpoint_id=whole, no_dist=True)
    torch.testing.assert_close(read, plain, rtol=0, atol=0)


class Runs:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._file}",)


def test_nothing_in_a_checkpoint_is_run(
    one: tuple[Path, sw.ParallelModule, torch.optim.Optimizer], tmp_path: Path
) -> None:
    whole, parallel, _ = one
    trace, folder = tmp_path / "trace", tmp_path / "pickle"
    shutil.copytree(whole, folder)
    (folder / CHECKSUMS).unlink()
    (folder / METADATA).write_bytes(pickle.dumps(Runs(trace)))
    with pytest.raises(ParallelError, match=r"pickle/\.metadata cannot be read: it asks for posix.system"):
        sw.load_checkpoint(folder, parallel)
    plain = {"model": parallel.full_state_dict(), "extra": Runs(trace)}
    save(plain, checkpoint_id=tmp_path / "extra", no_dist=True)
    with pytest.raises(ParallelError, match=r"'extra' of the checkpoint .*/extra: it is made with posix.system"):
        sw.load_checkpoint(tmp_path / "extra", parallel)
    assert not trace.exists()


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "link"])
def test_paths_in_metadata_stay_in_the_folder(
    one: tuple[Path, sw.ParallelModule, torch.optim.Optimizer], tmp_path: Path, path: str
) -> None:
    whole, parallel, _ = one
    folder = tmp_path / "checkpoint"
    shutil.copytree(whole, folder)
    (folder / CHECKSUMS).unlink()
    (folder / "__0_0.distcp").rename(tmp_path / "secret")
    (folder / "link").symlink_to("../secret")
    metadata = FileSystemReader(folder).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = path
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ParallelError, match=f"'{path}'.*not followed"):
        sw.load_checkpoint(folder, parallel)


def test_metadata_that_leave_a_gap_are_refused(
    one: tuple[Path, sw.ParallelModule, torch.optim.Optimizer], tmp_path: Path
) -> None:
    whole, parallel, _ = one
    folder = tmp_path / "checkpoint"
    shutil.copytree(whole, folder)
    (folder / CHECKSUMS).unlink()
    metadata = FileSystemReader(folder).read_metadata()
    metadata.state_dict_metadata["model.0.weight"].chunks.clear()
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ParallelError, match=r"chunks of 'model.0.weight' do not make up its shape \(16, 8\)"):
        sw.load_checkpoint(folder, parallel)


class Step:
    """A class that is not known where a checkpoint is loaded."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_what_can_be_in_extra(one: tuple[Path, sw.ParallelModule, torch.optim.Optimizer], tmp_path: Path) -> None:
    _, parallel, _ = one
    np.random.seed(0)
    extra = {"numpy": np.random.get_state(), "python": random.getstate(), "torch": torch.get_rng_state(),
             "best": np.float64(0.5), "seen": {1, 2}, "path": "a/b", "flags": (True, None, 2.5, b"raw")}  # fmt: skip
    sw.save_checkpoint(tmp_path / "extra", parallel, extra=extra)
    found = sw.load_checkpoint(tmp_path / "extra", parallel)
    assert str(found) == str(extra)
    with pytest.raises(ParallelError, match=r"'extra' could be saved, but not be loaded again: it is made with .*Step"):
        sw.save_checkpoint(tmp_path / "no", parallel, extra={"step": Step(3)})
    assert not (tmp_path / "no").exists()
    with torch.serialization.safe_globals([Step]):
        sw.save_checkpoint(tmp_path / "step", parallel, extra={"step": Step(3)})
        assert sw.load_checkpoint(tmp_path / "step", parallel)["step"].number == 3


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writes beyond it fail, as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def cannot_write(folder: Path) -> None:
    """Rank 1 cannot write all of its part: told on both, and what was there stays."""
    parallel, optimizer = made(0, 2)
    sw.save_checkpoint(folder / "run", parallel, optimizer, extra={"step": 1})
    for asynchronous in (False, True):
        with (
            files_of_at_most(2000) if dist.get_rank() == 1 else nullcontext(),
            pytest.raises(
                ParallelError,
                match=r"run could not be saved: writing .*__1_0.distcp failed: File too large \(this rank has [\d,]+ "
                r"bytes to write; its disk has [\d,]+ of [\d,]+ bytes free\).*The checkpoint that was there before is",
            ),
        ):
            sw.save_checkpoint(folder / "run", parallel, optimizer, asynchronous=asynchronous).wait()
        dist.barrier()
        assert os.listdir(folder) == ["run"], "the half written one is gone"
    assert sw.load_checkpoint(folder / "run", parallel, optimizer) == {"step": 1}
    sw.save_checkpoint(folder / "run", parallel, optimizer, extra={"step": 2})
    assert sw.load_checkpoint(folder / "run", parallel, optimizer) == {"step": 2}
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "file").write_text("keep")
    dist.barrier()
    for act in (sw.load_checkpoint, sw.save_checkpoint):
        with pytest.raises(ParallelError, match="file is a file, and a checkpoint is a folder") as told:
            act(folder / "file", parallel)
        assert not isinstance(told.value, CheckpointNotFound)
    with pytest.raises(ParallelError, match=r"the folder .*file.* cannot be written: Not a directory"):
        sw.save_checkpoint(folder / "file" / "checkpoint", parallel)
    assert (folder / "file").read_text() == "keep"


def test_a_write_that_fails_loses_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(cannot_write, tmp_path, nprocs=2, timeout=120.0)


def test_folder_without_permission(
    one: tuple[Path, sw.ParallelModule, torch.optim.Optimizer], tmp_path: Path
) -> None:
    _, parallel, _ = one
    tmp_path.chmod(0o555)
    user = os.geteuid()
    if user == 0:  # root may write everywhere
        os.seteuid(65534)
    try:
        with pytest.raises(ParallelError, match=r"the folder .* cannot be written: Permission denied"):
            sw.save_checkpoint(tmp_path / "checkpoint", parallel)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o755)
    assert not os.listdir(tmp_path)


def test_what_has_no_value_is_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    parallel = sw.compile_parallel(model, sw.Cluster.local(1), torch.randn(4, 8))
    with pytest.raises(ParallelError, match=r"0\.bias; 0\.weight; 1\.bias; 1\.weight have no value.*initialise"):
        sw.save_checkpoint(tmp_path / "run", parallel)
    with pytest.raises(ParallelError, match=r"0\.bias; 0\.weight; 1\.bias; 1\.weight have no value"):
        sw.save_weights(parallel, tmp_path / "weights")
    assert not os.listdir(tmp_path)
    sw.initialise(parallel, model, seed=0)
    sw.save_checkpoint(tmp_path / "run", parallel)


def test_full_disk(one: tuple[Path, sw.ParallelModule, torch.optim.Optimizer], tmp_path: Path) -> None:
    _, parallel, optimizer = one
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip("a small file system cannot be mounted here: that takes root")
    try:
        sw.save_checkpoint(tmp_path / "run", parallel, optimizer, extra={"step": 1})
        big, steps = made(0, width=1024)
        with pytest.raises(ParallelError, match=r"No space left on device .*of 98,304 bytes free"):
            sw.save_checkpoint(tmp_path / "run", big, steps)
        assert sw.load_checkpoint(tmp_path / "run", parallel, optimizer) == {"step": 1}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_checksums_are_of_another_version(
    one: tuple[Path, sw.ParallelModule, torch.optim.Optimizer], tmp_path: Path
) -> None:
    whole, parallel, _ = one
    folder = tmp_path / "checkpoint"
    shutil.copytree(whole, folder)
    content = json.loads((folder / CHECKSUMS).read_text())
    (folder / CHECKSUMS).write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(ParallelError, match=r"checksums.json is of version 2, this shardweave reads version 1"):
        sw.load_checkpoint(folder, parallel)
