"""What no order of a graph's tasks can beat: how long it takes at least, and how much communication it must expose.

Two things keep an order from hiding a collective: what it needs, and what needs it, cannot run beside it; and its links
and the compute stream do one thing at a time. So each task has a *head*, before which it cannot begin, and a *tail*,
which has to follow it: the longest path, and all that its ancestors (its descendants) ask of the compute stream, of a
group, or of a level's links. For one of these machines alone, the best order of tasks with heads and tails is known:
Jackson's preemptive schedule (Carlier 1982). For the compute stream and one other, each collective behind the compute
that it needs, it is Johnson's (1954). Memory is no part of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardweave.passes.list_scheduler import TaskGraph


class Load(NamedTuple):
    """What a task asks of a machine, beginning so long after its own begin."""

    task: int
    seconds: float
    after: float = 0.0


def exposed_at_least(tasks: TaskGraph) -> float:
    """Seconds for which compute has to wait in any order: communication that no legal compute can hide."""
    return max(0.0, seconds_at_least(tasks) - sum(tasks.seconds))


def seconds_at_least(tasks: TaskGraph) -> float:
    """From the first task's begin to the last one's end, in any order, where compute is not slowed down."""
    machines = _machines(tasks)
    lengths = [t.demand.seconds if t is not None else s for t, s in zip(tasks.transfers, tasks.seconds)]
    forth = range(len(lengths))
    heads = _heads(forth, tasks.needs, lengths, machines)
    tails = _heads(forth[::-1], tasks.users, lengths, machines)
    bounds = [max(head + length + tail for head, length, tail in zip(heads, lengths, tails))]
    for name, loads in machines.items():
        bounds.append(_one_machine(loads, heads, tails))
        if name != "compute":
            bounds += [_two_machines(tasks.needs, tasks.seconds, loads, heads)]
            bounds += [_two_machines(tasks.users, tasks.seconds, loads, tails)]
    return max(bounds)


def _machines(tasks: TaskGraph) -> dict[str, list[Load]]:
    """The compute stream, each group and each level's links, with what they have to do."""
    found: dict[str, list[Load]] = {"compute": [Load(task, s) for task, s in enumerate(tasks.seconds) if s]}
    for task, transfers in enumerate(tasks.transfers):
        if transfers is not None:
            demand = transfers.demand
            found.setdefault(f"group {transfers.group}", []).append(Load(task, demand.seconds))
            for level, part in demand.use.items():  # a part of its links is at best all of them for a shorter time
                load = Load(task, part * demand.transfer, demand.latency)
                found.setdefault(f"level {level}", []).append(load)
    return found


def _heads(
    order: Sequence[int], needs: Sequence[Sequence[int]], lengths: Sequence[float], machines: dict[str, list[Load]]
) -> list[float]:
    """Before which no task can begin; with `order` turned round and users for needs, what has to follow each."""
    count = len(order)
    weights = np.zeros((count, len(machines)))
    for column, loads in enumerate(machines.values()):
        for load in loads:
            weights[load.task, column] = load.seconds
    before = np.zeros((count, (count + 7) // 8), dtype=np.uint8)
    heads = [0.0] * count
    for task in order:
        mine = before[task]
        for need in needs[task]:
            mine |= before[need]
            mine[need // 8] |= 128 >> need % 8
            heads[task] = max(heads[task], heads[need] + lengths[need])
        ancestors: NDArray[np.uint8] = np.unpackbits(mine, count=count)
        heads[task] = max(heads[task], float((ancestors @ weights).max(initial=0.0)))
    return heads


def _one_machine(loads: Sequence[Load], heads: Sequence[float], tails: Sequence[float]) -> float:
    """When the last tail ends at least, where one thing is done at a time: the longest tail first, interrupted."""
    waiting: list[tuple[float, float]] = []
    now = end = 0.0

    def work(until: float) -> Iterator[float]:
        nonlocal now
        while waiting and now < until:
            tail, left = heapq.heappop(waiting)
            span = min(left, until - now)
            now += span
            if span < left:
                heapq.heappush(waiting, (tail, left - span))
            else:
                yield now - tail

    for load in sorted(loads, key=lambda load: heads[load.task] + load.after):
        begin = heads[load.task] + load.after
        end = max([end, *work(begin)])
        now = max(now, begin)
        heapq.heappush(waiting, (-tails[load.task], load.seconds))
    return max([end, *work(float("inf"))])


def _two_machines(
    needs: Sequence[Sequence[int]], seconds: Sequence[float], loads: Sequence[Load], heads: Sequence[float]
) -> float:
    """All compute and all of one machine's loads, each load behind its ancestors' compute: Johnson's rule (1954).

    Ancestors that several share are the last one's.
    """
    taken = set()
    jobs = []
    for load in sorted(loads, key=lambda load: heads[load.task] + load.seconds, reverse=True):
        stack, first = [load.task], 0.0
        while stack:
            for need in needs[stack.pop()]:
                if need not in taken:
                    taken.add(need)
                    stack.append(need)
                    first += seconds[need]
        jobs.append((first, load.seconds))
    jobs.append((sum(seconds) - sum(first for first, _ in jobs), 0.0))
    early = sorted(job for job in jobs if job[0] < job[1])
    late = sorted((job for job in jobs if job[0] >= job[1]), key=lambda job: -job[1])
    now = end = 0.0
    for first, second in early + late:
        now += first
        end = max(end, now) + second
    return end
