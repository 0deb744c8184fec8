"""Compute: what an op costs by its shapes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardweave.cost_model import (
    Cluster,
    Device,
    Measured,
    OpTable,
    OpTime,
    Product,
    Work,
    node_seconds,
    node_work,
    work_seconds,
)
from shardweave.cost_model.node_cost import NodeCosts, bytes_seconds, formula_seconds
from shardweave.ir.errors import ClusterError
from tests.cost_model.handmade import Builder, aten
from tests.passes.harness import examples

CLUSTER = Cluster.preset("dgx-a100")
PLAIN = Device("plain", {"float32": 1e13, "bfloat16": 1e14}, memory=2**36, memory_bandwidth=1e12)
sizes = st.integers(1, 2**14)
shapes = st.tuples(sizes, sizes, sizes)
figures = st.floats(0, 1e4)


@st.composite
def curved(draw: st.DrawFn) -> Cluster:
    """Clusters whose devices have any efficiency curves."""
    device = replace(
        PLAIN,
        launch_latency=draw(st.floats(0, 1e-4)),
        matmul_efficiency=draw(st.floats(0.1, 1)),
        memory_efficiency=draw(st.floats(0.1, 1)),
        matmul_half={"float32": draw(figures), "bfloat16": draw(figures)},
        memory_half=draw(st.floats(0, 1e8)),
    )
    return replace(CLUSTER, device=device)


def product(m: int, n: int, k: int, dtype: str = "bfloat16") -> Work:
    size = 2 if dtype == "bfloat16" else 4
    return Work(2 * m * n * k, size * (m * k + k * n + m * n), dtype, Product(m, n, k))


def works(function: object, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Work]:
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


@examples(200)
@given(curved(), shapes, st.integers(0, 2), sizes, st.sampled_from(["float32", "bfloat16"]))
def test_a_product_takes_longer_with_each_dimension(
    cluster: Cluster, shape: tuple[int, int, int], dim: int, more: int, dtype: str
) -> None:
    larger = list(shape)
    larger[dim] += more
    small = work_seconds(product(*shape, dtype), cluster)
    assert cluster.device.launch_latency < small <= work_seconds(product(*larger, dtype), cluster)


@examples(200)
@given(curved(), shapes)
def test_nothing_is_faster_than_the_ideal_roofline(cluster: Cluster, shape: tuple[int, int, int]) -> None:
    work, device = product(*shape), cluster.device
    ideal = max(work.flops / device.flops["bfloat16"], work.num_bytes / device.memory_bandwidth)
    assert work_seconds(work, cluster) >= ideal * (1 - 1e-12)


@examples(200)
@given(curved(), shapes, st.integers(0, 2), st.integers(1, 64))
def test_a_part_of_a_product_takes_between_its_share_and_the_whole(
    cluster: Cluster, shape: tuple[int, int, int], dim: int, parts: int
) -> None:
    whole = list(shape)
    whole[dim] *= parts
    seconds, part = work_seconds(product(*whole), cluster), work_seconds(product(*shape), cluster)
    assert seconds / parts * (1 - 1e-12) <= part <= seconds * (1 + 1e-12)


@examples(100)
@given(curved(), shapes)
def test_the_same_product_takes_the_same_whichever_way_it_is_written(
    cluster: Cluster, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    assert work_seconds(product(m, n, k), cluster) == pytest.approx(work_seconds(product(n, m, k), cluster), rel=1e-12)
    assert work_seconds(product(m, n, k), cluster) == work_seconds(product(m, n, k), cluster)


@examples(100)
@given(curved(), sizes, sizes)
def test_more_bytes_take_longer_and_never_less_than_their_share(cluster: Cluster, size: int, more: int) -> None:
    assert 0 == bytes_seconds(0, cluster) < bytes_seconds(size, cluster) < bytes_seconds(size + more, cluster)
    assert bytes_seconds(4 * size, cluster) <= 4 * bytes_seconds(size, cluster) * (1 + 1e-12)


@examples(50)
@given(shapes)
def test_without_figures_every_shape_is_as_efficient_as_a_large_one(shape: tuple[int, int, int]) -> None:
    cluster, work = replace(CLUSTER, device=PLAIN), product(*shape)
    arithmetic = work.flops / (1e14 * PLAIN.matmul_efficiency)
    traffic = work.num_bytes / (1e12 * PLAIN.memory_efficiency)
    assert work_seconds(work, cluster) == pytest.approx(max(arithmetic, traffic), rel=1e-12)


def test_half_of_the_efficiency_is_reached_at_the_half_dimension() -> None:
    cluster = replace(CLUSTER, device=replace(PLAIN, matmul_half={"float32": 128.0}, memory_bandwidth=1e30))
    large = 2**40
    for dims in [(128, large, large), (large, 128, large), (large, large, 128)]:
        flops = 2 * dims[0] * dims[1] * dims[2]
        seconds = formula_seconds(Work(flops, 0, "float32", Product(*dims)), cluster)
        assert seconds == pytest.approx(2 * flops / (1e13 * PLAIN.matmul_efficiency))
        assert formula_seconds(Work(flops, 0, "float64", Product(*dims)), cluster) == seconds  # float32 stands in


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x, y: x @ y, [(8, 4), (4, 2)], Product(8, 2, 4)),
        (lambda x, y: x @ y, [(3, 8, 4), (3, 4, 2)], Product(8, 2, 4)),
        (lambda b, x, y: torch.addmm(b, x, y), [(2,), (8, 4), (4, 2)], Product(8, 2, 4)),
        (lambda b, x, y: torch.baddbmm(b, x, y), [(3, 8, 2), (3, 8, 4), (3, 4, 2)], Product(8, 2, 4)),
        (lambda x, y: x @ y, [(8, 4), (4,)], None),
        (lambda x, w: torch.conv2d(x, w), [(2, 3, 8, 8), (16, 3, 3, 3)], Product(2 * 6 * 6, 16, 27)),
        (lambda x, w: torch.conv2d(x, w, groups=2), [(2, 4, 8, 8), (16, 2, 3, 3)], Product(2 * 6 * 6, 8, 18)),
        (lambda x, w: torch.conv2d(x, w, groups=4), [(2, 4, 8, 8), (4, 1, 3, 3)], None),
        (lambda x, w: torch.conv_transpose2d(x, w), [(2, 4, 8, 8), (4, 16, 3, 3)], Product(2 * 8 * 8, 4, 144)),
    ],
)
def test_the_product_of_an_op(function: object, shapes: list[tuple[int, ...]], expected: Product | None) -> None:
    (work,) = (work for work in works(function, *shapes).values() if work.flops)
    assert work.product == expected
    if expected is not None:
        assert work.flops % (2 * expected.m * expected.n * expected.k) == 0


def test_the_products_of_a_backward_are_those_of_its_forward() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(torch.conv2d(x, w, stride=2).sum(), (x, w))

    inputs = [torch.empty(s, requires_grad=True, device="meta") for s in ((2, 3, 9, 9), (16, 3, 3, 3))]
    found = [work for node in make_fx(step)(*inputs).graph.nodes if (work := node_work(node)) and work.flops]
    assert [work.product for work in found] == [Product(2 * 4 * 4, 16, 27)] * 2


def measured(*times: tuple[float, Work]) -> Cluster:
    return replace(CLUSTER, measured=Measured(ops=OpTable.of([OpTime(seconds, work) for seconds, work in times])))


def test_a_measured_op_takes_its_time_and_others_the_formula() -> None:
    builder = Builder([])
    left, right, other = (builder.tensor(name, *shape) for name, shape in (("l", (8, 4)), ("r", (4, 8)), ("o", (8, 8))))
    known, like = builder.call(aten.mm.default, left, right), builder.call(aten.mm.default, right, left)
    added = builder.call(aten.add.Tensor, other, other)
    work, similar = node_work(known), node_work(like)
    assert work is not None and similar is not None
    cluster = measured((0.5, work))
    assert node_seconds(known, cluster) == 0.5
    assert node_seconds(added, cluster) == node_seconds(added, CLUSTER)
    ratio = formula_seconds(similar, CLUSTER) / formula_seconds(work, CLUSTER)
    assert node_seconds(like, cluster) == pytest.approx(0.5 * ratio)
    assert work_seconds(replace(work, signature=""), cluster) == node_seconds(known, CLUSTER)


def test_the_nearest_of_several_shapes_counts() -> None:
    def signed(m: int, seconds: float) -> tuple[float, Work]:
        return seconds, replace(product(m, m, m), signature=f"mm({m})")

    cluster = measured(signed(64, 1.0), signed(4096, 100.0))
    formula = {m: formula_seconds(product(m, m, m), CLUSTER) for m in (64, 100, 3000, 4096)}
    for m, near, seconds in ((100, 64, 1.0), (3000, 4096, 100.0)):
        assert work_seconds(signed(m, 1.0)[1], cluster) == pytest.approx(seconds * formula[m] / formula[near])
    halves = replace(signed(64, 1.0)[1], dtype="float32", signature="mm(64, float32)")
    assert work_seconds(halves, cluster) == formula_seconds(halves, CLUSTER)  # another dtype tells nothing


def test_measured_ops_are_part_of_the_fingerprint() -> None:
    work = Work(1, 1, signature="op()")
    assert len({CLUSTER.fingerprint, measured((0.5, work)).fingerprint, measured((0.6, work)).fingerprint}) == 3


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_causal_attention_leaves_out_what_is_masked(dropout: float) -> None:
    """Forward and backward: of 4 x 4 blocks 10 are computed. FLOPs are counted in full, as by torch."""

    def attention(causal: bool) -> list[Work]:
        def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
            out, sums, *rest = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal)
            places = [rest[index] for index in range(6)]
            given = (*places[:4], dropout, causal, *places[4:6])
            grads = aten._scaled_dot_product_flash_attention_backward(out, q, k, v, out, sums, *given)
            return out, grads

        query = torch.empty(1, 4, 512, 64, device="meta", dtype=torch.bfloat16)
        found = [work for node in make_fx(step)(query, query, query).graph.nodes if (work := node_work(node))]
        return [work for work in found if work.flops]

    for full, half in zip(attention(False), attention(True), strict=True):
        assert half.flops == full.flops > 0
        assert (full.computed, half.computed) == (1.0, 10 / 16)
    busy = replace(CLUSTER, device=replace(PLAIN, memory_bandwidth=1e18))  # products are all that it takes
    assert formula_seconds(half, busy) == pytest.approx(formula_seconds(full, busy) * 10 / 16)
    table = OpTable({half.signature: OpTime(1e-3, half)})
    assert OpTable.from_dict(table.to_dict()).times[half.signature].work.computed == 10 / 16


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
    assert (work.computed, again.computed) == (1.0, 1.0)  # one block: its upper half is computed, too


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
    arithmetic = formula_seconds(Work(10**15, 1, "bfloat16"), CLUSTER) - device.launch_latency
    assert arithmetic == pytest.approx(1e15 / (device.flops["bfloat16"] * device.matmul_efficiency))
    traffic = formula_seconds(Work(1, 10**12, "bfloat16"), CLUSTER) - device.launch_latency
    assert traffic == pytest.approx(1e12 / (device.memory_bandwidth * device.memory_efficiency))


def test_what_is_no_kernel_takes_no_time() -> None:
    axes = CLUSTER.mesh().axes
    builder = Builder(axes)
    x = builder.tensor("x", 8, 8)
    start = builder.start("all_reduce", x, axes, "x", "activation")
    for node in (*builder.graph.nodes, builder.wait(start)):
        assert node_seconds(node, CLUSTER) == 0.0


def test_memory_times_stand_for_the_bandwidth_between_them() -> None:
    """A measured cache, and beyond it the rate's own slope, without a jump."""
    base = Cluster.local(1)
    times = ((1e6, 1e-5), (1e8, 1e-2))
    cluster = replace(base, device=replace(base.device, memory_times=times))
    assert bytes_seconds(1e6, cluster) == 1e-5
    assert bytes_seconds(1e7, cluster) == pytest.approx(math.sqrt(1e-5 * 1e-2))
    assert bytes_seconds(2e8, cluster) == pytest.approx(2e-2)
    assert bytes_seconds(0, cluster) == 0.0


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([[1e6]], "expected a list of pairs of numbers"),
        ([[1e6, 1e-3], [1e5, 1e-2]], "expected rising pairs"),
        ([[1e6, -1.0]], "expected a number above 0"),
    ],
)
def test_memory_times_that_are_none_are_refused(times: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=f"device.memory_times: {message}"):
        replace(Cluster.local(1).device, memory_times=times)


def test_a_product_of_a_tensor_with_itself_reads_it_once() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    products = [graph.call_function(aten.mul.Tensor, both) for both in ((x, x), (x, y), (x, x))]
    for node in (x, y, *products):
        node.meta["val"] = torch.empty(1024, 1024, device="meta")
    costs = NodeCosts(Cluster.preset("dgx-a100"))
    square, product, again = (costs.of(node) for node in products)
    assert square is again
    assert square.seconds < product.seconds
