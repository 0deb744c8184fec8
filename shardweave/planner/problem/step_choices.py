"""Choices besides the strategies of ops: operator slices, the layouts of outputs, and recomputation.

Operator slices
    An op in slices gathers one part of its parameter after another, so that less is held at a time. Its products are
    smaller, and the collectives of each part wait for links anew (OSDP, arXiv 2209.13258, section 3.3). This pays
    where the gathered parameter is most of what a step holds at once, as for a vocabulary. Which ops are tried does
    not depend on the memory limit, so that a plan under more memory is never slower.

Outputs
    The batch is sharded over the axes that every op puts on its batch, and an output that is no loss comes back as
    its batch went in. Tensor parallelism takes the innermost axes, so these are all axes outside of the largest
    degree of any op. That degree is one more variable. Each op has an edge to it that forbids a larger degree. The
    ops that outputs follow have edges with the cost of bringing them to the batch's layout.

Recomputation
    One more variable for each layer, whose candidates are the modes. The cost of a mode depends on the strategies of
    the layer's ops, so it is on the edges between these and the variable. With ``"none"`` the ops keep what their
    backward needs. With ``"full"`` the layer keeps only its inputs and what others read of it, and its forward runs
    again. With ``"fine"`` the results of collectives are kept too, so that neither they nor what led to them is
    repeated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from shardweave.cost_model import node_work, work_seconds
from shardweave.ir import Layout, RecomputeMode, Strategy, axes_size, normalise
from shardweave.passes import region_of
from shardweave.planner.problem.build_problem import ProblemBuilder
from shardweave.planner.problem.graph_analysis import is_alias, num_bytes, root_of
from shardweave.planner.problem.overlap_model import Costs, Floats, Windows
from shardweave.planner.problem.problem import Candidate, Edge
from shardweave.planner.problem.problem import Op as Row
from shardweave.planner.problem.resharding_costs import Links, local_numel, tensor_outputs
from shardweave.planner.problem.variables import Costed, RowBuilder, Variable
from shardweave.sharding import graph_outputs, info, tensor_args, users_through_views

MIN_TRANSIENT_RATIO = 1 / 8
"""The part of the largest transient of any op that a strategy's own makes out for it to be offered in slices, too."""


def with_slices(builder: ProblemBuilder, costed: Costed) -> Costed:
    """The problem with the strategies in slices, too, that gather much at a time; itself where none does."""
    priced = [variable.prices for variable in costed.variables if variable.prices is not None]
    much = MIN_TRANSIENT_RATIO * max((float(prices.transient_bytes.max()) for prices in priced), default=0.0)
    more = {index: sliced for index, variable in enumerate(costed.variables)
            if (sliced := _sliced(builder, variable, much))}  # fmt: skip
    if not more:
        return costed
    rows = RowBuilder(builder.windows, builder.options.micro_batch_count)
    ops, variables = list(costed.problem.ops), list(costed.variables)
    for index, sliced in more.items():
        whole = list(dict.fromkeys(variables[index].strategies))
        variables[index] = builder.spread(variables[index], [*whole, *sliced])
        ops[index] = rows.row(variables[index])
    return replace(costed, problem=replace(costed.problem, ops=tuple(ops)), variables=variables)


def _sliced(builder: ProblemBuilder, variable: Variable, much: float) -> list[Strategy]:
    """What an op may have in slices."""
    op, prices = variable.op, variable.prices
    if op is None or prices is None:
        return []
    held = zip(variable.strategies, prices.transient_bytes.tolist())
    large = dict.fromkeys(strategy for strategy, transient in held if transient > much)
    return builder.space.in_slices(op, list(large))


BORDER = ":returned"
"""The name of the variable."""


