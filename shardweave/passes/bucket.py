"""Bucket: small collectives of one group, kind and dtype become one.

A collective takes its latency and then its bytes. Where several that could run side by side are small against what the
link moves within a latency, they are put together, until what they move takes most of the time. None waits for another
by more than that saves: a gradient that waits for a later one has to be on its way before the backward ends, and what
is gathered with a parameter must not keep that one's op waiting. Only parameters of one layer are gathered together,
for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardweave.cost_model import Cluster
from shardweave.cost_model.graphs import is_wait
from shardweave.cost_model.prices import Prices
from shardweave.ir import META, Collective
from shardweave.passes.annotate import info
from shardweave.passes.local import in_order, remove_dead
from shardweave.passes.recompute import layer_of

aten = torch.ops.aten
_FULL = 9.0
"""A bucket is full when its bytes take this many times its latency."""
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Bucket:
    """Put small collectives of parameters and gradients together.

    Requires a local graph in which every start is followed by its wait; ensures the same values.

    Parameters
    ----------
    cluster : Cluster
        Whose links say what is small.
    tangents : sequence of str
        The placeholders that a backward starts from. Gradients that come of different ones stay apart: some backwards
        have only a few of them.
    """

    name = "bucket"
    cluster: Cluster
    tangents: Sequence[str] = ()

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        prices = Prices(self.cluster)
        place = {node: index for index, node in enumerate(graph.nodes)}
        for bucket in _buckets(graph, prices, self._sources(graph)):
            _merge(graph, bucket, place)
        in_order(graph, place)
        remove_dead(graph)
        graph.lint()
        graph_module.recompile()
        return graph_module


    def _sources(self, graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
        """The tangents that each node comes of."""
        found: dict[fx.Node, frozenset[str]] = {}
        for node in graph.nodes:
            mine = frozenset({node.name}) if node.name in self.tangents else frozenset()
            found[node] = mine.union(*(found[source] for source in node.all_input_nodes))
        return found


@dataclass(frozen=True)
class _Member:
    """A start that may be put together with others: when it could start, in seconds of compute, and what it moves."""

    start: fx.Node
    what: Collective
    seconds: float
    place: int


def _buckets(graph: fx.Graph, prices: Prices, sources: Mapping[fx.Node, frozenset[str]]) -> list[list[_Member]]:
    """The starts that become one, each with those before it."""
    found: list[list[_Member]] = []
    for backward in (False, True):
        nodes = [n for n in graph.nodes if n.op == "call_function" and info(n).backward == backward]
        reached, now = {}, 0.0
        for node in nodes:
            reached[node] = now
            now += prices.of(node).seconds if prices.of(node).kernel else 0.0
        groups: dict[Any, list[_Member]] = {}
        for index, node in enumerate(nodes):
            what = info(node).collective
            if what is None or what.cause == "activation" or what.kind not in _KINDS:
                continue
            at = _first_use(node) if what.cause == "parameter" else _last_operand(node)
            member = _Member(node, what, reached.get(at, 0.0), index)
            unit = layer_of(what.owner) if what.cause == "parameter" else sources[node]
            key = what.kind, what.axes, what.cause, node.meta["val"].dtype, str(node.args[1:]), unit
            groups.setdefault(key, []).append(member)
        for members in groups.values():
            found += _together(sorted(members, key=lambda m: (m.seconds, m.place)), prices, now)
    return found


def _together(members: Sequence[_Member], prices: Prices, end: float) -> list[list[_Member]]:
    """Runs of members, in the order in which they could start, that are cheaper as one."""

    def demand(size: int) -> Any:
        return prices.collective(replace(members[0].what, bytes=size))

    runs: list[list[_Member]] = []
    size = 0
    for member in members:
        mine = demand(member.what.bytes)
        if runs:
            before, both = demand(size), demand(size + member.what.bytes)
            saved = before.seconds + mine.seconds - both.seconds
            if member.what.cause == "parameter":
                harm = both.transfer - before.transfer  # its first user waits that much longer
            else:
                harm = max(0.0, both.seconds - max(end - member.seconds, mine.seconds))
            if before.transfer < _FULL * before.latency and saved > 0 and harm <= saved:
                runs[-1].append(member)
                size += member.what.bytes
                continue
        runs.append([member])
        size = member.what.bytes
    return [run for run in runs if len(run) > 1]


def _first_use(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    return min(wait.users, default=wait)


def _last_operand(start: fx.Node) -> fx.Node:
    """What computes the operand of a start: it is written long before the glue between the two."""
    node = start
    while node.all_input_nodes and (node is start or node.target in _GLUE):
        node = max(node.all_input_nodes)
    return node


_GLUE = {aten.reshape.default, aten.permute.default, aten.clone.default, aten.t.default, aten._to_copy.default}


def _merge(graph: fx.Graph, bucket: Sequence[_Member], place: dict[fx.Node, int]) -> None:
    """Write one collective in the place of several."""
    starts = [member.start for member in bucket]
    first, kind = starts[0], bucket[0].what.kind
    waits = [next(iter(start.users)) for start in starts]
    assert all(is_wait(wait) for wait in waits)
    late = bucket[0].what.cause == "gradient"
    spot = max(map(place.__getitem__, starts)) if late else min(map(place.__getitem__, starts))
    backward = info(first).backward

    def call(target: Callable[..., Any], *args: Any, like: fx.Node = first) -> fx.Node:
        node = graph.create_node("call_function", target, args)
        values = fx.node.map_arg(args, lambda leaf: leaf.meta["val"])
        with first.meta["val"].fake_mode:
            node.meta["val"] = target(*values)
        node.meta[META] = replace(info(like), layouts=(), collective=None, backward=backward)
        place[node] = spot
        return node

    ranks = first.args[1] if kind == "all_gather" else first.args[2] if kind == "reduce_scatter" else 1
    assert isinstance(ranks, int)
    with graph.inserting_before(graph.output_node()):
        operands = [start.all_input_nodes[0] for start in starts]
        sizes = [operand.meta["val"].numel() for operand in operands]
        if kind == "reduce_scatter":
            parts = [call(aten.reshape.default, each, [ranks, n // ranks]) for each, n in zip(operands, sizes)]
            whole = call(aten.reshape.default, call(aten.cat.default, parts, 1), [sum(sizes)])
            sizes = [size // ranks for size in sizes]
        else:
            parts = [call(aten.reshape.default, each, [n]) for each, n in zip(operands, sizes)]
            whole = call(aten.cat.default, parts)
        assert callable(first.target) and callable(waits[0].target)
        start = call(first.target, whole, *first.args[1:])
        owners = f"{bucket[0].what.owner} and {len(bucket) - 1} more"
        what = replace(bucket[0].what, bytes=sum(member.what.bytes for member in bucket), owner=owners)
        start.meta[META] = replace(info(start), collective=what)
        arrived = call(waits[0].target, start)
        rows = call(aten.reshape.default, arrived, [ranks, sum(sizes)]) if kind == "all_gather" else arrived
        dim, offset = int(kind == "all_gather"), 0
        for wait, size in zip(waits, sizes):
            piece = call(aten.narrow.default, rows, dim, offset, size, like=wait)
            piece = call(aten.reshape.default, piece, list(wait.meta["val"].shape), like=wait)
            piece.meta[META] = replace(info(wait))
            for node in (piece, *piece.all_input_nodes):
                place[node] = max(spot, place[wait])
            offset += size
            wait.replace_all_uses_with(piece)
            old, begun = wait.name, wait.all_input_nodes[0]
            graph.erase_node(wait)
            graph.erase_node(begun)
            piece.name = old
