"""The pass `Bucket` merges small collectives of one process group, kind and dtype.

The time of a collective is its latency plus the transfer of its bytes. Independent collectives whose transfers are
short against the latency are merged, until the transfer takes most of the time. A merge must save more than it delays:
a gradient that waits for a later one overlaps with less of the backward, and an op waits for all parameters that are
gathered together with its own. To save memory, large parameters are gathered together within a layer only. Gradients
that are all-reduced get larger buckets if the backward ends earlier so: where compute beside collectives is slow,
overlap is worth less than the latencies of several.

A *small* collective takes longer to start than to transfer its bytes: that of a norm's weight or of a bias. Small ones
are merged across layers, all of a process group into one where it does not become large. What is still small then is
carried by a larger collective, if the latency that this saves is more than the copies into and out of the buffer take.
A plan may ask for these merges alone (`Bucket.only_small`): they delay little, and hold next to no memory.

A *flat* bucket has all parameters that are not sharded during a step, at any cost: the flat parameter of the first
version of FSDP, and fairscale's, around a whole model. It is gathered before the forward and held until its gradient is
complete. The gradients are concatenated after the backward and reduce-scattered at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any, ClassVar

import torch
from torch import fx

from shardweave.cost_model import Cluster, Demand, NodeCosts, StreamOp, Transfer, bytes_seconds, replay
from shardweave.ir import META, Collective, axes_size
from shardweave.passes.base import Pass, Property
from shardweave.passes.sharded_values import StateSharding
from shardweave.passes.spmd_builder import finished, sort_by_place
from shardweave.sharding import fake_result, info, is_wait, layer_of

aten = torch.ops.aten
reshape, permute = aten.reshape.default, aten.permute.default
FULL_BUCKET_RATIO = 9.0
"""A bucket is full when its transfer takes this many times its latency; buckets of all-reduces may be larger."""
_MIN_SAVING = 0.01
"""Larger buckets of gradients, which hold more memory, must save this part of the time of the backward."""
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
    only_small: bool = False
    """Merge only collectives that take longer to start than to transfer their bytes."""

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        prices = NodeCosts(self.cluster)
        place = {node: index for index, node in enumerate(graph.nodes)}
        copies: dict[str, tuple[fx.Node, Side]] = {}
        buckets = _buckets(graph, prices, sides(graph, self.cut_points), self._is_flat, self.only_small)
        graph_module.meta[_MERGED] = bool(buckets)
        known: dict[object, Any] = {}  # results of equal layers
        for bucket in buckets:
            flat = copies if self._is_flat(bucket[0].collective) else None
            demands = [prices.collective(member.collective) for member in bucket]
            large = [member.start for member, each in zip(bucket, demands) if each.transfer >= each.latency]
            _MergedCollective(graph, bucket, place, flat, large, known).write()
        sort_by_place(graph, place)
        return finished(graph_module)

    def _is_flat(self, collective: Collective) -> bool:
        return self.flat is not None and not self.flat.get(collective.owner, StateSharding()).parameter


_MERGED = "merged"
"""The key in a graph module's meta that says whether it has buckets."""


def has_merged(graph_module: fx.GraphModule) -> bool:
    """Whether `Bucket` merged anything in a graph."""
    return bool(graph_module.meta[_MERGED])


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
    graph: fx.Graph,
    prices: NodeCosts,
    side: Mapping[fx.Node, Side],
    is_flat: Callable[[Collective], bool],
    only_small: bool,
) -> list[list[_Member]]:
    """The sets of starts to merge; those of the forward first."""
    found: list[list[_Member]] = []
    depth = {cause: _depths(graph, cause) for cause in ("parameter", "gradient")}
    most = max((what.bytes for node in graph.nodes if (what := _candidate(node))), default=0)
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
            key = is_flat(collective), (same, side[node], depth[collective.cause][node])
            groups.setdefault(key, []).append(member)
        # 3. Merge within each group where it pays.
        for (flat, _), members in groups.items():
            members.sort(key=lambda m: (m.seconds, m.place))
            found += [members] if flat else _Merger(members, prices, elapsed, most).buckets(only_small)
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


_Run = list[_Member]