def with_outputs(builder: ProblemBuilder, costed: Costed, named: Callable[[str], str]) -> Costed:
    """The problem of a whole step with what its outputs take; as it is where they are returned as they lie.

    Parameters
    ----------
    builder : ProblemBuilder
        Of the folded step.
    costed : Costed
        Of the whole step.
    named : callable
        From the name of a variable of the folded step to that of the last one that it stands for.
    """
    outputs = _outputs(builder)
    if not outputs:
        return costed
    whole = builder.annotated.captured.whole or builder.options.outputs == "whole"
    of_ops = [
        [strategy.degree for strategy in variable.strategies] if variable.op and variable.op.batch > 1 else []
        for variable in costed.variables
    ]
    degrees = [1] if whole else sorted({degree for own in of_ops for degree in own} or {builder.mesh.world_size})
    border = len(costed.variables)
    place = {variable.name: index for index, variable in enumerate(costed.variables)}
    edges: dict[int, Edge] = {}
    for index, (variable, own) in enumerate(zip(costed.variables, of_ops, strict=True)):
        if own and not whole:
            least = np.full((len(variable.ports), 1), math.inf)
            np.minimum.at(least[:, 0], variable.port_of, own)
            edges[index] = Edge(index, border, np.where(least <= degrees, 0.0, math.inf))
    for node in outputs:
        number = builder.follows[node]
        index = place[named(builder.variables[number].name)]
        links = builder.windows.activations(_links(builder, node, degrees))
        loads, kept = builder.windows.loads(builder.options.micro_batch_count * links), _kept(builder, node, degrees)
        if origins := costed.variables[index].origins:
            loads, kept = loads[:, origins], kept[origins]
        known = edges.get(index, Edge(index, border, np.zeros(kept.shape)))
        edges[index] = replace(
            known,
            loads=loads if known.loads is None else known.loads + loads,
            kept=kept if known.kept is None else known.kept + kept,
        )
    levels = tuple(Candidate(f"batch outside of {degree}", 0.0, in_port=at) for at, degree in enumerate(degrees))
    problem = replace(
        costed.problem,
        ops=(*costed.problem.ops, Row(BORDER, levels)),
        edges=tuple(sorted((*costed.problem.edges, *edges.values()), key=lambda edge: (edge.producer, edge.consumer))),
    )
    return replace(costed, problem=problem, variables=[*costed.variables, Variable(BORDER, -1, degrees=tuple(degrees))])


def _outputs(builder: ProblemBuilder) -> list[fx.Node]:
    """The outputs that go where the batch came from, or are returned whole (`boundary.Boundary`)."""
    captured, mode = builder.annotated.captured, builder.options.outputs
    returned = not builder.annotated.loss_inside if mode == "auto" else mode != "sharded"
    if not (captured.whole or returned):
        return []
    first = len(captured.mutated)
    values = graph_outputs(captured.graph.graph)[first : first + len(captured.outputs)]
    return [value for value in values if isinstance(value, fx.Node) and value in builder.follows
            and isinstance(value.meta["val"], torch.Tensor) and value.meta["val"].dim()]  # fmt: skip


def _links(builder: ProblemBuilder, node: fx.Node, degrees: list[int]) -> Links:
    """What brings an output from each port to where each degree has it, and its gradient back."""
    sources = [port[0] for port in builder.layouts[node]]
    value = node.meta["val"]
    targets = [_wanted(builder, tuple(value.shape), degree) for degree in degrees]
    return builder.prices.table(sources, targets, targets, value.element_size())


def _kept(builder: ProblemBuilder, node: fx.Node, degrees: list[int]) -> NDArray[np.int64]:
    """Bytes of an output, and of its gradient, as it is returned at each degree beyond those as it lies, by port."""
    value, facts = node.meta["val"], builder.facts
    wanted = [local_numel(_wanted(builder, tuple(value.shape), degree)) for degree in degrees]
    computed = [local_numel(port[0]) for port in builder.layouts[node]]
    times = builder.options.micro_batch_count * (1 + (root_of(node) in facts.differentiated))
    beyond = np.maximum(0, np.array(wanted, dtype=np.int64) - np.array(computed, dtype=np.int64)[:, None])
    return np.asarray(times * value.element_size() * beyond)


