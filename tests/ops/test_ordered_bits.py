"""Maxima and minima over ranks: a NaN that one rank holds is not lost, as it is in gloo's own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.ops.communication_encodings import from_ordered_bits, ordered_bits
from shardweave.runtime.launch import WorkerPool

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
c10d = torch.ops._c10d_functional


@given(st.sampled_from(DTYPES), st.lists(st.floats(width=16), min_size=1, max_size=20), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_integers_are_in_the_order_of_the_numbers(dtype: torch.dtype, numbers: list[float], largest: bool) -> None:
    x = torch.tensor(numbers, dtype=dtype)
    bits = ordered_bits(x, largest)
    assert torch.equal(from_ordered_bits(bits, dtype).nan_to_num(7.0), x.nan_to_num(7.0))
    found = from_ordered_bits(bits.max() if largest else bits.min(), dtype)
    torch.testing.assert_close(found, x.max() if largest else x.min(), rtol=0, atol=0, equal_nan=True)


class Extremes(nn.Module):
    """Every way to the largest and the smallest of what is computed, over all dimensions and over each."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 8, dtype=dtype)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        found = {"max": y.max(), "min": y.min(), "norm": torch.linalg.vector_norm(y, math.inf)}
        found["least norm"] = torch.linalg.vector_norm(y, -math.inf)
        for dim in (0, 1):
            found |= {f"amax {dim}": y.amax(dim), f"amin {dim}": y.amin(dim), f"softmax {dim}": y.softmax(dim)}
        return found


def extremes_on_ranks(dtype: torch.dtype, force: str, bad: float) -> int:
    """Outputs are those of one device, wherever in the batch the number is; how many largest or smallest are moved."""
    plain, world = Extremes(dtype), dist.get_world_size()
    x = torch.randn(8, 4, dtype=dtype)
    options = sw.Options(force={"*": force}, outputs="whole")
    parallel = sw.compile_parallel(Extremes(dtype), sw.Cluster.local(world), x, options=options, progress=False)
    rtol = 0.02 if dtype.itemsize == 2 else 1e-5
    for row in (None, 0, 3, 7):
        given = x.clone()
        if row is not None:
            given[row, 1] = bad
        for name, found in parallel(given).items():
            expected = plain(given)[name]
            torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol, equal_nan=True, msg=f"{name}, row {row}")
    nodes = parallel.graphs["forward"].graph.nodes
    return sum(node.target is c10d.all_reduce.default and node.args[1] in ("max", "min") for node in nodes)


@pytest.mark.parametrize(
    ("dtype", "force", "bad"),
    [
        (torch.float64, "dp", math.nan),
        (torch.bfloat16, "dp", math.nan),
        (torch.float32, "dp", math.inf),
        (torch.float32, "column", math.nan),
    ],
)
def test_no_rank_loses_what_is_not_a_number(dtype: torch.dtype, force: str, bad: float, pool: WorkerPool) -> None:
    """Over all elements, over one dimension, and in a softmax over it: one collective each."""
    assert pool.run(extremes_on_ranks, dtype, force, bad, nprocs=2) == [7, 7]


def norms_on_ranks(norm_type: float, bad: float) -> None:
    """The last row of a gradient is bad, which one rank holds; a bias of three has no element on the last of ranks."""
    plain, world = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 8)), dist.get_world_size()
    options = sw.Options(force={"*": "zero3"})
    parallel = sw.compile_parallel(plain, sw.Cluster.local(world), torch.ones(4, 4), options=options, progress=False)
    for model in (plain, parallel):
        model(torch.ones(4, 4)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(2.0)
            list(model.parameters())[2].grad[-1] = bad
    expected, *found = [
        torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()], norm_type),
        torch.nn.utils.get_total_norm([parameter.grad for parameter in parallel.parameters()], norm_type),
        parallel.clip_grad_norm_(1.0, norm_type),
    ]
    for norm in found:
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.testing.assert_close(norm, expected, equal_nan=True)


@pytest.mark.parametrize("norm_type", [math.inf, -math.inf])
@pytest.mark.parametrize("bad", [math.nan, 0.5, 3.0])
def test_norms_over_ranks(norm_type: float, bad: float, pool: WorkerPool) -> None:
    pool.run(norms_on_ranks, norm_type, bad, nprocs=2)
