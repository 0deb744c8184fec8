"""Network namespaces as hosts: what the tests of several hosts share."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable

import pytest


def skip_without(*commands: str) -> None:
    """Skip the test where hosts cannot be made."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("hosts are network namespaces, which only root can make")
    if missing := [command for command in commands if shutil.which(command) is None]:
        pytest.skip(f"hosts are made by {' and '.join(missing)}: install iproute2 (apt-get install iproute2)")


def run(*command: str) -> None:
    """Run a command; OSError with what it says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def remove(names: Iterable[str]) -> None:
    """Remove namespaces; their interfaces go with them."""
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def enter(name: str, interface: str, local: int, per_host: int) -> None:
    """Move this process, a rank, to a host that has so many."""
    with open(f"/run/netns/{name}") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(GLOO_SOCKET_IFNAME=interface, LOCAL_WORLD_SIZE=str(per_host), LOCAL_RANK=str(local))
