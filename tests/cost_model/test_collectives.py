"""Collectives: the laws that any machine keeps, and the bandwidths that were measured on real ones."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardweave.cost_model import Cluster, collective_seconds
from shardweave.cost_model.collectives import COLLECTIVE_KINDS, crossed_level
from shardweave.ir import Axis, axes_size
from shardweave.ir.errors import ClusterError

GiB = 2**30
PRESETS = {name: Cluster.preset(name, nodes=4) for name in Cluster.presets()}
machines = st.builds(
    lambda cluster, nodes: cluster.resized(node=nodes), st.sampled_from(list(PRESETS.values())), st.integers(1, 8)
)
kinds = st.sampled_from(COLLECTIVE_KINDS)
sizes = st.integers(0, 2**36)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Cluster, tuple[Axis, ...]]:
    cluster = draw(machines)
    axes = cluster.mesh().axes
    return cluster, tuple(axis for axis in axes if draw(st.booleans()))


def bus_bandwidth(cluster: Cluster, axes: tuple[Axis, ...]) -> float:
    """Bytes/s of a large all-gather, in the convention of nccl-tests."""
    group = axes_size(axes)
    num_bytes = 2.0**44
    return num_bytes * (group - 1) / group / collective_seconds("all_gather", num_bytes, axes, cluster)


@settings(deadline=None)
@given(groups(), kinds, sizes, sizes)
def test_time_is_positive_and_grows_with_bytes(
    group: tuple[Cluster, tuple[Axis, ...]], kind: str, one: int, other: int
) -> None:
    cluster, axes = group
    less, more = (collective_seconds(kind, size, axes, cluster) for size in sorted((one, other)))
    assert 0 <= less <= more < math.inf
    assert (less > 0) == bool(axes)


@settings(deadline=None)
@given(groups(), sizes)
def test_a_rings_all_reduce_is_a_reduce_scatter_and_an_all_gather_in_one_start(
    group: tuple[Cluster, tuple[Axis, ...]], size: int
) -> None:
    cluster, axes = group
    assume(axes)
    parts = [collective_seconds(kind, size, axes, cluster, "ring") for kind in ("reduce_scatter", "all_gather")]
    whole = collective_seconds("all_reduce", size, axes, cluster, "ring")
    assert whole == pytest.approx(sum(parts) - cluster.device.collective_latency)


@settings(deadline=None)
@given(groups(), kinds, sizes, st.randoms())
def test_the_order_of_the_axes_does_not_matter(
    group: tuple[Cluster, tuple[Axis, ...]], kind: str, size: int, random: object
) -> None:
    cluster, axes = group
    assert collective_seconds(kind, size, axes[::-1], cluster) == collective_seconds(kind, size, axes, cluster)


@settings(deadline=None)
@given(groups())
def test_no_group_beats_the_line_rate_of_a_level_it_crosses(group: tuple[Cluster, tuple[Axis, ...]]) -> None:
    cluster, axes = group
    assume(axes)
    members = devices = 1
    for level in cluster.levels:
        inside = [axis for axis in axes if devices <= axis.stride < devices * level.size]
        if inside:
            entrance = min(level.shared_bandwidth or math.inf, devices * level.bandwidth)
            assert bus_bandwidth(cluster, axes) <= entrance * members / devices * (1 + 1e-9)
        members *= axes_size(inside)
        devices *= level.size


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "perlmutter"])
def test_groups_that_cross_the_network_share_a_nodes_links(name: str) -> None:
    """AxoNN, equation 10: with half as many members in a node, a group has half of the node's links."""
    cluster = PRESETS[name]
    inner, nodes = cluster.mesh().axes[:-2], cluster.mesh().axes[-2:]
    rates = [bus_bandwidth(cluster, (*inner[start:], *nodes)) for start in range(len(inner) + 1)]
    for wide, narrow in pairwise(rates):
        assert narrow == pytest.approx(wide / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("inner", "mine", "measured"),
    [(1, 2, 76), (1, 4, 225), (1, 8, 80), (1, 16, 80), (2, 2, 76), (2, 4, 40), (2, 8, 40), (4, 2, 20), (4, 8, 20)],
)
def test_perlmutter_as_measured(inner: int, mine: int, measured: float) -> None:
    """GiB/s in AxoNN's code, examples/comm_model.py, by the size of the groups inside this one and its own."""
    cluster = Cluster.preset("perlmutter", nodes=16)
    axes = cluster.mesh().axes
    group = axes[int(math.log2(inner)) : int(math.log2(inner * mine))]
    assert bus_bandwidth(cluster, group) / GiB == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("inner", "mine", "measured"),
    [(1, 2, 129), (1, 4, 52), (1, 8, 135), (1, 16, 40), (2, 2, 50), (2, 4, 72), (2, 8, 20), (4, 2, 36), (4, 4, 10)],
)
def test_frontier_as_measured(inner: int, mine: int, measured: float) -> None:
    """As above; its GPUs are linked by no regular mesh, so that pairs of them fall up to a factor of two short."""
    cluster = Cluster.preset("frontier", nodes=16)
    axes = cluster.mesh().axes
    group = axes[int(math.log2(inner)) : int(math.log2(inner * mine))]
    assert 0.45 < bus_bandwidth(cluster, group) / GiB / measured < 1.1


def test_latency_counts_the_hops_of_the_ring() -> None:
    cluster = Cluster.preset("dgx-a100", nodes=4)
    gpu, node = (level.latency for level in cluster.levels)
    start = cluster.device.collective_latency
    axes = cluster.mesh().axes
    assert collective_seconds("all_gather", 0, axes, cluster) == pytest.approx(start + 3 * node + 4 * 7 * gpu)
    assert collective_seconds("all_reduce", 0, axes[3:], cluster, "ring") == pytest.approx(start + 2 * 3 * node)
    assert collective_seconds("all_reduce", 0, axes[3:], cluster, "tree") == pytest.approx(start + 2 * 2 * node)


def test_an_all_to_all_sends_only_what_leaves() -> None:
    cluster = Cluster.preset("perlmutter", nodes=2)
    level = cluster.levels[-1]
    seconds = collective_seconds("all_to_all", 1e12, cluster.mesh().axes, cluster)
    assert seconds == pytest.approx(1e12 * 0.5 / (level.bandwidth * level.efficiency), rel=1e-3)


def test_the_outermost_level_crossed() -> None:
    cluster = Cluster.preset("frontier", nodes=2)
    axes = cluster.mesh().axes
    assert [crossed_level([axis], cluster) for axis in axes] == ["gcd", "gpu", "gpu", "node"]
    assert crossed_level(axes[:3], cluster) == "gpu"
    assert crossed_level([], cluster) == ""


def test_an_unknown_kind_and_foreign_axes_are_errors() -> None:
    cluster = Cluster.preset("perlmutter")
    with pytest.raises(ClusterError, match="all_reduce, all_gather"):
        collective_seconds("scan", 1, cluster.mesh().axes, cluster)
    for axis in (Axis("gpu0", 2, 4), Axis("gpu0", 8, 1), Axis("gpu0", 3, 1)):
        with pytest.raises(ClusterError, match="do not fit perlmutter"):
            collective_seconds("all_reduce", 1, [axis], cluster)
