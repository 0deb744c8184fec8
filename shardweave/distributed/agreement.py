"""Agreement of ranks: each rank does its part of some work, and an error on one rank is raised on all.

So no rank waits for a rank that has failed. While a rank works, it sends heartbeats. The work may take longer than the
timeout, but a rank that ends or hangs is found after the timeout.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardweave.distributed.failures import (
    RankProcess,
    collective,
    forget_failure,
    lost_rank,
    raise_if_rank_lost,
    remember_processes,
    run_with_timeout,
    timeout_of,
)
from shardweave.distributed.gloo import single_threaded_gloo
from shardweave.distributed.process_groups import RuntimeMesh
from shardweave.ir import LostRankError, ParallelError

Result = TypeVar("Result")
_checkpoint_groups: WeakKeyDictionary[RuntimeMesh, dist.ProcessGroup] = WeakKeyDictionary()
"""The groups for checkpoints, by mesh: a save in the background must not mix its messages with those of training."""


class Control:
    """The groups in which all ranks of a world agree.

    Parameters
    ----------
    exchange : ProcessGroup
        The group for the messages of the work.
    heartbeats : ProcessGroup
        The group for heartbeats of ranks at work, and for the outcome of the work.
    """

    def __init__(self, exchange: dist.ProcessGroup, heartbeats: dist.ProcessGroup) -> None:
        self.heartbeats = heartbeats
        self._exchange: list[dist.ProcessGroup] = [exchange]

    @property
    def exchange(self) -> dist.ProcessGroup:
        """The group for exchanges."""
        return self._exchange[0]

    def close_exchange(self) -> None:
        """Close the connections of `exchange`, so that ranks that wait there for this rank fail at once.

        A connection closes with the last reference to the group.
        """
        while self._exchange:
            dist.destroy_process_group(self._exchange.pop())


_controls: WeakKeyDictionary[dist.ProcessGroup, dict[timedelta, Control]] = WeakKeyDictionary()


def control(timeout: timedelta | None = None) -> Control | None:
    """The control groups of the running world, made at the first call; None in a world of one rank.

    Collective at the first call for a timeout.

    Parameters
    ----------
    timeout : timedelta, optional
        The time that a rank waits for the others; the timeout of the world's own group by default.

    Raises
    ------
    LostRankError
        If a rank does not take part.
    """
    world = dist.group.WORLD
    if world is None or dist.get_backend() == "fake" or world.size() == 1:
        return None
    made = _controls.setdefault(world, {})
    timeout = timeout or timeout_of(world)
    if timeout not in made:
        exchange, heartbeats = (gloo_group(timeout, "to agree with the other ranks") for _ in range(2))
        made[timeout] = Control(exchange, heartbeats)
        with collective("the exchange of the ranks' processes", exchange):
            remember_processes(all_gather_objects(RankProcess.current(), exchange))
    return made[timeout]


def gloo_group(timeout: timedelta, purpose: str, dedicated: bool = False) -> dist.ProcessGroup:
    """A new gloo group of all ranks; `dedicated` as for `failures.collective`. Collective."""

    def make() -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        return group

    with collective(f"making a process group {purpose}", dedicated=dedicated, timeout=timeout), single_threaded_gloo():
        return run_with_timeout(make, timeout)


def control_of(mesh: RuntimeMesh) -> Control | None:
    """The control groups of a mesh, with its timeout; None on one device. Collective at the first call."""
    return None if mesh.device_mesh is None else control(mesh.timeout)


def world_group(mesh: RuntimeMesh) -> dist.ProcessGroup:
    """A group of all ranks of `mesh`, which has several, on its devices. It runs one collective at a time."""
    groups = control_of(mesh) if mesh.device_type == "cpu" else None
    return mesh.world_group() if groups is None else groups.exchange


def checkpoint_group(mesh: RuntimeMesh) -> dist.ProcessGroup | None:
    """The group for checkpoints, made at the first call; None on one device. Collective."""
    if mesh.device_mesh is None:
        return None
    if mesh not in _checkpoint_groups:
        _checkpoint_groups[mesh] = gloo_group(mesh.timeout, "for checkpoints", dedicated=True)
    return _checkpoint_groups[mesh]


def gather_from_ranks(value: Any, timeout: timedelta | None = None) -> list[Any]:
    """The value of each rank, in their order. Collective."""
    groups = control(timeout)
    if groups is None:
        return [value]
    with collective("a comparison of the ranks' arguments", groups.exchange):
        return all_gather_objects(value, groups.exchange)


def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of each rank of `group`, by default of the world, in their order. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True)
class Failure:
    """The error of a rank, in a form that can be sent to the others.

    `kind` is the class of a ParallelError. Any other error becomes a ParallelError whose message names its class.
    """

    message: str
    kind: type[ParallelError] = ParallelError
    state: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception | CheckpointException) -> Failure:
        """The failure of this rank."""
        if isinstance(error, CheckpointException):  # has the errors of all ranks
            messages = sorted({error_text(why) for why, _ in error.failures.values()})
            more = f"; and {len(messages) - 3} more like these" if len(messages) > 3 else ""
            return cls("; ".join(messages[:3]) + more)
        if not isinstance(error, ParallelError):
            return cls(error_text(error))
        try:
            pickle.dumps((type(error), vars(error)))
        except Exception:  # a class made in a function, or whatever an attribute's __reduce__ raises
            return cls(str(error))
        return cls(str(error), type(error), dict(vars(error)))

    def error(self, message: str) -> ParallelError:
        """The error with another message."""
        found = self.kind(message)
        vars(found).update(self.state)
        return found


def error_text(error: BaseException) -> str:
    """The message of a ParallelError; the type and the message of another error."""
    return str(error) if isinstance(error, ParallelError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Attempt(Generic[Result]):
    """The outcome of an action on this rank."""

    result: Result | None = None
    failure: Failure | None = None
    caught: Exception | CheckpointException | None = None

    @classmethod
    def at(cls, action: Callable[[], Result]) -> _Attempt[Result]:
        try:
            return cls(action())
        except (Exception, CheckpointException) as error:  # the other ranks have to learn of any error
            return cls(None, Failure.of(error), error)


def run_checkpoint_step(
    group: dist.ProcessGroup | None, action: Callable[[], Result], uses_group: bool = False
) -> list[Result]:
    """Run a step of a checkpoint on each rank, and return all results; ParallelError on all ranks if it raises on any.

    If all failed ranks raised the same kind of ParallelError, that kind is raised. Ranks send heartbeats as in
    `run_on_all_ranks`, unless the action itself `uses_group`.
    """
    own: _Attempt[Result]
    if group is None:
        own = _Attempt.at(action)
        _raise_any([own.failure], own.caught)
        return [own.result]  # type: ignore[list-item]  # None is a result, too
    raise_if_rank_lost(group)
    doing = "a step of saving or loading a checkpoint"
    own, answers = _attempt_on_ranks(group, doing, action, dedicated=True, uses_group=uses_group)
    _raise_any([failure for _, failure in answers], own.caught)
    return [answer for answer, _ in answers]


def run_on_each_rank(groups: Control | None, doing: str, action: Callable[[], Result]) -> Result:
    """As `run_on_all_ranks`, but return this rank's result alone, which is not pickled."""
    results: list[Result] = []
    run_on_all_ranks(groups, doing, lambda: results.append(action()))
    return results[0]


