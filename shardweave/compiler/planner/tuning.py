"""Feasible choices by changing a good one in one or two places at a time: the last bit towards the bound.

A *change* adds a column of figures to those of the whole choice: other candidates for some equal ops with equal
neighbours, or a splice of another choice (`shardweave.compiler.planner.mixing`). Changes that weigh more than the
choice lies above the bound lead nowhere; of the others the best pair is made again and again, such as one that frees
memory and one that makes better use of it, wherever their ops and these ops' neighbours are still as they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from shardweave.compiler.planner.duality import Choice, Column, Offer
from shardweave.compiler.planner.elimination import Floats
from shardweave.compiler.planner.mixing import all_runs
from shardweave.compiler.planner.tables import KEPT, Bools, Ints, Tables

_CHANGES = 96
"""Changes of either kind of which all pairs are tried, those that weigh the least."""

_PASSES = 8
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


Found = list[tuple[Ints, Change]]
"""Changes with what each adds to the figures."""


def tune(
    tables: Tables, weights: Floats, columns: Sequence[Column], choice: Choice, bound: float, goal: float, offer: Offer
) -> None:
    """Offer ever faster choices within the limit, beginning at `choice`, until one takes at most `goal` ticks.

    `columns` are the choices to splice, `bound` what all choices weigh at least.
    """
    ticks: float = np.inf
    for _ in range(_PASSES):
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


def _flips(tables: Tables, weights: Floats, choice: Choice, peak: int, slack: float) -> Found:
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
    found: Found = []
    for index in _promising(tables, weights, together).tolist():
        ops, candidate, count = changes[index]
        found.append((together[:, index], Change(ops, [candidate] * len(ops), count)))
    return found


def _promising(tables: Tables, weights: Floats, added: Ints) -> Ints:
    """The changes that weigh the least, and those that change the figures the least, which close the last gaps."""
    size = np.abs(added)
    least = np.argsort(weights @ added, kind="stable")[: _CHANGES // 2]
    smallest = np.argsort(tables.time(size) + weights[KEPT] * size[KEPT], kind="stable")[:_CHANGES]
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
) -> Found:
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
    found: Found = []
    for index in first[_promising(tables, weights, together[:, first])].tolist():
        other = columns[numbers[index]].choice
        ops = [op for op in range(begins[index], ends[index]) if other[op] != choice[op]]
        found.append((together[:, index], Change(ops, [other[op] for op in ops], len(ops))))
    return found
