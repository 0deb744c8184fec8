"""The dependency graph of a step, and a list scheduler over the streams of a device.

`TaskGraph` has a task for each node, with its dependences, time and memory.

The scheduler runs the ready task with the smallest key. Where the task that is next by its key has to wait for a
collective, a later one that is ready runs meanwhile. Time passes as in the simulator (`cost_model.streams`), so the
scheduler's times are those that the simulator predicts for the same order.

Three kinds of tasks are delayed to save memory:

- The all-gather of a parameter, until the group of parameters `max_prefetch` groups before its own is in use.
- The start of a gradient reduction, until at most `reductions` others are under way.
- A task that would run before its turn by the keys, until the memory that it adds fits into `compute_limit`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from shardweave.cost_model import (
    NO_CONTENTION,
    NO_SHARING,
    Contention,
    Demand,
    Liveness,
    MicroBatchSharing,
    NodeCosts,
    Storage,
    Streams,
    Transfer,
    liveness,
)
from shardweave.ir import Collective, VerifyError, group_name
from shardweave.sharding import collective, info, is_start, is_wait, layer_of


@dataclass(frozen=True)
class CollectiveStart:
    """The collective that a task starts: its process group, its demand on the links, and its note in the graph."""

    group: str
    demand: Demand
    collective: Collective


@dataclass(frozen=True)
class LeftOut:
    """Equal layers that were left out of a graph, between the last two of these that it has.

    Parameters
    ----------
    number : int
        How many.
    values : frozenset of Node
        What stands for the values of each of them.
    last_two : tuple of (str, str)
        The names of the layer that the forward runs before them, and of the one that it runs behind them.
    """

    number: int
    values: frozenset[fx.Node]
    last_two: tuple[str, str]

    def count(self, node: fx.Node) -> int:
        """How many more there are of a value."""
        return self.number if node in self.values else 0

    def before(self, nodes: Sequence[fx.Node], needs: Sequence[Sequence[int]], seconds: Sequence[float]) -> int:
        """The index of the first kernel of the forward, or the backward, that reads what these layers lead to.

        The backward runs them the other way round. A layer's gathers and recomputation may come ahead of its turn.
        """
        behind = self.last_two[0 if info(nodes[0]).backward else 1]
        layers = [layer_of(info(node).op) for node in nodes]
        reading: set[int] = set()
        for index, node in enumerate(nodes):
            if layers[index] != behind or info(node).recomputed:
                continue
            if any(need in reading or layers[need] != behind for need in needs[index]):
                reading.add(index)
                if seconds[index]:
                    return index
        return len(nodes) - 1


@dataclass(frozen=True)
class TaskGraph:
    """The nodes of the forward or of the backward as tasks with their dependences, numbered in the graph's order.

    Parameters
    ----------
    nodes : sequence of Node
    needs, users : for each task the tasks that it needs, and the tasks that need it
    seconds : for each task the time of its kernel, 0 without a kernel
    transfers : for each task the collective that it starts, or None
    started : for each wait the task that starts its collective, else -1
    born : for each task the numbers of the storages that it allocates
    lives : for each task the numbers of the storages that it uses
    scratch : for each task the bytes of workspace while it runs
    sending : for each start the bytes that it takes until its wait, beside its input and its result
    sizes : for each storage its bytes
    kept : for each storage whether it outlives the part
    left_out : for each task the bytes that layers left out of the graph allocate, less what they free, before it runs
    left_out_kept_bytes : what these layers leave behind
    """

    nodes: Sequence[fx.Node]
    needs: Sequence[Sequence[int]]
    users: Sequence[Sequence[int]]
    seconds: Sequence[float]
    transfers: Sequence[CollectiveStart | None]
    started: Sequence[int]
    born: Sequence[Sequence[int]]
    lives: Sequence[Sequence[int]]
    scratch: Sequence[int]
    sending: Sequence[int]
    sizes: Sequence[int]
    kept: Sequence[bool]
    left_out: Sequence[int] = ()
    left_out_kept_bytes: int = 0

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        nodes: Sequence[fx.Node],
        prices: NodeCosts,
        left_out: Sequence[LeftOut] = (),
        repeated: MicroBatchSharing = NO_SHARING,
        live: Liveness | None = None,
    ) -> TaskGraph:
        """The tasks of these nodes, which are in the order of `graph`; `live` is its liveness, if that is known.

        What layers that were left out of the graph leave to another part, and what they free of another part, counts
        from the task on that they run before. A storage that several runs of the graph share takes no memory here and
        is not freed. A running sum of gradients is freed.
        """
        # 1. Dependences.
        number = {node: index for index, node in enumerate(nodes)}
        needs = [[number[source] for source in node.all_input_nodes if source in number] for node in nodes]
        users: list[list[int]] = [[] for _ in nodes]
        for index, sources in enumerate(needs):
            for source in sources:
                users[source].append(index)
        # 2. Storages: who allocates and uses them, how large they are, and which of them outlive the part.
        found = live or liveness(graph)
        shared, sums = repeated.storages(graph, found)
        storages: dict[Storage, int] = {}
        sizes: list[int] = []
        kept: list[bool] = []

        def storage(key: Storage) -> int:
            if key not in storages:
                storages[key] = len(sizes)
                sizes.append(0 if key in shared else prices.of(key[0]).sizes[key[1]])
                kept.append(key in shared or (key[0].op != "call_function" and key not in sums))
            return storages[key]

        lives: list[list[int]] = []
        born: list[list[int]] = []
        for node in nodes:
            used = [node, *node.all_input_nodes]
            if is_wait(node):
                used += [source for start in node.all_input_nodes for source in start.all_input_nodes]
            lives.append(list(dict.fromkeys(storage(key) for value in used for key in found.where[value])))
            born.append([storage(key) for key in found.born.get(node, ())])
        inside = set(number)
        for node in graph.nodes:
            if node.op == "output" or node not in inside:
                for source in node.all_input_nodes:
                    if source in inside:
                        for key in found.where[source]:
                            kept[storage(key)] = True
        # 3. Times and collectives.
        transfers: list[CollectiveStart | None] = []
        for node in nodes:
            moved = collective(node) if is_start(node) else None
            transfers.append(
                None if moved is None else CollectiveStart(group_name(moved.axes), prices.collective(moved), moved)
            )
        started = [number.get(node.all_input_nodes[0], -1) if is_wait(node) else -1 for node in nodes]
        costs = [prices.of(node) for node in nodes]
        seconds = [cost.seconds if cost.kernel else 0.0 for cost in costs]
        scratch, sending = [cost.scratch for cost in costs], [cost.held for cost in costs]
        # 4. Layers that were left out.
        here = {each for own in born for each in own}
        others, left_out_kept_bytes = [0] * len(nodes), 0
        for layers in left_out:
            of_layer = [(each, layers.count(key[0]) * sizes[each]) for key, each in storages.items()]
            allocated = sum(size for each, size in of_layer if kept[each] and each in here)
            freed = sum(size for each, size in of_layer if not kept[each] and each not in here)
            others[layers.before(nodes, needs, seconds)] += allocated - freed
            left_out_kept_bytes += allocated
        memory = born, lives, scratch, sending, sizes, kept, others, left_out_kept_bytes
        return cls(nodes, needs, users, seconds, transfers, started, *memory)

    @cached_property
    def born_bytes(self) -> Sequence[int]:
        """For each task the bytes that it allocates, and those that layers left out do before it."""
        own = [sum(self.sizes[storage] for storage in born) for born in self.born]
        return [size + more for size, more in zip(own, self.left_out, strict=True)] if self.left_out else own

    @cached_property
    def kept_bytes(self) -> int:
        """The bytes that the part leaves behind: the least that any order holds at once."""
        own = sum(self.sizes[storage] for born in self.born for storage in born if self.kept[storage])
        return own + self.left_out_kept_bytes

    @cached_property
    def _readers(self) -> Sequence[int]:
        found = [0] * len(self.sizes)
        for used in self.lives:
            for storage in used:
                found[storage] += 1
        return found

    def readers(self) -> list[int]:
        """How many tasks use each storage."""
        return list(self._readers)

    def peak_bytes(self, order: Sequence[int]) -> int:
        """The peak of the part in this order, without storages that were there before; bytes."""
        readers, born, kept, sizes = self.readers(), self.born_bytes, self.kept, self.sizes
        held = peak = 0
        for task in order:
            held += born[task] + self.sending[task]
            peak = max(peak, held + self.scratch[task])
            if self.started[task] >= 0:
                held -= self.sending[self.started[task]]
            for storage in self.lives[task]:
                readers[storage] -= 1
                if not readers[storage] and not kept[storage]:
                    held -= sizes[storage]
        return peak

    def after(self, edges: Sequence[tuple[int, int]]) -> TaskGraph:
        """These tasks with further dependences: the second task of each pair also needs the first."""
        needs, users = [list(each) for each in self.needs], [list(each) for each in self.users]
        for before, task in set(edges):
            if before not in needs[task]:
                needs[task].append(before)
                users[before].append(task)
        return replace(self, needs=needs, users=users)


Key = tuple[int, ...]


@dataclass(frozen=True)
class GatherGroup:
    """The all-gathers of the parameters that one task is the first to use.

    Parameters
    ----------
    starts : tuple of int
        The tasks that start the all-gathers, in order.
    uses : tuple of int
        The tasks that use the parameters. The group is in use from the first of these tasks on.
    """

    starts: tuple[int, ...]
    uses: tuple[int, ...]


@dataclass(frozen=True)
class ScheduledOrder:
    """An order of tasks with its time and its memory.

    Parameters
    ----------
    tasks : TaskGraph
    order : sequence of int
    seconds : float
        The time from the first task's begin to the last one's end.
    compute_limits, communication_limits : (float, float)
        List scheduling makes the same order under each limit from the first number of bytes to the second.
    """

    tasks: TaskGraph
    order: Sequence[int]
    seconds: float
    compute_limits: tuple[float, float] = (-math.inf, math.inf)
    communication_limits: tuple[float, float] = (-math.inf, math.inf)

    @cached_property
    def peak_bytes(self) -> int:
        """The peak of the part, without storages that were there before."""
        return self.tasks.peak_bytes(self.order)

    def is_for(self, compute_limit: float, communication_limit: float) -> bool:
        """Whether list scheduling makes the same order under these limits."""
        (low, high), (lowest, highest) = self.compute_limits, self.communication_limits
        return low <= compute_limit <= high and lowest <= communication_limit <= highest


def list_schedule(
    tasks: TaskGraph,
    keys: Sequence[Key],
    groups: Sequence[GatherGroup] = (),
    *,
    max_prefetch: int,
    reductions: int,
    compute_limit: float = math.inf,
    communication_limit: float = math.inf,
    contention: Contention = NO_CONTENTION,
) -> ScheduledOrder:
    """Order `tasks` by list scheduling.

    Parameters
    ----------
    keys : sequence of tuples of int
        The priority of each task: of the tasks that are ready, the one with the smallest key runs first. A task's key
        is larger than the keys of the tasks that it must not precede.
    groups : sequence of GatherGroup
        The all-gathers that are delayed, in the order of their uses.
    max_prefetch : int
        How many groups may be gathered ahead of the group in use.
    reductions : int
        How many gradient reductions may be under way when another one starts.
    compute_limit : float
        Bytes. A task that would hold more is not run before its turn while a collective is under way.
    communication_limit : float
        Bytes. A task that would hold more first waits for gradient reductions. A group that would hold more is not
        gathered ahead.
    contention : Contention
        How compute and collectives slow each other down.
    """
    limits = max_prefetch, reductions, compute_limit, communication_limit
    return _ListScheduler(tasks, keys, groups, *limits, contention).run()


def simulate_order(tasks: TaskGraph, order: Sequence[int], contention: Contention = NO_CONTENTION) -> ScheduledOrder:
    """Run `tasks` in this order, with each wait, and views of its result, delayed until the collective has ended.

    A task that reads the result before that waits for it.
    """
    device = _Device(tasks, contention)
    found: list[int] = []
    done = [False] * len(order)
    late: list[int] = []  # delayed waits, and views of their results

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
    return ScheduledOrder(tasks, found, device.streams.now)


class _Device:
    """The streams of one device. They run one task after another."""

    def __init__(self, tasks: TaskGraph, contention: Contention) -> None:
        self.tasks, self.streams = tasks, Streams(contention)
        self.transfers: dict[int, Transfer] = {}

    def run(self, task: int) -> None:
        """Run a task: a wait for a collective, a start of one, or a kernel."""
        tasks, moved = self.tasks, self.tasks.transfers[task]
        if tasks.started[task] >= 0:
            self.streams.wait(self.transfers[tasks.started[task]])
        elif moved is not None:
            self.transfers[task] = Transfer(moved.group, moved.demand)
            self.streams.start(self.transfers[task])
        elif tasks.seconds[task]:
            self.streams.compute(tasks.seconds[task])

    def has_arrived(self, wait: int) -> bool:
        """Whether the collective that a wait belongs to has ended."""
        return self.transfers[self.tasks.started[wait]].end is not None


class _Limit:
    """A limit in bytes; `low` and `high` are the smallest and largest that all decisions so far are the same under."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.low, self.high = -math.inf, math.inf

    def allows(self, size: int) -> bool:
        """Whether so many bytes are within the limit."""
        if size <= self.limit:
            self.low = max(self.low, size)
            return True
        self.high = min(self.high, size - 1)
        return False


