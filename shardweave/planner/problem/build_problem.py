"""From a captured step and a cluster to the planner's `Problem`.

The problem's variables are the ops with a parameter, with their strategies, and the *joins*: ops that bring values of
several of them together (a residual sum, attention, a gate), with the layouts that can arrive there. All other ops
follow a variable, and their costs belong to it. Equal layers are found by their signatures before anything is priced,
so that each is priced once, and equal variables and edges share their tables.

Edges have the cost of bringing values from the layouts in which they are computed to those in which they are used, and
their gradients back. Within what follows one variable, such a change belongs to that variable. Between two variables it
is their edge, a table with the cost of each pair of layouts.

`Holding` adds up what a step holds besides the states of its parameters, for each layout of a variable: what the
forward saves for the backward, inputs and outputs, and the values that live while an op runs.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from shardweave.cost_model import Cluster, Options
from shardweave.ir import (
    Assignment,
    Axis,
    BoundRule,
    Captured,
    Layout,
    LayoutError,
    Mesh,
    PlanError,
    RecomputeMode,
    Strategy,
    factors_of,
    input_layouts,
    layout_through_view,
    output_layouts,
    without_axes,
)
from shardweave.passes import Annotated, with_times
from shardweave.planner.problem.candidates import legal, spread
from shardweave.planner.problem.graph_analysis import Facts, Scatters, bound_of, is_alias, num_bytes, root_of
from shardweave.planner.problem.op_costs import OpPrices, Parameters, Sizes, price_op
from shardweave.planner.problem.overlap_model import OPTIMIZER, Costs, Floats, Windows
from shardweave.planner.problem.problem import Candidate, Edge, Problem
from shardweave.planner.problem.problem import Op as Row
from shardweave.planner.problem.resharding_costs import Links, Prices, local_numel, tensor_outputs, whole
from shardweave.sharding import (
    Op,
    OpInput,
    OpSharding,
    accept_own_partials,
    any_covers,
    find_rule,
    follow,
    info,
    is_view,
    last_match,
    linear_in,
    matches,
    source_of,
    tensor_args,
)

Lies = Sequence[Sequence[Layout]]
"""For each port of a variable, where a value's parts, or an op's inputs, lie."""


class Holding:
    """Adds what values take to the variables that they follow.

    Parameters
    ----------
    annotated : Annotated
    facts : Facts
    micro_batch_count : int
        Micro-batches of a step.
    world_size : int
    follows : mapping of fx.Node to int
        Which of the variables each value follows.
    lies : mapping of fx.Node to Lies
        How it lies in each of that one's ports.
    """

    def __init__(
        self,
        annotated: Annotated,
        facts: Facts,
        micro_batch_count: int,
        world_size: int,
        follows: Mapping[fx.Node, int],
        lies: Mapping[fx.Node, Lies],
    ) -> None:
        self.annotated, self.facts = annotated, facts
        self.micro_batch_count, self.world_size = micro_batch_count, world_size
        self.follows, self.lies = follows, lies
        self._unread = set(facts.inputs)
        self._wants: dict[fx.Node, Lies] = {}
        self._numels: dict[int, Floats] = {}

    def add_op(self, node: fx.Node, variable: Variable, wants: Lies) -> None:
        """Add what a product keeps of what it reads, which lies so for it."""
        self._wants[node] = wants
        variable.saved += self.read_bytes(node)
        variable.lasting += self._inputs_read(node, variable)

    def add(self, node: fx.Node, variable: Variable) -> None:
        """Add what the backward needs of a value, and what lives while it is computed."""
        if is_alias(node) or not hasattr(node.meta["val"], "numel"):
            return
        itemsize = node.meta["val"].element_size()
        lies = self.lies[node]
        if id(lies) not in self._numels:
            self._numels[id(lies)] = np.array([local_numel(port[0]) for port in lies], dtype=float)
        sizes = self._numels[id(lies)] * itemsize
        whole = node.meta["val"].numel() * itemsize
        held = sizes * self.facts.held(whole) / max(1, whole)
        variable.working = np.maximum(variable.working, held)
        if node in self.facts.roles:
            variable.product = np.maximum(variable.product, held)
        if node in self.facts.returned:
            variable.lasting += sizes * self.micro_batch_count  # of all micro-batches
            variable.saved += sizes * (self.micro_batch_count if node in self.facts.differentiated else 0)
        elif self.facts.is_kept(node):
            variable.saved += sizes

    def read_bytes(
        self, node: fx.Node, of: Callable[[fx.Node], bool] = lambda argument: True, gathered: bool = False
    ) -> Floats:
        """What a product keeps of its inputs, as it reads them, for its weight's gradient: by its port.

        Of those that several devices read the same part of alone, if `gathered`, or if they are kept anyway.
        """
        wants = self._wants[node]
        total = np.zeros(len(wants))
        for position, argument in enumerate(tensor_args(node)):
            if argument in self.follows and of(argument):
                copies = np.array([local_numel(want[position]) for want in wants], dtype=float)
                if gathered or self.facts.is_kept(root_of(argument)):
                    copies *= copies * self.micro_batch_count * self.world_size > argument.meta["val"].numel()
                total += copies * argument.meta["val"].element_size() / max(1, self.facts.readers[root_of(argument)])
        return total

    @property
    def fixed_bytes(self) -> int:
        """What every choice holds."""
        return self._unread_bytes() + self._saved_of_inputs()

    def _inputs_read(self, node: fx.Node, variable: Variable) -> Floats:
        """Inputs of the step that this op is the first to read: each device has its part of the batch, all the time."""
        inputs = self._unread.intersection(tensor_args(node))
        found = np.zeros(len(variable.ports))
        if inputs:
            self._unread -= inputs
            size = num_bytes(inputs)
            for port, strategy in zip(variable.port_of, variable.strategies):
                found[port] = max(found[port], size / (strategy.grid.z * strategy.grid.data))
        return found

    def _unread_bytes(self) -> int:
        """Inputs that no op reads, such as labels: each device has its part."""
        batch, parts = (self.annotated.batch,), self.world_size
        return sum(
            num_bytes([node]) // (parts if node.meta["val"].shape[:1] == batch else 1)
            for node in self._unread
            if hasattr(node.meta["val"], "shape") and node.name not in self.annotated.tangents
        )  # fmt: skip

    def _saved_of_inputs(self) -> int:
        """What the backward needs of what depends on inputs alone, such as a mask: what has no batch is whole."""
        nodes = (node for node in self.facts.graph.nodes if node.op == "call_function" and not info(node).backward)
        kept = [node for node in nodes if node not in self.follows and not is_alias(node) and self.facts.is_kept(node)]
        parts = self.world_size * self.micro_batch_count
        return sum(num_bytes([node]) // (parts if self.facts.batch_factor(node) else 1) for node in kept)


@dataclass
class Variable:
    """A row of the problem: an op with its strategies, or a join with its layouts; ports are where its output lies.

    `prices` are those of its strategies; `costs`, `saved` and `working` what follows it costs, keeps and holds for a
    while, by port; `product` is `working` where its own products run, `lasting` what is held until the step ends.
    """

    name: str
    signature: int
    op: Op | None = None
    node: fx.Node | None = None
    strategies: list[Strategy] = field(default_factory=list)
    kept_slices: list[int] = field(default_factory=list)
    """How many slices of the parameter each of the strategies keeps gathered from the forward to the backward."""
    prices: OpPrices | None = None
    ports: list[dict[str, Assignment]] = field(default_factory=list)
    port_of: list[int] = field(default_factory=list)
    costs: Costs = field(default_factory=lambda: np.zeros(0))
    saved: Floats = field(default_factory=lambda: np.zeros(0))
    working: Floats = field(default_factory=lambda: np.zeros(0))
    product: Floats = field(default_factory=lambda: np.zeros(0))
    lasting: Floats = field(default_factory=lambda: np.zeros(0))
    modes: tuple[RecomputeMode, ...] = ()
    """Of a layer's recomputation, in which case it has none of the others."""
    degrees: tuple[int, ...] = ()
    """Of the border (`planner.returned`), in which case it has none of the others."""
    origins: tuple[int, ...] = ()
    """The port of the same variable without a choice of recomputation that each port comes from, if there are more."""


