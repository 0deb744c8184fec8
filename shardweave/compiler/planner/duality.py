"""The bound of a problem whose graph `Elimination` can walk: what memory is worth, and choices near that bound.

With a price of ``u`` >= 0 ticks a byte, every choice within the limit takes at least

    L(u) = min over all choices of (ticks + sum of floor(u * kept bytes)) - u * room,

whose minimum `Elimination` finds exactly. The best u is where the two lines cross that the choices on either side of
the memory limit draw (Handler and Zang, 1980): each step evaluates that crossing.

The largest transient is no sum. A `Part` of all choices is those whose largest transient lies in an interval: its
candidates are capped from above, and its room is what the lower end leaves. Parts are split where that is too little.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from shardweave.compiler.planner.elimination import Elimination, Floats, Minimum
from shardweave.compiler.planner.problem import Problem, to_ticks

Choice = tuple[int, ...]
Offer = Callable[[Choice], None]

_STEPS = 40
"""Evaluations at most for one price; five to ten do."""


@dataclass(frozen=True, eq=False)
class Part:
    """The choices whose largest transient is at least `low` and at most `high` bytes."""

    low: int
    high: int

    def room(self, problem: Problem) -> int:
        """What its choices may keep."""
        return problem.memory_limit - problem.fixed_bytes - self.low


@dataclass(frozen=True, eq=False)
class Dual:
    """Every choice of `part` takes at least `bound` ticks, at a price of `price` ticks a byte.

    `minimum` belongs to that price; `over` and `under` are the choices on either side of the limit (or one twice).
    `error` covers the rounding of sums, in ticks: none while they stay below ``2**52``, as those of real steps do.
    """

    part: Part
    bound: float
    price: float
    minimum: Minimum
    over: Choice
    under: Choice
    error: float


def costs_of(elimination: Elimination, part: Part, price: float) -> list[Floats]:
    """Each candidate's ticks with its kept memory paid for; infinite above the part's cap."""
    return [
        np.where(table.transient <= part.high, table.ticks + np.floor(price * table.kept), np.inf)
        for table in elimination.ops
    ]


def least_memory(elimination: Elimination) -> Choice | None:
    """The choice with the smallest memory of all; None where no choice has layouts that go together."""
    problem = elimination.problem
    levels = sorted({int(level) for table in elimination.ops for level in table.transient})
    best: tuple[int, Choice] | None = None
    known: dict[int, int | None] = {}

    def least_kept(cap: int) -> int | None:
        """The least that can be kept with no transient above a level; lower levels keep no less."""
        nonlocal best
        if cap not in known:
            costs = [np.where(table.transient <= levels[cap], table.kept, np.inf) for table in elimination.ops]
            found = elimination.minimum(costs, with_edges=False)
            known[cap] = None if found is None else int(found.value)
            if found is not None and (best is None or problem.memory(found.choice) < best[0]):
                best = problem.memory(found.choice), found.choice
        return known[cap]

    parts = [(0, len(levels) - 1)]
    while parts:
        low, high = parts.pop()
        kept = least_kept(high)
        if kept is None or best is None or low == high or problem.fixed_bytes + kept + levels[low] >= best[0]:
            continue
        middle = (low + high) // 2
        parts += [(low, middle), (middle + 1, high)]
    return None if best is None else best[1]


def dual(elimination: Elimination, part: Part, offer: Offer, price: float = 0.0) -> Dual | None:
    """The best bound of a part, beginning at `price`; None where it has no choice within the limit.

    Every choice that it comes by is offered.
    """
    problem, room = elimination.problem, part.room(elimination.problem)
    fixed = to_ticks(problem.fixed_seconds)

    def evaluate(at: float) -> tuple[Minimum, float, float] | None:
        found = elimination.minimum(costs_of(elimination, part, at))
        if found is None:
            return None
        offer(found.choice)
        chosen = problem.chosen(found.choice)
        kept = float(sum(candidate.kept_bytes for candidate in chosen))
        return found, float(problem.ticks(found.choice) or 0) - fixed, kept

    def result(found: Minimum, at: float, over: Choice, under: Choice) -> Dual:
        largest = abs(fixed) + found.value + at * room
        error = 0.0 if largest < 2**52 else largest * (len(problem.ops) + len(problem.edges) + 4) * 2.0**-52
        # One tick covers the rounding of price * room.
        bound = fixed + found.value - (at * room + 1.0 if at else 0.0) - error
        return Dual(part, bound, at, found, over, under, error)

    first = evaluate(0.0)
    if first is None:
        return None
    found, ticks, kept = first
    if kept <= room:
        return result(found, 0.0, found.choice, found.choice)
    over = found.choice, ticks, kept
    under: tuple[Choice, float, float] | None = None
    if price:
        tried = evaluate(price)
        assert tried is not None
        found, ticks, kept = tried
        if kept <= room:
            under = found.choice, ticks, kept
        else:
            over = found.choice, ticks, kept
    if under is None:
        least = elimination.minimum(
            [np.where(t.transient <= part.high, t.kept, np.inf) for t in elimination.ops], with_edges=False
        )
        assert least is not None
        if least.value > room:
            return None
        offer(least.choice)
        under = least.choice, float(problem.ticks(least.choice) or 0) - fixed, least.value
    best: Dual | None = None
    for _ in range(_STEPS):
        at = max(0.0, (under[1] - over[1]) / (over[2] - under[2]))
        crossing = over[1] + at * over[2]
        tried = evaluate(at)
        assert tried is not None
        found, ticks, kept = tried
        now = result(found, at, over[0], under[0])
        if best is None or now.bound > best.bound:
            best = now
        if ticks + at * kept >= crossing - len(problem.ops) - 1e-12 * abs(crossing):
            break
        if kept <= room:
            under = found.choice, ticks, kept
        else:
            over = found.choice, ticks, kept
    assert best is not None
    return replace(best, over=over[0], under=under[0])


def cross(problem: Problem, first: Choice, second: Choice, offer: Offer) -> None:
    """Offer the fastest choice within the limit that is `first` for the ops up to some one, and `second` after it."""
    count = len(first)
    if first == second or not count:
        return
    a, b = problem.chosen(first), problem.chosen(second)
    ticks = np.concatenate([[0.0], np.cumsum([float(x.ticks - y.ticks) for x, y in zip(a, b)])])
    kept = np.concatenate([[0.0], np.cumsum([float(x.kept_bytes - y.kept_bytes) for x, y in zip(a, b)])])
    kept += sum(y.kept_bytes for y in b)
    peak_a = np.concatenate([[0.0], np.maximum.accumulate([float(x.transient_bytes) for x in a])])
    peak_b = np.concatenate([np.maximum.accumulate([float(y.transient_bytes) for y in reversed(b)])[::-1], [0.0]])
    steps = np.zeros(count + 2)
    for edge in problem.edges:
        early, late = sorted((edge.producer, edge.consumer))
        for begin, end, ins in ((0, early + 1, (b, b)), (early + 1, late + 1, (a, b)), (late + 1, count + 1, (a, a))):
            which = {early: ins[0], late: ins[1]}
            out = which[edge.producer][edge.producer].out_port
            cost = edge.ticks[out, which[edge.consumer][edge.consumer].in_port]
            steps[begin] += math.inf if cost < 0 and begin == 0 and end > count else max(0.0, float(cost))
            steps[end] -= max(0.0, float(cost))
    ticks = ticks + np.cumsum(steps)[: count + 1]
    fits = kept + np.maximum(peak_a, peak_b) <= problem.memory_limit - problem.fixed_bytes
    for at in np.argsort(np.where(fits, ticks, np.inf), kind="stable")[:3]:
        if fits[at]:
            offer((*first[: int(at)], *second[int(at) :]))
