"""Measured ops: signatures, what is run and what is skipped, the cache, and agreement of ranks."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import shardweave as sw
import shardweave.ops.layer_ops  # noqa: F401  (registers the ops)
from shardweave.cost_model import Cluster, Measured, OpTable, OpTime, Work, device_profile, node_seconds, node_work
from shardweave.cost_model.device_profile import profile_ops, profiled_ops
from shardweave.ir import Assignment
from shardweave.ir.errors import ClusterError
from shardweave.ops.seeded_random import seeded
from shardweave.planner.problem.resharding_costs import Prices
from shardweave.sharding.graphs import info, signature
from tests.cost_model.handmade import Builder, aten, mlp
from tests.passes.harness import examples, graph_of, mesh_of

custom_ops = torch.ops.shardweave


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("SHARDWEAVE_CACHE", str(tmp_path))
    return tmp_path


def signatures(*graphs: fx.Graph) -> set[str]:
    return {work.signature for graph in graphs for node in graph.nodes if (work := node_work(node)) is not None}


def graph(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.Graph:
    return make_fx(function)(*inputs).graph


def signature_of(function: Callable[..., Any], *inputs: torch.Tensor) -> str:
    (found,) = signatures(graph(function, *inputs))
    return found


def test_a_signature_tells_what_changes_the_time_and_nothing_else() -> None:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)

    same = [signature_of(first, torch.ones(4, 8)), signature_of(first, torch.zeros(4, 8, device="meta"))]
    others = [
        signature_of(lambda x: x.sum(1), torch.ones(4, 8)),
        signature_of(first, torch.ones(8, 4)),
        signature_of(first, torch.ones(8, 4).t()),
        signature_of(first, torch.ones(4, 1).expand(4, 8)),
        signature_of(first, torch.ones(4, 16)[:, :8]),
        signature_of(first, torch.ones(4, 8, dtype=torch.float64)),
        signature_of(lambda x: x.amax(0), torch.ones(4, 8)),
    ]
    assert len(set(same)) == 1
    assert len({same[0], *others}) == 1 + len(others)


@examples(200)
@given(st.lists(st.integers(1, 4), max_size=4), st.randoms(use_true_random=False))
def test_only_what_is_contiguous_has_no_mark_of_its_order(shape: list[int], rng: random.Random) -> None:
    order = rng.sample(range(len(shape)), len(shape))
    gaps = [slice(None, None, rng.choice([1, 1, 2])) for _ in shape]
    tensor = torch.empty([size * 2 for size in shape])[tuple(gaps)].permute(order)
    tensor = tensor[tuple(slice(0, rng.choice([1, size])) for size in tensor.shape)]
    builder = Builder([])
    x = builder.tensor("x")
    x.meta["val"] = tensor
    mark = signature(builder.call(aten.neg.default, x)).partition("]")[2]
    assert (mark == ")") == tensor.is_contiguous()


def test_an_op_that_draws_has_one_signature_under_any_seed() -> None:
    builder = Builder([])
    x, seed = builder.tensor("x", 8), builder.graph.placeholder("step_seed")  # a number that comes with the call
    drawn = []
    for index in (0, 1):
        node = builder.graph.call_function(seeded, (aten.bernoulli.p, seed, index, 3, x, 0.5))
        node.meta["val"] = x.meta["val"]
        drawn.append(signature(node))
    assert drawn[0] == drawn[1] == "aten.bernoulli.p(float32[8], 0.5)"
    assert set(profile_ops([builder.graph], "cpu").times) == {drawn[0]}


def test_every_distinct_op_of_a_step_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.local(2)
    forward, backward, _ = mlp(cluster, cluster.mesh().axes, layers=3, width=32, rows=16)
    expected = signatures(forward.graph, backward.graph)
    assert 2 < len(expected) < sum(node_work(n) is not None for g in (forward, backward) for n in g.graph.nodes)
    runs = []
    monkeypatch.setattr(device_profile, "call_seconds", lambda call, *_: runs.append(call()) or 1e-3)
    table = profile_ops([forward, backward.graph], "cpu")
    assert set(table.times) == expected and not table.skipped
    assert len(runs) == len(expected)
    assert not any("_c10d_functional" in found for found in table.times)
    priced = replace(cluster, measured=Measured(ops=table))
    assert all(node_seconds(n, priced) in (0.0, 1e-3) for g in (forward, backward) for n in g.graph.nodes)


def test_a_compiled_step_is_measured_and_priced_by_it() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16), torch.nn.LayerNorm(16)
    )
    step = graph(lambda x: list(torch.autograd.grad(model(x).sum(), list(model.parameters()))), torch.ones(8, 16))
    cluster = profiled_ops(Cluster.local(1), [step], "cpu")
    assert cluster.measured is not None and not cluster.measured.ops.skipped
    assert set(cluster.measured.ops.times) == signatures(step)
    for node in step.nodes:
        if (work := node_work(node)) is not None:
            assert node_seconds(node, cluster) == cluster.measured.ops.seconds(work.signature) > 0
    assert cluster.fingerprint != Cluster.local(1).fingerprint


def test_a_step_is_run_to_measure_its_ops_and_what_cannot_run_so_is_measured_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster.local(2)
    forward, backward, _ = mlp(cluster, cluster.mesh().axes, layers=3, width=32, rows=16)
    alone = []
    monkeypatch.setattr(device_profile, "_time_op", lambda node, device: alone.append(node) or 5.0)
    table = profile_ops([forward, backward.graph], "cpu", in_step=True)
    assert set(table.times) == signatures(forward.graph, backward.graph) and not table.skipped and not alone
    assert all(0 < time.seconds < 5.0 for time in table.times.values())
    kept = profile_ops([forward, backward.graph], "cpu", in_step=True)
    assert kept == table and [file.name[:13] for file in cache.glob("ops-*.json")] == ["ops-in-steps-"]

    builder = Builder([])
    x = builder.tensor("x", 8, 8)
    first = builder.call(aten.neg.default, x)
    whole = builder.graph.placeholder("whole")
    whole.meta["val"] = torch.zeros(4, dtype=torch.int64, device="meta")
    failing = builder.call(aten.floor_divide.default, whole, whole)  # zero by zero
    last = builder.call(aten.exp.default, first)
    found = profile_ops([builder.graph], "cpu", in_step=True, cache=False)
    assert alone == [failing, last] or alone == [last, failing]
    assert found.times[signature(first)].seconds < 5.0 == found.times[signature(last)].seconds

    alone.clear()
    monkeypatch.setattr(device_profile, "_free_bytes", lambda device: 512)
    profile_ops([_squares(8)], "cpu", in_step=True, cache=False)
    assert len(alone) == 1  # the graph needs 512 bytes, and a half of what is free may be used


def test_a_run_that_measures_ops_has_the_results_of_collectives_without_them() -> None:
    """Runs are like steps: values come from the ops before, and a collective's result has its own shape."""
    axes = Cluster.local(2).mesh().axes
    builder = Builder(axes)
    part = builder.tensor("part", 4, 4)
    gathered = builder.wait(builder.start("all_gather", part, axes, "part", "parameter"))
    product = builder.call(aten.mm.default, gathered, part)
    run = device_profile._TimedRun(builder.graph, time.perf_counter() + 60)
    run.run()
    assert list(run.seconds) == [signature(product)]


