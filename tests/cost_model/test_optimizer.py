"""The optimizer's step: bound by memory where parameters are large, by the host where they are many and small."""

from __future__ import annotations

import pytest

from shardweave.cost_model import Cluster
from shardweave.cost_model.node_cost import optimizer_seconds

GPU, CPU = Cluster.preset("dgx-a100"), Cluster.local(2)


def rate(cluster: Cluster) -> float:
    return cluster.device.memory_bandwidth * cluster.device.memory_efficiency


@pytest.mark.parametrize(("states", "passes"), [(0.0, 3), (1.0, 8), (2.0, 20)])
def test_a_large_parameter_is_bound_by_memory(states: float, passes: int) -> None:
    assert optimizer_seconds([2**32], states, GPU) == pytest.approx(passes * 2**32 / rate(GPU))


def test_many_small_ones_are_bound_by_the_host() -> None:
    assert optimizer_seconds([64] * 200, 2.0, GPU) == pytest.approx(100 * optimizer_seconds([64] * 2, 2.0, GPU))
    assert optimizer_seconds([64] * 200, 2.0, GPU) > 20 * 200 * 64 / rate(GPU)


def test_on_a_cpu_the_host_is_the_device() -> None:
    one, two = optimizer_seconds([2**30], 2.0, CPU), optimizer_seconds([2**29] * 2, 2.0, CPU)
    assert two > one > 20 * 2**30 / rate(CPU)


@pytest.mark.parametrize("cluster", [GPU, CPU])
def test_more_state_takes_longer(cluster: Cluster) -> None:
    times = [optimizer_seconds([2**20], states, cluster) for states in (0.0, 0.5, 1.0, 2.0)]
    assert times == sorted(times) and times[0] < times[-1]