@dataclass
class Costed:
    """The problem, and what its variables stand for."""

    problem: Problem
    variables: list[Variable]


class Rows:
    """Writes rows and edges down.

    Parameters
    ----------
    windows : Windows
    micro_batch_count : int
        How often a step does what costs are of: its micro-batches.
    """

    def __init__(self, windows: Windows, micro_batch_count: int) -> None:
        self.windows, self.micro_batch_count = windows, micro_batch_count
        self._candidates: dict[object, tuple[Candidate, ...]] = {}
        self._tables: dict[tuple[int, bool, int], Floats] = {}

    def row(self, variable: Variable) -> Row:
        """A variable's row."""
        figures = variable.costs, variable.saved, variable.working, variable.product, variable.lasting
        key = variable.signature, *(column.tobytes() for column in figures)
        if key not in self._candidates:
            self._candidates[key] = tuple(self._written(variable))
        return Row(variable.name, self._candidates[key], re.sub(r"\d+", "*", variable.name))

    def edge(self, producer: int, consumer: int, links: Links, whole_batch: bool, beside: Floats | None) -> Edge:
        """What changes of layout take; where all sub-batches are taken at once, none computes meanwhile.

        Gradients of the consumer's inputs move `beside` so many seconds of its own products, by its port.
        """
        key = id(links), whole_batch, id(beside)
        if key not in self._tables:
            activations = self.windows.activations(links, whole_batch, 0.0 if beside is None else beside)
            self._tables[key] = self.windows.loads(self.micro_batch_count * activations)
        loads = self._tables[key]
        return Edge(producer, consumer, np.zeros(loads.shape[1:]), loads)

    def _written(self, variable: Variable) -> list[Candidate]:
        prices, ports = variable.prices, np.array(variable.port_of)
        costs = self.micro_batch_count * variable.costs[:, :, ports]
        saved, transient = variable.saved[ports].astype(int), variable.working[ports].astype(int)
        states, left = variable.lasting[ports].astype(int), np.zeros_like(saved)
        if prices is not None:
            costs = costs + prices.costs
            states, left = states + prices.state_bytes, prices.gradient_bytes
            saved = saved + prices.kept_bytes
            # At its own products gradients besides: what follows, such as a loss, may have larger values then
            own = variable.product[ports].astype(int)
            transient = np.maximum(transient + prices.gathered_bytes, own + prices.transient_bytes)
            transient = np.maximum(transient, prices.scratch_bytes)
        loads = self.windows.loads(costs)
        if prices is not None:
            loads[-len(OPTIMIZER) :] = prices.optimizer
        strategies: Sequence[Strategy | None] = variable.strategies or [None] * len(ports)
        columns = zip(
            strategies, variable.kept_slices or [0] * len(ports), states.tolist(), saved.tolist(), left.tolist(),
            transient.tolist(), variable.port_of, loads.T.tolist(),
        )  # fmt: skip
        return [
            Candidate(f"{strategy or next(iter(variable.ports[port].values()))}{f', {kept} kept' if kept else ''}", 0.0,
                      state, keeps, holds, port, port, (strategy, kept) if kept else strategy, tuple(load), leaves)
            for strategy, kept, state, keeps, leaves, holds, port, load in columns
        ]  # fmt: skip