class _Merger:
    """Merges the starts of one group. They are sorted by when they can start, or their results are used.

    Parameters
    ----------
    members : sequence of _Member
    prices : NodeCosts
    end : float
        Seconds of all compute of the forward, or of the backward.
    most : int
        Bytes that small starts of different layers have together at most: they hold memory for longer.
    """

    def __init__(self, members: Sequence[_Member], prices: NodeCosts, end: float, most: int) -> None:
        self.members, self.prices, self.end, self.most = members, prices, end, most
        self.gathers = members[0].collective.cause == "parameter"

    def buckets(self, only_small: bool) -> list[_Run]:
        """The starts, each alone or with those that it is merged with."""
        runs = [[member] for member in self.members]
        if not only_small:
            runs = self._merge_consecutive()
            runs = self._fill_larger(runs) if self.members[0].collective.kind == "all_reduce" else runs
        return self._carry_small(self._merge_small(runs))

    def _fill_larger(self, runs: list[_Run]) -> list[_Run]:
        """`runs` of gradients, or larger ones, filled in order, if the backward and its collectives end earlier so.

        Sizes are doubled from that of a full bucket on, until one has all. Gradients that are all-reduced are whole
        until the optimizer's step anyway; those that are reduce-scattered would be held for longer.
        """
        best, least = runs, self._end_of(runs)
        ratio, filled = FULL_BUCKET_RATIO, runs
        while len(filled) > 1:
            filled = []
            for member in self.members:
                if filled and not self._is_full(filled[-1], ratio):
                    filled[-1].append(member)
                else:
                    filled.append([member])
            end = self._end_of(filled)
            if end < (1 - _MIN_SAVING) * least:
                best, least = filled, end
            ratio *= 2
        return best

    def _end_of(self, runs: Sequence[_Run]) -> float:
        """Seconds until the compute and all collectives have ended, if these are the only ones."""
        stream_ops, computed = list[StreamOp](), 0.0
        for run in sorted(runs, key=_seconds):
            stream_ops.append(StreamOp(0, "", _seconds(run) - computed))
            stream_ops.append(StreamOp(0, "", transfer=Transfer("", self._demand(_size(run)))))
            computed = _seconds(run)
        stream_ops.append(StreamOp(0, "", self.end - computed))
        return replay(stream_ops, self.prices.cluster.device).seconds

    def _merge_consecutive(self) -> list[_Run]:
        """Merge consecutive starts: of parameters those of one layer, of gradients all."""
        layers: dict[str, list[_Run]] = {}
        for member in self.members:
            runs = layers.setdefault(layer_of(member.collective.owner) if self.gathers else "", [])
            if runs and not self._is_full(runs[-1]) and self._gain(runs[-1], [member]) >= 0:
                runs[-1].append(member)
            else:
                runs.append([member])
        return [run for runs in layers.values() for run in runs]

    def _merge_small(self, runs: list[_Run]) -> list[_Run]:
        """Merge what is small, of any layers, until it is not small any more."""
        found: list[_Run] = []
        open_run: _Run | None = None
        for run in sorted(runs, key=_seconds):
            if not self._is_small(run):
                found.append(run)
            elif open_run and _size(open_run + run) <= self.most and self._gain(open_run, run) >= 0:
                open_run += run
                open_run = open_run if self._is_small(open_run) else None
            else:
                open_run = run
                found.append(run)
        return found

    def _carry_small(self, runs: list[_Run]) -> list[_Run]:
        """Merge what is still small with the larger run that gains most."""
        found = [run for run in runs if not self._is_small(run)]
        for run in [run for run in runs if self._is_small(run)]:
            pairs = [sorted((other, run), key=_seconds) for other in found if not self._is_small(other)]
            gains = [self._gain(*pair) - self._copies(pair) for pair in pairs]
            best = max(gains, default=-1.0)
            if best > 0:
                first, second = pairs[gains.index(best)]
                found = [each for each in found if each is not first and each is not second] + [first + second]
            else:
                found.append(run)
        return found

    def _gain(self, before: _Run, run: _Run) -> float:
        """Seconds that links are busy for less if `before` takes `run` along, less what this delays.

        Negative where nothing is saved.
        """
        first, single, both = self._demand(_size(before)), self._demand(_size(run)), self._demand(_size(before + run))
        saved = first.seconds + single.seconds - both.seconds
        if saved <= 0:
            return -1.0
        if self.gathers:
            return saved - (both.transfer - first.transfer)  # the first user of the bucket waits that much longer
        return saved - max(0.0, both.seconds - max(self.end - _seconds(run), single.seconds))

    def _copies(self, runs: Sequence[_Run]) -> float:
        """Seconds of the copies into and out of the buffer of those that are not merged with others already."""
        collective, sizes = self.members[0].collective, [_size(run) for run in runs if len(run) == 1]
        times = 2 + 2 / axes_size(collective.axes) if collective.kind == "all_gather" else 2
        return sum(bytes_seconds(int(times * size), self.prices.cluster) for size in sizes)

    def _is_small(self, run: _Run) -> bool:
        demand = self._demand(_size(run))
        return demand.transfer < demand.latency

    def _is_full(self, run: _Run, ratio: float = FULL_BUCKET_RATIO) -> bool:
        demand = self._demand(_size(run))
        return demand.transfer >= ratio * demand.latency

    def _demand(self, size: int) -> Demand:
        return self.prices.collective(replace(self.members[0].collective, bytes=size))


