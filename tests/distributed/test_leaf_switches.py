"""Four hosts on two switches: network namespaces on two bridges, which a slower cable joins."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardweave as sw
from shardweave.cost_model import cluster as cluster_module
from shardweave.cost_model import collective_profile
from shardweave.cost_model.collective_profile import node_groups
from shardweave.ir.errors import ClusterError
from tests.distributed.namespaces import enter, remove, run, skip_without
from tests.runtime.worlds import World

ADDRESS = "10.87.0.{}"


def rate(namespace: str, interface: str, mbit: int) -> None:
    shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms")
    run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", interface, *shape)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of four namespaces, and so of their interfaces; a fifth holds the switches."""
    skip_without("ip", "tc")
    unique = f"sw{os.getpid():x}{time.monotonic_ns() % 256:x}"
    names, switches = [f"{unique}h{number}" for number in range(4)], f"{unique}s"
    inside = ("ip", "-n", switches, "link")
    try:
        try:
            for name in (*names, switches):
                run("ip", "netns", "add", name)
            for bridge in ("left", "right"):
                run(*inside, "add", bridge, "type", "bridge")
                run(*inside, "set", bridge, "up")
            run(*inside, "add", "cablel", "type", "veth", "peer", "name", "cabler")
            ports = [("cablel", "left"), ("cabler", "right")]
            for number, name in enumerate(names):
                port = f"port{number}"
                ends = (name, "netns", name, "type", "veth", "peer", "name", port, "netns", switches)
                run("ip", "link", "add", *ends)
                run("ip", "-n", name, "address", "add", f"{ADDRESS.format(number + 1)}/24", "dev", name)
                for interface in (name, "lo"):
                    run("ip", "-n", name, "link", "set", interface, "up")
                rate(name, name, 400)
                ports.append((port, "left" if number < 2 else "right"))
            for port, bridge in ports:
                run(*inside, "set", port, "master", bridge)
                run(*inside, "set", port, "up")
            for cable in ("cablel", "cabler"):
                rate(switches, cable, 100)
        except OSError as error:
            pytest.skip(f"network namespaces cannot be joined here: {error}")
        yield names
    finally:
        remove((*names, switches))


def enter_host(names: list[str], rank: int) -> None:
    enter(names[rank], names[rank], 0, 1)


def detects(cache: str) -> list[sw.Cluster]:
    os.environ["SHARDWEAVE_CACHE"] = cache
    cluster_module.BRIEF = replace(collective_profile.BRIEF, seconds=10.0)  # type: ignore[misc]
    return [sw.Cluster.detect(), sw.Cluster.detect()]


def test_hosts_on_two_switches_are_two_levels(hosts: list[str], tmp_path: Path) -> None:
    with World(detects, str(tmp_path), size=4, address=ADDRESS.format(1), enter=partial(enter_host, hosts)) as world:
        found = world.results(range(4))
    cluster, again = found[0]
    assert again == cluster and all(clusters == [cluster, cluster] for clusters in found)
    assert [(level.name, level.size) for level in cluster.levels] == [("cpu", 1), ("node", 2), ("leaf", 2)]
    node, leaf = cluster.levels[1:]
    # Two hosts share the cable, and each has a link of its own: 50 and 400 Mbit/s a host
    assert leaf.share(2) < 0.3 * node.share(1)
    assert cluster.measured is not None and "groups of 2 leaf" in cluster.measured.covered


@given(
    st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3),
    st.floats(1.0, 1.3),
    st.floats(2.0, 10.0),
    st.randoms(use_true_random=False),
)
def test_levels_are_found_in_noisy_times(sizes: list[int], noise: float, slower: float, random: object) -> None:
    nodes = 1
    for size in sizes:
        nodes *= size
    seconds = []
    for node in range(1, nodes + 1):
        level, low = 0, 1
        while level < len(sizes) - 1 and node % (low := low * sizes[level]) == 0:
            level += 1
        seconds.append(slower**level * random.uniform(1.0, noise))  # type: ignore[attr-defined]
    groups = node_groups(seconds)
    assert [group.size for group in groups] == sizes
    ratios = [after.slowdown / before.slowdown for before, after in zip(groups, groups[1:])]
    assert all(slower / 1.3 <= ratio <= slower * 1.3 for ratio in ratios)


def test_a_machine_is_given_its_switches() -> None:
    plain = sw.Cluster.preset("dgx-a100", nodes=8)
    found = plain.with_node_groups([(2, 1.0), (4, 5.0)])
    assert found.world_size == plain.world_size and found.levels[:2] == plain.resized(node=2).levels
    assert found.levels[2].shared_bandwidth == pytest.approx((plain.levels[1].shared_bandwidth or 0) / 5) or (
        plain.levels[1].shared_bandwidth is None
    )
    with pytest.raises(ClusterError):
        plain.with_node_groups([(0, 1.0)])
