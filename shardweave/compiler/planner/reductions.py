"""Making a problem smaller, each way with its inverse.

A reduction turns a `Problem` into an equivalent smaller one and what it takes to turn a choice for the smaller one
back into a choice for the first. The contract: inverting keeps the objective and the feasibility of every choice, and
some optimal choice survives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardweave.compiler.planner.problem import FORBIDDEN, Candidate, Edge, Problem

Kept = tuple[tuple[int, ...], ...]
"""For each op, which of its candidates the smaller problem has (their indices in the first one)."""


class Reduction(Protocol):
    """A problem goes in, a smaller one and the inverse's data come out."""

    @property
    def name(self) -> str: ...

    def apply(self, problem: Problem) -> tuple[Problem, Kept]:
        """The smaller problem, and for each op the candidates that it still has."""
        ...


def invert(choice: Sequence[int], kept: Kept) -> tuple[int, ...]:
    """The choice for the first problem that `choice` for the smaller one stands for.

    >>> invert((1, 0), kept=((0, 2), (1,)))
    (2, 1)
    """
    return tuple(indices[index] for index, indices in zip(choice, kept, strict=True))


@dataclass(frozen=True)
class UnitScaling:
    """Count bytes in their greatest common divisor, which keeps every sum exact and the solver's numbers small.

    >>> from shardweave.compiler.planner.problem import Op
    >>> op = Op("up", (Candidate("", 1.0, state_bytes=64), Candidate("", 2.0, state_bytes=32)))
    >>> UnitScaling().apply(Problem((op,), memory_limit=100))[0].memory_limit
    3
    """

    name = "unit scaling"

    def apply(self, problem: Problem) -> tuple[Problem, Kept]:
        unit = math.gcd(
            *(figure for op in problem.ops for c in op.candidates for figure in (c.kept_bytes, c.transient_bytes))
        )
        unit = unit or 1

        def scaled(candidate: Candidate) -> Candidate:
            return replace(
                candidate,
                state_bytes=candidate.kept_bytes // unit,
                saved_bytes=0,
                transient_bytes=candidate.transient_bytes // unit,
            )

        tables: dict[int, tuple[Candidate, ...]] = {}
        for op in problem.ops:
            if id(op.candidates) not in tables:
                tables[id(op.candidates)] = tuple(map(scaled, op.candidates))
        ops = tuple(replace(op, candidates=tables[id(op.candidates)]) for op in problem.ops)
        limit = (problem.memory_limit - problem.fixed_bytes) // unit
        return replace(problem, ops=ops, memory_limit=limit, fixed_bytes=0), _all(problem)


@dataclass(frozen=True)
class TooLarge:
    """Drop candidates that exceed the limit even where all other ops take the least memory that they can.

    >>> from shardweave.compiler.planner.problem import Op
    >>> op = Op("up", (Candidate("fast", 1.0, state_bytes=8), Candidate("small", 2.0, state_bytes=3)))
    >>> TooLarge().apply(Problem((op,), memory_limit=7))[1]
    ((1,),)
    """

    name = "too large"

    def apply(self, problem: Problem) -> tuple[Problem, Kept]:
        tables = {id(op.candidates): op.candidates for op in problem.ops}
        kept_by = {key: min(candidate.kept_bytes for candidate in table) for key, table in tables.items()}
        least = [kept_by[id(op.candidates)] for op in problem.ops]
        peak = max((min(candidate.transient_bytes for candidate in table) for table in tables.values()), default=0)
        room = problem.memory_limit - problem.fixed_bytes - sum(least)

        def fits(candidate: Candidate, own: int) -> bool:
            return candidate.kept_bytes - own + max(candidate.transient_bytes, peak) <= room

        fitting = {
            key: tuple(index for index, candidate in enumerate(table) if fits(candidate, kept_by[key]))
            for key, table in tables.items()
        }
        kept = tuple(fitting[id(op.candidates)] for op in problem.ops)
        if not all(kept):  # the problem is infeasible: leave it for the solver to say by how much
            return problem, _all(problem)
        return restricted(problem, kept), kept


