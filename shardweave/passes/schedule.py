"""The overlap scheduler: the pass `Schedule` orders starts, waits and compute so that compute hides communication.

The scheduler tries several orders and takes the fastest one that fits into the memory limit:

1. List scheduling (`list_scheduler`) with a few sets of priorities. Between two collectives
   of activations, the tasks that the second collective depends on come first, so that it runs while gradients of
   weights are computed (AxoNN, section IV-A). The sub-batches come one after the other, so that one communicates while
   the other computes (Oases, algorithms 1 and 2). Prefetched all-gathers, gradient reductions under the backward and
   reduce-scatters that are drained late (AxoNN IV-B and IV-C, AMSP V-C) need no rule of their own: a collective starts
   as soon as its input is ready. `delayed_gathers` makes an exception where that would delay a collective of
   activations. The orders differ in how many gathers and reductions are under way at once.
2. The memory of the best order is reduced: it computes fewer tasks ahead of their turn, as long as it stays as fast.
3. Where communication stays exposed, schedules from both ends (`bidirectional_schedules`) compete with it.

Priorities
    Keys follow the order of the graph, with two exceptions, each within a segment that ends with a collective of
    activations. Tasks that the collective depends on come first, and the sub-batches come one after the other. The
    key of an all-gather, and of a wait, is that of its first use.

Bidirectional scheduling
    A list scheduler that goes forward never lets a link idle while a collective is ready, though a long reduction that
    starts now may delay the next layer's all-gather. A list scheduler that goes backward, from the last task to the
    first, finds such gaps: read forward, its schedule starts every task as late as the step allows. The times of one
    schedule are the priorities of the next one, in the other direction ("justification": Valls, Ballestin and
    Quintanilla, European Journal of Operational Research 165, 2005). Here every process group, and the device itself,
    is a machine that does one thing at a time. `list_scheduler.simulate_order` computes the real time of an order.

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
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import fx

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.cost_model import (
    COMPUTE,
    NO_SHARING,
    Cluster,
    Contention,
    Liveness,
    MicroBatchSharing,
    NodeCosts,
    Storage,
    liveness,
)
from shardweave.ir import UNLIMITED
from shardweave.passes.base import Pass, Property
from shardweave.passes.list_scheduler import (
    CollectiveStart,
    GatherGroup,
    Key,
    LeftOut,
    ScheduledOrder,
    TaskGraph,
    list_schedule,
    simulate_order,
)
from shardweave.passes.verify import verify_memory
from shardweave.sharding import info, layer_of

aten = torch.ops.aten
custom_ops = torch.ops.shardweave
WAIT = torch.ops._c10d_functional.wait_tensor.default
# Ops that `Shard` emits around a collective to bring its buffer into shape.
GLUE = {
    aten.reshape.default, aten.permute.default, aten.clone.default, aten.t.default, aten.transpose.int,
    aten.select.int, aten.narrow.default, operator.getitem, WAIT,
    custom_ops.pad.default, custom_ops.unpad.default,
    custom_ops.quantize_blocks.default, custom_ops.dequantize_blocks.default, custom_ops.sum_dequantized.default,
    custom_ops.ordered_bits.default, custom_ops.from_ordered_bits.default,
}  # fmt: skip
CAST = aten._to_copy.default

SHAPING = (GLUE - {WAIT}) | {CAST, aten.add.Tensor, aten.add_.Tensor, aten.cat.default}
"""Ops that may stand between a value and the start of its collective."""
GATHER_DEPTHS = (8, 4, 1)
"""How many groups of parameters may be gathered ahead, where the user does not set `max_prefetch`: each is tried."""
REDUCTION_DEPTHS = (16, 1)
"""How many gradients may be under reduction in orders that gather one group ahead, besides as many as are ready."""
_SAME_TIME_RATIO = 1.005
"""Orders whose times differ by less than this factor count as equally fast. The one that holds less is taken."""
_MIN_MEMORY_SAVING = 0.1
"""The search for an order that holds less stops when it can save less than this part of the peak."""
_MAX_BIDIRECTIONAL_ORDERS = 4
"""How many bidirectional schedules are tried, the fastest by their own estimate."""
_MAX_LEAST_MEMORY_ORDERS = 4
"""How many of the orders with the lowest peaks are tried again under still lower limits."""
_MEMORY_STEP = 2**-7
"""The part of the peak by which each such limit is lower than the last peak."""
_EXCESS_MULTIPLES = (1, 2, 4)
"""An order that exceeds the limit is tried again under limits lowered by these multiples of the excess."""
_INFEASIBLE_RATIO = 1.0625
"""Where even the lowest peak is this many times the limit, no order is searched that fits."""
_MIN_OVERLAP_RATIO = 0.25
"""A gradient reduction is delayed only to a collective of activations that takes at least this part of its time."""


def recompute_barriers(tasks: TaskGraph) -> list[tuple[int, int]]:
    """Dependences that keep the recomputation of a layer apart from the gradients of others (no cross-pass overlap).

    Each layer is recomputed as a whole before its gradients, and these are computed before the next layer's
    recomputation. A pair is (task before, task after).
    """
    groups: dict[tuple[str, bool], list[int]] = {}
    feeds = [info(node).recomputed for node in tasks.nodes]
    for task in reversed(range(len(feeds))):
        feeds[task] |= any(feeds[user] for user in tasks.users[task])
    for task, node in enumerate(tasks.nodes):
        layer = layer_of(info(node).op)
        # a task that serves both recomputation and gradients belongs to neither
        if layer and tasks.seconds[task] and feeds[task] == info(node).recomputed and node.target not in SHAPING:
            groups.setdefault((layer, info(node).recomputed), []).append(task)
    layers = list(dict.fromkeys(layer for layer, _ in groups))
    steps = [groups[layer, again] for layer in layers for again in (True, False) if (layer, again) in groups]
    found = []
    for before, after in zip(steps, steps[1:]):
        inside, then = set(before), set(after)
        last = [task for task in before if not inside.intersection(tasks.users[task])]
        first = [task for task in after if not then.intersection(tasks.needs[task])]
        found += [(one, other) for one in last for other in first if one < other]  # a later task is another layer's
    return found


def transfer_cause(tasks: TaskGraph, task: int) -> str:
    """The cause of the collective that a task starts: "parameter", "gradient" or "activation"; "" without one."""
    transfers = tasks.transfers[task]
    return transfers.collective.cause if transfers is not None else ""


def candidate_keys(tasks: TaskGraph) -> Iterator[list[Key]]:
    """The sets of keys that `Schedule` tries. The last part of a key is the task's number."""
    in_graph_order = _early_starts(tasks, [(task,) for task in range(len(tasks.nodes))])
    if any(transfer_cause(tasks, task) == "activation" for task in range(len(tasks.nodes))):
        by_segments = _early_starts(tasks, _by_segments(tasks))
        yield by_segments
        if _ranked(by_segments) == _ranked(in_graph_order):  # as in the forward of one sub-batch
            return
    yield in_graph_order


