"""Compute: what an op costs by its shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardweave.cost_model import Cluster, matmul_seconds, node_seconds, node_work
from tests.cost_model.handmade import Builder, aten

CLUSTER = Cluster.preset("dgx-a100")
sizes = st.integers(1, 2**14)


def works(function: object, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, object]:
    """What each kernel of `function` does, by the name of its op."""
    inputs = [torch.empty(shape, device="meta", dtype=dtype) for shape in shapes]
    graph = make_fx(function, tracing_mode="real")(*inputs).graph  # type: ignore[arg-type]
    return {node.target._schema.name: work for node in graph.nodes if (work := node_work(node)) is not None}


@settings(deadline=None)
@given(sizes, sizes, sizes)
def test_a_matmul_does_2mkn(m: int, k: int, n: int) -> None:
    builder = Builder([])
    left, right = builder.tensor("left", m, k), builder.tensor("right", k, n)
    work = node_work(builder.call(aten.mm.default, left, right))
    assert work is not None
    assert (work.flops, work.num_bytes, work.dtype) == (2 * m * k * n, 4 * (m * k + k * n + m * n), "float32")


@settings(deadline=None)
@given(sizes, sizes, sizes)
def test_a_larger_matmul_never_takes_less(m: int, k: int, n: int) -> None:
    def seconds(m: int) -> float:
        return matmul_seconds(2 * m * k * n, 2 * (m * k + k * n + m * n), "bfloat16", CLUSTER)

    assert CLUSTER.device.launch_latency < seconds(m) <= seconds(2 * m)


def test_attention_counts_in_its_cpu_form_too() -> None:
    shape = (2, 4, 128, 64)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    graph = fx.Graph()
    holders = [graph.placeholder(name) for name in "qkv"]
    for holder in holders:
        holder.meta["val"] = torch.empty(shape, device="meta")
    out = graph.call_function(attention, tuple(holders))
    out.meta["val"] = (torch.empty(shape, device="meta"), torch.empty(shape[:3], device="meta"))
    work = node_work(out)
    assert work is not None
    assert work.flops == 2 * 2 * 2 * 4 * 128 * 128 * 64
    back = graph.call_function(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        (holders[0], *holders, holders[0], holders[1], 0.0, True),
    )
    back.meta["val"] = tuple(torch.empty(shape, device="meta") for _ in range(3))
    again = node_work(back)
    assert again is not None
    assert again.flops == 5 * 2 * 2 * 4 * 128 * 128 * 64  # five products, one of them the recomputed scores


def test_views_run_no_kernel_but_copies_do() -> None:
    found = works(lambda x: x.view(4, 2, 8).transpose(1, 2).expand(4, 8, 2).reshape(64) * 2, (8, 8))
    assert set(found) == {"aten::clone", "aten::mul"} or set(found) == {"aten::_reshape_copy", "aten::mul"}


def test_a_lookup_reads_only_its_rows() -> None:
    builder = Builder([])
    table = builder.tensor("table", 50_000, 512)
    rows = builder.tensor("rows", 8)
    rows.meta["val"] = torch.zeros(8, dtype=torch.int64, device="meta")
    work = node_work(builder.call(aten.embedding.default, table, rows))
    assert work is not None
    assert work.num_bytes == 2 * 8 * 512 * 4 + 8 * 8


def test_the_roofline_has_its_two_sides() -> None:
    device = CLUSTER.device
    arithmetic = matmul_seconds(1e15, 1.0, "bfloat16", CLUSTER) - device.launch_latency
    assert arithmetic == pytest.approx(1e15 / (device.flops["bfloat16"] * device.matmul_efficiency))
    traffic = matmul_seconds(1.0, 1e12, "bfloat16", CLUSTER) - device.launch_latency
    assert traffic == pytest.approx(1e12 / (device.memory_bandwidth * device.memory_efficiency))


def test_what_is_no_kernel_takes_no_time() -> None:
    axes = CLUSTER.mesh().axes
    builder = Builder(axes)
    x = builder.tensor("x", 8, 8)
    start = builder.start("all_reduce", x, axes, "x", "activation")
    for node in (*builder.graph.nodes, builder.wait(start)):
        assert node_seconds(node, CLUSTER) == 0.0
