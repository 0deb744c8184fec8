"""Branch and bound: the search for the fastest choice, from the best choice and the bound known so far.

Where the graph is narrow (`Elimination`), parts of the choices are searched, the one with the lowest bound first
(`Branching`). On other graphs GLOP's relaxation gives the bound, label setting in the ops' order searches near it, and
CP-SAT goes on from there.

Branching
    A dual bound (`dual`) is loose where a mixture of choices can average what a plan cannot:

    - The largest transient: a part is split at the largest of the mixture's choices.
    - Layouts: a plan has to change them between runs of two choices, a mixture does not. So an op is made to take a
      candidate that goes better with the one choice or with the other: the first such op, then the one farthest from
      all ops so decided, until what is left pays for its changes.
    - Equal ops: in a plan a whole number of them takes a candidate, in a mixture 6.85 of 32. So at most six do, or at
      least seven, which is one more figure with a limit (`Tables.counting`).

Label setting
    `Walker` finds all choices within a slack of the bound, kept as labels while one op after the other is eliminated
    (shortest paths with a resource, Desrochers and Soumis 1988). A label is a choice for the ops eliminated so far in
    its branch, given the states of its scope: its figures and its largest transient. A label stays only where it and
    the exact minimum of the rest, at the weights of the bound, are within the slack. That loses nothing, as what a
    choice weighs is never more than its time. Of two labels for the same states, a dominated one goes
    (`shardweave.planner.solver.reductions`). Equal layers share their labels.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from shardweave.planner.problem.problem import TICKS_PER_SECOND, Edge, Problem
from shardweave.planner.solver.elimination import KEPT, Bools, EdgeFigures, Elimination, Floats, Ints, Tables
from shardweave.planner.solver.ilp import Program, Relaxation, prove, relax
from shardweave.planner.solver.lagrangian import Choice, Column, Dual, Part, dual
from shardweave.planner.solver.primal_heuristics import descend, mix, tune
from shardweave.planner.solver.reductions import MAX_COMBINED_KEY, invert, reduce, restricted, undominated

_LABELS_PER_KEPT = 2**5
"""Labels of a step before the dominated ones go, for each that it may keep."""


@dataclass(frozen=True, eq=False)
class Labels:
    """One entry each a label, ordered by `entry`, the states of the scope as one number.

    `above` is how far it lies above the least cost for these states; `candidate` the op's own (a row of its
    `OpTable`), `parents` one column for each earlier result taken up.
    """

    entry: Ints
    figures: Ints
    peak: Ints
    above: Floats
    candidate: Ints
    parents: tuple[Ints, ...]

    def take(self, indices: NDArray[np.intp] | NDArray[np.bool_]) -> Labels:
        return Labels(
            self.entry[indices],
            self.figures[:, indices],
            self.peak[indices],
            self.above[indices],
            self.candidate[indices],
            tuple(parent[indices] for parent in self.parents),
        )


@dataclass(frozen=True)
class Walk:
    """The fastest choice found within the limit (None if none), and up to which excess nothing was overlooked.

    A choice whose excess above the dual's minimum is at most `complete` is optimal in its part.
    """

    choice: tuple[int, ...] | None
    complete: float


class Walker:
    """Walks through the choices near one dual's bound, in any slack."""

    def __init__(self, found: Dual) -> None:
        self.elimination = elimination = found.elimination
        self.dual = found
        self.minimum = elimination.whole(found.minimum)
        self.outside = elimination.outside(self.minimum)
        self.costs = self.minimum.costs
        self.limit = elimination.tables.room
        edges = [_most(edge) for edge in self.minimum.edges]
        most = sum(_most(self.costs[op]) for op in elimination.op_of) + sum(
            edges[number] for number in elimination.edge_of
        )
        self.farthest = most - self.minimum.value
        """No choice lies farther above the minimum."""

    def walk(self, slack: float, width: int, deadline: float) -> Walk:
        """The fastest choice among those within `slack` ticks of the minimum, at most `width` labels a step.

        After `deadline` (of ``time.monotonic``) it gives up.
        """
        self.complete, self.slack, self.width = slack, slack, width
        known: list[Labels] = []
        for kind in range(len(self.elimination.kinds)):
            if time.monotonic() > deadline:
                return Walk(None, -1.0)
            known.append(self._labels(kind, known))
        last = known[self.elimination.steps[-1].kind]
        fits = np.flatnonzero(last.figures[KEPT] + last.peak <= self.limit)
        if not len(fits):
            return Walk(None, self.complete - self.dual.error)
        fastest = fits[np.argmin(self.elimination.tables.time(last.figures[:, fits]))]
        return Walk(self._choice(known, int(fastest)), self.complete - self.dual.error)

    def _labels(self, number: int, known: list[Labels]) -> Labels:
        elimination, minimum = self.elimination, self.minimum
        kind = elimination.kinds[number]
        joint = elimination.joint(kind, minimum)
        excess = joint + self.outside[number][None] - minimum.value
        where = np.flatnonzero(excess.ravel() <= self.slack)
        at = np.unravel_index(where, kind.shape)
        figures = np.zeros((len(elimination.ops[0].figures), len(where)), dtype=np.int64)
        for term in kind.edges:
            table = elimination.edges[term.table].figures
            figures += table[:, at[term.axes[0]], at[term.axes[1]]].astype(np.int64)
        sources = [(self._own(kind.ops[0]), at[0])]
        for term in kind.earlier:
            shape = minimum.least[term.table].shape
            mine = tuple(at[axis] for axis in term.axes)
            flat = np.ravel_multi_index(mine, shape) if mine else np.zeros(len(where), dtype=np.int64)
            sources.append((known[term.table], flat))
        row = np.arange(len(where))
        above = excess.ravel()[where]
        peak = np.full(len(where), self.dual.part.low, dtype=np.int64)
        picked: list[Ints] = []
        for source, entry in sources:
            first = np.searchsorted(source.entry, entry, side="left")
            count = np.searchsorted(source.entry, entry, side="right") - first
            many = count[row]
            if many.sum() > _LABELS_PER_KEPT * self.width:
                order = np.argsort(above, kind="stable")
                fit = int(np.searchsorted(np.cumsum(many[order]), _LABELS_PER_KEPT * self.width))
                self.complete = min(self.complete, float(above[order[fit]]) - 1.0)
                order = np.sort(order[:fit])
                row, above, figures, peak = row[order], above[order], figures[:, order], peak[order]
                picked, many = [column[order] for column in picked], many[order]
            index = np.repeat(np.arange(len(row)), many)
            begins = np.cumsum(many) - many
            other = np.arange(len(index)) - begins[index] + first[row[index]]
            total = above[index] + source.above[other]
            held = figures[KEPT, index] + source.figures[KEPT, other]
            high = np.maximum(peak[index], source.peak[other])
            stay = np.flatnonzero((total <= self.slack) & (held + high <= self.limit))
            index, other = index[stay], other[stay]
            row, above, peak = row[index], total[stay], high[stay]
            figures = figures[:, index] + source.figures[:, other]
            picked = [*(column[index] for column in picked), other]
        scope = tuple(axis[row] for axis in at[1:])
        flat = np.ravel_multi_index(scope, kind.shape[1:]) if scope else np.zeros(len(row), dtype=np.int64)
        outside = self.outside[number].ravel()[flat]
        least = minimum.least[number].ravel()[flat]
        labels = Labels(
            np.asarray(flat, dtype=np.int64),
            figures,
            peak,
            above - (outside + least - minimum.value),
            picked[0],
            tuple(picked[1:]),
        )
        if not len(row):
            return labels
        stay = undominated(elimination.tables, labels.figures, labels.peak, labels.entry)
        if len(stay) > self.width:
            total = above[stay]
            order = np.argsort(total, kind="stable")
            self.complete = min(self.complete, float(total[order[self.width]]) - 1.0)
            stay = stay[order[: self.width]]
        return labels.take(stay[np.argsort(labels.entry[stay], kind="stable")])

    def _own(self, op: int) -> Labels:
        """The candidates of an op as labels, each with its state as entry."""
        table, cost = self.elimination.ops[op], self.costs[op]
        state = np.repeat(np.arange(table.states), table.ends() - table.starts)
        rows = np.arange(len(state))
        return Labels(
            state,
            table.figures.astype(np.int64),
            table.transient.astype(np.int64),
            cost - np.minimum(self.minimum.states[op][state], cost.max(initial=0.0, where=cost < np.inf)),
            rows,
            (),
        )

    def _choice(self, known: list[Labels], index: int) -> tuple[int, ...]:
        elimination = self.elimination
        choice = [0] * (len(elimination.problem.ops) + 1)
        open_steps = [(len(elimination.steps) - 1, index)]
        while open_steps:
            number, label = open_steps.pop()
            step = elimination.steps[number]
            labels = known[step.kind]
            choice[step.op] = int(elimination.ops[elimination.op_of[step.op]].order[labels.candidate[label]])
            open_steps += [(n, int(p[label])) for n, p in zip(step.earlier, labels.parents, strict=True)]
        return tuple(choice[:-1])