def _ranked(keys: Sequence[Key]) -> list[int]:
    """The tasks by their keys."""
    return sorted(range(len(keys)), key=keys.__getitem__)


def _early_starts(tasks: TaskGraph, keys: list[Key]) -> list[Key]:
    """`keys` in which ops that prepare a collective's buffer come right behind the value. The graph has them late."""
    leads = [transfers is not None for transfers in tasks.transfers]
    for task in reversed(range(len(keys))):
        users = tasks.users[task]
        if users and tasks.nodes[task].target in SHAPING and all(leads[user] for user in users):
            leads[task] = True
    for task, leading in enumerate(leads):
        if leading and tasks.needs[task]:
            keys[task] = (*max(keys[need] for need in tasks.needs[task]), task)
    return keys


def _by_segments(tasks: TaskGraph) -> list[Key]:
    """Keys by segment, then tasks that the collective at its end depends on before others, sub-batch, and number."""
    # 1. Segments: each ends with a collective of activations, the last step of an op that runs in several.
    segments, segment = [], 0
    steps = [info(node).steps for node in tasks.nodes]
    for task, own_steps in enumerate(steps):
        segments.append(segment)
        following = steps[task + 1] if task + 1 < len(steps) else ()
        complete = not own_steps or not following or following[-1][1] <= own_steps[-1][1]  # the last step of a node
        segment += complete and transfer_cause(tasks, task) == "activation"
    # 2. The tasks that the collective at the end of their segment depends on.
    leads = [False] * len(steps)
    ending = set()
    for task in reversed(range(len(steps))):
        leads[task] = transfer_cause(tasks, task) == "activation" or any(
            leads[user] and segments[user] == segments[task] for user in tasks.users[task]
        )
        if leads[task]:
            ending.add(segments[task])
    # 3. Keys. A segment without such a collective keeps its order.
    keys: list[Key] = []
    for task, own_steps in enumerate(steps):
        if segments[task] in ending:
            sub_batch = own_steps[0][1] if own_steps else 0
            keys.append((segments[task], 0 if leads[task] else 1, sub_batch, task))
        else:
            keys.append((segments[task], task))
    return keys


