"""Streams: fair shares of links, and collectives and compute that slow each other down, by hand and by law."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.cost_model.collectives import Demand
from shardweave.cost_model.streams import Contention, Streams, Transfer, fair_rates

USES = st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 1.0), max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(USES, max_size=6))
def test_rates_are_max_min_fair(uses: list[dict[str, float]]) -> None:
    """No link is overfull; whoever is slower than alone crosses a full link on which nobody is faster."""
    rates = fair_rates(uses)
    load = {level: sum(rate * use.get(level, 0.0) for rate, use in zip(rates, uses)) for level in "abc"}
    assert all(part <= 1 + 1e-9 for part in load.values())
    for rate, use in zip(rates, uses, strict=True):
        assert 0 < rate <= 1 + 1e-9
        if rate < 1 - 1e-9:
            full = [level for level in use if load[level] > 1 - 1e-9]
            fastest = [max(r for r, u in zip(rates, uses) if level in u) for level in full]
            assert any(rate >= other - 1e-9 for other in fastest)
    if uses:
        assert sum(rates) >= 1 - 1e-9, "together they move at least as fast as one after another"


def test_half_of_the_links_for_twice_as_long() -> None:
    """The second begins when the first has moved half of its bytes; then both move at half speed."""
    streams = Streams()
    first, second = (Transfer(name, Demand(0.0, 2.0, {"node": 1.0})) for name in ("x", "y"))
    streams.start(first)
    assert streams.compute(1.0) == 1.0
    streams.start(second)
    assert streams.wait(first) == pytest.approx(2.0)  # one second of bytes left, at half speed
    assert streams.wait(second) == pytest.approx(1.0)
    assert streams.busy["node"] == pytest.approx(4.0) and streams.now == pytest.approx(4.0)
    assert [load for _, load in streams.loads] == [{"node": 1.0}, {"node": 1.0}, {"node": 1.0}, {}]


def test_latencies_of_two_groups_pass_together() -> None:
    streams = Streams()
    both = [Transfer(name, Demand(3.0, 0.0, {})) for name in ("x", "y")]
    for transfer in both:
        streams.start(transfer)
    assert streams.wait(both[1]) == 3.0 and both[0].end == 3.0


def test_a_group_of_one_takes_no_time() -> None:
    streams = Streams(Contention(2.0))
    nothing = Transfer("", Demand(0.0, 0.0, {}))
    streams.start(nothing)
    assert nothing.end == 0.0 and not streams.running
    assert streams.compute(1.0) == 1.0


def test_the_host_launches_collectives_one_after_another() -> None:
    """It runs ahead while the device computes; where it is behind, the device waits, and links go on."""
    streams = Streams(Contention(2.0), launch=2.0)
    first, second = (Transfer(name, Demand(0.0, 1.0, {"node": 1.0})) for name in ("x", "y"))
    assert streams.start(first) == 2.0  # nothing was there to run ahead of
    assert streams.start(second) == 2.0 and first.end == pytest.approx(3.0)
    assert streams.wait(second) == pytest.approx(1.0)
    streams.compute(5.0)
    third = Transfer("x", Demand(0.0, 1.0, {"node": 1.0}))
    assert streams.start(third) == 0.0 and streams.launched == 6.0


def test_compute_recovers_its_speed_when_the_link_rests() -> None:
    streams = Streams(Contention(2.0))
    streams.start(Transfer("x", Demand(1.0, 1.0, {"gpu": 0.5})))
    assert streams.compute(3.0) == pytest.approx(4.0)  # two seconds for the first, two for the other two
    assert streams.busy["gpu"] == pytest.approx(0.5)


def test_compute_and_collectives_slow_each_other_down_while_both_run() -> None:
    streams = Streams(Contention(compute=1.5, collectives=2.0))
    moved = Transfer("x", Demand(0.0, 2.0, {"gpu": 1.0}))
    streams.start(moved)
    assert streams.compute(1.0) == pytest.approx(1.5)  # while it moves half as fast
    assert streams.wait(moved) == pytest.approx(2.0 - 1.5 / 2)
    late = Transfer("x", Demand(0.0, 1.0, {"gpu": 1.0}))
    streams.start(late)
    assert streams.compute(2.0) == pytest.approx(2.0 + 2.0 - 2.0 / 1.5)  # it ends first
