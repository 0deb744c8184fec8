"""The overlap scheduler: the pass `Schedule` orders starts, waits and compute so that compute hides communication.

The scheduler tries several orders and takes the fastest one that fits into the memory limit:

1. List scheduling (`list_scheduler`) with a few sets of priorities (`scheduling_priorities`). Between two collectives
   of activations, the tasks that the second collective depends on come first, so that it runs while gradients of
   weights are computed (AxoNN, section IV-A). The sub-batches come one after the other, so that one communicates while
   the other computes (Oases, algorithms 1 and 2). Prefetched all-gathers, gradient reductions under the backward and
   reduce-scatters that are drained late (AxoNN IV-B and IV-C, AMSP V-C) need no rule of their own: a collective starts
   as soon as its input is ready. `delayed_gathers` makes an exception where that would delay a collective of
   activations. The orders differ in how many gathers and reductions are under way at once.
2. The best order is made thriftier: it computes ahead of its turn only as much as its memory is worth.
3. Where communication stays exposed, schedules from both ends (`bidirectional_schedules`) compete with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import fx

from shardweave.cost_model import ONCE, Cluster, Contention, Prices, Repeated, liveness
from shardweave.ir import UNLIMITED
from shardweave.passes.base import Pass, Property
from shardweave.passes.dependency_graph import Tasks
from shardweave.passes.list_scheduler import ScheduledOrder, list_schedule, simulate_order
from shardweave.passes.schedule_refinement import bidirectional_schedules, delayed_gathers, order_by_begin
from shardweave.passes.scheduling_priorities import (
    candidate_keys,
    gather_ahead_edges,
    gather_groups_of,
    keys_by_first_use,
    recompute_barriers,
    transfer_cause,
)
from shardweave.passes.verify import verify_memory
from shardweave.sharding import info, layer_of

GATHER_DEPTHS = (8, 4, 1)
"""How many groups of parameters may be gathered ahead, where the user does not set `lookahead`: each is tried."""
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

_OrderFinder = Callable[..., ScheduledOrder]
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
    lookahead : int, optional
        How many groups of parameters may be gathered ahead of the one in use, and how many gradients may be under
        reduction. Left out, the scheduler chooses: as many as save time and fit.
    memory_limit : int, optional
        Bytes that a device may use.
    beside_bytes : int
        Bytes on a device that the graph does not see: the optimizer's states, inputs and results of other
        micro-batches.
    cross_pass : bool
        Whether recomputation and gradients of different layers may overlap.
    repeated_layers : sequence of (sequence of str, int)
        Equal layers of the graph, and how many more of them the model has.
    repeated : Repeated
        The storages that the last of several runs of the graph finds, where it runs once for each micro-batch.
    """

    name = "schedule"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    ensures: ClassVar[frozenset[Property]] = frozenset({"ordered"})
    cluster: Cluster
    lookahead: int | None = None
    memory_limit: int | None = None
    beside_bytes: int = 0
    cross_pass: bool = True
    repeated_layers: RepeatedLayers = ()
    repeated: Repeated = ONCE

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        ordered, within = self.scheduled(graph_module)
        ordered.meta[_FITS] = within
        return ordered

    def check(self, graph_module: fx.GraphModule) -> None:
        if fits(graph_module):
            limit, beside = self.memory_limit, self.beside_bytes
            verify_memory(graph_module, self.name, self.cluster, limit, beside, self.repeated)

    def scheduled(self, graph_module: fx.GraphModule) -> tuple[fx.GraphModule, bool]:
        """The graph in its order, and whether it keeps to the memory limit."""
        order, fits = self.order(graph_module.graph)
        _reorder(graph_module.graph, order)
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module, fits

    def order(self, graph: fx.Graph) -> tuple[list[fx.Node], bool]:
        """The order of the nodes, and whether it keeps to the memory limit. The graph itself is not changed."""
        fits = True
        prices = Prices(self.cluster)
        more = _layers_left_out(graph, prices, self.repeated_layers)

        def others(node: fx.Node) -> int:
            return more.get(layer_of(info(node).op), 0)

        # 1. Memory that is held from the beginning: inputs, shared storages, and what the graph does not see.
        order = [node for node in graph.nodes if node.op == "placeholder"]
        held = self.beside_bytes + sum((1 + others(node)) * sum(prices.of(node).sizes) for node in order)
        shared, _ = self.repeated.storages(graph, liveness(graph))
        held += sum((1 + others(node)) * prices.of(node).sizes[index] for node, index in shared)
        # 2. Order the forward, then the backward with what the forward leaves behind. The limit is only given where the
        #    best order without a limit exceeds it.
        for backward in (False, True):
            nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and info(n).backward == backward]
            if not nodes:
                continue
            tasks = Tasks.of(graph, nodes, prices, others, self.repeated)
            if not self.cross_pass:
                tasks = tasks.after(recompute_barriers(tasks))
            room = None if self.memory_limit is None else self.memory_limit - held
            best = self._best(tasks, None)
            if room is not None and best.peak_bytes > room:
                best = self._best(tasks, room)
            fits &= room is None or best.peak_bytes <= room
            order += [nodes[task] for task in best.order]
            held += tasks.kept_bytes
        return order, fits

    def _best(self, tasks: Tasks, room: int | None) -> ScheduledOrder:
        """The fastest order that fits into `room` bytes; where none does, the one with the lowest peak."""
        # 1. Orders with as many gathers ahead as they ask for, up to one that is as fast as any can be and fits.
        bound = _lower_bound(tasks) * _SAME_TIME_RATIO
        limit = math.inf if room is None else room
        free: list[tuple[ScheduledOrder, _OrderFinder]] = []
        for order in self._orders(tasks) if tasks.kept_bytes <= limit else ():
            free.append((order(compute_limit=limit, communication_limit=math.inf), order))
            if free[-1][0].seconds <= bound and free[-1][0].peak_bytes <= limit:
                break
        # 2. Where none fits, find the order with the lowest peak.
        best: ScheduledOrder | None = None
        if not any(order.peak_bytes <= limit for order, _ in free):
            best = _least_memory([*self._orders(tasks)])
        # 3. The fastest order that fits, unless none can.
        if best is None or best.peak_bytes <= _INFEASIBLE_RATIO * limit:
            best = _fastest_of(free, limit, best)
        # 4. Bidirectional schedules, where communication stays exposed or memory is short.
        if self.lookahead is None and (best.seconds > bound or best.peak_bytes > limit):
            held = tasks.after(gather_ahead_edges(tasks, max(GATHER_DEPTHS)))
            for each in bidirectional_schedules(held)[:_MAX_BIDIRECTIONAL_ORDERS]:
                found = [self._simulated(tasks, each.order)]
                if found[0].seconds > each.seconds * _SAME_TIME_RATIO:  # early starts take bandwidth from others
                    found.append(self._simulated(tasks, order_by_begin(held, each.begins, ahead=False)))
                for other in found:
                    best = other if _better(other, best, limit) else best
        return best

    def _simulated(self, tasks: Tasks, order: Sequence[int]) -> ScheduledOrder:
        """A given order with late waits, timed on the device's streams."""
        return _with_late_waits(tasks, simulate_order(tasks, order, Contention.of(self.cluster.device)))

    def _orders(self, tasks: Tasks) -> Iterator[_OrderFinder]:
        """The orders that are tried, as functions of their memory limits."""
        beside = Contention.of(self.cluster.device)
        depths = [(ahead, UNLIMITED) for ahead in GATHER_DEPTHS] + [(min(GATHER_DEPTHS), min(GATHER_DEPTHS))]
        if self.lookahead is not None:
            depths = [(self.lookahead, self.lookahead)]

        def order(tasks: Tasks, ahead: int, reductions: int) -> _OrderFinder:
            found = partial(
                list_schedule, tasks, held, groups, lookahead=ahead, reductions=reductions, contention=beside
            )
            return partial(_found_with_late_waits, tasks, found)

        for keys in candidate_keys(tasks):
            groups = gather_groups_of(tasks, keys)
            held = keys_by_first_use(tasks, keys, groups)
            yield from (order(tasks, *depth) for depth in depths)
            if self.lookahead is None:
                yield from (
                    order(tasks.after(edges), max(GATHER_DEPTHS), UNLIMITED)
                    for edges in delayed_gathers(tasks, keys, groups, max(GATHER_DEPTHS))
                )


