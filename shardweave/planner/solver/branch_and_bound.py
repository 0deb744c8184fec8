"""Branch and bound: the search for the fastest choice, from Lagrangian bounds to small integer programs.

On narrow graphs (`Elimination`) the search is over parts of the choices (`Part`), the one with the lowest bound first:

1. `Search._enter`: `dual` bounds the part. The choices that it comes by are columns. HiGHS solves the integer program
   of the candidates that the columns of the best mixture have (a restricted master heuristic), until its choice is
   within the gap of the bound.
2. `Search._split`: the largest transient is no sum, so the bound may be loose by it. A part is split at the largest
   transient of its mixture.
3. `Search._close`: a candidate whose reduced cost exceeds what lies between the bound and the best choice is in no
   better choice (reduced-cost fixing). The integer program of the candidates that are left closes the gap: by CP-SAT
   where it has so few columns that the last tick counts, else by HiGHS.

Wide graphs have no bounds by elimination: HiGHS solves their whole integer program.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardweave.planner.problem.problem import TICKS_PER_SECOND, Kept, Problem, invert, restricted
from shardweave.planner.solver.elimination import KEPT, Elimination, Floats, Tables
from shardweave.planner.solver.ilp import Answer, Program, solve_by_cp_sat, solve_by_highs
from shardweave.planner.solver.lagrangian import Choice, Column, Dual, Part, dual, least_memory

_LOOSE_BOUND_RATIO = 0.02
"""What a bound may be loose by, as a part of the gap that is allowed."""

_SPLIT_TOLERANCE = 1e-6
"""What a transient may cost a bound, as a part of it, before its part is split."""

_MAX_PARTS_ROUGH, _MAX_PARTS = 8, 16
"""Parts that a rough search bounds, and any other: more better the bound by little."""

_HEURISTIC_GAP_RATIO = 0.25
"""The part of the gap asked for to which the programs of columns are solved: their own bounds lie above the part's."""

_MAX_EXACT_COLUMNS = 2**7
"""Columns of a program up to which CP-SAT closes the gap, exactly. HiGHS is faster from a hundred columns on."""

_MAX_COLUMNS = 2**13
"""Columns of a program beyond which HiGHS mostly finds nothing better in time."""

_MAX_NODES = 2**10
"""Nodes that HiGHS may branch into, so that its answer does not depend on the machine's speed."""


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
        self.choice: Choice | None = None
        self.ticks = math.inf
        self.bound = 0.0
        self.proven = False
        """Whether no choice is better, or, without a choice, whether there is none."""

    def offer(self, choice: Choice | None) -> None:
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
            self.report()

    def raise_bound(self, bound: float) -> None:
        """No choice takes fewer ticks than `bound`."""
        self.bound = max(self.bound, min(bound, self.ticks))
        self.proven = self.choice is not None and self.bound >= self.ticks
        if self.choice is not None:
            self.report()

    def report(self) -> None:
        """Tell the progress."""
        if self.progress:
            objective = self.ticks / TICKS_PER_SECOND
            least = min(objective, max(0.0, self.bound / TICKS_PER_SECOND))
            self.progress(Progress(time.monotonic() - self.start, objective, least))

    @property
    def least_seconds(self) -> float:
        """The bound in seconds: the best choice's own time where that is proven."""
        return (self.ticks if self.proven else min(self.ticks, max(0.0, self.bound))) / TICKS_PER_SECOND

    @property
    def enough(self) -> float:
        """A bound that ends the search: the best choice is then as good as was asked for, or none is of interest."""
        enough = self.ticks - self.gap * max(0.0, self.ticks) if self.ticks < math.inf else math.inf
        return min(enough, self.ceiling)