def test_a_large_product_takes_longer_than_a_small_one() -> None:
    builder = Builder([])
    for name, size in (("small", 64), ("large", 1024)):
        x = builder.tensor(name, size, size)
        builder.call(aten.mm.default, x, x)
    small, large = (node_work(node) for node in builder.graph.nodes if node.op == "call_function")
    table = profile_ops([builder.graph], "cpu")
    assert small is not None and large is not None
    assert 0 < table.times[small.signature].seconds < table.times[large.signature].seconds


def test_what_cannot_be_run_alone_is_skipped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder([])
    x = builder.tensor("x", 8, 8)
    fine = builder.call(aten.neg.default, x)
    whole = builder.graph.placeholder("whole")
    whole.meta["val"] = torch.zeros(4, dtype=torch.int64, device="meta")
    builder.call(aten.floor_divide.default, whole, whole)  # zero by zero
    lists = builder.graph.placeholder("lists")
    lists.meta["val"] = [torch.empty(8, device="meta")]
    odd = builder.graph.call_function(aten.cat.default, (lists,))
    odd.meta["val"] = torch.empty(8, device="meta")
    table = profile_ops([builder.graph], "cpu")
    assert set(table.times) == {signature(fine)}
    reasons = {found.partition("(")[0]: why for found, why in table.skipped.items()}
    assert set(reasons) == {"aten.floor_divide.default", "aten.cat.default"}
    assert "cannot be run alone" in reasons["aten.floor_divide.default"]
    assert "lists: expected a tensor or a number, got list" in reasons["aten.cat.default"]
    assert signatures(builder.graph) == {*table.times, *table.skipped}

    monkeypatch.setattr(device_profile, "_free_bytes", lambda device: 512)
    (why,) = set(profile_ops([_squares(8)], "cpu").skipped.values())
    assert "its tensors take 512 bytes, expected at most 256" in why
    monkeypatch.undo()
    (why,) = set(profile_ops([_squares(8)], "cpu", seconds_budget=-1.0, cache=False).skipped.values())
    assert why == "the -1 s for profiling were over"


