"""Lost ranks: `LostRankError` for every collective that cannot finish, as a rank has ended, hangs or is unreachable.

`collective` replaces a backend's error by `LostRankError`, which names the lost rank as far as it can be told.
`FailureNotice` tells all ranks which of them failed first in a step.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardweave.ir import LostRankError

Result = TypeVar("Result")

_LOST_PEER_MESSAGE = re.compile(
    r"gloo/|pair closure|timed? ?out|connect|broken pipe|socket|nccl|unreachable|no route", re.IGNORECASE
)
"""Matches the messages of backends when a peer is lost, and no message about a wrong argument."""

_GRACE_SECONDS = 0.5
"""The time to look for an ended process after a broken connection: a process closes its connections before it ends."""

_ALL_FAIL_SECONDS = 1.0
"""The time that a rank waits for the others to fail at the same place of a step before it closes its groups."""
_WORLD_UNUSABLE = (
    "The world cannot be used any more: end this process and start the job again, from its last checkpoint."
)
_GROUP_UNUSABLE = "Training may go on, but no other checkpoint can be saved or loaded."
_STILL_RUNNING = (
    ", but is busy with something else, is at another collective, or cannot be reached over the network; if it is only "
    "slow, give more time: Options(timeout=...), or the timeout of init_process_group"
)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout that ``init_process_group`` or ``new_group`` was given for `group`."""
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return distributed_c10d.default_pg_timeout


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, and its host.

    Parameters
    ----------
    host : str
        The name of the host.
    machine : str
        An identifier that is equal for processes that see each other's process ids.
    pid : int
        The process id.
    started : str
        The start time in the kernel's clock ticks, since process ids are reused; "" if it is unknown.
    """

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> RankProcess:
        """This process."""
        try:
            machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
        except OSError:  # no Linux
            machine = ""
        return cls(socket.gethostname(), machine, os.getpid(), _process(os.getpid())[1])

    def state(self) -> str:
        """``"ended"``, ``"stopped"`` or ``"running"``; "" for a process on another machine."""
        if not self.machine or self.machine != RankProcess.current().machine:
            return ""
        state, started = _process(self.pid)
        if started != self.started or state in ("", "Z", "X"):
            return "ended"
        return "stopped" if state in ("T", "t") else "running"


def _process(pid: int) -> tuple[str, str]:
    """State and start time of a process from Linux's ``/proc``; both are "" if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may hold anything
    except OSError:
        return "", ""
    return fields[0], fields[19]


_processes: WeakKeyDictionary[dist.ProcessGroup, Sequence[RankProcess]] = WeakKeyDictionary()
"""The processes of a world's ranks."""
_failures: WeakKeyDictionary[dist.ProcessGroup, LostRankError] = WeakKeyDictionary()
"""The first failure of each world, and of each dedicated group."""
_mesh_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""The number of meshes made in each world."""


def remember_processes(processes: Sequence[RankProcess]) -> None:
    """Remember the processes of the running world's ranks, in their order."""
    assert dist.group.WORLD is not None
    _processes[dist.group.WORLD] = tuple(processes)


def forget_failure() -> None:
    """Forget an earlier failure of the running world: all its ranks have just answered."""
    if dist.group.WORLD is not None:
        _failures.pop(dist.group.WORLD, None)


def raise_if_rank_lost(group: dist.ProcessGroup | None = None) -> None:
    """Raise `LostRankError` if a collective of the world or of `group` has failed: the next one would fail or hang."""
    for each in (dist.group.WORLD, group):
        if each is not None and (first := _failures.get(each)) is not None:
            raise LostRankError(f"a rank was lost before: {first}") from first


@contextmanager
def collective(
    doing: str,
    group: dist.ProcessGroup | None = None,
    *,
    even_after_failure: bool = False,
    dedicated: bool = False,
    timeout: timedelta | None = None,
) -> Iterator[None]:
    """Raise `LostRankError` in place of torch's error if a collective in this context loses a rank.

    Parameters
    ----------
    doing : str
        The purpose, as the end of "rank 1 could not finish ...".
    group : ProcessGroup, optional
        The group of the collective; the whole world by default.
    even_after_failure : bool
        Run it also if an earlier collective has failed.
    dedicated : bool
        The group serves nothing else. If no rank is known to be gone, other groups may still be used after a failure.
    timeout : timedelta, optional
        The time that it may take; the timeout of the group by default.
    """
    if not even_after_failure:
        raise_if_rank_lost(group)
    try:
        yield
    except RuntimeError as error:
        if (lost := lost_rank(error, doing, group, dedicated=dedicated, timeout=timeout)) is None:
            raise
        raise lost from error


def lost_rank(
    error: RuntimeError,
    doing: str,
    group: dist.ProcessGroup | None = None,
    where: str = "",
    dedicated: bool = False,
    timeout: timedelta | None = None,
) -> LostRankError | None:
    """The `LostRankError` for a backend's error; None if the error has another cause.

    Parameters
    ----------
    error : RuntimeError
        The error of a collective.
    doing : str
        The purpose, as the end of "rank 1 could not finish ...".
    group : ProcessGroup, optional
        The group of the collective; the whole world by default.
    where : str
        The group in the words of the mesh, such as ``"axes gpu0, gpu1"``.
    dedicated, timeout
        As for `collective`.
    """
    world = dist.group.WORLD
    if world is None or not _LOST_PEER_MESSAGE.search(str(error)):
        return None
    group = group or world
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    timed_out = re.search(r"timed? ?out", str(error), re.IGNORECASE) is not None or "pair closure" in str(error)
    others = f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 16 else f"{len(ranks)} ranks"
    within = f" within {(timeout or timeout_of(group)).total_seconds():g} s" if timed_out else ""
    gone, cause = _cause(ranks, rank, timed_out)
    consequence = _GROUP_UNUSABLE if dedicated and not gone else _WORLD_UNUSABLE
    found = LostRankError(
        f"rank {rank} could not finish {doing}, a collective of {others}{f' ({where})' if where else ''}{within}: "
        f"{cause}. {consequence} The backend says: {_brief(error)}"
    )
    _failures.setdefault(group if dedicated and not gone else world, found)
    return found