def gather_groups_of(tasks: TaskGraph, keys: Sequence[Key]) -> list[GatherGroup]:
    """The all-gathers of parameters, grouped by their first use by `keys`, in the order of these uses."""
    by_use: dict[int, list[int]] = {}
    uses: dict[int, set[int]] = {}
    for task in range(len(tasks.nodes)):
        if transfer_cause(tasks, task) == "parameter":
            found = _first_uses(tasks, task)
            if found:
                use = min(found, key=keys.__getitem__)
                by_use.setdefault(use, []).append(task)
                uses.setdefault(use, set()).update(found)
    return [GatherGroup(tuple(by_use[use]), tuple(sorted(uses[use]))) for use in sorted(by_use, key=keys.__getitem__)]


def gather_ahead_edges(tasks: TaskGraph, most: int) -> list[tuple[int, int]]:
    """Dependences under which at most `most` groups are gathered ahead of the group in use."""
    groups = gather_groups_of(tasks, [(task,) for task in range(len(tasks.nodes))])
    return [(min(used.uses), start) for used, gathered in zip(groups, groups[most:]) for start in gathered.starts]


def _first_uses(tasks: TaskGraph, task: int) -> set[int]:
    """The tasks that compute with the result of a collective, which another gather may pass on to them."""
    found: set[int] = set()
    for user in tasks.users[task]:
        on_its_way = tasks.nodes[user].target in GLUE or transfer_cause(tasks, user) == "parameter"
        found |= _first_uses(tasks, user) if on_its_way else {user}
    return found


def keys_by_first_use(tasks: TaskGraph, keys: Sequence[Key], groups: Sequence[GatherGroup]) -> list[Key]:
    """`keys` in which gathers, and ops that bring received values into shape, have the key of their first use."""
    late = list(keys)
    arriving = [False] * len(late)
    for task, node in enumerate(tasks.nodes):
        start = tasks.started[task]
        arriving[task] = start >= 0 and transfer_cause(tasks, start) != "gradient"
        arriving[task] |= node.target in GLUE and any(arriving[need] for need in tasks.needs[task])
    for task in reversed(range(len(late))):
        if arriving[task] and tasks.users[task]:
            late[task] = min(late[user] for user in tasks.users[task])

    def hold(task: int, key: Key) -> None:
        late[task] = min(late[task], key) if len(tasks.users[task]) > 1 else key
        for need in tasks.needs[task]:
            if len(tasks.users[need]) == 1 and tasks.started[need] < 0:
                hold(need, key)

    for group in groups:
        for start in group.starts:
            hold(start, min(late[use] for use in group.uses))
    return late


@dataclass(frozen=True)
class BidirectionalSchedule:
    """An order of tasks, and its time under the assumption that no two process groups share a link.

    Where they do share one, a collective that starts before its time takes bandwidth from others. `begins` has the time
    at which each task begins in the schedule; `order_by_begin` makes an order from it that starts nothing earlier.
    """

    seconds: float
    order: Sequence[int]
    begins: Sequence[float]


