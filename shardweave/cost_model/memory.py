"""Memory over a schedule by liveness: the lifetime of each storage, the bytes in use over time by kind, and the peak.

A value that aliases another (a view, a waited collective) shares the *storage* of its base. A storage is allocated at
the node that computes it, and may be freed after the last node that uses it or one of its views. A collective reads
its input until it has been waited for, so a wait counts as a use of the input.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import fx

from shardweave.cost_model.node_cost import NodeCosts
from shardweave.sharding import alias_of, is_start, is_wait, node_nodes, tensor_bytes, tensors

MEMORY_KINDS = (
    "parameters", "optimizer", "copies", "buffers", "inputs", "saved", "gathered", "working", "scratch", "gradients",
    "outputs",
)  # fmt: skip
"""The kinds of memory, in the order in which plots stack them.

*Copies* are gathered or cast parameters that are kept for the backward. *Saved* values are the other values that are
kept for the backward. *Gathered* parameters are freed after their use. *Working* is every other intermediate value.
*Scratch* is what kernels, collectives and the optimizer allocate beside their results (`kernel_scratch.py`).
"""

Storage = tuple[fx.Node, int]
"""A piece of memory: the node that computes it, and which of the node's outputs it is."""


@dataclass(frozen=True)
class Liveness:
    """The storages of one graph.

    Parameters
    ----------
    where : mapping of Node to tuple of Storage
        The storages of each node's value.
    born : mapping of Node to tuple of Storage
        The storages that each node allocates.
    dead : mapping of Node to tuple of Storage
        The storages that each node is the last to use. A caller may still hold them.
    """

    where: Mapping[fx.Node, tuple[Storage, ...]]
    born: Mapping[fx.Node, tuple[Storage, ...]]
    dead: Mapping[fx.Node, tuple[Storage, ...]]


class MicroBatchSharing(NamedTuple):
    """The values that the micro-batches of a graph share.

    Parameters
    ----------
    shared : frozenset of str
        Nodes that the first micro-batch computes and all use. Their memory is in use all the time.
    sums : frozenset of str
        Placeholders with the accumulated gradients, which are freed after their last use.
    """

    shared: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()

    def storages(self, graph: fx.Graph, found: Liveness) -> tuple[set[Storage], set[Storage]]:
        """The storages of the shared nodes that the graph computes, and of the accumulated gradients."""
        shared, sums = (
            {storage for node in graph.nodes if node.name in names for storage in found.where[node]} for names in self
        )
        return {storage for storage in shared if storage[0].op == "call_function"}, sums


NO_SHARING = MicroBatchSharing()
"""The `MicroBatchSharing` of a graph that runs once a step."""


def storage_bytes(storage: Storage) -> int:
    """Bytes of one storage."""
    node, index = storage
    return tensor_bytes(list(tensors(node.meta.get("val")))[index])


