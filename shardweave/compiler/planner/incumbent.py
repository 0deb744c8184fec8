"""The best choice and the bound so far, which every step of the search betters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardweave.compiler.planner.problem import TICKS_PER_SECOND
from shardweave.compiler.planner.tables import KEPT, Tables


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
