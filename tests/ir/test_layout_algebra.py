"""The algebra of layouts as laws, and every change of layout executed on lockstep ranks."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.ir import Axis, Digit, Layout, Mesh, normalise, prime_factors
from shardweave.ir.errors import LayoutError
from shardweave.ir.layout import (
    digit_size,
    dims_layout,
    factors_of,
    input_layouts,
    layout_through_view,
    output_layouts,
    split_digits,
    state_layout,
    steps_between,
    without_axes,
)
from shardweave.passes.base import verify
from shardweave.passes.spmd_builder import LocalGraph, Origin
from shardweave.sharding.rules.registry import bind, parse
from tests import lockstep
from tests.passes.harness import collectives, examples, mesh_of, meshes, random_assignment, together

MESH = mesh_of(2, 3, 2)
X, Y, Z = MESH.axes
SEEDS = st.integers(0, 10**6).map(random.Random)


def random_dims(rng: random.Random, sizes: list[int], axes: list[Axis]) -> tuple[tuple[Digit, ...], ...]:
    """Digits of dimensions with these sizes, each of `axes` at most once, anywhere and in any order."""
    dims: list[tuple[Digit, ...]] = []
    free = rng.sample(axes, len(axes))
    for size in sizes:
        digits: list[Digit] = []
        for prime in rng.sample(prime_factors(size), len(prime_factors(size))):
            fitting = [axis for axis in free if axis.size == prime]
            if fitting and rng.random() < 0.6:
                digits.append(fitting[0])
                free.remove(fitting[0])
            else:
                digits.append(prime)
        dims.append(normalise(digits))
    return tuple(dims)


def random_layout(rng: random.Random, sizes: list[int], mesh: Mesh, reduce: str = "") -> Layout:
    """Any layout of a value, strided and out of order too; with `reduce` some free axes are partial."""
    dims = random_dims(rng, sizes, list(mesh.axes))
    taken = Layout(dims).shard_axes
    partial = [axis for axis in mesh.axes if axis not in taken and reduce and rng.random() < 0.7]
    return Layout(dims, tuple((axis, reduce) for axis in partial))


def random_sizes(rng: random.Random) -> list[int]:
    return [rng.choice([1, 2, 3, 4, 6, 8, 12, 24, 5]) for _ in range(rng.randint(0, 3))]


def positions(layout: Layout) -> dict[Axis, tuple[int, int]]:
    """For each axis of a layout its dimension, and how many steps of the dimension lie inside of one of its steps."""
    found = {}
    for dim, digits in enumerate(layout.dims):
        inside = 1
        for digit in reversed(digits):
            if isinstance(digit, Axis):
                found[digit] = dim, inside
            inside *= digit_size(digit)
    return found


# -- digits


@given(SEEDS, meshes())
@examples(80)
def test_cut(rng: random.Random, mesh: Mesh) -> None:
    """The runs have the products asked for and make up the digits; there are none only where a bound is in an axis."""
    (digits,) = random_dims(rng, [rng.choice([4, 6, 8, 12, 24, 36])], list(mesh.axes))
    sizes = [1]
    for prime in rng.sample(primes := prime_factors(math.prod(map(digit_size, digits))), len(primes)):
        if rng.random() < 0.5:
            sizes.append(prime)
        else:
            sizes[-1] *= prime
    runs = split_digits(digits, sizes)
    if runs is not None:
        assert [math.prod(map(digit_size, run)) for run in runs] == sizes
        assert normalise(digit for run in runs for digit in run) == digits
    bounds = itertools.accumulate(sizes, lambda product, size: product * size)
    assert (runs is not None) == all(_is_bound(digits, bound) for bound in bounds)


def _is_bound(digits: tuple[Digit, ...], bound: int) -> bool:
    """Whether the outermost `bound` steps end between two digits or at a divisor inside of a local one."""
    outer = 1
    for digit in digits:
        if outer == bound:
            return True
        if isinstance(digit, int) and bound % outer == 0 and digit % (bound // outer) == 0:
            return True
        outer *= digit_size(digit)
    return outer == bound


@pytest.mark.parametrize(
    ("digits", "sizes", "runs"),
    [
        ((), [1, 1], [(), ()]),
        ((2, X, 3), [4, 3], [(2, X), (3,)]),
        ((X, 6), [4, 3], [(X, 2), (3,)]),
        ((2, Y), [3, 2], None),
        ((4,), [2], None),
        ((2,), [4], None),
        ((0,), [0, 4], [(0,), (4,)]),
        ((X, 0), [0, 4], None),
    ],
)
def test_cut_table(digits: tuple[Digit, ...], sizes: list[int], runs: object) -> None:
    assert split_digits(digits, sizes) == runs


# -- assignments and layouts

RULE = bind(parse("h a, c d, (h c) (a d) -> (a h) c, d"), [(4, 3), (6, 2), (24, 6)], [(12, 6), (2,)], {"c": "max"})


def test_layouts_are_derived() -> None:
    """A factor that the output has shards it, another makes it partial, no factor replicates it."""
    rule = bind(parse("m k, k n -> m n"), [(4, 6), (6, 8)], [(4, 8)], {})
    assignment = {X: "m", Y: "k", Z: "n"}
    assert [str(layout) for layout in input_layouts(rule, assignment)] == ["[a0 2, b0 2]", "[b0 2, c0 4]"]
    assert [str(layout) for layout in output_layouts(rule, assignment, MESH)] == ["[a0 2, c0 4] +b0"]
    assert output_layouts(rule, {}, MESH) == (Layout.replicated((4, 8)),)
    largest = bind(parse("m k -> m"), [(4, 6)], [(4,)], {"k": "max"})
    assert str(output_layouts(largest, assignment, MESH)[0]) == "[a0 2] max(b0)"
    with pytest.raises(LayoutError, match="factor m of size 4 cannot be split over b0:3"):
        output_layouts(rule, {Y: "m"}, MESH)


@given(SEEDS, meshes())
@examples(80)
def test_factors_of_inverts_dims_layout(rng: random.Random, mesh: Mesh) -> None:
    assignment = random_assignment(RULE, mesh, rng)
    for dims in (*RULE.inputs, *RULE.outputs):
        present = {name for names in dims for name in names}
        digits = dims_layout(dims, RULE.sizes(), assignment)
        found = factors_of(digits, dims, RULE.sizes())
        assert found == {axis: name for axis, name in assignment.items() if name in present}
        assert dims_layout(dims, RULE.sizes(), found) == digits


@given(SEEDS, meshes())
@examples(80)
def test_through_a_view_and_back(rng: random.Random, mesh: Mesh) -> None:
    """The same parts lie on the same ranks on both sides of a view, and the way back leads to where one came from."""
    names = [f"f{index}" for index in range(rng.randint(1, 5))]
    sizes = {name: rng.choice([2, 3, 4, 6]) for name in names}

    def grouped(order: list[str]) -> tuple[tuple[str, ...], ...]:
        dims: list[tuple[str, ...]] = [()]
        for name in order:
            dims = [*dims, (name,)] if rng.random() < 0.5 else [*dims[:-1], (*dims[-1], name)]
        return tuple(dims)

    order = rng.sample(names, len(names))
    source, target = grouped(names), grouped(order)

    def shape(dims: tuple[tuple[str, ...], ...]) -> list[int]:
        return [math.prod(sizes[name] for name in dim) for dim in dims]

    value = torch.arange(math.prod(sizes.values())).reshape(shape(source))
    viewed = value.reshape([sizes[n] for n in names]).permute([names.index(n) for n in order]).reshape(shape(target))
    layout = random_layout(rng, shape(source), mesh, "sum")
    result = layout_through_view(layout, source, target, sizes)
    if result is None:
        assert any(
            split_digits(digits, [sizes[name] for name in dim]) is None for digits, dim in zip(layout.dims, source)
        )
        return
    assert layout_through_view(result, target, source, sizes) == layout
    assert result.partial == layout.partial
    for part, part_viewed in zip(lockstep.shard(value, layout, mesh), lockstep.shard(viewed, result, mesh)):
        assert sorted(part.flatten().tolist()) == sorted(part_viewed.flatten().tolist())


def test_through_keeps_a_strided_shard() -> None:
    """Heads of a fused ``(3 h d)`` are a strided piece of it."""
    sizes = {"q": 3, "h": 4, "d": 8, "b": 2}
    split = Layout(((2,), (3,), (X, 2), (8,)))
    fused = layout_through_view(split, (("b",), ("q",), ("h",), ("d",)), (("b",), ("q", "h", "d")), sizes)
    assert fused == Layout(((2,), (3, X, 16)))
    assert (
        layout_through_view(Layout(((2,), (X, 48))), (("b",), ("q", "h", "d")), (("b",), ("q",), ("h",), ("d",)), sizes)
        is None
    )


@given(SEEDS, meshes())
@examples(60)
def test_drop_gathers(rng: random.Random, mesh: Mesh) -> None:
    layout = random_layout(rng, random_sizes(rng), mesh, "sum")
    gone = set(rng.sample(layout.shard_axes, rng.randint(0, len(layout.shard_axes))))
    result = without_axes(layout, gone)
    assert result.global_shape == layout.global_shape and result.partial == layout.partial
    assert positions(result) == {axis: at for axis, at in positions(layout).items() if axis not in gone}


@given(SEEDS, meshes())
@examples(80)
def test_rest_is_one_gather_away(rng: random.Random, mesh: Mesh) -> None:
    """States rest inside of what each rank computes with; an axis is left out only where it divides nothing."""
    compute = random_layout(rng, random_sizes(rng), mesh)
    free = [axis for axis in mesh.axes if axis not in compute.shard_axes]
    axes = rng.sample(free, rng.randint(0, len(free)))
    rest = state_layout(compute, axes, mesh)
    gained = set(rest.shard_axes) - set(compute.shard_axes)
    assert gained <= set(axes) and rest.global_shape == compute.global_shape
    assert [step.kind for step in steps_between(rest, compute)] == ["all_gather"] * bool(gained)
    assert [step.kind for step in steps_between(compute, rest)] == ["slice"] * bool(gained)
    for axis in set(axes) - gained:
        innermost = [digits[-1] for digits in rest.dims if digits and isinstance(digits[-1], int)]
        assert all(isinstance(digit, int) and digit % axis.size for digit in innermost)


# -- changes of layout


def parts_of(value: Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator) -> list[Tensor]:
    """What the ranks hold of `value`; partial results are random, with `value` as their combination."""
    keys = list(itertools.product(*(range(axis.size) for axis in layout.partial_axes)))
    noise = {key: torch.randn(value.shape, generator=generator, dtype=value.dtype) for key in keys}
    reduce = layout.partial[0][1] if layout.partial else "sum"
    if reduce == "sum":
        noise[keys[-1]] = -sum((noise[key] for key in keys[:-1]), torch.zeros_like(value)) + value
    else:
        sign = -1 if reduce == "max" else 1
        owner = torch.randint(0, len(keys), value.shape, generator=generator)
        noise = {key: value + sign * noise[key].abs() * (owner != index) for index, key in enumerate(keys)}
    dims = layout.without_partial()
    parts = {key: lockstep.shard(noise[key], dims, mesh) for key in keys}
    return [
        parts[tuple(axis.coordinate(rank) for axis in layout.partial_axes)][rank] for rank in range(mesh.world_size)
    ]


def change(
    value: Tensor, parts: list[Tensor], have: Layout, want: Layout, mesh: Mesh
) -> tuple[fx.GraphModule, list[Tensor]]:
    """The local graph of a change of layout, and what it leaves on the ranks."""
    fake = FakeTensorMode()
    local = LocalGraph(mesh, fake)
    with fake:
        whole = torch.empty(value.shape, dtype=value.dtype)
    node = local.placeholder("value", whole, have, Origin("value"))
    result, reduced = local.redistribute_and_reduced(node, have, want, Origin("value"))
    local.graph.output((result,))
    module = fx.GraphModule(nn.Module(), local.graph)
    verify(module, "change")
    assert (reduced is not None) == bool(set(have.partial) - set(want.partial))
    return module, [results[0] for results in lockstep.run(module, mesh, [parts])]


@given(SEEDS, meshes(), st.sampled_from(["", "sum", "max", "min"]))
@examples(250)
def test_any_change_of_layout(rng: random.Random, mesh: Mesh, reduce: str) -> None:
    """Executed, it leaves the parts that cutting the value directly gives; reduced once and gathered once at most."""
    sizes = random_sizes(rng)
    have = random_layout(rng, sizes, mesh, reduce)
    kept = [item for item in have.partial if rng.random() < 0.2]
    others = Mesh(tuple(axis for axis in mesh.axes if axis not in dict(kept)))
    want = Layout(random_layout(rng, sizes, others).dims, tuple(kept))
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    value = torch.randn(sizes, generator=generator, dtype=torch.float64)
    parts = parts_of(value, have, mesh, generator)
    module, results = change(value, parts, have, want, mesh)
    for part in results:
        assert part.is_contiguous()
    if kept:
        torch.testing.assert_close(together(results, want, mesh), value, rtol=0, atol=1e-12)
    else:
        for part, expected in zip(results, lockstep.shard(value, want, mesh)):
            torch.testing.assert_close(part, expected, rtol=0, atol=1e-12)
    _check_collectives(module, have, want)


def _check_collectives(module: fx.GraphModule, have: Layout, want: Layout) -> None:
    """No more than one collective a kind, over no more axes than have to move, of no more bytes than the value has."""
    found = collectives(module)
    kinds = [what.kind for what in found]
    assert all(kinds.count(kind) <= 1 for kind in kinds)
    pending = {axis for axis, _ in have.partial} - set(want.partial_axes)
    reduced = {axis for what in found if what.kind not in ("all_gather", "all_to_all") for axis in what.axes}
    assert reduced == pending
    here, there = positions(have), positions(want)
    if all(there.get(axis) == at for axis, at in here.items()):
        assert not {"all_gather", "all_to_all"} & {*kinds}
        scattered = {axis for axis in pending if axis in there}
        assert kinds == ["reduce_scatter"] * bool(scattered) + ["all_reduce"] * bool(pending - scattered)
    whole = math.prod(have.global_shape) * 8
    assert all(what.bytes <= whole and whole % what.bytes == 0 for what in found)


def test_change_kinds() -> None:
    """One line a kind of step: what is done, and over which axes, outermost first."""
    cases = [
        (Layout(((X, 2), (6,))), Layout(((X, 2), (6,))), []),
        (Layout(((4,), (6,))), Layout(((X, 2), (Y, 2))), [("slice", (Y, X))]),
        (Layout(((X, Z), (6,))), Layout(((4,), (6,))), [("all_gather", (Z, X))]),
        (Layout(((4,), (6,)), ((X, "sum"), (Z, "sum"))), Layout(((4,), (6,))), [("all_reduce", (Z, X))]),
        (Layout(((4,), (6,)), ((X, "sum"), (Z, "sum"))), Layout(((Z, X), (6,))), [("reduce_scatter", (Z, X))]),
        (
            Layout(((Z, 2), (6,)), ((X, "sum"), (Y, "sum"))),
            Layout(((X, 2), (6,))),
            [("all_reduce", (Y, X)), ("all_gather", (Z,)), ("slice", (X,))],
        ),
        (Layout(((X, 2), (6,))), Layout(((4,), (X, 3))), [("all_to_all", (X,))]),
        (Layout(((X, Z), (6,))), Layout(((4,), (X, 3))), [("all_to_all", (X,)), ("all_gather", (Z,))]),
    ]
    for have, want, steps in cases:
        assert [(step.kind, step.axes) for step in steps_between(have, want)] == steps, (str(have), str(want))


def test_change_refuses() -> None:
    with pytest.raises(LayoutError, match="different shapes"):
        steps_between(Layout(((4,),)), Layout(((2,),)))
    with pytest.raises(LayoutError, match="cannot become the partial result"):
        steps_between(Layout(((4,),)), Layout(((4,),), ((X, "sum"),)))
    with pytest.raises(LayoutError, match="cannot become the partial result"):
        steps_between(Layout(((4,),), ((X, "max"),)), Layout(((4,),), ((X, "sum"),)))
