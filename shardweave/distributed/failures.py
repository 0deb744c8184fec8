"""Lost ranks: one error for every collective that cannot be finished since a rank has ended, hangs or is cut off."""

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

_SIGNS = re.compile(
    r"gloo/|pair closure|timed? ?out|connect|broken pipe|socket|nccl|unreachable|no route", re.IGNORECASE
)
"""What the messages of a backend have in them when a peer is lost; a wrong argument's message has none of it."""

_GRACE_SECONDS = 0.5
"""How long after a broken connection to look for the process that has ended: its connections are closed first."""


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of `group` may take: what ``init_process_group`` or ``new_group`` was given."""
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return distributed_c10d.default_pg_timeout


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and which process it is.

    Parameters
    ----------
    host : str
        The name of the host.
    machine : str
        What the processes have in common that see each other's process ids.
    pid : int
        The process id.
    started : str
        When the process started, in the kernel's clock ticks: process ids are used again. "" where the kernel does not
        say.
    """

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Place:
        """The place of this process."""
        try:
            machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
        except OSError:  # no Linux
            machine = ""
        return cls(socket.gethostname(), machine, os.getpid(), _process(os.getpid())[1])

    def state(self) -> str:
        """``"ended"``, ``"stopped"`` or ``"running"``; "" where it cannot be told from here."""
        if not self.machine or self.machine != Place.here().machine:
            return ""
        state, started = _process(self.pid)
        if started != self.started or state in ("", "Z", "X"):
            return "ended"
        return "stopped" if state in ("T", "t") else "running"


def _process(pid: int) -> tuple[str, str]:
    """State and start of a process, as Linux's ``/proc`` has them; both are "" where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may hold anything
    except OSError:
        return "", ""
    return fields[0], fields[19]


_places: WeakKeyDictionary[dist.ProcessGroup, Sequence[Place]] = WeakKeyDictionary()
"""Where the ranks of a world run."""
_failures: WeakKeyDictionary[dist.ProcessGroup, LostRankError] = WeakKeyDictionary()
"""The first failure of a world, under its own group; of a group that can be done without, under that."""


def remember_places(places: Sequence[Place]) -> None:
    """Keep where the ranks of the running world are, in their order."""
    assert dist.group.WORLD is not None
    _places[dist.group.WORLD] = tuple(places)


def forget_failure() -> None:
    """All ranks of the running world have just answered: what failed before did so for another reason."""
    if dist.group.WORLD is not None:
        _failures.pop(dist.group.WORLD, None)


def refuse_if_lost(group: dist.ProcessGroup | None = None) -> None:
    """LostRankError if a collective of the world or of `group` has failed: the next one would fail, or wait in vain."""
    if not _failures or not dist.is_initialized():
        return
    for each in (dist.group.WORLD, group):
        if each is not None and (first := _failures.get(each)) is not None:
            raise LostRankError(f"a rank was lost before: {first}") from first


@contextmanager
def collective(
    doing: str,
    group: dist.ProcessGroup | None = None,
    *,
    anyway: bool = False,
    apart: bool = False,
    timeout: timedelta | None = None,
) -> Iterator[None]:
    """A LostRankError in the place of torch's error, where a collective that is run in here loses a rank.

    Parameters
    ----------
    doing : str
        What it is for: the rest of "rank 1 could not finish ...".
    group : ProcessGroup, optional
        The group that it is run in; the whole world by default.
    anyway : bool
        Also where an earlier collective has failed.
    apart : bool
        The group serves nothing but this: if no rank is known to be gone, the others may still be used.
    timeout : timedelta, optional
        How long it may take, where that is not the timeout of the group.
    """
    if not anyway:
        refuse_if_lost(group)
    try:
        yield
    except RuntimeError as error:
        if (lost := lost_rank(error, doing, group, apart=apart, timeout=timeout)) is None:
            raise
        raise lost from error


def lost_rank(
    error: RuntimeError,
    doing: str,
    group: dist.ProcessGroup | None = None,
    where: str = "",
    apart: bool = False,
    timeout: timedelta | None = None,
) -> LostRankError | None:
    """What to raise in the place of a backend's error; None if that tells of no lost rank.

    Parameters
    ----------
    error : RuntimeError
        What a collective raised.
    doing : str
        The rest of "rank 1 could not finish ...".
    group : ProcessGroup, optional
        The group of the collective; the whole world by default.
    where : str
        The group in the words of the mesh, such as ``"axes gpu0, gpu1"``.
    apart, timeout
        As for `collective`.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or not _SIGNS.search(str(error)):
        return None
    group = group or world
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
    late = re.search(r"timed? ?out", str(error), re.IGNORECASE) is not None or "pair closure" in str(error)
    others = f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 16 else f"{len(ranks)} ranks"
    within = f" within {(timeout or timeout_of(group)).total_seconds():g} s" if late else ""
    gone, cause = _cause(ranks, me, late)
    left = _APART if apart and not gone else _NOTHING_LEFT
    found = LostRankError(
        f"rank {me} could not finish {doing}, a collective of {others}{f' ({where})' if where else ''}{within}: "
        f"{cause}. {left} The backend says: {_brief(error)}"
    )
    _failures.setdefault(group if apart and not gone else world, found)
    return found


