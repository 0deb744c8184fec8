"""Recomputation as a choice: one more op of the problem for each layer, whose candidates are the modes.

What a mode costs follows from how the layer's ops are spread, so it lies on the edges between these and it: with
``"none"`` they keep what their backward needs; with ``"full"`` only what the layer reads of others and these of it, and
as much of its forward runs again as the backward needs; with ``"fine"`` the results of collectives are kept besides,
which then are not repeated, nor what they are the sums of (Oases, arXiv 2305.16121, section 3.2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import fx

from shardweave.cost_model import node_work, work_seconds
from shardweave.ir import MODES, Mode
from shardweave.passes import region_of
from shardweave.planner.problem.build_problem import Costing
from shardweave.planner.problem.graph_analysis import is_alias, num_bytes, root_of
from shardweave.planner.problem.overlap_model import Costs, Floats, Windows
from shardweave.planner.problem.problem import Candidate, Edge
from shardweave.planner.problem.problem import Op as Row
from shardweave.planner.problem.resharding_costs import local_numel, tensor_outputs
from shardweave.planner.problem.variables import Costed, Variable
from shardweave.sharding import info, last_match, tensor_args, users_through_views


@dataclass
class _Share:
    """What a layer's values that follow one variable come to, by the variable's port: bytes and seconds."""

    inside: Floats
    """Kept for the layer's own backward alone."""
    given: Floats
    """Kept for computing these again alone."""
    reduced: Floats
    """Results of collectives that computing them again needs."""
    again: Floats
    """Computing them again."""
    summed: Floats
    """The part of it that leads to these results alone."""
    moved: Floats
    """The collectives of computing them again, as `prices.Links`."""

    @classmethod
    def none(cls, ports: int, levels: int) -> _Share:
        inside, given, reduced, again, summed = np.zeros((5, ports))
        return cls(inside, given, reduced, again, summed, np.zeros((1 + levels, ports)))

    def kept(self, mode: Mode) -> Floats:
        return {"none": self.inside, "fine": self.given + self.reduced, "full": self.given}[mode]

    def costs(self, mode: Mode, windows: Windows, whole_batch: bool) -> Costs:
        """In the backward."""
        none = np.zeros_like(self.again)
        again = {"none": none, "fine": self.again - self.summed, "full": self.again}[mode]
        moved = self.moved if mode == "full" else np.zeros_like(self.moved)
        return windows.computed(none, again) + windows.activations(np.stack([np.zeros_like(moved), moved]), whole_batch)


@dataclass
class _Layer:
    name: str
    shares: dict[int, _Share] = field(default_factory=dict)
    """By the number of the variable."""

    def share(self, costing: Costing, node: fx.Node) -> _Share:
        """What values that follow the same variable as `node` come to."""
        ports, levels = len(costing.lies[node]), len(costing.prices.levels)
        return self.shares.setdefault(costing.follows[node], _Share.none(ports, levels))

    def give(self, costing: Costing, node: fx.Node) -> None:
        """Keep another's value: as it lies, or, of a variable that has no share yet, as if it were spread over all.

        One more share would make the layer's mode one more op's neighbour: of wide models few can be.
        """
        if costing.follows[node] in self.shares:
            self.share(costing, node).given += _sizes(costing, node)
        else:
            next(iter(self.shares.values())).given += num_bytes([node]) / costing.mesh.world_size


_SUFFIX = ":recompute"


def mode_name(layer: str) -> str:
    """The name of the op that stands for a layer's mode."""
    return layer + _SUFFIX


def layer_named(name: str) -> str:
    """The layer whose mode an op of this name stands for: the inverse of `mode_name`."""
    return name.removesuffix(_SUFFIX)


