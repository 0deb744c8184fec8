"""The candidates of an op: AMSP's sharding factors are all among them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import shardweave as sw
from shardweave.ir import Axis, Mesh
from shardweave.planner.problem.candidates import strategies

MESH = Mesh.of_levels([("gpu", 8), ("node", 4)])


@pytest.mark.parametrize(("micro_batches", "count"), [(1, 21), (4, 36)])
def test_all_sharding_factors_of_amsp_are_candidates(micro_batches: int, count: int) -> None:
    """Equations 2 to 7 of arXiv 2311.00257: degrees that divide each other, gradients sharded as one of the others."""
    times = (Axis("micro", micro_batches, 32, "time"),) if micro_batches > 1 else ()
    mesh = replace(MESH, micro_batch_axes=times)
    data_parallel = [each for each in strategies(mesh) if each.degree == 1]
    found = {(each.rest, each.gradients, each.states) for each in data_parallel}
    degrees = [1, 2, 4, 8, 16, 32]
    factors = {
        (parameters, gradients, states)
        for parameters, gradients, states in product(degrees, repeat=3)
        if parameters <= states and gradients in ((parameters, states) if micro_batches > 1 else (states,))
    }
    assert found == factors and len(found) == count


def test_no_two_candidates_of_an_op_are_the_same() -> None:
    found = [*strategies(MESH)]
    assert len(found) == len({*found})
    assert {each.grid.size for each in found} == {32}
    assert sw.Strategy(sw.Grid(data=32), 8, states=16) in found
