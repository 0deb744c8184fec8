"""The ops that get a strategy: those that contract a parameter, each with all its nodes, forward and backward.

A linear layer is three products over the same three loops: ``m k, k n -> m n`` and the two of its backward. An
`Op` finds these nodes by its parameter. So one strategy, given in the parameter's dimensions and the batch, becomes an
assignment for each node.

Column and row form
    Megatron-LM (arXiv 1909.08053) splits the first product of a branch by columns and the one that reads its result by
    rows. Values are sharded inside of branches and replicated between them. AxoNN (arXiv 2305.13525) swaps x and y in
    the same places. The form of an op is found from the loops of the model, not from names. The loop of a *stream*,
    which ops both read and write one after another (the hidden size of a residual network), stays whole, and so does a
    loop that some op cannot split. An op that writes another loop is a column. An op that reads a loop that a column
    left sharded, or a loop of its own (the vocabulary of an embedding), is a row.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import fx

from shardweave.ir import (
    Assignment,
    Axis,
    Captured,
    Grid,
    Layout,
    LayoutError,
    Mesh,
    PlanError,
    Strategy,
    axes_size,
    dims_layout,
    preset_degrees,
    slice_axis,
)
from shardweave.sharding.annotate import Classes, any_covers, covers, graph_outputs
from shardweave.sharding.graphs import info, tensors
from shardweave.sharding.rules import find_rule, is_view
from shardweave.sharding.rules.registry import tensor_args

Atom = tuple[int, int]  # a dimension of the parameter, and the index of the atom in it


@dataclass(frozen=True)
class Role:
    """A node of an op: which of its factors are atoms of the parameter, and which are the batch."""

    node: fx.Node
    atoms: tuple[tuple[Atom, str], ...]
    batch: tuple[str, ...]


@dataclass(frozen=True)
class Op:
    """An op with a parameter.

    Parameters
    ----------
    name : str
        The module's name; the parameter's own where its module has several.
    parameter : str
        The parameter that the op contracts.
    companions : tuple of str
        Parameters that are sharded as this one: the op's bias, and those of norms before it.
    sizes : dict from atom to int
        The parameter's atoms.
    outputs, contracted : tuple of atoms
        The loops ``n`` of the forward output, and the loops ``k`` that are summed over. If no other op blocks some of
        them, only these.
    experts : tuple of atoms
        The loop over experts. A row of the input picks one expert.
    roles : tuple of Role
        The op's nodes, the forward ones first.
    batch : int
        The size of the batch loop, 1 if there is none.
    form : {"column", "row", ""}
        How Megatron's tensor parallelism splits the op (see the module's docstring).
    idle : frozenset of Axis
        Axes that do not shard the batch, whatever the strategy, as they do not divide it: see `idle_axes`.
    """

    name: str
    parameter: str
    companions: tuple[str, ...]
    sizes: dict[Atom, int]
    outputs: tuple[Atom, ...]
    contracted: tuple[Atom, ...]
    experts: tuple[Atom, ...]
    roles: tuple[Role, ...]
    batch: int
    form: Literal["column", "row", ""] = ""
    idle: frozenset[Axis] = frozenset()

    def atoms_of(self, strategy: Strategy, mesh: Mesh) -> dict[Axis, Atom]:
        """The atom of the parameter that each x, y and expert axis is on.

        A run of axes fills the loop's atoms in order. Axes that are left when all atoms are used up stay unassigned (8
        ranks on 4 key-value heads). Raises `LayoutError` if the axes do not divide the atoms.
        """
        axes = strategy.axes(mesh)
        found: dict[Axis, Atom] = {}
        loops = ("x", axes.x, self.outputs), ("y", axes.y, self.contracted), ("experts", axes.experts, self.experts)
        for letter, run, atoms in loops:
            left = {atom: self.sizes[atom] for atom in atoms}
            if run and not atoms:
                raise LayoutError(f"{self.name}: {letter} = {getattr(strategy.grid, letter)}, but it has no such loop")
            for axis in run:
                fits = [atom for atom in atoms if left[atom] % axis.size == 0]
                if fits:
                    found[axis] = fits[0]
                    left[fits[0]] //= axis.size
                elif any(size > 1 for size in left.values()):
                    raise LayoutError(
                        f"{self.name}: {letter} = {getattr(strategy.grid, letter)} does not divide its loops of sizes "
                        f"{[self.sizes[atom] for atom in atoms]}"
                    )
        return found

    def mesh_of(self, mesh: Mesh, exclude_from_sub_batches: Sequence[str]) -> Mesh:
        """`mesh`, without its sub-batches if the op is in a module that is excluded from them."""
        return replace(mesh, sub_batch_axes=()) if any_covers(exclude_from_sub_batches, self.name) else mesh

    def slice_atom(self, strategy: Strategy, mesh: Mesh, slices: int) -> Atom:
        """The loop that operator slices cut; `LayoutError` if their number divides none.

        It is the last loop of the parameter that they divide, so that the parameter is sharded on its first one, as
        without slices.
        """
        atoms = self.atoms_of(strategy, mesh)
        steps = {atom: self.sizes[atom] // axes_size(axis for axis in atoms if atoms[axis] == atom)
                 for atom in (*self.contracted, *self.outputs)}  # fmt: skip
        fits = [atom for atom, size in steps.items() if size % slices == 0]
        if not fits:
            raise LayoutError(
                f"{self.name}: {slices} slices divide none of its loops, of {[*steps.values()]} steps on a device"
            )
        return max(fits)

    def assignments(self, strategy: Strategy, mesh: Mesh) -> dict[str, Assignment]:
        """The assignment of each node of the op, by node name; `LayoutError` if the grid or slices do not fit."""
        axes = strategy.axes(mesh)
        atoms = self.atoms_of(strategy, mesh)
        if strategy.slices > 1:
            atoms |= {slice_axis(strategy.slices): self.slice_atom(strategy, mesh, strategy.slices)}
        rows = [axis for axis in (*axes.z, *axes.data, *mesh.time_axes) if axis not in self.idle]
        if self.batch > 1:
            left = self.batch
            for axis in rows:
                if left % axis.size:
                    parts = "".join(f" * {time.size} {time.name}-batches" for time in mesh.time_axes)
                    raise LayoutError(
                        f"{self.name}: z * data = {strategy.grid.z * strategy.grid.data}{parts} does not divide "
                        f"the batch of {self.batch}"
                    )
                left //= axis.size
        result = {}
        for role in self.roles:
            names = {atom: name for atom, name in role.atoms if _splits(role.node, name)}
            assignment = {axis: names[atom] for axis, atom in atoms.items() if atom in names}
            assignment |= self._rows(role, rows)
            result[role.node.name] = Assignment.of(assignment)
        return result

    def _rows(self, role: Role, rows: Sequence[Axis]) -> dict[Axis, str]:
        bound = info(role.node).rule
        assert bound is not None
        left = {name: bound.factor(name).size for name in role.batch}
        found: dict[Axis, str] = {}
        for axis in rows:
            for name in role.batch:
                if left[name] % axis.size == 0:
                    found[axis] = name
                    left[name] //= axis.size
                    break
        return found

    def compute_layout(self, strategy: Strategy, mesh: Mesh) -> Layout:
        """The layout in which the op computes with its parameter."""
        sizes = {f"{dim}.{index}": size for (dim, index), size in self.sizes.items()}
        assignment = {axis: f"{dim}.{index}" for axis, (dim, index) in self.atoms_of(strategy, mesh).items()}
        rank = 1 + max((dim for dim, _ in self.sizes), default=-1)
        dims = tuple(
            tuple(f"{dim}.{index}" for index in range(len(self.sizes)) if (dim, index) in self.sizes)
            for dim in range(rank)
        )
        return Layout(dims_layout(dims, sizes, assignment))


def _splits(node: fx.Node, factor: str) -> bool:
    """Whether a node can split a loop. A region that selects by values cannot, where the op's other nodes can."""
    bound, rule = info(node).rule, find_rule(node)
    assert bound is not None
    return not bound.factor(factor).blocked or rule is not None and rule.decompose is not None