def bidirectional_schedules(tasks: TaskGraph) -> list[BidirectionalSchedule]:
    """Schedules of `tasks` from both ends, the fastest one first."""
    found = sorted(_schedules(Machines.of(tasks)), key=lambda each: each[0])
    return [BidirectionalSchedule(seconds, order_by_begin(tasks, begins), begins) for seconds, begins in found]


def order_by_begin(tasks: TaskGraph, begins: Sequence[float], ahead: bool = True) -> list[int]:
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
    def of(cls, tasks: TaskGraph) -> Machines:
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
    tasks: TaskGraph, keys: Sequence[Key], groups: Sequence[GatherGroup], max_ahead: int
) -> list[list[Edge]]:
    """Two sets of dependences: one delays all-gathers into gaps, one delays reductions beside activations' collectives.

    A set that delays nothing is left out. All-gathers start at most `max_ahead` groups ahead of their use.
    """
    begins = _begins(tasks, keys)
    found = _delayed_into_gaps(tasks, begins, groups, max_ahead), _delayed_to_activations(tasks, begins)
    return [edges for edges in found if edges]


def _share_scarce_links(one: CollectiveStart, other: CollectiveStart) -> bool:
    """Whether two collectives that run at the same time need more than the bandwidth of one level's links."""
    return any(part + other.demand.use.get(level, 0.0) > 1.0 for level, part in one.demand.use.items())


def _begins(tasks: TaskGraph, keys: Sequence[Key]) -> list[float]:
    """When each task begins if only kernels and collectives of activations take time."""
    moves = [transfer_cause(tasks, task) in ("", "activation") for task in range(len(keys))]
    machines = Machines.of(tasks)
    machines = replace(
        machines,
        seconds=[seconds if mine else 0.0 for seconds, mine in zip(machines.seconds, moves)],
        machine=[machine if mine else "" for machine, mine in zip(machines.machine, moves)],
    )
    place = {task: float(index) for index, task in enumerate(_ranked(keys))}
    return machines.scheduled([place[task] for task in range(len(keys))], 1)[1]


def _starts(tasks: TaskGraph, *causes: str) -> list[tuple[int, CollectiveStart]]:
    """The tasks that start a collective of one of these causes, with the collective."""
    found = enumerate(tasks.transfers)
    return [(task, moved) for task, moved in found if moved is not None and moved.collective.cause in causes]


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
    tasks: TaskGraph, begins: Sequence[float], groups: Sequence[GatherGroup], max_ahead: int
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


def _gaps(tasks: TaskGraph, begins: Sequence[float]) -> Iterator[_Gap]:
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


def _delayed_to_activations(tasks: TaskGraph, begins: Sequence[float]) -> list[Edge]:
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
        least = _MIN_OVERLAP_RATIO * moved.demand.seconds
        activation = next((each for each in following if each[1].demand.seconds >= least), None)
        if activation is not None and not _share_scarce_links(moved, activation[1]):
            edges.append((activation[0], start))
    return edges


def _is_needed(tasks: TaskGraph, start: int) -> bool:
    """Whether a kernel or another collective needs the result of a collective."""
    users = tasks.users[start]
    return any(tasks.transfers[u] is not None or tasks.seconds[u] > 0 or _is_needed(tasks, u) for u in users)


@dataclass(frozen=True)
class LateOrder:
    """A scheduled order with late waits. It is made when it is asked for: of most orders only the time is."""

    scheduled: ScheduledOrder

    @property
    def seconds(self) -> float:
        """The time from the first task's begin to the last one's end."""
        return self.scheduled.seconds

    @cached_property
    def order(self) -> Sequence[int]:
        """The tasks, with waits late."""
        return _late_waits(self.scheduled)

    @cached_property
    def peak_bytes(self) -> int:
        """The peak of the part, without storages that were there before."""
        return self.scheduled.tasks.peak_bytes(self.order)


_OrderFinder = Callable[..., LateOrder]
"""Makes an order; takes `compute_limit` and `communication_limit`, in bytes."""

