"""Recomputation as a choice: one more op of the problem for each layer, whose candidates are the modes.

What a mode costs follows from how the layer's ops are spread, so it lies on the edges between these and it: with
``"none"`` they keep what their backward needs; with ``"full"`` only what other layers read, and their forward runs
again; with ``"fine"`` the results of collectives besides, which then are not repeated (Oases, arXiv 2305.16121,
section 3.2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from torch import fx

from shardweave.compiler.planner.costing import Costing
from shardweave.compiler.planner.ops import users_through_views
from shardweave.compiler.planner.prices import local_numel
from shardweave.compiler.planner.problem import Candidate, Edge
from shardweave.compiler.planner.problem import Op as Row
from shardweave.compiler.planner.rows import Costed, Variable
from shardweave.compiler.planner.windows import Costs, Floats, Windows
from shardweave.cost_model.compute import node_work, work_seconds
from shardweave.ir import MODES, Mode
from shardweave.passes.annotate import info
from shardweave.passes.recompute import region_of
from shardweave.passes.rules import is_view


@dataclass
class _Share:
    """What a layer's values that follow one variable come to, by the variable's port: bytes and seconds."""

    inside: Floats
    """Kept for the layer's own backward alone."""
    reduced: Floats
    """Results of collectives among these."""
    again: Floats
    """Computing them again."""
    moved: Floats
    """The collectives of computing them again, as `prices.Links`."""

    @classmethod
    def none(cls, ports: int, levels: int) -> _Share:
        return cls(np.zeros(ports), np.zeros(ports), np.zeros(ports), np.zeros((1 + levels, ports)))

    def kept(self, mode: Mode) -> Floats:
        return {"none": self.inside, "fine": self.reduced, "full": np.zeros_like(self.inside)}[mode]

    def costs(self, mode: Mode, windows: Windows) -> Costs:
        """In the backward."""
        again, moved = (0.0 if mode == "none" else 1.0), (1.0 if mode == "full" else 0.0)
        computed = windows.computed(np.zeros_like(self.again), again * self.again)
        return computed + windows.activations(moved * np.stack([np.zeros_like(self.moved), self.moved]))


@dataclass
class _Layer:
    name: str
    shares: dict[int, _Share] = field(default_factory=dict)


_SUFFIX = ":recompute"


def mode_name(layer: str) -> str:
    """The name of the op that stands for a layer's mode."""
    return layer + _SUFFIX


def layer_named(name: str) -> str:
    """The layer whose mode an op of this name stands for: the inverse of `mode_name`."""
    return name.removesuffix(_SUFFIX)


def with_modes(costing: Costing, costed: Costed) -> Costed:
    """The problem with a choice of recomputation for each layer whose backward keeps anything for itself."""
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
            own = [place[number] for number in layer.shares]
            tables = [same.edge(share, costing.options.turns, costing.windows) for share in layer.shares.values()]
            edges += [replace(table, producer=number, consumer=len(rows)) for number, table in zip(own, tables)]
            rows.append(same.row(layer))
            variables.append(Variable(mode_name(layer.name), -1, modes=MODES))
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

    def row(self, layer: _Layer) -> Row:
        """The modes of a layer; one that computes again holds the layer's values a while, at the least these."""
        held = int(sum(share.inside.min() for share in layer.shares.values()))
        if held not in self.rows:
            self.rows[held] = tuple(
                Candidate(mode, 0.0, transient_bytes=0 if mode == "none" else held, in_port=port, out_port=port)
                for port, mode in enumerate(MODES)
            )
        return Row(mode_name(layer.name), self.rows[held], re.sub(r"\d+", "*", layer.name))

    def edge(self, share: _Share, turns: int, windows: Windows) -> Edge:
        """What an op's values in a layer cost under each mode."""
        kept = np.stack([share.kept(mode) for mode in MODES], axis=1).astype(np.int64)
        loads = windows.loads(turns * np.stack([share.costs(mode, windows) for mode in MODES], axis=-1))
        key = kept.tobytes(), loads.tobytes()
        if key not in self.tables:
            self.tables[key] = Edge(0, 1, np.zeros(kept.shape), loads, kept)
        return self.tables[key]


def _layers(costing: Costing) -> list[_Layer]:
    """The layers, and of each variable that has values in them what these come to."""
    found: dict[str, _Layer] = {}
    for node in costing.follows:
        layer = region_of(node)
        if layer and not info(node).backward and not is_view(node) and hasattr(node.meta["val"], "numel"):
            own = found.setdefault(layer, _Layer(layer)).shares
            number = costing.follows[node]
            share = own.setdefault(number, _Share.none(len(costing.lies[node]), len(costing.prices.levels)))
            _add(costing, number, share, node, layer)
    return [layer for layer in found.values() if any(share.inside.any() for share in layer.shares.values())]


def _add(costing: Costing, number: int, share: _Share, node: fx.Node, layer: str) -> None:
    itemsize = node.meta["val"].element_size()
    lies = [port[0] for port in costing.lies[node]]
    sizes = np.array([float(local_numel(layout)) for layout in lies]) * itemsize
    share.again += _compute(costing, number, node, sizes)
    unsummed = [tuple(axis for axis in layout.partial_axes if axis.kind == "space") for layout in lies]
    across = any(region_of(user) != layer and not info(user).backward for user in users_through_views(node))
    if not across and node not in costing.facts.returned:
        if costing.facts.needed_by_backward(node):
            share.inside += sizes
            share.reduced += np.where([bool(axes) for axes in unsummed], sizes, 0.0)
        for port, axes in enumerate(unsummed):
            if axes:
                level, seconds = costing.prices.collective("all_reduce", axes, int(sizes[port]))
                share.moved[1 + level, port] += seconds
    if node in costing.facts.roles:
        own = partial(_lies_in, layer)
        share.inside += costing.read_bytes(node, own)
        share.reduced += costing.read_bytes(node, own, gathered=True)


def _lies_in(layer: str, node: fx.Node) -> bool:
    return region_of(node) == layer


def _compute(costing: Costing, number: int, node: fx.Node, sizes: Floats) -> Floats:
    """Seconds of a forward op by the port of the variable that it follows; of one that follows by its part."""
    if node in costing.facts.roles:
        at = [role.node for role in costing.facts.roles[node].roles].index(node)
        ports = costing.variables[number].ports  # of the first of equal ops: its nodes have other names
        return np.array([costing.prices.compute(node, [*port.values()][at]) for port in ports])
    work = node_work(node)
    if work is None:
        return np.zeros(len(sizes))
    parts = sizes / max(1, node.meta["val"].numel() * node.meta["val"].element_size())
    seconds = {}
    for part in set(parts):
        local = replace(work, flops=int(work.flops * part), num_bytes=int(work.num_bytes * part), product=None)
        seconds[part] = work_seconds(local, costing.prices.cluster)
    return np.array([seconds[part] for part in parts])