def idle_axes(batch: int, axes: Iterable[Axis]) -> frozenset[Axis]:
    """The `axes` that cannot shard a batch, taken in this order: ranks along them compute the same samples.

    >>> outer, inner = Axis("node0", 2, 2), Axis("gpu0", 2, 1)
    >>> [sorted(axis.name for axis in idle_axes(batch, (outer, inner))) for batch in (8, 10, 3)]
    [[], ['gpu0'], ['gpu0', 'node0']]
    """
    idle = set()
    for axis in axes:
        if batch % axis.size:
            idle.add(axis)
        else:
            batch //= axis.size
    return frozenset(idle)


def batch_classes(captured: Captured, classes: Classes) -> tuple[frozenset[int], int]:
    """The classes of the inputs' first dimensions that are the batch, and the size of the batch."""
    size = 0
    found = set()
    for node in captured.graph.graph.nodes:
        if node.op == "placeholder" and node.name in captured.inputs and node.meta["val"].dim():
            bound = info(node).rule
            assert bound is not None
            length = node.meta["val"].shape[0]
            size = size or length
            if length == size and bound.outputs[0][0]:
                found.add(classes.of[node, bound.outputs[0][0][0]])
    return frozenset(found), size


def find_ops(captured: Captured, classes: Classes) -> list[Op]:
    """The ops of a captured and annotated step, in the order of their first forward node.

    A product of two parameters is the op of the first. The second becomes a companion of an op, as biases do, unless it
    has another product of its own. In a model that contracts no parameter, the ops that read one with an input count;
    else those that read what `torch.stack` and `torch.cat` make of several.
    """
    for contracted_only, joined in (True, False), (False, False), (False, True):
        if found := _find_ops(captured, classes, contracted_only, joined):
            return found
    return []


