"""Costing: a captured step and a cluster become the planner's `Problem`.

The problem's variables are the ops with a parameter, with their strategies, and the *joins*: ops that bring values
of several of them together (a residual sum, attention, a gate), with the layouts that can arrive there. All other
ops follow, so what they cost belongs to the variable that they follow. Layers that are equal are found by their
signatures before anything is priced: each is priced once.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from shardweave.compiler.pipeline import Annotated, join_names
from shardweave.compiler.planner import problem as program
from shardweave.compiler.planner.candidates import legal, spread
from shardweave.compiler.planner.ops import Op
from shardweave.compiler.planner.prices import Prices, local_numel, tensor_outputs
from shardweave.compiler.planner.pricing import OpPrice, Parameters, Sizes, price_op
from shardweave.compiler.planner.scatter import Scatters
from shardweave.compiler.weaving import with_times
from shardweave.cost_model import Cluster, collective_seconds
from shardweave.cost_model.compute import node_work
from shardweave.errors import PlanError
from shardweave.ir import Assignment, BoundRule, Layout, Mesh, Mode, Strategy
from shardweave.options import Options
from shardweave.passes.annotate import depends_on_inputs, graph_outputs, info, source_of
from shardweave.passes.follow import Arrival, Choice, accepting, follow
from shardweave.passes.layouts import drop, factors_of, input_layouts, output_layouts, through
from shardweave.passes.rules import find_rule, is_view
from shardweave.passes.rules.linear import linear_in
from shardweave.passes.rules.registry import tensor_args

WORKING = 2.5
"""Values of an op's largest size that its backward holds at once, beside what is saved: in, out, part of the next."""

PARTS = 3
"""Passes over its value, and small sums, that a softmax takes in parts beside what it takes fused: max, sum, and once
more in its backward."""

Arrivals = list[tuple[Layout, ...]]  # for each port of the variable that a value follows, where its outputs lie


@dataclass
class Variable:
    """A row of the problem: an op with its strategies, or a join with its layouts; ports are where its output lies."""

    name: str
    signature: int
    op: Op | None = None
    node: fx.Node | None = None
    strategies: list[Strategy] = field(default_factory=list)
    prices: list[OpPrice] = field(default_factory=list)
    ports: list[dict[str, Assignment]] = field(default_factory=list)
    port_of: list[int] = field(default_factory=list)
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    saved: np.ndarray = field(default_factory=lambda: np.zeros(0))
    working: np.ndarray = field(default_factory=lambda: np.zeros(0))
    modes: tuple[Mode, ...] = ()
    """Of a layer's recomputation, in which case it has none of the others."""


@dataclass
class Costed:
    """The problem, and what its variables stand for."""

    problem: program.Problem
    variables: list[Variable]
    backward_ratio: float


