"""All choices close to the bound, kept as a few labels while one walks along the ops.

A label is a choice for the ops so far: its time, its kept memory, its largest transient, and the ports that later
edges will ask for. Two things keep labels few, and neither loses the optimum:

- *dominance*: of two labels with the same open ports, one that is no better in time, kept and transient memory goes;
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

from shardweave.compiler.planner.problem import Edge, Problem
from shardweave.compiler.planner.program import Relaxation

Ints = NDArray[np.int64]

_LARGE = 2**56


@dataclass(frozen=True)
class Labels:
    """Columns of the labels: one entry each a label; `ports` has (in, out) of each op with open edges."""

    ticks: Ints
    kept: Ints
    peak: Ints
    excess: NDArray[np.float64]
    ports: dict[int, tuple[Ints, Ints]]

    def take(self, indices: Ints) -> Labels:
        ports = {op: (ins[indices], outs[indices]) for op, (ins, outs) in self.ports.items()}
        return Labels(self.ticks[indices], self.kept[indices], self.peak[indices], self.excess[indices], ports)


@dataclass(frozen=True)
class Sweep:
    """The fastest choice found (None if none), and up to which excess above the bound nothing was overlooked.

    A choice whose time is at most ``bound + complete`` is optimal; where there is none, every choice costs more.
    """

    choice: tuple[int, ...] | None
    complete: float


def sweep(problem: Problem, relaxation: Relaxation, slack: float, width: int, deadline: float) -> Sweep:
    """The fastest feasible choice among those within `slack` ticks of the bound.

    At most `width` labels are kept, those with the least excess; what goes beyond that lowers `complete`. After
    `deadline` (of ``time.monotonic``) it gives up.
    """
    room = problem.memory_limit - problem.fixed_bytes
    columns = [np.flatnonzero(excess <= slack) for excess in relaxation.candidates]
    if not all(map(len, columns)):
        return Sweep(None, slack)
    tables = [
        np.array(
            [(c.ticks, c.kept_bytes, c.transient_bytes, c.in_port, c.out_port) for c in op.candidates], dtype=np.int64
        )[own].T
        for op, own in zip(problem.ops, columns, strict=True)
    ]
    # Whatever is chosen, the peak is at least this: labels below it are alike.
    floor = max((int(table[2].min()) for table in tables), default=0)
    least = np.array([table[1].min() for table in tables], dtype=np.int64)
    still = np.append(np.cumsum(least[::-1])[::-1], 0)
    if floor + still[0] > room:
        return Sweep(None, slack)
    last = [max((max(e.producer, e.consumer) for e in edges), default=0) for edges in problem.edges_of]
    arriving: list[list[tuple[Edge, NDArray[np.float64]]]] = [[] for _ in problem.ops]
    for edge, excess in zip(problem.edges, relaxation.edges, strict=True):
        arriving[max(edge.producer, edge.consumer)].append((edge, excess))

    zero = np.zeros(1, dtype=np.int64)
    labels = Labels(zero, zero, zero + floor, np.zeros(1), {})
    steps: list[tuple[Ints, Ints]] = []
    complete = slack
    for op, (ticks, kept, transient, ins, outs) in enumerate(tables):
        if time.monotonic() > deadline:
            return Sweep(None, 0.0)
        time_then = labels.ticks[:, None] + ticks
        excess_then = labels.excess[:, None] + relaxation.candidates[op][columns[op]]
        for edge, excess in arriving[op]:
            if edge.consumer == op:
                pair = (labels.ports[edge.producer][1][:, None], ins)
            else:
                pair = (outs, labels.ports[edge.consumer][0][:, None])
            time_then = time_then + edge.ticks[pair]
            excess_then = excess_then + excess[pair]
        kept_then = labels.kept[:, None] + kept
        peak_then = np.maximum(labels.peak[:, None], transient)
        parent, own = np.nonzero((excess_then <= slack) & (kept_then + peak_then + still[op + 1] <= room))
        if not len(parent):
            return Sweep(None, complete)
        pairs = (parent, own)
        ports = {a: (i[parent], o[parent]) for a, (i, o) in labels.ports.items() if last[a] > op}
        if last[op] > op:
            ports[op] = (ins[own], outs[own])
        labels = Labels(time_then[pairs], kept_then[pairs], peak_then[pairs], excess_then[pairs], ports)
        stay = undominated(labels.ticks, labels.kept, labels.peak, _open_ports(problem, labels, op))
        if len(stay) > width:
            order = np.argsort(labels.excess[stay], kind="stable")
            complete = min(complete, float(labels.excess[stay[order[width]]]))
            stay = stay[order[:width]]
        labels = labels.take(stay)
        steps.append((parent[stay], columns[op][own[stay]]))
    index, choice = int(np.argmin(labels.ticks)), []
    for parents, candidates in reversed(steps):
        choice.append(int(candidates[index]))
        index = int(parents[index])
    return Sweep(tuple(reversed(choice)), complete)


def _open_ports(problem: Problem, labels: Labels, op: int) -> Ints:
    """A number for each label, equal where all ports that edges beyond `op` ask for are equal."""
    key = np.zeros(len(labels.ticks), dtype=np.int64)
    for open_op, (ins, outs) in labels.ports.items():
        beyond = [e for e in problem.edges_of[open_op] if max(e.producer, e.consumer) > op]
        for ports, asked in (
            (ins, any(e.consumer == open_op for e in beyond)),
            (outs, any(e.producer == open_op for e in beyond)),
        ):
            if asked:
                if (int(key.max()) + 1) * (int(ports.max()) + 1) > _LARGE:
                    key = np.unique(key, return_inverse=True)[1]
                key = key * (int(ports.max()) + 1) + ports
    return key


def undominated(ticks: Ints, kept: Ints, peak: Ints, key: Ints) -> Ints:
    """The indices of the labels that no other one with the same key is as good as in all three figures."""
    order = np.lexsort((peak, kept, ticks, key))
    key, peak = key[order], peak[order]
    rank = np.cumsum(np.append(False, key[1:] != key[:-1]))
    kept = kept[order]
    if (int(rank[-1]) + 1) * (int(kept.max()) + 1) > _LARGE:
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