class Search:
    """The search for one problem, and what it has found (`incumbent`)."""

    def __init__(
        self,
        problem: Problem,
        deadline: float,
        progress: Callable[[Progress], None] | None = None,
        gap: float = 0.0,
        ceiling: float = math.inf,
    ) -> None:
        self.deadline = deadline
        self.problem = problem
        self.elimination = Elimination(Tables(problem))
        self.tables = self.elimination.tables
        self.every: Kept = tuple(tuple(range(len(op.candidates))) for op in self.problem.ops)
        self.incumbent = Incumbent(self.tables, progress, gap, ceiling)
        self.open: list[tuple[float, int, Dual]] = []
        """Bound, number and dual of the parts that are left."""
        self.num_parts = 0

    def run(self, rough: bool = False) -> None:
        """Search until the proof or the deadline; or, `rough`, until there is a choice that bounds lead to."""
        if self.elimination.too_wide:
            answer = self._solve(self.every, -math.inf, _MAX_NODES)
            self.incumbent.raise_bound(answer.bound)
            self.incumbent.proven |= answer.status == "INFEASIBLE"
        else:
            self._branch(rough)

    def _branch(self, rough: bool) -> None:
        """Bound, split and solve the parts, the one with the least bound first."""
        incumbent, closed = self.incumbent, math.inf
        levels = sorted({int(level) for table in self.elimination.ops for level in table.transient})
        floor = max((int(table.transient.min()) for table in self.elimination.ops), default=0)
        self._enter(Part(floor, levels[-1]), None)
        if incumbent.choice is None and self.open:
            incumbent.offer(least_memory(self.elimination))
            if incumbent.choice is None:
                self.open.clear()
        while self.open and time.monotonic() < self.deadline:
            bound, _, found = heapq.heappop(self.open)
            incumbent.raise_bound(min(bound, closed))
            if bound >= incumbent.enough:
                closed = min(closed, bound)
                break
            halves = self._split(found, levels)
            if halves and self.num_parts < (_MAX_PARTS_ROUGH if rough else _MAX_PARTS):
                for half in halves:
                    self._enter(half, found)
            else:
                closed = min(closed, self._close(found, rough))
        lowest = min(closed, self.open[0][0] if self.open else math.inf)
        incumbent.proven = incumbent.choice is None and lowest == math.inf
        if lowest < math.inf or incumbent.choice is not None:
            incumbent.raise_bound(lowest)

    def _enter(self, part: Part, whole: Dual | None) -> None:
        """Bound a part, and look for a choice among the candidates of the columns that its bound came by."""
        incumbent = self.incumbent
        found = dual(self.elimination, part, incumbent.offer, whole, lambda bound: bound >= incumbent.enough,
                     _LOOSE_BOUND_RATIO * incumbent.gap)  # fmt: skip
        if found is None:
            return
        if found.bound < incumbent.enough:
            self._solve(_candidates(found.mixed), found.bound, _MAX_NODES, heuristic=True)
        heapq.heappush(self.open, (found.bound, self.num_parts, found))
        self.num_parts += 1

    def _split(self, found: Dual, levels: Sequence[int]) -> tuple[Part, Part] | None:
        """Two halves of a part at the largest transient of its mixture, where that makes the bound loose."""
        part = found.part
        peak = max((column.peak for column in found.mixed), default=0)
        below = max((level for level in levels if level < peak), default=-1)
        tolerance = max(_SPLIT_TOLERANCE, self.incumbent.gap / 4)
        cheap = found.price * (peak - part.low) <= tolerance * found.bound
        # Where the transients alone are what does not fit, they are free as far as the bound knows
        fits = any(column.figures[KEPT] + column.peak <= self.tables.room for column in found.mixed)
        if below < part.low or (cheap and (found.price > 0.0 or fits)):
            return None
        return Part(part.low, below), Part(peak, part.high)

    def _close(self, found: Dual, rough: bool) -> float:
        """The bound of a part after the integer program of the candidates that could still better the best choice.

        Where fewer candidates have a column, their program comes first: a better choice leaves fewer of the others.
        """
        incumbent, columns = self.incumbent, _candidates(found.columns)
        costs: list[Floats] | None = None
        if not (rough or self.elimination.too_large):
            costs = self.elimination.reduced_costs(found.minimum)

        def slack() -> float:
            """What a choice that is worth finding takes more than the bound at most, and one tick."""
            return incumbent.enough - found.bound + 1.0

        def fixed() -> Kept:
            if costs is None:
                return self.every
            most = slack() + 2 * found.error
            return tuple(tuple(np.flatnonzero(own <= most).tolist()) for own in costs)

        if rough or self._num_columns(columns) < self._num_columns(fixed()):
            self._solve(columns, found.bound, _MAX_NODES, heuristic=True)
        if rough or found.bound >= incumbent.enough:
            return found.bound
        most = found.bound + slack()
        answer = self._solve(fixed(), found.bound, None)
        least = math.inf if answer.status == "INFEASIBLE" else answer.bound
        return max(found.bound, min(least, most))

    def _solve(self, kept: Kept, bound: float, node_limit: int | None, heuristic: bool = False) -> Answer:
        """Solve the integer program of only these candidates, and offer its choice.

        No choice of theirs takes fewer ticks than `bound`. Of a `heuristic` program only the choice counts.
        """
        incumbent = self.incumbent
        if not all(kept):
            return Answer(None, math.inf, "INFEASIBLE")
        columns = self._num_columns(kept)
        if columns > _MAX_COLUMNS and incumbent.choice is not None and not self.elimination.too_wide:
            return Answer(None, -math.inf, "UNKNOWN")
        program, left = Program.fastest(restricted(self.problem, kept)), self.deadline - time.monotonic()
        if heuristic or columns > _MAX_EXACT_COLUMNS:
            gap = incumbent.gap * (_HEURISTIC_GAP_RATIO if heuristic else 1.0)
            target = bound / (1.0 - incumbent.gap) if incumbent.gap < 1.0 else math.inf
            answer = solve_by_highs(program, left, gap, node_limit, target, heuristic)
            incumbent.offer(answer.choice and invert(answer.choice, kept))
            fits = answer.choice is None or program.problem.feasible(answer.choice)
            if heuristic or (answer.status != "INFEASIBLE" and fits and incumbent.choice is not None):
                return answer
        exact = solve_by_cp_sat(program, self.deadline - time.monotonic(), gap=incumbent.gap)
        incumbent.offer(exact.choice and invert(exact.choice, kept))
        return exact

    def _num_columns(self, kept: Kept) -> int:
        """About how many columns the program of these candidates has."""
        ports = [
            (len(np.unique(table.ins[list(own)])), len(np.unique(table.outs[list(own)])))
            for own, table in zip(kept, (self.tables.ops[number] for number in self.tables.op_of), strict=True)
        ]
        flows = sum(ports[edge.producer][1] * ports[edge.consumer][0] for edge in self.problem.edges)
        return sum(map(len, kept)) + flows


def _candidates(columns: Sequence[Column]) -> Kept:
    """The candidates that some of the columns have."""
    choices = np.array([column.choice for column in columns])
    return tuple(tuple(np.unique(own).tolist()) for own in choices.T)
