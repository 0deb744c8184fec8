"""The dependency graph that a scheduler orders: tasks with their dependences, times and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from shardweave.cost_model import ONCE, Demand, Prices, Repeated, Storage, liveness
from shardweave.ir import Collective, group_name
from shardweave.sharding import collective, is_start, is_wait


@dataclass(frozen=True)
class CollectiveStart:
    """The collective that a task starts: its process group, its demand on the links, and its note in the graph."""

    group: str
    demand: Demand
    what: Collective


@dataclass(frozen=True)
class Tasks:
    """The nodes of one part of a graph (its forward or its backward) as tasks, numbered in the graph's order.

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
    sizes : for each storage its bytes. A storage that outlives the part also counts for the layers that it stands for
    kept : for each storage whether it outlives the part
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

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        nodes: Sequence[fx.Node],
        prices: Prices,
        others: Callable[[fx.Node], int] = lambda _: 0,
        repeated: Repeated = ONCE,
    ) -> Tasks:
        """The tasks of these nodes, which are in the order of `graph`.

        A storage that a node leaves to another part counts once more for each of `others(node)`, the equal layers that
        were left out of the graph. A storage that several runs of the graph share takes no memory here and is not
        freed. A running sum of gradients is freed.
        """
        # 1. Dependences.
        number = {node: index for index, node in enumerate(nodes)}
        needs = [[number[source] for source in node.all_input_nodes if source in number] for node in nodes]
        users: list[list[int]] = [[] for _ in nodes]
        for index, sources in enumerate(needs):
            for source in sources:
                users[source].append(index)
        # 2. Storages: who allocates and uses them, how large they are, and which of them outlive the part.
        found = liveness(graph)
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
        here = {each for own in born for each in own}
        for key, each in storages.items():
            if kept[each] or each not in here:
                sizes[each] *= 1 + others(key[0])
        # 3. Times and collectives.
        transfers: list[CollectiveStart | None] = []
        for node in nodes:
            what = collective(node) if is_start(node) else None
            moved = None if what is None else CollectiveStart(group_name(what.axes), prices.collective(what), what)
            transfers.append(moved)
        started = [number.get(node.all_input_nodes[0], -1) if is_wait(node) else -1 for node in nodes]
        seconds = [prices.of(node).seconds if prices.of(node).kernel else 0.0 for node in nodes]
        scratch, sending = [prices.of(node).scratch for node in nodes], [prices.of(node).held for node in nodes]
        return cls(nodes, needs, users, seconds, transfers, started, born, lives, scratch, sending, sizes, kept)

    @cached_property
    def born_bytes(self) -> Sequence[int]:
        """For each task the bytes that it allocates."""
        return [sum(self.sizes[storage] for storage in born) for born in self.born]

    @cached_property
    def kept_bytes(self) -> int:
        """The bytes that the part leaves behind: the least that any order holds at once."""
        return sum(self.sizes[storage] for born in self.born for storage in born if self.kept[storage])

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

    def after(self, edges: Sequence[tuple[int, int]]) -> Tasks:
        """These tasks with further dependences: the second task of each pair also needs the first."""
        needs, users = [list(each) for each in self.needs], [list(each) for each in self.users]
        for before, task in set(edges):
            if before not in needs[task]:
                needs[task].append(before)
                users[before].append(task)
        return replace(self, needs=needs, users=users)
