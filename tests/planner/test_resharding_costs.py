"""Tables of changes of layout against the steps of each change."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shardweave.ir import Layout, Mesh
from shardweave.ir.layout import steps_between
from shardweave.planner.problem.resharding_costs import group_axes, moves_between
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