def _find_ops(captured: Captured, classes: Classes, contracted_only: bool, joined: bool) -> list[Op]:
    graph = captured.graph.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    batches, _ = batch_classes(captured, classes)
    gradients = _gradient_nodes(captured)
    from_inputs: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and (node.name in captured.inputs or node.name in captured.tangents)
        if given or any(source in from_inputs for source in node.all_input_nodes):
            from_inputs.add(node)
    placeholders = {
        name: graph_node for graph_node in graph.nodes if (name := captured.parameters.get(graph_node.name))
    }
    found: list[tuple[int, Op]] = []
    first_use: dict[str, int] = {}
    taken: set[fx.Node] = set()
    for name, node in placeholders.items():
        # 1. Find the nodes that contract the parameter or compute its gradient.
        roles = _roles(node, gradients.get(name), classes, batches, from_inputs, contracted_only, joined)
        roles = [role for role in roles if role.node not in taken]
        uses = [position[user] for user in users_through_views(node)]
        first_use[name] = min(uses, default=len(position))
        contracting = [role for role in roles if not info(role.node).backward]
        if not contracting:
            continue
        # 2. Sort the parameter's atoms by what the largest forward node does with them.
        main = max(contracting, key=_output_size)
        bound = info(main.node).rule
        labels = info(node).rule
        assert bound is not None and labels is not None
        sizes = {(dim, index): labels.factor(factor).size
                 for dim, names in enumerate(labels.outputs[0]) for index, factor in enumerate(names)}  # fmt: skip
        present = {factor for dims in bound.outputs for names in dims for factor in names}
        lookup = dict(main.atoms)
        free = [atom for atom in lookup if classes.of[main.node, lookup[atom]] not in classes.blocked]
        splittable = [atom for atom in lookup if not bound.factor(lookup[atom]).blocked]
        outputs = [atom for atom in splittable if lookup[atom] in present]
        rule = find_rule(main.node)
        picked = rule.owned if rule is not None else {}
        experts = [atom for atom in splittable if lookup[atom].split(".")[0] in picked]
        contracted = [atom for atom in splittable if lookup[atom] not in present and atom not in experts]
        batch = math.prod(bound.factor(factor).size for factor in main.batch)
        # 3. Make the op, named by its parameter for now.
        ordered = sorted(roles, key=lambda role: (info(role.node).backward, position[role.node]))
        loops = _preferred(outputs, free), _preferred(contracted, free), tuple(experts)
        op = Op(name, name, (), sizes, *loops, tuple(ordered), batch)
        taken |= {role.node for role in roles}
        found.append((first_use[name], op))
    found.sort(key=lambda item: item[0])
    return _with_companions(_by_module([op for _, op in found]), [at for at, _ in found], placeholders, first_use)