def _layers_left_out(graph: fx.Graph, prices: Prices, repeated_layers: RepeatedLayers) -> dict[str, int]:
    """How many layers that were left out of the graph each layer stands for, by its name.

    Of equal layers, the one that saves the least for the backward stands for those left out: the first and the last
    layer may also save a value in the layout that an unequal neighbour reads.
    """
    if not repeated_layers:
        return {}
    saved: Counter[str] = Counter()  # bytes that the backward reads
    where = liveness(graph).where
    backward = [node for node in graph.nodes if node.op == "call_function" and info(node).backward]
    for storage in {key for node in backward for source in node.all_input_nodes for key in where[source]}:
        if storage[0].op == "call_function" and not info(storage[0]).backward:
            saved[layer_of(info(storage[0]).op)] += prices.of(storage[0]).sizes[storage[1]]
    return {min(few, key=lambda layer: saved[layer]): count for few, count in repeated_layers if count}


def _fastest_of(
    free: Sequence[tuple[ScheduledOrder, _OrderFinder]], limit: float, best: ScheduledOrder | None
) -> ScheduledOrder:
    """The fastest order that fits. `free` has each finder with its order without limits; `best` is a first answer."""
    again: _OrderFinder | None = None
    for fastest, order in sorted(free, key=lambda each: each[0].seconds):
        if best is not None and best.peak_bytes <= limit and best.seconds <= fastest.seconds * _SAME_TIME_RATIO:
            break  # under limits, the others are slower still
        found, most = (fastest, math.inf) if fastest.peak_bytes <= limit else _within_limit(order, limit)
        if found.peak_bytes <= limit and (best is None or _better(found, best, limit)):
            best, again = found, partial(order, communication_limit=most)
    assert best is not None  # none is given only where one of the others fits
    return best if again is None else _with_less_memory(best, again)