Arrivals = list[tuple[Layout, ...]]  # for each port of the variable that a value follows, where its outputs lie


def gradient_bytes(captured: Captured) -> int:
    """What the gradients of all parameters of a step take."""
    names = {name for name, parameter in captured.parameters.items() if parameter in captured.gradients}
    values = [node.meta["val"] for node in captured.graph.graph.nodes if node.name in names]
    return sum(value.numel() * value.element_size() for value in values)


class Edges:
    """The variables of a problem as it is built, where what follows them lies, and what changes of that cost."""

    def __init__(self, annotated: Annotated, cluster: Cluster, options: Options, all_gradient_bytes: int) -> None:
        self.annotated, self.options = annotated, options
        mesh = cluster.mesh()
        timed = with_times(Mesh(tuple(sorted(mesh.axes, key=lambda axis: -axis.stride))), options)
        self.legal_mesh, self.mesh = timed, replace(timed, sub_batch_axes=())
        overlap = options.overlap
        self.prices = Prices(self.mesh, cluster, overlap.quantize, all_gradient_bytes if overlap.buckets else 0)
        self.windows = Windows.of(cluster, self.prices.levels, overlap)
        self.facts = Facts(annotated, cluster)
        self.variables: list[Variable] = []
        self.follows: dict[fx.Node, int] = {}
        self.lies: dict[fx.Node, Arrivals] = {}
        self.whole_batch: set[int] = set()
        """The variables that take all sub-batches at once."""
        self.signatures: dict[fx.Node, int] = {}
        """The same number for values that lie alike, port by port."""
        self._edges: dict[tuple[int, int], Links] = {}
        self._changes: dict[object, Links] = {}
        self._sums: dict[object, Links] = {}
        self._known: dict[object, int] = {}

    def edges(self, rows: Rows) -> tuple[Edge, ...]:
        """The edges that cost anything."""
        beside = [each.prices.independent_seconds if each.prices else None for each in self.variables]
        return tuple(
            rows.edge(*ends, links, not self.whole_batch.isdisjoint(ends), beside[ends[1]])
            for ends, links in sorted(self._edges.items())
            if links.any()
        )

    def parts(self, is_whole_batch: bool) -> int:
        """In how many parts, one after another, a value is computed and moved: the sub-batches."""
        return 1 if is_whole_batch else self.options.overlap.sub_batches

    def change(
        self, argument: fx.Node, wants: Sequence[Layout], gradients: Sequence[Layout], whole_batch: bool
    ) -> tuple[int, Costs]:
        """A number for where a value is wanted by port, and what it takes to bring it there, and its gradient back."""
        haves = [port[0] for port in self.lies[argument]]
        parts = self.parts(whole_batch)
        links = parts * self.prices.pairs(haves, wants, gradients, argument.meta["val"].element_size() / parts)
        return self.number(tuple(wants)), self.windows.activations(links, whole_batch)

    def edges_into(
        self,
        number: int,
        node: fx.Node,
        wants: Sequence[Sequence[Layout]],
        gradients: Sequence[Sequence[Layout]],
        signature: object,
    ) -> None:
        """Add what a variable's node takes of others: where its inputs are wanted, and their gradients, by its port."""
        for position, argument in enumerate(tensor_args(node)):
            if argument not in self.follows:
                continue
            source = self.follows[argument]
            shared = self.facts.readers[root_of(argument)] if node in self.facts.roles else 1
            parts = self.parts(not self.whole_batch.isdisjoint((source, number)))
            key = self.signatures[argument], signature, position, shared, parts
            if key not in self._changes:
                haves, wanted = [port[0] for port in self.lies[argument]], [want[position] for want in wants]
                back = [gradient[position] for gradient in gradients]
                itemsize = argument.meta["val"].element_size() / parts
                links = self.prices.table(haves, wanted, back, itemsize)
                for idle, ports in self._idle(source).items():
                    # Its backward computes with a part of the gradient, too, and sums what becomes of it
                    partial = [without_axes(gradient, set(idle)) for gradient in back]
                    links[1][:, ports] = self.prices.gradients(partial, [haves[port] for port in ports], itemsize)
                self._changes[key] = parts * links / shared
            links = self._changes[key]
            if source == number:
                diagonal = np.diagonal(links, axis1=2, axis2=3)
                self.variables[number].costs += self.windows.activations(diagonal, number in self.whole_batch)
            elif (source, number) in self._edges:
                before = self._edges[source, number]
                pair = id(before), id(links)  # equal layers share their edges' tables
                self._edges[source, number] = self._sums.setdefault(pair, before + links)
            else:
                self._edges[source, number] = links

    def _idle(self, number: int) -> dict[frozenset[Axis], list[int]]:
        """The ports of an op without a batch by the axes over which it does the same everywhere; none of a join."""
        variable, found = self.variables[number], dict[frozenset[Axis], list[int]]()
        if variable.op is None or variable.op.batch > 1:
            return found
        for number, port in enumerate(variable.ports):
            used = {axis for own in port.values() for axis, _ in own.items}
            found.setdefault(frozenset(self.mesh.axes) - used, []).append(number)
        found.pop(frozenset(), None)
        return found

    def number(self, thing: object) -> int:
        """A number for what compares equal: cheap to hash where it is asked for again and again."""
        return self._known.setdefault(thing, len(self._known))

    def is_undivided(self, node: fx.Node) -> bool:
        """Whether a node is in one of the modules that take all sub-batches at once."""
        return any_covers(self.options.overlap.exclude_from_sub_batches, info(node).op)


