"""Label setting: the exact front of time and memory along a path of ops.

All choices within a slack of the bound, kept as a few labels while one op after the other is eliminated.

A label of a step is a choice for the ops eliminated so far in its branch, given the states of its scope: its
figures and its largest transient. `Elimination.minimum` says what the rest costs at least, exactly, at the weights that
gave the bound (`Dual`): a label stays only where both together are within the slack, which loses nothing, as what a
choice weighs is never more than its time. Of two labels for the same states, one that is no better whatever follows
goes (`shardweave.planner.solver.reductions`).

These are labels for shortest paths with a resource (Desrochers and Soumis, 1988), on graphs of small width. Equal
layers share their labels: a step of a kind is walked through once, for the best of the places where it stands.

All choices close to the bound, kept as a few labels while one walks along the ops.

A label is a choice for the ops so far: its figures, its largest transient, and the ports that later edges will ask for.
Two things keep labels few, and neither loses the optimum:

- *dominance*: of two labels with the same open ports, one that is no better whatever follows goes;
- *the bound*: by linear duality a choice costs at least ``bound + sum of excess`` (`Relaxation`), so a label whose
  excess is already above `slack` cannot become a choice within `slack` of the bound.

On a chain this is the label-setting algorithm for shortest paths with a resource (Desrochers and Soumis, 1988), made
narrow by reduced costs; on other graphs labels carry the ports of all ops with open edges.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardweave.planner.problem.problem import Edge, Problem
from shardweave.planner.solver.elimination import Floats
from shardweave.planner.solver.ilp import Relaxation
from shardweave.planner.solver.lagrangian import Dual
from shardweave.planner.solver.reductions import LARGE, undominated
from shardweave.planner.solver.tables import KEPT, EdgeFigures, Ints, Tables

_MOST_PAIRS = 2**5
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
            if many.sum() > _MOST_PAIRS * self.width:
                order = np.argsort(above, kind="stable")
                fit = int(np.searchsorted(np.cumsum(many[order]), _MOST_PAIRS * self.width))
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
                if (int(key.max()) + 1) * (int(ports.max()) + 1) > LARGE:
                    key = np.unique(key, return_inverse=True)[1]
                key = key * (int(ports.max()) + 1) + ports
    return key