def _most(costs: Floats) -> float:
    return float(costs[costs < np.inf].max(initial=0.0))


@dataclass(frozen=True)
class PathLabels:
    """Columns of the labels: one entry each a label; `ports` has (in, out) of each op with open edges."""

    figures: Ints
    peak: Ints
    excess: NDArray[np.float64]
    ports: dict[int, tuple[Ints, Ints]]

    def take(self, indices: Ints) -> PathLabels:
        ports = {op: (ins[indices], outs[indices]) for op, (ins, outs) in self.ports.items()}
        return PathLabels(self.figures[:, indices], self.peak[indices], self.excess[indices], ports)


@dataclass(frozen=True)
class Sweep:
    """The fastest choice found (None if none), and up to which excess above the bound nothing was overlooked.

    A choice whose time is at most ``bound + complete`` is optimal; where there is none, every choice costs more.
    """

    choice: tuple[int, ...] | None
    complete: float


def sweep(tables: Tables, relaxation: Relaxation, slack: float, width: int, deadline: float) -> Sweep:
    """The fastest feasible choice among those within `slack` ticks of the bound.

    At most `width` labels are kept, those with the least excess; what goes beyond that lowers `complete`. After
    `deadline` (of ``time.monotonic``) it gives up.
    """
    problem, room = tables.problem, tables.room
    columns = [np.flatnonzero(excess <= slack) for excess in relaxation.candidates]
    if not all(map(len, columns)):
        return Sweep(None, slack)
    ops = [tables.ops[number].take(own) for number, own in zip(tables.op_of, columns, strict=True)]
    # Whatever is chosen, the peak is at least this: labels below it are alike.
    floor = max((int(op.transient.min()) for op in ops), default=0)
    least = np.array([op.figures[KEPT].min() for op in ops], dtype=np.int64)
    still = np.append(np.cumsum(least[::-1])[::-1], 0)
    if floor + still[0] > room:
        return Sweep(None, slack)
    last = [max((max(e.producer, e.consumer) for e in edges), default=0) for edges in problem.edges_of]
    arriving: list[list[tuple[Edge, EdgeFigures, NDArray[np.float64]]]] = [[] for _ in problem.ops]
    for edge, number, excess in zip(problem.edges, tables.edge_of, relaxation.edges, strict=True):
        arriving[max(edge.producer, edge.consumer)].append((edge, tables.edges[number], excess))

    figures = np.zeros((tables.rows, 1), dtype=np.int64)
    labels = PathLabels(figures, np.full(1, floor, dtype=np.int64), np.zeros(1), {})
    steps: list[tuple[Ints, Ints]] = []
    complete = slack
    for number, op in enumerate(ops):
        if time.monotonic() > deadline:
            return Sweep(None, 0.0)
        then = labels.figures[:, :, None] + op.figures[:, None, :]
        excess_then = labels.excess[:, None] + relaxation.candidates[number][columns[number]]
        for edge, table, excess in arriving[number]:
            if edge.consumer == number:
                pair = (labels.ports[edge.producer][1][:, None], op.ins)
            else:
                pair = (op.outs, labels.ports[edge.consumer][0][:, None])
            then = then + table.figures[:, pair[0], pair[1]]
            excess_then = excess_then + excess[pair]
        peak_then = np.maximum(labels.peak[:, None], op.transient)
        parent, own = np.nonzero((excess_then <= slack) & (then[KEPT] + peak_then + still[number + 1] <= room))
        if not len(parent):
            return Sweep(None, complete)
        pairs = (parent, own)
        ports = {a: (i[parent], o[parent]) for a, (i, o) in labels.ports.items() if last[a] > number}
        if last[number] > number:
            ports[number] = (op.ins[own], op.outs[own])
        labels = PathLabels(then[:, parent, own], peak_then[pairs], excess_then[pairs], ports)
        stay = undominated(tables, labels.figures, labels.peak, _open_ports(problem, labels, number))
        if len(stay) > width:
            order = np.argsort(labels.excess[stay], kind="stable")
            complete = min(complete, float(labels.excess[stay[order[width]]]))
            stay = stay[order[:width]]
        labels = labels.take(stay)
        steps.append((parent[stay], columns[number][own[stay]]))
    index, choice = int(np.argmin(tables.time(labels.figures))), []
    for parents, candidates in reversed(steps):
        choice.append(int(candidates[index]))
        index = int(parents[index])
    return Sweep(tuple(reversed(choice)), complete)