RepeatedLayers = Sequence[tuple[Sequence[str], int]]
"""Equal layers that a graph has only a few of: the names of those in the graph, and how many more the model has.

A lowering of a model of many equal layers, for the simulator, leaves most of them out. Memory is accounted for all.
"""

_FITS = "fits"
"""The key in a graph module's meta that says whether its order keeps to the memory limit."""


def fits(graph_module: fx.GraphModule) -> bool:
    """Whether the order that `Schedule` found for a graph keeps to the memory limit."""
    return bool(graph_module.meta[_FITS])


@dataclass(frozen=True)
class Schedule(Pass):
    """Order the nodes of the local graph.

    Requires a local graph in which every start is followed by its wait. Ensures the same values, with starts early and
    waits late, and the forward before the backward.

    Parameters
    ----------
    cluster : Cluster
        The machine that kernels and collectives are timed on.
    max_prefetch : int, optional
        How many groups of parameters may be gathered ahead of the one in use, and how many gradients may be under
        reduction. Left out, the scheduler chooses: as many as save time and fit.
    memory_limit : int, optional
        Bytes that a device may use.
    other_bytes : int
        Bytes on a device that the graph does not see: the optimizer's states, inputs and results of other
        micro-batches.
    cross_pass : bool
        Whether recomputation and gradients of different layers may overlap.
    repeated_layers : sequence of (sequence of str, int)
        Equal layers of the graph, and how many more of them the model has.
    repeated : MicroBatchSharing
        The storages that the last of several runs of the graph finds, where it runs once for each micro-batch.
    """

    name = "schedule"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    ensures: ClassVar[frozenset[Property]] = frozenset({"ordered"})
    cluster: Cluster
    max_prefetch: int | None = None
    memory_limit: int | None = None
    other_bytes: int = 0
    cross_pass: bool = True
    repeated_layers: RepeatedLayers = ()
    repeated: MicroBatchSharing = NO_SHARING

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        order, graph_module.meta[_FITS] = self.order(graph_module.graph)
        _reorder(graph_module.graph, order)
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module

    def check(self, graph_module: fx.GraphModule) -> None:
        if fits(graph_module):
            limit, other_bytes = self.memory_limit, self.other_bytes
            verify_memory(graph_module, self.name, self.cluster, limit, other_bytes, self.repeated)

    def order(self, graph: fx.Graph) -> tuple[list[fx.Node], bool]:
        """The order of the nodes, and whether it keeps to the memory limit. The graph itself is not changed."""
        fits = True
        prices, live = NodeCosts(self.cluster), liveness(graph)
        left_out = _left_out(graph, live, prices, self.repeated_layers)
        # 1. Memory that is held from the beginning: inputs, shared storages, and what the graph does not see.
        order = [node for node in graph.nodes if node.op == "placeholder"]
        shared, _ = self.repeated.storages(graph, live)
        first = [(node, sum(prices.of(node).sizes)) for node in order]
        first += [(node, prices.of(node).sizes[index]) for node, index in shared]
        held = self.other_bytes
        held += sum(size * (1 + sum(layers.count(node) for layers in left_out)) for node, size in first)
        # 2. Order the forward, then the backward with what the forward leaves behind.
        for backward in (False, True):
            nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and info(n).backward == backward]
            if not nodes:
                continue
            tasks = TaskGraph.of(graph, nodes, prices, left_out, self.repeated, live)
            if not self.cross_pass:
                tasks = tasks.after(recompute_barriers(tasks))
            room = None if self.memory_limit is None else self.memory_limit - held
            best = self.best(tasks, room)
            fits &= room is None or best.peak_bytes <= room
            order += [nodes[task] for task in best.order]
            held += tasks.kept_bytes
        return order, fits

    def best(self, tasks: TaskGraph, room: int | None = None) -> LateOrder:
        """The fastest order found that fits into `room` bytes; where none does, the one with the lowest peak."""
        search = _OrderSearch(tasks, Contention.of(self.cluster.device), self.max_prefetch)
        best = search.best(math.inf)
        return best if room is None or best.peak_bytes <= room else search.best(room)


