"""The orders that `schedule` tries: keys for list scheduling, and dependences and schedules that leave gaps on purpose.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.cost_model import COMPUTE
from shardweave.passes.list_scheduler import CollectiveStart, GatherGroup, Key, TaskGraph
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
    in_graph_order = _earlystarts_of(tasks, [(task,) for task in range(len(tasks.nodes))])
    if any(transfer_cause(tasks, task) == "activation" for task in range(len(tasks.nodes))):
        by_segments = _earlystarts_of(tasks, _by_segments(tasks))
        yield by_segments
        if _ranked(by_segments) == _ranked(in_graph_order):  # as in the forward of one sub-batch
            return
    yield in_graph_order


def _ranked(keys: Sequence[Key]) -> list[int]:
    """The tasks by their keys."""
    return sorted(range(len(keys)), key=keys.__getitem__)


def _earlystarts_of(tasks: TaskGraph, keys: list[Key]) -> list[Key]:
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
        for user in _opened(task, tasks.users, missing):
            heapq.heappush(ready, key(user))
    return order


def _opened(task: int, users: Sequence[Sequence[int]], missing: list[int]) -> list[int]:
    """The `users` of a task of which it was the last that was `missing`."""
    found = []
    for user in users[task]:
        missing[user] -= 1
        if not missing[user]:
            found.append(user)
    return found


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
            ready += _opened(task, self.needs, missing)
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
                    opened += _opened(task, self.users, missing)
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
            opened = _opened(task, self.users, missing)


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


def starts_of(tasks: TaskGraph, *causes: str) -> list[tuple[int, CollectiveStart]]:
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
    gathers = _distinct(starts_of(tasks, "parameter"))
    busy = [
        (begins[start], begins[start] + moved.demand.seconds, waits[start])
        for start, moved in starts_of(tasks, "activation")
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
    activations = sorted(starts_of(tasks, "activation"), key=lambda each: begins[each[0]])
    times = [begins[start] for start, _ in activations]
    others = _distinct(starts_of(tasks, "parameter", "gradient"))
    edges: list[Edge] = []
    for start, moved in starts_of(tasks, "gradient"):
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
