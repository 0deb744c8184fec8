"""Minimal sums over a graph of ops, exactly, by eliminating one op after the other.

Eliminating op v takes all terms that v is in (its own candidates' costs, its edges, results of earlier steps), adds
them up over the states of v and of its remaining neighbours, and minimises over v; what is left is a table over these
neighbours (non-serial dynamic programming, Bertele and Brioschi 1972; min-sum variable elimination). Its work is
exponential in the neighbours at hand only: on chains with residual edges these are two, whatever the depth. A
*state* of an op is a pair of ports that one of its candidates has: all that its neighbours see of it.

The steps of equal layers are of one *kind*: their tables are computed once (`ordering` keeps them in step). Large
tables are never made: `groups` gets the same minima out of smaller ones.

The order in which `Elimination` takes the ops: greedily what leaves the smallest table, equal ops together.

Minima over large tables out of small ones: states in groups, coarse to fine.

A group of states costs what the cheapest of its members does, alone and beside each other group. So the minimum over
groups is never above the minimum over states, and is equal to it where it goes through groups of one member alone.
Where it goes through larger ones, these are split, and it is looked for again (coarse-to-fine dynamic programming,
Raphael 2001). Most states are far from any minimum and stay together: of 300 layouts 20 to 40 are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardweave.planner.problem.problem import Candidate, Problem
from shardweave.planner.solver.tables import LOADS, Bools, EdgeFigures, Ints, OpFigures, Tables

_FEWEST = 2
"""States that an op counts as at least: arrays have a limit of axes, too."""


def ordered(near: Sequence[set[int]], states: Sequence[int], roles: Sequence[int], largest: int) -> list[int] | None:
    """All ops in order; None where a step's table would have more than `largest` entries.

    Ops of one role go together but for neighbours, so that the steps of equal layers are equal, too. Where nothing
    but a chain of them is left, or a ring as a tied weight makes it, every second one goes. Those that would leave
    more than the one in the middle wait, as ops at the ends of a model may.

    Parameters
    ----------
    near : sequence of sets of int
        Each op's neighbours; used up.
    states : sequence of int
        How many states each op has.
    roles : sequence of int
        For each op a number, the same for equal ones in equal surroundings.
    largest : int

    Examples
    --------
    >>> ordered([{1}, {0, 2}, {1, 3}, {2, 4}, {3}], states=[2] * 5, roles=[0, 1, 0, 1, 0], largest=8)
    [0, 2, 4, 3, 1]
    """
    equal: dict[int, list[int]] = {}
    for op, role in enumerate(roles):
        equal.setdefault(role, []).append(op)

    def entries(ops: Iterable[int]) -> int:
        return math.prod(max(_FEWEST, states[op]) for op in ops)

    def result(members: Sequence[int]) -> int:
        """What the op in the middle leaves; those at the ends of a model have other neighbours."""
        return entries(near[members[len(members) // 2]])

    order: list[int] = []
    while equal:
        role = min(equal, key=lambda role: (result(equal[role]), role))
        left: list[int] = []
        most, ops = result(equal[role]), equal.pop(role)
        # The first of a chain has another neighbour: it goes last, so that all others of the chain are equal
        changed: set[int] = set() if near[ops[0]].isdisjoint(ops) else {ops[0]}
        for op in ops:
            if op in changed or entries(near[op]) > most:
                left.append(op)
                continue
            if entries((op, *near[op])) > largest:
                return None
            changed |= near[op]
            order.append(op)
            join(near, op)
        if left:
            equal[role] = left
    return order


def join(near: Sequence[set[int]], op: int) -> None:
    """Make neighbours of all that `op` leaves behind."""
    for other in near[op]:
        near[other] |= near[op]
        near[other] -= {op, other}


Floats = NDArray[np.float64]
Solve = Callable[["Minimum"], tuple[float, list[int]]]

_SPLIT = 4
"""A group is split into the part of its members that seem cheapest, one in so many, and the others."""


class Groups:
    """The groups of each table of ops, which only get smaller from one minimum to the next.

    Parameters
    ----------
    states : sequence of int
        Each table's number of states.
    op_of : sequence of int
        Each op's table.
    ends : sequence of (int, int)
        The tables of the ops at each edge table's two ends.
    around : sequence of sequences of (int, int, bool)
        For each op: its edges' tables, the ops at their other ends, and whether it is their producer.
    """

    def __init__(
        self,
        states: Sequence[int],
        op_of: Sequence[int],
        ends: Sequence[tuple[int, int]],
        around: Sequence[Sequence[tuple[int, int, bool]]],
    ) -> None:
        self.op_of, self.ends, self.around = op_of, ends, around
        self.members: list[list[Ints]] = [[np.arange(count)] for count in states]

    def least(self, found: Minimum, solve: Solve) -> tuple[float, list[int]]:
        """The least sum over states, and the state of each op, from `solve`, which finds both in tables of any size."""
        while True:
            value, groups = solve(self._coarse(found))
            if value == math.inf or not self._split(found, groups):
                members = [self.members[table][group] for table, group in zip(self.op_of, groups, strict=True)]
                return value, [int(own[0]) for own in members]

    def _coarse(self, found: Minimum) -> Minimum:
        """What groups cost, alone and beside each other."""
        orders = [np.concatenate(members) for members in self.members]
        starts = [np.cumsum([0, *map(len, members[:-1])]) for members in self.members]
        states = [np.minimum.reduceat(costs[order], start) for costs, order, start in zip(found.states, orders, starts)]
        edges = []
        for costs, (producer, consumer) in zip(found.edges, self.ends, strict=True):
            rows = np.minimum.reduceat(costs[orders[producer]], starts[producer], axis=0)
            edges.append(np.minimum.reduceat(rows[:, orders[consumer]], starts[consumer], axis=1))
        return replace(found, states=states, edges=edges, least=[])

    def _split(self, found: Minimum, groups: Sequence[int]) -> bool:
        """Split the groups of several members that a choice goes through; whether there are any."""
        split: dict[tuple[int, int], list[Ints]] = {}
        for op, (table, group) in enumerate(zip(self.op_of, groups, strict=True)):
            own = self.members[table][group]
            if len(own) > 1 and (table, group) not in split:
                order = own[np.argsort(self._seem(found, op, own, groups), kind="stable")]
                first = -(-len(own) // _SPLIT)
                split[table, group] = [np.sort(order[:first]), np.sort(order[first:])]
        for (table, group), parts in sorted(split.items(), reverse=True):
            self.members[table][group : group + 1] = parts
        return bool(split)

    def _seem(self, found: Minimum, op: int, own: Ints, groups: Sequence[int]) -> Floats:
        """What members cost an op at least while its neighbours are in these groups."""
        total = found.states[self.op_of[op]][own]
        for edge, other, produces in self.around[op]:
            costs = found.edges[edge] if produces else found.edges[edge].T
            beside = self.members[self.op_of[other]][groups[other]]
            total = total + costs[np.ix_(own, beside)].min(axis=1)
        return np.asarray(total)


_LARGEST_TABLE = 2**30
"""Entries of a step's table, beyond which a graph is too wide for elimination."""

