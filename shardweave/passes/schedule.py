"""Schedule: one order of starts, waits and compute for each graph, in which compute hides communication.

A list scheduler (`weave`) runs the nodes in the order of their keys, and takes what is ready where that order has to
wait. The keys follow the graph as it was written, but for two things, between one activation's collective and the next:
what leads to the collective comes first (so that it is under way while gradients of weights are computed: AxoNN,
section IV-A), and the sub-batches come one after the other (so that one communicates while the other computes: Oases,
Algorithm 1 and 2). Prefetched gathers, gradients reduced under the backward and reduce-scatters drained late (AxoNN
IV-B and IV-C, AMSP V-C) need no rule: a start never waits for its turn, but where that would keep an activation waiting
(`pace`).

Of a few such orders, which hold more or less back for memory, the fastest that fits is taken. What it computes ahead of
its turn, to fill the time of a wait, is then cut to what is worth its memory. Where that leaves communication exposed,
orders that were found from both ends (`justify`) compete with it.
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
from shardweave.ir import ALL
from shardweave.passes.base import Pass, Property
from shardweave.passes.dependency_graph import Tasks
from shardweave.passes.list_scheduler import Woven, played, weave
from shardweave.passes.schedule_refinement import in_order_of, justified, paced
from shardweave.passes.scheduling_priorities import ahead_of_use, barriers, cause_of, hold_back, moments_of, orderings
from shardweave.passes.verify import verify_memory
from shardweave.sharding import info, layer_of

AHEAD = (8, 4, 1)
"""How many moments are gathered ahead where the user does not say it."""
_CLOSE = 1.005
"""An order this close to the best one, or to the bound, is as good, and the one that holds less is taken."""
_FINE = 0.1
"""No memory is saved that is less than this part of it."""
_PLAYED = 4
"""How many of the orders from both ends are tried, the most promising ones."""
_NEAREST, _FINER = 4, 2**-7
"""Of the orders that hold least, how many are tried to hold still less; and by which part of it at least."""

_LESS = (1, 2, 4)
"""How many times what an order holds too much it is given less."""
_HOPELESS = 1.0625
"""Where what holds least needs so many times the room, no order is looked for that fits."""

_Order = Callable[..., Woven]

Alike = Sequence[tuple[Sequence[str], int]]
"""Equal layers, and how many more of them there are."""


_FITS = "fits"
"""In the meta of a graph module: whether its order keeps to the memory limit."""


def fits(graph_module: fx.GraphModule) -> bool:
    """Whether the order that `Schedule` found for a graph keeps to the memory limit."""
    return bool(graph_module.meta[_FITS])


@dataclass(frozen=True)
class Schedule(Pass):
    """Order the local graph.

    Requires a local graph in which every start is followed by its wait; ensures the same values with starts early and
    waits late, forward before backward.

    Parameters
    ----------
    cluster : Cluster
        What kernels and collectives take.
    lookahead : int, optional
        How many gathered parameters (and gradients being reduced) may be under way beside the ones in use. Left out:
        as many as pay, and fit.
    memory_limit : int, optional
        Bytes that a device may use.
    beside_bytes : int
        Bytes on a device that the graph does not see: the optimizer's states, what other micro-batches return.
    cross_pass : bool
        Recomputation and gradients of different layers may overlap.
    alike : sequence of (sequence of str, int)
        Equal layers of the graph, and how many more of them there are that are not in it.
    repeated : Repeated
        What the last run of the graph finds, where it runs once for each micro-batch.
    """

    name = "schedule"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    ensures: ClassVar[frozenset[Property]] = frozenset({"ordered"})
    cluster: Cluster
    lookahead: int | None = None
    memory_limit: int | None = None
    beside_bytes: int = 0
    cross_pass: bool = True
    alike: Alike = ()
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
        """The order of the nodes, and whether it keeps to the memory limit."""
        fits = True
        prices = Prices(self.cluster)
        more = _standing_for(graph, prices, self.alike)

        def others(node: fx.Node) -> int:
            return more.get(layer_of(info(node).op), 0)

        order = [node for node in graph.nodes if node.op == "placeholder"]
        held = self.beside_bytes + sum((1 + others(node)) * sum(prices.of(node).sizes) for node in order)
        shared, _ = self.repeated.storages(graph, liveness(graph))
        held += sum((1 + others(node)) * prices.of(node).sizes[index] for node, index in shared)
        for backward in (False, True):
            nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and info(n).backward == backward]
            if not nodes:
                continue
            tasks = Tasks.of(graph, nodes, prices, others, self.repeated)
            if not self.cross_pass:
                tasks = tasks.after(barriers(tasks))
            room = None if self.memory_limit is None else self.memory_limit - held
            best = self._best(tasks, None)
            if room is not None and best.peak_bytes > room:  # else less memory would give another order of as much
                best = self._best(tasks, room)
            fits &= room is None or best.peak_bytes <= room
            order += [nodes[task] for task in best.order]
            held += tasks.kept_bytes
        return order, fits

    def _best(self, tasks: Tasks, room: int | None) -> Woven:
        """The fastest order that fits; where none does, the one that holds least, whatever the limit is."""
        bound = _bound(tasks) * _CLOSE
        limit = math.inf if room is None else room
        free: list[tuple[Woven, _Order]] = []  # with all gathers that they ask for
        for order in self._orders(tasks) if tasks.kept_bytes <= limit else ():
            free.append((order(room=limit, most=math.inf), order))
            if free[-1][0].seconds <= bound and free[-1][0].peak_bytes <= limit:
                break
        best: Woven | None = None
        if not any(woven.peak_bytes <= limit for woven, _ in free):
            best = _least_of([*self._orders(tasks)])
        if best is None or best.peak_bytes <= _HOPELESS * limit:
            best = _fastest_of(free, limit, best)
        if self.lookahead is None and (best.seconds > bound or best.peak_bytes > limit):
            held = tasks.after(ahead_of_use(tasks, max(AHEAD)))
            for each in justified(held)[:_PLAYED]:
                found = [self._played(tasks, each.order)]
                if found[0].seconds > each.seconds * _CLOSE:  # started ahead of its time, it shares others' links
                    found.append(self._played(tasks, in_order_of(held, each.begins, ahead=False)))
                for other in found:
                    best = other if _better(other, best, limit) else best
        return best

    def _played(self, tasks: Tasks, order: Sequence[int]) -> Woven:
        return _sunk(tasks, played(tasks, order, Contention.of(self.cluster.device)))

    def _orders(self, tasks: Tasks) -> Iterator[_Order]:
        """The orders that are tried, each given the room that it has."""
        beside = Contention.of(self.cluster.device)
        depths = [(ahead, ALL) for ahead in AHEAD] + [(min(AHEAD), min(AHEAD))]
        if self.lookahead is not None:
            depths = [(self.lookahead, self.lookahead)]

        def order(tasks: Tasks, ahead: int, reductions: int) -> _Order:
            found = partial(weave, tasks, held, moments, lookahead=ahead, reductions=reductions, contention=beside)
            return partial(_late, tasks, found)

        for keys in orderings(tasks):
            moments = moments_of(tasks, keys)
            held = hold_back(tasks, keys, moments)
            yield from (order(tasks, *depth) for depth in depths)
            if self.lookahead is None:
                yield from (
                    order(tasks.after(edges), max(AHEAD), ALL) for edges in paced(tasks, keys, moments, max(AHEAD))
                )


def _standing_for(graph: fx.Graph, prices: Prices, alike: Alike) -> dict[str, int]:
    """For how many layers that are not in the graph one stands, by its name: of equal ones that which saves the least.

    The first and the last may keep what their other neighbour reads in another layout, too.
    """
    if not alike:
        return {}
    saved: Counter[str] = Counter()
    where = liveness(graph).where
    backward = [node for node in graph.nodes if node.op == "call_function" and info(node).backward]
    for storage in {key for node in backward for source in node.all_input_nodes for key in where[source]}:
        if storage[0].op == "call_function" and not info(storage[0]).backward:
            saved[layer_of(info(storage[0]).op)] += prices.of(storage[0]).sizes[storage[1]]
    return {min(few, key=lambda layer: saved[layer]): count for few, count in alike if count}


def _fastest_of(free: Sequence[tuple[Woven, _Order]], limit: float, best: Woven | None) -> Woven:
    """The fastest that fits of orders, given with what each takes where it is not held back; `best` where none does."""
    again: _Order | None = None
    for fastest, order in sorted(free, key=lambda each: each[0].seconds):
        if best is not None and best.peak_bytes <= limit and best.seconds <= fastest.seconds * _CLOSE:
            break  # held back, they take longer, and none is much faster
        found, most = (fastest, math.inf) if fastest.peak_bytes <= limit else _within(order, limit)
        if found.peak_bytes <= limit and (best is None or _better(found, best, limit)):
            best, again = found, partial(order, most=most)
    assert best is not None  # none is given only where one of the others fits
    return best if again is None else _thriftier(best, again)


def _least_of(orders: Sequence[_Order]) -> Woven:
    """What holds least of orders, whatever the limit is: they hold less where they are given a little, not nothing."""
    found = sorted(((order(room=0, most=0), order) for order in orders), key=lambda each: each[0].peak_bytes)
    best, nearest = found[0][0], [order for _, order in found[:_NEAREST]]
    while True:
        less = int((1 - _FINER) * best.peak_bytes)
        other = min((order(room=less, most=less) for order in nearest), key=lambda woven: woven.peak_bytes)
        if other.peak_bytes > less:
            return min(best, other, key=lambda woven: woven.peak_bytes)
        best = other


def _within(order: _Order, limit: float) -> tuple[Woven, float]:
    """An order that may hold so much, or, where it holds a little more, less and less; and what it was given.

    What is gathered ahead is there still where more is computed, which was not foreseen.
    """
    found = order(room=limit, most=limit)
    if found.peak_bytes <= limit:
        return found, limit
    for times in _LESS:
        less = limit - times * (found.peak_bytes - limit)
        if not 0 < less < limit:
            break
        again = order(room=less, most=less)
        if again.peak_bytes <= limit:
            return again, less
    return found, limit


def _late(tasks: Tasks, order: _Order, room: float, most: float) -> Woven:
    """An order with its waits where they belong."""
    return _sunk(tasks, order(room=room, most=most))


def _thriftier(best: Woven, order: _Order) -> Woven:
    """`best` with as little computed ahead of its turn as takes no longer."""
    seconds = best.seconds * _CLOSE
    low, high = order(room=0).peak_bytes, best.peak_bytes
    room = low
    while high - low > _FINE * high:
        found = order(room=room)
        if found.peak_bytes < best.peak_bytes and found.seconds <= seconds:
            best, high = found, room
        else:
            low = room
        room = (low + high) // 2
    return best


def _better(one: Woven, other: Woven, limit: float) -> bool:
    fits, others = (woven.peak_bytes <= limit for woven in (one, other))
    if fits != others:
        return fits
    if not fits:
        return one.peak_bytes < other.peak_bytes
    if one.seconds * _CLOSE < other.seconds:
        return True
    return one.seconds < other.seconds * _CLOSE and one.peak_bytes < other.peak_bytes


def _bound(tasks: Tasks) -> float:
    """No order takes less: its compute, or what one level's links or one group have to move."""
    levels: dict[str, float] = {}
    for transfers in tasks.transfers:
        if transfers is not None:
            demand = transfers.demand
            levels[transfers.group] = levels.get(transfers.group, 0.0) + demand.seconds
            for level, part in demand.use.items():
                levels[f"level {level}"] = levels.get(f"level {level}", 0.0) + part * demand.transfer
    return max(sum(tasks.seconds), *levels.values()) if levels else sum(tasks.seconds)


def _sunk(tasks: Tasks, woven: Woven) -> Woven:
    """An order with waits for what is computed with, and views of it, just before their first use."""
    found: list[int] = []
    late: set[int] = set()

    def write(task: int) -> None:
        late.discard(task)
        for need in tasks.needs[task]:
            if need in late:
                write(need)
        found.append(task)

    for task in woven.order:
        start = tasks.started[task]
        arrives = start >= 0 and cause_of(tasks, start) != "gradient"
        free = not tasks.seconds[task] and tasks.transfers[task] is None
        if arrives or (free and late.intersection(tasks.needs[task])):
            late.add(task)
        else:
            write(task)
    for task in sorted(late):
        if task in late:
            write(task)
    return Woven(found, woven.seconds, tasks.peak_bytes(found))


def _reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Put the nodes into this order, the output behind them."""
    last = None
    for node in order:
        if last is not None:
            last.append(node)
        last = node
