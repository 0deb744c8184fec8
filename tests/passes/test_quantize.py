"""Quantize: the collectives that it writes, their values within the bound of their stages, and nothing else touched."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.cost_model.op_work import node_work
from shardweave.cost_model.options import Options
from shardweave.ir import Ablation, Mesh, Quantized, axes_size
from shardweave.passes.base import verify
from shardweave.passes.pipeline import Compiled, lower
from shardweave.passes.quantize import Quantize, quantization_stages
from shardweave.planner.problem.space import forced_strategies
from shardweave.sharding.graphs import copied, copied_from, info, is_start, is_wait
from tests import local_tensor, lockstep
from tests.cost_model.handmade import Builder
from tests.ops.test_quantized_blocks import half_steps
from tests.passes.harness import collectives, examples, mesh_of
from tests.passes.joint import joint

custom_ops = torch.ops.shardweave
ZERO: dict[Quantized, int] = {"parameters": 8, "gradients": 4}
SEEDS = st.integers(0, 10**6).map(random.Random)


def moved(
    mesh: Mesh, kind: str, shape: Sequence[int], cause: str, dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    """A graph of one collective over all of a mesh."""
    with FakeTensorMode():
        builder = Builder(mesh.axes)
        x = builder.tensor("x", *shape, dtype=dtype)
        axes = sorted(mesh.axes, key=lambda axis: -axis.stride)
        return builder.module([builder.wait(builder.start(kind, x, axes, "up.weight", cause))])


def quantized(module: fx.GraphModule, bits: dict[Quantized, int], block: int = 256) -> fx.GraphModule:
    found = Quantize(bits, block)(copied(module))
    verify(found, "quantize")
    return found


def run(module: fx.GraphModule, mesh: Mesh, inputs: list[Tensor]) -> list[Tensor]:
    return [results[0] for results in lockstep.run(module, mesh, [inputs])]


# -- values


@given(rng=SEEDS, sizes=st.sampled_from([(2,), (3,), (2, 2), (2, 3), (2, 2, 2), (4, 2)]), bits=st.sampled_from([8, 4]),
       block=st.sampled_from([4, 256]))  # fmt: skip
@examples(60)
def test_a_sum_is_within_the_bound_of_its_stages(rng: random.Random, sizes: Any, bits: int, block: int) -> None:
    """Each stage errs by half a step of each part that it adds: of what the ranks have, then of the nodes' sums."""
    mesh, width = mesh_of(*sizes), rng.choice([1, 3, 5])
    world = mesh.world_size
    module = moved(mesh, "reduce_scatter", (world * rng.choice([1, 2]), width), "gradient")
    generator = torch.Generator().manual_seed(rng.randint(0, 10**6))
    shape = next(node for node in module.graph.nodes if node.name == "x").meta["val"].shape
    inputs = [torch.randn(shape, generator=generator) * 10 ** rng.uniform(-3, 3) for _ in range(world)]
    got, exact = run(quantized(module, {"gradients": bits}, block), mesh, inputs), run(module, mesh, inputs)
    sums = [x.double().reshape(world, -1) for x in inputs]
    errors = [torch.zeros_like(x) for x in sums]
    rows = world
    for axes in quantization_stages(mesh.axes):
        half = [half_steps(x.abs() + error, bits, block) for x, error in zip(sums, errors)]
        rows //= axes_size(axes)
        groups = [mesh.group_ranks(axes, rank) for rank in range(world)]
        places = [group.index(rank) for rank, group in enumerate(groups)]

        def added(parts: list[Tensor], groups: Any = groups, places: Any = places, rows: int = rows) -> list[Tensor]:
            return [sum(parts[peer].reshape(rows, -1, parts[0].shape[1])[:, place] for peer in group)  # type: ignore[misc]
                    for group, place in zip(groups, places)]  # fmt: skip

        errors, sums = added([error + more for error, more in zip(errors, half)]), added(sums)
    assert rows == 1
    for found, want, error in zip(got, exact, errors, strict=True):
        assert ((found - want).abs().flatten() <= 1.0001 * error.flatten() + 1e-6 * want.abs().flatten()).all()


@given(rng=SEEDS, sizes=st.sampled_from([(2,), (3,), (2, 2), (2, 3)]),
       dtype=st.sampled_from([torch.float32, torch.bfloat16]))  # fmt: skip