SOFTMAX_PASSES = 3
"""Passes over its value, and small sums, that a softmax takes in parts beside what it takes fused: max, sum, and once
more in its backward."""


class Costing(Edges):
    """Builds the problem of one captured step on one cluster.

    Parameters
    ----------
    annotated : Annotated
    cluster : Cluster
    options : Options
    forced : dict of str to list of Strategy
        The only strategies of some ops.
    all_gradient_bytes : int, optional
        Of the whole step, where equal layers are left out of this one: buckets are filled from all layers.
    """

    def __init__(
        self,
        annotated: Annotated,
        cluster: Cluster,
        options: Options,
        forced: dict[str, list[Strategy]],
        all_gradient_bytes: int | None = None,
    ) -> None:
        if all_gradient_bytes is None:
            all_gradient_bytes = gradient_bytes(annotated.captured)
        super().__init__(annotated, cluster, options, all_gradient_bytes)
        self.forced, self.limit = forced, options.limit(cluster)
        world_size = self.mesh.world_size
        self.holding = Holding(annotated, self.facts, options.micro_batch_count, world_size, self.follows, self.lies)
        self._remembered: dict[object, tuple[Arrivals, int, Costs, list[tuple[int, int, Costs]]]] = {}
        self._brought: set[tuple[fx.Node, int]] = set()
        self._placed: dict[object, tuple[Arrivals, Arrivals, Arrivals, int]] = {}
        self._joins: dict[object, tuple[list[Assignment], Costs, Arrivals, Arrivals, Arrivals, int]] = {}
        self._priced: dict[int, Variable] = {}
        self._numbers: dict[str, int] = {}

    def build(self) -> Costed:
        """Price every variable and every edge."""
        for node in self.facts.graph.nodes:
            if node.op != "call_function" or info(node).backward or node not in self.facts.dependent:
                continue
            if node in self.facts.roles:
                self._op_node(node)
            elif node.target is operator.getitem:
                self._getitem(node)
            elif is_view(node):
                self._view(node)
            else:
                self._follower(node)
            if node in self.follows:
                self.holding.add(node, self.variables[self.follows[node]])
        rows = Rows(self.windows, self.options.micro_batch_count)
        ops = tuple(rows.row(variable) for variable in self.variables)
        fixed = self.holding.fixed_bytes
        return Costed(Problem(ops, self.edges(rows), self.limit, fixed, windows=self.windows.names), self.variables)

    # -- variables

    def _op_node(self, node: fx.Node) -> None:
        op = self.facts.roles[node]
        if op.name not in self._numbers:
            self._numbers[op.name] = len(self.variables)
            if self.is_undivided(node):
                self.whole_batch.add(len(self.variables))
            self.variables.append(self._op_variable(op))
        number = self._numbers[op.name]
        variable = self.variables[number]
        names = [role.node.name for role in op.roles]
        at = names.index(node.name)
        key = variable.signature, at
        if key not in self._placed:
            bound = bound_of(node)
            assignments = [list(port.values())[at].as_dict() for port in variable.ports]
            outputs = [output_layouts(bound, assignment, self.mesh) for assignment in assignments]
            rule = find_rule(node)
            wants = [accept_own_partials(rule, mine, input_layouts(bound, mine)) for mine in assignments]
            gradients = [_gradients(node, mine, want) for mine, want in zip(assignments, wants)]
            self._placed[key] = wants, gradients, outputs, self.number(tuple(outputs))
        wants, gradients, outputs, signature = self._placed[key]
        self.edges_into(number, node, wants, gradients, key)
        self.holding.add_op(node, variable, wants)
        self._settle(node, number, outputs, signature)

    def _op_variable(self, op: Op) -> Variable:
        values = [self.facts.shapes[name] for name in (op.parameter, *op.companions)]
        signature = self.number((
            self._element(op), tuple(op.sizes.items()), op.outputs, op.contracted, op.experts, op.batch,
            self._shared(op), tuple(value.shape for value in values),
            tuple((str(role.node.target), role.atoms, role.batch, bound_of(role.node)) for role in op.roles),
            tuple(self.forced.get(op.name, ())), self.facts.ends(op), self.facts.beside(op),
            any_covers(self.options.overlap.exclude_from_sub_batches, op.name),
        ))  # fmt: skip
        known = self._priced.get(signature)
        if known is None:
            mesh = op.mesh_of(self.legal_mesh, self.options.overlap.exclude_from_sub_batches)
            options = self.in_slices(op, self.forced.get(op.name) or legal(op, mesh))
            if not options:
                devices, sizes = self.mesh.world_size, list(op.sizes.values())
                raise PlanError(
                    f"no strategy fits {op.name} on {devices} devices: neither the batch of {op.batch} nor its loops "
                    f"of sizes {sizes} take up all of them. Use a batch that is a multiple of {devices}, other "
                    "sizes, or another number of devices"
                )
            known = self._priced[signature] = self.spread(Variable(op.name, signature, op), options)
        saved, working, product, lasting = np.zeros((4, len(known.ports)))
        costs = self.windows.none(len(known.ports))
        return replace(
            known, name=op.name, op=op, costs=costs, saved=saved, working=working, product=product, lasting=lasting
        )

    def spread(self, variable: Variable, strategies: list[Strategy]) -> Variable:
        """An op's row with these strategies, each with the gathers that it may keep, priced."""
        op = variable.op
        assert op is not None
        options = [(strategy, kept) for strategy in strategies for kept in self._kept(op, strategy, strategies)]
        strategies, kept_slices = [strategy for strategy, _ in options], [kept for _, kept in options]
        names = op.parameter, *op.companions
        parameters = Parameters(
            [tuple(self.facts.shapes[name].shape) for name in names],
            [self.facts.is_read_again(name) for name in names],
            self._element(op),
            self.options.optimizer_bytes,
            self.annotated.captured.whole,
            self.facts.beside(op),
            self.options.ablation.regather_in_recompute,
        )
        ports, port_of = spread(op, strategies, self.mesh)
        prices = price_op(
            op,
            strategies,
            kept_slices,
            ports,
            port_of,
            parameters,
            self.prices,
            self.windows,
            self._shared(op),
            self.facts.ends(op),
            self.parts(any_covers(self.options.overlap.exclude_from_sub_batches, op.name)),
        )
        return replace(
            variable, strategies=strategies, kept_slices=kept_slices, prices=prices, ports=ports, port_of=port_of
        )

    def in_slices(self, op: Op, strategies: Sequence[Strategy]) -> list[Strategy]:
        """The strategies in as many slices as the options say: those that these do not divide stay whole."""
        slices = 1
        for pattern, count in self.options.overlap.operator_slices.items():
            slices = count if matches(pattern, op) else slices
        if slices == 1:
            return list(strategies)
        return [replace(each, slices=slices) if self.fits_slices(op, each, slices) else each for each in strategies]

    def fits_slices(self, op: Op, strategy: Strategy, slices: int) -> bool:
        """Whether the number of slices divides one of the op's loops."""
        try:
            op.slice_atom(strategy, self.mesh, slices)
        except LayoutError:
            return False
        return True

    def _kept(self, op: Op, strategy: Strategy, strategies: Sequence[Strategy]) -> Sequence[int]:
        """How many slices of its parameter an op may keep gathered: as the options say, or any number.

        Not where another of its strategies, which gathers once a step, does the same.
        """
        if strategy.rest == 1 or not self.facts.is_read_again(op.parameter):
            return [0]
        if self.options.keep_gathered is not None:
            return [min(strategy.slices, last_match(self.options.overlap.keep_gathered, op.parameter, 0))]
        if strategy.degree > 1:
            return [0]
        once = replace(strategy, grid=replace(strategy.grid, z=1, data=strategy.grid.z * strategy.grid.data), rest=1,
                       gradients=strategy.states, slices=1)  # fmt: skip
        is_needless = self.options.micro_batch_count == 1 and once in strategies
        return range(strategy.slices if is_needless else strategy.slices + 1)

    def _element(self, op: Op) -> Sizes:
        """What an element of its parameters takes."""
        dtypes = self.annotated.captured.dtypes
        return Sizes.of(self.facts.shapes[op.parameter].dtype, dtypes.get(op.parameter))

    def _shared(self, op: Op) -> int:
        """How many ops read the same activation."""
        return max((self.facts.readers[root_of(argument)] for role in op.roles if not info(role.node).backward
                    for argument in tensor_args(role.node)), default=1)  # fmt: skip

    def _follower(self, node: fx.Node) -> None:
        arguments = [argument for argument in tensor_args(node) if argument in self.follows]
        origins = {self.follows[argument] for argument in arguments}
        bound = bound_of(node)
        if not origins:  # it depends on inputs alone: as they lie, which costs next to nothing
            return
        if len(origins) > 1 or self._ends_sums(node, bound, arguments):
            self._join(node, bound, arguments)
            return
        (number,) = origins
        variable = self.variables[number]
        key = self._key(node)
        if key not in self._remembered:
            choices = [self._choose(node, bound, dict.fromkeys(arguments, p)) for p in range(len(variable.ports))]
            arrivals: Arrivals = [choice.outputs for choice in choices]
            costs = self._computed(node, [Assignment.of(choice.assignment) for choice in choices])
            gradients = [_gradients(node, choice.assignment, choice.inputs) for choice in choices]
            changes = []
            for position, argument in enumerate(tensor_args(node)):
                if argument in self.follows:
                    wants, back = [c.inputs[position] for c in choices], [gradient[position] for gradient in gradients]
                    changes.append((position, *self.change(argument, wants, back, self.is_undivided(node))))
            for port, choice in enumerate(choices):
                self._in_parts(node, choice, costs[:, :, port])
            self._remembered[key] = arrivals, self.number(tuple(arrivals)), costs, changes
        self._remember(node, number, key)

    def _remember(self, node: fx.Node, number: int, key: object) -> None:
        """Add what a node costs that does the same as another one; what several want alike is brought there once."""
        arrivals, signature, costs, changes = self._remembered[key]
        variable, arguments = self.variables[number], tensor_args(node)
        variable.costs += costs
        for position, wanted, change in changes:
            if (arguments[position], wanted) not in self._brought:
                self._brought.add((arguments[position], wanted))
                variable.costs += change
        self._settle(node, number, arrivals, signature)

    def _computed(self, node: fx.Node, assignments: Sequence[Assignment]) -> Costs:
        """Computing a node at each of these assignments, forward and backward."""
        factor, parts = self.facts.batch_factor(node), self.parts(self.is_undivided(node))
        batch = (factor,) if factor else ()
        seconds = np.array([self.prices.compute(node, assignment, batch, parts) for assignment in assignments])
        return self.windows.computed(seconds, self.facts.backward_ratio(node) * seconds)

    def _ends_sums(self, node: fx.Node, bound: BoundRule, arguments: Sequence[fx.Node]) -> bool:
        """Whether a partial sum ends here (with a bias, say) that is asked to be scattered.

        Where nothing is asked, only places where several ops meet are weighed up: the program does not see the buffers
        of what changes its layout twice, of which the choice at every bias would give it more to be wrong about.
        """
        if node not in self.facts.names or not self.options.sequence_parallel:
            return False
        ports = [(argument, port) for argument in arguments for port, have in enumerate(self.lies[argument])
                 if have[0].partial]  # fmt: skip
        return any(not self._choose(node, bound, {a: port}).outputs[0].partial for a, port in ports)

    def _in_parts(self, node: fx.Node, choice: OpSharding, costs: Costs) -> None:
        """Add what a fused op costs more in parts: it reads and writes its value for each, and sums small results."""
        bound, rule = bound_of(node), find_rule(node)
        split = [axis for axis, name in choice.assignment.items() if bound.factor(name).blocked]
        axes = tuple(axis for axis in split if axis.kind == "space")
        if rule is None or rule.decompose is None or not axes:
            return
        work = self._computed(node, [Assignment.of(choice.assignment)])[:, :, 0]
        whole = {f.name for f in bound.factors if f.blocked}
        rows = local_numel(choice.outputs[0]) // max(1, math.prod(bound.factor(name).size for name in whole))
        itemsize = tensor_outputs(node)[0].element_size()
        parts = self.parts(self.is_undivided(node))
        one = parts * self.prices.collective("all_reduce", axes, max(1, rows // parts) * itemsize)
        sums = np.stack([(SOFTMAX_PASSES - 1) * one, one])
        costs += SOFTMAX_PASSES * work + self.windows.activations(sums, self.is_undivided(node))

    def _join(self, node: fx.Node, bound: BoundRule, arguments: Sequence[fx.Node]) -> None:
        key = self._key(node)
        if key not in self._joins:
            choices: dict[Assignment, OpSharding] = {}
            scatters = Scatters(bound, find_rule(node), self.mesh)
            for argument in arguments:
                for port in range(len(self.lies[argument])):
                    choice = self._choose(node, bound, {argument: port})
                    choices.setdefault(Assignment.of(choice.assignment), choice)
                    scatters.add(choice, self.lies[argument][port][0])
            choices = scatters.among(choices, self.options.sequence_parallel)
            costs = self._computed(node, list(choices))
            wants = [choice.inputs for choice in choices.values()]
            outputs = [choice.outputs for choice in choices.values()]
            gradients = [_gradients(node, choice.assignment, choice.inputs) for choice in choices.values()]
            self._joins[key] = list(choices), costs, wants, gradients, outputs, self.number(tuple(outputs))
        options, costs, wants, gradients, outputs, signature = self._joins[key]
        number = len(self.variables)
        if self.is_undivided(node):
            self.whole_batch.add(number)
        ports = [{node.name: option} for option in options]
        size = len(options)
        self.variables.append(
            Variable(
                self.facts.names[node],
                self.number(key),
                node=node,
                ports=ports,
                port_of=list(range(size)),
                costs=costs.copy(),
                saved=np.zeros(size),
                working=np.zeros(size),
                lasting=np.zeros(size),
            )
        )
        self.edges_into(number, node, wants, gradients, key)
        self._settle(node, number, outputs, signature)

    def _choose(self, node: fx.Node, bound: BoundRule, ports: dict[fx.Node, int]) -> OpSharding:
        """How `node` is spread when these of its inputs decide; a softmax that can be decomposed blocks nothing."""
        rule = find_rule(node)
        if rule is not None and rule.decompose is not None:
            bound = replace(bound, factors=tuple(replace(f, blocked=False) for f in bound.factors))
        arrivals = []
        for argument in tensor_args(node):
            shape = argument.meta["val"].shape
            port = ports.get(argument)
            layout = Layout.replicated(shape) if port is None else self.lies[argument][port][0]
            users = len(argument.users) == 1
            arrivals.append(OpInput(layout, argument.meta["val"].numel(), argument not in self.follows, users))
        return follow(bound, rule, self._with_batch(node, bound, arrivals), self.mesh, linear_in(node))

    def _with_batch(self, node: fx.Node, bound: BoundRule, arrivals: list[OpInput]) -> list[OpInput]:
        """Where the batch comes from inputs alone (a mask that is added to biases), these over all axes that are left.

        So inputs lie, as far as ops do not use the axes for something else.
        """
        batch = self.facts.batch_factor(node)
        having = [any(batch in names for names in dims) for dims in bound.inputs]
        if not batch or any(has and not arrival.is_parameter for has, arrival in zip(having, arrivals)):
            return arrivals
        used = {axis for arrival in arrivals for axis in (*arrival.layout.shard_axes, *dict(arrival.layout.partial))}
        left, free = bound.sizes()[batch], {}
        for axis in (*self.mesh.axes, *self.mesh.time_axes):
            if axis not in used and left % axis.size == 0:
                left, free[axis] = left // axis.size, batch
        lies = input_layouts(bound, free)
        return [
            replace(arrival, layout=layout, is_parameter=False) if has else arrival
            for arrival, layout, has in zip(arrivals, lies, having)
        ]

    # -- what passes through

    def _view(self, node: fx.Node) -> None:
        source = tensor_args(node)[0]
        if source not in self.follows:
            return
        number, bound, key = self.follows[source], bound_of(node), self._key(node)
        if key not in self._remembered:
            arrivals: Arrivals = []
            wants = []
            for have in (port[0] for port in self.lies[source]):
                lies, result = have, layout_through_view(have, bound.inputs[0], bound.outputs[0], bound.sizes())
                if result is None:
                    kept = factors_of(have.dims, bound.inputs[0], bound.sizes())
                    lies = without_axes(have, set(have.shard_axes) - set(kept))
                    result = layout_through_view(lies, bound.inputs[0], bound.outputs[0], bound.sizes())
                    if result is None:
                        lies = without_axes(have, have.shard_axes)
                        result = layout_through_view(lies, bound.inputs[0], bound.outputs[0], bound.sizes())
                    assert result is not None
                wants.append(lies)
                arrivals.append((result,))
            change = (0, *self.change(source, wants, [whole(want) for want in wants], self.is_undivided(node)))
            costs = self.windows.none(len(wants))
            self._remembered[key] = arrivals, self.number(tuple(arrivals)), costs, [change]
        self._remember(node, number, key)

    def _getitem(self, node: fx.Node) -> None:
        parent, index = source_of(node)
        if parent in self.follows and hasattr(node.meta["val"], "numel"):
            key = "item", index, self.signatures[parent]
            if key not in self._remembered:
                arrivals: Arrivals = [(port[index],) for port in self.lies[parent]]
                none = self.windows.none(len(arrivals))
                self._remembered[key] = arrivals, self.number(tuple(arrivals)), none, []
            self._remember(node, self.follows[parent], key)

    def _settle(self, node: fx.Node, number: int, arrivals: Arrivals, signature: int) -> None:
        self.follows[node], self.lies[node], self.signatures[node] = number, arrivals, signature

    def _key(self, node: fx.Node) -> object:
        """Equal for ops that do the same with values that lie alike, as in equal layers."""
        arguments = tensor_args(node)
        given = tuple((self.signatures.get(a), len(a.users) == 1, str(a.meta["val"].dtype)) for a in arguments)
        batch = self.facts.batch_factor(node)
        kind = str(node.target), self.is_undivided(node)
        return kind, self.number(bound_of(node)), given, str(node.meta.get("val")), batch


def _gradients(node: fx.Node, assignment: Mapping[Axis, str], inputs: Sequence[Layout]) -> tuple[Layout, ...]:
    """Where an op that is spread so leaves the gradients of its inputs: partial where others than these are divided."""
    rule, found = find_rule(node), []
    owned = rule.owned if rule is not None else {}
    for layout, dims in zip(inputs, bound_of(node).inputs):
        own = {name for names in dims for name in names}
        others = [axis for axis, name in assignment.items() if name not in own and name not in owned]
        found.append(replace(layout, partial=tuple((axis, "sum") for axis in others if axis.kind == "space")))
    return tuple(found)