def _squares(*sizes: int) -> fx.Graph:
    builder = Builder([])
    for size in sizes:
        x = builder.tensor(f"x{size}", size, size)
        builder.call(aten.mm.default, x, x)
    return builder.graph


def test_the_heaviest_ops_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    monkeypatch.setattr(device_profile, "_time_op", lambda node, device: order.append(node.meta["val"].shape[0]) or 1.0)
    profile_ops([_squares(8, 64, 16, 32)], "cpu")
    assert order == [64, 32, 16, 8]


def test_measured_times_are_kept_and_used_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = profile_ops([_squares(8)], "cpu")
    (file,) = cache.glob("ops-*.json")
    assert OpTable.from_dict(json.loads(file.read_text())) == first

    def run(node: fx.Node, device: torch.device) -> float:
        assert node.meta["val"].shape[0] == 16, "what is in the cache is not run again"
        return 7.0

    monkeypatch.setattr(device_profile, "_time_op", run)
    assert profile_ops([_squares(8)], "cpu") == first
    both = profile_ops([_squares(8, 16)], "cpu")
    assert {time.seconds for time in both.times.values()} == {7.0, *(time.seconds for time in first.times.values())}
    assert OpTable.from_dict(json.loads(file.read_text())) == both
    assert profile_ops([_squares(8)], "cpu") == first  # what other graphs need changes nothing

    file.write_text('{"half a')
    monkeypatch.setattr(device_profile, "_time_op", lambda node, device: 9.0)
    assert [time.seconds for time in profile_ops([_squares(8)], "cpu").times.values()] == [9.0]
    monkeypatch.setattr(device_profile, "_time_op", lambda node, device: 11.0)
    assert [time.seconds for time in profile_ops([_squares(8)], "cpu", cache=False).times.values()] == [11.0]


def test_inputs_lie_as_in_the_graph_and_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def spy(call: Callable[[], Any], *_: object) -> float:
        seen.append(tuple(cell.cell_contents for cell in call.__closure__ or ()))
        call()
        return 1.0

    monkeypatch.setattr(device_profile, "call_seconds", spy)
    strided = torch.ones(4, 16)[:, ::2].t()
    before = torch.random.get_rng_state()
    profile_ops([graph(lambda x, y: (x * y, x > 0, torch.full((4,), 2.0)), strided, torch.ones(1).expand(8, 4))], "cpu")
    assert torch.equal(before, torch.random.get_rng_state())
    for contents in seen:
        for args in contents:
            for value in args if isinstance(args, tuple) else ():
                if isinstance(value, torch.Tensor):
                    assert value.stride() in (strided.stride(), (0, 0)) and bool((value > 0).all())