@examples(30)
def test_all_ranks_gather_the_same_within_half_a_step(rng: random.Random, sizes: Any, dtype: torch.dtype) -> None:
    mesh = mesh_of(*sizes)
    module = moved(mesh, "all_gather", (rng.choice([1, 3]), rng.choice([1, 7])), "parameter", dtype)
    shape = next(node for node in module.graph.nodes if node.name == "x").meta["val"].shape
    generator = torch.Generator().manual_seed(rng.randint(0, 10**6))
    inputs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(mesh.world_size)]
    first, *others = run(quantized(module, {"parameters": 8}, 4), mesh, inputs)
    assert all(torch.equal(first, other) for other in others)
    exact = torch.cat(inputs).double()
    half = half_steps(torch.stack([x.double().flatten() for x in inputs]), 8, 4).view_as(exact)
    assert first.dtype == dtype and first.shape == exact.shape
    assert ((first.double() - exact).abs() <= half + (1e-6 + torch.finfo(dtype).eps) * exact.abs()).all()


def test_torchs_own_collectives_do_the_same() -> None:
    mesh = mesh_of(2, 2)
    for kind, cause in (("reduce_scatter", "gradient"), ("all_gather", "parameter")):
        module = quantized(moved(mesh, kind, (8, 3), cause), ZERO)
        inputs = [torch.randn(8, 3) for _ in range(4)]
        found = [results[0] for results in local_tensor.run(module, mesh, [inputs])]
        assert all(torch.equal(one, other) for one, other in zip(found, run(module, mesh, inputs), strict=True))


# -- the collectives


def test_a_gradient_is_brought_to_its_states_level_by_level() -> None:
    """Inside of a node first, so that of 16 x 6 numbers an eighth moves between nodes, two a byte."""
    module = quantized(moved(mesh_of(8, 2), "reduce_scatter", (16, 6), "gradient"), ZERO)
    found = [(what.kind, [axis.level for axis in what.axes], what.bytes, what.scales) for what in collectives(module)]
    assert found == [
        ("all_to_all", ["a", "a", "a"], 16 * 3, False), ("all_to_all", ["a", "a", "a"], 16 * 4, True),
        ("all_to_all", ["b"], 2 * 3, False), ("all_to_all", ["b"], 2 * 4, True),
    ]  # fmt: skip
    assert {what.reason for what in collectives(module)} == {
        "by hand, int4 blocks, ZeRO++ qgZ", "by hand, scales of int4 blocks, ZeRO++ qgZ"
    }  # fmt: skip
    assert {(what.owner, what.cause) for what in collectives(module)} == {("up.weight", "gradient")}


def test_kernels_are_priced_by_what_they_read_and_write() -> None:
    module = quantized(moved(mesh_of(2), "reduce_scatter", (2, 512), "gradient", torch.bfloat16), ZERO)
    works = {work.op: work.num_bytes for node in module.graph.nodes if (work := node_work(node)) is not None}
    payload, scales = 2 * 256, 2 * 2 * 4
    assert works == {
        "shardweave.quantize_blocks.default": 2 * 512 * 2 + payload + scales,
        "shardweave.sum_dequantized.default": payload + scales + 512 * 2,
    }


def test_what_is_gathered_in_blocks_is_a_copy_of_its_parameter() -> None:
    module = quantized(moved(mesh_of(2), "all_gather", (4, 4), "parameter"), ZERO)
    (whole,) = module.graph.output_node().all_input_nodes
    (source,) = copied_from(whole)
    assert source.name == "x"


@pytest.mark.parametrize(
    ("kind", "cause", "dtype", "bits"),
    [
        ("all_reduce", "gradient", torch.float32, ZERO),
        ("all_gather", "activation", torch.float32, ZERO),
        ("reduce_scatter", "activation", torch.float32, ZERO),
        ("all_gather", "parameter", torch.int64, ZERO),
        ("all_gather", "parameter", torch.float32, {"gradients": 4}),
        ("reduce_scatter", "gradient", torch.float32, {"parameters": 8}),
        ("reduce_scatter", "gradient", torch.float32, {}),
    ],
)
def test_what_is_not_named_stays_as_it_is(kind: str, cause: str, dtype: torch.dtype, bits: Any) -> None:
    module = moved(mesh_of(2), kind, (4, 3), cause, dtype)
    found = quantized(module, bits)
    assert [node.name for node in found.graph.nodes] == [node.name for node in module.graph.nodes]
    inputs = [torch.arange(12).reshape(4, 3).to(dtype) + rank for rank in range(2)]
    assert all(torch.equal(*each) for each in zip(run(found, mesh_of(2), inputs), run(module, mesh_of(2), inputs)))


# -- whole steps

FULL = torch.float64
"""The dtype of the step, and so of its scales."""


def lowered(force: dict[str, Any], **options: Any) -> Compiled:
    mesh, step = mesh_of(2, 2), joint("gpt").annotated
    found = forced_strategies(force, step.ops, mesh, step.batch)
    return lower(step, {op.name: found[op.name][0] for op in step.ops}, mesh, Options(**options))


def parts(compiled: Compiled) -> list[fx.GraphModule]:
    step = compiled.step
    assert step.backward is not None
    return [step.forward, step.backward]


