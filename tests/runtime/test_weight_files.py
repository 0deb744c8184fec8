"""Files of weights: an error names a file that is damaged or outside of its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardweave as sw
from shardweave.ir.errors import ParallelError
from shardweave.runtime.checkpoint.weights import INDEX, open_checkpoint

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
WEIGHT, BIAS = torch.linspace(-1, 1, 32).view(4, 8), torch.ones(4)


def written(folder: Path, weight_map: Any) -> Path:
    """A folder with a file for each tensor, and an index."""
    folder.mkdir(parents=True)
    save_file({"weight": WEIGHT}, folder / ONE)
    save_file({"bias": BIAS}, folder / TWO)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def names_of(path: Path) -> set[str]:
    with ExitStack() as files:
        return set(open_checkpoint(path, files))


@pytest.mark.parametrize("file", [f"../{TWO}", f"{{folder}}/../{TWO}", "link", "sub/../../secret", "", "a\0b"])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "model"
    file = file.format(folder=folder)
    written(folder, {"weight": ONE, "bias": file})
    for outside in (TWO, "secret"):
        save_file({"bias": BIAS}, tmp_path / outside)
    (folder / "link").symlink_to(f"../{TWO}")
    (folder / "sub").mkdir()
    with pytest.raises(ParallelError, match="not followed") as told:
        names_of(folder)
    assert repr(file) in str(told.value)
    parallel = sw.compile_parallel(nn.Linear(8, 4), sw.Cluster.local(1), torch.ones(4, 8))
    with pytest.raises(ParallelError, match="model cannot be loaded: it cannot be read .*not followed"):
        sw.load_weights(parallel, folder)


def test_links_of_the_download_cache_are_followed(tmp_path: Path) -> None:
    """As huggingface_hub lays them out; and links that stay in the folder."""
    folder = written(tmp_path / "models--x" / "snapshots" / "0123", {"weight": ONE, "bias": "again"})
    (folder / "again").symlink_to(TWO)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    (folder / ONE).rename(blobs / "abc")
    (folder / ONE).symlink_to("../../blobs/abc")
    (folder / "again").rename(folder / "again.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"weight": ONE, "bias": "again.safetensors"}}))
    assert names_of(folder) == {"weight", "bias"}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"weight": ONE, "bias": ONE}, "do not agree about bias"),
        ({"weight": TWO, "bias": ONE}, "do not agree about bias, weight"),
        ({"weight": ONE}, None),
        ({"weight": ONE, "bias": TWO, "more": TWO}, "do not agree about more"),
        ({"weight": ONE, "bias": "none.safetensors"}, "none.safetensors is not there"),
        ({"weight": 3}, 'no "weight_map"'),
        (["weight"], 'no "weight_map"'),
    ],
)
def test_an_index_says_what_its_files_hold(tmp_path: Path, weight_map: Any, message: str | None) -> None:
    folder = written(tmp_path / "model", weight_map)
    if message is None:
        assert names_of(folder) == {"weight"}
        return
    with pytest.raises(ParallelError, match=message):
        names_of(folder)


def test_an_index_that_is_no_json(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", {})
    (folder / INDEX).write_text("{")
    with pytest.raises(ParallelError, match=f"{INDEX} is no JSON"):
        names_of(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-3], r"has [\d,]+ bytes, and [\d,]+ by its header: it is cut off"),
        (lambda raw: raw + b"more", "it is cut off or damaged"),
        (lambda raw: b"", "its header would have 0 bytes, the file has 0"),
        (lambda raw: (2**62).to_bytes(8, "little") + raw[8:], "its header would have 4,611,686,018,427,387,904 bytes"),
        (lambda raw: raw[:8] + b"!" + raw[9:], "its header is unreadable"),
        (lambda raw: raw.replace(b"[4,8]", b"[4,9]"), "invalid shape"),
        (lambda raw: raw.replace(b"F32", b"F99"), "unknown variant"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": WEIGHT}, path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ParallelError, match=message) as told:
        names_of(path)
    assert "model.safetensors" in str(told.value)