def _brief(error: RuntimeError) -> str:
    """A backend's message without its source location and its advice.

    >>> _brief(RuntimeError("[/pytorch/gloo/pair.cc:537] Read error: Connection reset. This is typically caused by"))
    'Read error: Connection reset'
    """
    line = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] *", "", (str(error).splitlines() or [""])[0])
    return line.partition(" This is typically")[0].rstrip(".")


def _cause(ranks: Sequence[int], rank: int, timed_out: bool) -> tuple[bool, str]:
    """Whether a rank is known to be gone, and a description of the ranks that are gone or may be."""
    processes = _processes.get(dist.group.WORLD, ()) if dist.group.WORLD is not None else ()
    if not processes:
        return False, (
            "another rank has ended, hangs, or cannot be reached (of several hosts, each has to name its network "
            "interface in GLOO_SOCKET_IFNAME)"
        )
    # 1. Look for ended and stopped processes, for a short time: a connection breaks before its process is gone.
    deadline = time.monotonic() + (0.0 if timed_out else _GRACE_SECONDS)
    while True:
        states = {other: process.state() for other, process in enumerate(processes) if other != rank}
        gone = {other: state for other, state in states.items() if state in ("ended", "stopped")}
        if gone or "" in states.values() or time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    # 2. Name them, those of the collective's group if there are any.
    if gone:
        how = {"ended": "has ended", "stopped": "is stopped and does not answer"}
        members = {other: state for other, state in gone.items() if other in ranks} or gone
        return True, "; ".join(
            f"rank {other} (process {processes[other].pid} on {processes[other].host}) {how[state]}"
            for other, state in members.items()
        )
    # 3. Else describe the other ranks of the group, by host.
    remote = [other for other, state in states.items() if not state and other in ranks]
    local = [other for other, state in states.items() if state and other in ranks]
    found = []
    if remote:
        found.append(
            f"rank {', '.join(map(str, remote))} on {', '.join(sorted({processes[other].host for other in remote}))} "
            "has ended, hangs, or cannot be reached: look there, and at the network between"
        )
    if local:
        found.append(
            f"rank {', '.join(map(str, local))} on this host still runs" + ("" if remote else _STILL_RUNNING)
        )
    return False, "; ".join(found)


@dataclass(frozen=True)
class FailureNotice:
    """An entry of the world's store that names the rank that failed first in the steps of one mesh.

    Parameters
    ----------
    store : torch.distributed.Store, optional
        None if no world is running.
    key : str
        The key of the mesh. All ranks of a world make their meshes in the same order.
    """

    store: Any
    key: str

    @classmethod
    def of_next_mesh(cls) -> FailureNotice:
        """The notice of the mesh that is being made."""
        world = dist.group.WORLD
        if world is None:
            return cls(None, "")
        number = _mesh_counts[world] = _mesh_counts.get(world, 0) + 1
        c10d: Any = distributed_c10d  # the function is missing in its type stubs
        return cls(c10d._get_default_store(), f"shardweave/failed_step/{number}")

    def all_failed_at(self, place: str, ranks: int, timeout: timedelta) -> bool:
        """Whether all `ranks` call this with the same `place`, within `_ALL_FAIL_SECONDS` of this rank."""
        store, key = self.store, f"{self.key}/{place}"
        if store is None:
            return True

        def all_asked() -> bool:
            store.add(key, 1)
            deadline = time.monotonic() + _ALL_FAIL_SECONDS
            while store.add(key, 0) < ranks:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
            return True

        with suppress(RuntimeError):  # the rank that keeps the store may be gone
            return run_with_timeout(all_asked, timeout)
        return False

    def post(self, message: str, timeout: timedelta) -> str:
        """Post why this rank failed; returns the message of the first failed rank, or `message` if it is unknown."""
        store = self.store
        if store is None:
            return message
        with suppress(RuntimeError):  # the rank that keeps the store may be gone
            return run_with_timeout(lambda: bytes(store.compare_set(self.key, "", message)).decode(), timeout)
        return message

    def read(self, timeout: timedelta) -> str | None:
        """The message of the rank that failed first; None if no rank has failed, or the store is gone."""
        store = self.store
        if store is None:
            return None
        with suppress(RuntimeError):
            return run_with_timeout(lambda: store.get(self.key).decode() if store.check([self.key]) else None, timeout)
        return None


def run_with_timeout(action: Callable[[], Result], timeout: timedelta) -> Result:
    """Run `action` in a thread and return its result; `RuntimeError` if it has not ended shortly after `timeout`.

    For calls of the world's store: a store whose process is stopped keeps its clients waiting forever.
    """
    found: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(action())
        except BaseException as error:  # raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="shardweave-store", daemon=True)
    thread.start()
    thread.join(1.25 * timeout.total_seconds() + 1.0)  # longer than `timeout`: the action's own error says more
    if thread.is_alive():
        raise RuntimeError(f"timed out after {timeout.total_seconds():g} s: the world's store does not answer")
    if errors:
        raise errors[0]
    return found[0]
