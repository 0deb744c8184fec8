"""The search for the fastest choice: the best one so far, the bound so far, and the steps that better them.

Where the graph is narrow (`Elimination`), parts of the choices are searched, the one with the lowest bound first
(`Branching`). On other graphs GLOP's relaxation takes the place of the bound, a sweep in the ops' order that of the
walk through a part, and CP-SAT goes on from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np

from shardweave.compiler.planner.branching import FIRST_SLACK, GROWTH, NARROW, WIDE, Branching
from shardweave.compiler.planner.descent import descend
from shardweave.compiler.planner.elimination import Elimination
from shardweave.compiler.planner.incumbent import Incumbent, Progress
from shardweave.compiler.planner.problem import Problem
from shardweave.compiler.planner.program import Program, Relaxation, prove, relax
from shardweave.compiler.planner.reductions import invert, reduce, restricted
from shardweave.compiler.planner.sweep import sweep
from shardweave.compiler.planner.tables import Tables

_MANY_COLUMNS = 2**16
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
            width = NARROW if incumbent.choice is None else WIDE
            found = sweep(self.tables, relaxation, slack, width, half)
            incumbent.offer(found.choice)
            incumbent.bound = max(incumbent.bound, bound + found.complete - error)
            incumbent.proven = incumbent.ticks <= incumbent.bound or found.complete >= farthest
            if found.complete < slack and (width == WIDE or slack >= farthest):
                return
            # A first choice can be far from the best one: do not jump to where it would be proven.
            grown = GROWTH * (slack if incumbent.choice is None else max(first, found.complete))
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
        if incumbent.choice and sum(edge.seconds.size for edge in problem.edges) > _MANY_COLUMNS:
            return
        program = Program(problem)
        program.limit_memory()
        program.minimise_time()
        proof = prove(program, self.deadline - time.monotonic(), hint, incumbent.report, incumbent.gap)
        incumbent.offer(None if proof.choice is None else invert(proof.choice, near))
        incumbent.proven = proof.status == "INFEASIBLE" or (proof.status == "OPTIMAL" and not incumbent.gap)
        if not incumbent.proven:
            incumbent.bound = max(incumbent.bound, min(incumbent.ticks, proof.bound))
