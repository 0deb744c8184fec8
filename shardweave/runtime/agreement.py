"""Ranks that agree on what went wrong: each does its part, and an error of one is raised on all, so that none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardweave.errors import ParallelError
from shardweave.runtime.gloo import one_at_a_time
from shardweave.runtime.mesh import RuntimeMesh

Result = TypeVar("Result")
_groups: WeakKeyDictionary[RuntimeMesh, dist.ProcessGroup] = WeakKeyDictionary()
"""Groups of their own: a save in the background must not mix its messages with those of training."""


def own_group(mesh: RuntimeMesh) -> dist.ProcessGroup | None:
    """The ranks' group for checkpoints, made at the first one; None on one device. Collective."""
    if mesh.device_mesh is None:
        return None
    if mesh not in _groups:
        with one_at_a_time():
            _groups[mesh] = dist.new_group(backend="gloo")
    return _groups[mesh]


def together(group: dist.ProcessGroup | None, action: Callable[[], Result]) -> list[Result]:
    """What `action` returns on each rank; ParallelError on all of them if it raises on any.

    If the ranks that fail do so by one kind of ParallelError, that kind is raised.
    """
    result: Result | None = None
    error: str | None = None
    caught: BaseException | None = None
    kind = ParallelError
    try:
        result = action()
    except CheckpointException as failure:  # from all ranks, with their tracebacks
        caught = failure
        whys = sorted({_told(why) for why, _ in failure.failures.values()})
        error = "; ".join(whys[:3]) + (f"; and {len(whys) - 3} more like these" if len(whys) > 3 else "")
    except Exception as failure:
        caught = failure
        error = _told(failure)
        if isinstance(failure, ParallelError):
            kind = type(failure)
    answers: list[tuple[Any, str | None, type[ParallelError]]] = [(result, error, kind)]
    if group is not None:
        answers = [(None, None, ParallelError)] * dist.get_world_size(group)
        try:
            dist.all_gather_object(answers, (result, error, kind), group=group)
        except RuntimeError as lost:
            raise ParallelError(f"a rank was lost during a checkpoint: {error or lost}") from (caught or lost)
    failures: dict[str, list[int]] = {}
    for rank, (_, message, _) in enumerate(answers):
        if message is not None:
            failures.setdefault(message, []).append(rank)
    if failures:
        everywhere = len(answers) == len(next(iter(failures.values())))
        told = "; ".join(m if everywhere else f"{m} (on ranks {ranks})" for m, ranks in failures.items())
        kinds = {kind for _, message, kind in answers if message is not None}
        raise (kinds.pop() if len(kinds) == 1 else ParallelError)(told) from caught
    return [answer for answer, *_ in answers]


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, ParallelError) else f"{type(error).__name__}: {error}"