_WHOLE = 2**18
"""Entries up to which a minimum makes all steps' tables as they are."""

_WALKED = 2**22
"""Entries up to which tables are made to walk through choices."""


@dataclass(frozen=True, eq=False)
class OpTable:
    """The candidates of equal ops as columns, ordered by their state; `starts` has each state's first candidate."""

    order: Ints
    figures: Floats
    transient: Floats
    starts: Ints
    ports: Ints

    @classmethod
    def of(cls, op: OpFigures, allowed: Bools | None = None) -> OpTable:
        order = np.lexsort((op.figures[0], op.outs, op.ins))
        order = order if allowed is None else order[allowed[order]]
        ports, starts = np.unique(np.stack([op.ins, op.outs])[:, order], axis=1, return_index=True)
        figures, transient = op.figures[:, order].astype(np.float64), op.transient[order].astype(np.float64)
        return cls(order, figures, transient, starts, ports.T)

    @property
    def states(self) -> int:
        return len(self.starts)

    def ends(self) -> Ints:
        return np.append(self.starts[1:], len(self.order))


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """The figures of an edge between two tables' states, and which it forbids."""

    figures: Floats
    forbidden: Bools

    @classmethod
    def of(cls, edge: EdgeFigures, producer: OpTable, consumer: OpTable) -> EdgeTable:
        at = np.ix_(producer.ports[:, 1], consumer.ports[:, 0])
        figures = np.stack([row[at] for row in edge.figures]).astype(np.float64)
        return cls(figures, ~edge.allowed[at])