@dataclass(frozen=True)
class Dominance:
    """Drop a candidate where another of its op needs no more memory and, whatever its neighbours choose, no more time.

    b dominates a if ``kept_b <= kept_a``, ``transient_b <= transient_a`` and
    ``seconds_b - seconds_a + sum over edges of max over the neighbour's ports of (edge_b - edge_a) <= 0``.
    The relation is transitive, so all dominated candidates of all ops may go at once; of equal ones the first stays.

    >>> from shardweave.compiler.planner.problem import Op
    >>> op = Op("up", (Candidate("slow", 2.0), Candidate("fast", 1.0), Candidate("same", 1.0)))
    >>> Dominance().apply(Problem((op,)))[1]
    ((1,),)
    """

    name = "dominance"

    def apply(self, problem: Problem) -> tuple[Problem, Kept]:
        kept = _all(problem)
        while True:
            known: dict[object, tuple[int, ...]] = {}
            found: list[tuple[int, ...]] = []
            for index, op in enumerate(problem.ops):
                edges = problem.edges_of[index]
                sides = ((id(e.seconds), e.producer == index, _others(problem, e, index)) for e in edges)
                key = id(op.candidates), *sides  # equal layers have the same answer
                if key not in known:
                    known[key] = self._undominated(problem, index)
                found.append(known[key])
            smaller = tuple(found)
            if smaller == _all(problem):
                return problem, kept
            problem = restricted(problem, smaller)
            kept = _composed(kept, smaller)

    def _undominated(self, problem: Problem, index: int) -> tuple[int, ...]:
        candidates = problem.ops[index].candidates

        def no_more(figures: Sequence[int]) -> NDArray[np.bool_]:
            column = np.array(figures, dtype=np.int64)
            return column[None, :] <= column[:, None]  # [a, b]: b needs no more than a

        ticks = np.array([candidate.ticks for candidate in candidates], dtype=np.int64)
        slower = ticks[None, :] - ticks[:, None]
        possible = no_more([c.kept_bytes for c in candidates]) & no_more([c.transient_bytes for c in candidates])
        for edge in problem.edges_of[index]:
            rows = _rows(problem, edge, index)
            worst, allowed = _worst_excess(rows)
            own = [c.out_port if edge.producer == index else c.in_port for c in candidates]
            slower += worst[np.ix_(own, own)]
            possible &= allowed[np.ix_(own, own)]
        dominates = possible & (slower <= 0)
        first = np.arange(len(candidates))
        strictly = dominates & (~dominates.T | (first[None, :] < first[:, None]))
        return tuple(int(a) for a in np.flatnonzero(~strictly.any(axis=1)))


def _others(problem: Problem, edge: Edge, index: int) -> tuple[int, ...]:
    """The ports that the candidates of the edge's other op have."""
    return problem.ops[edge.consumer].in_ports if edge.producer == index else problem.ops[edge.producer].out_ports


def _rows(problem: Problem, edge: Edge, index: int) -> NDArray[np.int64]:
    """The edge's ticks as [port of op `index`, port that some candidate of its neighbour has]."""
    ticks = edge.ticks if edge.producer == index else edge.ticks.T
    return ticks[:, _others(problem, edge, index)]


def _worst_excess(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For ports [a, b]: how much longer b takes than a at worst, and whether b is allowed wherever a is."""
    allowed = rows != FORBIDDEN
    both = allowed[:, None, :] & allowed[None, :, :]
    excess = np.where(both, rows[None, :, :] - rows[:, None, :], np.iinfo(np.int64).min)
    worst = np.where(both.any(axis=2), excess.max(axis=2), 0)
    return worst, ~(allowed[:, None, :] & ~allowed[None, :, :]).any(axis=2)


def _all(problem: Problem) -> Kept:
    return tuple(tuple(range(len(op.candidates))) for op in problem.ops)


def _composed(kept: Kept, smaller: Kept) -> Kept:
    """The data that inverts first `smaller`, then `kept`."""
    return tuple(tuple(before[index] for index in indices) for before, indices in zip(kept, smaller, strict=True))


def restricted(problem: Problem, kept: Kept) -> Problem:
    """`problem` with only the candidates `kept` of each op."""
    tables: dict[tuple[int, tuple[int, ...]], tuple[Candidate, ...]] = {}
    ops = []
    for op, indices in zip(problem.ops, kept, strict=True):
        key = id(op.candidates), indices
        if key not in tables:  # equal layers share one table before and after
            whole = len(indices) == len(op.candidates)
            tables[key] = op.candidates if whole else tuple(op.candidates[index] for index in indices)
        ops.append(replace(op, candidates=tables[key]))
    return replace(problem, ops=tuple(ops))


DEFAULT_REDUCTIONS: tuple[Reduction, ...] = (UnitScaling(), TooLarge(), Dominance())
"""What `solve` applies, in order."""


def reduce(problem: Problem, reductions: Sequence[Reduction] = DEFAULT_REDUCTIONS) -> tuple[Problem, Kept]:
    """`problem` after all `reductions`, and the data that inverts the whole chain.

    >>> from shardweave.compiler.planner.problem import Op
    >>> op = Op("up", (Candidate("slow", 2.0, state_bytes=8), Candidate("fast", 1.0, state_bytes=8)))
    >>> smaller, kept = reduce(Problem((op,), memory_limit=20))
    >>> smaller.memory_limit, invert((0,), kept)
    (2, (1,))
    """
    kept = _all(problem)
    for reduction in reductions:
        problem, smaller = reduction.apply(problem)
        kept = _composed(kept, smaller)
    return problem, kept
