"""A problem as arrays, equal layers once: the figures that every step of the solver adds up and weighs.

The *figures* of a candidate, of a pair of ports or of a whole choice are one column of numbers: ticks, kept bytes and
the load on each stream of each window. Figures add up; `Tables.ticks` says how long their sum takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardweave.planner.problem.problem import FORBIDDEN, TICKS_PER_SECOND, Candidate, Edge, Problem, to_ticks

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

    def take(self, indices: Ints) -> OpFigures:
        """Only these candidates."""
        return OpFigures(self.figures[:, indices], self.transient[indices], self.ins[indices], self.outs[indices])


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
        loads = edge.ticks_of_loads()
        if loads is not None:
            figures[LOADS:] = loads
        return cls(np.where(allowed, figures, 0), allowed)

    def turned(self) -> EdgeFigures:
        """The same with in ports first."""
        return EdgeFigures(self.figures.transpose(0, 2, 1), self.allowed.T)


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
        self.limits: dict[int, int] = {}
        """Of figures that count (`counting`): what they may come to at most."""

    def counting(self, table: int, counts: Ints, most: int) -> Tables:
        """The same with one more figure, of which equal ops have `counts` by their candidate, all others nothing.

        It may come to `most` in all.

        >>> from shardweave.planner.problem.problem import Op
        >>> op = Op("up", (Candidate("fast", 1.0), Candidate("small", 2.0)))
        >>> counting = Tables(Problem((op, op, op))).counting(0, np.array([1, 0]), most=1)
        >>> int(counting.total((0, 1, 0))[-1]), counting.limits
        (2, {2: 1})
        """
        other = copy.copy(self)
        own = {number: np.zeros_like(op.transient) for number, op in enumerate(self.ops)} | {table: counts}
        other.ops = [replace(op, figures=np.vstack([op.figures, own[number]])) for number, op in enumerate(self.ops)]
        other.edges = [
            replace(edge, figures=np.concatenate([edge.figures, np.zeros_like(edge.figures[:1])]))
            for edge in self.edges
        ]
        other.limits, other.rows = {**self.limits, self.rows: most}, self.rows + 1
        return other

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