# Keys before those of all tasks: of tasks that start a collective, and of the first use of the gathers just started.
_NOW: Key = (-2,)
_RIGHT_BEHIND: Key = (-1,)


class _ListScheduler:
    """The state of one run of `list_schedule`."""

    def __init__(
        self,
        tasks: TaskGraph,
        keys: Sequence[Key],
        groups: Sequence[GatherGroup],
        max_prefetch: int,
        reductions: int,
        compute_limit: float,
        communication_limit: float,
        contention: Contention,
    ) -> None:
        self.tasks, self.keys, self.groups = tasks, keys, groups
        self.max_prefetch, self.reductions = max_prefetch, reductions
        self.compute_limit, self.communication_limit = _Limit(compute_limit), _Limit(communication_limit)
        self.device = _Device(tasks, contention)
        self.streams = self.device.streams
        self.order: list[int] = []
        self.done = [False] * len(tasks.nodes)
        self.missing = [len(needs) for needs in tasks.needs]
        self.ready: list[tuple[Key, int]] = []
        self.waiting: list[int] = []  # the waits of collectives that are under way
        self.reductions_under_way: deque[int] = deque()  # the waits of gradient reductions under way, oldest first
        self.last_looked_at = -1, -1, -1
        """What `_offer_arrived` found last: it has nothing to do while this is the same."""
        self.readers = tasks.readers()
        self.born = tasks.born_bytes
        self.held = 0
        self.group_of: dict[int, int] = {}  # the group of each delayed start, and of tasks that only such a start needs
        self.group_of_use: dict[int, int] = {}  # the group that a task uses
        for index, group in enumerate(groups):
            for start in group.starts:
                self._delay(start, index)
            for use in group.uses:
                self.group_of_use[use] = max(index, self.group_of_use.get(use, 0))
        self.in_key_order = iter(sorted(range(len(keys)), key=keys.__getitem__))
        self.next_in_order = next(self.in_key_order, -1)
        """The task with the smallest key that has not run."""
        self.parked: dict[int, list[int]] = {}  # by group: tasks that are ready but whose group is not released yet
        self.last_used_group = -1
        self.released = -1
        self.released = self._last_group_ahead(-1)

    def _delay(self, task: int, group: int) -> None:
        """Delay a start, and the tasks that only it needs, until its group is released."""
        self.group_of[task] = group
        for need in self.tasks.needs[task]:
            if len(self.tasks.users[need]) == 1 and self.tasks.started[need] < 0:
                self._delay(need, group)

    def run(self) -> ScheduledOrder:
        """Run all tasks."""
        for task, missing in enumerate(self.missing):
            if not missing:
                self._offer(task)
        while len(self.order) < len(self.done):
            self._offer_arrived(idle=False)
            while self.ready and self.done[self.ready[0][1]]:
                heapq.heappop(self.ready)
            if not self.ready or self._too_early(*self.ready[0]):
                self._let_time_pass()
            else:
                self._run_task(heapq.heappop(self.ready)[1])
        limits = [(limit.low, limit.high) for limit in (self.compute_limit, self.communication_limit)]
        return ScheduledOrder(self.tasks, self.order, self.streams.now, *limits)

    def _too_early(self, key: Key, task: int) -> bool:
        """Whether a task would run out of key order and hold memory beyond the limit for that."""
        more = self.born[task]
        held = self.held + more
        if more <= 0 or held <= self.compute_limit.low or key < (0,) or not self.streams.is_running:
            return False
        while self.done[self.next_in_order]:
            self.next_in_order = next(self.in_key_order)
        tasks, sizes = self.tasks, self.tasks.sizes
        less = sum(sizes[each] for each in tasks.lives[task] if self._ends(each, self.readers[each] - 1))
        # the limit is asked last: where it makes no difference, other limits make the same order
        return task != self.next_in_order and more > less and not self.compute_limit.allows(held)

    def _ends(self, storage: int, readers: int) -> bool:
        """Whether a storage that has so many readers left is freed."""
        return not readers and not self.tasks.kept[storage]

    def _offer_arrived(self, idle: bool) -> None:
        """Make the waits ready whose collectives have ended.

        The wait for the newest gradient reduction becomes ready only when the device is `idle`.
        """
        newest = self.reductions_under_way[-1] if self.reductions_under_way and not idle else -1
        now = self.streams.ended, len(self.waiting), newest
        if now == self.last_looked_at:  # nothing has arrived, and nothing more is waited for
            return
        if any(self.device.has_arrived(wait) for wait in self.waiting if wait != newest):
            still = []
            for wait in self.waiting:
                if wait == newest or not self.device.has_arrived(wait):
                    still.append(wait)
                elif not self.done[wait]:
                    heapq.heappush(self.ready, (self.keys[wait], wait))
            self.waiting = still
        self.last_looked_at = self.streams.ended, len(self.waiting), newest

    def _let_time_pass(self) -> None:
        """Nothing can run. Start the gathers that are needed next, or let time pass until a collective ends."""
        if self.released <= self.last_used_group < len(self.groups) - 1:
            self._release(self.last_used_group + 1)
        elif self.streams.is_running:
            self.streams.advance()
        elif self.parked:
            self._release(self.released + 1)
        else:
            self._offer_arrived(idle=True)
            if not self.ready:
                left = [node.name for node, done in zip(self.tasks.nodes, self.done) if not done]
                raise VerifyError(f"nothing can run, but {len(left)} nodes have not: {left[:5]} need each other")

    def _release(self, group: int) -> bool:
        """Allow the gathers up to this group to start. Return whether some are ready now."""
        early = [task for index in range(self.released + 1, group + 1) for task in self.parked.pop(index, ())]
        self.released = max(self.released, group)
        for task in early:
            heapq.heappush(self.ready, (_NOW, task))
        return bool(early)

    def _last_group_ahead(self, group: int) -> int:
        """The last group that may be gathered while `group` is in use: up to `max_prefetch` ahead, as memory allows."""
        held = self.held
        for index in range(max(self.released, group) + 1, min(group + self.max_prefetch, len(self.groups) - 1) + 1):
            held += sum(self.born[start] for start in self.groups[index].starts)
            if not self.communication_limit.allows(held):
                return index - 1
        return group + self.max_prefetch

    def _offer(self, task: int) -> None:
        """All tasks that a task needs have run. It is ready, or waits for its collective or for its group's release."""
        if self.tasks.started[task] >= 0:
            self.waiting.append(task)
            return
        group = self.group_of.get(task)
        if group is not None and group > self.released:
            self.parked.setdefault(group, []).append(task)
            return
        at_once = group is not None or self.tasks.transfers[task] is not None
        heapq.heappush(self.ready, (_NOW if at_once else self.keys[task], task))

    def _run_task(self, task: int) -> None:
        """Run a task now, after what has to happen before it."""
        # 1. The first use of a group lets the gathers of the following groups start. They start before this task.
        group = self.group_of_use.get(task)
        if group is not None and group > self.last_used_group:
            self.last_used_group = group
            if self._release(self._last_group_ahead(group)):  # they start before the one that begins the group
                heapq.heappush(self.ready, (_RIGHT_BEHIND, task))
                return
        # 2. Finish gradient reductions whose memory is needed, or that are too many.
        more = self.born[task] + self.tasks.sending[task] + self.tasks.scratch[task]
        if self.tasks.started[task] < 0 and more:
            while self.reductions_under_way and not self.communication_limit.allows(self.held + more):
                self._wait_for_oldest_reduction()
        transfers = self.tasks.transfers[task]
        if transfers is not None and transfers.collective.cause == "gradient":
            while len(self.reductions_under_way) > self.reductions:
                self._wait_for_oldest_reduction()
            self.reductions_under_way.extend(self.tasks.users[task])
        # 3. Run it.
        self.device.run(task)
        if self.tasks.started[task] >= 0 and task in self.reductions_under_way:
            self.reductions_under_way.remove(task)
        self._finish(task)

    def _wait_for_oldest_reduction(self) -> None:
        """Wait for the gradient reduction that was started first."""
        wait = self.reductions_under_way.popleft()
        self.device.run(wait)
        self._finish(wait)

    def _finish(self, task: int) -> None:
        """Append a task to the order, account for its memory, and offer the tasks that needed only it."""
        self.order.append(task)
        self.done[task] = True
        tasks, readers = self.tasks, self.readers
        self.held += self.born[task] + tasks.sending[task]
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