def weigh(figures: Floats, weights: Floats) -> Floats:
    """One number for each column of figures; the weighed ones are rounded down, so that sums of numbers are exact."""
    return np.asarray(weights[0] * figures[0] + np.floor(np.tensordot(weights[1:], figures[1:], axes=1)))


@dataclass(frozen=True)
class Term:
    """A table that a step adds, and which of the step's axes (0: its op, then its scope) the table's axes are."""

    table: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """What equal steps compute: their axes' sizes and tables of ops, the edges' tables, the earlier results' kinds."""

    shape: tuple[int, ...]
    ops: tuple[int, ...]
    edges: tuple[Term, ...]
    earlier: tuple[Term, ...]


@dataclass(frozen=True)
class Step:
    """The elimination of `op`: its result depends on the ops of `scope`; it takes up the results of steps `earlier`."""

    op: int
    scope: tuple[int, ...]
    earlier: tuple[int, ...]
    kind: int


@dataclass(frozen=True, eq=False)
class Minimum:
    """The least sum at some weights, and what it was made of.

    `choice` has it; `costs` is what each candidate of each table costs, `states` the least of each state, `edges` what
    the pairs of states cost, `least` for each kind the least sum of what it took up.
    """

    value: float
    choice: tuple[int, ...]
    costs: list[Floats]
    states: list[Floats]
    edges: list[Floats]
    least: list[Floats]