def with_modes(costing: Costing, costed: Costed, asked: Mapping[str, Mode] | None = None) -> Costed:
    """The problem with a choice of recomputation for each layer whose backward keeps anything for itself.

    Where patterns say how layers are recomputed, each has no other choice.
    """
    layers = _layers(costing)
    if not layers:
        return costed
    problem, same = costed.problem, _Same()
    ends: dict[int, list[_Layer]] = {}
    inside: dict[int, Floats] = {}
    for layer in layers:
        ends.setdefault(max(layer.shares), []).append(layer)
        for index, share in layer.shares.items():
            inside[index] = inside.get(index, 0.0) + share.inside
    rows: list[Row] = []
    variables: list[Variable] = []
    place: dict[int, int] = {}
    edges: list[Edge] = []
    for index, (row, variable) in enumerate(zip(problem.ops, costed.variables, strict=True)):
        place[index] = len(rows)
        rows.append(same.without(row, inside[index]) if index in inside else row)
        variables.append(variable)
        for layer in ends.get(index, ()):
            modes = MODES if asked is None else (last_match(asked, layer.name, "none"),)
            own = [place[number] for number in layer.shares]
            tables = [same.edge(share, modes, costing, at in costing.whole_batch) for at, share in layer.shares.items()]
            edges += [replace(table, producer=number, consumer=len(rows)) for number, table in zip(own, tables)]
            rows.append(same.row(layer, modes))
            variables.append(Variable(mode_name(layer.name), -1, modes=modes))
    edges += [replace(edge, producer=place[edge.producer], consumer=place[edge.consumer]) for edge in problem.edges]
    edges.sort(key=lambda edge: (edge.producer, edge.consumer))
    return replace(costed, problem=replace(problem, ops=tuple(rows), edges=tuple(edges)), variables=variables)


class _Same:
    """Equal layers share their tables here too."""

    def __init__(self) -> None:
        self.rows: dict[object, tuple[Candidate, ...]] = {}
        self.tables: dict[object, Edge] = {}

    def without(self, row: Row, inside: Floats) -> Row:
        """An op that keeps what is inside of its layer by way of the edge to the layer's mode."""
        key = id(row.candidates), inside.tobytes()
        if key not in self.rows:
            self.rows[key] = tuple(
                replace(each, saved_bytes=max(0, each.saved_bytes - int(inside[each.out_port])))
                for each in row.candidates
            )
        return replace(row, candidates=self.rows[key])

    def row(self, layer: _Layer, modes: Sequence[Mode]) -> Row:
        """The modes of a layer; one that computes again holds the layer's values a while, at the least these."""
        key = held, _ = int(sum(share.inside.min() for share in layer.shares.values())), modes
        if key not in self.rows:
            self.rows[key] = tuple(
                Candidate(mode, 0.0, transient_bytes=0 if mode == "none" else held, in_port=port, out_port=port)
                for port, mode in enumerate(modes)
            )
        return Row(mode_name(layer.name), self.rows[key], re.sub(r"\d+", "*", layer.name))

    def edge(self, share: _Share, modes: Sequence[Mode], costing: Costing, whole_batch: bool) -> Edge:
        """What an op's values in a layer cost under each mode."""
        turns, windows = costing.options.turns, costing.windows
        kept = np.stack([share.kept(mode) for mode in modes], axis=1).astype(np.int64)
        loads = windows.loads(turns * np.stack([share.costs(mode, windows, whole_batch) for mode in modes], axis=-1))
        key = kept.tobytes(), loads.tobytes()
        if key not in self.tables:
            self.tables[key] = Edge(0, 1, np.zeros(kept.shape), loads, kept)
        return self.tables[key]


