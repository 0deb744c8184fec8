"""How long a call takes on the live device, and what all ranks say to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

_WARM_UP = 2
_BATCH_SECONDS = 1e-3
_MOST_CALLS, _MOST_BATCHES, _FEWEST_BATCHES = 100, 9, 3
_SHARED_SECONDS = 0.03  # several turns of ranks that share a core: Linux gives each about 3 ms at a time


def live_device() -> torch.device:
    """What this rank computes on: its current GPU; the CPU without one, and for ranks that talk over gloo alone."""
    if torch.cuda.is_available() and not (running() and dist.get_backend() == "gloo"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def running() -> bool:
    """Whether this process is one of a torch.distributed world."""
    return dist.is_available() and dist.is_initialized()


def call_seconds(call: Callable[[], Any], device: torch.device, budget: float = 0.1) -> float:
    """Seconds of one call: the median over batches of calls, once warm.

    Ranks may share the cores of a CPU, and each then waits for its turn between calls. So in a world of several ranks
    on CPUs it is the mean over several such turns: a median of short batches would leave the waiting out.

    Parameters
    ----------
    call : callable
        Runs on `device`; what it returns is dropped.
    budget : float
        Seconds to spend, about; a call that takes longer than that is still made a few times.

    Examples
    --------
    >>> call_seconds(lambda: torch.ones(8) + 1, torch.device("cpu"), budget=1e-3) > 0
    True
    """
    _span(call, _WARM_UP, device)
    if device.type == "cpu" and running() and dist.get_world_size() > 1:
        return _shared_seconds(call, device, min(budget, _SHARED_SECONDS))
    once = max(_span(call, 1, device), 1e-9)
    calls = max(1, min(_MOST_CALLS, int(_BATCH_SECONDS / once)))
    batches = max(_FEWEST_BATCHES, min(_MOST_BATCHES, int(budget / (calls * once))))
    return max(median(_span(call, calls, device) for _ in range(batches)) / calls, 1e-9)  # no clock is finer


def _shared_seconds(call: Callable[[], Any], device: torch.device, least: float) -> float:
    """The mean of a call over at least `least` seconds."""
    done, batch, spent = 0, _FEWEST_BATCHES, 0.0
    while spent < least:
        spent += _span(call, batch, device)
        done, batch = done + batch, min(2 * batch, _MOST_CALLS)
    return spent / done


def _span(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return 1e-3 * float(begin.elapsed_time(end))
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def start_together(group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks, so that all measure at the same time: they may share cores and memory."""
    if running():
        dist.barrier(group)


def from_first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The first rank's `value`, which can be pickled, on all ranks."""
    if not running():
        return value
    held = [value]
    dist.broadcast_object_list(held, group=group, group_src=0)
    return held[0]


def from_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Each rank's `value`, which can be pickled, on all ranks."""
    if not running():
        return [value]
    held: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(held, value, group=group)
    return held


def is_first(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this rank is the first of its world: the one that keeps files."""
    return not running() or dist.get_rank(group) == 0


def median_of_all(seconds: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """For each name that any rank measured, the median of the ranks that did: the same on all ranks.

    >>> median_of_all({"mm": 2.0})
    {'mm': 2.0}
    """
    found: dict[str, list[float]] = {}
    for part in from_all(dict(seconds), group):
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    return {name: median(values) for name, values in found.items()}