def _wanted(builder: ProblemBuilder, shape: tuple[int, ...], degree: int) -> Layout:
    """The batch over all axes outside of the innermost ones that make up a degree."""
    layout = Layout.replicated(shape)
    if shape[0] != builder.annotated.batch or builder.options.outputs == "whole" or builder.annotated.captured.whole:
        return layout
    axes = builder.mesh.innermost_first
    count = next(count for count in range(len(axes) + 1) if axes_size(axes[:count]) >= degree)
    outside = (*builder.mesh.time_axes, *reversed(axes[count:]))
    if shape[0] % axes_size(outside):
        return layout
    return Layout((normalise([*outside, shape[0] // axes_size(outside)]), *layout.dims[1:]))


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
    gathered: Costs | None = None
    """What the op of the variable gathers once more to be computed again."""

    @classmethod
    def none(cls, ports: int, num_links: int) -> _Share:
        inside, given, reduced, again, summed = np.zeros((5, ports))
        return cls(inside, given, reduced, again, summed, np.zeros((num_links, ports)))

    def kept(self, mode: RecomputeMode) -> Floats:
        return {"none": self.inside, "fine": self.given + self.reduced, "full": self.given}[mode]

    def by_port(self, origins: Sequence[int]) -> _Share:
        """With more ports: each as the one of these that it comes from."""
        figures = {name: value[..., origins] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **figures)

    def costs(self, mode: RecomputeMode, windows: Windows, whole_batch: bool) -> Costs:
        """In the backward."""
        none = np.zeros_like(self.again)
        again = {"none": none, "fine": self.again - self.summed, "full": self.again}[mode]
        moved = self.moved if mode == "full" else np.zeros_like(self.moved)
        costs = windows.computed(none, again)
        costs += windows.activations(np.stack([np.zeros_like(moved), moved]), whole_batch)
        return costs if mode == "none" or self.gathered is None else costs + self.gathered


@dataclass
class _Layer:
    name: str
    shares: dict[int, _Share] = field(default_factory=dict)
    """By the number of the variable."""
    products: set[int] = field(default_factory=set)
    """The numbers of the variables whose products are computed again."""

    def share(self, builder: ProblemBuilder, node: fx.Node) -> _Share:
        """What values that follow the same variable as `node` come to."""
        ports, num_links = len(builder.layouts[node]), builder.prices.num_links
        return self.shares.setdefault(builder.follows[node], _Share.none(ports, num_links))

    def give(self, builder: ProblemBuilder, node: fx.Node) -> None:
        """Keep another's value: as it lies, or, of a variable that has no share yet, as if it were spread over all.

        One more share would make the layer's mode one more op's neighbour: of wide models few can be.
        """
        if builder.follows[node] in self.shares:
            self.share(builder, node).given += _sizes(builder, node)
        else:
            next(iter(self.shares.values())).given += num_bytes([node]) / builder.mesh.world_size


_SUFFIX = ":recompute"


def mode_name(layer: str) -> str:
    """The name of the op that stands for a layer's mode."""
    return layer + _SUFFIX


def layer_named(name: str) -> str:
    """The layer whose mode an op of this name stands for: the inverse of `mode_name`."""
    return name.removesuffix(_SUFFIX)


def with_modes(builder: ProblemBuilder, costed: Costed) -> Costed:
    """The problem with a choice of recomputation for each layer whose backward keeps anything for itself."""
    layers = _layers(builder)
    if not layers:
        return costed
    costed, same = _with_ports_by_gathers(builder, costed, layers), _Same()
    problem = costed.problem
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
            modes = builder.space.recompute_modes(layer.name)
            own = [place[number] for number in layer.shares]
            tables = [same.edge(share, modes, builder, at in builder.whole_batch) for at, share in layer.shares.items()]
            edges += [replace(table, producer=number, consumer=len(rows)) for number, table in zip(own, tables)]
            rows.append(same.row(layer, modes))
            variables.append(Variable(mode_name(layer.name), -1, modes=modes))
    edges += [replace(edge, producer=place[edge.producer], consumer=place[edge.consumer]) for edge in problem.edges]
    edges.sort(key=lambda edge: (edge.producer, edge.consumer))
    return replace(costed, problem=replace(problem, ops=tuple(rows), edges=tuple(edges)), variables=variables)


def _with_ports_by_gathers(builder: ProblemBuilder, costed: Costed, layers: Sequence[_Layer]) -> Costed:
    """The problem with a port for each different cost of what an op gathers again where its layer is recomputed.

    The layers' shares get these costs, by port. Strategies in slices gather them again, others do not.
    """
    same, mapped, gathered = _Same(), dict[int, tuple[int, ...]](), dict[int, Costs]()
    ops, variables = list(costed.problem.ops), list(costed.variables)
    # 1. One port for each port and cost, of ops that gather anything again.
    for index in sorted(set[int]().union(*(layer.products for layer in layers))):
        variable = variables[index]
        if variable.prices is None or not variable.prices.recompute_costs.any():
            continue
        costs, numbers = variable.prices.recompute_costs, dict[tuple[int, bytes], int]()
        keys = [(port, costs[:, :, at].tobytes()) for at, port in enumerate(variable.port_of)]
        port_of = [numbers.setdefault(key, len(numbers)) for key in keys]
        mapped[index] = origins = tuple(port for port, _ in numbers)
        gathered[index] = costs[:, :, [port_of.index(port) for port in range(len(origins))]]
        ports = [variable.ports[port] for port in origins]
        ops[index] = same.with_ports(ops[index], port_of)
        variables[index] = replace(variable, ports=ports, port_of=port_of, origins=origins)
    if not mapped:
        return costed
    # 2. The layers' shares of these ops.
    for layer in layers:
        for index in mapped.keys() & layer.shares.keys():
            share = layer.shares[index].by_port(mapped[index])
            again = gathered[index] if index in layer.products else None
            layer.shares[index] = replace(share, gathered=again)
    # 3. Their edges.
    edges = tuple(same.with_origins(edge, mapped.get(edge.producer), mapped.get(edge.consumer))
                  for edge in costed.problem.edges)  # fmt: skip
    return replace(costed, problem=replace(costed.problem, ops=tuple(ops), edges=edges), variables=variables)


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

    def with_ports(self, row: Row, port_of: Sequence[int]) -> Row:
        """An op whose candidates have these ports."""
        key = id(row.candidates), tuple(port_of)
        if key not in self.rows:
            pairs = zip(row.candidates, port_of, strict=True)
            self.rows[key] = tuple(replace(each, in_port=port, out_port=port) for each, port in pairs)
        return replace(row, candidates=self.rows[key])

    def with_origins(self, edge: Edge, producer: tuple[int, ...] | None, consumer: tuple[int, ...] | None) -> Edge:
        """An edge between more ports, each as the one of these that it comes from."""
        if producer is None and consumer is None:
            return edge
        key = id(edge.seconds), id(edge.loads), id(edge.kept), producer, consumer
        if key not in self.tables:
            rows = range(edge.seconds.shape[0]) if producer is None else producer
            columns = range(edge.seconds.shape[1]) if consumer is None else consumer
            at = np.ix_(rows, columns)
            loads = None if edge.loads is None else edge.loads[:, at[0], at[1]]
            self.tables[key] = Edge(0, 1, edge.seconds[at], loads, None if edge.kept is None else edge.kept[at])
        return replace(self.tables[key], producer=edge.producer, consumer=edge.consumer)

    def row(self, layer: _Layer, modes: Sequence[RecomputeMode]) -> Row:
        """The modes of a layer; one that computes again holds the layer's values a while, at the least these."""
        key = held, _ = int(sum(share.inside.min() for share in layer.shares.values())), modes
        if key not in self.rows:
            self.rows[key] = tuple(
                Candidate(mode, 0.0, transient_bytes=0 if mode == "none" else held, in_port=port, out_port=port)
                for port, mode in enumerate(modes)
            )
        return Row(mode_name(layer.name), self.rows[key], re.sub(r"\d+", "*", layer.name))

    def edge(self, share: _Share, modes: Sequence[RecomputeMode], builder: ProblemBuilder, whole_batch: bool) -> Edge:
        """What an op's values in a layer cost under each mode."""
        micro_batch_count, windows = builder.options.micro_batch_count, builder.windows
        kept = np.stack([share.kept(mode) for mode in modes], axis=1).astype(np.int64)
        costs = np.stack([share.costs(mode, windows, whole_batch) for mode in modes], axis=-1)
        loads = windows.loads(micro_batch_count * costs)
        key = kept.tobytes(), loads.tobytes()
        if key not in self.tables:
            self.tables[key] = Edge(0, 1, np.zeros(kept.shape), loads, kept)
        return self.tables[key]


def _layers(builder: ProblemBuilder) -> list[_Layer]:
    """The layers, and of each variable that has values in them what these come to."""
    nodes: dict[str, list[fx.Node]] = {}
    for node in builder.follows:
        name = region_of(node)
        if name and not info(node).backward:
            nodes.setdefault(name, []).append(node)
    found, given = [], set[fx.Node]()
    for name, own in nodes.items():
        layer, again = _Layer(name), _again(builder, own)
        for node in own:
            if not is_alias(node):
                _add(builder, layer.share(builder, node), node, node in again, name)
                if node in again and node in builder.facts.roles:
                    layer.products.add(builder.follows[node])
        for source in dict.fromkeys(root_of(source) for node in own if node in again for source in tensor_args(node)):
            if source in builder.follows and source not in again | given and not _is_saved(builder, source):
                layer.give(builder, source)
                given.add(source)
        found.append(layer)
    return [layer for layer in found if any(share.inside.any() for share in layer.shares.values())]


def _again(builder: ProblemBuilder, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What of a layer runs again where only what others read is kept: what its backward needs, and leads to it."""
    inside = {node for node in nodes if not _is_read_outside(builder, node)}
    needed = [node for node in inside if _is_saved(builder, node)]
    found: set[fx.Node] = set()
    while needed:
        node = needed.pop()
        if node not in found:
            found.add(node)
            needed += [source for source in node.all_input_nodes if source in inside]
    return found


def _is_read_outside(builder: ProblemBuilder, node: fx.Node) -> bool:
    users = [user for user in users_through_views(node) if not info(user).backward]
    return node in builder.facts.returned or any(region_of(user) != region_of(node) for user in users)


def _is_saved(builder: ProblemBuilder, node: fx.Node) -> bool:
    """Whether the backward needs a value: its own ops, or the products that read it for their weights' gradients."""
    return builder.facts.is_kept(node) or builder.facts.readers[root_of(node)] > 0


def _sizes(builder: ProblemBuilder, node: fx.Node) -> Floats:
    """Bytes of a node's value, or the first of several, on a device, by the port of the variable that it follows."""
    sizes: Floats = np.array([float(local_numel(port[0])) for port in builder.layouts[node]])
    return sizes * float(tensor_outputs(node)[0].element_size())


def _add(builder: ProblemBuilder, share: _Share, node: fx.Node, again: bool, layer: str) -> None:
    """Add a value to the share of the variable that it follows."""
    sizes = _sizes(builder, node)
    seconds = _compute(builder, builder.follows[node], node, sizes) if again else np.zeros_like(sizes)
    share.again += seconds
    if isinstance(node.meta["val"], torch.Tensor) and not _is_read_outside(builder, node):
        if builder.facts.needed_by_backward(node):
            share.inside += sizes
        partial_axes = [port[0].partial_axes for port in builder.layouts[node]]
        unsummed = [tuple(axis for axis in axes if axis.kind == "space") for axes in partial_axes]
        for port, axes in enumerate(unsummed if again else ()):
            if axes:
                parts = builder.parts(builder.is_undivided(node))
                share.moved[:, port] += parts * builder.prices.collective("all_reduce", axes, int(sizes[port] / parts))
                share.reduced[port] += sizes[port]
                share.summed[port] += seconds[port]
    if node in builder.facts.roles:
        own = partial(_is_in, layer)
        share.inside += builder.memory.read_bytes(node, own)
        share.reduced += builder.memory.read_bytes(node, own, gathered=True)


def _is_in(layer: str, node: fx.Node) -> bool:
    return region_of(node) == layer


def _compute(builder: ProblemBuilder, number: int, node: fx.Node, sizes: Floats) -> Floats:
    """Seconds of a forward op by the port of the variable that it follows; of one that follows by its part."""
    variable = builder.variables[number]
    if node in builder.facts.roles or node is variable.node:
        roles = builder.facts.roles[node].roles if node in builder.facts.roles else ()
        at = next((at for at, role in enumerate(roles) if role.node is node), 0)
        # Ports are those of the first of equal ops: its nodes have other names
        return np.array([builder.prices.compute(node, [*port.values()][at]) for port in variable.ports])
    work = node_work(node)
    if work is None:
        return np.zeros(len(sizes))
    parts = sizes / max(1, tensor_outputs(node)[0].nbytes)
    seconds = {}
    for part in set(parts):
        local = replace(work, flops=int(work.flops * part), num_bytes=int(work.num_bytes * part), product=None)
        seconds[part] = work_seconds(local, builder.prices.cluster)
    return np.array([seconds[part] for part in parts])
