"""Primal heuristics: good choices of a problem found from a bound's multipliers, mixed, tuned and walked downhill.

Feasible choices by changing a good one in one or two places at a time: the last bit towards the bound.

A *change* adds a column of figures to those of the whole choice: other candidates for some equal ops with equal
neighbours, or a splice of another choice. Changes that weigh more than the
choice lies above the bound lead nowhere; of the others the best pair is made again and again, such as one that frees
memory and one that makes better use of it, wherever their ops and these ops' neighbours are still as they were.

Feasible choices out of those that a bound came by: runs of ops of one choice next to runs of another.

The bound's mixture (`shardweave.planner.solver.lagrangian`) divides choices; a plan can only divide the ops. So the ops
before a cut are taken from one choice, those up to a second cut from another, the others from a third. The figures of
all pairs of cuts are sums of what lies before and behind them: all are found at once, exactly, and the fastest that
fits is kept. Where the first choice is also the last, one is *spliced* into the other; splices of splices come ever
closer to the mixture.

Feasible choices by local improvement: for graphs that nothing exact gets through in time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, repeat

import numpy as np

from shardweave.planner.solver.elimination import KEPT, Bools, Floats, Ints, OpFigures, Tables
from shardweave.planner.solver.lagrangian import Choice, Column, Offer

_MAX_CHANGES = 96
"""Changes of either kind of which all pairs are tried, those that weigh the least."""

_MAX_PASSES = 8
"""Times that the changes are looked up at most."""


@dataclass(frozen=True)
class Change:
    """Other candidates for any `count` of these ops, of which none are neighbours, or for all of them."""

    ops: Sequence[int]
    candidates: Sequence[int]
    count: int

    def placed(self, free: Bools) -> dict[int, int] | None:
        """The candidates of the first ops that are free; None if too few are."""
        places = [(op, candidate) for op, candidate in zip(self.ops, self.candidates, strict=True) if free[op]]
        return dict(places[: self.count]) if len(places) >= self.count else None


Tuned = list[tuple[Ints, Change]]
"""Changes with what each adds to the figures."""


def tune(
    tables: Tables, weights: Floats, columns: Sequence[Column], choice: Choice, bound: float, goal: float, offer: Offer
) -> None:
    """Offer ever faster choices within the limit, beginning at `choice`, until one takes at most `goal` ticks.

    `columns` are the choices to splice, `bound` what all choices weigh at least.
    """
    ticks: float = np.inf
    for _ in range(_MAX_PASSES):
        figures = tables.total(choice)
        if figures is None or not int(tables.ticks(figures)) < ticks:
            return
        ticks = int(tables.ticks(figures))
        offer(choice)
        if ticks <= goal:
            return
        choice = _changed(tables, weights, columns, choice, figures, ticks - bound)


def _changed(
    tables: Tables, weights: Floats, columns: Sequence[Column], choice: Choice, figures: Ints, slack: float
) -> Choice:
    """`choice` after as many pairs of changes as make it faster."""
    peak = int(tables.picked(choice).transient.max(initial=0))
    nothing = [(np.zeros(len(figures), dtype=np.int64), Change((), (), 0))]
    found = nothing + _flips(tables, weights, choice, peak, slack)
    found += _splices(tables, weights, columns, choice, figures, peak, slack)
    added, changes = np.stack([added for added, _ in found], axis=1), [change for _, change in found]
    pairs = added[:, :, None] + added[:, None, :]
    possible = np.ones(pairs.shape[1:], dtype=np.bool_)
    chosen, free = choice, np.ones(len(choice), dtype=np.bool_)
    now = tables.ticks(figures)
    while True:
        then = figures[:, None, None] + pairs
        ticks = np.where(possible & (then[KEPT] + peak <= tables.room), tables.ticks(then), now)
        one, other = np.unravel_index(int(ticks.argmin()), ticks.shape)
        if ticks[one, other] >= now:
            return chosen
        done, left = list(chosen), free.copy()
        for change in (changes[one], changes[other]):
            placed = change.placed(left)
            if placed is None:
                possible[one, other] = possible[other, one] = False
                break
            for op, candidate in placed.items():
                done[op] = candidate
                left[[op, *tables.near[op]]] = False
        else:
            chosen, free, figures, now = tuple(done), left, figures + pairs[:, one, other], ticks[one, other]


def _flips(tables: Tables, weights: Floats, choice: Choice, peak: int, slack: float) -> Tuned:
    """Other candidates for one, two, four, ... equal ops with equal neighbours."""
    alike: dict[object, list[int]] = defaultdict(list)
    for op, own in enumerate(choice):
        edges = (tables.edge_of[edge] for edge in tables.edges_at[op])
        sides = ((other < op, tables.op_of[other], choice[other]) for other in tables.near[op])
        alike[tables.op_of[op], own, *edges, *sides].append(op)
    added = [np.zeros((tables.rows, 0), dtype=np.int64)]
    changes: list[tuple[list[int], int, int]] = []  # the ops, the candidate and how many of them take it
    for members in alike.values():
        op, own = members[0], choice[members[0]]
        around, allowed = tables.around(op, choice)
        more = around - around[:, own : own + 1]
        good = allowed & (weights @ more <= slack) & (tables.ops[tables.op_of[op]].transient <= peak)
        good[own] = False
        if not good.any():
            continue
        apart = _apart(tables, members)
        counts = 2 ** np.arange(len(apart).bit_length())
        columns = more[:, good][:, :, None] * counts
        candidates, powers = np.nonzero(np.tensordot(weights, columns, axes=1) <= slack)
        added.append(columns[:, candidates, powers])
        places = np.flatnonzero(good)[candidates].tolist()
        changes += zip(repeat(apart), places, counts[powers].tolist())
    if not changes:
        return []
    together = np.concatenate(added, axis=1)
    found: Tuned = []
    for index in _promising(tables, weights, together).tolist():
        ops, candidate, count = changes[index]
        found.append((together[:, index], Change(ops, [candidate] * len(ops), count)))
    return found


def _promising(tables: Tables, weights: Floats, added: Ints) -> Ints:
    """The changes that weigh the least, and those that change the figures the least, which close the last gaps."""
    size = np.abs(added)
    least = np.argsort(weights @ added, kind="stable")[: _MAX_CHANGES // 2]
    smallest = np.argsort(tables.time(size) + weights[KEPT] * size[KEPT], kind="stable")[:_MAX_CHANGES]
    return np.union1d(least, smallest)


def _apart(tables: Tables, ops: Sequence[int]) -> list[int]:
    """Those of the ops that are no neighbours of the ones before them."""
    found: set[int] = set()
    for op in ops:
        if found.isdisjoint(tables.near[op]):
            found.add(op)
    return sorted(found)


def _splices(
    tables: Tables,
    weights: Floats,
    columns: Sequence[Column],
    choice: Choice,
    figures: Ints,
    peak: int,
    slack: float,
) -> Tuned:
    """Runs of ops as in one of the columns."""
    added = [np.zeros((len(figures), 0), dtype=np.int64)]
    numbers, begins, ends = [], [], []
    for number, column in enumerate(columns):
        runs = all_runs(tables, weights, choice, column.choice, choice)
        more = runs.figures - figures[:, None, None]
        weighed = np.tensordot(weights, more, axes=1)
        good = runs.allowed & (runs.peak <= peak) & (weighed <= slack) & more.any(axis=0)
        i, j = np.nonzero(good)
        added.append(more[:, i, j])
        numbers += [number] * len(i)
        begins += runs.begins[i].tolist()
        ends += runs.ends[j].tolist()
    together = np.concatenate(added, axis=1)
    if not numbers:
        return []
    _, first = np.unique(together, axis=1, return_index=True)
    found: Tuned = []
    for index in first[_promising(tables, weights, together[:, first])].tolist():
        other = columns[numbers[index]].choice
        ops = [op for op in range(begins[index], ends[index]) if other[op] != choice[op]]
        found.append((together[:, index], Change(ops, [other[op] for op in ops], len(ops))))
    return found


_MAX_CUTS = 96
"""Places where a run may end, those with the cheapest changes."""

_MAX_SPLICED_CHOICES = 3
"""Choices, those with the largest shares, of which all ways to have three runs are tried."""

_MAX_SPLICES = 24
"""Splices on top of each other at most."""

Found = tuple[int, Choice]
"""A choice and its ticks."""


def mix(tables: Tables, weights: Floats, columns: Sequence[Column], offer: Offer) -> Choice | None:
    """Offer runs of `columns`, those with the largest shares first, then splices of the best, until none is faster."""
    main = [column.choice for column in columns[:_MAX_SPLICED_CHOICES]]
    best = _fastest([runs(tables, weights, *choices) for choices in product(main, repeat=3)])
    for _ in range(_MAX_SPLICES):
        if best is None:
            return None
        offer(best[1])
        found = _fastest([runs(tables, weights, best[1], column.choice, best[1]) for column in columns])
        if found is None or found[0] >= best[0]:
            break
        best = found
    return None if best is None else best[1]


def _fastest(found: Sequence[Found | None]) -> Found | None:
    return min((one for one in found if one is not None), default=None)


@dataclass(frozen=True, eq=False)
class Runs:
    """Choices with a first run up to one of `begins`, a last one from one of `ends`, and another between.

    `figures` (figure, begin, end) and `peak`, the largest transient, count where ports go together: `allowed`.
    """

    figures: Ints
    peak: Ints
    allowed: Bools
    begins: Ints
    ends: Ints


def all_runs(tables: Tables, weights: Floats, first: Choice, middle: Choice, last: Choice) -> Runs:
    """Those of three choices, at the cuts where changes weigh the least."""
    a, b, c = (tables.picked(choice) for choice in (first, middle, last))
    join = _Join(tables, a, b, c)
    begins = _cuts(np.not_equal(first, middle), join.penalty(weights, 0))
    ends = _cuts(np.not_equal(middle, last), join.penalty(weights, 1))
    figures, forbidden = join.between(begins, ends)
    allowed = (forbidden == 0) & (begins[:, None] <= ends)
    return Runs(figures, _peaks(a.transient, b.transient, c.transient, begins, ends), allowed, begins, ends)


def runs(tables: Tables, weights: Floats, first: Choice, middle: Choice, last: Choice) -> Found | None:
    """The fastest choice within the limit that is `first` up to a cut, `middle` up to another, and then `last`."""
    if middle in (first, last) and first != last:
        return None  # a case of other runs
    found = all_runs(tables, weights, first, middle, last)
    fits = found.allowed & (found.figures[KEPT] + found.peak <= tables.room)
    if not fits.any():
        return None
    ticks = np.where(fits, tables.ticks(found.figures), np.iinfo(np.int64).max)
    i, j = np.unravel_index(int(ticks.argmin()), ticks.shape)
    begin, end = int(found.begins[i]), int(found.ends[j])
    return int(ticks[i, j]), (*first[:begin], *middle[begin:end], *last[end:])


class _Join:
    """What ops and edges have in runs of a, b and c; the last row of the edges' figures counts forbidden ones.

    With an edge's ops in runs p and q, in the order of the ops, its figures are pq, as if all were in run b, changed by

        ab - bb  where its first op is in run a,     bc - bb  where its second op is in run c,
        aa - ab  where its second op is in run a,    cc - bc  where its first op is in run c,

    and by ``ac - ab - bc + bb`` where it leads over the whole run b.
    """

    def __init__(self, tables: Tables, a: OpFigures, b: OpFigures, c: OpFigures) -> None:
        producers, consumers = tables.producers, tables.consumers
        self.low, self.high = np.minimum(producers, consumers), np.maximum(producers, consumers)
        forward = producers < consumers

        def joined(low: OpFigures, high: OpFigures) -> Ints:
            outs = np.where(forward, low.outs[producers], high.outs[producers])
            ins = np.where(forward, high.ins[consumers], low.ins[consumers])
            figures, allowed = tables.joined(outs, ins)
            return np.vstack([figures, ~allowed])

        def added(figures: Ints, low: Ints, high: Ints) -> Ints:
            """Figures of ops, with those of the edges at their first and at their second op."""
            rows = np.zeros((len(low), figures.shape[1]), dtype=np.int64)
            rows[:-1] = figures
            for at, edges in ((self.low, low), (self.high, high)):
                for row, values in zip(rows, edges, strict=True):
                    row += np.bincount(at, values, len(row)).astype(np.int64)
            return rows

        aa, ab, ac, bb, bc, cc = (joined(*pair) for pair in ((a, a), (a, b), (a, c), (b, b), (b, c), (c, c)))
        self.base = np.append(b.figures.sum(axis=1), 0) + bb.sum(axis=1)
        self.before = added(a.figures - b.figures, ab - bb, aa - ab)
        self.behind = added(c.figures - b.figures, cc - bc, bc - bb)
        self.over = ac - ab - bc + bb
        self.changes = 2 * ab - aa - bb, 2 * bc - bb - cc

    def penalty(self, weights: Floats, which: int) -> Floats:
        """What the edges over each first or second cut cost more than within runs; the most where one is forbidden."""
        change = self.changes[which]
        each = weights @ change[:-1]
        each += np.maximum(change[-1], 0) * (1.0 + 2.0 * np.abs(each).sum())
        steps = np.zeros(self.before.shape[1] + 1)
        np.add.at(steps, self.low + 1, each)
        np.add.at(steps, self.high + 1, -each)
        return np.cumsum(steps)

    def between(self, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """The figures with run b from begin i to end j, over (figure, i, j), and how many edges are forbidden."""
        none = np.zeros((len(self.base), 1), dtype=np.int64)
        before = np.concatenate([none, np.cumsum(self.before, axis=1)], axis=1)[:, begins]
        behind = np.concatenate([none, np.cumsum(self.behind, axis=1)], axis=1)
        behind = behind[:, -1:] - behind[:, ends]
        # An edge leads over run b where its first op lies before the begin and its second not before the end.
        shape = len(begins) + 1, len(ends) + 1
        first, last = np.searchsorted(begins, self.low, side="right"), np.searchsorted(ends, self.high, side="right")
        counts = self.over.any(axis=0)
        flat = np.ravel_multi_index((first[counts], last[counts]), shape)
        over = np.stack([np.bincount(flat, row[counts], shape[0] * shape[1]) for row in self.over]).astype(np.int64)
        over = over.reshape(-1, *shape).cumsum(axis=1)[:, :-1, ::-1].cumsum(axis=2)[:, :, ::-1][:, :, 1:]
        total = self.base[:, None, None] + before[:, :, None] + behind[:, None, :] + over
        return total[:-1], total[-1]


def _cuts(differ: Bools, penalty: Floats) -> Ints:
    """The cuts next to ops that differ, those with the least penalties."""
    beside = np.append(differ, False) | np.append(False, differ)
    places = np.flatnonzero(beside)
    cheapest = places[np.argsort(penalty[places], kind="stable")[:_MAX_CUTS]]
    return np.unique(np.concatenate([[0], cheapest, [len(differ)]]))


def _peaks(a: Ints, b: Ints, c: Ints, begins: Ints, ends: Ints) -> Ints:
    """The largest transient of these runs, over (begin, end)."""
    before = np.append(0, np.maximum.accumulate(a))[begins]
    behind = np.append(np.maximum.accumulate(c[::-1])[::-1], 0)[ends]
    cuts = np.unique(np.concatenate([begins, ends]))
    cells = np.maximum.reduceat(b, cuts[:-1])
    later = np.arange(len(cells))
    inside = np.maximum.accumulate(np.where(later[:, None] <= later, cells, 0), axis=1)
    inside = np.pad(inside, ((0, 1), (1, 0)))[np.searchsorted(cuts, begins)[:, None], np.searchsorted(cuts, ends)]
    return np.asarray(np.maximum(np.maximum(before[:, None], behind), inside))


_MAX_DESCENT_ROUNDS = 8
"""Rounds over all ops at one price; most end after three."""

_MAX_PRICES = 24
"""Prices that are tried: bisection to a part in ten million of the first one."""


def descend(tables: Tables, offer: Callable[[tuple[int, ...]], None]) -> None:
    """Offer choices that no change of a single op makes faster, at prices of memory up to the smallest that fit.

    The price is bisected: fast choices that do not fit lie on one side, choices that do on the other. Each price
    begins at the choice of the price before.
    """
    ops = [tables.ops[number] for number in tables.op_of]
    if not ops:
        offer(())
        return
    held = [op.figures[KEPT] + op.transient for op in ops]
    spread = sum(float(np.ptp(tables.time(op.figures))) for op in ops)
    choice = [int(own.argmin()) for own in held]
    offer(tuple(choice))
    low, high = 0.0, 1024 * (spread + 1.0) / (sum(float(np.ptp(own)) for own in held) + 1.0)
    for attempt in range(_MAX_PRICES):
        price = high if attempt == 0 else 0.0 if attempt == 1 else (low * high) ** 0.5 if low else high / 16
        choice = _settled(tables, choice, price)
        offer(tuple(choice))
        if tables.problem.memory(choice) <= tables.problem.memory_limit:
            high = price
        elif attempt > 1:
            low = price


def _settled(tables: Tables, choice: list[int], price: float) -> list[int]:
    choice = list(choice)
    for _ in range(_MAX_DESCENT_ROUNDS):
        changed = False
        total, _ = tables.sums(choice)
        for op, own in enumerate(choice):
            figures, allowed = tables.around(op, choice)
            rest = total - figures[:, own]
            held = figures[KEPT] + tables.ops[tables.op_of[op]].transient
            cost = np.where(allowed, tables.time(rest[:, None] + figures) + price * held, np.inf)
            best = int(cost.argmin())
            if cost[best] < cost[own]:
                choice[op], changed = best, True
                total = rest + figures[:, best]
        if not changed:
            break
    return choice
