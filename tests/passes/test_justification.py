"""Justify: what is started ahead of its time may make an order longer than it promised."""

from __future__ import annotations

import pytest

from shardweave.cost_model.options import Options
from shardweave.passes.candidate_orders import bidirectional_schedules, order_by_begin
from shardweave.passes.list_scheduler import simulate_order
from shardweave.passes.schedule import Schedule
from tests.passes.test_list_scheduler import forced, step_of, unordered, without_slowdown


def test_where_links_are_shared_nothing_is_started_ahead_of_its_time() -> None:
    """A gather across nodes that starts ahead slows down the sums inside of one, which the layer waits for."""
    cluster = without_slowdown("rtx3090-pcie", 2)
    force = forced("tensor and zdp", 4, cluster.mesh().world_size)
    _, backward = unordered(cluster, step_of(1, 2048, 32), force, Options(precision="fp16", recompute="full"))
    fastest = bidirectional_schedules(backward)[0]
    ahead = simulate_order(backward, fastest.order)
    later = simulate_order(backward, order_by_begin(backward, fastest.begins, ahead=False))
    assert ahead.seconds > 1.04 * fastest.seconds and later.seconds < 0.99 * ahead.seconds
    assert sorted(later.order) == sorted(ahead.order)
    assert Schedule(cluster).best(backward).seconds == pytest.approx(later.seconds, rel=0.01)
