"""Weights from files and into files: each rank reads its part, and transformers loads what is written."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import shardweave as sw
from shardweave.runtime.checkpoint import weights as stored
from shardweave.runtime.launch import WorkerPool
from tests.models import llama
from tests.runtime.test_initialise import CASES, everything, on_meta

ROOT = Path(__file__).parents[2]


def compiled(name: str, force: str, model: nn.Module | None = None) -> Any:
    case = CASES[name]
    cluster = sw.Cluster.local(dist.get_world_size() if dist.is_initialized() else 1)
    return sw.compile_parallel(model or case.model(), cluster, case.batch(0), options=sw.Options(force={"*": force}))


def assert_state(parallel: Any, expected: dict[str, torch.Tensor]) -> None:
    found = parallel.full_state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Counter:
    """Stands for a file's slice and counts the bytes that are read of it."""

    total = 0

    def __init__(self, piece: Any) -> None:
        self.piece, self.get_shape = piece, piece.get_shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        value: torch.Tensor = self.piece[index]
        Counter.total += value.numel() * value.element_size()
        return value


class CountedFile:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.file = safe_open(*args, **kwargs)

    def __enter__(self) -> CountedFile:
        self.file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.file.__exit__(*exception)

    def keys(self) -> list[str]:
        return self.file.keys()

    def get_slice(self, name: str) -> Counter:
        return Counter(self.file.get_slice(name))


safe_open = stored.safe_open


def loads(name: str, force: str, paths: list[str]) -> int:
    """Into a model from the meta device; the bytes that this rank reads of the first file."""
    stored.safe_open = CountedFile  # this process is forked for this run
    model = on_meta(CASES[name].build)
    parallel = compiled(name, force, model)
    expected = CASES[name].model()
    read = []
    for path in paths:
        Counter.total = 0
        sw.load_weights(parallel, path, model)
        read.append(Counter.total)
        assert_state(parallel, dict(expected.state_dict()))
        assert not parallel.unset
        for parameter in parallel.parameters():
            parameter.detach().zero_()
    sw.load_weights(parallel, paths[0])
    batch = CASES[name].batch(0)
    losses = [getattr(loss, "loss", loss) for loss in (parallel(**batch), expected(**batch))]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    return read[0]


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.parametrize(("force", "world"), [("column", 4), ("zdp", 8)])
def test_each_rank_reads_its_part(pool: WorkerPool, tmp_path: Path, force: str, world: int) -> None:
    model = CASES["small-gpt"].model()
    state = model.state_dict()
    save_file(state, tmp_path / "all.safetensors")
    torch.save(state, tmp_path / "all.pt")
    read = pool.run(
        loads, "small-gpt", force, [str(tmp_path / "all.safetensors"), str(tmp_path / "all.pt")], nprocs=world
    )
    whole = size_of(model)
    assert whole <= sum(read) < 1.2 * whole if force == "zdp" else sum(read) < 0.7 * world * whole


def test_a_folder_of_files_and_tied_weights(pool: WorkerPool, tmp_path: Path) -> None:
    """As transformers writes them: the tied head has no entry, the rotary frequencies neither."""
    model: Any = CASES["small-tied"].model()
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    model.save_pretrained(tmp_path / "one")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert "lm_head.weight" not in load_file(tmp_path / "one" / "model.safetensors")
    pool.run(loads, "small-tied", "zdp", [str(tmp_path / "many"), str(tmp_path / "one")], nprocs=2)


def saves(name: str, force: str, folder: str, limit: float, with_config: bool) -> None:
    model: Any = CASES[name].model()
    sw.save_weights(compiled(name, force, model), folder, limit, model.config if with_config else None)


@pytest.mark.parametrize(
    ("name", "force", "limit", "world"), [("small-llama", "column", 5e9, 4), ("small-tied", "zdp", 2e4, 2)]
)
def test_transformers_loads_what_is_saved(
    pool: WorkerPool, tmp_path: Path, name: str, force: str, limit: float, world: int
) -> None:
    folder = tmp_path / "new" / "saved"
    pool.run(saves, name, force, str(folder), limit, True, nprocs=world)
    model = CASES[name].model().eval()
    tokens = CASES[name].batch(0)["input_ids"]
    for kind in (LlamaForCausalLM, AutoModelForCausalLM):
        again = kind.from_pretrained(folder).eval()
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    files = sorted(folder.glob("*.safetensors"))
    if limit == 5e9:
        assert [path.name for path in files] == ["model.safetensors"]
    else:
        assert files[0].name == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 1
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == size_of(model) and "lm_head.weight" not in index["weight_map"]
        found = {name: path.name for path in files for name in load_file(path)}
        assert found == index["weight_map"]
        largest = max(p.numel() * p.element_size() for p in model.parameters())
        assert all(sum(v.numel() * 4 for v in load_file(path).values()) <= max(limit, largest) for path in files)
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


