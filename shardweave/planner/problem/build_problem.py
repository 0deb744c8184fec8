"""From a captured step and a cluster to the planner's `Problem`.

The problem's variables are the ops with a parameter, with their strategies, and the *joins*: ops that bring values of
several of them together (a residual sum, attention, a gate), with the layouts that can arrive there. All other ops
follow a variable, and their costs belong to it. Equal layers are found by their signatures before anything is priced,
so that each is priced once, and equal variables and edges share their tables.

Edges have the cost of bringing values from the layouts in which they are computed to those in which they are used, and
their gradients back. Within what follows one variable, such a change belongs to that variable. Between two variables it
is their edge, a table with the cost of each pair of layouts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from shardweave.ir import (
    Assignment,
    Axis,
    BoundRule,
    Captured,
    Layout,
    Strategy,
    factors_of,
    input_layouts,
    layout_through_view,
    output_layouts,
    with_axes_joined,
    without_axes,
)
from shardweave.planner.problem.graph_analysis import Facts, Scatters, bound_of, num_bytes, root_of
from shardweave.planner.problem.op_costs import Parameters, Sizes, price_op
from shardweave.planner.problem.overlap_model import Costs, Floats, Windows
from shardweave.planner.problem.problem import Edge, Problem
from shardweave.planner.problem.resharding_costs import Links, Prices, local_numel, tensor_outputs, whole
from shardweave.planner.problem.space import Space, spread
from shardweave.planner.problem.variables import ActivationMemory, Costed, PortLayouts, RowBuilder, Variable
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
    linear_in,
    source_of,
    tensor_args,
)


def gradient_bytes(captured: Captured) -> int:
    """What the gradients of all parameters of a step take."""
    names = {name for name, parameter in captured.parameters.items() if parameter in captured.gradients}
    return num_bytes(node for node in captured.graph.graph.nodes if node.name in names)


_DECOMPOSED_PASSES = 3.0, 2.5
"""What a softmax takes longer in parts, in seconds of a fused one in the forward: forward and backward. It reads and
writes its value 2 and 3 times fused, and 8 times in parts: largest, difference, exponentials, sum, difference; and sum,
exponentials, product, difference."""
_DECOMPOSED_SUMS = 2, 1
"""Small sums over devices of a softmax in parts, in the forward and in the backward."""


class ProblemBuilder:
    """Builds the problem of one captured step on one cluster.

    Parameters
    ----------
    space : Space
        The step, and what may be chosen.
    all_gradient_bytes : int, optional
        Of the whole step, where equal layers are left out of this one: buckets are filled from all layers.
    """

    def __init__(
        self,
        space: Space,
        all_gradient_bytes: int | None = None,
    ) -> None:
        self.space, self.annotated, self.options = space, space.annotated, space.options
        annotated, cluster, options = space.annotated, space.cluster, space.options
        if all_gradient_bytes is None:
            all_gradient_bytes = gradient_bytes(annotated.captured)
        self.mesh = space.whole_batch_mesh
        overlap = options.overlap
        merged_bytes = all_gradient_bytes if overlap.buckets is True else 0  # merges of small ones are not priced
        self.prices = Prices(self.mesh, cluster, overlap.quantize, merged_bytes)
        self.windows = Windows.of(cluster, self.prices.levels, overlap, options.micro_batch_count)
        self.facts = Facts(annotated, cluster)
        self.variables: list[Variable] = []
        self.follows: dict[fx.Node, int] = {}
        self.layouts: dict[fx.Node, PortLayouts] = {}
        self.whole_batch: set[int] = set()
        """The variables that take all sub-batches at once."""
        self.signatures: dict[fx.Node, int] = {}
        """The same number for values that lie alike, port by port."""
        self._edges: dict[tuple[int, int], Links] = {}
        self._changes: dict[object, Links] = {}
        self._sums: dict[object, Links] = {}
        self._known: dict[object, int] = {}
        self.limit = options.limit(cluster)
        count, world_size = options.micro_batch_count, self.mesh.world_size
        self.memory = ActivationMemory(annotated, self.facts, count, world_size, self.follows, self.layouts)
        self._followers: dict[object, tuple[PortLayouts, int, Costs, list[tuple[int, int, Costs]]]] = {}
        self._moved: set[tuple[fx.Node, int]] = set()
        self._placed: dict[object, tuple[PortLayouts, PortLayouts, PortLayouts, int]] = {}
        self._joins: dict[object, tuple[list[Assignment], Costs, PortLayouts, PortLayouts, PortLayouts, int]] = {}
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
                self.memory.add(node, self.variables[self.follows[node]])
        rows = RowBuilder(self.windows, self.options.micro_batch_count)
        ops = tuple(rows.row(variable) for variable in self.variables)
        fixed = self.memory.fixed_bytes
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
            inputs = [accept_own_partials(rule, mine, input_layouts(bound, mine)) for mine in assignments]
            gradients = [_gradients(node, mine, own) for mine, own in zip(assignments, inputs)]
            self._placed[key] = inputs, gradients, outputs, self.number(tuple(outputs))
        inputs, gradients, outputs, signature = self._placed[key]
        self.edges_into(number, node, inputs, gradients, key)
        self.memory.add_op(node, variable, inputs)
        self._record(node, number, outputs, signature)

    def _op_variable(self, op: Op) -> Variable:
        values = [self.facts.shapes[name] for name in (op.parameter, *op.companions)]
        signature = self.number((
            self._element(op), tuple(op.sizes.items()), op.outputs, op.contracted, op.experts, op.batch,
            self._shared(op), tuple(value.shape for value in values),
            tuple((str(role.node.target), role.atoms, role.batch, bound_of(role.node)) for role in op.roles),
            tuple(self.space.forced.get(op.name, ())), self.facts.ends(op), self.facts.beside(op),
            any_covers(self.options.overlap.exclude_from_sub_batches, op.name),
        ))  # fmt: skip
        known = self._priced.get(signature)
        if known is None:
            strategies = self.space.strategies(op)
            known = self._priced[signature] = self.spread(Variable(op.name, signature, op), strategies)
        saved, working, product, lasting = np.zeros((4, len(known.ports)))
        costs = self.windows.none(len(known.ports))
        return replace(
            known, name=op.name, op=op, costs=costs, saved=saved, working=working, product=product, lasting=lasting
        )

    def spread(self, variable: Variable, strategies: list[Strategy]) -> Variable:
        """An op's row with these strategies, each with the gathers that it may keep, priced."""
        op = variable.op
        assert op is not None
        kept_of = [self.space.kept_slices(op, strategy, strategies) for strategy in strategies]
        options = [(strategy, kept) for strategy, own in zip(strategies, kept_of, strict=True) for kept in own]
        strategies, kept_slices = [strategy for strategy, _ in options], [kept for _, kept in options]
        names = op.parameter, *op.companions
        parameters = Parameters(
            [tuple(self.facts.shapes[name].shape) for name in names],
            [self.space.is_read_again(name) for name in names],
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
        if not origins:  # it depends on inputs alone: in their layouts, which costs next to nothing
            return
        if len(origins) > 1 or self._ends_sums(node, bound, arguments):
            self._join(node, bound, arguments)
            return
        (number,) = origins
        variable = self.variables[number]
        key = self._key(node)
        if key not in self._followers:
            choices = [self._choose(node, bound, dict.fromkeys(arguments, p)) for p in range(len(variable.ports))]
            outputs: PortLayouts = [choice.outputs for choice in choices]
            costs = self._computed(node, [Assignment.of(choice.assignment) for choice in choices])
            gradients = [_gradients(node, choice.assignment, choice.inputs) for choice in choices]
            changes = []
            for position, argument in enumerate(tensor_args(node)):
                if argument in self.follows:
                    targets, back = [c.inputs[position] for c in choices], [own[position] for own in gradients]
                    changes.append((position, *self.change(argument, targets, back, self.is_undivided(node))))
            for port, choice in enumerate(choices):
                self._in_parts(node, choice, costs[:, :, port])
            self._followers[key] = outputs, self.number(tuple(outputs)), costs, changes
        self._add_follower(node, number, key)

    def _add_follower(self, node: fx.Node, number: int, key: object) -> None:
        """Add what a node costs that does the same as another one; what several want alike is brought there once."""
        outputs, signature, costs, changes = self._followers[key]
        variable, arguments = self.variables[number], tensor_args(node)
        variable.costs += costs
        for position, targets, change in changes:
            if (arguments[position], targets) not in self._moved:
                self._moved.add((arguments[position], targets))
                variable.costs += change
        self._record(node, number, outputs, signature)

    def _computed(self, node: fx.Node, assignments: Sequence[Assignment]) -> Costs:
        """Computing a node at each of these assignments, forward and backward."""
        seconds = self._seconds(node, assignments)
        return self.windows.computed(seconds, self.facts.backward_ratio(node) * seconds)

    def _seconds(self, node: fx.Node, assignments: Sequence[Assignment]) -> Floats:
        """Seconds of a node in the forward, at each of these assignments."""
        factor, parts = self.facts.batch_factor(node), self.parts(self.is_undivided(node))
        batch = (factor,) if factor else ()
        return np.array([self.prices.compute(node, assignment, batch, parts) for assignment in assignments])

    def _ends_sums(self, node: fx.Node, bound: BoundRule, arguments: Sequence[fx.Node]) -> bool:
        """Whether a partial sum ends here (with a bias, say) that may be scattered."""
        if node not in self.facts.names or self.options.sequence_parallel is False:
            return False
        ports = [(argument, port) for argument in arguments for port, layouts in enumerate(self.layouts[argument])
                 if layouts[0].partial]  # fmt: skip
        return any(not self._choose(node, bound, {a: port}).outputs[0].partial for a, port in ports)

    def _in_parts(self, node: fx.Node, choice: OpSharding, costs: Costs) -> None:
        """Add what a fused op costs more in parts: it reads and writes its value for each, and sums small results."""
        bound, rule = bound_of(node), find_rule(node)
        split = [axis for axis, name in choice.assignment.items() if bound.factor(name).blocked]
        axes = tuple(axis for axis in split if axis.kind == "space")
        if rule is None or rule.decompose is None or not axes:
            return
        fused = self._seconds(node, [Assignment.of(choice.assignment)])[0]
        whole = {f.name for f in bound.factors if f.blocked}
        rows = local_numel(choice.outputs[0]) // max(1, math.prod(bound.factor(name).size for name in whole))
        itemsize = tensor_outputs(node)[0].element_size()
        parts = self.parts(self.is_undivided(node))
        one = parts * self.prices.collective("all_reduce", axes, max(1, rows // parts) * itemsize)
        sums = np.stack([count * one for count in _DECOMPOSED_SUMS])
        costs += self.windows.activations(sums, self.is_undivided(node))
        costs += self.windows.computed(*(passes * fused for passes in _DECOMPOSED_PASSES))

    def _join(self, node: fx.Node, bound: BoundRule, arguments: Sequence[fx.Node]) -> None:
        key = self._key(node)
        if key not in self._joins:
            choices: dict[Assignment, OpSharding] = {}
            batch, parts = self.facts.batch_factor(node), self.parts(self.is_undivided(node))
            scatters = Scatters(bound, find_rule(node), self.mesh, batch, parts)
            for argument in arguments:
                for port in range(len(self.layouts[argument])):
                    choice = self._choose(node, bound, {argument: port})
                    choices.setdefault(Assignment.of(choice.assignment), choice)
                    scatters.add(choice, self.layouts[argument][port][0])
            choices = scatters.among(choices, self.options.sequence_parallel)
            costs = self._computed(node, list(choices))
            inputs = [choice.inputs for choice in choices.values()]
            outputs = [choice.outputs for choice in choices.values()]
            gradients = [_gradients(node, choice.assignment, choice.inputs) for choice in choices.values()]
            self._joins[key] = list(choices), costs, inputs, gradients, outputs, self.number(tuple(outputs))
        options, costs, inputs, gradients, outputs, signature = self._joins[key]
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
        self.edges_into(number, node, inputs, gradients, key)
        self._record(node, number, outputs, signature)

    def _choose(self, node: fx.Node, bound: BoundRule, ports: dict[fx.Node, int]) -> OpSharding:
        """How `node` is spread when these of its inputs decide; a softmax that can be decomposed blocks nothing."""
        rule = find_rule(node)
        if rule is not None and rule.decompose is not None:
            bound = replace(bound, factors=tuple(replace(f, blocked=False) for f in bound.factors))
        inputs = []
        for argument in tensor_args(node):
            shape = argument.meta["val"].shape
            port = ports.get(argument)
            layout = Layout.replicated(shape) if port is None else self.layouts[argument][port][0]
            users = len(argument.users) == 1
            inputs.append(OpInput(layout, argument.meta["val"].numel(), argument not in self.follows, users))
        return follow(bound, rule, self._with_batch(node, bound, inputs), self.mesh, linear_in(node))

    def _with_batch(self, node: fx.Node, bound: BoundRule, inputs: list[OpInput]) -> list[OpInput]:
        """Where the batch comes from inputs alone (a mask that is added to biases), these over all axes that are left.

        Inputs have this layout, as far as ops do not use the axes for something else.
        """
        batch = self.facts.batch_factor(node)
        having = [any(batch in names for names in dims) for dims in bound.inputs]
        if not batch or any(has and not given.is_parameter for has, given in zip(having, inputs)):
            return inputs
        used = {axis for given in inputs for axis in (*given.layout.shard_axes, *dict(given.layout.partial))}
        left, free = bound.sizes()[batch] // self.parts(self.is_undivided(node)), {}
        for axis in (*self.mesh.axes, *self.mesh.time_axes):
            if axis not in used and left % axis.size == 0:
                left, free[axis] = left // axis.size, batch
        layouts = input_layouts(bound, free)
        return [
            replace(given, layout=layout, is_parameter=False) if has else given
            for given, layout, has in zip(inputs, layouts, having)
        ]

    # -- what passes through

    def _view(self, node: fx.Node) -> None:
        source = tensor_args(node)[0]
        if source not in self.follows:
            return
        number, bound, key = self.follows[source], bound_of(node), self._key(node)
        if key not in self._followers:
            outputs: PortLayouts = []
            targets: list[Layout] = []
            for source_layout in (port[0] for port in self.layouts[source]):
                target, result = _through_view(source_layout, bound)
                targets.append(target)
                outputs.append((result,))
            change = (0, *self.change(source, targets, [whole(each) for each in targets], self.is_undivided(node)))
            costs = self.windows.none(len(targets))
            self._followers[key] = outputs, self.number(tuple(outputs)), costs, [change]
        self._add_follower(node, number, key)

    def _getitem(self, node: fx.Node) -> None:
        parent, index = source_of(node)
        if parent in self.follows and hasattr(node.meta["val"], "numel"):
            key = "item", index, self.signatures[parent]
            if key not in self._followers:
                outputs: PortLayouts = [(port[index],) for port in self.layouts[parent]]
                none = self.windows.none(len(outputs))
                self._followers[key] = outputs, self.number(tuple(outputs)), none, []
            self._add_follower(node, self.follows[parent], key)

    def _record(self, node: fx.Node, number: int, outputs: PortLayouts, signature: int) -> None:
        self.follows[node], self.layouts[node], self.signatures[node] = number, outputs, signature

    def _key(self, node: fx.Node) -> object:
        """Equal for ops that do the same with values that lie alike, as in equal layers."""
        arguments = tensor_args(node)
        given = tuple((self.signatures.get(a), len(a.users) == 1, str(a.meta["val"].dtype)) for a in arguments)
        batch = self.facts.batch_factor(node)
        kind = str(node.target), self.is_undivided(node)
        return kind, self.number(bound_of(node)), given, str(node.meta.get("val")), batch

    # -- edges

    def edges(self, rows: RowBuilder) -> tuple[Edge, ...]:
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
        self, argument: fx.Node, targets: Sequence[Layout], gradients: Sequence[Layout], whole_batch: bool
    ) -> tuple[int, Costs]:
        """A number for a value's targets by port, and what it takes to bring it there, and its gradient back."""
        sources = [port[0] for port in self.layouts[argument]]
        parts = self.parts(whole_batch)
        links = parts * self.prices.pairs(sources, targets, gradients, argument.meta["val"].element_size() / parts)
        return self.number(tuple(targets)), self.windows.activations(links, whole_batch)

    def edges_into(
        self,
        number: int,
        node: fx.Node,
        inputs: Sequence[Sequence[Layout]],
        gradients: Sequence[Sequence[Layout]],
        signature: object,
    ) -> None:
        """Add the changes of layout of a node's inputs, and of their gradients, by the ports of its variable."""
        for position, argument in enumerate(tensor_args(node)):
            if argument not in self.follows:
                continue
            source = self.follows[argument]
            shared = self.facts.readers[root_of(argument)] if node in self.facts.roles else 1
            parts = self.parts(not self.whole_batch.isdisjoint((source, number)))
            key = self.signatures[argument], signature, position, shared, parts
            if key not in self._changes:
                sources, targets = [port[0] for port in self.layouts[argument]], [own[position] for own in inputs]
                back = [gradient[position] for gradient in gradients]
                itemsize = argument.meta["val"].element_size() / parts
                links = self.prices.table(sources, targets, back, itemsize)
                for idle, ports in self._idle(source).items():
                    # Its backward computes with a part of the gradient, or a share, and sums what becomes of it
                    partial = [with_axes_joined(gradient, idle) for gradient in back]
                    links[1][:, ports] = self.prices.gradients(partial, [sources[port] for port in ports], itemsize)
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


def _through_view(layout: Layout, bound: BoundRule) -> tuple[Layout, Layout]:
    """The layout that a view takes a value in, as near to `layout` as it can, and that of its result."""
    inputs, outputs, sizes = bound.inputs[0], bound.outputs[0], bound.sizes()
    passing = factors_of(layout.dims, inputs, sizes)
    nearest = layout
    for gathered in ((), set(layout.shard_axes) - set(passing), layout.shard_axes):
        nearest = without_axes(layout, gathered)
        if (result := layout_through_view(nearest, inputs, outputs, sizes)) is not None:
            return nearest, result
    raise AssertionError(f"a view takes no layout of {nearest}")


def _gradients(node: fx.Node, assignment: Mapping[Axis, str], inputs: Sequence[Layout]) -> tuple[Layout, ...]:
    """Where an op that is spread so leaves the gradients of its inputs: partial where others than these are divided."""
    rule, found = find_rule(node), []
    owned = rule.owned if rule is not None else {}
    for layout, dims in zip(inputs, bound_of(node).inputs):
        own = {name for names in dims for name in names}
        others = [axis for axis, name in assignment.items() if name not in own and name not in owned]
        found.append(replace(layout, partial=tuple((axis, "sum") for axis in others if axis.kind == "space")))
    return tuple(found)