@pytest.mark.parametrize("word", ["zero1", "zero2", "zero3", "hpz:2", "hsdp:2"])
@pytest.mark.parametrize("more", [{}, {"buckets": True}, {"micro_batches": 2}, {"recompute": "full", "sub_batches": 2},
                                  {"ablation": Ablation(blocking=("gather", "scatter"))}],
                         ids=["plain", "buckets", "micro-batches", "recomputed", "blocked"])  # fmt: skip
def test_no_parameter_is_gathered_and_no_gradient_scattered_whole(word: str, more: dict[str, Any]) -> None:
    """As many gathers as without, of int8, each with one of scales; a reduction is as many pairs as it has stages."""
    plain, few = (parts(lowered({"*": word}, **more, quantize=each)) for each in (None, "zero++"))
    for before, after in zip(plain, few):
        had, has = (Counter(kinds(module)) for module in (before, after))
        gathers = had["all_gather", "parameter", FULL]
        assert has["all_gather", "parameter", torch.int8] == has["all_gather", "parameter", FULL] == gathers
        floats = [what for what, dtype in noted(after) if dtype.is_floating_point and what.kind != "all_reduce"]
        assert all(what.scales for what in floats if what.cause != "activation")
        scatters = [what for what, _ in noted(before) if what.kind == "reduce_scatter" and what.cause == "gradient"]
        pairs = sum(len(quantization_stages(what.axes)) for what in scatters)
        assert has["all_to_all", "gradient", torch.uint8] == has["all_to_all", "gradient", FULL] == pairs
        assert not any(kind == "reduce_scatter" and cause == "gradient" for kind, cause, _ in has)
        assert waits_once(after)
    assert any(dtype == torch.int8 for module in few for *_, dtype in kinds(module))
    assert any(dtype == torch.uint8 for module in few for *_, dtype in kinds(module))


@pytest.mark.parametrize("word", ["zero1", "zero2", "hpz:2"])
def test_micro_batches_share_what_was_gathered_once_a_step(word: str) -> None:
    """The first turn gathers as many parameters as without, the next ones only those of each use."""
    forms = [lowered({"*": word}, micro_batches=2, quantize=each).step.micro_batch_graphs for each in (None, "zero++")]
    plain, few = (form() for form in forms if form is not None)
    for fresh in (True, False):
        had, has = (Counter(kinds(graphs.forward(fresh, True))) for graphs in (plain, few))
        assert has["all_gather", "parameter", torch.int8] == had["all_gather", "parameter", FULL]
    for adds, closes in ((False, False), (True, True)):
        had, has = (Counter(kinds(graphs.backward(adds, closes))) for graphs in (plain, few))
        assert bool(has["all_to_all", "gradient", torch.uint8]) == bool(had["reduce_scatter", "gradient", FULL])


@pytest.mark.parametrize("flat", [False, True])
def test_no_block_of_a_bucket_holds_two_of_its_members(flat: bool) -> None:
    """What is put together is quantized as it is alone: small gradients lie beside large ones."""
    ablation = Ablation(flat_parameter=flat)
    plain = parts(lowered({"*": "zero2"}, buckets=False, quantize="zero++"))
    merged = parts(lowered({"*": "zero2"}, buckets=True, ablation=ablation, quantize="zero++"))
    for before, after in zip(plain, merged):
        assert Counter(size for each in sizes_in(before) for size in each) == Counter(
            size for each in sizes_in(after) for size in each
        )
        assert len(sizes_in(after)) < len(sizes_in(before))


def sizes_in(module: fx.GraphModule) -> list[list[int]]:
    found = module.graph.find_nodes(op="call_function", target=custom_ops.quantize_blocks.default)
    return [list(node.args[1]) for node in found]


def noted(module: fx.GraphModule) -> list[tuple[Any, torch.dtype]]:
    nodes = [node for node in module.graph.nodes if info(node).collective is not None]
    return [(info(node).collective, node.meta["val"].dtype) for node in nodes]


def kinds(module: fx.GraphModule) -> list[tuple[str, str, torch.dtype]]:
    return [(what.kind, what.cause, dtype) for what, dtype in noted(module)]


def waits_once(module: fx.GraphModule) -> bool:
    starts = [node for node in module.graph.nodes if is_start(node)]
    waits = [node for node in module.graph.nodes if is_wait(node)]
    return Counter(starts) == Counter(source for wait in waits for source in wait.all_input_nodes)


def test_replicated_gradients_move_as_they_are() -> None:
    for module in parts(lowered({"*": "dp"}, quantize="zero++")):
        assert {kind for kind, cause, _ in kinds(module) if cause != "activation"} <= {"all_reduce"}
        assert not any(node.target is custom_ops.quantize_blocks.default for node in module.graph.nodes)