def _by_module(ops: Sequence[Op]) -> list[Op]:
    """Name each op by its module, if the module has no other op."""
    modules = [op.parameter.rpartition(".")[0] for op in ops]
    return [replace(op, name=name) if name and modules.count(name) == 1 else op for op, name in zip(ops, modules)]


def _preferred(atoms: Sequence[Atom], free: Sequence[Atom]) -> tuple[Atom, ...]:
    """The atoms that no op blocks; all of them if every one is blocked."""
    unblocked = tuple(atom for atom in atoms if atom in free)
    return unblocked or tuple(atoms)


def _with_companions(
    ops: Sequence[Op], first_node: Sequence[int], placeholders: dict[str, fx.Node], first_use: dict[str, int]
) -> list[Op]:
    """Make every other parameter a companion of the op of its module, else of the next op in the forward."""
    companions: dict[str, list[str]] = {op.name: [] for op in ops}
    own = {op.parameter for op in ops}
    modules = {op.parameter.rpartition(".")[0]: op.name for op in ops}
    for name in placeholders:
        if name in own or not ops:
            continue
        module = name.rpartition(".")[0]
        later = [op.name for op, at in zip(ops, first_node) if at > first_use[name]]
        companions[modules.get(module) or (later[0] if later else ops[-1].name)].append(name)
    return [replace(op, companions=tuple(companions[op.name])) for op in ops]


def _output_size(role: Role) -> int:
    """The elements that a node computes."""
    return sum(value.numel() for value in tensors(role.node.meta["val"]))


def users_through_views(node: fx.Node) -> list[fx.Node]:
    """The ops that read a value or a view of it."""
    found = []
    for user in node.users:
        found += users_through_views(user) if is_view(user) else [user] if user.op != "output" else []
    return found


def _gradient_nodes(captured: Captured) -> dict[str, fx.Node]:
    values = graph_outputs(captured.graph.graph)
    tail = values[len(values) - len(captured.gradients) :]
    return {name: value for name, value in zip(captured.gradients, tail) if isinstance(value, fx.Node)}


Labels = list[list[Atom | None]]
"""The atoms of the parameter in each dimension of a value; None of a loop that is no loop of the parameter."""


