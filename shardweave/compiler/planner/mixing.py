"""Feasible choices out of those that a bound came by: runs of ops of one choice next to runs of another.

The bound's mixture (`shardweave.compiler.planner.duality`) divides choices; a plan can only divide the ops. So the ops
before a cut are taken from one choice, those up to a second cut from another, the others from a third. The figures of
all pairs of cuts are sums of what lies before and behind them: all are found at once, exactly, and the fastest that
fits is kept. Where the first choice is also the last, one is *spliced* into the other; splices of splices come ever
closer to the mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from shardweave.compiler.planner.duality import Choice, Column, Offer
from shardweave.compiler.planner.elimination import Floats
from shardweave.compiler.planner.tables import KEPT, Bools, Ints, OpFigures, Tables

_CUTS = 96
"""Places where a run may end, those with the cheapest changes."""

_RUNS = 3
"""Choices, those with the largest shares, of which all ways to have three runs are tried."""

_ROUNDS = 24
"""Splices on top of each other at most."""

Found = tuple[int, Choice]
"""A choice and its ticks."""


def mix(tables: Tables, weights: Floats, columns: Sequence[Column], offer: Offer) -> Choice | None:
    """Offer runs of `columns`, those with the largest shares first, then splices of the best, until none is faster."""
    main = [column.choice for column in columns[:_RUNS]]
    best = _fastest([runs(tables, weights, *choices) for choices in product(main, repeat=3)])
    for _ in range(_ROUNDS):
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
    cheapest = places[np.argsort(penalty[places], kind="stable")[:_CUTS]]
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
