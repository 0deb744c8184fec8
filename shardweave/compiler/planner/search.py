"""The search for the fastest choice: the best one so far, the bound so far, and the steps that better them.

Where the graph is narrow (`Elimination`), the search is exact: parts of the choices by their largest transient, each
with the bound of duality (`dual`), the lowest bound first; a part is split where its transient makes the bound
loose, else walked through ever farther from its bound (`Walker`). On other graphs GLOP's relaxation takes the place
of the bound, a sweep in the ops' order that of the walk, and CP-SAT goes on from there.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardweave.compiler.planner.descent import descend
from shardweave.compiler.planner.duality import Dual, Part, dual
from shardweave.compiler.planner.elimination import Elimination
from shardweave.compiler.planner.labels import Walker
from shardweave.compiler.planner.mixing import mix
from shardweave.compiler.planner.problem import TICKS_PER_SECOND, Problem
from shardweave.compiler.planner.program import Program, Relaxation, prove, relax
from shardweave.compiler.planner.reductions import invert, reduce, restricted
from shardweave.compiler.planner.sweep import sweep
from shardweave.compiler.planner.tables import KEPT, Tables

NARROW, WIDE = 2**10, 2**16
"""Labels that a step keeps: enough to find a choice, and more than the proof needs on chains by far."""

_FIRST_SLACK, _GROWTH = 1e-5, 4
"""The first slack, as a part of the bound, and the factor by which it grows."""

_LOOSE = 1e-6
"""What a transient may cost a bound, as a part of it, before its part is split."""

_MANY_COLUMNS = 2**16
"""Columns beyond which CP-SAT finds nothing that the other steps did not."""


@dataclass(frozen=True)
class Progress:
    """After `seconds` the solver has found a step of `objective` seconds; none takes less than `bound` seconds."""

    seconds: float
    objective: float
    bound: float


class Search:
    """The best choice and the bound so far, which each step betters."""

    def __init__(
        self, problem: Problem, deadline: float, progress: Callable[[Progress], None] | None, gap: float = 0.0
    ) -> None:
        self.start, self.deadline, self.progress, self.gap = time.monotonic(), deadline, progress, gap
        self.problem, self.kept = reduce(problem)
        self.tables = Tables(self.problem)
        self.best: tuple[int, ...] | None = None
        """The best choice for the reduced problem."""
        self.ticks = math.inf
        self.bound = 0.0
        self.proven = False

    @property
    def choice(self) -> tuple[int, ...] | None:
        """The best choice for the problem itself."""
        return None if self.best is None else invert(self.best, self.kept)

    def hint(self, choice: Sequence[int]) -> None:
        """Offer a choice for the problem itself."""
        if all(index in kept for index, kept in zip(choice, self.kept, strict=True)):
            self.offer(tuple(kept.index(index) for index, kept in zip(choice, self.kept, strict=True)))

    def offer(self, choice: tuple[int, ...] | None) -> None:
        """Keep `choice` if it is feasible and the best so far."""
        if choice is None:
            return
        figures = self.tables.total(choice)
        if figures is None:
            return
        ticks = int(self.tables.ticks(figures))
        if (
            ticks < self.ticks
            and figures[KEPT] + self.tables.picked(choice).transient.max(initial=0) <= self.tables.room
        ):
            self.best, self.ticks = choice, ticks
            self.report(ticks, self.bound)

    @property
    def enough(self) -> float:
        """A bound that ends the search: the best choice is then as good as was asked for."""
        return self.ticks - self.gap * max(0.0, self.ticks)

    @property
    def done(self) -> bool:
        """Whether the best choice is proven to be as good as was asked for."""
        return self.proven or self.bound >= self.enough

    def report(self, ticks: float, bound: float) -> None:
        if self.progress:
            objective = ticks / TICKS_PER_SECOND
            least = min(objective, max(0.0, bound / TICKS_PER_SECOND))
            self.progress(Progress(time.monotonic() - self.start, objective, least))

    def run(self) -> None:
        """Search until the proof or the deadline."""
        elimination = Elimination.of(self.problem)
        if elimination is not None:
            Branching(self, elimination).run()
        else:
            descend(self.tables, self.offer)
            self.sweep()
        if not self.done:
            self.prove()

    # -- wide graphs

    def sweep(self) -> None:
        """Walk through all choices near the bound, and farther and farther from it until one lies within the slack."""
        program = Program(self.problem)
        program.limit_memory()
        program.minimise_time()
        relaxation = self.relaxation = relax(program, self.deadline - time.monotonic())
        if relaxation is None:
            return
        bound, error = relaxation.bound, relaxation.error
        self.bound = max(self.bound, bound - error)
        slack = first = error + _FIRST_SLACK * max(0.0, bound)
        half = (self.deadline + time.monotonic()) / 2
        farthest = error + sum(float(op.max()) for op in relaxation.candidates)
        farthest += sum(float(edge[np.isfinite(edge)].max()) for edge in relaxation.edges)
        while not self.done:
            width = NARROW if self.best is None else WIDE
            found = sweep(self.tables, relaxation, slack, width, half)
            self.offer(found.choice)
            self.bound = max(self.bound, bound + found.complete - error)
            self.proven = self.ticks <= self.bound or found.complete >= farthest
            if found.complete < slack and (width == WIDE or slack >= farthest):
                return
            # A first choice can be far from the best one: do not jump to where it would be proven.
            grown = _GROWTH * (slack if self.best is None else max(first, found.complete))
            slack = min(farthest, self.enough - bound + 2 * error, grown)

    relaxation: Relaxation | None = None

    def prove(self) -> None:
        """Let CP-SAT go on from the best choice, over the candidates that could still better it."""
        problem, hint = self.problem, self.best
        if self.relaxation and self.best:
            slack = self.ticks - self.relaxation.bound + self.relaxation.error
            near = tuple(tuple(int(i) for i in np.flatnonzero(op <= slack)) for op in self.relaxation.candidates)
            hint = tuple(indices.index(index) for indices, index in zip(near, self.best, strict=True))
            problem = restricted(problem, near)
        else:
            near = tuple(tuple(range(len(op.candidates))) for op in problem.ops)
        if self.best and sum(edge.seconds.size for edge in problem.edges) > _MANY_COLUMNS:
            return
        program = Program(problem)
        program.limit_memory()
        program.minimise_time()
        proof = prove(program, self.deadline - time.monotonic(), hint, self.report, self.gap)
        self.offer(None if proof.choice is None else invert(proof.choice, near))
        self.proven = proof.status == "INFEASIBLE" or (proof.status == "OPTIMAL" and not self.gap)
        if not self.proven:
            self.bound = max(self.bound, min(self.ticks, proof.bound))


class Branching:
    """Parts of the choices, the one with the lowest bound first."""

    def __init__(self, search: Search, elimination: Elimination) -> None:
        self.search, self.elimination = search, elimination
        self.levels = sorted({int(level) for table in elimination.ops for level in table.transient})
        self.open: list[tuple[float, int, Dual, float]] = []
        """Bound, number, dual and how far the part was walked through beyond its bound."""
        self.left = math.inf
        """The least bound of the parts that were too wide to walk through."""
        self.numbers = 0
        self.walkers: dict[int, Walker] = {}

    def run(self) -> None:
        """Search until the proof or the deadline."""
        search = self.search
        floor = max((int(table.transient.min()) for table in self.elimination.ops), default=0)
        self._enter(Part(floor, self.levels[-1]), None)
        while self.open and time.monotonic() < search.deadline:
            bound, number, found, walked = heapq.heappop(self.open)
            search.bound = max(search.bound, min(bound, self.left))
            if bound >= search.enough:
                self.open = []
                self.left = min(self.left, bound)
                break
            if walked == 0.0 and self._split(found):
                continue
            self._walk(bound, number, found, walked)
        lowest = min(self.left, self.open[0][0] if self.open else math.inf, search.ticks)
        search.bound = max(search.bound, lowest if lowest < math.inf else 0.0)
        search.proven = not self.open and self.left >= search.ticks

    def _enter(self, part: Part, whole: Dual | None) -> None:
        search = self.search
        found = dual(self.elimination, part, search.offer, whole, lambda bound: bound >= search.enough)
        if found is None:
            return
        if found.bound < search.enough:
            mix(search.tables, found.weights, found.mixed, search.offer)
        self.numbers += 1
        heapq.heappush(self.open, (found.bound, self.numbers, found, 0.0))

    def _split(self, found: Dual) -> bool:
        """Split a part at the largest transient of its mixture's choices, where that makes the bound loose."""
        part = found.part
        peak = max((column.peak for column in found.mixed), default=0)
        below = max((level for level in self.levels if level < peak), default=-1)
        loose = max(_LOOSE, self.search.gap / 4)
        if below < part.low or found.price * (peak - part.low) <= loose * found.bound:
            return False
        self._enter(Part(part.low, below), found)
        self._enter(Part(peak, part.high), found)
        return True

    def _walk(self, bound: float, number: int, found: Dual, walked: float) -> None:
        """Walk through a part, farther than before."""
        search = self.search
        if number not in self.walkers:
            self.walkers[number] = Walker(self.elimination, found)
        walker = self.walkers[number]
        slack = max(_GROWTH * walked, 1.0 + _FIRST_SLACK * max(0.0, found.bound))
        slack = min(slack, search.enough - found.bound + 2 * found.error, walker.farthest)
        width = NARROW if search.best is None else WIDE
        walk = walker.walk(slack, width, search.deadline)
        search.offer(walk.choice)
        bound = max(bound, found.bound + walk.complete)
        if walk.complete >= slack - found.error:
            if slack < walker.farthest:
                heapq.heappush(self.open, (bound, number, found, slack))
        elif width == WIDE or slack >= walker.farthest:
            self.left = min(self.left, bound)
        else:  # a choice is wanted first, the proof comes after it
            heapq.heappush(self.open, (bound, number, found, slack if search.best is None else walk.complete))
