"""Predicted peak memory is what the allocator measures on real ranks, to the byte but for the optimizer's counters."""

from __future__ import annotations

import pytest

from docs.measure_memory import measure_all, prepare
from shardweave.runtime.launch import WorkerPool
from tests.models import ZOO

WAYS = {"gpt": ["zdp", "zero2", "column", "zero1 x2", "zero2 x4"], "mlp": ["planned"]}


@pytest.mark.parametrize("name", WAYS)
def test_the_predicted_peak_is_the_measured_one(name: str, pool: WorkerPool) -> None:
    prepared = prepare(ZOO[name], 2, WAYS[name])
    assert [way for way, _, _ in prepared] == WAYS[name]
    ranks = pool.run(measure_all, name, 2, [plan.to_dict() for _, plan, _ in prepared], nprocs=2, timeout=300.0)
    for (way, _, timeline), *figures in zip(prepared, *ranks, strict=True):
        for found in figures:
            assert timeline.peak_memory == pytest.approx(found.peak, rel=0.02), way
            assert sum(timeline.memory.at_rest().values()) == pytest.approx(found.rest, rel=0.01), way
