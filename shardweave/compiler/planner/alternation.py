"""Alternation: which ops of a model tensor parallelism splits by columns, and which by rows.

Megatron-LM (arXiv 1909.08053) splits the first product of a branch by columns and the one that reads its result by
rows, so that values are spread inside of branches and whole between them; AxoNN (arXiv 2305.13525) swaps x and y in the
same places. That is found here from the loops of a model, not from names. The loop of a *stream*, which ops both read
and write one after another (the hidden size of a residual network), stays whole, as does one that some op cannot split.
An op that writes another loop is a column; one that reads what a column left spread, or a loop of its own (a
vocabulary's embedding), is a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from shardweave.compiler.planner.ops import Atom, Op, Role
from shardweave.compiler.planner.presets import at_rest
from shardweave.cost_model.graphs import tensors
from shardweave.ir import Grid, Strategy
from shardweave.passes.annotate import info
from shardweave.passes.classes import Classes


def with_forms(ops: Sequence[Op], classes: Classes, graph: fx.Graph, batch: int) -> list[Op]:
    """`ops`, in the order of the forward, each with its `Op.form`.

    An op without the batch (a table of positions) has none: every system computes it whole.
    """
    whole = classes.blocked | _streams(ops, classes, {node: at for at, node in enumerate(graph.nodes)})
    spread: set[int] = set()
    found = []
    for op in ops:
        written, read = (_classes_of(op, atoms, classes) - whole for atoms in (op.outputs, op.contracted))
        if op.batch < 2 <= batch:
            found.append(op)
        elif written and not read & spread:
            spread |= written
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
    """The loops that these atoms of the parameter are in the op's largest product."""
    main = max(_forward(op), key=lambda role: sum(value.numel() for value in tensors(role.node.meta["val"])))
    factors = dict(main.atoms)
    return {classes.of[main.node, factors[atom]] for atom in atoms}


def _forward(op: Op) -> list[Role]:
    return [role for role in op.roles if not info(role.node).backward]


@dataclass(frozen=True)
class Alternating:
    """One strategy for columns, its counterpart for rows, and one for what has no such form or does not fit it.

    >>> found = Alternating.of(Grid(2, data=4), "zero1")
    >>> str(found.column), str(found.row), str(found.neither)
    ('(2, 1, 1, 4) ZeRO-1', '(1, 2, 1, 4) ZeRO-1', '(1, 1, 1, 8) ZeRO-1')
    """

    column: Strategy
    row: Strategy
    neither: Strategy

    @classmethod
    def of(cls, grid: Grid, word: str) -> Alternating:
        """`grid` is a column's; its parameters rest over z, or as a preset's word says (`presets`)."""
        rest, gradients, states = (grid.z,) * 3 if grid.z > 1 else at_rest(word, grid.data)
        column = Strategy(grid, rest, states=states, gradients=gradients)
        row = replace(column, grid=replace(grid, x=grid.y, y=grid.x), y_inside=True)
        # Over all devices, as those of tensor parallelism would otherwise all do the same.
        rest, gradients, states = at_rest(word, grid.size)
        return cls(column, row, Strategy(Grid(data=grid.size), rest, states=states, gradients=gradients))

    def by_preference(self, op: Op) -> list[Strategy]:
        """The op's own form first, then data parallelism, then the other form."""
        forms = {"column": [self.column, self.row], "row": [self.row, self.column]}.get(op.form, [])
        return [*forms[:1], self.neither, *forms[1:]]