def _open_ports(problem: Problem, labels: PathLabels, op: int) -> Ints:
    """A number for each label, equal where all ports that edges beyond `op` ask for are equal."""
    key = np.zeros(len(labels.peak), dtype=np.int64)
    for open_op, (ins, outs) in labels.ports.items():
        beyond = [e for e in problem.edges_of[open_op] if max(e.producer, e.consumer) > op]
        for ports, asked in (
            (ins, any(e.consumer == open_op for e in beyond)),
            (outs, any(e.producer == open_op for e in beyond)),
        ):
            if asked:
                if (int(key.max()) + 1) * (int(ports.max()) + 1) > MAX_COMBINED_KEY:
                    key = np.unique(key, return_inverse=True)[1]
                key = key * (int(ports.max()) + 1) + ports
    return key


@dataclass(frozen=True)
class Progress:
    """After `seconds` the solver has found a step of `objective` seconds; none takes less than `bound` seconds."""

    seconds: float
    objective: float
    bound: float


class Incumbent:
    """The best choice for the problem of `tables`, its ticks (infinite before there is one), and the bound.

    `gap` is the part of the best choice's time that the bound may stay behind, `ceiling` the seconds from which on no
    choice is of interest.
    """

    def __init__(
        self, tables: Tables, progress: Callable[[Progress], None] | None, gap: float, ceiling: float = math.inf
    ) -> None:
        self.tables, self.progress, self.gap = tables, progress, gap
        self.ceiling = ceiling * TICKS_PER_SECOND
        self.start = time.monotonic()
        self.choice: tuple[int, ...] | None = None
        self.ticks = math.inf
        self.bound = 0.0
        self.proven = False
        """Whether no choice is better, or, without a choice, whether there is none."""

    def offer(self, choice: tuple[int, ...] | None) -> None:
        """Keep `choice` if it is feasible and the best so far."""
        if choice is None:
            return
        figures = self.tables.total(choice)
        if figures is None:
            return
        ticks = int(self.tables.ticks(figures))
        memory = figures[KEPT] + self.tables.picked(choice).transient.max(initial=0)
        if ticks < self.ticks and memory <= self.tables.room:
            self.choice, self.ticks = choice, ticks
            self.report(ticks, self.bound)

    def report(self, ticks: float, bound: float) -> None:
        if self.progress:
            objective = ticks / TICKS_PER_SECOND
            least = min(objective, max(0.0, bound / TICKS_PER_SECOND))
            self.progress(Progress(time.monotonic() - self.start, objective, least))

    @property
    def least_seconds(self) -> float:
        """The bound: the best choice's own time where that is proven."""
        return (self.ticks if self.proven else min(self.ticks, max(0.0, self.bound))) / TICKS_PER_SECOND

    @property
    def enough(self) -> float:
        """A bound that ends the search: the best choice is then as good as was asked for, or none is of interest."""
        enough = self.ticks - self.gap * max(0.0, self.ticks) if self.ticks < math.inf else math.inf
        return min(enough, self.ceiling)

    @property
    def done(self) -> bool:
        """Whether the best choice is proven to be as good as was asked for."""
        return self.proven or self.bound >= self.enough