def run_on_all_ranks(
    groups: Control | None, doing: str, action: Callable[[], Result], only: int | None = None
) -> list[Result | None]:
    """Run `action` on each rank, and return all results; an error on any rank is raised on all.

    Ranks that are done wait for the others. The action may take longer than the timeout, as ranks send heartbeats.

    Parameters
    ----------
    groups : Control, optional
        From `control`; None in a world of one rank.
    doing : str
        The name of the work in errors, such as ``"the capture of the model"``.
    action : callable
        Its result is pickled. It may use any group except `heartbeats`.
    only : int, optional
        The one rank that does the work. The others wait, and their result is None.

    Raises
    ------
    LostRankError
        If a rank has ended or does not answer.
    ParallelError
        On all ranks, if the action raises on any. If all ranks raise the same error, it is raised unchanged.
    """
    if groups is None:
        return [action()]
    raise_if_rank_lost()

    # 1. Run the action on all ranks. A rank that fails closes its connections: no rank waits for it.
    def acting() -> Result | None:
        try:
            return action() if only in (None, dist.get_rank()) else None
        except LostRankError:
            raise
        except (Exception, CheckpointException):
            groups.close_exchange()
            raise

    own, answers = _attempt_on_ranks(groups.heartbeats, doing, acting)
    # 2. Raise the errors of any ranks on all. The control groups are closed, so the next call makes new ones.
    failures = [failure for _, failure in answers]
    if any(failures):
        _controls.clear()
        groups.close_exchange()
        lost_others = [failure is not None and failure.kind is LostRankError for failure in failures]
        if any(lost_others) and not all(lost_others):  # the lost rank has failed for another reason
            failures = [None if lost else failure for failure, lost in zip(failures, lost_others, strict=True)]
            forget_failure()
        raise_failures(failures, own.caught, f"{doing} failed")
    return [answer for answer, _ in answers]