@pytest.mark.parametrize(
    ("target", "shapes"),
    [
        (lambda i: aten.embedding.default(torch.empty(10, 4, device="meta"), i), (10,)),
        (lambda i: aten.embedding_dense_backward.default(torch.empty(32, 4, device="meta"), i, 10, -1, False), (10,)),
        (
            lambda i: custom_ops.expert_mm.default(
                torch.empty(32, 4, device="meta"), torch.empty(5, 4, 8, device="meta"), i, 2
            ),
            (10,),
        ),
        (lambda i: custom_ops.expert_outer.default(*(torch.empty(32, 4, device="meta"),) * 2, i, 5, 2), (10,)),
    ],
)
def test_rows_and_experts_are_chosen_evenly(
    target: Callable[[torch.Tensor], Any], shapes: tuple[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.Tensor] = []
    spread = device_profile._spread_indices

    def spy(op: Any, args: Any) -> None:
        spread(op, args)
        chosen.extend(value for value in args if isinstance(value, torch.Tensor) and value.dtype == torch.int64)

    monkeypatch.setattr(device_profile, "_spread_indices", spy)
    traced = make_fx(target)(torch.zeros(32, dtype=torch.int64, device="meta"))
    for node in traced.graph.nodes:  # the tables are constants of the trace
        if node.op == "get_attr":
            node.meta["val"] = getattr(traced, node.target)
    assert not profile_ops([traced], "cpu").skipped
    counts = torch.bincount(chosen[0], minlength=shapes[0])
    assert len(counts) == shapes[0] and int(counts.min()) >= 2 and int(counts.max()) <= 4


def test_the_planner_prices_an_op_by_the_time_at_its_local_shape() -> None:
    mesh, cluster = mesh_of(2), Cluster.local(2)
    module, _ = graph_of(aten.mm.default, (torch.ones(8, 4), torch.ones(4, 6)), {})
    (node,) = (node for node in module.graph.nodes if node.target is aten.mm.default)
    rule = info(node).rule
    assert rule is not None
    halves = {
        "m": "(float32[4,4], float32[4,6])",
        "k": "(float32[8,2], float32[2,6])",
        "n": "(float32[8,4], float32[4,3])",
    }
    times = [
        OpTime(float(place), Work(2 * 96, 1, signature=f"aten.mm.default{text}"))
        for place, text in enumerate(halves.values(), 1)
    ]
    prices = Prices(mesh, replace(cluster, measured=Measured(ops=OpTable.of(times))))
    letters = {factor.name: factor.size for factor in rule.factors}
    names = {
        name: next(letter for letter, size in (("m", 8), ("k", 4), ("n", 6)) if size == letters[name])
        for name in letters
    }
    for factor in rule.factors:
        seconds = prices.compute(node, Assignment.of({mesh.axes[0]: factor.name}))
        assert seconds == 1.0 + list(halves).index(names[factor.name])


def test_a_table_of_other_types_is_refused_by_name() -> None:
    good = OpTable.of([OpTime(1.0, Work(8, 8, signature="op()"))]).to_dict()
    for change, message in [
        ({"seconds": 0}, r"measured\.ops\.op\(\)\.seconds: expected a number above 0, got 0"),
        ({"flops": -1}, r"op\(\)\.flops: expected a whole number of at least 0, got -1"),
        ({"product": [1, 2]}, r"op\(\)\.product: expected three sizes or nothing, got \[1, 2\]"),
        ({"colour": 1}, r"op\(\): expected a mapping with bytes, dtype, flops, product, seconds"),
    ]:
        with pytest.raises(ClusterError, match=message):
            OpTable.from_dict({"op()": good["op()"] | change})
    with pytest.raises(ClusterError, match="expected a mapping of signature to its time, got 3"):
        OpTable.from_dict(3)


def _ranks() -> tuple[OpTable, int]:
    table = profile_ops([_squares(8, 32)], "cpu", seconds_budget=10.0)
    kept = profile_ops([_squares(8, 32)], "cpu", seconds_budget=-1.0)
    assert kept == table
    return table, len(list(Path(sw.cost_model.measured_tables.cache_directory()).glob("ops-*.json")))


def test_all_ranks_get_the_same_times() -> None:
    (one, files), (other, _) = sw.launch(_ranks, nprocs=2)
    assert one == other and len(one.times) == 2 and files == 1
