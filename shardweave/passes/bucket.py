"""Bucket: small collectives of one group, kind and dtype become one.

A collective takes its latency and then its bytes. Where several that could run side by side are small against what the
link moves within a latency, they are put together, until what they move takes most of the time. None waits for another
by more than that saves: a gradient that waits for a later one has to be on its way before the backward ends, and what
is gathered with a parameter must not keep that one's op waiting. Only parameters of one layer are gathered together,
for memory.

A *flat* bucket is all of what a step has whole, whatever it costs: the flat parameter that FSDP's first version and
fairscale's have around a whole model. It is gathered before the forward, and there until its gradient is, which is put
together behind the backward and scattered at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import fx

from shardweave.cost_model import Cluster, Prices
from shardweave.ir import META, Collective
from shardweave.passes.base import Pass, Property
from shardweave.passes.partition import StateSharding
from shardweave.passes.spmd_builder import in_order, remove_dead
from shardweave.sharding import info, is_wait, layer_of

aten = torch.ops.aten
reshape, permute = aten.reshape.default, aten.permute.default
_FULL = 9.0
"""A bucket is full when its bytes take this many times its latency."""
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_VIEWS = {reshape, permute, aten.clone.default}
"""What brings a gathered value into its shape."""


@dataclass(frozen=True)
class Bucket(Pass):
    """Put small collectives of parameters and gradients together.

    Requires a local graph in which every start is followed by its wait; ensures the same values.

    Parameters
    ----------
    cluster : Cluster
        Whose links say what is small.
    borders : sequence of collections of str
        Sets of nodes where the graph may be cut later, so that what lies on one side is run without the other: a
        backward that has only a few of the tangents, the turns of a step that share gathered parameters. Only what lies
        on the same side of each border is put together.
    flat : mapping of str to StateSharding, optional
        Where each parameter rests, by its name. Given, the buckets of those that a step has whole are flat.
    """

    name = "bucket"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    cluster: Cluster
    borders: Sequence[Collection[str]] = ()
    flat: Mapping[str, StateSharding] | None = None

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        prices = Prices(self.cluster)
        place = {node: index for index, node in enumerate(graph.nodes)}
        copies: dict[str, tuple[fx.Node, Side]] = {}
        for bucket in _buckets(graph, prices, sides(graph, self.borders), self._is_flat):
            _Merged(graph, bucket, place, copies if self._is_flat(bucket[0].what) else None).write()
        in_order(graph, place)
        remove_dead(graph)
        graph.lint()
        graph_module.recompile()
        return graph_module

    def _is_flat(self, what: Collective) -> bool:
        return self.flat is not None and not self.flat.get(what.owner, StateSharding()).parameter


Side = tuple[frozenset[int], frozenset[int]]


def sides(graph: fx.Graph, borders: Sequence[Collection[str]]) -> dict[fx.Node, Side]:
    """Of each node the borders that it lies behind, and those that it lies before."""
    behind: dict[fx.Node, frozenset[int]] = {}
    before: dict[fx.Node, frozenset[int]] = {}
    at = {node: frozenset(i for i, names in enumerate(borders) if node.name in names) for node in graph.nodes}
    for node in graph.nodes:
        behind[node] = at[node].union(*(behind[source] for source in node.all_input_nodes))
    for node in reversed(graph.nodes):
        before[node] = at[node].union(*(before[user] for user in node.users))
    return {node: (behind[node], before[node]) for node in graph.nodes}


@dataclass(frozen=True)
class _Member:
    """A start that may be put together with others: when it could start, in seconds of compute, and what it moves."""

    start: fx.Node
    what: Collective
    seconds: float
    place: int
    side: Side


def _candidate(node: fx.Node) -> Collective | None:
    what = info(node).collective
    return what if what is not None and what.cause != "activation" and what.kind in _KINDS else None


def _buckets(
    graph: fx.Graph, prices: Prices, side: Mapping[fx.Node, Side], is_flat: Callable[[Collective], bool]
) -> list[list[_Member]]:
    """The starts that become one, each with those before it; those of the forward first."""
    found: list[list[_Member]] = []
    depth = {cause: _depths(graph, cause) for cause in ("parameter", "gradient")}
    for backward in (False, True):
        nodes = [n for n in graph.nodes if n.op == "call_function" and info(n).backward == backward]
        reached, now = {}, 0.0
        for node in nodes:
            reached[node] = now
            now += prices.of(node).seconds if prices.of(node).kernel else 0.0
        groups: dict[tuple[bool, Hashable], list[_Member]] = {}
        for index, node in enumerate(nodes):
            what = _candidate(node)
            if what is None:
                continue
            at = _first_use(node) if what.cause == "parameter" else _last_operand(node)
            member = _Member(node, what, reached.get(at, 0.0), index, side[node])
            same = what.kind, what.axes, what.cause, node.meta["val"].dtype, str(node.args[1:])
            flat = is_flat(what)
            layer = layer_of(what.owner) if what.cause == "parameter" and not flat else ""
            groups.setdefault((flat, (same, layer, side[node], depth[what.cause][node])), []).append(member)
        for (flat, _), members in groups.items():
            members.sort(key=lambda m: (m.seconds, m.place))
            found += [members] if flat else _together(members, prices, now)
    return [members for members in found if len(members) > 1]


def _depths(graph: fx.Graph, cause: str) -> dict[fx.Node, int]:
    """How many candidates of this cause lie on the way to each node: none of a bucket may need another one's."""
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        ways = [depth[source] + int(_is_candidate(source, cause)) for source in node.all_input_nodes]
        depth[node] = max(ways, default=0)
    return depth