def _brief(error: RuntimeError) -> str:
    """A backend's message without the place in its source, and without its advice.

    >>> _brief(RuntimeError("[/pytorch/gloo/pair.cc:537] Read error: Connection reset. This is typically caused by"))
    'Read error: Connection reset'
    """
    line = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] *", "", (str(error).splitlines() or [""])[0])
    return line.partition(" This is typically")[0].rstrip(".")


_NOTHING_LEFT = (
    "The world cannot be used any more: end this process and start the job again, from its last checkpoint."
)
_APART = "Training may go on, but no other checkpoint can be saved or loaded."


def _cause(ranks: Sequence[int], me: int, late: bool) -> tuple[bool, str]:
    """Whether a rank is known to be gone, and which it is, as far as it can be told."""
    places = _places.get(dist.group.WORLD, ()) if dist.group.WORLD is not None else ()
    if not places:
        return False, (
            "another rank has ended, hangs, or cannot be reached (of several hosts, each has to name its network "
            "interface in GLOO_SOCKET_IFNAME)"
        )
    deadline = time.monotonic() + (0.0 if late else _GRACE_SECONDS)
    while True:
        states = {rank: place.state() for rank, place in enumerate(places) if rank != me}
        gone = {rank: state for rank, state in states.items() if state in ("ended", "stopped")}
        if gone or "" in states.values() or time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    members = {rank: state for rank, state in gone.items() if rank in ranks} or gone
    if members:
        how = {"ended": "has ended", "stopped": "is stopped and does not answer"}
        return True, "; ".join(f"rank {rank} ({_name(places[rank])}) {how[state]}" for rank, state in members.items())
    far = [rank for rank, state in states.items() if not state and rank in ranks]
    near = [rank for rank, state in states.items() if state and rank in ranks]
    told = []
    if far:
        told.append(
            f"rank {', '.join(map(str, far))} on {', '.join(sorted({places[rank].host for rank in far}))} has ended, "
            "hangs, or cannot be reached: look there, and at the network between"
        )
    if near:
        told.append(f"rank {', '.join(map(str, near))} on this host still runs" + ("" if far else _BUSY))
    return False, "; ".join(told)


_BUSY = (
    ", but is busy with something else, is at another collective, or cannot be reached over the network; if it is only "
    "slow, give more time: Options(timeout=...), or the timeout of init_process_group"
)


def _name(place: Place) -> str:
    return f"process {place.pid} on {place.host}"


_ALL_FAIL_SECONDS = 1.0
"""How long a rank on which a step fails waits for the others to fail, too, before it ends their waiting."""


@dataclass(frozen=True)
class FailureNotice:
    """A line in the world's store, by which ranks learn which of them failed first in the steps of one mesh.

    Parameters
    ----------
    store : torch.distributed.Store, optional
        None where no world is running.
    key : str
        Names the mesh: the ranks of a world make their meshes in the same order.
    """

    store: Any
    key: str

    @classmethod
    def of_next_mesh(cls) -> FailureNotice:
        """The notice of the mesh that is being made."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None:
            return cls(None, "")
        number = _meshes[world] = _meshes.get(world, 0) + 1
        c10d: Any = distributed_c10d  # which does not list the function among its own
        return cls(c10d._get_default_store(), f"shardweave/failed_step/{number}")

    def all_failed_at(self, place: str, ranks: int, timeout: timedelta) -> bool:
        """Whether all `ranks` ask this for the same `place`, within a second of this one."""
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
            return in_time(all_asked, timeout)
        return False

    def post(self, message: str, timeout: timedelta) -> str:
        """Say why this rank failed; what the first rank said is returned, or `message` where that cannot be had."""
        store = self.store
        if store is None:
            return message
        with suppress(RuntimeError):  # the rank that keeps the store may be gone
            return in_time(lambda: bytes(store.compare_set(self.key, "", message)).decode(), timeout)
        return message

    def read(self, timeout: timedelta) -> str | None:
        """What the first rank that failed has said; None where no rank has, or the store is gone."""
        store = self.store
        if store is None:
            return None
        with suppress(RuntimeError):
            return in_time(lambda: store.get(self.key).decode() if store.check([self.key]) else None, timeout)
        return None


_meshes: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many meshes each world has had."""


def in_time(action: Callable[[], Result], timeout: timedelta) -> Result:
    """What `action` returns; RuntimeError where it does not end by itself after `timeout`, but stays in its thread.

    For what talks to the store of the world: a store whose process is stopped keeps its clients waiting without end.
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
    thread.join(1.25 * timeout.total_seconds() + 1.0)  # its own error tells more
    if thread.is_alive():
        raise RuntimeError(f"timed out after {timeout.total_seconds():g} s: the world's store does not answer")
    if errors:
        raise errors[0]
    return found[0]