def _least_memory(orders: Sequence[_OrderFinder]) -> ScheduledOrder:
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


def _within_limit(order: _OrderFinder, limit: float) -> tuple[ScheduledOrder, float]:
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


def _found_with_late_waits(
    tasks: Tasks, find: _OrderFinder, compute_limit: float, communication_limit: float
) -> ScheduledOrder:
    """The order that `find` makes under these limits, with late waits."""
    return _with_late_waits(tasks, find(compute_limit=compute_limit, communication_limit=communication_limit))


def _with_less_memory(best: ScheduledOrder, order: _OrderFinder) -> ScheduledOrder:
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


def _better(one: ScheduledOrder, other: ScheduledOrder, limit: float) -> bool:
    """Whether one order is better: it alone fits, is faster, or is as fast and holds less. If none fits, holds less."""
    fits, others = (order.peak_bytes <= limit for order in (one, other))
    if fits != others:
        return fits
    if not fits:
        return one.peak_bytes < other.peak_bytes
    if one.seconds * _SAME_TIME_RATIO < other.seconds:
        return True
    return one.seconds < other.seconds * _SAME_TIME_RATIO and one.peak_bytes < other.peak_bytes


def _lower_bound(tasks: Tasks) -> float:
    """A lower bound of any order's time: its compute, or the transfers of one level's links or of one process group."""
    levels: dict[str, float] = {}
    for transfers in tasks.transfers:
        if transfers is not None:
            demand = transfers.demand
            levels[transfers.group] = levels.get(transfers.group, 0.0) + demand.seconds
            for level, part in demand.use.items():
                levels[f"level {level}"] = levels.get(f"level {level}", 0.0) + part * demand.transfer
    return max(sum(tasks.seconds), *levels.values()) if levels else sum(tasks.seconds)


def _with_late_waits(tasks: Tasks, order: ScheduledOrder) -> ScheduledOrder:
    """An order in which waits (not those of gradients) and views of their results come just before their first use."""
    found: list[int] = []
    late: set[int] = set()

    def write(task: int) -> None:
        late.discard(task)
        for need in tasks.needs[task]:
            if need in late:
                write(need)
        found.append(task)

    for task in order.order:
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
    return ScheduledOrder(found, order.seconds, tasks.peak_bytes(found))


def _reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Put the nodes into this order. The output stays last."""
    last = None
    for node in order:
        if last is not None:
            last.append(node)
        last = node