class Costing:
    """Builds the problem of one captured step on one cluster."""

    def __init__(
        self, annotated: Annotated, cluster: Cluster, options: Options, forced: dict[str, list[Strategy]]
    ) -> None:
        self.annotated, self.options, self.forced = annotated, options, forced
        mesh = cluster.mesh()
        timed = with_times(Mesh(tuple(sorted(mesh.axes, key=lambda axis: -axis.stride))), options)
        self.legal_mesh, self.mesh = timed, replace(timed, woven=())
        self.prices = Prices(self.mesh, cluster)
        self.graph = annotated.captured.graph.graph
        self.dependent = depends_on_inputs(self.graph)
        self.variables: list[Variable] = []
        self.edges: dict[tuple[int, int], np.ndarray] = {}
        self.follows: dict[fx.Node, int] = {}
        self.lies: dict[fx.Node, Arrivals] = {}
        self.signatures: dict[fx.Node, int] = {}
        """The same number for values that lie alike, port by port."""
        self.known: dict[object, int] = {}
        self.remembered: dict[object, tuple[Arrivals, int, np.ndarray]] = {}
        self.placed: dict[object, tuple[Arrivals, Arrivals, int]] = {}
        self.joins: dict[object, tuple[list[Assignment], np.ndarray, Arrivals, Arrivals, int]] = {}
        self.matrices: dict[object, np.ndarray] = {}
        self.sums: dict[object, np.ndarray] = {}
        self.numels: dict[int, np.ndarray] = {}
        self.rows: dict[object, tuple[program.Candidate, ...]] = {}
        self.priced: dict[int, Variable] = {}
        self.roles = {role.node: op for op in annotated.ops for role in op.roles}
        self.numbers: dict[str, int] = {}
        self.shapes = {name: node.meta["val"] for node in self.graph.nodes
                       if (name := annotated.captured.parameters.get(node.name))}  # fmt: skip
        self.names = join_names(self.graph)
        self.returned = {_root(value) for value in graph_outputs(self.graph) if isinstance(value, fx.Node)}
        self.steps: dict[int, np.ndarray] = {}
        self.readers: dict[fx.Node, int] = {}
        parameters = annotated.captured.parameters
        self.unread = {node for node in self.graph.nodes if node.op == "placeholder" and node.name not in parameters}
        self.fixed_bytes = 0

    def build(self) -> Costed:
        """Price every variable and every edge."""
        ratio = self._backward_ratio()
        self.readers = self._readers()
        for node in self.graph.nodes:
            if node.op != "call_function" or info(node).backward or node not in self.dependent:
                continue
            if node in self.roles:
                self._op_node(node)
            elif node.target is operator.getitem:
                self._getitem(node)
            elif is_view(node):
                self._view(node)
            else:
                self._follower(node, ratio)
            self._saved(node)
        self.fixed_bytes += self._input_bytes()
        rows = [self._row(variable) for variable in self.variables]
        edges = tuple(
            program.Edge(u, v, self._per_step(matrix)) for (u, v), matrix in sorted(self.edges.items()) if matrix.any()
        )
        limit = self.options.memory_limit
        assert limit is not None
        return Costed(program.Problem(tuple(rows), edges, limit, self.fixed_bytes, 0.0), self.variables, ratio)

    # -- variables

    def _op_node(self, node: fx.Node) -> None:
        op = self.roles[node]
        if op.name not in self.numbers:
            self.numbers[op.name] = len(self.variables)
            self.variables.append(self._op_variable(op))
        number = self.numbers[op.name]
        variable = self.variables[number]
        names = [role.node.name for role in op.roles]
        at = names.index(node.name)
        key = variable.signature, at
        if key not in self.placed:
            bound = _bound(node)
            assignments = [list(port.values())[at].as_dict() for port in variable.ports]
            outputs = [output_layouts(bound, assignment, self.mesh) for assignment in assignments]
            rule = find_rule(node)
            wants = [accepting(rule, mine, input_layouts(bound, mine, self.mesh)) for mine in assignments]
            self.placed[key] = wants, outputs, self._number(tuple(outputs))
        wants, outputs, signature = self.placed[key]
        self._edges_into(number, node, wants, key)
        variable.saved += self.read_bytes(node) + self._inputs_read(node, variable)
        self._settle(node, number, outputs, signature)

    def _inputs_read(self, node: fx.Node, variable: Variable) -> np.ndarray:
        """Inputs of the step that this op is the first to read: each device has its part of the batch, all the time."""
        inputs = self.unread.intersection(tensor_args(node))
        found = np.zeros(len(variable.ports))
        if inputs:
            self.unread -= inputs
            size = _num_bytes(inputs)
            for port, strategy in zip(variable.port_of, variable.strategies):
                found[port] = max(found[port], size / (strategy.grid.z * strategy.grid.data))
        return found

    def read_bytes(
        self, node: fx.Node, of: Callable[[fx.Node], bool] = lambda argument: True, gathered: bool = False
    ) -> np.ndarray:
        """What a product keeps of its inputs, as it reads them, for its weight's gradient: by its port.

        Of those that several devices read the same part of alone, if `gathered`.
        """
        variable = self.variables[self.numbers[self.roles[node].name]]
        names = [role.node.name for role in self.roles[node].roles]
        wants, _, _ = self.placed[variable.signature, names.index(node.name)]
        total = np.zeros(len(wants))
        for position, argument in enumerate(tensor_args(node)):
            if argument in self.follows and of(argument):
                copies = np.array([local_numel(want[position]) for want in wants], dtype=float)
                if gathered:
                    copies *= copies * self.mesh.world_size > argument.meta["val"].numel()
                total += copies * argument.meta["val"].element_size() / self.readers.get(_root(argument), 1)
        return total

    def _op_variable(self, op: Op) -> Variable:
        shared = max((self.readers.get(_root(argument), 1) for role in op.roles if not info(role.node).backward
                      for argument in tensor_args(role.node)), default=1)  # fmt: skip
        values = [self.shapes[name] for name in (op.parameter, *op.companions)]
        element = Sizes.of(values[0].dtype, self.annotated.captured.dtypes.get(op.parameter))
        signature = self._number((
            element, tuple(op.sizes.items()), op.outputs, op.contracted, op.experts, op.batch, shared,
            tuple(value.shape for value in values),
            tuple((str(role.node.target), role.atoms, role.batch, _bound(role.node)) for role in op.roles),
            tuple(self.forced.get(op.name, ())),
        ))  # fmt: skip
        known = self.priced.get(signature)
        if known is None:
            options = self.forced.get(op.name) or legal(op, self.legal_mesh)
            if not options:
                devices, sizes = self.mesh.world_size, list(op.sizes.values())
                raise PlanError(
                    f"no strategy fits {op.name} on {devices} devices: neither the batch of {op.batch} nor its loops "
                    f"of sizes {sizes} take up all of them. Use a batch that is a multiple of {devices}, other "
                    "sizes, or another number of devices"
                )
            shapes = [tuple(value.shape) for value in values]
            whole = self.annotated.captured.whole
            parameters = Parameters(shapes, element, self.options.optimizer_bytes, whole)
            ports, port_of = spread(op, options, self.mesh)
            prices = price_op(op, options, ports, port_of, parameters, self.prices, shared)
            known = Variable(op.name, signature, op, None, options, prices, ports, port_of)
            self.priced[signature] = known
        size = len(known.ports)
        return replace(known, name=op.name, op=op, seconds=np.zeros(size), saved=np.zeros(size), working=np.zeros(size))

    def _follower(self, node: fx.Node, ratio: float) -> None:
        arguments = [argument for argument in tensor_args(node) if argument in self.follows]
        origins = {self.follows[argument] for argument in arguments}
        bound = _bound(node)
        if not origins:  # it depends on inputs alone: as they lie, which costs next to nothing
            return
        if len(origins) > 1 or self._ends_sums(node, bound, arguments):
            self._join(node, bound, arguments, ratio)
            return
        (number,) = origins
        variable = self.variables[number]
        key = self._key(node)
        if key not in self.remembered:
            arrivals: Arrivals = []
            seconds = np.zeros(len(variable.ports))
            choices = [self._choose(node, bound, dict.fromkeys(arguments, p)) for p in range(len(variable.ports))]
            for position, argument in enumerate(tensor_args(node)):
                if argument in self.follows:
                    haves, wants = [port[0] for port in self.lies[argument]], [c.inputs[position] for c in choices]
                    links = self.prices.pairs(haves, wants, argument.meta["val"].element_size())
                    seconds += links.sum(axis=(0, 1))
            for port, choice in enumerate(choices):
                seconds[port] += self.prices.compute(node, Assignment.of(choice.assignment)) * (1 + ratio)
                seconds[port] += self._in_parts(node, choice, ratio)
                arrivals.append(choice.outputs)
            self.remembered[key] = arrivals, self._number(tuple(arrivals)), seconds
        arrivals, signature, seconds = self.remembered[key]
        variable.seconds += seconds
        self._settle(node, number, arrivals, signature)

    def _ends_sums(self, node: fx.Node, bound: BoundRule, arguments: Sequence[fx.Node]) -> bool:
        """Whether a partial sum ends here (with a bias, say) that is asked to be scattered.

        Where nothing is asked, only places where several ops meet are weighed up: the program does not see the buffers
        of what changes its layout twice, of which the choice at every bias would give it more to be wrong about.
        """
        if node not in self.names or not self.options.sequence_parallel:
            return False
        ports = [(argument, port) for argument in arguments for port, have in enumerate(self.lies[argument])
                 if have[0].partial]  # fmt: skip
        return any(not self._choose(node, bound, {a: port}).outputs[0].partial for a, port in ports)

    def _in_parts(self, node: fx.Node, choice: Choice, ratio: float) -> float:
        """What a fused op costs more in parts: it reads and writes its value again for each, and sums small results."""
        bound, rule = _bound(node), find_rule(node)
        split = [axis for axis, name in choice.assignment.items() if bound.factor(name).blocked]
        axes = [axis for axis in split if axis.kind == "space"]
        if rule is None or rule.decompose is None or not axes:
            return 0.0
        work = self.prices.compute(node, Assignment.of(choice.assignment))
        whole = {f.name for f in bound.factors if f.blocked}
        rows = local_numel(choice.outputs[0]) // max(1, math.prod(bound.factor(name).size for name in whole))
        itemsize = tensor_outputs(node)[0].element_size()
        sums = collective_seconds("all_reduce", max(1, rows) * itemsize, tuple(axes), self.prices.cluster)
        return PARTS * work * (1 + ratio) + PARTS * sums

    def _join(self, node: fx.Node, bound: BoundRule, arguments: Sequence[fx.Node], ratio: float) -> None:
        key = self._key(node)
        if key not in self.joins:
            choices: dict[Assignment, Choice] = {}
            scatters = Scatters(bound, find_rule(node), self.mesh)
            for argument in arguments:
                for port in range(len(self.lies[argument])):
                    choice = self._choose(node, bound, {argument: port})
                    choices.setdefault(Assignment.of(choice.assignment), choice)
                    scatters.add(choice, self.lies[argument][port][0])
            choices = scatters.among(choices, self.options.sequence_parallel)
            seconds = np.array([self.prices.compute(node, option) * (1 + ratio) for option in choices])
            wants = [choice.inputs for choice in choices.values()]
            outputs = [choice.outputs for choice in choices.values()]
            self.joins[key] = list(choices), seconds, wants, outputs, self._number(tuple(outputs))
        options, seconds, wants, outputs, signature = self.joins[key]
        number = len(self.variables)
        ports = [{node.name: option} for option in options]
        size = len(options)
        self.variables.append(
            Variable(
                self.names[node],
                self._number(key),
                node=node,
                ports=ports,
                port_of=list(range(size)),
                seconds=seconds.copy(),
                saved=np.zeros(size),
                working=np.zeros(size),
            )
        )
        self._edges_into(number, node, wants, key)
        self._settle(node, number, outputs, signature)

    def _choose(self, node: fx.Node, bound: BoundRule, ports: dict[fx.Node, int]) -> Choice:
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
            arrivals.append(Arrival(layout, argument.meta["val"].numel(), argument not in self.follows, users))
        return follow(bound, rule, arrivals, self.mesh, linear_in(node))

    # -- what passes through

    def _view(self, node: fx.Node) -> None:
        source = tensor_args(node)[0]
        if source not in self.follows:
            return
        number, bound, key = self.follows[source], _bound(node), self._key(node)
        if key not in self.remembered:
            arrivals: Arrivals = []
            haves, wants = [port[0] for port in self.lies[source]], []
            for have in haves:
                lies, result = have, through(have, bound.inputs[0], bound.outputs[0], bound.sizes())
                if result is None:
                    kept = factors_of(have.dims, bound.inputs[0], bound.sizes())
                    lies = drop(have, set(have.shard_axes) - set(kept))
                    result = through(lies, bound.inputs[0], bound.outputs[0], bound.sizes())
                    if result is None:
                        lies = drop(have, have.shard_axes)
                        result = through(lies, bound.inputs[0], bound.outputs[0], bound.sizes())
                    assert result is not None
                wants.append(lies)
                arrivals.append((result,))
            seconds = self.prices.pairs(haves, wants, source.meta["val"].element_size()).sum(axis=(0, 1))
            self.remembered[key] = arrivals, self._number(tuple(arrivals)), seconds
        arrivals, signature, seconds = self.remembered[key]
        self.variables[number].seconds += seconds
        self._settle(node, number, arrivals, signature)

    def _getitem(self, node: fx.Node) -> None:
        parent, index = source_of(node)
        if parent in self.follows and hasattr(node.meta["val"], "numel"):
            key = "item", index, self.signatures[parent]
            if key not in self.remembered:
                arrivals: Arrivals = [(port[index],) for port in self.lies[parent]]
                self.remembered[key] = arrivals, self._number(tuple(arrivals)), np.zeros(0)
            arrivals, signature, _ = self.remembered[key]
            self._settle(node, self.follows[parent], arrivals, signature)

    def _settle(self, node: fx.Node, number: int, arrivals: Arrivals, signature: int) -> None:
        self.follows[node], self.lies[node], self.signatures[node] = number, arrivals, signature

    def _number(self, thing: object) -> int:
        """A number for what compares equal: cheap to hash where it is asked for again and again."""
        return self.known.setdefault(thing, len(self.known))

    def _key(self, node: fx.Node) -> object:
        """Equal for ops that do the same with values that lie alike, as in equal layers."""
        arguments = tensor_args(node)
        given = tuple((self.signatures.get(a), len(a.users) == 1, str(a.meta["val"].dtype)) for a in arguments)
        return str(node.target), self._number(_bound(node)), given, str(node.meta.get("val"))

    # -- edges, memory, rows

    def _edges_into(self, number: int, node: fx.Node, wants: Sequence[Sequence[Layout]], signature: object) -> None:
        for position, argument in enumerate(tensor_args(node)):
            if argument not in self.follows:
                continue
            source = self.follows[argument]
            key = self.signatures[argument], signature, position
            if key not in self.matrices:
                haves, wanted = [port[0] for port in self.lies[argument]], [want[position] for want in wants]
                table = self.prices.table(haves, wanted, argument.meta["val"].element_size())
                self.matrices[key] = table.sum(axis=(0, 1))
            matrix = self.matrices[key]
            if source == number:
                self.variables[number].seconds += np.diag(matrix)
            elif (source, number) in self.edges:
                before = self.edges[source, number]
                pair = id(before), id(matrix)  # equal layers share their edges' tables
                self.edges[source, number] = self.sums.setdefault(pair, before + matrix)
            else:
                self.edges[source, number] = matrix

    def _saved(self, node: fx.Node) -> None:
        """What the backward needs of a value, in each port of the variable that it follows."""
        rule = find_rule(node)
        if node not in self.follows or (rule is not None and rule.kind == "view"):
            return
        if not hasattr(node.meta["val"], "numel"):
            return
        itemsize = node.meta["val"].element_size()
        signature = self.signatures[node]
        if signature not in self.numels:
            self.numels[signature] = np.array([local_numel(port[0]) for port in self.lies[node]], dtype=float)
        sizes = self.numels[signature] * itemsize
        variable = self.variables[self.follows[node]]
        variable.working = np.maximum(variable.working, sizes)
        if node in self.returned or self.needed_by_backward(node):
            variable.saved += sizes
            if rule is not None and rule.decompose is not None:  # in parts, it leaves its shifted input, too
                blocked = {factor.name for factor in _bound(node).factors if factor.blocked}
                variable.saved += sizes * [self._on(node, port[0], blocked) for port in self.lies[node]]

    def _on(self, node: fx.Node, layout: Layout, factors: set[str]) -> bool:
        bound = _bound(node)
        return any(name in factors for name in factors_of(layout.dims, bound.outputs[0], bound.sizes()).values())

    def needed_by_backward(self, node: fx.Node) -> bool:
        """Whether a backward op other than an op's own product reads a forward value."""
        for user in node.users:
            if info(user).backward and user not in self.roles and not is_view(user):
                return True
            if is_view(user) and self.needed_by_backward(user):
                return True
        return False

    def _input_bytes(self) -> int:
        """Of inputs and buffers that no op with a parameter reads."""
        return _num_bytes(self.unread)

    def _row(self, variable: Variable) -> program.Op:
        variable.seconds = variable.seconds * self.options.micro_batches
        figures = variable.seconds, variable.saved, variable.working
        key = variable.signature, *(column.tobytes() for column in figures)  # equal layers share their candidates
        if key not in self.rows:
            self.rows[key] = tuple(self._candidates(variable))
        return program.Op(variable.name, self.rows[key], re.sub(r"\d+", "*", variable.name))

    def _per_step(self, seconds: np.ndarray) -> np.ndarray:
        """Seconds of a step from those of a micro-batch; equal tables stay one."""
        if self.options.micro_batches == 1:
            return seconds
        if id(seconds) not in self.steps:
            self.steps[id(seconds)] = self.options.micro_batches * seconds
        return self.steps[id(seconds)]

    def _candidates(self, variable: Variable) -> Iterator[program.Candidate]:
        for index, port in enumerate(variable.port_of):
            price = variable.prices[index] if variable.prices else OpPrice(0.0, 0.0, 0, 0)
            strategy = variable.strategies[index] if variable.strategies else None
            yield program.Candidate(
                str(strategy or next(iter(variable.ports[port].values()))),
                price.seconds + float(variable.seconds[port]),
                price.state_bytes,
                # What is saved is gone when the optimizer needs its scratch, so the larger of the two would do.
                max(int(variable.saved[port]), price.scratch_bytes),
                price.transient_bytes + int(WORKING * variable.working[port]),
                port,
                port,
                strategy,
            )

    # -- facts about the graph

    def _backward_ratio(self) -> float:
        """Bytes that following ops move in the backward, for each byte in the forward."""
        moved = [0, 0]
        for node in self.graph.nodes:
            if node not in self.roles and node.op == "call_function" and (work := node_work(node)) is not None:
                moved[info(node).backward] += work.num_bytes
        return moved[1] / moved[0] if moved[0] else 0.0

    def _readers(self) -> dict[fx.Node, int]:
        """How many ops read each activation."""
        found: dict[fx.Node, int] = {}
        for node in self.roles:
            if not info(node).backward:
                for argument in tensor_args(node):
                    root = _root(argument)
                    found[root] = found.get(root, 0) + 1
        return found


def _num_bytes(nodes: Iterable[fx.Node]) -> int:
    return sum(value.numel() * value.element_size() for node in nodes for value in tensor_outputs(node))


def _bound(node: fx.Node) -> BoundRule:
    bound = info(node).rule
    assert bound is not None
    return bound


def _root(value: fx.Node) -> fx.Node:
    while is_view(value):
        value = tensor_args(value)[0]
    return value
