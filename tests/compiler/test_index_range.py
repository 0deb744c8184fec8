"""An index out of range is an error on every rank, however the table lies, as it is on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardweave as sw
from shardweave.runtime.launch import WorkerPool

ROWS = 16


class Lookups(nn.Module):
    """An embedding, positions, a gather and classes, each with indices of the caller's; codes are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(ROWS, 8), nn.Parameter(torch.randn(ROWS, 8))
        self.codes, self.head = nn.Embedding(ROWS, 8), nn.Linear(8, ROWS)

    def forward(self, tokens: Tensor, places: Tensor, picked: Tensor, targets: Tensor, code: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places[places] + self.codes(code.round().long())
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + logits.gather(-1, picked[..., None]).mean()


def batch(**changed: int) -> dict[str, Tensor]:
    """A batch; of the inputs that are named, one element is another, in the rows of the first rank."""
    generator = torch.Generator().manual_seed(0)
    names = ("tokens", "places", "picked", "targets", "code")
    found = {name: torch.randint(0, ROWS, (4, 3), generator=generator) for name in names}
    found["places"] -= ROWS // 2  # these count from the end, too
    found["targets"][0, 0] = -100
    for name, value in changed.items():
        found[name][1, 2] = value
    return {**found, "code": found["code"].float()}


WAYS: dict[str, Any] = {
    "data": {"*": "zdp"},
    "rows": {"*": "dp", "embed": "row", "codes": "row", "places": "row", "head": "column"},
}
WRONG = [{"tokens": ROWS}, {"tokens": -1}, {"places": ROWS}, {"places": -ROWS - 1}, {"picked": ROWS + 5},
         {"picked": -2}, {"targets": ROWS}, {"targets": -1}]  # fmt: skip


def refuses_each(way: str) -> list[str]:
    torch.manual_seed(0)
    cluster = sw.Cluster.local(dist.get_world_size())
    model = Lookups()
    parallel = sw.compile_parallel(model, cluster, batch(), options=sw.Options(force=WAYS[way], sub_batches=1))
    wrong = [*WRONG, {"code": ROWS}] if way == "rows" else WRONG
    told = []
    for changed in wrong:
        with pytest.raises(sw.IndexRangeError) as caught:
            parallel(**batch(**changed))
        assert isinstance(caught.value, IndexError) and isinstance(caught.value, sw.ParallelError)
        told.append(str(caught.value))
        torch.testing.assert_close(parallel(**batch()), model(**batch()))  # the ranks are still together
    return told


@pytest.mark.parametrize("way", list(WAYS))
def test_an_index_out_of_range_is_refused_on_every_rank(way: str, pool: WorkerPool) -> None:
    first, second = pool.run(refuses_each, way, nprocs=2)
    assert first == second
    for changed, text in zip(WRONG, first, strict=False):
        (index,) = changed.values()
        low = -ROWS if "places" in changed else 0
        assert f"the index {index} is out of range" in text
        assert f"at least {low} and less than {ROWS}" in text
        assert "test_index_range.py" in text or "cross_entropy" in text
    assert way != "rows" or "aten.embedding.default of codes" in first[-1]