def layer_outputs(
    graph: fx.Graph, where: Mapping[fx.Node, Sequence[Storage]], layer: Callable[[fx.Node], str]
) -> set[Storage]:
    """The storages of values of a layer that the forward of what comes behind it reads.

    Parameters
    ----------
    graph : fx.Graph
    where : mapping of Node to sequence of Storage
        `Liveness.where` of the graph.
    layer : callable
        The layer of a node; "" outside of all layers.
    """
    forward = [node for node in graph.nodes if node.op == "call_function" and not info(node).backward]
    read = ((node, key) for node in forward for source in node.all_input_nodes for key in where[source])
    return {key for node, key in read if (own := layer(key[0])) and own != layer(node)}


def _left_out(
    graph: fx.Graph, live: Liveness, prices: NodeCosts, repeated_layers: RepeatedLayers
) -> list[LeftOut]:
    """The layers that were left out of the graph, and which of its values stand for theirs.

    The first of a few equal layers may save its input in the layout that an unequal neighbour left it in, the last one
    its output in the one that a neighbour reads, or not at all. So the output of the last but one stands for those of
    the layers left out, and for what else these hold the layer that saves the least of that.
    """
    if not repeated_layers:
        return []

    def layer(node: fx.Node) -> str:
        return layer_of(info(node).op)

    where = live.where
    outputs = layer_outputs(graph, where, layer)
    saved: Counter[str] = Counter()  # bytes that the backward reads
    backward = [node for node in graph.nodes if node.op == "call_function" and info(node).backward]
    for key in {key for node in backward for source in node.all_input_nodes for key in where[source]} - outputs:
        if key[0].op == "call_function" and not info(key[0]).backward:
            saved[layer(key[0])] += prices.of(key[0]).sizes[key[1]]
    passed_on = {node for node, _ in outputs}
    of_layer: dict[tuple[str, bool], list[fx.Node]] = {}
    for node in graph.nodes:
        of_layer.setdefault((layer(node), node in passed_on), []).append(node)
    found = []
    for few, number in repeated_layers:
        if number:
            last_two = few[-2:][0], few[-1]
            least = min(few, key=lambda each: saved[each])
            values = *of_layer.get((least, False), ()), *of_layer.get((last_two[0], True), ())
            found.append(LeftOut(number, frozenset(values), last_two))
    return found


