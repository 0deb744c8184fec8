"""Elimination: exact minima of sums over a graph of ops, one op after the other, and the problem as arrays.

Tables
    The *figures* of a candidate, of a pair of ports or of a whole choice are one column of numbers: ticks, kept bytes
    and the load on each stream of each window. Figures add up; `Tables.ticks` says how long their sum takes.

Elimination
    Eliminating op v takes all terms that v is in (the costs of its candidates, its edges, results of earlier steps),
    adds them up over the states of v and of its remaining neighbours, and minimises over v. The result is a table
    over these neighbours (non-serial dynamic programming, Bertele and Brioschi 1972; min-sum variable elimination).
    The work is exponential in the number of neighbours only: on chains with residual edges these are two at any
    depth. A *state* of an op is a pair of ports that one of its candidates has. Ops are taken greedily by the
    smallest table, equal ops together, and the steps of equal layers are one *kind*, whose tables are computed once.

Groups of states
    Large tables are never made. A group of states costs what the cheapest of its members costs, alone and beside each
    other group. So the minimum over groups is never above the minimum over states, and equals it where it uses groups
    of one member alone. Where it uses larger groups, these are split, and the minimum is found again (coarse-to-fine
    dynamic programming, Raphael 2001). Most states are far from any minimum: of 300 layouts 20 to 40 are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardweave.planner.problem.problem import FORBIDDEN, TICKS_PER_SECOND, Candidate, Edge, Kept, Problem, to_ticks

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Thing = TypeVar("Thing")
Table = TypeVar("Table")

TICKS, KEPT, LOADS = 0, 1, 2
"""Rows of figures; those of the streams begin at `LOADS`."""


@dataclass(frozen=True, eq=False)
class OpFigures:
    """The candidates of equal ops: `figures` has one column each."""

    figures: Ints
    transient: Ints
    ins: Ints
    outs: Ints

    @classmethod
    def of(cls, candidates: Sequence[Candidate], streams: int) -> OpFigures:
        none = (0.0,) * streams
        sizes = np.array([(c.transient_bytes, c.in_port, c.out_port, c.kept_bytes) for c in candidates], dtype=np.int64)
        times = np.array([(c.seconds, *(c.loads or none)) for c in candidates])
        ticks = np.rint(times.T * TICKS_PER_SECOND).astype(np.int64)
        transient, ins, outs, kept = np.ascontiguousarray(sizes.T)
        return cls(np.vstack([ticks[:1], kept, ticks[1:]]), transient, ins, outs)


@dataclass(frozen=True, eq=False)
class EdgeFigures:
    """The pairs of ports of equal edges: `figures` over (figure, out port, in port), and which pairs are `allowed`."""

    figures: Ints
    allowed: Bools

    @classmethod
    def of(cls, edge: Edge, streams: int) -> EdgeFigures:
        allowed = edge.ticks != FORBIDDEN
        figures = np.zeros((LOADS + streams, *edge.ticks.shape), dtype=np.int64)
        figures[TICKS] = edge.ticks
        if edge.kept is not None:
            figures[KEPT] = edge.kept
        if edge.ticks_of_loads is not None:
            figures[LOADS:] = edge.ticks_of_loads
        return cls(np.where(allowed, figures, 0), allowed)


class Tables:
    """The arrays of one problem: `ops` and `edges` without repetition, `op_of` and `edge_of` say which is whose.

    Examples
    --------
    >>> from shardweave.planner.problem.problem import Op
    >>> op = Op("up", (Candidate("fast", 1.0, state_bytes=8, loads=(0.5, 2.0)),))
    >>> problem = Problem((op, op), windows=(("compute", "link"),))
    >>> tables = Tables(problem)
    >>> len(tables.ops), int(tables.ticks(tables.total((0, 0)))) == problem.ticks((0, 0))
    (1, True)
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        streams = problem.num_streams
        self.fixed, self.room = to_ticks(problem.fixed_seconds), problem.memory_limit - problem.fixed_bytes
        first = [LOADS, *(LOADS + int(end) for end in np.cumsum([len(names) for names in problem.windows]))]
        self.windows = [slice(*ends) for ends in pairwise(first) if ends[0] < ends[1]]
        """The rows of each window's streams."""
        self.streams = slice(LOADS, LOADS + streams)
        """The rows of all of them."""
        self.ops, self.op_of = _distinct(
            problem.ops,
            lambda op: id(op.candidates),
            lambda op: OpFigures.of(op.candidates, streams),
            lambda table: _content(table.figures, table.transient, table.ins, table.outs),
        )
        self.edges, self.edge_of = _distinct(
            problem.edges,
            lambda edge: (id(edge.seconds), id(edge.loads), id(edge.kept)),
            lambda edge: EdgeFigures.of(edge, streams),
            lambda table: _content(table.figures, table.allowed),
        )
        self.producers = np.array([edge.producer for edge in problem.edges], dtype=np.int64)
        self.consumers = np.array([edge.consumer for edge in problem.edges], dtype=np.int64)
        self.edges_at: list[list[int]] = [[] for _ in problem.ops]
        """For each op the numbers of its edges."""
        self.near: list[list[int]] = [[] for _ in problem.ops]
        """For each op the ops at the other ends of these."""
        for number, edge in enumerate(problem.edges):
            for op, other in ((edge.producer, edge.consumer), (edge.consumer, edge.producer)):
                self.edges_at[op].append(number)
                self.near[op].append(other)
        self.members = _members(self.op_of, len(self.ops))
        """The ops of each table."""
        self._edges_of = _members(self.edge_of, len(self.edges))
        self.rows = LOADS + streams
        """How many figures a column has."""

    def picked(self, choice: Sequence[int]) -> OpFigures:
        """What `choice` picks: one column an op."""
        own, count = np.asarray(choice, dtype=np.int64), len(self.op_of)
        figures = np.zeros((self.rows, count), dtype=np.int64)
        transient, ins, outs = (np.zeros(count, dtype=np.int64) for _ in range(3))
        for table, members in zip(self.ops, self.members, strict=True):
            mine = own[members]
            figures[:, members] = table.figures[:, mine]
            transient[members], ins[members], outs[members] = table.transient[mine], table.ins[mine], table.outs[mine]
        return OpFigures(figures, transient, ins, outs)

    def joined(self, outs: Ints, ins: Ints) -> tuple[Ints, Bools]:
        """The figures of all edges, one column an edge, and which are allowed, at these ports of their two ops."""
        figures = np.zeros((self.rows, len(self.edge_of)), dtype=np.int64)
        allowed = np.ones(len(self.edge_of), dtype=np.bool_)
        for table, members in zip(self.edges, self._edges_of, strict=True):
            at = outs[members], ins[members]
            figures[:, members] = table.figures[:, at[0], at[1]]
            allowed[members] = table.allowed[at]
        return figures, allowed

    def around(self, op: int, choice: Sequence[int]) -> tuple[Ints, Bools]:
        """The figures of the candidates of `op` with its edges, all other ops as in `choice`, and which are allowed."""
        own = self.ops[self.op_of[op]]
        figures, allowed = own.figures, np.ones(len(own.ins), dtype=np.bool_)
        for number in self.edges_at[op]:
            table, producer, consumer = self.edges[self.edge_of[number]], self.producers[number], self.consumers[number]
            outs = own.outs if producer == op else self.ops[self.op_of[producer]].outs[choice[producer]]
            ins = own.ins if consumer == op else self.ops[self.op_of[consumer]].ins[choice[consumer]]
            figures, allowed = figures + table.figures[:, outs, ins], allowed & table.allowed[outs, ins]
        return figures, allowed

    def sums(self, choice: Sequence[int]) -> tuple[Ints, bool]:
        """The figures of a choice, forbidden edges left out, and whether it has none."""
        picked = self.picked(choice)
        joined, allowed = self.joined(picked.outs[self.producers], picked.ins[self.consumers])
        return picked.figures.sum(axis=1) + joined.sum(axis=1), bool(allowed.all())

    def total(self, choice: Sequence[int]) -> Ints | None:
        """The figures of a choice; None where it puts two ports together that cannot be."""
        figures, allowed = self.sums(choice)
        return figures if allowed else None

    def seconds_and_bytes(self, choice: Sequence[int]) -> tuple[float, int]:
        """What `Problem.objective` and `Problem.memory` say of a choice, faster where many are asked for.

        >>> from shardweave.planner.problem.problem import Op
        >>> op = Op("up", (Candidate("fast", 1.0, state_bytes=8), Candidate("small", 1.5, state_bytes=4)))
        >>> Tables(Problem((op, op))).seconds_and_bytes((0, 1))
        (2.5, 12)
        """
        picked = self.picked(choice)
        joined, allowed = self.joined(picked.outs[self.producers], picked.ins[self.consumers])
        total = picked.figures.sum(axis=1) + joined.sum(axis=1)
        seconds = int(self.ticks(total)) / TICKS_PER_SECOND if allowed.all() else math.inf
        return seconds, self.problem.fixed_bytes + int(total[KEPT]) + int(picked.transient.max(initial=0))

    def least(self, kept: Kept) -> Ints:
        """Figures that no choice among the candidates `kept` of each op is below: the least ones of each op, summed up.

        >>> from shardweave.planner.problem.problem import Op
        >>> op = Op("up", (Candidate("fast", 1.0, state_bytes=8), Candidate("small", 1.5, state_bytes=4)))
        >>> tables = Tables(Problem((op, op)))
        >>> int(tables.least(((0, 1), (0, 1)))[KEPT]), int(tables.least(((0,), (0, 1)))[KEPT])
        (8, 12)
        """
        known: dict[tuple[int, int], Ints] = {}  # equal layers share both
        total = np.zeros(self.rows, dtype=np.int64)
        for table, indices in zip(self.op_of, kept, strict=True):
            key = table, id(indices)
            if key not in known:
                known[key] = self.ops[table].figures[:, list(indices)].min(axis=1)
            total += known[key]
        return total

    def ticks(self, figures: Ints) -> Ints:
        """The time of whole choices with these figures (the first axis): each window as long as its busiest stream."""
        return self.fixed + self.time(figures)

    def time(self, figures: Ints) -> Ints:
        """The same without what every choice takes.

        Of two differences it is the more that one can take: ``time(a) <= time(b) + time(a - b)``.
        """
        total = figures[TICKS]
        for rows in self.windows:
            total = total + figures[rows].max(axis=0)
        return np.asarray(total)


