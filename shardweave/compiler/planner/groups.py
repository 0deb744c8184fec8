"""Minima over large tables out of small ones: states in groups, coarse to fine.

A group of states costs what the cheapest of its members does, alone and beside each other group. So the minimum over
groups is never above the minimum over states, and is equal to it where it goes through groups of one member alone.
Where it goes through larger ones, these are split, and it is looked for again (coarse-to-fine dynamic programming,
Raphael 2001). Most states are far from any minimum and stay together: of 300 layouts 20 to 40 are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardweave.compiler.planner.tables import Ints

if TYPE_CHECKING:
    from shardweave.compiler.planner.elimination import Minimum

Floats = NDArray[np.float64]
Solve = Callable[["Minimum"], tuple[float, list[int]]]

_SPLIT = 4
"""A group is split into the part of its members that seem cheapest, one in so many, and the others."""


class Groups:
    """The groups of each table of ops, which only get smaller from one minimum to the next.

    Parameters
    ----------
    states : sequence of int
        Each table's number of states.
    op_of : sequence of int
        Each op's table.
    ends : sequence of (int, int)
        The tables of the ops at each edge table's two ends.
    around : sequence of sequences of (int, int, bool)
        For each op: its edges' tables, the ops at their other ends, and whether it is their producer.
    """

    def __init__(
        self,
        states: Sequence[int],
        op_of: Sequence[int],
        ends: Sequence[tuple[int, int]],
        around: Sequence[Sequence[tuple[int, int, bool]]],
    ) -> None:
        self.op_of, self.ends, self.around = op_of, ends, around
        self.members: list[list[Ints]] = [[np.arange(count)] for count in states]

    def least(self, found: Minimum, solve: Solve) -> tuple[float, list[int]]:
        """The least sum over states, and the state of each op, from `solve`, which finds both in tables of any size."""
        while True:
            value, groups = solve(self._coarse(found))
            if value == math.inf or not self._split(found, groups):
                members = [self.members[table][group] for table, group in zip(self.op_of, groups, strict=True)]
                return value, [int(own[0]) for own in members]

    def _coarse(self, found: Minimum) -> Minimum:
        """What groups cost, alone and beside each other."""
        orders = [np.concatenate(members) for members in self.members]
        starts = [np.cumsum([0, *map(len, members[:-1])]) for members in self.members]
        states = [np.minimum.reduceat(costs[order], start) for costs, order, start in zip(found.states, orders, starts)]
        edges = []
        for costs, (producer, consumer) in zip(found.edges, self.ends, strict=True):
            rows = np.minimum.reduceat(costs[orders[producer]], starts[producer], axis=0)
            edges.append(np.minimum.reduceat(rows[:, orders[consumer]], starts[consumer], axis=1))
        return replace(found, states=states, edges=edges, least=[])

    def _split(self, found: Minimum, groups: Sequence[int]) -> bool:
        """Split the groups of several members that a choice goes through; whether there are any."""
        split: dict[tuple[int, int], list[Ints]] = {}
        for op, (table, group) in enumerate(zip(self.op_of, groups, strict=True)):
            own = self.members[table][group]
            if len(own) > 1 and (table, group) not in split:
                order = own[np.argsort(self._seem(found, op, own, groups), kind="stable")]
                first = -(-len(own) // _SPLIT)
                split[table, group] = [np.sort(order[:first]), np.sort(order[first:])]
        for (table, group), parts in sorted(split.items(), reverse=True):
            self.members[table][group : group + 1] = parts
        return bool(split)

    def _seem(self, found: Minimum, op: int, own: Ints, groups: Sequence[int]) -> Floats:
        """What members cost an op at least while its neighbours are in these groups."""
        total = found.states[self.op_of[op]][own]
        for edge, other, produces in self.around[op]:
            costs = found.edges[edge] if produces else found.edges[edge].T
            beside = self.members[self.op_of[other]][groups[other]]
            total = total + costs[np.ix_(own, beside)].min(axis=1)
        return np.asarray(total)
