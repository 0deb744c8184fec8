"""Two hosts: two network namespaces that a pair of virtual interfaces joins, as a cable joins two machines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardweave as sw
from shardweave.ir.errors import LostRankError
from tests.distributed.namespaces import enter, remove, run, skip_without
from tests.runtime.worlds import World

X = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TIMEOUT = 3.0


@dataclass(frozen=True)
class Hosts:
    """The names of the namespaces, and of the interfaces in them."""

    names: tuple[str, str]
    interfaces: tuple[str, str]

    def enter(self, rank: int) -> None:
        """Move this process to the host of a rank, two ranks to each."""
        host = rank // 2
        enter(self.names[host], self.interfaces[host], rank % 2, 2)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    skip_without("ip")
    unique = f"{os.getpid():x}{time.monotonic_ns() % 4096:x}"
    made = Hosts((f"sw-{unique}-a", f"sw-{unique}-b"), (f"sw{unique}a", f"sw{unique}b"))
    try:
        try:
            for name in made.names:
                run("ip", "netns", "add", name)
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        one, other = made.interfaces
        ends = one, "netns", made.names[0], "type", "veth", "peer", "name", other, "netns", made.names[1]
        run("ip", "link", "add", *ends)
        for number, (name, interface) in enumerate(zip(made.names, made.interfaces, strict=True), 1):
            run("ip", "-n", name, "address", "add", f"10.83.0.{number}/24", "dev", interface)
            run("ip", "-n", name, "link", "set", interface, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        remove(made.names)


class Model(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def steps(model: nn.Module, count: int) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(count):
        loss = model(X)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trains(folder: Path, several: bool) -> tuple[list[int], list[float], dict[str, Tensor]]:
    if several:  # of several interfaces, too, the groups made here take those that torch takes
        os.environ["GLOO_SOCKET_IFNAME"] += "," + os.environ["GLOO_SOCKET_IFNAME"]
    cluster = sw.Cluster.detect()
    parallel = sw.compile_parallel(Model(), cluster, X, options=sw.Options(force={"*": "zero3"}))
    losses = steps(parallel, 3)
    sw.save_checkpoint(folder, parallel)
    other = sw.compile_parallel(Model(), cluster, X, options=sw.Options(force={"*": "tensor:2+zero1"}))
    sw.load_checkpoint(folder, other)
    return [level.size for level in cluster.levels], losses, other.full_state_dict()


@pytest.mark.parametrize("several", [False, True])
def test_training_over_two_hosts_is_that_of_one_device(hosts: Hosts, tmp_path: Path, several: bool) -> None:
    reference = Model()
    losses = steps(reference, 3)
    with World(trains, tmp_path / "saved", several, size=4, address="10.83.0.1", enter=hosts.enter) as world:
        for levels, found, state in world.results(range(4)):
            assert levels == [2, 2]
            assert found == pytest.approx(losses, rel=1e-12)
            torch.testing.assert_close(state, dict(reference.state_dict()))


def cut_off(folder: Path, where: str) -> tuple[str, float]:
    force = {"*": "zero3"}
    parallel = sw.compile_parallel(Model(), sw.Cluster.detect(), X, options=sw.Options(force=force))
    steps(parallel, 1)
    sw.save_checkpoint(folder, parallel)
    (folder.parent / f"ready{dist.get_rank()}").touch()
    while not (folder.parent / "cut").exists():
        time.sleep(0.02)
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: parallel(X),
        "save": lambda: sw.save_checkpoint(folder, parallel),
    }
    begun = time.monotonic()
    with pytest.raises(LostRankError) as caught:
        calls[where]()
    return str(caught.value), time.monotonic() - begun


@pytest.mark.parametrize("where", ["forward", "save"])
def test_a_cut_link_ends_both_hosts_after_the_timeout(hosts: Hosts, tmp_path: Path, where: str) -> None:
    saved = tmp_path / "saved"
    with World(
        cut_off, saved, where, size=4, timeout=TIMEOUT, address="10.83.0.1", enter=hosts.enter
    ) as world:
        deadline = time.monotonic() + 90.0
        while len(list(tmp_path.glob("ready*"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        run("ip", "-n", hosts.names[0], "link", "set", hosts.interfaces[0], "down")
        (tmp_path / "cut").touch()
        for rank, (message, seconds) in enumerate(world.results(range(4))):
            assert f"rank {rank} could not finish" in message
            assert "still runs" in message and "over the network" in message
            assert seconds < 10 * TIMEOUT