def liveness(graph: fx.Graph, given: Mapping[fx.Node, tuple[Storage, ...]] | None = None) -> Liveness:
    """The storages of `graph` and their lifetimes.

    Parameters
    ----------
    graph : fx.Graph
        Its nodes carry ``meta["val"]`` with local shapes.
    given : mapping of Node to tuple of Storage, optional
        The storages of placeholders that another graph has allocated, as the saved values of a backward.

    Examples
    --------
    >>> import torch
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> y = graph.call_function(torch.ops.aten.view.default, (x, [4]))
    >>> z = graph.call_function(torch.ops.aten.neg.default, (y,))
    >>> for node in (x, y, z):
    ...     node.meta["val"] = torch.empty(4, device="meta")
    >>> found = liveness(graph)
    >>> found.where[y], found.dead[z]
    (((x, 0),), ((neg_default, 0), (x, 0)))
    """
    where: dict[fx.Node, tuple[Storage, ...]] = dict(given or {})
    born: dict[fx.Node, tuple[Storage, ...]] = {}
    last: dict[Storage, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node not in where:
            where[node] = _storages(node, where)
            own = tuple(storage for storage in where[node] if storage[0] is node)
            if own:
                born[node] = own
        used = [node, *node.all_input_nodes]
        if is_wait(node):  # the collective reads its input until then
            used += [source for start in node.all_input_nodes if is_start(start) for source in start.all_input_nodes]
        for value in used:
            for storage in where[value]:
                last.pop(storage, None)  # keeps `last` in the order of the last uses
                last[storage] = node
    dead: dict[fx.Node, tuple[Storage, ...]] = {}
    for storage, node in last.items():
        dead[node] = (*dead.get(node, ()), storage)
    return Liveness(where, born, dead)


def output_storages(value: object, found: Liveness) -> tuple[Storage, ...]:
    """The storages of the nodes in a part `value` of a graph's output."""
    return tuple(storage for node in node_nodes(value) for storage in found.where[node])


def peak_live_bytes(
    graph: fx.Graph, costs: NodeCosts, sharing: MicroBatchSharing = NO_SHARING
) -> tuple[int, fx.Node | None]:
    """The peak of memory of a graph in its order of nodes, scratch included, and the node at which it is reached.

    Placeholders and constants are in use all the time, results until the end. Accumulated gradients are freed.

    Examples
    --------
    >>> import torch
    >>> from shardweave.cost_model import Cluster
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> y = graph.call_function(torch.ops.aten.neg.default, (x,))
    >>> z = graph.call_function(torch.ops.aten.neg.default, (y,))
    >>> for node in (x, y, z):
    ...     node.meta["val"] = torch.empty(4, device="meta")
    >>> _ = graph.output(z)
    >>> peak_live_bytes(graph, NodeCosts(Cluster.local(1)))
    (48, neg_default_1)
    """
    found = liveness(graph)
    shared, sums = sharing.storages(graph, found)
    stays = {*output_storages(graph.output_node().args, found), *shared}
    now = sum(sum(costs.of(node).sizes) for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    now += sum(costs.of(key).sizes[index] for key, index in shared)
    most, where = now, None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        cost = costs.of(node)
        born = (storage for storage in found.born.get(node, ()) if storage not in shared)
        now += sum(cost.sizes[index] for _, index in born) + cost.held
        if now + cost.scratch > most:
            most, where = now + cost.scratch, node
        if is_wait(node):
            now -= sum(costs.of(start).held for start in node.all_input_nodes)
        ended = (storage for storage in found.dead.get(node, ()) if storage not in stays)
        freed = ((key, index) for key, index in ended if key.op == "call_function" or (key, index) in sums)
        now -= sum(costs.of(key).sizes[index] for key, index in freed)
    return most, where


def _storages(node: fx.Node, where: Mapping[fx.Node, tuple[Storage, ...]]) -> tuple[Storage, ...]:
    base = alias_of(node)
    if base is None:
        return tuple((node, index) for index, _ in enumerate(tensors(node.meta.get("val"))))
    if node.target is operator.getitem and alias_of(base) is None:  # one of several outputs of a kernel
        index = node.args[1]
        value = base.meta.get("val")
        if isinstance(index, int) and isinstance(value, list | tuple):
            before = sum(1 for _ in tensors(value[:index]))
            return where[base][before : before + sum(1 for _ in tensors(value[index]))]
    return where[base]


class Change(NamedTuple):
    """At `seconds`, the value `owner` allocates `bytes` of `kind`; it frees them if `bytes` is negative."""

    seconds: float
    kind: str
    bytes: int
    owner: str = ""


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Bytes in use over time, by kind.

    ``bytes[i, k]`` of ``kinds[k]`` are in use from ``seconds[i]`` until ``seconds[i + 1]``, after ``changes[i - 1]``.
    """

    seconds: NDArray[np.float64]
    bytes: NDArray[np.int64]
    kinds: tuple[str, ...] = MEMORY_KINDS
    changes: tuple[Change, ...] = ()

    @classmethod
    def of(cls, changes: Sequence[Change], end: float) -> MemoryCurve:
        """The curve of `changes`, in the order in which they happen, until `end`.

        >>> MemoryCurve.of([Change(0.0, "saved", 5), Change(1.0, "saved", -2)], 2.0).total.tolist()
        [0, 5, 3, 3]
        """
        column = {kind: index for index, kind in enumerate(MEMORY_KINDS)}
        deltas = np.zeros((len(changes) + 2, len(MEMORY_KINDS)), dtype=np.int64)
        seconds = np.zeros(len(changes) + 2)
        for row, change in enumerate(changes, start=1):
            deltas[row, column[change.kind]] = change.bytes
            seconds[row] = change.seconds
        seconds[-1] = end
        return cls(seconds, np.cumsum(deltas, axis=0), MEMORY_KINDS, tuple(changes))

    @property
    def total(self) -> NDArray[np.int64]:
        """Bytes in use at each of `seconds`."""
        return np.asarray(self.bytes.sum(axis=1), dtype=np.int64)

    @property
    def peak(self) -> int:
        """The most bytes in use at once."""
        return int(self.total.max())

    @property
    def peak_seconds(self) -> float:
        """The time at which the peak is first reached."""
        return float(self.seconds[self._peak_row])

    @property
    def _peak_row(self) -> int:
        return int(self.total.argmax())

    def at_peak(self) -> dict[str, int]:
        """The bytes of each kind at the peak, largest first."""
        return self._by_kind(self._peak_row)

    def at_rest(self) -> dict[str, int]:
        """The bytes of each kind between steps, largest first."""
        return self._by_kind(-1)

    def largest_at_peak(self, count: int) -> list[tuple[str, str, int]]:
        """The `count` largest values at the peak: owner, kind and bytes.

        >>> curve = MemoryCurve.of([Change(0.0, "saved", 5, "x"), Change(1.0, "saved", 7, "y")], 2.0)
        >>> curve.largest_at_peak(1)
        [('y', 'saved', 7)]
        """
        sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
        for change in self.changes[: self._peak_row]:
            sizes[change.owner, change.kind] += change.bytes
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:count]
        return [(owner, kind, size) for (owner, kind), size in largest if size > 0]

    def _by_kind(self, row: int) -> dict[str, int]:
        found = ((kind, int(size)) for kind, size in zip(self.kinds, self.bytes[row], strict=True) if size)
        return dict(sorted(found, key=lambda item: -item[1]))