def _roles(
    parameter: fx.Node,
    gradient: fx.Node | None,
    classes: Classes,
    batches: frozenset[int],
    from_inputs: set[fx.Node],
    contracted_only: bool,
    joined: bool,
) -> list[Role]:
    """The nodes that contract the parameter or compute its gradient, and which of their factors are its atoms.

    The parameter may also be contracted after elementwise ops (a mask, fake quantization). Unless `contracted_only`,
    nodes that read it together with the batch count as well. With `joined`, other ops of parameters alone
    (`torch.cat`) may be between too: the loops that they keep are followed.
    """
    bound = info(parameter).rule
    assert bound is not None
    labels: Labels = [[(dim, index) for index in range(len(names))] for dim, names in enumerate(bound.outputs[0])]
    roles: dict[fx.Node, Role] = {}

    def add(node: fx.Node, dims: Sequence[Sequence[str]], meaning: Labels) -> None:
        rule, own = info(node).rule, find_rule(node)
        assert rule is not None and own is not None
        pairs = [pair for names, atoms in zip(dims, meaning) for pair in zip(names, atoms)]
        atoms = {atom: factor for factor, atom in pairs if atom is not None}
        rows = tuple(
            factor.name
            for factor in rule.factors
            if factor.name not in atoms.values()
            and classes.of[node, factor.name] in batches
            and not (factor.blocked and own.decompose is None)
        )
        roles.setdefault(node, Role(node, tuple(atoms.items()), rows))

    passed = {parameter}

    # 1. Forward from the parameter, through views and elementwise ops, to the ops that contract it.
    def forward(value: fx.Node, meaning: Labels, is_computed: bool = False) -> None:
        for user in value.users:
            rule = info(user).rule
            if user.op == "output" or rule is None:
                continue
            if is_view(user):
                forward(user, _through(rule.inputs[0], rule.outputs[0], meaning, others=joined), is_computed)
                continue
            if find_rule(user) is None:
                continue  # it is replicated on every device: there is nothing to decide
            for argument, dims in zip(tensor_args(user), rule.inputs):
                inside = {name for names in dims for name in names}
                outside = {name for output in rule.outputs for names in output for name in names}
                contracts = any(name not in outside for name in inside)
                if argument is not value or list(map(len, dims)) != list(map(len, meaning)):
                    continue
                reads_inputs = user in from_inputs  # a norm of the parameters, for one, does not
                # `torch.cat` sums over nothing: the loop that it drops is blocked.
                sums = any(name not in outside and not rule.factor(name).blocked for name in inside)
                if reads_inputs and (contracts or not contracted_only) or sums and not is_computed:
                    add(user, dims, meaning)
                elif dims == rule.outputs[0] and not reads_inputs and user not in passed:
                    passed.add(user)
                    forward(user, meaning, is_computed=True)
                elif joined and not reads_inputs and user not in passed and len(rule.outputs) == 1:
                    passed.add(user)
                    forward(user, _through(dims, rule.outputs[0], meaning, others=True), is_computed=True)

    # 2. Back from the gradient, through views and sums, to the ops that compute it.
    def back(value: fx.Node, meaning: Labels) -> None:
        rule = info(value).rule
        if value.op == "placeholder" or value.target is operator.getitem or rule is None or not rule.inputs:
            return  # an input, or a constant gradient
        if is_view(value):
            back(tensor_args(value)[0], _through(rule.outputs[0], rule.inputs[0], meaning))
        elif _sums(value):
            for argument in tensor_args(value):
                back(argument, meaning)
        elif find_rule(value) is not None and list(map(len, rule.outputs[0])) == list(map(len, meaning)):
            inside = {name for names in rule.outputs[0] for name in names}
            given = [{name for names in dims for name in names} for dims in rule.inputs]
            if not all(inside <= names for names in given) and roles:
                add(value, rule.outputs[0], meaning)

    forward(parameter, labels)
    if gradient is not None:
        back(gradient, labels)
    return list(roles.values())


def _sums(node: fx.Node) -> bool:
    rule = find_rule(node)
    return rule is not None and rule.kind == "sum" and len(tensor_args(node)) > 1


def _through(
    source: Sequence[Sequence[str]], target: Sequence[Sequence[str]], meaning: Labels, others: bool = False
) -> Labels:
    """The labels of what an op makes of a labelled value; unless `others`, without the loops that are not its own."""
    lookup = {name: atom for names, atoms in zip(source, meaning) for name, atom in zip(names, atoms)}
    return [[lookup.get(name) for name in names if others or name in lookup] for names in target]


def matches(pattern: str, op: Op) -> bool:
    """Whether a pattern names an op: by its module, a module around it, or its parameter."""
    return fnmatchcase(op.parameter, pattern) or covers(pattern, op.name)


