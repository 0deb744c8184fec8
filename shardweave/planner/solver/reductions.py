"""Reductions, each of which makes a problem smaller and can be inverted.

A reduction turns a `Problem` into an equivalent smaller one, and a choice for the smaller one back into a choice for
the first. The contract: inverting keeps the objective and the feasibility of every choice, and some optimal choice
survives.

Dominated labels
    Label b dominates label a of the same key where it keeps no more memory, has no larger transient, and takes no more
    time however the streams fill up: `Tables.time` of the difference of their figures is at most 0.

Streams
    Most streams of a window are never the busiest. With fewer streams more candidates dominate others. So the solver
    begins with the first stream of each window and adds those that its answers turn out to wait for. Without some
    streams no choice takes longer, so a bound that was proven without them holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardweave.planner.problem.problem import TICKS_PER_SECOND, Candidate, Edge, Problem
from shardweave.planner.solver.elimination import KEPT, TICKS, Bools, Ints, Tables


def first_of_each(problem: Problem) -> set[int]:
    """The first stream of each window, by number, and the second where all candidates of an op load the first alike.

    Of the two, the answer would not mind the second if it did not count, and wait for it.

    >>> first_of_each(Problem((), windows=(("compute", "link"), ("host", "memory"))))
    {0, 2}
    """
    tables = {id(op.candidates): op.candidates for op in problem.ops}.values()
    loads = [np.array([candidate.loads or (0.0,) * problem.num_streams for candidate in table]) for table in tables]
    found, first = set[int](), 0
    for names in problem.windows:
        if names:
            found.add(first)
        alike = all(np.ptp(table[:, first]) == 0.0 for table in loads) if len(names) > 1 else False
        if alike and any(table[0, first] for table in loads):
            found.add(first + 1)
        first += len(names)
    return found


def with_streams(problem: Problem, streams: set[int]) -> Problem:
    """The problem with only these streams, by number; what a window of one stream loads becomes time.

    No choice takes longer in it, and one of which these streams are the busiest takes as long.
    """
    loaded: list[int] = []
    merged: list[int] = []
    windows, first = [], 0
    for names in problem.windows:
        left = [stream for stream in range(first, first + len(names)) if stream in streams]
        if len(left) == 1:
            merged += left
        elif left:
            loaded += left
            windows.append(tuple(names[stream - first] for stream in left))
        first += len(names)
    if len(loaded) == problem.num_streams:
        return problem

    def candidate(given: Candidate) -> Candidate:
        ticks = given.ticks + sum(given.load_ticks[stream] for stream in merged if given.loads)
        loads = tuple(given.loads[stream] for stream in loaded if given.loads)
        return replace(given, seconds=ticks / TICKS_PER_SECOND, loads=loads)

    def edge(given: Edge) -> Edge:
        ticks = given.ticks_of_loads(merged)
        if given.loads is None or ticks is None:
            return given
        more = ticks.sum(axis=0) / TICKS_PER_SECOND
        return replace(given, seconds=given.seconds + more, loads=np.ascontiguousarray(given.loads[loaded]))

    return _changed(problem, candidate, edge, tuple(windows))


def with_loads(problem: Problem, mixed: NDArray[np.float64]) -> Problem:
    """The problem with other loads on the same streams: each is a sum of the loads there were, one row a stream."""

    def candidate(given: Candidate) -> Candidate:
        return replace(given, loads=tuple((mixed @ given.loads).tolist())) if given.loads else given

    def edge(given: Edge) -> Edge:
        return given if given.loads is None else replace(given, loads=np.tensordot(mixed, given.loads, axes=1))

    return _changed(problem, candidate, edge, problem.windows)


def _changed(
    problem: Problem,
    candidate: Callable[[Candidate], Candidate],
    edge: Callable[[Edge], Edge],
    windows: tuple[tuple[str, ...], ...],
) -> Problem:
    """The problem with candidates and edges that are made once for each table, as equal layers share theirs."""
    candidates = {key: tuple(map(candidate, table)) for key, table in
                  {id(op.candidates): op.candidates for op in problem.ops}.items()}  # fmt: skip
    edges = {key: edge(each) for key, each in {_key(each): each for each in problem.edges}.items()}
    return replace(
        problem,
        ops=tuple(replace(op, candidates=candidates[id(op.candidates)]) for op in problem.ops),
        edges=tuple(
            replace(each, seconds=edges[_key(each)].seconds, loads=edges[_key(each)].loads) for each in problem.edges
        ),
        windows=windows,
    )


def _key(edge: Edge) -> tuple[int, int]:
    return id(edge.seconds), id(edge.loads)


MAX_COMBINED_KEY = 2**56
"""What combined keys must stay below."""

_BLOCK = 32
"""Labels that are compared with each other at once."""


def undominated(tables: Tables, figures: Ints, peak: Ints, key: Ints) -> Ints:
    """The indices of labels (columns of `figures`) that none with the same key dominates; of equal ones one stays.

    With streams, where only a comparison of all pairs finds all, some dominated ones may stay among many labels.
    """
    if not tables.windows:
        return _by_sorting(figures[TICKS], figures[KEPT], peak, key)
    order = np.lexsort((peak, figures[KEPT], tables.time(figures), key))
    block = len(order)
    while True:
        stay = order[_in_blocks(tables, figures[:, order], peak[order], key[order])]
        if len(stay) == len(order) or block <= _BLOCK:
            return np.sort(stay)
        order, block = stay, len(stay)


def _in_blocks(tables: Tables, figures: Ints, peak: Ints, key: Ints) -> Ints:
    """Which labels no other one of its block, of `_BLOCK` in a row, dominates."""
    count = len(key)
    rows = -(-count // _BLOCK)
    blocks = np.minimum(np.arange(rows * _BLOCK), count - 1).reshape(rows, _BLOCK)
    stays, least = np.ones(count, dtype=np.bool_), tables.time(figures)
    for begin in range(0, rows, _BLOCK):
        of_block = blocks[begin : begin + _BLOCK]
        same = key[of_block]
        as_good = (same[:, None, :] == same[:, :, None]) & (of_block[:, None, :] != of_block[:, :, None])
        for figure in (least[of_block], figures[KEPT, of_block], peak[of_block]):
            as_good &= figure[:, None, :] <= figure[:, :, None]
        block, own, other = np.nonzero(as_good)  # few of all pairs: of these alone differences are looked at
        found = np.ascontiguousarray(figures[:, of_block].reshape(len(figures), -1).T)
        more = found[block * _BLOCK + other] - found[block * _BLOCK + own]
        as_good[block, own, other] = tables.time(more.T) <= 0
        better = as_good & (~as_good.transpose(0, 2, 1) | (of_block[:, None, :] < of_block[:, :, None]))
        stays[of_block[better.any(axis=2)]] = False
    return np.flatnonzero(stays)


def _by_sorting(ticks: Ints, kept: Ints, peak: Ints, key: Ints) -> Ints:
    """The same for three figures, in one pass along their order."""
    order = np.lexsort((peak, kept, ticks, key))
    key, peak = key[order], peak[order]
    rank = np.cumsum(np.append(False, key[1:] != key[:-1]))
    kept = kept[order]
    if (int(rank[-1]) + 1) * (int(kept.max()) + 1) > MAX_COMBINED_KEY:
        kept = np.unique(kept, return_inverse=True)[1]  # only their order matters, and no sum must overflow
    # One running minimum serves all keys: the later keys' figures lie below all those of the earlier ones.
    kept = kept + (rank[-1] - rank) * (int(kept.max()) + 1)
    stays = np.zeros(len(order), dtype=bool)
    for level in np.unique(peak):
        below = np.flatnonzero(peak <= level)
        figures = kept[below]
        better = np.append(True, figures[1:] < np.minimum.accumulate(figures)[:-1])
        stays[below[better & (peak[below] == level)]] = True
    return np.asarray(order[stays])


MAX_DOMINANCE_ROUNDS = 2
"""How often dominance is looked for again: what one round drops at the ends of a model would spread from layer to layer
in as many rounds as it has, and leave no two of them equal."""

MAX_STATES_COMPARED = 64
"""States beyond which candidates are compared within a state only. All states are compared in time that grows with the
cube of their number, and `groups` keeps apart only what matters, anyway."""

_MAX_COMPARED_NUMBERS = 2**16
"""Numbers that are compared at once."""

_INFINITE = 2**61
"""More than any figure."""

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

    >>> from shardweave.planner.problem.problem import Op
    >>> op = Op("up", (Candidate("", 1.0, state_bytes=64), Candidate("", 2.0, state_bytes=32)))
    >>> UnitScaling().apply(Problem((op,), memory_limit=100))[0].memory_limit
    3
    """

    name = "unit scaling"

    def apply(self, problem: Problem) -> tuple[Problem, Kept]:
        ops = {id(op.candidates): op.candidates for op in problem.ops}
        edges = {id(edge.kept): edge.kept for edge in problem.edges if edge.kept is not None}
        unit = math.gcd(
            *(figure for table in ops.values() for c in table for figure in (c.kept_bytes, c.transient_bytes)),
            *(int(np.gcd.reduce(kept.ravel())) for kept in edges.values()),
        )
        unit = unit or 1

        def scaled(candidate: Candidate) -> Candidate:
            return replace(
                candidate,
                state_bytes=candidate.kept_bytes // unit,
                saved_bytes=0,
                left_bytes=0,
                transient_bytes=candidate.transient_bytes // unit,
            )

        tables = {key: tuple(map(scaled, table)) for key, table in ops.items()}
        kept = {key: table // unit for key, table in edges.items()}
        smaller = replace(
            problem,
            ops=tuple(replace(op, candidates=tables[id(op.candidates)]) for op in problem.ops),
            edges=tuple(replace(edge, kept=kept.get(id(edge.kept))) for edge in problem.edges),
            memory_limit=(problem.memory_limit - problem.fixed_bytes) // unit,
            fixed_bytes=0,
        )
        return smaller, _all(problem)


@dataclass(frozen=True)
class TooLarge:
    """Drop candidates that exceed the limit even where all other ops take the least memory that they can.

    >>> from shardweave.planner.problem.problem import Op
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
        room = problem.memory_limit - problem.fixed_bytes - sum(least) - sum(_least_kept(problem))

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

    With ``more(figure) = figure_b - figure_a + sum over edges of max over the neighbour's ports of (edge_b - edge_a)``,
    b dominates a if ``more(kept) <= 0``, ``transient_b <= transient_a`` and ``more(ticks) + sum over windows of max
    over their streams of more(load) <= 0``: whatever else loads a window, b prolongs it by no more than that maximum.
    The relation is transitive, so all dominated candidates of all ops may go at once; of equal ones the first stays.
    A candidate that one op needs stays at all that have the same candidates, so that equal layers remain equal.

    >>> from shardweave.planner.problem.problem import Op
    >>> op = Op("up", (Candidate("slow", 2.0), Candidate("fast", 1.0), Candidate("same", 1.0)))
    >>> Dominance().apply(Problem((op,)))[1]
    ((1,),)
    """

    name = "dominance"

    def apply(self, problem: Problem) -> tuple[Problem, Kept]:
        kept, excesses = _all(problem), _Excesses()
        for _ in range(MAX_DOMINANCE_ROUNDS):
            tables = Tables(problem)
            known: set[object] = set()
            needed: list[set[int]] = [set() for _ in tables.ops]
            for op, number in enumerate(tables.op_of):
                sides = ((tables.edge_of[edge], *_side(tables, edge, op)) for edge in tables.edges_at[op])
                key = number, *sides  # equal layers have the same answer
                if key not in known:
                    known.add(key)
                    needed[number].update(self._undominated(tables, op, excesses))
            left = [tuple(sorted(indices)) for indices in needed]
            smaller = tuple(left[number] for number in tables.op_of)
            if smaller == _all(problem):
                break
            problem = restricted(problem, smaller)
            kept = _composed(kept, smaller)
        return problem, kept

    def _undominated(self, tables: Tables, op: int, excesses: _Excesses) -> tuple[int, ...]:
        own = tables.ops[tables.op_of[op]]
        # Edges tell the states apart only: pairs of ports
        (ins, outs), state = np.unique(np.stack([own.ins, own.outs]), axis=1, return_inverse=True)
        if len(ins) > MAX_STATES_COMPARED:
            return tuple(undominated(tables, own.figures, own.transient, state).tolist())
        worst = np.zeros((len(own.figures), len(ins), len(ins)), dtype=np.int64)  # [figure, a, b]
        allowed = np.ones(worst.shape[1:], dtype=np.bool_)
        for edge in tables.edges_at[op]:
            produces, other = _side(tables, edge, op)
            ports, far = (outs, tables.ops[other].ins) if produces else (ins, tables.ops[other].outs)
            excess, never_less = excesses.of(tables, tables.edge_of[edge], produces, ports, np.unique(far))
            worst += excess
            allowed &= never_less
        pair = state[:, None] * len(ins) + state
        more = own.figures[KEPT] - own.figures[KEPT][:, None] + worst[KEPT].take(pair)
        possible = (more <= 0) & (own.transient <= own.transient[:, None]) & allowed.take(pair)
        a, b = np.nonzero(possible)
        more = own.figures[:, b] - own.figures[:, a] + worst.reshape(len(worst), -1)[:, pair[a, b]]
        possible[a, b] = tables.time(more) <= 0
        first = np.arange(len(own.ins))
        strictly = possible & (~possible.T | (first[None, :] < first[:, None]))
        return tuple(int(a) for a in np.flatnonzero(~strictly.any(axis=1)))


def _side(tables: Tables, edge: int, op: int) -> tuple[bool, int]:
    """Whether `op` is the edge's producer, and the table of its other op."""
    produces = bool(tables.producers[edge] == op)
    return produces, tables.op_of[tables.consumers[edge] if produces else tables.producers[edge]]


class _Excesses:
    """How much more one port can need than another, each found once; the edges' tables stay as they are."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, bool, bytes, bytes], tuple[Ints, Bools]] = {}

    def of(self, tables: Tables, edge: int, produces: bool, ports: Ints, others: Ints) -> tuple[Ints, Bools]:
        """For ports a, b: how much more b has of each figure at worst, and whether b is allowed wherever a is.

        `others` are the ports that the candidates of the edge's other op have.
        """
        key = edge, produces, ports.tobytes(), others.tobytes()
        if key not in self.known:
            table = tables.edges[edge] if produces else tables.edges[edge].turned()
            figures, allowed = table.figures[:, ports[:, None], others], table.allowed[ports[:, None], others]
            worst = np.zeros((len(figures), len(ports), len(ports)), dtype=np.int64)
            at_once = max(1, _MAX_COMPARED_NUMBERS // max(1, allowed.size))
            for row in np.flatnonzero(figures.any(axis=(1, 2))):
                figure = np.where(allowed, figures[row], _INFINITE)  # where a is not allowed, b may be as it likes
                for a in range(0, len(ports), at_once):
                    worst[row, a : a + at_once] = (figures[row] - figure[a : a + at_once, None]).max(axis=2)
            worst[:, ~allowed.any(axis=1)] = 0
            never = allowed.astype(np.float32) @ (~allowed).T.astype(np.float32)
            self.known[key] = worst, never == 0
        return self.known[key]


def _least_kept(problem: Problem) -> list[int]:
    """What each edge keeps at least."""
    tables = {id(edge.kept): edge.kept for edge in problem.edges if edge.kept is not None}
    least = {key: int(kept.min()) for key, kept in tables.items()}
    return [least.get(id(edge.kept), 0) for edge in problem.edges]


def _all(problem: Problem) -> Kept:
    tables = {id(op.candidates): op.candidates for op in problem.ops}
    every = {key: tuple(range(len(table))) for key, table in tables.items()}
    return tuple(every[id(op.candidates)] for op in problem.ops)


def _composed(kept: Kept, smaller: Kept) -> Kept:
    """The data that inverts first `smaller`, then `kept`."""
    pairs = {(id(before), id(indices)): (before, indices) for before, indices in zip(kept, smaller, strict=True)}
    composed = {key: tuple(before[index] for index in indices) for key, (before, indices) in pairs.items()}
    return tuple(composed[id(before), id(indices)] for before, indices in zip(kept, smaller, strict=True))


def restricted(problem: Problem, kept: Kept) -> Problem:
    """`problem` with only the candidates `kept` of each op."""
    tables: dict[tuple[int, tuple[int, ...]], tuple[Candidate, ...]] = {}
    ops = []
    for op, indices in zip(problem.ops, kept, strict=True):
        if len(indices) < len(op.candidates):
            key = id(op.candidates), indices
            if key not in tables:  # equal layers share one table before and after
                tables[key] = tuple(op.candidates[index] for index in indices)
            op = replace(op, candidates=tables[key])
        ops.append(op)
    return replace(problem, ops=tuple(ops))


DEFAULT_REDUCTIONS: tuple[Reduction, ...] = (UnitScaling(), TooLarge(), Dominance())
"""What `solve` applies, in order."""


def reduce(problem: Problem, reductions: Sequence[Reduction] = DEFAULT_REDUCTIONS) -> tuple[Problem, Kept]:
    """`problem` after all `reductions`, and the data that inverts the whole chain.

    >>> from shardweave.planner.problem.problem import Op
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
