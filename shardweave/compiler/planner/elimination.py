"""Minimal sums over a graph of ops, exactly, by eliminating one op after the other.

Eliminating op v takes all terms that v is in (its own candidates' costs, its edges, results of earlier steps), adds
them up over the states of v and of its remaining neighbours, and minimises over v; what is left is a table over these
neighbours (non-serial dynamic programming, Bertele and Brioschi 1972; min-sum variable elimination). Its work is
exponential in the neighbours at hand only: on chains with residual edges these are two, whatever the depth. A
*state* of an op is a pair of ports that one of its candidates has: all that its neighbours see of it.

The steps of equal layers are of one *kind*: their tables are computed once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardweave.compiler.planner.problem import FORBIDDEN, Candidate, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LARGEST_TABLE = 2**22
"""Entries of a step's table, beyond which a graph is too wide for elimination."""


@dataclass(frozen=True, eq=False)
class OpTable:
    """The candidates of equal ops as columns, ordered by their state; `starts` has each state's first candidate."""

    order: Ints
    ticks: Floats
    kept: Floats
    transient: Floats
    starts: Ints
    ports: Ints

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> OpTable:
        figures = np.array(
            [(c.in_port, c.out_port, c.ticks, c.kept_bytes, c.transient_bytes) for c in candidates], dtype=np.int64
        )
        order = np.lexsort((figures[:, 2], figures[:, 1], figures[:, 0]))
        ports, starts = np.unique(figures[order, :2], axis=0, return_index=True)
        ticks, kept, transient = (figures[order, column].astype(np.float64) for column in (2, 3, 4))
        return cls(order, ticks, kept, transient, starts, ports)

    @property
    def states(self) -> int:
        return len(self.starts)

    def ends(self) -> Ints:
        return np.append(self.starts[1:], len(self.order))


_NOTHING = OpTable.of([Candidate("", 0.0)])


@dataclass(frozen=True)
class Term:
    """A table that a step adds, and which of the step's axes (0: its op, then its scope) the table's axes are."""

    table: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """What equal steps compute: sizes of their axes, the op's table, the edges' tables, the earlier results' kinds."""

    shape: tuple[int, ...]
    op: int
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
    """The least sum, a choice that has it, and for each kind the least sum of what it took up (`least`)."""

    value: float
    choice: tuple[int, ...]
    costs: tuple[Floats, ...]
    states: tuple[Floats, ...]
    least: tuple[Floats, ...]
    with_edges: bool


