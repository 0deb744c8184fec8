"""The overlap scheduler: the pass `Schedule` orders starts, waits and compute so that compute hides communication.

The scheduler tries several orders and takes the fastest one that fits into the memory limit:

1. List scheduling (`list_scheduler`) with a few sets of priorities (`candidate_orders`). Between two collectives of
   activations, the tasks that the second collective depends on come first, so that it runs while gradients of weights
   are computed (AxoNN, section IV-A). The sub-batches come one after the other, so that one communicates while the
   other computes (Oases, algorithms 1 and 2). Prefetched all-gathers, gradient reductions under the backward and
   reduce-scatters that are drained late (AxoNN IV-B and IV-C, AMSP V-C) need no rule of their own: a collective starts
   as soon as its input is ready. `delayed_gathers` makes an exception where that would delay a collective of
   activations. The orders differ in how many gathers and reductions are under way at once.
2. The memory of the best order is reduced: it computes fewer tasks ahead of their turn, as long as it stays as fast.
3. Where communication stays exposed, schedules from both ends (`bidirectional_schedules`) compete with it.

The pass `DisableOverlap` runs after it: the collectives that an ablation names are exposed again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar

from torch import fx

from shardweave.cost_model import (
    NO_SHARING,
    Cluster,
    Contention,
    Liveness,
    MicroBatchSharing,
    NodeCosts,
    Storage,
    liveness,
)
from shardweave.ir import UNLIMITED, Collective, Traffic
from shardweave.passes.base import Pass, Property, verify_memory
from shardweave.passes.candidate_orders import (
    WAIT,
    bidirectional_schedules,
    candidate_keys,
    delayed_gathers,
    gather_ahead_edges,
    gather_groups_of,
    keys_by_first_use,
    order_by_begin,
    recompute_barriers,
    starts_of,
    transfer_cause,
)
from shardweave.passes.list_scheduler import (
    GatherGroup,
    Key,
    LeftOut,
    ScheduledOrder,
    TaskGraph,
    list_schedule,
    simulate_order,
)
from shardweave.passes.sharded_values import StateSharding
from shardweave.passes.spmd_builder import reorder
from shardweave.sharding import info, layer_of

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
        reorder(order)
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
        num_reductions = len(starts_of(self.tasks, "gradient"))
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


def traffic_of(collective: Collective, sharding: StateSharding) -> Traffic:
    """The kind of traffic that a collective is, given how its parameter is sharded.

    >>> from shardweave.ir import Axis
    >>> gpu, node = Axis("gpu0", 8, 1), Axis("node0", 4, 8)
    >>> sharding = StateSharding(parameter=(gpu,), states=(node,))
    >>> [traffic_of(Collective(kind, axes, 8, "up.weight", "", cause), sharding)
    ...  for kind, axes, cause in (("all_gather", (gpu,), "parameter"), ("all_gather", (node,), "parameter"),
    ...                            ("reduce_scatter", (gpu,), "gradient"), ("all_reduce", (node,), "gradient"))]
    ['gather', 'broadcast', 'scatter', 'reduce']
    """
    if collective.cause == "activation":
        return "activation"
    axes = set(collective.axes)
    if collective.cause == "parameter":
        return "gather" if axes <= {*sharding.parameter} else "broadcast"
    return "scatter" if axes & {*sharding.parameter, *sharding.gradient} else "reduce"


@dataclass(frozen=True)
class DisableOverlap(Pass):
    """Expose each collective of the kinds of traffic in `blocking`: compute waits for it, as in a step without overlap.

    An all-gather of a parameter moves right before its first use. Any other collective is waited for right after its
    start. This ablation measures what overlap is worth, and models systems that overlap only a part of their
    communication: AMSP's levels L0 to L3 (arXiv 2311.00257, Table V), and the steps of AxoNN's section IV (arXiv
    2305.13525). Requires an ordered graph. Ensures the same values.

    Parameters
    ----------
    blocking : collection of Traffic
    state_sharding : mapping of str to StateSharding
        The sharding of each parameter, by its name.
    """

    name = "disable_overlap"
    requires: ClassVar[frozenset[Property]] = frozenset({"ordered"})
    blocking: Collection[Traffic]
    state_sharding: Mapping[str, StateSharding]

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        for wait in graph.find_nodes(op="call_function", target=WAIT):
            start = wait.all_input_nodes[0]
            collective = info(start).collective
            if collective is None:
                continue
            owner = collective.owner.partition(" ")[0]  # of a bucket, the first: all are sharded over the same axes
            if traffic_of(collective, self.state_sharding.get(owner, StateSharding())) not in self.blocking:
                continue
            if collective.cause == "parameter":
                wait.prepend(start)
            else:
                start.append(wait)
        graph.lint()
        graph_module.recompile()
        return graph_module
