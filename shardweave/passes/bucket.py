"""The pass `Bucket` merges small collectives of one process group, kind and dtype.

The time of a collective is its latency plus the transfer of its bytes. Independent collectives whose transfers are
short against the latency are merged, until the transfer takes most of the time. A merge must save more than it delays:
a gradient that waits for a later one overlaps with less of the backward, and an op waits for all parameters that are
gathered together with its own. To save memory, only parameters of one layer are gathered together.

A *flat* bucket has all parameters that are not sharded during a step, at any cost: the flat parameter of the first
version of FSDP, and fairscale's, around a whole model. It is gathered before the forward and held until its gradient is
complete. The gradients are concatenated after the backward and reduce-scattered at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import fx

from shardweave.cost_model import Cluster, NodeCosts
from shardweave.ir import META, Collective
from shardweave.passes.base import Pass, Property
from shardweave.passes.partition import StateSharding
from shardweave.passes.spmd_builder import finished, sort_by_place
from shardweave.sharding import fake_result, info, is_wait, layer_of

aten = torch.ops.aten
reshape, permute = aten.reshape.default, aten.permute.default
FULL_BUCKET_RATIO = 9.0
"""A bucket is full when its transfer takes this many times its latency."""
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_VIEWS = {reshape, permute, aten.clone.default}
"""Ops that bring a gathered value into its shape."""


@dataclass(frozen=True)
class Bucket(Pass):
    """Merge small collectives of parameters and gradients.

    Requires a local graph in which every start is followed by its wait. Ensures the same values.

    Parameters
    ----------
    cluster : Cluster
        The machine that collectives are timed on.
    cut_points : sequence of collections of str
        Sets of nodes at which the graph may be cut later, so that one side runs without the other: a backward from only
        some of the tangents, or the runs of a step that share gathered parameters. Only collectives on the same side of
        each set are merged.
    flat : mapping of str to StateSharding, optional
        The sharding of each parameter, by its name. If given, parameters that are not sharded during a step have flat
        buckets.
    """

    name = "bucket"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    cluster: Cluster
    cut_points: Sequence[Collection[str]] = ()
    flat: Mapping[str, StateSharding] | None = None

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        prices = NodeCosts(self.cluster)
        place = {node: index for index, node in enumerate(graph.nodes)}
        copies: dict[str, tuple[fx.Node, Side]] = {}
        for bucket in _buckets(graph, prices, sides(graph, self.cut_points), self._is_flat):
            _MergedCollective(graph, bucket, place, copies if self._is_flat(bucket[0].collective) else None).write()
        sort_by_place(graph, place)
        return finished(graph_module)

    def _is_flat(self, collective: Collective) -> bool:
        return self.flat is not None and not self.flat.get(collective.owner, StateSharding()).parameter


Side = tuple[frozenset[int], frozenset[int]]


def sides(graph: fx.Graph, cut_points: Sequence[Collection[str]]) -> dict[fx.Node, Side]:
    """For each node the cut points that it depends on, and those that depend on it, by index."""
    behind: dict[fx.Node, frozenset[int]] = {}
    before: dict[fx.Node, frozenset[int]] = {}
    at = {node: frozenset(i for i, names in enumerate(cut_points) if node.name in names) for node in graph.nodes}
    for node in graph.nodes:
        behind[node] = at[node].union(*(behind[source] for source in node.all_input_nodes))
    for node in reversed(graph.nodes):
        before[node] = at[node].union(*(before[user] for user in node.users))
    return {node: (behind[node], before[node]) for node in graph.nodes}


@dataclass(frozen=True)
class _Member:
    """A start that may be merged: its note, and the compute before it could start or its result is used, in seconds."""

    start: fx.Node
    collective: Collective
    seconds: float
    place: int
    side: Side


def _candidate(node: fx.Node) -> Collective | None:
    """The collective that a node starts, if it may be merged."""
    collective = info(node).collective
    if collective is None or collective.cause == "activation" or collective.kind not in _KINDS:
        return None
    return collective


def _is_complex(start: fx.Node) -> bool:
    """Whether a start sends complex numbers, as pairs: a piece of a bucket with other sizes might not begin at a pair.
    """
    return start.all_input_nodes[0].target is aten.view_as_real.default


def _buckets(
    graph: fx.Graph, prices: NodeCosts, side: Mapping[fx.Node, Side], is_flat: Callable[[Collective], bool]
) -> list[list[_Member]]:
    """The sets of starts to merge; those of the forward first."""
    found: list[list[_Member]] = []
    depth = {cause: _depths(graph, cause) for cause in ("parameter", "gradient")}
    for backward in (False, True):
        nodes = [n for n in graph.nodes if n.op == "call_function" and info(n).backward == backward]
        # 1. The compute before each node, in seconds.
        start_seconds, elapsed = {}, 0.0
        for node in nodes:
            start_seconds[node] = elapsed
            elapsed += prices.of(node).seconds if prices.of(node).kernel else 0.0
        # 2. Group the starts that may be merged.
        groups: dict[tuple[bool, Hashable], list[_Member]] = {}
        for index, node in enumerate(nodes):
            collective = _candidate(node)
            if collective is None:
                continue
            at = _first_use(node) if collective.cause == "parameter" else _last_operand(node)
            member = _Member(node, collective, start_seconds.get(at, 0.0), index, side[node])
            kind = collective.kind, collective.axes, collective.cause
            same = kind, node.meta["val"].dtype, _is_complex(node), str(node.args[1:])
            flat = is_flat(collective)
            layer = layer_of(collective.owner) if collective.cause == "parameter" and not flat else ""
            groups.setdefault((flat, (same, layer, side[node], depth[collective.cause][node])), []).append(member)
        # 3. Merge within each group where it pays.
        for (flat, _), members in groups.items():
            members.sort(key=lambda m: (m.seconds, m.place))
            found += [members] if flat else _merge_where_it_pays(members, prices, elapsed)
    return [members for members in found if len(members) > 1]


def _depths(graph: fx.Graph, cause: str) -> dict[fx.Node, int]:
    """The most candidates of this cause on a path to each node: equal depths make members independent."""
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        depths = [depth[source] + int(_is_candidate(source, cause)) for source in node.all_input_nodes]
        depth[node] = max(depths, default=0)
    return depth


def _is_candidate(node: fx.Node, cause: str) -> bool:
    collective = _candidate(node)
    return collective is not None and collective.cause == cause


def _merge_where_it_pays(members: Sequence[_Member], prices: NodeCosts, end: float) -> list[list[_Member]]:
    """Runs of consecutive members that are cheaper as one collective."""

    def demand(size: int) -> Any:
        return prices.collective(replace(members[0].collective, bytes=size))

    runs: list[list[_Member]] = []
    size = 0
    for member in members:
        single = demand(member.collective.bytes)
        if runs:
            before, both = demand(size), demand(size + member.collective.bytes)
            saved = before.seconds + single.seconds - both.seconds
            if member.collective.cause == "parameter":
                delay = both.transfer - before.transfer  # the first user of the bucket waits that much longer
            else:
                delay = max(0.0, both.seconds - max(end - member.seconds, single.seconds))
            if before.transfer < FULL_BUCKET_RATIO * before.latency and saved > 0 and delay <= saved:
                runs[-1].append(member)
                size += member.collective.bytes
                continue
        runs.append([member])
        size = member.collective.bytes
    return runs


def _first_use(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    return min(wait.users, default=wait)


def _last_operand(start: fx.Node) -> fx.Node:
    """The node that computes the operand of a start, before the ops that bring it into shape."""
    node = start
    while node.all_input_nodes and (node is start or node.target in _GLUE):
        node = max(node.all_input_nodes)
    return node


def _backward_reads(copy: fx.Node) -> list[fx.Node]:
    """The values that the backward reads of a value of the forward: itself, or a reshaped or cast form of it."""
    found, users = [], list(copy.users)
    if any(info(user).backward for user in users):
        found.append(copy)
    for user in users:
        if user.target in _GLUE and not info(user).backward:
            found += _backward_reads(user)
    return found


_CAST = aten._to_copy.default
_GLUE = {reshape, permute, aten.clone.default, aten.t.default, _CAST}


class _MergedCollective:
    """One collective in the place of several. For flat buckets, `copies` has the gathered parameters by name."""

    def __init__(
        self,
        graph: fx.Graph,
        bucket: Sequence[_Member],
        place: dict[fx.Node, int],
        copies: dict[str, tuple[fx.Node, Side]] | None = None,
    ) -> None:
        self.graph, self.bucket, self.place, self.copies = graph, bucket, place, copies
        self.first, self.collective = bucket[0].start, bucket[0].collective
        self.starts = [member.start for member in bucket]
        spots = [place[start] for start in self.starts]
        self.spot = max(spots) if self.collective.cause == "gradient" else min(spots)

    def write(self) -> None:
        """Replace the collectives. The nodes that replace their waits take over the waits' names."""
        first, kind = self.first, self.collective.kind
        waits = [next(iter(start.users)) for start in self.starts]
        assert all(is_wait(wait) for wait in waits)
        ranks = first.args[1] if kind == "all_gather" else first.args[2] if kind == "reduce_scatter" else 1
        assert isinstance(ranks, int) and callable(first.target) and callable(waits[0].target)
        with self.graph.inserting_before(self.graph.output_node()):
            # 1. Concatenate the operands: for a reduce-scatter rank by rank.
            operands = [start.all_input_nodes[0] for start in self.starts]
            sizes = [operand.meta["val"].numel() for operand in operands]
            if kind == "reduce_scatter":
                sizes = [size // ranks for size in sizes]
                rows = [self._call(reshape, each, [ranks, n]) for each, n in zip(operands, sizes)]
                rows += self._held_copies([ranks, 0])
                whole = self._call(reshape, self._call(aten.cat.default, rows, 1), [ranks * sum(sizes)])
            else:
                flat = [self._call(reshape, each, [n]) for each, n in zip(operands, sizes)]
                flat += self._held_copies([0])
                whole = self._call(aten.cat.default, flat)
            # 2. Start the one collective and wait for it.
            start = self._call(first.target, whole, *first.args[1:])
            owners = f"{self.collective.owner} and {len(self.bucket) - 1} more"
            size = sum(member.collective.bytes for member in self.bucket)
            start.meta[META] = replace(info(start), collective=replace(self.collective, bytes=size, owner=owners))
            arrived = self._call(waits[0].target, start)
            # 3. Split the result, and let the users of each wait read its piece.
            if kind == "all_gather":
                arrived = self._call(reshape, arrived, [ranks, sum(sizes)])
            for member, wait, piece in zip(self.bucket, waits, self._cut(arrived, sizes, waits)):
                value = self._replace_wait(wait, piece)
                if self.copies is not None and self.collective.cause == "parameter":
                    self.copies[member.collective.owner] = value, member.side

    def _cut(self, arrived: fx.Node, sizes: Sequence[int], waits: Sequence[fx.Node]) -> list[fx.Node]:
        """The piece of each member: a view, or for a flat all-gather a copy, so that the buffer can be freed."""
        dim = int(self.collective.kind == "all_gather")
        if self.copies is not None and dim:
            parts = self._call(aten.split_with_sizes_copy.default, arrived, sizes, dim)
            return [self._call(operator.getitem, parts, index) for index in range(len(sizes))]
        return [
            self._call(aten.narrow.default, arrived, dim, offset, size, like=wait)
            for wait, size, offset in zip(waits, sizes, accumulate(sizes, initial=0))
        ]

    def _held_copies(self, shape: list[int]) -> list[fx.Node]:
        """Empty pieces of the gathered parameters that the backward reads. Reading them here holds the parameters.

        Parameters on another side of a cut point are left out: the graph behind it runs without them.
        """
        copies, dtype, found = self.copies or {}, self.first.meta["val"].dtype, list[fx.Node]()
        for member in (each for each in self.bucket if each.collective.owner in copies):
            copy, (behind, before) = copies[member.collective.owner]
            lost = member.side[0] & (before - behind)
            for read in () if lost else _backward_reads(copy):
                empty = self._call(reshape, self._call(aten.narrow.default, read, 0, 0, 0), shape)
                found.append(empty if read.meta["val"].dtype == dtype else self._call(_CAST, empty, dtype=dtype))
        return found

    def _call(self, target: Callable[..., Any], *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs)
        node.meta[META] = replace(info(like or self.first), layouts=(), collective=None)
        self.place[node] = self.spot if like is None else max(self.spot, self.place[like])
        node.meta["val"] = self._evaluated(node)
        return node

    def _evaluated(self, node: fx.Node) -> Any:
        assert callable(node.target)
        return fake_result(node.target, node.args, node.kwargs, self.first.meta["val"].fake_mode)

    def _replace_wait(self, wait: fx.Node, piece: fx.Node) -> fx.Node:
        """Let the users of `wait` read `piece`, which has as many elements. Return the node that they read.

        The piece is brought to the shape of `wait`, which copies a strided piece. It is left as it is where a
        permutation follows, which copies anyway.
        """
        users = list(wait.users)
        alone = len(users) == 1 and users[0].target is reshape
        if not (alone and all(each.target is permute for each in users[0].users)):
            piece = self._call(reshape, piece, list(wait.meta["val"].shape), like=wait)
            piece.meta[META] = info(wait)
        wait.replace_all_uses_with(piece)
        if piece.meta["val"].stride() != wait.meta["val"].stride():
            self._update_views(piece)
        name, start = wait.name, wait.all_input_nodes[0]
        self.graph.erase_node(wait)
        self.graph.erase_node(start)
        piece.name = name
        return piece

    def _update_views(self, value: fx.Node) -> None:
        """Update the views of a value that has become strided. Other readers take a contiguous copy."""
        for user in list(value.users):
            if user.target in _VIEWS:
                strides = user.meta["val"].stride()
                user.meta["val"] = self._evaluated(user)
                if user.meta["val"].stride() != strides:
                    self._update_views(user)
            else:
                copy = self._call(aten.clone.default, value, like=value, memory_format=torch.contiguous_format)
                user.replace_input_with(value, copy)