LABELS_TO_FIND, LABELS_TO_IMPROVE, LABELS_TO_PROVE = 2**10, 2**12, 2**16
"""Labels that a step keeps: enough to find a choice, to better it, and more than proofs need on chains by far."""

FIRST_SLACK, SLACK_GROWTH = 1e-5, 4
"""The first slack, as a part of the bound, and the factor by which it grows."""

_LOOSE_BOUND_RATIO = 0.02
"""What a bound may be loose by where a gap is allowed, as a part of it."""

_SPLIT_TOLERANCE = 1e-6
"""What a transient or a change of layouts may cost a bound, as a part of it, before its part is split."""

_MAX_COMPARED_CHOICES = 4
"""Choices of a mixture, those with the largest shares, whose layouts are compared."""

_INTEGRALITY_TOLERANCE = 1e-3
"""How far from a whole number of times a mixture may take a candidate for it to count as one."""

_MAX_BRANCH_OPS = 32
"""Ops that are looked at for one to decide."""

_MAX_PARTS_ROUGH, _MAX_PARTS_INEXACT = 8, 16
"""Parts that a rough search bounds, and one that need not find the best choice: more better its bound by little."""

_MAX_CANDIDATES_SMALL = 2**10
"""Candidates up to which a search that is not rough goes on, all the same, to the gap that was asked for."""

