"""Schedule: start collectives early, wait for them late, without holding more than the memory allows.

A stable topological order by keys: a node's key is its place in the graph as it was written. The start of a
collective moves up to its operands, its wait down to its first use. What is gathered ahead of its use, or still being
reduced after it, takes memory: a parameter is gathered while the op before its own computes (`lookahead`), and a
gradient's reduction is waited for once the next ones have started.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import fx

import shardweave.runtime.padding  # noqa: F401  (registers the ops)
from shardweave.passes.annotate import info

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default
# What shard writes around a collective to bring its buffer into shape.
GLUE = {aten.reshape.default, aten.permute.default, aten.clone.default, aten.t.default, aten.transpose.int,
        aten.select.int, aten.narrow.default, torch.ops.shardweave.pad.default, torch.ops.shardweave.unpad.default,
         WAIT}  # fmt: skip
CAST = aten._to_copy.default


@dataclass(frozen=True)
class Schedule:
    """Order the local graph.

    Requires a local graph in which every start is followed by its wait; ensures the same values with starts early and
    waits late, forward before backward.
    """

    name = "schedule"
    lookahead: int = 1
    """How many gathered parameters (and gradients being reduced) may be under way beside the ones in use."""

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        nodes = list(graph.nodes)
        keys = {node: float(index) for index, node in enumerate(nodes)}
        self._sink_waits(nodes, keys)
        self._raise_starts(nodes, keys)
        self._bound_gathers(nodes, keys)
        self._bound_reductions(nodes, keys)
        _reorder(graph, keys)
        graph.lint()
        graph_module.recompile()
        return graph_module

    def _sink_waits(self, nodes: list[fx.Node], keys: dict[fx.Node, float]) -> None:
        """Let a wait, and the reshapes after it, come just before their first use."""
        after_wait = set()
        for node in nodes:
            if node.target is WAIT or (node.target in GLUE and any(arg in after_wait for arg in node.all_input_nodes)):
                after_wait.add(node)
        for node in reversed(nodes):
            if node in after_wait and node.users:
                keys[node] = min(keys[user] for user in node.users) - 1e-4

    def _raise_starts(self, nodes: list[fx.Node], keys: dict[fx.Node, float]) -> None:
        """Let a start, and the reshapes before it, come just after their operands."""
        before_start = set()
        for node in reversed(nodes):
            starts = info(node).collective is not None
            if starts or (node.target in GLUE and node.users and all(user in before_start for user in node.users)):
                before_start.add(node)
            elif node.target is CAST and len(node.users) == 1 and not before_start.isdisjoint(node.users):
                before_start.add(node)  # what is moved in another dtype; with more uses, it is made at the first
        for node in nodes:
            if node in before_start:
                keys[node] = max((keys[arg] for arg in node.all_input_nodes), default=keys[node]) + 1e-5

    def _bound_gathers(self, nodes: list[fx.Node], keys: dict[fx.Node, float]) -> None:
        """Start the gather of a parameter when the op `lookahead` gathers before it begins."""
        for backward in (False, True):
            gathers = [node for node in nodes if _moves(node, "parameter") and info(node).backward == backward]
            uses = sorted((_first_use(node, keys), index, node) for index, node in enumerate(gathers))
            mine = [node for node in nodes if info(node).backward == backward and node.op == "call_function"]
            first = min((keys[node] for node in mine), default=0.0)
            moments = sorted({use for use, _, _ in uses})  # one op may use several at once
            for use, _, node in uses:
                earlier = moments.index(use) - self.lookahead
                floor = moments[earlier] - 1e-3 if earlier >= 0 else first - 1e-3
                _lift(node, keys, floor)

    def _bound_reductions(self, nodes: list[fx.Node], keys: dict[fx.Node, float]) -> None:
        """Wait for a gradient's reduction once `lookahead` later ones have started."""
        reductions = sorted((node for node in nodes if _moves(node, "gradient")), key=lambda node: keys[node])
        for position, node in enumerate(reductions):
            later = position + self.lookahead
            if later < len(reductions):
                _drop_to(node, keys, keys[reductions[later]] + 1e-3)


def _moves(node: fx.Node, cause: str) -> bool:
    collective = info(node).collective
    return collective is not None and collective.cause == cause


def _first_use(node: fx.Node, keys: dict[fx.Node, float]) -> float:
    """The key of the first compute that needs what `node` starts."""
    uses = [_first_use(user, keys) if user.target in GLUE else keys[user] for user in node.users]
    return min(uses, default=keys[node])


def _lift(node: fx.Node, keys: dict[fx.Node, float], key: float) -> None:
    """Move a start, and the reshapes that only it needs, to `key`."""
    keys[node] = key
    for argument in node.all_input_nodes:
        glue = argument.target is CAST or (argument.target in GLUE and argument.target is not WAIT)
        if glue and len(argument.users) == 1:
            _lift(argument, keys, key - 1e-6)
        elif argument.target is CAST:  # of a parameter that the backward gathers again
            keys[argument] = min(keys[argument], key - 1e-6)


def _drop_to(node: fx.Node, keys: dict[fx.Node, float], key: float) -> None:
    """Move the waits of a start, and the reshapes after them, to `key` if they come later."""
    for user in node.users:
        if user.target in GLUE and keys[user] > key:
            keys[user] = key
            _drop_to(user, keys, key + 1e-6)


def _reorder(graph: fx.Graph, keys: dict[fx.Node, float]) -> None:
    """The nodes in the order of their keys, as far as their data allow; forward before backward."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    missing = {node: len(node.all_input_nodes) for node in graph.nodes}

    def rank(node: fx.Node) -> tuple[int, float, int]:
        stage = 0 if node.op == "placeholder" else 3 if node.op == "output" else 1 + info(node).backward
        return stage, keys[node], order[node]

    ready = [(rank(node), node) for node in graph.nodes if not missing[node]]
    heapq.heapify(ready)
    last = None
    while ready:
        _, node = heapq.heappop(ready)
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (rank(user), user))