def _attempt_on_ranks(
    group: dist.ProcessGroup,
    doing: str,
    action: Callable[[], Result],
    dedicated: bool = False,
    uses_group: bool = False,
) -> tuple[_Attempt[Result], list[tuple[Result, Failure | None]]]:
    """Run `action` on each rank; this rank's outcome, and the results and failures of all ranks.

    Raises
    ------
    LostRankError
        If a rank has ended or does not answer; with this rank's own failure, if it has one.
    """
    own: _Attempt[Result] = _Attempt()
    try:
        # 1. Run the action, and send heartbeats meanwhile.
        with nullcontext() if uses_group else _heartbeat(group, doing, dedicated):
            own = _Attempt.at(action)
        failed = own.caught if uses_group and isinstance(own.caught, RuntimeError) else None
        if failed is not None and (gone := lost_rank(failed, doing, group, dedicated=dedicated)) is not None:
            raise gone from failed
        # 2. Exchange the outcomes.
        telling, outcome = f"telling the others how {doing} ended", (own.result, own.failure)
        with collective(telling, group, even_after_failure=not dedicated, dedicated=dedicated):
            return own, all_gather_objects(outcome, group)
    except LostRankError as lost:
        if own.failure is None or lost.__cause__ is own.caught:
            raise
        raise LostRankError(f"{doing} failed on this rank: {own.failure.message}. {lost}") from own.caught


def raise_failures(failures: Sequence[Failure | None], caught: BaseException | None, doing: str) -> None:
    """Raise the errors of all ranks as one, if there are any; this rank's own, `caught`, if all ranks have the same.

    `doing` is the beginning of the message, such as ``"planning failed"``: the ranks and their errors follow.
    """
    if caught is not None and len({failure and failure.message for failure in failures}) == 1:
        raise caught
    _raise_any(failures, caught, doing)


def _raise_any(failures: Sequence[Failure | None], caught: BaseException | None, doing: str = "") -> None:
    """Raise the errors of the ranks as one error: each message once, with its ranks unless all ranks have it."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            ranks.setdefault(failure.message, []).append(rank)
    if not ranks:
        return
    found = [failure for failure in failures if failure is not None]
    everywhere = len(failures) == len(next(iter(ranks.values())))
    if doing:
        each = [f"on rank {', '.join(map(str, which))}: {m}" for m, which in ranks.items()]
        each[0] = f"{doing} {each[0]}"
    else:
        each = [m if everywhere else f"{m} (on ranks {which})" for m, which in ranks.items()]
    message = "; ".join(each[:3]) + (f"; and {len(each) - 3} more, on other ranks" if len(each) > 3 else "")
    one_kind = len({failure.kind for failure in found}) == 1
    raise (found[0] if one_kind else Failure("")).error(message) from caught


@contextmanager
def _heartbeat(group: dist.ProcessGroup, doing: str, dedicated: bool = False) -> Iterator[None]:
    """Tell the other ranks regularly that this rank is at work; on leaving, wait until all ranks are done.

    Raises
    ------
    LostRankError
        On leaving, if a rank sent no heartbeat within the timeout of `group`.
    """
    refused: list[LostRankError] = []
    done, given_up = threading.Event(), threading.Event()
    interval = min(timeout_of(group).total_seconds() / 4, 10.0)

    def send() -> None:
        finished = torch.zeros((), dtype=torch.int32, device="cpu")
        while not int(finished) and not given_up.is_set():
            finished.fill_(int(done.wait(interval)))
            try:
                waiting = f"waiting for the others during {doing}"
                with collective(waiting, group, even_after_failure=True, dedicated=dedicated):
                    dist.all_reduce(finished, dist.ReduceOp.MIN, group=group)
            except LostRankError as error:
                refused.append(error)
                return

    thread = threading.Thread(target=send, name="shardweave-at-work", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:  # an interrupt: this rank sends no more heartbeats
        given_up.set()
        done.set()
        raise
    done.set()
    thread.join()
    if refused:
        raise refused[0]