_INFINITE_WEIGHT = 2.0**61
"""Weighs more than any choice."""


class Branching:
    """The parts of one problem that are left."""

    def __init__(self, elimination: Elimination, incumbent: Incumbent) -> None:
        self.elimination, self.tables, self.incumbent = elimination, elimination.tables, incumbent
        self.levels = sorted({int(level) for table in elimination.ops for level in table.transient})
        self.candidates = sum(len(self.tables.ops[table].ins) for table in self.tables.op_of)
        self.open: list[tuple[float, int, Dual, float]] = []
        """Bound, number, dual and how far the part was walked through beyond its bound."""
        self.left = math.inf
        """The least bound of the parts that were too wide to walk through."""
        self.numbers = 0
        self.mixed: dict[int, Choice | None] = {}
        """A choice for each part that is worth tuning before it is walked through."""
        self.walkers: dict[int, Walker] = {}
        self.loose = max(_SPLIT_TOLERANCE, incumbent.gap / 4)
        self.known: dict[Choice, None] = {}
        """Choices that bounds came by, of one part or another."""

    def run(self, deadline: float, rough: bool = False, leads: Callable[[Choice], bool] = lambda choice: True) -> None:
        """Search until the proof or the deadline (of ``time.monotonic``), or, `rough`, until only walks go further.

        A rough search ends where its choice leads nowhere, too. It may be called again, to go on.
        """
        incumbent = self.incumbent
        if not self.numbers:
            floor = max((int(table.transient.min()) for table in self.elimination.ops), default=0)
            self._enter(self.elimination, Part(floor, self.levels[-1]), None)
        while self.open and time.monotonic() < deadline:
            bound, number, found, walked = heapq.heappop(self.open)
            incumbent.bound = max(incumbent.bound, min(bound, self.left))
            if incumbent.choice is not None:
                incumbent.report(incumbent.ticks, incumbent.bound)
            if bound >= incumbent.enough:
                self.open, self.left = [], min(self.left, bound)
            elif self._is_enough(rough, leads):
                heapq.heappush(self.open, (bound, number, found, walked))
                break
            elif walked > 0.0 or not self._divide(found):
                if rough and incumbent.choice:
                    heapq.heappush(self.open, (bound, number, found, walked))
                    break
                self._walk(bound, number, found, walked, deadline)
        lowest = min(self.left, self.open[0][0] if self.open else math.inf, incumbent.ticks)
        incumbent.bound = max(incumbent.bound, lowest if lowest < math.inf else 0.0)
        incumbent.proven = not self.open and self.left >= incumbent.ticks

    def _is_enough(self, rough: bool, leads: Callable[[Choice], bool]) -> bool:
        """Whether the search ends with its choice, though parts are left."""
        choice = self.incumbent.choice
        if not choice:
            return False
        if rough:
            return self.numbers >= _MAX_PARTS_ROUGH or not leads(choice)
        is_large = self.candidates > _MAX_CANDIDATES_SMALL
        return self.incumbent.gap > 0.0 and is_large and self.numbers >= _MAX_PARTS_INEXACT

    def _enter(self, elimination: Elimination, part: Part, whole: Dual | None) -> None:
        incumbent = self.incumbent
        found = dual(elimination, part, incumbent.offer, whole, lambda bound: bound >= incumbent.enough,
                     [*self.known], _LOOSE_BOUND_RATIO * incumbent.gap)  # fmt: skip
        if found is None:
            return
        self.known.update(dict.fromkeys(column.choice for column in found.columns))
        mixed = None
        if found.bound < incumbent.enough:
            mixed = mix(self.tables, found.weights[: self.tables.rows], self._own(found.mixed), incumbent.offer)
        if mixed is not None and mixed == incumbent.choice:
            self._tune(found, found.mixed, mixed)
        else:
            self.mixed[self.numbers] = mixed
        heapq.heappush(self.open, (found.bound, self.numbers, found, 0.0))
        self.numbers += 1

    def _tune(self, found: Dual, columns: Sequence[Column], mixed: Choice) -> None:
        goal = found.bound / (1.0 - self.incumbent.gap)
        weights = found.weights[: self.tables.rows]
        tune(self.tables, weights, self._own(columns), mixed, found.bound, goal, self.incumbent.offer)

    def _own(self, columns: Sequence[Column]) -> list[Column]:
        """Columns with the figures of the problem itself, without counts."""
        return [replace(column, figures=column.figures[: self.tables.rows]) for column in columns]

    def _divide(self, found: Dual) -> bool:
        """Split a part in some way that betters its bound, if there is one; exact answers are walked to, mostly."""
        return self._split(found) or (self.incumbent.gap > 0.0 and (self._decide(found) or self._count(found)))

    def _split(self, found: Dual) -> bool:
        """Split a part at the largest transient of its mixture's choices, where that makes the bound loose."""
        part = found.part
        peak = max((column.peak for column in found.mixed), default=0)
        below = max((level for level in self.levels if level < peak), default=-1)
        cheap = found.price * (peak - part.low) <= self.loose * found.bound
        if below < part.low or (cheap and not (found.price == 0.0 and self._is_too_large(found))):
            return False
        self._enter(found.elimination, Part(part.low, below), found)
        self._enter(found.elimination, Part(peak, part.high), found)
        return True

    def _is_too_large(self, found: Dual) -> bool:
        """Whether the transients of its choices alone are what does not fit: then they are free as far as it knows."""
        return not any(column.figures[KEPT] + column.peak <= self.tables.room for column in found.mixed)

    def _decide(self, found: Dual) -> bool:
        """Split a part by what goes with one or another choice of its mixture, at an op where a change would cost."""
        choices = [column.choice for column in found.mixed[:_MAX_COMPARED_CHOICES]]
        for op in self._farthest(found.elimination, choices):
            for first, second in combinations(choices, 2):
                sides = self._sides(found, op, first, second)
                if sides is None:
                    continue
                halves = [found.elimination.restricted(op, own) for own in (sides, ~sides)]
                if not any(half.too_wide for half in halves):
                    for half in halves:
                        self._enter(half, found.part, found)
                    return True
        return False

    def _farthest(self, elimination: Elimination, choices: Sequence[Choice]) -> list[int]:
        """Ops in which choices differ, those first that are farthest from all ops decided so far."""
        ops = np.flatnonzero((np.array(choices) != choices[0]).any(axis=0))
        if elimination.allowed:
            away = np.abs(ops[:, None] - np.array([*elimination.allowed])).min(axis=1)
            ops = ops[np.argsort(-away, kind="stable")]
        return [int(op) for op in ops[:_MAX_BRANCH_OPS]]

    def _sides(self, found: Dual, op: int, first: Choice, second: Choice) -> Bools | None:
        """Which candidates go better with the neighbours in `first` than in `second`; None where both are alike."""

        def weighed(choice: Choice) -> Floats:
            figures, allowed = self.tables.around(op, choice)
            return np.where(allowed, found.weights[: self.tables.rows] @ figures, _INFINITE_WEIGHT)

        farther = weighed(first) - weighed(second)
        if farther[second[op]] - farther[first[op]] <= 2 * self.loose * found.bound:
            return None
        return np.asarray(2 * farther <= farther[first[op]] + farther[second[op]])

    def _count(self, found: Dual) -> bool:
        """Split a part by how many of equal ops take a candidate, where its mixture has a fraction of one take it."""
        choices = np.array([column.choice for column in found.mixed])
        best: tuple[float, int, int, int] | None = None
        for table, members in enumerate(self.tables.members):
            for candidate in np.unique(choices[:, members]) if found.shares and len(members) > 1 else ():
                takes = choices[:, members] == candidate
                times = float(np.dot(found.shares, takes.sum(axis=1)))
                if (away := abs(times - round(times))) > _INTEGRALITY_TOLERANCE:
                    worth = away * self._turns(found, members, takes)
                    if best is None or worth > best[0]:
                        best = worth, table, int(candidate), math.floor(times)
        if best is None:
            return False
        _, table, candidate, most = best
        taken = np.arange(len(self.tables.ops[table].transient)) == candidate
        for sign, limit in ((1, most), (-1, -most - 1)):
            self._enter(found.elimination.counting(table, sign * taken.astype(np.int64), limit), found.part, found)
        return True

    def _turns(self, found: Dual, members: Ints, takes: Bools) -> float:
        """How much one of equal ops turns what has a price where it takes a candidate, as in some choices, or not."""
        at = int(np.argmax(takes.any(axis=0) & ~takes.all(axis=0)))
        own, others = (found.mixed[int(index)].choice for index in (np.argmax(takes[:, at]), np.argmin(takes[:, at])))
        op = int(members[at])
        figures, _ = self.tables.around(op, own)
        turned = np.abs(figures[:, own[op]] - figures[:, others[op]])
        return float(found.weights[: self.tables.rows] @ turned)

    def _walk(self, bound: float, number: int, found: Dual, walked: float, deadline: float) -> None:
        """Walk through a part, farther than before; what is too large is split, or left as it is."""
        incumbent = self.incumbent
        mixed = self.mixed.pop(number, None)
        if mixed is not None:
            self._tune(found, found.columns, mixed)
        if found.elimination.too_large or found.elimination.tables.limits:  # labels are held to no counts
            if not self._decide(found):
                self.left = min(self.left, bound)
            return
        if number not in self.walkers:
            self.walkers[number] = Walker(found)
        walker = self.walkers[number]
        needed = min(incumbent.enough - found.bound + 2 * found.error, walker.farthest)
        slack = min(needed, max(SLACK_GROWTH * walked, 1.0 + FIRST_SLACK * max(0.0, found.bound)))
        width = LABELS_TO_FIND if incumbent.choice is None else LABELS_TO_PROVE
        if incumbent.gap and incumbent.choice is not None:  # at once, as far as a few labels go
            slack, width = needed, LABELS_TO_IMPROVE
        walk = walker.walk(slack, width, deadline)
        incumbent.offer(walk.choice)
        bound = max(bound, found.bound + walk.complete)
        if walk.complete >= slack - found.error:
            if slack < walker.farthest:
                heapq.heappush(self.open, (bound, number, found, slack))
        elif width > LABELS_TO_FIND or slack >= walker.farthest:
            if not self._decide(found):
                self.left = min(self.left, bound)
        else:  # a choice is wanted first, the proof comes after it
            heapq.heappush(self.open, (bound, number, found, slack if incumbent.choice is None else walk.complete))