def _size(run: _Run) -> int:
    return sum(member.collective.bytes for member in run)


def _seconds(run: _Run) -> float:
    """When the first result of gathers is used, or the last of gradients can be reduced."""
    seconds = [member.seconds for member in run]
    return min(seconds) if run[0].collective.cause == "parameter" else max(seconds)


def _first_use(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    return min(wait.users, default=wait)


def _last_operand(start: fx.Node) -> fx.Node:
    """The node that computes the operand of a start, before the ops that bring it into shape."""
    node = start
    while node.all_input_nodes and (node is start or node.target in _GLUE):
        node = max(node.all_input_nodes)
    return node


def _is_permuted(wait: fx.Node) -> bool:
    """Whether all that reads a result is a permutation, which copies it anyway."""
    users = list(wait.users)
    alone = len(users) == 1 and users[0].target is reshape
    return alone and all(each.target is permute for each in users[0].users)


def _common_module(names: Sequence[str]) -> str:
    """The innermost module around all of these.

    >>> _common_module(["blocks.0.norm", "blocks.1.norm"]), _common_module(["norm", "head"])
    ('blocks', '')
    """
    parts = [name.split(".") for name in names]
    return ".".join(each[0] for each in takewhile(lambda each: len({*each}) == 1, zip(*parts)))


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
    """One collective in the place of several, of which some may be `large`.

    For flat buckets, `copies` has the gathered parameters by name.
    """

    def __init__(
        self,
        graph: fx.Graph,
        bucket: Sequence[_Member],
        place: dict[fx.Node, int],
        copies: dict[str, tuple[fx.Node, Side]] | None = None,
        large: Sequence[fx.Node] = (),
        known: dict[object, Any] | None = None,
    ) -> None:
        self.known = known
        self.graph, self.bucket, self.place, self.copies, self.is_small = graph, bucket, place, copies, not large
        self.first, self.collective = bucket[0].start, bucket[0].collective
        # It counts as the layer's of its first large member, or, of small ones alone, as that of the module around all.
        self.op = info(large[0]).op if large else _common_module([info(member.start).op for member in bucket])
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
        """The piece of each member: a view, or a copy, which one op makes of all.

        Of a flat all-gather, so that the buffer can be freed; of small ones, which would be copied one by one.
        """
        dim = int(self.collective.kind == "all_gather")
        if dim and (self.copies is not None or (self.is_small and not any(map(_is_permuted, waits)))):
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
        op = self.op if like is None else info(like).op
        node.meta[META] = replace(info(like or self.first), op=op, layouts=(), collective=None)
        self.place[node] = self.spot if like is None else max(self.spot, self.place[like])
        node.meta["val"] = self._evaluated(node)
        return node

    def _evaluated(self, node: fx.Node) -> Any:
        assert callable(node.target)
        return fake_result(node.target, node.args, node.kwargs, self.first.meta["val"].fake_mode, self.known)

    def _replace_wait(self, wait: fx.Node, piece: fx.Node) -> fx.Node:
        """Let the users of `wait` read `piece`, which has as many elements. Return the node that they read.

        The piece is brought to the shape of `wait`, which copies a strided piece. It is left as it is where a
        permutation follows, which copies anyway.
        """
        if not _is_permuted(wait):
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