class _OrderSearch:
    """Tries orders of the tasks of one graph. Those without memory limits are made once for all limits."""

    def __init__(self, tasks: TaskGraph, contention: Contention, max_prefetch: int | None) -> None:
        self.tasks, self.contention, self.max_prefetch = tasks, contention, max_prefetch
        self.fast_enough = _lower_bound(tasks) * _SAME_TIME_RATIO

    def best(self, limit: float) -> LateOrder:
        """The fastest order that fits into `limit` bytes; where none does, the one with the lowest peak."""
        best: LateOrder | None = None
        again: _OrderFinder | None = None
        # 1. Orders with as much communication under way as they ask for, those first that are the fastest without a
        #    limit.
        left: list[tuple[LateOrder, _OrderFinder]] = []
        for free, order in self._free if self.tasks.kept_bytes <= limit else ():
            if best is not None and best.seconds <= free.seconds * _SAME_TIME_RATIO:
                break  # under limits, the others are slower still
            found = free if free.peak_bytes <= limit else order(compute_limit=limit)
            if found.peak_bytes > limit:
                left.append((free, order))
            elif best is None or _better(found, best, limit):
                best, again = found, order
        # 2. Where none fits, the order with the lowest peak. Where that is nearly as low as the limit, or others may be
        #    faster than what fits, orders whose communication waits for memory, too.
        if best is None:
            best = _least_memory(self._finders)
        for free, order in left if best.peak_bytes <= _INFEASIBLE_RATIO * limit else ():
            if best.peak_bytes <= limit and best.seconds <= free.seconds * _SAME_TIME_RATIO:
                break
            found, most = _within_limit(order, limit)
            if found.peak_bytes <= limit and _better(found, best, limit):
                best, again = found, partial(order, communication_limit=most)
        # 3. With less memory, as long as it is as fast.
        if again is not None:
            best = _with_less_memory(best, again)
        # 4. Bidirectional schedules, where communication stays exposed or memory is short.
        if self.max_prefetch is None and (best.seconds > self.fast_enough or best.peak_bytes > limit):
            for other in self._bidirectional:
                best = other if _better(other, best, limit) else best
        return best

    @cached_property
    def _free(self) -> list[tuple[LateOrder, _OrderFinder]]:
        """Orders without limits, the fastest one first; those up to one that is as fast as any can be."""
        found: list[tuple[LateOrder, _OrderFinder]] = []
        for order in self._finders:
            found.append((order(), order))
            if found[-1][0].seconds <= self.fast_enough:
                break
        return sorted(found, key=lambda each: each[0].seconds)

    @cached_property
    def _bidirectional(self) -> list[LateOrder]:
        """The orders of bidirectional schedules, with late waits, timed on the device's streams."""
        found = []
        held = self.tasks.after(gather_ahead_edges(self.tasks, max(GATHER_DEPTHS)))
        for each in bidirectional_schedules(held)[:_MAX_BIDIRECTIONAL_ORDERS]:
            found.append(self._simulated(each.order))
            if found[-1].seconds > each.seconds * _SAME_TIME_RATIO:  # early starts take bandwidth from others
                found.append(self._simulated(order_by_begin(held, each.begins, ahead=False)))
        return found

    def _simulated(self, order: Sequence[int]) -> LateOrder:
        return LateOrder(simulate_order(self.tasks, order, self.contention))

    @cached_property
    def _finders(self) -> list[_OrderFinder]:
        """What makes the orders of list scheduling that are tried."""
        found: list[_OrderFinder] = []
        num_reductions = len(_starts(self.tasks, "gradient"))
        for keys in candidate_keys(self.tasks):
            groups = gather_groups_of(self.tasks, keys)
            held = keys_by_first_use(self.tasks, keys, groups)
            # 1. Few gathers ahead, and few reductions. Depths beyond the number of them all make the same order.
            depths = [(ahead, UNLIMITED) for ahead in GATHER_DEPTHS]
            depths += [(min(GATHER_DEPTHS), reductions) for reductions in REDUCTION_DEPTHS]
            if self.max_prefetch is not None:
                depths = [(self.max_prefetch, self.max_prefetch)]
            depths = [(min(ahead, len(groups)), min(reductions, num_reductions)) for ahead, reductions in depths]
            finders = [(self.tasks, *depth) for depth in dict.fromkeys(depths)]
            # 2. Delayed gathers and reductions.
            if self.max_prefetch is None:
                delayed = delayed_gathers(self.tasks, keys, groups, max(GATHER_DEPTHS))
                finders += [(self.tasks.after(edges), max(GATHER_DEPTHS), UNLIMITED) for edges in delayed]
            found += [_ListScheduling(*each, held, groups, self.contention) for each in finders]
        return found


@dataclass(frozen=True)
class _ListScheduling:
    """Makes orders by list scheduling, with late waits. Limits that decide nothing otherwise make no new one."""

    tasks: TaskGraph
    max_prefetch: int
    reductions: int
    keys: Sequence[Key]
    groups: Sequence[GatherGroup]
    contention: Contention
    made: list[LateOrder] = field(default_factory=list)

    def __call__(self, compute_limit: float = math.inf, communication_limit: float = math.inf) -> LateOrder:
        """The order under these limits, in bytes."""
        for known in self.made:
            if known.scheduled.is_for(compute_limit, communication_limit):
                return known
        found = list_schedule(
            self.tasks,
            self.keys,
            self.groups,
            max_prefetch=self.max_prefetch,
            reductions=self.reductions,
            compute_limit=compute_limit,
            communication_limit=communication_limit,
            contention=self.contention,
        )
        self.made.append(LateOrder(found))
        return self.made[-1]


