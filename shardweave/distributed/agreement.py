"""Ranks that agree on what went wrong: each does its part, and an error of one is raised on all, so that none waits."""

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
    Place,
    collective,
    forget_failure,
    in_time,
    lost_rank,
    refuse_if_lost,
    remember_places,
    timeout_of,
)
from shardweave.distributed.process_groups import RuntimeMesh, one_at_a_time
from shardweave.ir import LostRankError, ParallelError

Result = TypeVar("Result")
_groups: WeakKeyDictionary[RuntimeMesh, dist.ProcessGroup] = WeakKeyDictionary()
"""Groups of their own: a save in the background must not mix its messages with those of training."""


class Control:
    """The groups in which all ranks of a world agree.

    Parameters
    ----------
    talk : ProcessGroup
        For what the ranks exchange while they work on something together.
    beats : ProcessGroup
        In which they tell each other that they are still at work, and how it ended.
    """

    def __init__(self, talk: dist.ProcessGroup, beats: dist.ProcessGroup) -> None:
        self.beats = beats
        self._talk: list[dist.ProcessGroup] = [talk]

    @property
    def talk(self) -> dist.ProcessGroup:
        """The group for exchanges."""
        return self._talk[0]

    def hang_up(self) -> None:
        """Close the connections of `talk`: ranks that wait there for this one then fail at once.

        They are closed when nobody holds the group any more.
        """
        while self._talk:
            dist.destroy_process_group(self._talk.pop())


_controls: WeakKeyDictionary[dist.ProcessGroup, dict[timedelta, Control]] = WeakKeyDictionary()


def control(timeout: timedelta | None = None) -> Control | None:
    """The groups in which the ranks of the running world agree, made at the first call; None where one rank is alone.

    Collective at the first call for a timeout.

    Parameters
    ----------
    timeout : timedelta, optional
        How long a rank waits for a sign of the others; by default as long as the world's own group does.

    Raises
    ------
    LostRankError
        If a rank does not take part.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or dist.get_backend() == "fake" or world.size() == 1:
        return None
    made = _controls.setdefault(world, {})
    timeout = timeout or timeout_of(world)
    if timeout not in made:
        talk, beats = (gloo_group(timeout, "to agree with the other ranks") for _ in range(2))
        made[timeout] = Control(talk, beats)
        remember_places(_exchanged(Place.here(), talk, "the exchange of the ranks' processes"))
    return made[timeout]


def gloo_group(timeout: timedelta, purpose: str, apart: bool = False) -> dist.ProcessGroup:
    """A new gloo group of all ranks; `apart` as for `lost.collective`. Collective."""

    def make() -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        return group

    with collective(f"making a process group {purpose}", apart=apart, timeout=timeout), one_at_a_time():
        return in_time(make, timeout)


def control_of(mesh: RuntimeMesh) -> Control | None:
    """The groups in which the ranks of a mesh agree, with its timeout; None on one device. Collective at first."""
    return None if mesh.device_mesh is None else control(mesh.timeout)


def everyone(mesh: RuntimeMesh) -> dist.ProcessGroup:
    """A group of all ranks of a mesh of several, on its devices, for one collective at a time."""
    groups = control_of(mesh) if mesh.device_type == "cpu" else None
    return mesh.everyone() if groups is None else groups.talk


def own_group(mesh: RuntimeMesh) -> dist.ProcessGroup | None:
    """The ranks' group for checkpoints, made at the first one; None on one device. Collective."""
    if mesh.device_mesh is None:
        return None
    if mesh not in _groups:
        _groups[mesh] = gloo_group(mesh.timeout, "for checkpoints", apart=True)
    return _groups[mesh]


def from_all(value: Any, doing: str, timeout: timedelta | None = None) -> list[Any]:
    """What each rank gives, in their order; `value` alone where no other rank runs. Collective."""
    groups = control(timeout)
    return [value] if groups is None else _exchanged(value, groups.talk, doing)


def _exchanged(
    value: Any, group: dist.ProcessGroup, doing: str, *, anyway: bool = False, apart: bool = False
) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    with collective(doing, group, anyway=anyway, apart=apart):
        dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True)
class Failure:
    """What a rank raised, as it travels to the others.

    `kind` is the class of a ParallelError; of any other error ParallelError itself, its class named in `message`.
    """

    message: str
    kind: type[ParallelError] = ParallelError
    state: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception | CheckpointException) -> Failure:
        """The failure of this rank."""
        if isinstance(error, CheckpointException):  # from all ranks, with their tracebacks
            whys = sorted({_told(why) for why, _ in error.failures.values()})
            return cls("; ".join(whys[:3]) + (f"; and {len(whys) - 3} more like these" if len(whys) > 3 else ""))
        if not isinstance(error, ParallelError):
            return cls(_told(error))
        try:
            pickle.dumps((type(error), vars(error)))
        except Exception:  # a class made in a function, or whatever an attribute's __reduce__ raises
            return cls(str(error))
        return cls(str(error), type(error), dict(vars(error)))

    def error(self, told: str) -> ParallelError:
        """The error again, saying `told`."""
        found = self.kind(told)
        vars(found).update(self.state)
        return found


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, ParallelError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Attempt(Generic[Result]):
    """How an action ended on this rank."""

    result: Result | None = None
    failure: Failure | None = None
    caught: Exception | CheckpointException | None = None

    @classmethod
    def at(cls, action: Callable[[], Result]) -> _Attempt[Result]:
        try:
            return cls(action())
        except (Exception, CheckpointException) as error:  # whatever it is, the other ranks have to hear of it
            return cls(None, Failure.of(error), error)