_MAX_CPSAT_COLUMNS = 2**16
"""Columns beyond which CP-SAT finds nothing that the other steps did not."""


class Search:
    """The steps for one problem, and what they have found (`incumbent`, of the reduced problem)."""

    def __init__(
        self,
        problem: Problem,
        deadline: float,
        progress: Callable[[Progress], None] | None,
        gap: float = 0.0,
        ceiling: float = math.inf,
    ) -> None:
        self.deadline = deadline
        self.problem, self.kept = reduce(problem)
        self.elimination = Elimination(Tables(self.problem), {})
        self.tables = self.elimination.tables
        self.incumbent = Incumbent(self.tables, progress, gap, ceiling)

    @property
    def choice(self) -> tuple[int, ...] | None:
        """The best choice for the problem itself."""
        return None if self.incumbent.choice is None else invert(self.incumbent.choice, self.kept)

    @property
    def least(self) -> float:
        """No choice takes less than so many seconds."""
        return self.incumbent.least_seconds

    @property
    def known(self) -> list[tuple[int, ...]]:
        """Choices for the problem itself that bounds came by."""
        return [invert(choice, self.kept) for choice in self.branching.known]

    def hint(self, choice: Sequence[int], known: Iterable[Sequence[int]] = ()) -> None:
        """Offer a choice for the problem itself; bounds begin with those that are `known`."""
        if (own := self._reduced(choice)) is not None:
            self.incumbent.offer(own)
        self.branching.known = {own: None for each in known if (own := self._reduced(each)) is not None}

    def _reduced(self, choice: Sequence[int]) -> tuple[int, ...] | None:
        """A choice for the problem itself as one for the reduced problem; None where that has not got it."""
        if not all(index in kept for index, kept in zip(choice, self.kept, strict=True)):
            return None
        return tuple(kept.index(index) for index, kept in zip(choice, self.kept, strict=True))

    def run(self, rough: bool = False, leads: Callable[[tuple[int, ...]], bool] = lambda choice: True) -> None:
        """Search until the proof or the deadline; or, `rough`, until a choice that bounds lead to.

        A rough search of a narrow graph ends, too, with a choice for the problem itself that `leads` nowhere.
        Where a gap is allowed, the parts of a narrow graph end at a number of them, too, and the gap may stay larger.
        """
        incumbent, narrow = self.incumbent, not self.elimination.too_wide
        if narrow:
            self.branching.run(self.deadline, rough, lambda choice: leads(invert(choice, self.kept)))
        else:
            descend(self.tables, incumbent.offer)
            if not (rough and incumbent.choice):
                self.sweep()
        close = incumbent.choice is not None and (rough or (narrow and incumbent.gap > 0.0))
        if not (incumbent.done or close):
            self.prove()

    @cached_property
    def branching(self) -> Branching:
        """The parts of the choices."""
        return Branching(self.elimination, self.incumbent)

    # -- wide graphs

    def sweep(self) -> None:
        """Walk through all choices near the bound, and farther and farther from it until one lies within the slack."""
        incumbent, program = self.incumbent, Program(self.problem)
        program.limit_memory()
        program.minimise_time()
        relaxation = self.relaxation = relax(program, self.deadline - time.monotonic())
        if relaxation is None:
            return
        bound, error = relaxation.bound, relaxation.error
        incumbent.bound = max(incumbent.bound, bound - error)
        slack = first = error + FIRST_SLACK * max(0.0, bound)
        half = (self.deadline + time.monotonic()) / 2
        farthest = error + sum(float(op.max()) for op in relaxation.candidates)
        farthest += sum(float(edge[np.isfinite(edge)].max()) for edge in relaxation.edges)
        while not incumbent.done:
            width = LABELS_TO_FIND if incumbent.choice is None else LABELS_TO_PROVE
            found = sweep(self.tables, relaxation, slack, width, half)
            incumbent.offer(found.choice)
            incumbent.bound = max(incumbent.bound, bound + found.complete - error)
            incumbent.proven = incumbent.ticks <= incumbent.bound or found.complete >= farthest
            if found.complete < slack and (width == LABELS_TO_PROVE or slack >= farthest):
                return
            # A first choice can be far from the best one: do not jump to where it would be proven.
            grown = SLACK_GROWTH * (slack if incumbent.choice is None else max(first, found.complete))
            slack = min(farthest, incumbent.enough - bound + 2 * error, grown)

    relaxation: Relaxation | None = None

    def prove(self) -> None:
        """Let CP-SAT go on from the best choice, over the candidates that could still better it."""
        incumbent, problem, hint = self.incumbent, self.problem, self.incumbent.choice
        if self.relaxation and incumbent.choice:
            slack = incumbent.ticks - self.relaxation.bound + self.relaxation.error
            near = tuple(tuple(int(i) for i in np.flatnonzero(op <= slack)) for op in self.relaxation.candidates)
            hint = tuple(indices.index(index) for indices, index in zip(near, incumbent.choice, strict=True))
            problem = restricted(problem, near)
        else:
            near = tuple(tuple(range(len(op.candidates))) for op in problem.ops)
        if incumbent.choice and sum(edge.seconds.size for edge in problem.edges) > _MAX_CPSAT_COLUMNS:
            return
        program = Program(problem)
        program.limit_memory()
        program.minimise_time()
        proof = prove(program, self.deadline - time.monotonic(), hint, incumbent.report, incumbent.gap)
        incumbent.offer(None if proof.choice is None else invert(proof.choice, near))
        incumbent.proven = proof.status == "INFEASIBLE" or (proof.status == "OPTIMAL" and not incumbent.gap)
        if not incumbent.proven:
            incumbent.bound = max(incumbent.bound, min(incumbent.ticks, proof.bound))