def unmatched_pattern_error(option: str, pattern: str, ops: Sequence[Op]) -> PlanError:
    """The error for an option's pattern that matches no op: it names the op of a companion, or similar names."""
    companions = {companion: op.name for op in ops for companion in op.companions}
    for companion, owner in companions.items():
        if any(fnmatchcase(name, pattern) for name in (companion, companion.rpartition(".")[0])):
            return PlanError(
                f"{option}[{pattern!r}] matches no op of the model: {companion} is sharded as the op {owner} is, so "
                f"name {owner} instead. Modules that share a weight are one op, which has the name of the first of them"
            )
    names = [op.name for op in ops]
    near = difflib.get_close_matches(pattern, names, 3, 0.3) or names[:5]
    return PlanError(f"{option}[{pattern!r}] matches no op of the model; its ops are called {', '.join(near)}, ...")


def assign_column_row_forms(ops: Sequence[Op], classes: Classes, graph: fx.Graph, batch: int) -> list[Op]:
    """`ops`, in the order of the forward, each with its `Op.form`.

    An op without the batch (a table of positions) has no form: every system replicates it.
    """
    unsplit = classes.blocked | _streams(ops, classes, {node: at for at, node in enumerate(graph.nodes)})
    sharded: set[int] = set()
    found = []
    for op in ops:
        written, read = (_classes_of(op, atoms, classes) - unsplit for atoms in (op.outputs, op.contracted))
        if op.batch < 2 <= batch:
            found.append(op)
        elif written and not read & sharded:
            sharded |= written
            found.append(replace(op, form="column"))
        else:
            found.append(replace(op, form="row" if read else ""))
    return found


def _streams(ops: Sequence[Op], classes: Classes, position: Mapping[fx.Node, int]) -> frozenset[int]:
    """The loops that an op writes after another op has read them."""
    roles = sorted(((position[role.node], op.name, role) for op in ops for role in _forward(op)), key=lambda it: it[0])
    read: dict[int, set[str]] = defaultdict(set)
    streams: set[int] = set()
    for _, name, role in roles:
        bound = info(role.node).rule
        assert bound is not None
        present = {factor for dims in bound.outputs for factors in dims for factor in factors}
        for _, factor in role.atoms:
            number = classes.of[role.node, factor]
            if factor not in present:
                read[number].add(name)
            elif read[number] - {name}:
                streams.add(number)
    return frozenset(streams)


def _classes_of(op: Op, atoms: Iterable[Atom], classes: Classes) -> set[int]:
    """The classes of these atoms of the parameter in the op's largest product."""
    main = max(_forward(op), key=_output_size)
    factors = dict(main.atoms)
    return {classes.of[main.node, factors[atom]] for atom in atoms}


def _forward(op: Op) -> list[Role]:
    return [role for role in op.roles if not info(role.node).backward]


@dataclass(frozen=True)
class ColumnRowStrategies:
    """One strategy for columns, its counterpart for rows, and one for ops that have neither form or do not fit it.

    >>> found = ColumnRowStrategies.of(Grid(2, data=4), "zero1")
    >>> str(found.column), str(found.row), str(found.neither)
    ('(2, 1, 1, 4) ZeRO-1', '(1, 2, 1, 4) ZeRO-1', '(1, 1, 1, 8) ZeRO-1')
    """

    column: Strategy
    row: Strategy
    neither: Strategy

    @classmethod
    def of(cls, grid: Grid, word: str) -> ColumnRowStrategies:
        """`grid` is that of columns. Parameters are sharded over z, else as the preset `word` says."""
        rest, gradients, states = (grid.z,) * 3 if grid.z > 1 else preset_degrees(word, grid.data)
        column = Strategy(grid, rest, states=states, gradients=gradients)
        row = replace(column, grid=replace(grid, x=grid.y, y=grid.x), y_inside=True)
        # Data parallel over all devices: otherwise tensor parallel ranks would compute the same.
        rest, gradients, states = preset_degrees(word, grid.size)
        return cls(column, row, Strategy(Grid(data=grid.size), rest, states=states, gradients=gradients))

    def by_preference(self, op: Op) -> list[Strategy]:
        """The op's own form first, then data parallelism, then the other form."""
        forms = {"column": [self.column, self.row], "row": [self.row, self.column]}.get(op.form, [])
        return [*forms[:1], self.neither, *forms[1:]]
