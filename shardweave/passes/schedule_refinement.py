"""Two refinements of an order: bidirectional justification, and gathers that are delayed into gaps of their link.

Justify: orders of tasks from schedules that are made from both ends.

A list scheduler that goes forwards never lets a link idle while something is ready, though a long reduction that starts
now may keep the next layer's gather waiting. One that goes backwards, from the last task to the first, finds such
pauses: read forwards, its schedule starts everything as late as the step allows. Each schedule's times are the next
one's priorities, in the other direction ("justification": Valls, Ballestin and Quintanilla, European Journal of
Operational Research 165, 2005). Here every group of ranks, and the device itself, is a machine that does one thing at
a time; what an order really takes is for `weave.played` to say.

Pace: collectives that can wait are held until the links that they need are free.

A layer waits for its activations' collectives, whatever the order. A parameter's gather that is under way meanwhile
takes a part of their links, and makes them, and the step, so much longer; between one of them and the next, in a
*pause*, these links are free. Each gather gets the last pause that has room for it before its use, from the last use to
the first (earliest due date, from behind: Jackson 1955). A gradient's reduction may use other links than activations
do, and share these with the gathers and reductions in the pauses: it is held for the next activation's collective.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardweave.cost_model import COMPUTE
from shardweave.passes.dependency_graph import Tasks, Transfers
from shardweave.passes.list_scheduler import Key, Moment
from shardweave.passes.scheduling_priorities import cause_of


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


Edge = tuple[int, int]
"""Two tasks, of which the first comes before the second."""


def paced(tasks: Tasks, keys: Sequence[Key], moments: Sequence[Moment], most: int) -> list[list[Edge]]:
    """What comes before what where gathers are held for pauses, and where reductions are held for what they run beside.

    Each is left out where it holds nothing. Gathers are at most `most` moments ahead of their use.
    """
    begins = _begins(tasks, keys)
    return [edges for edges in (_in_pauses(tasks, begins, moments, most), _beside(tasks, begins)) if edges]


def _crowd(one: Transfers, other: Transfers) -> bool:
    """Whether two collectives that run at the same time ask more of a level's links than these have."""
    return any(part + other.demand.use.get(level, 0.0) > 1.0 for level, part in one.demand.use.items())


def _begins(tasks: Tasks, keys: Sequence[Key]) -> list[float]:
    """When each task begins if only activations' collectives, and what is computed, take time."""
    moves = [cause_of(tasks, task) in ("", "activation") for task in range(len(keys))]
    machines = Machines.of(tasks)
    machines = replace(
        machines,
        seconds=[seconds if mine else 0.0 for seconds, mine in zip(machines.seconds, moves)],
        machine=[machine if mine else "" for machine, mine in zip(machines.machine, moves)],
    )
    place = {task: float(index) for index, task in enumerate(sorted(range(len(keys)), key=keys.__getitem__))}
    return machines.scheduled([place[task] for task in range(len(keys))], 1)[1]


def _starts(tasks: Tasks, *causes: str) -> list[tuple[int, Transfers]]:
    found = enumerate(tasks.transfers)
    return [(task, moved) for task, moved in found if moved is not None and moved.what.cause in causes]


def _kinds(starts: Sequence[tuple[int, Transfers]]) -> list[Transfers]:
    """One collective of each group and use of links."""
    return list({(moved.group, *moved.demand.use.items()): moved for _, moved in starts}.values())


@dataclass
class _Pause:
    """Seconds in which no activation's collective runs, and the wait for the one before; -1 for the first."""

    wait: int
    begin: float
    end: float


def _in_pauses(tasks: Tasks, begins: Sequence[float], moments: Sequence[Moment], most: int) -> list[Edge]:
    pauses = list(_pauses(tasks, begins))
    due = [min(begins[use] for use in moment.uses) for moment in moments]
    edges: list[Edge] = []
    for number in reversed(range(len(moments))):
        moved = [tasks.transfers[start] for start in moments[number].starts]
        seconds = sum(each.demand.seconds for each in moved if each is not None)
        pause = _last_with_room(pauses, seconds, due[number - most] if number >= most else 0.0, due[number])
        if pause is not None and pause.wait >= 0:
            edges += [(pause.wait, start) for start in moments[number].starts]
    return edges


def _pauses(tasks: Tasks, begins: Sequence[float]) -> Iterator[_Pause]:
    """The times between activations' collectives that share links with gathers."""
    waits = {start: wait for wait, start in enumerate(tasks.started) if start >= 0}
    gathers = _kinds(_starts(tasks, "parameter"))
    busy = [
        (begins[start], begins[start] + moved.demand.seconds, waits[start])
        for start, moved in _starts(tasks, "activation")
        if start in waits and any(_crowd(moved, gather) for gather in gathers)
    ]
    free, before = 0.0, -1
    for begin, end, wait in [*sorted(busy), (math.inf, math.inf, -1)]:
        if begin > free:
            yield _Pause(before, free, begin)
        if end > free:
            free, before = end, wait


def _last_with_room(pauses: Sequence[_Pause], seconds: float, earliest: float, due: float) -> _Pause | None:
    """Where what is due then is gathered: in the last pause with room for it, or else the one with most."""
    room = {index: min(p.end, due) - p.begin for index, p in enumerate(pauses) if earliest <= p.begin < due}
    if not room or max(room.values()) <= 0:
        return None
    fitting = [index for index, free in room.items() if free >= seconds]
    pause = pauses[fitting[-1] if fitting else max(room, key=lambda index: (room[index], index))]
    pause.end = max(pause.begin, min(pause.end, due) - seconds)
    return pause


def _beside(tasks: Tasks, begins: Sequence[float]) -> list[Edge]:
    activations = sorted(_starts(tasks, "activation"), key=lambda each: begins[each[0]])
    times = [begins[start] for start, _ in activations]
    others = _kinds(_starts(tasks, "parameter", "gradient"))
    edges: list[Edge] = []
    for start, moved in _starts(tasks, "gradient"):
        if _is_needed(tasks, start) or not any(o.group != moved.group and _crowd(moved, o) for o in others):
            continue
        following = activations[bisect.bisect_left(times, begins[start]) :]
        long = moved.demand.seconds / 4  # some room for it
        beside = next((each for each in following if each[1].demand.seconds >= long), None)
        if beside is not None and not _crowd(moved, beside[1]):
            edges.append((beside[0], start))
    return edges


def _is_needed(tasks: Tasks, start: int) -> bool:
    """Whether something is computed, or moved, with what a collective brings."""
    users = tasks.users[start]
    return any(tasks.transfers[u] is not None or tasks.seconds[u] > 0 or _is_needed(tasks, u) for u in users)