def _least_memory(orders: Sequence[_OrderFinder]) -> LateOrder:
    """The order with the lowest peak, whatever the limit is.

    The limit 0 is only a start: orders often hold less under a limit just below the peak that they have reached.
    """
    found = sorted(
        ((order(compute_limit=0, communication_limit=0), order) for order in orders),
        key=lambda each: each[0].peak_bytes,
    )
    best, nearest = found[0][0], [order for _, order in found[:_MAX_LEAST_MEMORY_ORDERS]]
    while True:
        less = int((1 - _MEMORY_STEP) * best.peak_bytes)
        other = min(
            (order(compute_limit=less, communication_limit=less) for order in nearest),
            key=lambda order: order.peak_bytes,
        )
        if other.peak_bytes > less:
            return min(best, other, key=lambda order: order.peak_bytes)
        best = other


def _within_limit(order: _OrderFinder, limit: float) -> tuple[LateOrder, float]:
    """An order under this limit, and the limit that it was made with.

    An order may exceed its limit, as gathered parameters are still there when a later task needs memory. It is then
    made again under lower limits.
    """
    found = order(compute_limit=limit, communication_limit=limit)
    if found.peak_bytes <= limit:
        return found, limit
    for times in _EXCESS_MULTIPLES:
        less = limit - times * (found.peak_bytes - limit)
        if not 0 < less < limit:
            break
        again = order(compute_limit=less, communication_limit=less)
        if again.peak_bytes <= limit:
            return again, less
    return found, limit


def _with_less_memory(best: LateOrder, order: _OrderFinder) -> LateOrder:
    """The order with the least compute ahead of its turn that takes no longer than `best`, by bisection."""
    seconds = best.seconds * _SAME_TIME_RATIO
    low, high = order(compute_limit=0).peak_bytes, best.peak_bytes
    room = low
    while high - low > _MIN_MEMORY_SAVING * high:
        found = order(compute_limit=room)
        if found.peak_bytes < best.peak_bytes and found.seconds <= seconds:
            best, high = found, room
        else:
            low = room
        room = (low + high) // 2
    return best


def _better(one: LateOrder, other: LateOrder, limit: float) -> bool:
    """Whether one order is better: it alone fits, is faster, or is as fast and holds less. If none fits, holds less."""
    others = other.peak_bytes <= limit
    if others and one.seconds >= other.seconds * _SAME_TIME_RATIO:
        return False  # whatever it holds
    fits = one.peak_bytes <= limit
    if fits != others:
        return fits
    if not fits:
        return one.peak_bytes < other.peak_bytes
    if one.seconds * _SAME_TIME_RATIO < other.seconds:
        return True
    return one.seconds < other.seconds * _SAME_TIME_RATIO and one.peak_bytes < other.peak_bytes


def _lower_bound(tasks: TaskGraph) -> float:
    """A lower bound of any order's time: its compute, or the transfers of one level's links or of one process group."""
    levels: dict[str, float] = {}
    for transfers in tasks.transfers:
        if transfers is not None:
            demand = transfers.demand
            levels[transfers.group] = levels.get(transfers.group, 0.0) + demand.seconds
            for level, part in demand.use.items():
                levels[f"level {level}"] = levels.get(f"level {level}", 0.0) + part * demand.transfer
    return max(sum(tasks.seconds), *levels.values()) if levels else sum(tasks.seconds)


def _late_waits(scheduled: ScheduledOrder) -> list[int]:
    """The order with waits (not those of gradients) and views of their results just before their first use."""
    tasks = scheduled.tasks
    found: list[int] = []
    late: set[int] = set()

    def write(task: int) -> None:
        late.discard(task)
        for need in tasks.needs[task]:
            if need in late:
                write(need)
        found.append(task)

    for task in scheduled.order:
        start = tasks.started[task]
        arrives = start >= 0 and transfer_cause(tasks, start) != "gradient"
        free = not tasks.seconds[task] and tasks.transfers[task] is None
        if arrives or (free and late.intersection(tasks.needs[task])):
            late.add(task)
        else:
            write(task)
    for task in sorted(late):
        if task in late:
            write(task)
    return found


def _reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Put the nodes into this order. The output stays last."""
    last = None
    for node in order:
        if last is not None:
            last.append(node)
        last = node