class Refuses:
    def save_pretrained(self, folder: Path) -> None:
        raise OSError("the disk is full")


def mistakes(folder: str) -> None:
    parallel = compiled("small-gpt", "zdp")
    before = parallel.full_state_dict()
    state = {name: value.clone() for name, value in CASES["small-gpt"].model(seed=1).state_dict().items()}
    rank, here = dist.get_rank(), Path(folder)

    def refused(path: Any, words: str, load: Any = None) -> None:
        if load is not None and rank == 0:
            torch.save(load, path)
        dist.barrier()
        with pytest.raises(sw.ParallelError, match=words):
            sw.load_weights(parallel, path)
        assert_state(parallel, before)

    less = {name: value for name, value in state.items() if name not in ("norm.weight", "head.weight")}
    other = {**state, "norm.weight": torch.zeros(3), "norm.bias": torch.zeros(32, dtype=torch.int64)}
    refused(here / "less.pt", "it lacks norm.weight, head.weight", less)
    refused(
        here / "more.pt",
        "the model has no alien, stranger",
        {**state, "stranger": state["norm.bias"], "alien": 1 * state["norm.bias"]},
    )
    refused(
        here / "other.pt", r"norm\.weight has the shape \(3,\) there, and \(32,\).*norm\.bias is of torch\.int64", other
    )
    refused(here / "nested.pt", "no state dict", {"model": state})
    (here / f"only{rank}.pt").write_bytes(pickle.dumps(1))
    refused(here / "only0.pt", "cannot be read")
    refused(here / "absent.safetensors", "absent.safetensors cannot be loaded: it cannot be read")
    refused(here, "neither model.safetensors nor")
    if rank == 0:
        torch.save(state, here / "good.pt")
    dist.barrier()
    refused(here / ("good.pt" if rank == 0 else "bad.pt"), "cannot be read")
    if rank == 0:
        torch.save({name: value.double() for name, value in state.items()}, here / "double.pt")
    dist.barrier()
    sw.load_weights(parallel, here / "double.pt")
    assert_state(parallel, state)
    with pytest.raises(sw.ParallelError, match="there already"):
        sw.save_weights(parallel, here)
    with pytest.raises(sw.ParallelError, match="the disk is full"):
        sw.save_weights(parallel, here / "full", config=Refuses())
    dist.barrier()
    assert not list(here.glob("*full*")) and not list(here.glob(".*"))


def test_what_does_not_fit_is_refused_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(mistakes, str(tmp_path), nprocs=2)


def test_tied_tensors_that_differ_and_buffers_without_values(tmp_path: Path) -> None:
    parallel = compiled("small-tied", "zdp")
    state = {name: value.clone() for name, value in parallel.full_state_dict().items()}
    save_file(state, tmp_path / "both.safetensors")
    sw.load_weights(parallel, tmp_path / "both.safetensors")
    state["lm_head.weight"] += 1
    save_file(state, tmp_path / "differ.safetensors")
    with pytest.raises(sw.ParallelError, match=r"embed_tokens\.weight and lm_head\.weight are one tensor"):
        sw.load_weights(parallel, tmp_path / "differ.safetensors")
    model = on_meta(partial(llama.build, layers=1, tied=True))
    parallel = compiled("small-tied", "zdp", model)
    with pytest.raises(sw.ParallelError, match=r"no file holds model\.rotary_emb\.inv_freq.*third argument"):
        sw.load_weights(parallel, tmp_path / "both.safetensors")
    sw.load_weights(parallel, tmp_path / "both.safetensors", model)
    expected = everything(CASES["small-tied"].model())
    assert torch.equal(parallel.get_buffer("model.rotary_emb.inv_freq"), expected["model.rotary_emb.inv_freq"])