def _is_candidate(node: fx.Node, cause: str) -> bool:
    what = _candidate(node)
    return what is not None and what.cause == cause


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
    return runs


def _first_use(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    return min(wait.users, default=wait)


def _last_operand(start: fx.Node) -> fx.Node:
    """What computes the operand of a start: it is written long before the glue between the two."""
    node = start
    while node.all_input_nodes and (node is start or node.target in _GLUE):
        node = max(node.all_input_nodes)
    return node


def _read_backward(copy: fx.Node) -> list[fx.Node]:
    """What the backward reads of a value of the forward, as it is or in another form."""
    found, users = [], list(copy.users)
    if any(info(user).backward for user in users):
        found.append(copy)
    for user in users:
        if user.target in _GLUE and not info(user).backward:
            found += _read_backward(user)
    return found


_CAST = aten._to_copy.default
_GLUE = {reshape, permute, aten.clone.default, aten.t.default, _CAST}


class _Merged:
    """One collective in the place of several; of a flat bucket with the copies of the parameters that were gathered."""

    def __init__(
        self,
        graph: fx.Graph,
        bucket: Sequence[_Member],
        place: dict[fx.Node, int],
        copies: dict[str, tuple[fx.Node, Side]] | None = None,
    ) -> None:
        self.graph, self.bucket, self.place, self.copies = graph, bucket, place, copies
        self.first, self.what = bucket[0].start, bucket[0].what
        self.starts = [member.start for member in bucket]
        spots = [place[start] for start in self.starts]
        self.spot = max(spots) if self.what.cause == "gradient" else min(spots)

    def write(self) -> None:
        """Replace the collectives; the waits' names go to what takes their places."""
        first, kind = self.first, self.what.kind
        waits = [next(iter(start.users)) for start in self.starts]
        assert all(is_wait(wait) for wait in waits)
        ranks = first.args[1] if kind == "all_gather" else first.args[2] if kind == "reduce_scatter" else 1
        assert isinstance(ranks, int) and callable(first.target) and callable(waits[0].target)
        with self.graph.inserting_before(self.graph.output_node()):
            operands = [start.all_input_nodes[0] for start in self.starts]
            sizes = [operand.meta["val"].numel() for operand in operands]
            if kind == "reduce_scatter":
                sizes = [size // ranks for size in sizes]
                rows = [self._call(reshape, each, [ranks, n]) for each, n in zip(operands, sizes)]
                rows += self._until_here([ranks, 0])
                whole = self._call(reshape, self._call(aten.cat.default, rows, 1), [ranks * sum(sizes)])
            else:
                flat = [self._call(reshape, each, [n]) for each, n in zip(operands, sizes)]
                flat += self._until_here([0])
                whole = self._call(aten.cat.default, flat)
            start = self._call(first.target, whole, *first.args[1:])
            owners = f"{self.what.owner} and {len(self.bucket) - 1} more"
            size = sum(member.what.bytes for member in self.bucket)
            start.meta[META] = replace(info(start), collective=replace(self.what, bytes=size, owner=owners))
            arrived = self._call(waits[0].target, start)
            if kind == "all_gather":
                arrived = self._call(reshape, arrived, [ranks, sum(sizes)])
            for member, wait, piece in zip(self.bucket, waits, self._cut(arrived, sizes, waits)):
                value = self._hand_over(wait, piece)
                if self.copies is not None and self.what.cause == "parameter":
                    self.copies[member.what.owner] = value, member.side

    def _cut(self, arrived: fx.Node, sizes: Sequence[int], waits: Sequence[fx.Node]) -> list[fx.Node]:
        """The piece of each member: a view where it is used; of a flat gather a copy, which lets the whole go."""
        dim = int(self.what.kind == "all_gather")
        if self.copies is not None and dim:
            parts = self._call(aten.split_with_sizes_copy.default, arrived, sizes, dim)
            return [self._call(operator.getitem, parts, index) for index in range(len(sizes))]
        return [
            self._call(aten.narrow.default, arrived, dim, offset, size, like=wait)
            for wait, size, offset in zip(waits, sizes, accumulate(sizes, initial=0))
        ]

    def _until_here(self, shape: list[int]) -> list[fx.Node]:
        """Nothing, of each copy that the backward reads of the members' parameters: it is held for that.

        Not where a border lies between, as the sums of several turns: what is behind it is run without the copies.
        """
        copies, dtype, found = self.copies or {}, self.first.meta["val"].dtype, list[fx.Node]()
        for member in (each for each in self.bucket if each.what.owner in copies):
            copy, (behind, before) = copies[member.what.owner]
            lost = member.side[0] & (before - behind)
            for read in () if lost else _read_backward(copy):
                empty = self._call(reshape, self._call(aten.narrow.default, read, 0, 0, 0), shape)
                found.append(empty if read.meta["val"].dtype == dtype else self._call(_CAST, empty, dtype=dtype))
        return found

    def _call(self, target: Callable[..., Any], *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs)
        node.meta[META] = replace(info(like or self.first), layouts=(), collective=None)
        self.place[node] = self.spot if like is None else max(self.spot, self.place[like])
        self._evaluate(node)
        return node

    def _evaluate(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda leaf: leaf.meta["val"])
        assert callable(node.target)
        with self.first.meta["val"].fake_mode:
            node.meta["val"] = node.target(*args, **kwargs)

    def _hand_over(self, wait: fx.Node, piece: fx.Node) -> fx.Node:
        """Let the users of `wait` read `piece`, which has as many elements; gives what they read.

        In the shape of `wait`, which copies what is strided; not where a permutation follows, which is copied anyway.
        """
        users = list(wait.users)
        alone = len(users) == 1 and users[0].target is reshape
        if not (alone and all(each.target is permute for each in users[0].users)):
            piece = self._call(reshape, piece, list(wait.meta["val"].shape), like=wait)
            piece.meta[META] = info(wait)
        wait.replace_all_uses_with(piece)
        if piece.meta["val"].stride() != wait.meta["val"].stride():
            self._reread(piece)
        name, start = wait.name, wait.all_input_nodes[0]
        self.graph.erase_node(wait)
        self.graph.erase_node(start)
        piece.name = name
        return piece

    def _reread(self, value: fx.Node) -> None:
        """Evaluate the views of what has become strided; others that read it take a copy in row-major order."""
        for user in list(value.users):
            if user.target in _VIEWS:
                strides = user.meta["val"].stride()
                self._evaluate(user)
                if user.meta["val"].stride() != strides:
                    self._reread(user)
            else:
                copy = self._call(aten.clone.default, value, like=value, memory_format=torch.contiguous_format)
                user.replace_input_with(value, copy)