def _content(*arrays: NDArray[np.int64] | Bools) -> Hashable:
    return tuple((array.shape, array.tobytes()) for array in arrays)


def _distinct(
    things: Iterable[Thing],
    identity: Callable[[Thing], Hashable],
    make: Callable[[Thing], Table],
    content: Callable[[Table], Hashable],
) -> tuple[list[Table], list[int]]:
    """The different tables of `things`, and which is whose; `identity` saves the making of most."""
    found: list[Table] = []
    known: dict[Hashable, int] = {}
    same: dict[Hashable, int] = {}
    numbers = []
    for thing in things:
        key = identity(thing)
        if key not in same:
            table = make(thing)
            same[key] = known.setdefault(content(table), len(found))
            if same[key] == len(found):
                found.append(table)
        numbers.append(same[key])
    return found, numbers


def _members(numbers: list[int], count: int) -> list[Ints]:
    array = np.array(numbers, dtype=np.int64)
    return [np.flatnonzero(array == number) for number in range(count)]


_MIN_STATES = 2
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
        return math.prod(max(_MIN_STATES, states[op]) for op in ops)

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

_SPLIT_RATIO = 4
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
                first = -(-len(own) // _SPLIT_RATIO)
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


_MAX_TABLE_ENTRIES = 2**30
"""Entries of a step's table, beyond which a graph is too wide for elimination."""

_MAX_FULL_TABLE_ENTRIES = 2**18
"""Entries up to which a minimum makes all steps' tables as they are."""

_MAX_WALKED_ENTRIES = 2**22
"""Entries up to which all tables are made for reduced costs."""


@dataclass(frozen=True, eq=False)
class OpTable:
    """The candidates of equal ops as columns, ordered by their state; `starts` has each state's first candidate."""

    order: Ints
    figures: Floats
    transient: Floats
    starts: Ints
    ports: Ints

    @classmethod
    def of(cls, op: OpFigures) -> OpTable:
        order = np.lexsort((op.figures[0], op.outs, op.ins))
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

    def __init__(self, tables: Tables) -> None:
        self.problem, self.tables = tables.problem, tables
        nothing = OpFigures.of((Candidate("", 0.0),), tables.rows - LOADS)
        # A last op without costs takes up what the graph's components leave.
        self.ops = [OpTable.of(op) for op in (*tables.ops, nothing)]
        self.op_of = [*tables.op_of, len(self.ops) - 1]
        self.edges: list[EdgeTable] = []
        self.kinds: list[Kind] = []
        self.steps: list[Step] = []
        self.edge_of = self._edge_tables()
        self.too_wide = not self._eliminate()

    @classmethod
    def of(cls, problem: Problem) -> Elimination | None:
        """The elimination of `problem`; None where its graph is too wide."""
        elimination = cls(Tables(problem))
        return None if elimination.too_wide else elimination

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
        order = ordered([set(ops) for ops in self.tables.near], states[:last], self._roles(), _MAX_TABLE_ENTRIES)
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
        return self.size > _MAX_WALKED_ENTRIES

    def minimum(self, weights: Floats, cap: float = math.inf) -> Minimum | None:
        """The choice of least weighed figures, of candidates with no transient above `cap`; None if none.

        Of graphs with large tables the minimum has no `least`: `whole` makes them.
        """
        found = self._weighed(weights, cap)
        if self.size <= _MAX_FULL_TABLE_ENTRIES:
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

    def reduced_costs(self, found: Minimum) -> list[Floats]:
        """For each op what the best choice with each of its candidates costs more than the minimum."""
        minimum = self.whole(found)
        of_states: list[Floats] = []
        for kind, outside in zip(self.kinds, self.outside(minimum), strict=True):
            joint = self.joint(kind, minimum) + outside[None]
            of_states.append(joint.reshape(len(joint), -1).min(axis=1) - minimum.value)
        costs: list[Floats] = [np.zeros(0)] * len(self.steps)
        known: dict[int, Floats] = {}
        for step in self.steps:
            if step.kind not in known:
                number = self.kinds[step.kind].ops[0]
                table, cost = self.ops[number], minimum.costs[number]
                state = np.repeat(np.arange(table.states), table.ends() - table.starts)
                least = np.where(minimum.states[number] < np.inf, minimum.states[number], 0.0)
                known[step.kind] = np.empty(len(cost))
                known[step.kind][table.order] = of_states[step.kind][state] + (cost - least[state])
            costs[step.op] = known[step.kind]
        return costs[:-1]

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
