"""Places with padding: where states rest that no axis divides, and every change of layout to and from there."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardweave.compiler.capture import capture
from shardweave.cost_model.op_work import node_work
from shardweave.cost_model.options import Options
from shardweave.ir import Axis, Layout, Mesh, Padding
from shardweave.ir.layout import state_layout, state_layouts, steps_between, without_axes
from shardweave.passes.pipeline import lower
from shardweave.passes.step_boundary import annotate
from shardweave.planner.problem.space import legal
from shardweave.sharding.graphs import tensor_bytes
from tests import local_tensor, lockstep
from tests.ir.test_layout_algebra import change, parts_of, random_layout
from tests.models import mlp
from tests.passes.every_node import close
from tests.passes.harness import collectives, examples, mesh_of, meshes, together

SEEDS = st.integers(0, 10**6).map(random.Random)
TWO = mesh_of(2, 2, 2)


def odd_sizes(rng: random.Random) -> list[int]:
    return [rng.choice([1, 2, 3, 5, 6, 7, 9, 10, 13, 25]) for _ in range(rng.randint(1, 3))]


def random_rest(rng: random.Random, mesh: Mesh, sizes: list[int]) -> tuple[Layout, list[list[Axis]], list[Layout]]:
    """A layout to compute in, the axes of two stages, and where states rest over them."""
    compute = random_layout(rng, sizes, mesh)
    free = [axis for axis in mesh.axes if axis not in compute.shard_axes]
    axes = rng.sample(free, rng.randint(0, len(free)))
    first = rng.randint(0, len(axes))
    stages = [axes[:first], axes[first:]]
    return compute, stages, state_layouts(compute, stages, mesh)


@given(SEEDS, meshes())
@examples(300)
def test_where_states_rest(rng: random.Random, mesh: Mesh) -> None:
    compute, stages, (in_step, rest) = random_rest(rng, mesh, odd_sizes(rng))
    axes = [*stages[0], *stages[1]]
    plain = state_layout(state_layout(compute, stages[0], mesh), stages[1], mesh)
    assert rest.global_shape == in_step.global_shape == compute.global_shape
    assert set(compute.shard_axes) <= set(in_step.shard_axes) <= set(rest.shard_axes) <= {*compute.shard_axes, *axes}
    assert set(in_step.shard_axes).isdisjoint(stages[1]) and in_step == without_axes(rest, stages[1])
    if set(axes) <= set(plain.shard_axes):
        assert rest == plain  # nothing changes where axes divide
    if rest.padding is not None:
        assert math.prod(rest.local_shape) < math.prod(plain.local_shape)
        dim = rest.padding.dim
        assert all(size == 1 for size in rest.local_shape[:dim])  # a part lies at the front of its place in memory
    if compute.is_replicated and math.prod(compute.local_shape) >= math.prod(axis.size for axis in axes):
        size = max(compute.global_shape[0], 1)
        others = math.prod(compute.global_shape[1:])
        parts = math.prod(axis.size for axis in axes)
        assert set(rest.shard_axes) == set(axes)
        assert math.prod(rest.local_shape) <= -(-size // parts) * others


@given(SEEDS, meshes())
@examples(60)
def test_rest_is_one_gather_and_one_reduction_away(rng: random.Random, mesh: Mesh) -> None:
    compute, stages, (_, rest) = random_rest(rng, mesh, odd_sizes(rng))
    if rest.padding is None:
        return
    gained = [axis for axis in rest.shard_axes if axis not in compute.shard_axes]
    assert [step.kind for step in steps_between(rest, compute)] == ["all_gather", "unpad"]
    partial = Layout(compute.dims, tuple((axis, "sum") for axis in gained))
    assert [step.kind for step in steps_between(partial, rest)] == ["pad", "reduce_scatter"]


@given(SEEDS, meshes(), st.sampled_from(["", "sum", "max"]))
@examples(200)
def test_any_change_to_and_from_places(rng: random.Random, mesh: Mesh, reduce: str) -> None:
    """Executed, it leaves the value: from any layout to where states rest, and from there, or from a stage, to any."""
    sizes = odd_sizes(rng)
    compute, stages, layouts = random_rest(rng, mesh, sizes)
    value = torch.randn(sizes, generator=torch.Generator().manual_seed(rng.randrange(10**6)), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for padded in layouts:
        other = rng.choice([compute, random_layout(rng, sizes, mesh), *layouts])
        back = change(value, lockstep.shard(value, padded, mesh), padded, other, mesh)[1]
        torch.testing.assert_close(together(back, other, mesh), value, rtol=0, atol=1e-12)
        have = random_layout(rng, sizes, mesh, reduce)
        results = change(value, parts_of(value, have, mesh, generator), have, padded, mesh)[1]
        assert all(tuple(part.shape) == padded.local_shape and part.is_contiguous() for part in results)
        torch.testing.assert_close(together(results, padded, mesh), value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "axes", "text"),
    [
        ((7, 5), TWO.axes, "[c0 b0 a0 of 7, 5]"),
        ((10, 4), TWO.axes, "[c0 5, b0 a0]"),  # never where some dimension divides
        ((9, 7), TWO.axes, "[c0 b0 a0 2 of 9, 7]"),
        ((5,), TWO.axes, "[5]"),  # fewer elements than devices
        ((1, 9), TWO.axes, "[1, c0 b0 a0 2 of 9]"),
        ((4, 9), TWO.axes, "[c0 b0, a0 5 of 9]"),
        ((7, 6), TWO.axes[:2], "[a0 4 of 7, b0 3]"),
        ((), TWO.axes, "[]"),
    ],
)
def test_rest_table(sizes: tuple[int, ...], axes: tuple[Axis, ...], text: str) -> None:
    mesh = Mesh(tuple(reversed(TWO.axes)))
    (rest,) = state_layouts(Layout.replicated(sizes), [axes], mesh)
    assert str(rest) == text


def test_an_axis_that_dtensor_cuts_before_those_of_the_op_is_left() -> None:
    """Its rows would lie strided, each cut unevenly: DTensor has no such placement that all versions agree on."""
    a, b, c = TWO.axes
    assert str(state_layouts(Layout(((b, 5), (3,))), [(a,)], Mesh((a, b, c)))[0]) == "[b0 5, 3]"
    assert str(state_layouts(Layout(((b, 5), (3,))), [(a,)], Mesh((b, a, c)))[0]) == "[b0 a0 3 of 10, 3]"
    assert str(state_layouts(Layout(((3, b, 5), (3,))), [(a,)], Mesh((b, a, c)))[0]) == "[3 b0 5, 3]"


def test_secondary_partitions_lie_within_their_states() -> None:
    """What a step holds is gathered over the outer axes only, though DTensor cuts these first."""
    outer, inner = TWO.axes[1], TWO.axes[0]
    mesh = Mesh((outer, inner))
    in_step, rest = state_layouts(Layout.replicated((7, 5)), [(inner,), (outer,)], mesh)
    assert (str(in_step), str(rest)) == ("[2 a0 2 of 7, 5]", "[b0 a0 2 of 7, 5]")
    assert state_layouts(Layout.replicated((7, 5)), [(), (outer, inner)], mesh)[0] == Layout.replicated((7, 5))


@examples(150)
@given(st.integers(1, 60), st.lists(st.sampled_from([2, 3, 5]), min_size=1, max_size=4))
def test_places_hold_what_torch_chunks(size: int, levels: list[int]) -> None:
    padding = Padding(0, size, tuple(levels))
    parts = [torch.arange(size)]
    for level in levels:
        parts = [piece for part in parts for piece in lockstep._chunks(part, level, 0)]
    assert padding.counts == tuple(len(part) for part in parts) and max(padding.counts) == padding.place
    assert padding.padded == padding.place * math.prod(levels)
    rows = [index * padding.place + row for index, part in enumerate(parts) for row in range(len(part))]
    assert [padding.before(row) for row in rows] == list(range(size))
    assert padding.in_front == (rows == list(range(size)))
    x = torch.arange(size * 2.0).reshape(1, size, 2)
    spread = torch.ops.shardweave.pad(x, 1, size, levels)
    assert torch.equal(spread[:, rows], x) and spread.sum() == x.sum() and spread.shape[1] == padding.padded
    assert torch.equal(torch.ops.shardweave.unpad(spread, 1, size, levels), x)


@given(
    st.tuples(*(st.sampled_from([1, 2, 3, 5, 6, 7, 9, 11]) for _ in range(4))),
    st.integers(0, 10**6),
    st.sampled_from([(3,), (2, 2), (2, 2, 2), (2, 3)]),
    st.sampled_from([lockstep.run, local_tensor.run]),
)
@examples(12)
def test_a_step_of_any_sizes(sizes: tuple[int, int, int, int], seed: int, levels: tuple[int, ...], run: object) -> None:
    """Under any legal strategies it gives the loss and the gradients of one device."""
    mesh, rng = mesh_of(*levels), random.Random(seed)
    torch.manual_seed(seed)
    model = mlp.build(sizes).to(torch.float64)
    batch = mlp.batch(torch.Generator().manual_seed(seed), 24, sizes)
    batch = {name: value.double() for name, value in batch.items()}
    annotated = annotate(capture(model, batch), Options())
    strategies = {}
    for op in annotated.ops:
        fitting = legal(op, mesh)
        strategies[op.name] = rng.choice([strategy for strategy in fitting if strategy.states > 1] or fitting)
    step = lower(annotated, strategies, mesh, Options()).step
    spec, tensors = step.spec, {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    given = [(value.name, value.layout) for value in (*spec.parameters, *spec.buffers)]
    given += [(value.name, value.layout) for value in spec.inputs]
    inputs = [lockstep.shard(tensors[name].detach(), layout, mesh) for name, layout in given]
    results = run(step.forward, mesh, inputs)  # type: ignore[operator]
    saved = [[ranked[index] for ranked in results] for index in range(1, len(results[0]))]
    tangent = [torch.ones((), dtype=torch.float64)] * mesh.world_size
    gradients = run(step.backward, mesh, [*saved, tangent])  # type: ignore[operator]
    loss = model(**batch)
    loss.backward()
    close(results[0][0], loss.detach(), "the loss", 1e-10)
    for index, parameter in enumerate(spec.parameters):
        expected = model.get_parameter(parameter.name).grad
        assert expected is not None
        found = together([ranked[index] for ranked in gradients], parameter.layout, mesh)
        close(found, expected, parameter.name, 1e-10)


def test_what_is_priced() -> None:
    """The simulator's work of packing and spreading: what is read and what is written."""
    mesh = mesh_of(2, 2)
    value = torch.randn(5, 3)
    layout = state_layouts(Layout.replicated((5, 3)), [mesh.axes], mesh)[0]
    module, _ = change(value, lockstep.shard(value, layout, mesh), layout, Layout.replicated((5, 3)), mesh)
    (unpad,) = (node for node in module.graph.nodes if node.target is torch.ops.shardweave.unpad.default)
    work = node_work(unpad)
    assert work is not None and work.num_bytes == (8 + 5) * 3 * 4 and tensor_bytes(unpad.meta["val"]) == 5 * 3 * 4
    (gather,) = collectives(module)
    assert gather.bytes == 8 * 3 * 4  # places are what travels
