"""Two refinements of list scheduling: bidirectional scheduling, and collectives that are delayed into gaps of a link.

Bidirectional scheduling
    A list scheduler that goes forward never lets a link idle while a collective is ready, though a long reduction that
    starts now may delay the next layer's all-gather. A list scheduler that goes backward, from the last task to the
    first, finds such gaps: read forward, its schedule starts every task as late as the step allows. The times of one
    schedule are the priorities of the next one, in the other direction ("justification": Valls, Ballestin and
    Quintanilla, European Journal of Operational Research 165, 2005). Here every process group, and the device itself,
    is a machine that does one thing at a time. `list_scheduler.simulate_order` tells what an order really takes.

Delayed collectives
    Collectives of activations are on the critical path. An all-gather of a parameter that runs at the same time takes a
    part of their bandwidth, and makes the step longer; in the gaps between them the links are free. Each all-gather is
    delayed into the last gap before its use that has room for it, from the last use to the first (earliest due date,
    backward: Jackson 1955). A gradient reduction may use other links than activations do, and share these with the
    all-gathers and reductions in the gaps: it is delayed to the next collective of activations.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardweave.cost_model import COMPUTE
from shardweave.passes.dependency_graph import CollectiveStart, Tasks
from shardweave.passes.list_scheduler import GatherGroup, Key
from shardweave.passes.scheduling_priorities import transfer_cause


@dataclass(frozen=True)
class BidirectionalSchedule:
    """An order of tasks, and its time under the assumption that no two process groups share a link.

    Where they do share one, a collective that starts before its time takes bandwidth from others. `begins` has the time
    at which each task begins in the schedule; `order_by_begin` makes an order from it that starts nothing earlier.
    """

    seconds: float
    order: Sequence[int]
    begins: Sequence[float]


def bidirectional_schedules(tasks: Tasks) -> list[BidirectionalSchedule]:
    """Schedules of `tasks` from both ends, the fastest one first."""
    found = sorted(_schedules(Machines.of(tasks)), key=lambda each: each[0])
    return [BidirectionalSchedule(seconds, order_by_begin(tasks, begins), begins) for seconds, begins in found]


def order_by_begin(tasks: Tasks, begins: Sequence[float], ahead: bool = True) -> list[int]:
    """The tasks in the order in which they begin, each behind the tasks that it needs.

    A collective that begins while a kernel runs is started before this kernel, so that it is not late. With `ahead`
    False it is started behind it, so that it is not early.
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
    """Tasks on machines that do one thing at a time (a job shop). A task without a machine takes no time."""

    needs: Sequence[Sequence[int]]
    users: Sequence[Sequence[int]]
    seconds: Sequence[float]
    machine: Sequence[str]

    @classmethod
    def of(cls, tasks: Tasks) -> Machines:
        """One machine for the device's kernels and one for each process group."""
        pairs = list(zip(tasks.transfers, tasks.seconds))
        seconds = [moved.demand.seconds if moved is not None else kernel for moved, kernel in pairs]
        machine = [moved.group if moved is not None else COMPUTE if kernel else "" for moved, kernel in pairs]
        return cls(tasks.needs, tasks.users, seconds, machine)

    def reversed(self) -> Machines:
        """The same tasks with all dependences reversed."""
        return Machines(self.users, self.needs, self.seconds, self.machine)

    def remaining(self) -> list[float]:
        """For each task the seconds of the longest path from its begin to the end (its tail)."""
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
        """The makespan, and the begin of each task, where each machine takes the ready task with the lowest `priority`.

        Of equal ones, it takes the one with the lowest number, or with ``sign`` -1 the highest.
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
        """The tasks that become ready when this one ends."""
        found = []
        for user in self.users[task]:
            missing[user] -= 1
            if not missing[user]:
                found.append(user)
        return found


def _schedules(machines: Machines) -> Iterator[tuple[float, list[float]]]:
    """Schedules with their times: by the longest path that is left, or by the order of the graph.

    Both are made in both directions, and from each schedule the next one by justification.
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


Edge = tuple[int, int]
"""A dependence between two tasks: the first comes before the second."""


def delayed_gathers(
    tasks: Tasks, keys: Sequence[Key], groups: Sequence[GatherGroup], max_ahead: int
) -> list[list[Edge]]:
    """Two sets of dependences: one delays all-gathers into gaps, one delays reductions beside activations' collectives.

    A set that delays nothing is left out. All-gathers start at most `max_ahead` groups ahead of their use.
    """
    begins = _begins(tasks, keys)
    found = _delayed_into_gaps(tasks, begins, groups, max_ahead), _delayed_beside_activations(tasks, begins)
    return [edges for edges in found if edges]


def _share_scarce_links(one: CollectiveStart, other: CollectiveStart) -> bool:
    """Whether two collectives that run at the same time need more than the bandwidth of one level's links."""
    return any(part + other.demand.use.get(level, 0.0) > 1.0 for level, part in one.demand.use.items())


