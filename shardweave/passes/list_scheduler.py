"""Weave: a list scheduler over a device's compute stream and the streams of its groups.

Tasks are taken in the order of their keys, as far as their data allow: when the first one has to wait for a collective,
one of those behind it that need not runs meanwhile. Time passes as it does in the simulator (`cost_model.streams`), so
that what is found here is what will be predicted.

Three things are held back, for memory: the gather of a parameter until the one used `lookahead` moments before it is
about to be used, the start of a gradient's reduction until no more than `reductions` others are under way, and what
would be computed before its turn until it fits into `room`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardweave.cost_model import ALONE, Contention, Streams, Transfer
from shardweave.ir import VerifyError
from shardweave.passes.dependency_graph import Tasks

Key = tuple[int, ...]


@dataclass(frozen=True)
class Moment:
    """The gathers of the parameters that are first used together.

    Parameters
    ----------
    starts : tuple of int
        Their tasks, in order.
    uses : tuple of int
        The tasks of which the first one begins the moment.
    """

    starts: tuple[int, ...]
    uses: tuple[int, ...]


@dataclass(frozen=True)
class Woven:
    """An order of tasks, and what it comes to.

    Parameters
    ----------
    order : sequence of int
    seconds : float
        From the first task to the last.
    peak_bytes : int
        The most that the part holds at once beyond what it found, and gave back, at its beginning.
    """

    order: Sequence[int]
    seconds: float
    peak_bytes: int


def weave(
    tasks: Tasks,
    keys: Sequence[Key],
    moments: Sequence[Moment] = (),
    *,
    lookahead: int,
    reductions: int,
    room: float = math.inf,
    most: float = math.inf,
    contention: Contention = ALONE,
) -> Woven:
    """Order `tasks`.

    Parameters
    ----------
    keys : sequence of tuples of int
        What comes first, of tasks that are ready at once; each larger than those of what is never to come later.
    moments : sequence of Moment
        The gathers that are held back, in the order of their uses.
    lookahead : int
        How many moments are gathered ahead of the one in use.
    reductions : int
        How many gradients may be on their way to their states when another one starts.
    room : float
        Bytes. What would hold more is not computed before its turn, as long as time may pass instead.
    most : float
        Bytes. What would hold more waits for gradients on their way, and nothing is gathered ahead of the next moment.
    contention : Contention
        What compute and collectives take beside each other.
    """
    return _Weaver(tasks, keys, moments, lookahead, reductions, room, most, contention).run()


def played(tasks: Tasks, order: Sequence[int], contention: Contention = ALONE) -> Woven:
    """`tasks` in this order, but that what a collective brings is waited for as late as it is read."""
    device = _Device(tasks, contention)
    found: list[int] = []
    done = [False] * len(order)
    late: list[int] = []  # waits for collectives that are under way, and views of what they bring

    def has_arrived(task: int) -> bool:
        return device.has_arrived(task) if tasks.started[task] >= 0 else all(done[need] for need in tasks.needs[task])

    def run(task: int) -> None:
        for need in tasks.needs[task]:
            if not done[need]:
                run(need)
        device.run(task)
        done[task] = True
        found.append(task)

    for task in order:
        if any(map(has_arrived, late)):
            for each in late:
                if not done[each] and has_arrived(each):
                    run(each)
            late = [each for each in late if not done[each]]
        free = tasks.transfers[task] is None and not tasks.seconds[task]
        if free and not has_arrived(task):
            late.append(task)
        else:
            run(task)
    for task in late:
        if not done[task]:
            run(task)
    return Woven(found, device.streams.now, tasks.peak_bytes(found))


class _Device:
    """A device's streams, on which tasks are run one after another."""

    def __init__(self, tasks: Tasks, contention: Contention) -> None:
        self.tasks, self.streams = tasks, Streams(contention)
        self.transfers: dict[int, Transfer] = {}

    def run(self, task: int) -> None:
        """Wait for a collective, start one or compute, as the task does."""
        tasks, moved = self.tasks, self.tasks.transfers[task]
        if tasks.started[task] >= 0:
            self.streams.wait(self.transfers[tasks.started[task]])
        elif moved is not None:
            self.transfers[task] = Transfer(moved.group, moved.demand)
            self.streams.start(self.transfers[task])
        elif tasks.seconds[task]:
            self.streams.compute(tasks.seconds[task])

    def has_arrived(self, wait: int) -> bool:
        """Whether what a task waits for is there."""
        return self.transfers[self.tasks.started[wait]].end is not None