class Elimination:
    """The steps for one problem. They depend on its graph and its tables, not on its memory limit.

    Examples
    --------
    >>> from shardweave.planner.problem.problem import Edge, Op
    >>> up, down = Candidate("up", 1.0), Candidate("down", 1.0, in_port=1)
    >>> problem = Problem((Op("a", (up,)), Op("b", (up, down))), (Edge(0, 1, np.array([[0.5, 0.25]])),))
    >>> elimination = Elimination.of(problem)
    >>> elimination.minimum(np.array([1.0, 0.0])).choice
    (0, 1)
    """

    def __init__(self, tables: Tables, allowed: Mapping[int, Bools]) -> None:
        self.problem, self.tables, self.allowed = tables.problem, tables, allowed
        nothing = OpFigures.of((Candidate("", 0.0),), tables.rows - LOADS)
        # A last op without costs takes up what the graph's components leave.
        self.ops = [OpTable.of(op) for op in (*tables.ops, nothing)]
        self.op_of = [*tables.op_of, len(self.ops) - 1]
        for op, own in allowed.items():
            self.ops.append(OpTable.of(tables.ops[tables.op_of[op]], own))
            self.op_of[op] = len(self.ops) - 1
        self.edges: list[EdgeTable] = []
        self.kinds: list[Kind] = []
        self.steps: list[Step] = []
        self.edge_of = self._edge_tables()
        self.too_wide = not self._eliminate()

    @classmethod
    def of(cls, problem: Problem) -> Elimination | None:
        """The elimination of `problem`; None where its graph is too wide."""
        elimination = cls(Tables(problem), {})
        return None if elimination.too_wide else elimination

    def restricted(self, op: int, allowed: Bools) -> Elimination:
        """The same with only these candidates of one op, of those that it still has."""
        own = allowed & self.allowed[op] if op in self.allowed else allowed
        return Elimination(self.tables, {**self.allowed, op: own})

    def counting(self, table: int, counts: Ints, most: int) -> Elimination:
        """The same where what equal ops count, by their candidate, comes to at most so much."""
        return Elimination(self.tables.counting(table, counts, most), self.allowed)

    def allows(self, choice: Sequence[int]) -> bool:
        """Whether it has all candidates of a choice."""
        return all(own[choice[op]] for op, own in self.allowed.items())

    def _edge_tables(self) -> list[int]:
        known: dict[tuple[int, int, int], int] = {}
        for edge, number in zip(self.problem.edges, self.tables.edge_of, strict=True):
            key = number, self.op_of[edge.producer], self.op_of[edge.consumer]
            if key not in known:
                known[key] = len(self.edges)
                self.edges.append(EdgeTable.of(self.tables.edges[number], self.ops[key[1]], self.ops[key[2]]))
        return [
            known[number, self.op_of[edge.producer], self.op_of[edge.consumer]]
            for edge, number in zip(self.problem.edges, self.tables.edge_of, strict=True)
        ]

    def _eliminate(self) -> bool:
        """One step for each op; False where a table grows too large."""
        last = len(self.problem.ops)
        states = [self.ops[own].states for own in self.op_of]
        order = ordered([set(ops) for ops in self.tables.near], states[:last], self._roles(), _LARGEST_TABLE)
        if order is None:
            return False
        near, left_edges = ([set(at) for at in (*own, ())] for own in (self.tables.near, self.tables.edges_at))
        waiting: list[set[int]] = [set() for _ in range(last + 1)]
        known: dict[Kind, int] = {}
        for number, op in enumerate([*order, last]):
            # The last axis is the longest, along which numpy adds fastest
            scope = tuple(sorted(near[op], key=lambda other: (states[other], other)))
            edges = left_edges[op]
            axis = {other: place for place, other in enumerate((op, *scope))}
            earlier = tuple(sorted(waiting[op]))
            kind = Kind(
                tuple(states[other] for other in axis),
                tuple(self.op_of[other] for other in axis),
                tuple(sorted((Term(self.edge_of[n], (axis[self.problem.edges[n].producer],
                                                    axis[self.problem.edges[n].consumer])) for n in edges),
                             key=lambda term: (term.axes, term.table))),
                tuple(Term(self.steps[n].kind, tuple(axis[other] for other in self.steps[n].scope)) for n in earlier),
            )  # fmt: skip
            if kind not in known:
                known[kind] = len(self.kinds)
                self.kinds.append(kind)
            self.steps.append(Step(op, scope, earlier, known[kind]))
            for other in scope:
                waiting[other] -= set(earlier)
                waiting[other].add(number)
                left_edges[other] -= edges
            join(near, op)
            if not scope:
                waiting[last].add(number)
        return True

    def _roles(self) -> list[int]:
        """For each op a number, the same for those whose tables, edges and neighbours are equal."""
        sides: list[list[tuple[int, int, int]]] = [[] for _ in self.problem.ops]
        for number, edge in zip(self.edge_of, self.problem.edges, strict=True):
            sides[edge.producer].append((number, 0, self.op_of[edge.consumer]))
            sides[edge.consumer].append((number, 1, self.op_of[edge.producer]))
        known: dict[object, int] = {}
        return [known.setdefault((own, *sorted(at)), len(known)) for own, at in zip(self.op_of, sides)]

    # -- sums

    @cached_property
    def size(self) -> int:
        """Entries of the largest step's table."""
        return max(math.prod(kind.shape) for kind in self.kinds)

    @property
    def too_large(self) -> bool:
        """Whether its tables would take too much time and memory to make them `whole`."""
        return self.size > _WALKED

    def minimum(self, weights: Floats, cap: float = math.inf) -> Minimum | None:
        """The choice of least weighed figures, of candidates with no transient above `cap`; None if none.

        Of graphs with large tables the minimum has no `least`: `whole` makes them.
        """
        found = self._weighed(weights, cap)
        if self.size <= _WHOLE:
            value, states = self._least(found)
        else:
            value, states = self._groups.least(found, self._least)
            found = replace(found, least=[])
        return replace(found, value=value, choice=self._choice(found, states)) if value < math.inf else None

    def whole(self, found: Minimum) -> Minimum:
        """The same minimum with all tables."""
        if not found.least:
            found = replace(found, least=[])
            self._least(found)
        return found

    @cached_property
    def _groups(self) -> Groups:
        ends = [(0, 0)] * len(self.edges)
        for number, edge in zip(self.edge_of, self.problem.edges, strict=True):
            ends[number] = self.op_of[edge.producer], self.op_of[edge.consumer]
        around = [[(self.edge_of[edge], other, self.tables.producers[edge] == op)
                   for edge, other in zip(self.tables.edges_at[op], self.tables.near[op], strict=True)]
                  for op in range(len(self.problem.ops))]  # fmt: skip
        return Groups([table.states for table in self.ops], self.op_of[:-1], ends, around)

    def _weighed(self, weights: Floats, cap: float) -> Minimum:
        """What candidates, states and edges cost."""
        costs = [np.where(table.transient <= cap, weigh(table.figures, weights), np.inf) for table in self.ops]
        states = [np.minimum.reduceat(cost, table.starts) for cost, table in zip(costs, self.ops, strict=True)]
        edges = [np.where(table.forbidden, np.inf, weigh(table.figures, weights)) for table in self.edges]
        return Minimum(math.inf, (), costs, states, edges, [])

    def _least(self, found: Minimum) -> tuple[float, list[int]]:
        """The least sum and a state for each op, all steps' tables going into ``found.least``."""
        sizes = [math.prod(self._shape(kind, found)) for kind in self.kinds]
        memory = np.empty(max(sizes))
        for kind, size in zip(self.kinds, sizes, strict=True):
            sums = memory[:size].reshape(self._shape(kind, found))
            found.least.append(self.joint(kind, found, out=sums).min(axis=0))
        return float(found.least[self.steps[-1].kind]), self._states(found)

    def _states(self, found: Minimum) -> list[int]:
        """One state an op, from the last step back to the first; equal steps choose alike."""
        states, known = [0] * len(self.op_of), dict[tuple[int, ...], int]()
        for step in reversed(self.steps):
            scope = [states[other] for other in step.scope]
            key = step.kind, *scope
            if key not in known:
                kind = self.kinds[step.kind]
                total = found.states[kind.ops[0]]
                for table, axes in self._terms(kind, found):
                    total = total + table[tuple(scope[axis - 1] if axis else slice(None) for axis in axes)]
                known[key] = int(total.argmin())
            states[step.op] = known[key]
        return states[:-1]

    def _choice(self, found: Minimum, states: Sequence[int]) -> tuple[int, ...]:
        """The candidates that cost least in their states."""
        firsts = [
            [int(table.order[first + cost[first:end].argmin()]) for first, end in zip(table.starts, table.ends())]
            for table, cost in zip(self.ops, found.costs, strict=True)
        ]
        return tuple(firsts[op][state] for op, state in zip(self.op_of[:-1], states))

    @staticmethod
    def _shape(kind: Kind, found: Minimum) -> tuple[int, ...]:
        return tuple(len(found.states[op]) for op in kind.ops)

    def _terms(self, kind: Kind, found: Minimum, without: int | None = None) -> list[tuple[Floats, tuple[int, ...]]]:
        """The tables that a step adds, with their axes."""
        earlier = [term for number, term in enumerate(kind.earlier) if number != without]
        terms = [(found.edges[term.table], term.axes) for term in kind.edges]
        return terms + [(found.least[term.table], term.axes) for term in earlier]

    def joint(self, kind: Kind, found: Minimum, without: int | None = None, out: Floats | None = None) -> Floats:
        """All that a step of this kind adds up, over its op's and its scope's states, `without` one earlier result.

        It may be made in `out`: memory that was in use before takes less time than fresh pages do.
        """
        shape = self._shape(kind, found)
        ndim = len(shape)
        total, spanned = spread(found.states[kind.ops[0]], (0,), ndim), {0}
        for table, axes in sorted(self._terms(kind, found, without), key=lambda term: max(term[1], default=0)):
            spanned.update(axes)
            total = np.add(total, spread(table, axes, ndim), out=out if len(spanned) == ndim else None)
        return total if total.shape == shape else np.broadcast_to(total, shape)

    def outside(self, minimum: Minimum) -> list[Floats]:
        """For each kind, over its scope: the least that all the rest costs, of all steps of the kind.

        `minimum` is a `whole` one.
        """
        ndim = [len(kind.shape) for kind in self.kinds]
        rests: dict[tuple[int, int], Floats] = {}
        steps: list[Floats] = [np.zeros(())] * len(self.steps)
        found: list[Floats] = [np.full(kind.shape[1:], np.inf) for kind in self.kinds]
        for number in reversed(range(len(self.steps))):
            step = self.steps[number]
            mine = steps[number]
            found[step.kind] = np.minimum(found[step.kind], mine)
            kind = self.kinds[step.kind]
            for place, (other, term) in enumerate(zip(step.earlier, kind.earlier, strict=True)):
                key = step.kind, place
                if key not in rests:
                    rests[key] = self.joint(kind, minimum, place)
                total = rests[key] + mine[None]
                kept = total.min(axis=tuple(axis for axis in range(ndim[step.kind]) if axis not in term.axes))
                steps[other] = np.transpose(kept, np.argsort(np.argsort(term.axes)))
        return found


def spread(table: Floats, axes: tuple[int, ...], ndim: int) -> Floats:
    """`table` as a view that broadcasts over `ndim` axes, its own axes lying at `axes`."""
    order = np.argsort(axes)
    shape = [1] * ndim
    for axis, size in zip(axes, table.shape, strict=True):
        shape[axis] = size
    return table.transpose(order).reshape(shape)