def _layers(costing: Costing) -> list[_Layer]:
    """The layers, and of each variable that has values in them what these come to."""
    nodes: dict[str, list[fx.Node]] = {}
    for node in costing.follows:
        name = region_of(node)
        if name and not info(node).backward:
            nodes.setdefault(name, []).append(node)
    found, given = [], set[fx.Node]()
    for name, own in nodes.items():
        layer, again = _Layer(name), _again(costing, own)
        for node in own:
            if not is_alias(node):
                _add(costing, layer.share(costing, node), node, node in again, name)
        for source in dict.fromkeys(root_of(source) for node in own if node in again for source in tensor_args(node)):
            if source in costing.follows and source not in again | given and not _is_saved(costing, source):
                layer.give(costing, source)
                given.add(source)
        found.append(layer)
    return [layer for layer in found if any(share.inside.any() for share in layer.shares.values())]


def _again(costing: Costing, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What of a layer runs again where only what others read is kept: what its backward needs, and leads to it."""
    inside = {node for node in nodes if not _is_read_outside(costing, node)}
    needed = [node for node in inside if _is_saved(costing, node)]
    found: set[fx.Node] = set()
    while needed:
        node = needed.pop()
        if node not in found:
            found.add(node)
            needed += [source for source in node.all_input_nodes if source in inside]
    return found


def _is_read_outside(costing: Costing, node: fx.Node) -> bool:
    users = [user for user in users_through_views(node) if not info(user).backward]
    return node in costing.facts.returned or any(region_of(user) != region_of(node) for user in users)


def _is_saved(costing: Costing, node: fx.Node) -> bool:
    """Whether the backward needs a value: its own ops, or the products that read it for their weights' gradients."""
    return costing.facts.is_kept(node) or costing.facts.readers[root_of(node)] > 0


def _sizes(costing: Costing, node: fx.Node) -> Floats:
    """Bytes of a node's value, or the first of several, on a device, by the port of the variable that it follows."""
    sizes: Floats = np.array([float(local_numel(port[0])) for port in costing.lies[node]])
    return sizes * float(tensor_outputs(node)[0].element_size())


def _add(costing: Costing, share: _Share, node: fx.Node, again: bool, layer: str) -> None:
    """Add a value to the share of the variable that it follows."""
    sizes = _sizes(costing, node)
    seconds = _compute(costing, costing.follows[node], node, sizes) if again else np.zeros_like(sizes)
    share.again += seconds
    if isinstance(node.meta["val"], torch.Tensor) and not _is_read_outside(costing, node):
        if costing.facts.needed_by_backward(node):
            share.inside += sizes
        unsummed = [tuple(axis for axis in port[0].partial_axes if axis.kind == "space") for port in costing.lies[node]]
        for port, axes in enumerate(unsummed if again else ()):
            if axes:
                level, moved = costing.prices.collective("all_reduce", axes, int(sizes[port]))
                share.moved[1 + level, port] += moved
                share.reduced[port] += sizes[port]
                share.summed[port] += seconds[port]
    if node in costing.facts.roles:
        own = partial(_lies_in, layer)
        share.inside += costing.holding.read_bytes(node, own)
        share.reduced += costing.holding.read_bytes(node, own, gathered=True)


def _lies_in(layer: str, node: fx.Node) -> bool:
    return region_of(node) == layer


def _compute(costing: Costing, number: int, node: fx.Node, sizes: Floats) -> Floats:
    """Seconds of a forward op by the port of the variable that it follows; of one that follows by its part."""
    variable = costing.variables[number]
    if node in costing.facts.roles or node is variable.node:
        roles = costing.facts.roles[node].roles if node in costing.facts.roles else ()
        at = next((at for at, role in enumerate(roles) if role.node is node), 0)
        # Ports are those of the first of equal ops: its nodes have other names
        return np.array([costing.prices.compute(node, [*port.values()][at]) for port in variable.ports])
    work = node_work(node)
    if work is None:
        return np.zeros(len(sizes))
    parts = sizes / max(1, tensor_outputs(node)[0].nbytes)
    seconds = {}
    for part in set(parts):
        local = replace(work, flops=int(work.flops * part), num_bytes=int(work.num_bytes * part), product=None)
        seconds[part] = work_seconds(local, costing.prices.cluster)
    return np.array([seconds[part] for part in parts])
