"""Tables of changes of layout against the steps of each change."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

import shardweave as sw
from shardweave.cost_model import collective_demand
from shardweave.ir import Layout, Mesh
from shardweave.ir.layout import steps_between
from shardweave.passes import FULL_BUCKET_RATIO
from shardweave.planner.problem.resharding_costs import Prices, group_axes, moves_between
from shardweave.sharding.propagate import attainable_layout
from tests.ir.test_layout_algebra import random_layout, random_sizes
from tests.passes.harness import examples, mesh_of

SEEDS = st.integers(0, 10**6).map(random.Random)
MESHES = st.sampled_from([mesh_of(2, 2, 2), mesh_of(2, 3, 2), mesh_of(3, 3), mesh_of(8, 2)])


def expected(have: Layout, want: Layout) -> list[tuple[str, tuple[object, ...], int]]:
    return [
        (step.kind, step.axes, max(numel(step.before), numel(step.after)))
        for step in steps_between(have, attainable_layout(want, have))
    ]


def numel(layout: Layout) -> int:
    result = 1
    for size in layout.local_shape:
        result *= size
    return result


@given(SEEDS, MESHES, st.sampled_from(["", "sum", "max"]), st.booleans())
@examples(300)
def test_tables_have_the_steps_of_each_change(rng: random.Random, mesh: Mesh, reduce: str, paired: bool) -> None:
    """Any layouts, strided and out of order too, some of them wanted as partial as they are."""
    sizes = random_sizes(rng)
    rows, columns = rng.randint(0, 5), rng.randint(0, 5)
    haves = [random_layout(rng, sizes, mesh, reduce) for _ in range(rows)]
    wants = [random_layout(rng, sizes, mesh, rng.choice(["", reduce])) for _ in range(rows if paired else columns)]
    moves = moves_between(haves, wants, mesh.axes, paired)
    for row, have in enumerate(haves):
        for column, want in enumerate(wants):
            if paired and row != column:
                continue
            at = row if paired else (row, column)
            found = [
                (move.kind, group_axes(int(move.groups[at]), mesh.axes), int(move.numel[at]))
                for move in moves
                if move.groups[at]
            ]
            assert found == expected(have, want), (str(have), str(want))


@given(st.lists(st.integers(1, 2**24), min_size=1, max_size=8), st.sampled_from(["rtx3090-pcie", "dgx-a100"]))
@examples(100)
def test_reductions_in_buckets_have_a_latency_and_at_most_as_many_as_alone(sizes: list[int], preset: str) -> None:
    """Between one bucket of all and one for each; of a bucket that is full, its latency is lost in what it moves."""
    cluster = sw.Cluster.preset(preset, nodes=2)
    mesh, total = cluster.mesh(), sum(sizes)
    prices = Prices(mesh, cluster, merged_bytes=total)
    merged = sum(prices.collective("all_reduce", mesh.axes, size, is_merged=True)[1:].max() for size in sizes)
    alone = [collective_demand("all_reduce", size, mesh.axes, cluster) for size in sizes]
    latencies, transfer = [each.latency for each in alone], sum(each.transfer for each in alone)
    slack = 1 + 1e-9
    assert (min(latencies) + transfer) / slack <= merged <= sum(each.seconds for each in alone) * slack
    if all(each.transfer < FULL_BUCKET_RATIO * each.latency for each in alone):
        assert merged <= (max(latencies) + transfer * (1 + 1 / FULL_BUCKET_RATIO)) * slack


def test_what_ranks_own_is_summed_with_what_is_partial() -> None:
    """One reduction for both, unless it is wanted as it is owned."""
    mesh = mesh_of(2, 2)
    first, second = mesh.axes
    have = Layout(((8,),), ((first, "own"), (second, "sum")))
    for want in (
        Layout(((8,),)),
        Layout(((8,),), ((first, "own"),)),
        Layout(((first, 4),)),
        Layout(((8,),), ((second, "own"),)),
    ):
        (move, *rest) = moves_between([have], [want], mesh.axes)
        found = [(m.kind, group_axes(int(m.groups[0, 0]), mesh.axes), int(m.numel[0, 0])) for m in (move, *rest)]
        assert found == expected(have, want)
