"""All choices close to the bound, kept as a few labels while one walks along the ops.

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

from shardweave.compiler.planner.dominance import LARGE, undominated
from shardweave.compiler.planner.problem import Edge, Problem
from shardweave.compiler.planner.program import Relaxation
from shardweave.compiler.planner.tables import KEPT, EdgeFigures, Ints, Tables


@dataclass(frozen=True)
class Labels:
    """Columns of the labels: one entry each a label; `ports` has (in, out) of each op with open edges."""

    figures: Ints
    peak: Ints
    excess: NDArray[np.float64]
    ports: dict[int, tuple[Ints, Ints]]

    def take(self, indices: Ints) -> Labels:
        ports = {op: (ins[indices], outs[indices]) for op, (ins, outs) in self.ports.items()}
        return Labels(self.figures[:, indices], self.peak[indices], self.excess[indices], ports)


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
    labels = Labels(figures, np.full(1, floor, dtype=np.int64), np.zeros(1), {})
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
        labels = Labels(then[:, parent, own], peak_then[pairs], excess_then[pairs], ports)
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


def _open_ports(problem: Problem, labels: Labels, op: int) -> Ints:
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
