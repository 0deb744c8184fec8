"""Measured collectives: tables, their interpolation, and clusters that carry them."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.cost_model import Cluster, CollectiveTable, Curve, Measured, collective_seconds
from shardweave.cost_model.collective_profile import ProfileEffort, _measure_sizes, fit_links
from shardweave.cost_model.collectives import collective_algorithm, collective_demand
from shardweave.ir.errors import ClusterError

Formula = Callable[[float], float]

formulas = st.builds(
    lambda alpha, beta: lambda size: alpha + beta * size, st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-8)
)


@st.composite
def curves(draw: st.DrawFn, rising: bool = False) -> Curve:
    sizes = sorted(draw(st.sets(st.integers(1, 2**30), min_size=1, max_size=8)))
    times = [draw(st.floats(1e-6, 10)) for _ in sizes]
    return Curve("all_reduce", (4,), tuple(map(float, sizes)), tuple(sorted(times) if rising else times))


@settings(deadline=None)
@given(curves(), formulas)
def test_a_curve_passes_its_points(curve: Curve, formula: Formula) -> None:
    for size, seconds in zip(curve.bytes, curve.seconds, strict=True):
        assert curve.at(size, formula) == seconds


@settings(deadline=None)
@given(curves(), formulas, st.lists(st.floats(0, 2**32), min_size=2, max_size=20))
def test_between_two_points_a_curve_rises_as_they_do_and_stays_between_them(
    curve: Curve, formula: Formula, sizes: list[float]
) -> None:
    for (low, high), (before, after) in zip(pairwise(curve.bytes), pairwise(curve.seconds), strict=True):
        inside = [curve.at(size, formula) for size in sorted(sizes) if low <= size <= high]
        assert all(min(before, after) <= seconds <= max(before, after) for seconds in inside)
        for one, other in pairwise(inside):
            assert (other - one) * (after - before) >= -1e-12 * before * after


@settings(deadline=None)
@given(curves(rising=True), formulas, st.lists(st.floats(0, 2**32), min_size=2, max_size=20))
def test_rising_points_make_a_rising_curve_beyond_them_too(curve: Curve, formula: Formula, sizes: list[float]) -> None:
    seconds = [curve.at(size, formula) for size in sorted(sizes)]
    assert all(one <= other * (1 + 1e-9) for one, other in pairwise(seconds))


@settings(deadline=None)
@given(curves(), formulas)
def test_there_is_no_jump_where_the_points_end(curve: Curve, formula: Formula) -> None:
    assert curve.at(curve.bytes[0] * (1 - 1e-9), formula) == pytest.approx(curve.seconds[0], rel=1e-6)
    assert curve.at(curve.bytes[-1] * (1 + 1e-9), formula) == pytest.approx(curve.seconds[-1], rel=1e-6)
    far = 1e3 * curve.bytes[-1]
    assert curve.at(far, formula) / curve.seconds[-1] == pytest.approx(formula(far) / formula(curve.bytes[-1]))


@given(latency=st.floats(0, 1e-2), rate=st.floats(1e6, 1e11), size=st.floats(1, 1e9))
def test_a_curve_of_a_latency_and_a_rate_gives_them_back(latency: float, rate: float, size: float) -> None:
    """Sizes by factors of 16 are measured: between them the time is that of the alpha-beta model."""
    sizes = (4e3, 64e3, 1e6, 16e6)

    def seconds(num_bytes: float) -> float:
        return latency + num_bytes / rate

    curve = Curve("all_gather", (2,), sizes, tuple(map(seconds, sizes)))
    assert curve.at(size, seconds) == pytest.approx(seconds(size))
    assert curve.latency(size) == pytest.approx(latency, abs=1e-9 * seconds(16e6))


def test_the_latency_of_a_measured_collective_is_measured_too() -> None:
    """The formulas are fitted to all kinds together, which may start at very different speeds."""
    curve = replace(CURVE, bytes=(4e3, 64e3, 1e6), seconds=(3e-3, 3e-3, 12e-3))
    cluster = carrying(LOCAL, curve)
    axes = LOCAL.mesh().axes
    small, large = (collective_demand("all_reduce", size, axes, cluster) for size in (1e4, 5e5))
    assert (small.latency, small.transfer) == pytest.approx((3e-3, 0.0), abs=1e-12)
    assert large.latency == pytest.approx(3e-3 - 9e-3 * 64e3 / (1e6 - 64e3))
    assert large.seconds == pytest.approx(3e-3 + 9e-3 * (5e5 - 64e3) / (1e6 - 64e3))


def carrying(cluster: Cluster, *found: Curve) -> Cluster:
    return replace(cluster, measured=Measured(CollectiveTable(found), key="abc", covered="some"))


LOCAL = Cluster.local(4)
CURVE = Curve("all_reduce", (4, 1), (1e3, 1e6), (1e-3, 5e-3))


def test_the_table_goes_before_the_formula_where_it_has_kind_and_placement() -> None:
    cluster, axes = carrying(LOCAL, CURVE), LOCAL.mesh().axes
    assert collective_seconds("all_reduce", 1e6, axes, cluster) == 5e-3
    assert collective_algorithm("all_reduce", 1e6, axes, cluster) == "measured"
    assert collective_demand("all_reduce", 1e6, axes, cluster).seconds == pytest.approx(5e-3)
    beyond = collective_seconds("all_reduce", 2e6, axes, LOCAL) / collective_seconds("all_reduce", 1e6, axes, LOCAL)
    assert collective_seconds("all_reduce", 2e6, axes, cluster) == pytest.approx(5e-3 * beyond)
    for call in (("all_gather", axes, None), ("all_reduce", axes[:1], None), ("all_reduce", axes, "ring")):
        kind, group, algorithm = call
        expected = collective_seconds(kind, 1e6, group, LOCAL, algorithm)
        assert collective_seconds(kind, 1e6, group, cluster, algorithm) == expected
    assert collective_seconds("all_reduce", 1e6, (), cluster) == 0


def test_what_is_measured_is_part_of_the_cluster(tmp_path: Path) -> None:
    cluster = carrying(LOCAL, CURVE)
    assert cluster != LOCAL and cluster.fingerprint != LOCAL.fingerprint
    assert carrying(LOCAL, replace(CURVE, seconds=(1e-3, 6e-3))).fingerprint != cluster.fingerprint
    cluster.save(tmp_path / "cluster.yaml")
    for twin in (Cluster.load(tmp_path / "cluster.yaml"), pickle.loads(pickle.dumps(cluster))):
        assert twin == cluster and hash(twin) == hash(cluster)
        assert twin.measured is not None and twin.measured.covered == "some"


def test_more_nodes_keep_what_is_measured_and_other_nodes_do_not() -> None:
    cluster = carrying(LOCAL, CURVE)
    assert cluster.resized(node=3).measured == cluster.measured
    assert cluster.resized(cpu=8).measured is None
    assert cluster.resized(cpu=4).measured == cluster.measured


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes": [1e6, 1e3]}, "all_reduce over 4x1.bytes: expected rising sizes"),
        ({"seconds": [1e-3]}, "expected as many bytes as seconds, at least one, got 2 and 1"),
        ({"seconds": [1e-3, 0]}, "all_reduce over 4x1.seconds: expected a number above 0, got 0.0"),
        ({"seconds": [1e-3, "soon"]}, "expected a number above 0, got 'soon'"),
        ({"bytes": 7}, r"measured.collectives[0].bytes: expected a list of numbers, got 7"),
        ({"members": [4, 0]}, r"measured.collectives[0].members: expected a whole number above 0, got 0"),
        ({"colour": 1}, r"measured.collectives[0].colour: expected one of kind, members"),
        ({"kind": "scan"}, "measured.collectives: no collective is called 'scan'"),
        ({"members": [4]}, "expected one count for each of the levels cpu, node"),
        ({"members": [8, 1]}, "expected one count for each of the levels cpu, node"),
    ],
)
def test_a_wrong_table_in_a_file_names_key_expectation_and_value(change: dict[str, Any], message: str) -> None:
    data = carrying(LOCAL, CURVE).to_dict()
    data["measured"]["collectives"][0] |= change
    with pytest.raises(ClusterError) as caught:
        Cluster.from_dict(data)
    assert message in str(caught.value)


def test_a_table_has_each_placement_once() -> None:
    with pytest.raises(ClusterError, match="each kind and placement once"):
        CollectiveTable((CURVE, CURVE))
    with pytest.raises(ClusterError, match="measured.collectives: expected a list of curves, got 3"):
        Measured.from_dict({"collectives": 3})


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3), st.floats(1e8, 1e11), st.sets(st.sampled_from([2, 3, 4, 6, 12])))
def test_links_are_fitted_to_what_they_gave(start: float, latency: float, bandwidth: float, counts: set[int]) -> None:
    """From collectives that a machine priced, its constants come back."""
    base = Cluster.local(12)
    level = replace(base.levels[0], latency=latency, bandwidth=bandwidth)
    true = replace(base, levels=(level, *base.levels[1:]), device=replace(base.device, collective_latency=start))
    found = []
    for count in sorted(counts | {2, 12}):
        axes = [
            axis for axis in true.mesh().axes if math.gcd(axis.stride * axis.size, count) == axis.stride * axis.size
        ]
        if math.prod(axis.size for axis in axes) != count:
            continue
        sizes = tuple(float(4**k) for k in range(5, 15))
        times = tuple(collective_seconds("all_gather", size, axes, true) for size in sizes)
        found.append(Curve("all_gather", (count, 1), sizes, times))
    again = fit_links(carrying(base, *found))
    for size in (1e3, 1e9):
        axes = true.mesh().axes
        expected = collective_seconds("reduce_scatter", size, axes, true)
        assert collective_seconds("reduce_scatter", size, axes, again) == pytest.approx(expected, rel=1e-3)
    assert again.levels[1] == base.levels[1]


@pytest.mark.parametrize("rate", [1e7, 1e8])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_the_rate_of_a_link_is_that_of_large_transfers(kind: str, rate: float) -> None:
    """A shaped link lets the first 64 KiB pass at once; each of two ranks sends half of the bytes."""
    sizes = (4096.0, 65536.0, 262144.0, 1048576.0)
    times = tuple(1e-3 + max(0.0, size / 2 - 65536) / rate for size in sizes)
    fitted = fit_links(carrying(Cluster.local(2), Curve(kind, (2, 1), sizes, times)))
    assert fitted.levels[0].bandwidth == pytest.approx(rate, rel=0.35)


class TakenSizes:
    """What a profile measures, on a link of `rate` bytes per second, and the clock that it reads."""

    def __init__(self, rate: float) -> None:
        self.rate, self.clock = rate, 0.0
        self.seconds: dict[int, list[float]] = {}

    def first(self, size: int, agree: TakenSizes) -> str:
        self.seconds[size] = [1e-3 + size / self.rate]
        self.clock += 3 * self.seconds[size][0]
        return ""

    def now(self) -> float:
        return self.clock


@pytest.mark.parametrize(
    ("rate", "until", "expected"),
    [
        (1e10, 60.0, [4, 64, 1024, 16384]),
        (1e7, 60.0, [4, 64, 256]),  # from 64 KiB on, 1 MiB seems to take 121 ms, more than the 50 of a call
        (1e7, 0.1, [4, 64]),  # 256 KiB seems to take more than is left
        (1e6, 0.1, [4, 16]),
        (1e3, 1.0, [4]),
    ],
)
def test_a_size_that_would_take_too_long_gives_way_to_a_smaller_one(
    rate: float, until: float, expected: list[int]
) -> None:
    taken: Any = TakenSizes(rate)
    sizes = [4**k * 1024 for k in range(1, 9)]
    why = _measure_sizes(taken, taken, sizes, until, ProfileEffort("brief", 5.0, 2, False, call_seconds=0.05))
    assert [size // 1024 for size in taken.seconds] == expected
    assert why.startswith(f"more than {expected[-1]} KiB" if rate < 1e10 else "")


def test_a_measurement_quicker_than_the_formulas_latency_is_still_a_demand() -> None:
    cluster = carrying(LOCAL, replace(CURVE, seconds=(1e-7, 2e-7)))
    for size in (1e3, 1e6):
        demand = collective_demand("all_reduce", size, LOCAL.mesh().axes, cluster)
        assert demand.latency > 0 and demand.transfer > 0
        assert demand.seconds == pytest.approx(2e-7 if size > 1e3 else 1e-7)


def test_no_link_is_fitted_a_latency_below_nothing() -> None:
    """Times that grow faster than the bytes, as caches make them, would need one."""
    curves = [
        Curve(kind, (count, 1), (1e3, 1e5, 1e7), (1e-7, 1e-4, 1.0))
        for kind in ("all_gather", "all_reduce")
        for count in (2, 4)
    ]
    fitted = fit_links(carrying(LOCAL, *curves))
    assert fitted.levels[0].latency >= 0 and fitted.device.collective_latency >= 0
    assert fitted.levels[0].bandwidth > 0 and fitted.levels[0].bandwidth != LOCAL.levels[0].bandwidth