def together(
    group: dist.ProcessGroup | None, action: Callable[[], Result], uses_group: bool = False
) -> list[Result]:
    """What `action`, a step of a checkpoint, returns on each rank; ParallelError on all of them if it raises on any.

    If the ranks that fail do so by one kind of ParallelError, that kind is raised. Ranks that are done wait while the
    others tell that they are still at work, as in `in_step`; not where the action itself `uses_group`.
    """
    mine: _Attempt[Result] = _Attempt()
    if group is None:
        mine = _Attempt.at(action)
        _raise_any([mine.failure], mine.caught)
        return [mine.result]  # type: ignore[list-item]  # None is a result, too
    doing = "a step of saving or loading a checkpoint"
    refuse_if_lost(group)
    try:
        with nullcontext() if uses_group else _telling(group, doing, apart=True):
            mine = _Attempt.at(action)
        failed = mine.caught if uses_group and isinstance(mine.caught, RuntimeError) else None
        if failed is not None and (gone := lost_rank(failed, doing, group, apart=True)) is not None:
            raise gone from failed
        answers = _exchanged((mine.result, mine.failure), group, f"telling the others how {doing} ended", apart=True)
    except LostRankError as lost:
        if mine.failure is None or lost.__cause__ is mine.caught:
            raise
        raise LostRankError(f"{mine.failure.message}. {lost}") from mine.caught
    _raise_any([failure for _, failure in answers], mine.caught)
    return [answer for answer, _ in answers]


def in_step(
    groups: Control | None, doing: str, action: Callable[[], Result], only: int | None = None
) -> list[Result | None]:
    """As `together`, for work that may take longer than the timeout: ranks that are done wait while the others work.

    While a rank works, it tells the others so from time to time. So a rank may take as long as it needs, and one that
    ends or hangs is still missed after the timeout.

    Parameters
    ----------
    groups : Control, optional
        Of `control`; None where one rank is alone.
    doing : str
        What the work is called in an error: ``"the capture of the model"``.
    action : callable
        What it returns travels by pickle. It may use any group but the beats'.
    only : int, optional
        The one rank that does the work, while the others wait; their result is None.

    Raises
    ------
    LostRankError
        If a rank has ended or does not answer.
    ParallelError
        On all ranks, if the action raises on any. What all ranks raise alike is raised as it is.
    """
    if groups is None:
        return [action()]
    refuse_if_lost()
    mine: _Attempt[Result] = _Attempt()
    try:
        with _telling(groups.beats, doing):
            if only in (None, dist.get_rank()):
                mine = _Attempt.at(action)
            if mine.caught is not None and not isinstance(mine.caught, LostRankError):
                groups.hang_up()
        told = f"telling the others how {doing} ended"
        answers: list[tuple[Any, Failure | None]]
        answers = _exchanged((mine.result, mine.failure), groups.beats, told, anyway=True)
    except LostRankError as lost:
        if mine.failure is None:
            raise
        raise LostRankError(f"{doing} failed on this rank: {mine.failure.message}. {lost}") from mine.caught
    failures = [failure for _, failure in answers]
    if any(failures):
        _controls.clear()
        groups.hang_up()
        if mine.caught is not None and len({failure and failure.message for failure in failures}) == 1:
            raise mine.caught
        lost_too = [failure is not None and failure.kind is LostRankError for failure in failures]
        if any(lost_too) and not all(lost_too):  # what these ranks lost was one that failed for another reason
            failures = [None if lost else failure for failure, lost in zip(failures, lost_too, strict=True)]
            forget_failure()
        _raise_any(failures, mine.caught, f"{doing} failed")
    return [answer for answer, _ in answers]


def _raise_any(failures: Sequence[Failure | None], caught: BaseException | None, doing: str = "") -> None:
    """Raise what the ranks failed by, each message once, with the ranks unless all failed so."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            ranks.setdefault(failure.message, []).append(rank)
    if not ranks:
        return
    found = [failure for failure in failures if failure is not None]
    everywhere = len(failures) == len(next(iter(ranks.values())))
    if doing:
        each = [f"{doing} on rank {', '.join(map(str, which))}: {m}" for m, which in ranks.items()]
    else:
        each = [m if everywhere else f"{m} (on ranks {which})" for m, which in ranks.items()]
    told = "; ".join(each[:3]) + (f"; and {len(each) - 3} more, on other ranks" if len(each) > 3 else "")
    one_kind = len({failure.kind for failure in found}) == 1
    raise (found[0] if one_kind else Failure("")).error(told) from caught


@contextmanager
def _telling(group: dist.ProcessGroup, doing: str, apart: bool = False) -> Iterator[None]:
    """While inside, tell the other ranks from time to time that this one is at work; on leaving, wait for all of them.

    Raises
    ------
    LostRankError
        On leaving, if a rank gave no sign within the timeout of `group`.
    """
    refused: list[LostRankError] = []
    done, given_up = threading.Event(), threading.Event()
    interval = min(timeout_of(group).total_seconds() / 4, 10.0)

    def tell() -> None:
        finished = torch.zeros((), dtype=torch.int32, device="cpu")
        while not int(finished) and not given_up.is_set():
            finished.fill_(int(done.wait(interval)))
            try:
                with collective(f"waiting for the others during {doing}", group, anyway=True, apart=apart):
                    dist.all_reduce(finished, dist.ReduceOp.MIN, group=group)
            except LostRankError as error:
                refused.append(error)
                return

    thread = threading.Thread(target=tell, name="shardweave-at-work", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:  # an interrupt: the other ranks get no more signs
        given_up.set()
        done.set()
        raise
    done.set()
    thread.join()
    if refused:
        raise refused[0]
