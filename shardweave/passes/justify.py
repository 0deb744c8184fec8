"""Justify: orders of tasks from schedules that are made from both ends.

A list scheduler that goes forwards never lets a link idle while something is ready, though a long reduction that starts
now may keep the next layer's gather waiting. One that goes backwards, from the last task to the first, finds such
pauses: read forwards, its schedule starts everything as late as the step allows. Each schedule's times are the next
one's priorities, in the other direction ("justification": Valls, Ballestin and Quintanilla, European Journal of
Operational Research 165, 2005). Here every group of ranks, and the device itself, is a machine that does one thing at
a time; what an order really takes is for `weave.played` to say.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardweave.cost_model.timeline import COMPUTE
from shardweave.passes.tasks import Tasks


@dataclass(frozen=True)
class Justified:
    """An order of tasks, and the seconds that it takes where no two groups share a link.

    Where they do, what is started before its time takes a part of the links of others: `begins` says when each task
    begins, from which `in_order_of` makes an order that starts nothing ahead of it.
    """

    seconds: float
    order: Sequence[int]
    begins: Sequence[float]


def justified(tasks: Tasks) -> list[Justified]:
    """Orders of `tasks`, the fastest one first."""
    found = sorted(_schedules(Machines.of(tasks)), key=lambda each: each[0])
    return [Justified(seconds, in_order_of(tasks, begins), begins) for seconds, begins in found]


def in_order_of(tasks: Tasks, begins: Sequence[float], ahead: bool = True) -> list[int]:
    """The tasks by when they begin, each behind what it needs.

    A start comes before what is computed when it begins, so that it is not late; or not `ahead` of its time, behind it.
    """
    missing = [len(needs) for needs in tasks.needs]
    computed = sorted(begins[task] for task, seconds in enumerate(tasks.seconds) if seconds)

    def key(task: int) -> tuple[float, bool, int]:
        if tasks.transfers[task] is None or not ahead:
            return begins[task], tasks.transfers[task] is None, task
        before = bisect.bisect_left(computed, begins[task])
        return computed[before - 1] if before else 0.0, False, task

    ready = [key(task) for task, needs in enumerate(missing) if not needs]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, _, task = heapq.heappop(ready)
        order.append(task)
        for user in tasks.users[task]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, key(user))
    return order


@dataclass(frozen=True)
class Machines:
    """Tasks on machines that do one thing at a time; a task without a machine takes no time."""

    needs: Sequence[Sequence[int]]
    users: Sequence[Sequence[int]]
    seconds: Sequence[float]
    machine: Sequence[str]

    @classmethod
    def of(cls, tasks: Tasks) -> Machines:
        pairs = list(zip(tasks.transfers, tasks.seconds))
        seconds = [moved.demand.seconds if moved is not None else kernel for moved, kernel in pairs]
        machine = [moved.group if moved is not None else COMPUTE if kernel else "" for moved, kernel in pairs]
        return cls(tasks.needs, tasks.users, seconds, machine)

    def reversed(self) -> Machines:
        """The same, from the last to the first."""
        return Machines(self.users, self.needs, self.seconds, self.machine)

    def remaining(self) -> list[float]:
        """For each task the seconds of the longest way from its beginning to the end."""
        found = [0.0] * len(self.needs)
        missing = [len(users) for users in self.users]
        ready = [task for task, users in enumerate(missing) if not users]
        for task in ready:  # which grows
            found[task] = self.seconds[task] + max((found[user] for user in self.users[task]), default=0.0)
            for need in self.needs[task]:
                missing[need] -= 1
                if not missing[need]:
                    ready.append(need)
        return found

    def scheduled(self, priority: Sequence[float], sign: int) -> tuple[float, list[float]]:
        """When the last task ends, and when each begins, where each machine takes the first that is ready by priority.

        Of equal priority, that is the first by number, or with ``sign`` -1 the last.
        """
        missing = [len(needs) for needs in self.needs]
        begins = [0.0] * len(missing)
        ready: dict[str, list[tuple[float, int]]] = {machine: [] for machine in dict.fromkeys(self.machine) if machine}
        busy: dict[str, int] = {}
        ends: list[tuple[float, int]] = []
        now, opened = 0.0, [task for task, needs in enumerate(missing) if not needs]
        while True:
            for task in opened:  # which grows
                begins[task] = now
                if self.machine[task]:
                    heapq.heappush(ready[self.machine[task]], (priority[task], sign * task))
                else:
                    opened += self._opened(task, missing)
            for machine, waiting in ready.items():
                if waiting and machine not in busy:
                    task = sign * heapq.heappop(waiting)[1]
                    begins[task] = now
                    busy[machine] = task
                    heapq.heappush(ends, (now + self.seconds[task], task))
            if not ends:
                return now, begins
            now, task = heapq.heappop(ends)
            del busy[self.machine[task]]
            opened = self._opened(task, missing)

    def _opened(self, task: int, missing: list[int]) -> list[int]:
        found = []
        for user in self.users[task]:
            missing[user] -= 1
            if not missing[user]:
                found.append(user)
        return found


def _schedules(machines: Machines) -> Iterator[tuple[float, list[float]]]:
    """Schedules with the seconds that they take: by the longest way that is left, or as the graph was written.

    In both directions, each with the one that it is justified to.
    """
    mirror = machines.reversed()
    written = [float(task) for task in range(len(machines.needs))]
    for backwards in (False, True):
        longest = (mirror if backwards else machines).remaining()
        for first in ([-seconds for seconds in longest], [-task for task in written] if backwards else written):
            priority, turned = first, backwards
            for _ in range(2):
                end, begins = (mirror if turned else machines).scheduled(priority, -1 if turned else 1)
                if turned:
                    begins = [end - begin - seconds for begin, seconds in zip(begins, machines.seconds)]
                yield end, begins
                turned = not turned
                priority = begins
                if turned:
                    priority = [-(begin + seconds) for begin, seconds in zip(begins, machines.seconds)]