def _begins(tasks: Tasks, keys: Sequence[Key]) -> list[float]:
    """When each task begins if only kernels and collectives of activations take time."""
    moves = [transfer_cause(tasks, task) in ("", "activation") for task in range(len(keys))]
    machines = Machines.of(tasks)
    machines = replace(
        machines,
        seconds=[seconds if mine else 0.0 for seconds, mine in zip(machines.seconds, moves)],
        machine=[machine if mine else "" for machine, mine in zip(machines.machine, moves)],
    )
    place = {task: float(index) for index, task in enumerate(sorted(range(len(keys)), key=keys.__getitem__))}
    return machines.scheduled([place[task] for task in range(len(keys))], 1)[1]


def _starts(tasks: Tasks, *causes: str) -> list[tuple[int, CollectiveStart]]:
    """The tasks that start a collective of one of these causes, with the collective."""
    found = enumerate(tasks.transfers)
    return [(task, moved) for task, moved in found if moved is not None and moved.what.cause in causes]


def _distinct(starts: Sequence[tuple[int, CollectiveStart]]) -> list[CollectiveStart]:
    """One collective for each combination of process group and use of links."""
    return list({(moved.group, *moved.demand.use.items()): moved for _, moved in starts}.values())


@dataclass
class _Gap:
    """A time without a collective of activations, and the wait of the collective before it; -1 for the first gap."""

    wait: int
    begin: float
    end: float


def _delayed_into_gaps(
    tasks: Tasks, begins: Sequence[float], groups: Sequence[GatherGroup], max_ahead: int
) -> list[Edge]:
    """Each all-gather starts after the collective of activations before the last gap that has room for it."""
    gaps = list(_gaps(tasks, begins))
    due = [min(begins[use] for use in group.uses) for group in groups]
    edges: list[Edge] = []
    for number in reversed(range(len(groups))):
        moved = [tasks.transfers[start] for start in groups[number].starts]
        seconds = sum(each.demand.seconds for each in moved if each is not None)
        gap = _last_with_room(gaps, seconds, due[number - max_ahead] if number >= max_ahead else 0.0, due[number])
        if gap is not None and gap.wait >= 0:
            edges += [(gap.wait, start) for start in groups[number].starts]
    return edges


def _gaps(tasks: Tasks, begins: Sequence[float]) -> Iterator[_Gap]:
    """The gaps between those collectives of activations that share links with all-gathers."""
    waits = {start: wait for wait, start in enumerate(tasks.started) if start >= 0}
    gathers = _distinct(_starts(tasks, "parameter"))
    busy = [
        (begins[start], begins[start] + moved.demand.seconds, waits[start])
        for start, moved in _starts(tasks, "activation")
        if start in waits and any(_share_scarce_links(moved, gather) for gather in gathers)
    ]
    free, before = 0.0, -1
    for begin, end, wait in [*sorted(busy), (math.inf, math.inf, -1)]:
        if begin > free:
            yield _Gap(before, free, begin)
        if end > free:
            free, before = end, wait


def _last_with_room(gaps: Sequence[_Gap], seconds: float, earliest: float, due: float) -> _Gap | None:
    """The last gap with room for an all-gather that is due then, or else the one with the most room; it is used up."""
    room = {index: min(p.end, due) - p.begin for index, p in enumerate(gaps) if earliest <= p.begin < due}
    if not room or max(room.values()) <= 0:
        return None
    fitting = [index for index, free in room.items() if free >= seconds]
    gap = gaps[fitting[-1] if fitting else max(room, key=lambda index: (room[index], index))]
    gap.end = max(gap.begin, min(gap.end, due) - seconds)
    return gap


def _delayed_beside_activations(tasks: Tasks, begins: Sequence[float]) -> list[Edge]:
    """Each gradient reduction that can wait starts with the next collective of activations that is long enough."""
    activations = sorted(_starts(tasks, "activation"), key=lambda each: begins[each[0]])
    times = [begins[start] for start, _ in activations]
    others = _distinct(_starts(tasks, "parameter", "gradient"))
    edges: list[Edge] = []
    for start, moved in _starts(tasks, "gradient"):
        if _is_needed(tasks, start) or not any(
            o.group != moved.group and _share_scarce_links(moved, o) for o in others
        ):
            continue
        following = activations[bisect.bisect_left(times, begins[start]) :]
        long = moved.demand.seconds / 4  # shorter ones hide too little of it
        beside = next((each for each in following if each[1].demand.seconds >= long), None)
        if beside is not None and not _share_scarce_links(moved, beside[1]):
            edges.append((beside[0], start))
    return edges


def _is_needed(tasks: Tasks, start: int) -> bool:
    """Whether a kernel or another collective needs the result of a collective."""
    users = tasks.users[start]
    return any(tasks.transfers[u] is not None or tasks.seconds[u] > 0 or _is_needed(tasks, u) for u in users)