class Elimination:
    """The steps for one problem. They depend on its graph and its tables, not on its memory limit.

    Examples
    --------
    >>> from shardweave.compiler.planner.problem import Edge, Op
    >>> up, down = Candidate("up", 1.0), Candidate("down", 1.0, in_port=1)
    >>> problem = Problem((Op("a", (up,)), Op("b", (up, down))), (Edge(0, 1, np.array([[0.5, 0.25]])),))
    >>> elimination = Elimination.of(problem)
    >>> elimination.minimum([table.ticks for table in elimination.ops]).choice
    (0, 1)
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.ops: list[OpTable] = []
        self.op_of = [*self._op_tables(), len(self.ops)]
        self.ops.append(_NOTHING)  # a last op without costs takes up what the graph's components leave
        self.tables: list[Floats] = []
        self.kinds: list[Kind] = []
        self.steps: list[Step] = []
        self.edge_tables = self._edge_tables()
        self.too_wide = not self._eliminate()

    @classmethod
    def of(cls, problem: Problem) -> Elimination | None:
        """The elimination of `problem`; None where its graph is too wide."""
        elimination = cls(problem)
        return None if elimination.too_wide else elimination

    def _op_tables(self) -> list[int]:
        known: dict[object, int] = {}
        same: dict[int, int] = {}
        for op in self.problem.ops:
            if id(op.candidates) not in same:
                table = OpTable.of(op.candidates)
                key = tuple(
                    column.tobytes() for column in (table.order, table.ticks, table.kept, table.transient, table.ports)
                )
                if key not in known:
                    known[key] = len(self.ops)
                    self.ops.append(table)
                same[id(op.candidates)] = known[key]
        return [same[id(op.candidates)] for op in self.problem.ops]

    def _edge_tables(self) -> list[int]:
        known: dict[object, int] = {}
        found = []
        for edge in self.problem.edges:
            ends = self.op_of[edge.producer], self.op_of[edge.consumer]
            key = (id(edge.seconds), *ends)
            if key not in known:
                ticks = edge.ticks[np.ix_(self.ops[ends[0]].ports[:, 1], self.ops[ends[1]].ports[:, 0])]
                same = (ticks.shape, ticks.tobytes())
                if same not in known:
                    known[same] = len(self.tables)
                    self.tables.append(np.where(ticks == FORBIDDEN, np.inf, ticks.astype(np.float64)))
                known[key] = known[same]
            found.append(known[key])
        return found

    def _eliminate(self) -> bool:
        """Put the ops in order, the smallest table first; False where a table grows too large."""
        last = len(self.problem.ops)
        near: list[set[int]] = [set() for _ in range(last)]
        for edge in self.problem.edges:
            near[edge.producer].add(edge.consumer)
            near[edge.consumer].add(edge.producer)
        left_edges = self._edge_numbers()
        waiting: list[set[int]] = [set() for _ in range(last + 1)]
        known: dict[Kind, int] = {}

        def size(op: int) -> int:
            return math.prod(self.ops[self.op_of[other]].states for other in (op, *near[op]))

        heap = [(size(op), op) for op in range(last)]
        heapq.heapify(heap)
        done = [False] * last
        near.append(set())
        left_edges.append(set())
        while len(self.steps) <= last:
            op = last
            if len(self.steps) < last:
                entries, op = heapq.heappop(heap)
                if done[op] or entries != size(op):
                    continue
                if entries > _LARGEST_TABLE:
                    return False
                done[op] = True
            scope, edges = tuple(sorted(near[op])), left_edges[op]
            axis = {other: place for place, other in enumerate((op, *scope))}
            earlier = tuple(sorted(waiting[op]))
            kind = Kind(
                tuple(self.ops[self.op_of[other]].states for other in (op, *scope)),
                self.op_of[op],
                tuple(sorted((Term(self.edge_tables[n], (axis[self.problem.edges[n].producer],
                                                    axis[self.problem.edges[n].consumer])) for n in edges),
                             key=lambda term: (term.axes, term.table))),
                tuple(Term(self.steps[n].kind, tuple(axis[other] for other in self.steps[n].scope)) for n in earlier),
            )  # fmt: skip
            if kind not in known:
                known[kind] = len(self.kinds)
                self.kinds.append(kind)
            number = len(self.steps)
            self.steps.append(Step(op, scope, earlier, known[kind]))
            for other in scope:
                waiting[other] -= set(earlier)
                waiting[other].add(number)
                left_edges[other] -= edges
                near[other] |= set(scope)
                near[other] -= {op, other}
            for other in scope:
                heapq.heappush(heap, (size(other), other))
            if not scope:
                waiting[last].add(number)
        return True

    def _edge_numbers(self) -> list[set[int]]:
        found: list[set[int]] = [set() for _ in self.problem.ops]
        for number, edge in enumerate(self.problem.edges):
            found[edge.producer].add(number)
            found[edge.consumer].add(number)
        return found

    # -- sums

    def minimum(self, costs: Sequence[Floats], with_edges: bool = True) -> Minimum | None:
        """The choice of least cost, `costs` having one figure for each candidate of each of `ops`; None if none.

        Without edges, only their forbidden pairs count.
        """
        states = [np.minimum.reduceat(cost, table.starts) for cost, table in zip(costs, self.ops, strict=True)]
        least: list[Floats] = []
        best: list[Ints] = []
        for kind in self.kinds:
            joint = self.joint(kind, states, least, with_edges)
            best.append(joint.argmin(axis=0))
            least.append(joint.min(axis=0))
        value = float(least[self.steps[-1].kind])
        if not value < math.inf:
            return None
        chosen: dict[int, int] = {}
        for step in reversed(self.steps):
            chosen[step.op] = int(best[step.kind][tuple(chosen[other] for other in step.scope)])
        choice = []
        for op in range(len(self.problem.ops)):
            table, cost = self.ops[self.op_of[op]], costs[self.op_of[op]]
            first, end = table.starts[chosen[op]], table.ends()[chosen[op]]
            choice.append(int(table.order[first + int(cost[first:end].argmin())]))
        return Minimum(value, tuple(choice), tuple(costs), tuple(states), tuple(least), with_edges)

    def joint(
        self,
        kind: Kind,
        states: Sequence[Floats],
        least: Sequence[Floats],
        with_edges: bool = True,
        without: int | None = None,
    ) -> Floats:
        """All that a step of this kind adds up, over its op's and its scope's states, `without` one earlier result."""
        total: Floats = np.broadcast_to(spread(states[kind.op], (0,), len(kind.shape)), kind.shape)
        for term in kind.edges:
            table = self.tables[term.table]
            total = total + spread(
                table if with_edges else np.where(table < np.inf, 0.0, np.inf), term.axes, total.ndim
            )
        for number, term in enumerate(kind.earlier):
            if number != without:
                total = total + spread(least[term.table], term.axes, total.ndim)
        return total

    def outside(self, minimum: Minimum) -> list[Floats]:
        """For each kind, over its scope: the least that all the rest costs, of all steps of the kind."""
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
                    rests[key] = self.joint(kind, minimum.states, minimum.least, minimum.with_edges, place)
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
