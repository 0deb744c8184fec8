"""Hosts for benchmarks: network namespaces on a bridge, each with a link of a bounded rate, and ranks that run in them.

Only root can make them. Without, ranks run over loopback, and `hosts` says so. All is removed at the end, what an
earlier run left behind, too.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

PREFIX = "swbench"
SUBNET = "10.85.0"


@contextmanager
def hosts(count: int, mbit: int) -> Iterator[list[str]]:
    """The names of so many hosts, and of their interfaces, of this rate in each direction; none without root."""
    lacking = _lacking()
    if lacking:
        print(f"{lacking}: all ranks run over loopback, which has no bounded rate", file=sys.stderr)
        yield []
        return
    names, switch = [f"{PREFIX}{number}" for number in range(count)], f"{PREFIX}sw"
    _remove()
    try:
        for name in (*names, switch):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            ends = (name, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "link", "add", *ends)
            _run("ip", "-n", name, "address", "add", f"{address(number)}/24", "dev", name)
            for interface in (name, "lo"):
                _run("ip", "-n", name, "link", "set", interface, "up")
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
            _run("ip", "-n", switch, "link", "set", port, "up")
            for namespace, interface in ((name, name), (switch, port)):
                rate = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "100ms")
                _run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *rate)
        yield names
    finally:
        _remove()


def address(host: int) -> str:
    """The address of a host."""
    return f"{SUBNET}.{host + 1}"


def run_ranks(
    names: Sequence[str], ranks_per_host: int, module: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Run a module as so many ranks on each host, or on two hosts' worth of ranks over loopback; each on a core.

    Raises
    ------
    SystemExit
        If a rank fails; the others are ended.
    """
    count, cores = max(2, len(names)), sorted(os.sched_getaffinity(0))
    world = {"WORLD_SIZE": str(count * ranks_per_host), "LOCAL_WORLD_SIZE": str(ranks_per_host), **environment}
    world |= {"MASTER_ADDR": address(0) if names else "127.0.0.1", "MASTER_PORT": str(_free_port())}
    world |= {"OMP_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count * ranks_per_host):
            host, local = divmod(rank, ranks_per_host)
            own = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(local)}
            enter: list[str] = []
            if names:
                enter = ["ip", "netns", "exec", names[host]]
                own["GLOO_SOCKET_IFNAME"] = names[host]
            pinned = ["taskset", "-c", str(cores[rank % len(cores)])] if shutil.which("taskset") else []
            ranks.append(subprocess.Popen([*enter, *pinned, sys.executable, "-m", module, *arguments], env=own))
        for process in ranks:
            if process.wait():
                raise SystemExit(f"a rank of {module} failed with exit status {process.returncode}")
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _lacking() -> str:
    """What is missing to make hosts; "" if nothing is."""
    if os.name != "posix" or os.geteuid() != 0:
        return "hosts are network namespaces, which only root can make"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    return f"the commands {' and '.join(missing)} are not installed (iproute2)" if missing else ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def _remove() -> None:
    """Remove all hosts of benchmarks; their interfaces go with them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        if line.startswith(PREFIX):
            subprocess.run(["ip", "netns", "delete", line.split()[0]], capture_output=True)


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