_NOW: Key = (-2,)
_NOW_TOO: Key = (-1,)


class _Weaver:
    def __init__(
        self,
        tasks: Tasks,
        keys: Sequence[Key],
        moments: Sequence[Moment],
        lookahead: int,
        reductions: int,
        room: float,
        most: float,
        contention: Contention,
    ) -> None:
        self.tasks, self.keys, self.moments = tasks, keys, moments
        self.lookahead, self.reductions, self.room, self.most = lookahead, reductions, room, most
        self.device = _Device(tasks, contention)
        self.streams = self.device.streams
        self.order: list[int] = []
        self.done = [False] * len(tasks.nodes)
        self.missing = [len(needs) for needs in tasks.needs]
        self.ready: list[tuple[Key, int]] = []
        self.waiting: list[int] = []  # waits whose collective is under way
        self.reducing: deque[int] = deque()  # the waits of gradients on their way, oldest first
        self.seen = -1, -1, -1
        """What could be offered depends on when that was last looked at: see `_arrive`."""
        self.readers = tasks.readers()
        self.born = tasks.born_bytes
        self.held = self.peak = 0
        self.moment_of: dict[int, int] = {}  # of held-back starts and of what only they need
        self.begins: dict[int, int] = {}  # the moment that a use begins
        for index, moment in enumerate(moments):
            for start in moment.starts:
                self._hold(start, index)
            for use in moment.uses:
                self.begins[use] = max(index, self.begins.get(use, 0))
        self.turns = iter(sorted(range(len(keys)), key=keys.__getitem__))
        self.turn = next(self.turns, -1)
        """The first task, by the keys, that has not run."""
        self.parked: dict[int, list[int]] = {}  # by the moment: what is ready but for its release
        self.begun = -1
        self.released = -1
        self.released = self._ahead(-1)

    def _hold(self, task: int, moment: int) -> None:
        self.moment_of[task] = moment
        for need in self.tasks.needs[task]:
            if len(self.tasks.users[need]) == 1 and self.tasks.started[need] < 0:
                self._hold(need, moment)

    def run(self) -> Woven:
        for task, missing in enumerate(self.missing):
            if not missing:
                self._offer(task)
        while len(self.order) < len(self.done):
            self._arrive(idle=False)
            while self.ready and self.done[self.ready[0][1]]:
                heapq.heappop(self.ready)
            if not self.ready or self._too_early(*self.ready[0]):
                self._idle()
            else:
                self._take(heapq.heappop(self.ready)[1])
        return Woven(self.order, self.streams.now, self.peak)

    def _too_early(self, key: Key, task: int) -> bool:
        """Whether a task is to wait for its turn, for memory."""
        more = self.born[task]
        if self.held + more <= self.room or key < (0,) or not self.streams.is_running:
            return False
        while self.done[self.turn]:
            self.turn = next(self.turns)
        tasks, sizes = self.tasks, self.tasks.sizes
        less = sum(sizes[each] for each in tasks.lives[task] if self._ends(each, self.readers[each] - 1))
        return task != self.turn and more > less

    def _ends(self, storage: int, readers: int) -> bool:
        """Whether a storage that so many tasks are still to use is freed."""
        return not readers and not self.tasks.kept[storage]

    def _arrive(self, idle: bool) -> None:
        """Offer the waits whose collectives are done; the newest gradient's not while there is something to compute."""
        newest = self.reducing[-1] if self.reducing and not idle else -1
        now = self.streams.ended, len(self.waiting), newest
        if now == self.seen:  # nothing has arrived, and nothing more is waited for
            return
        if any(self.device.has_arrived(wait) for wait in self.waiting if wait != newest):
            still = []
            for wait in self.waiting:
                if wait == newest or not self.device.has_arrived(wait):
                    still.append(wait)
                elif not self.done[wait]:
                    heapq.heappush(self.ready, (self.keys[wait], wait))
            self.waiting = still
        self.seen = self.streams.ended, len(self.waiting), newest

    def _idle(self) -> None:
        """Nothing can run: let a parameter be gathered that is needed now, or time pass."""
        if self.released <= self.begun < len(self.moments) - 1:
            self._release(self.begun + 1)
        elif self.streams.is_running:
            self.streams.advance()
        elif self.parked:
            self._release(self.released + 1)
        else:
            self._arrive(idle=True)
            if not self.ready:
                left = [node.name for node, done in zip(self.tasks.nodes, self.done) if not done]
                raise VerifyError(f"nothing can run, but {len(left)} nodes have not: {left[:5]} need each other")

    def _release(self, moment: int) -> bool:
        """Let the gathers up to this moment start; whether some do now."""
        early = [task for index in range(self.released + 1, moment + 1) for task in self.parked.pop(index, ())]
        self.released = max(self.released, moment)
        for task in early:
            heapq.heappush(self.ready, (_NOW, task))
        return bool(early)

    def _ahead(self, moment: int) -> int:
        """Up to which moment is gathered after one has begun: as far ahead as may be held."""
        held = self.held
        for index in range(max(self.released, moment) + 1, min(moment + self.lookahead, len(self.moments) - 1) + 1):
            held += sum(self.born[start] for start in self.moments[index].starts)
            if held > self.most:
                return index - 1
        return moment + self.lookahead

    def _offer(self, task: int) -> None:
        """All that a task needs is there, but for the end of a collective."""
        if self.tasks.started[task] >= 0:
            self.waiting.append(task)
            return
        moment = self.moment_of.get(task)
        if moment is not None and moment > self.released:
            self.parked.setdefault(moment, []).append(task)
            return
        at_once = moment is not None or self.tasks.transfers[task] is not None
        heapq.heappush(self.ready, (_NOW if at_once else self.keys[task], task))

    def _take(self, task: int) -> None:
        """Run a task now."""
        moment = self.begins.get(task)
        if moment is not None and moment > self.begun:
            self.begun = moment
            if self._release(self._ahead(moment)):  # they start before the one that begins the moment
                heapq.heappush(self.ready, (_NOW_TOO, task))
                return
        if self.tasks.started[task] < 0:
            self._wait_for_room(self.born[task] + self.tasks.sending[task] + self.tasks.scratch[task])
        transfers = self.tasks.transfers[task]
        if transfers is not None and transfers.what.cause == "gradient":
            while len(self.reducing) > self.reductions:
                self._wait_for_oldest()
            self.reducing.extend(self.tasks.users[task])
        self.device.run(task)
        if self.tasks.started[task] >= 0 and task in self.reducing:
            self.reducing.remove(task)
        self._finish(task)

    def _wait_for_room(self, more: int) -> None:
        """Wait for gradients on their way where what is held besides would be too much."""
        while more and self.reducing and self.held + more > self.most:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest gradient that is on its way."""
        wait = self.reducing.popleft()
        self.device.run(wait)
        self._finish(wait)

    def _finish(self, task: int) -> None:
        self.order.append(task)
        self.done[task] = True
        tasks, readers = self.tasks, self.readers
        self.held += self.born[task] + tasks.sending[task]
        self.peak = max(self.peak, self.held + tasks.scratch[task])
        if tasks.started[task] >= 0:
            self.held -= tasks.sending[tasks.started[task]]
        for storage in tasks.lives[task]:
            readers[storage] -= 1
            if not readers[storage] and not tasks.kept[storage]:
                self.held -= tasks.sizes[storage]
        for user in tasks.users[task]:
            self.missing[user] -= 1
            if not self.missing[user]:
                self._offer(user)
