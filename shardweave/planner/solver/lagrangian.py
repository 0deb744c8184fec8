"""The bound of a problem whose graph `Elimination` can walk: what memory and streams are worth.

A window takes at least the mean of its streams, whatever their weights. So with weights ``w_s >= 0`` of the streams, at
most 1 in each window, and a price of ``u >= 0`` ticks a byte every choice within the limit takes at least

    L(u, w) = min over all choices of (ticks + sum of w_s load_s + u kept bytes) - u * room,

whose minimum `Elimination` finds exactly. The best weights come from the other side (Dantzig and Wolfe, 1960):
`Master` mixes the choices found so far as if they could be divided; what memory and streams are worth to the mixture
are the next weights, and a choice that is worth more than they say enters it. Where none does, mixture and bound are
one. Weights are taken from between those of the mixture and the best ones so far (Wentges, 1997): far steadier.

The largest transient is no sum. A `Part` of all choices is those whose largest transient lies in an interval: its
candidates are capped from above, and its room is what the lower end leaves. Parts are split where that is too little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from ortools.math_opt.python import mathopt

from shardweave.planner.solver.elimination import KEPT, TICKS, Elimination, Floats, Ints, Minimum, Tables

Choice = tuple[int, ...]
Offer = Callable[[Choice], None]

_MAX_EVALUATIONS = 200
"""Evaluations at most for one part; five to forty do."""

_SMOOTHING = 0.5
"""Where the next weights lie between those of the mixture and the best so far."""

_GAP_TOLERANCE = 1e-9
"""How far mixture and bound may lie apart in the end, as a part of the bound."""

_UNIT = 2.0**40
"""Weights of streams are multiples of ``1 / _UNIT``, so that their sum is exact."""


@dataclass(frozen=True, eq=False)
class Part:
    """The choices whose largest transient is at least `low` and at most `high` bytes."""

    low: int
    high: int


@dataclass(frozen=True, eq=False)
class Column:
    """A choice, its figures and its largest transient."""

    choice: Choice
    figures: Ints
    peak: int

    @classmethod
    def of(cls, tables: Tables, choice: Choice) -> Column | None:
        figures = tables.total(choice)
        if figures is None:
            return None
        return cls(choice, figures, int(tables.picked(choice).transient.max(initial=0)))


@dataclass(frozen=True, eq=False)
class Dual:
    """Every choice of `part` takes at least `bound` ticks, at these `weights` of the figures.

    `minimum` belongs to these weights; `columns` are all choices that it came by, `mixed` those that the best mixture
    is made of, the largest shares first. `error` covers the rounding of sums, in ticks: none while they stay below
    ``2**52``, as those of real steps do.
    """

    part: Part
    bound: float
    weights: Floats
    minimum: Minimum
    columns: list[Column]
    mixed: list[Column]
    error: float

    @property
    def price(self) -> float:
        """Ticks a byte."""
        return float(self.weights[KEPT])


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
            found = elimination.minimum(_only(elimination, KEPT), levels[cap])
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


def _only(elimination: Elimination, row: int) -> Floats:
    weights = np.zeros(elimination.tables.rows)
    weights[row] = 1.0
    return weights


def dual(
    elimination: Elimination,
    part: Part,
    offer: Offer,
    start: Dual | None = None,
    enough: Callable[[float], bool] = lambda bound: False,
    loose: float = 0.0,
) -> Dual | None:
    """The best bound of a part, or the first that is `enough`; None where it has no choice within the limit.

    Every choice that it comes by is offered. `start` is a dual whose choices include this one's. It may be `loose` by a
    part of itself.
    """
    tables = elimination.tables
    room = tables.room - part.low
    columns = [column for column in (start.columns if start else ()) if column.peak <= part.high]

    def priced(weights: Floats) -> Minimum | None:
        found = elimination.minimum(weights, part.high)
        if found is not None:
            column = Column.of(tables, found.choice)
            assert column is not None
            if all(found.choice != old.choice for old in columns):
                columns.append(column)
                offer(found.choice)
        return found

    if not any(column.figures[KEPT] <= room for column in columns):
        least = priced(_only(elimination, KEPT))
        if least is None or least.value > room:
            return None
    weights = start.weights if start else _first_weights(tables)
    master, loose = Master(tables, room), max(_GAP_TOLERANCE, loose)
    best: Dual | None = None
    steady = 1.0
    for _ in range(_MAX_EVALUATIONS):
        count = len(columns)
        found = priced(weights)
        assert found is not None
        bound, error = _bound(tables, found, weights, room)
        if best is None or bound > best.bound:
            best = Dual(part, bound, weights, found, columns, [], error)
        mixture = master.solved(columns)
        if mixture is None or mixture.value - best.bound <= loose * abs(mixture.value) or enough(best.bound):
            break
        if len(columns) == count and steady == 0.0:
            break  # what the mixture's own weights find is known: only rounding is left
        steady = _SMOOTHING if len(columns) > count else 0.0
        weights = _rounded(tables, steady * best.weights + (1.0 - steady) * mixture.weights)
    assert best is not None
    return replace(best, mixed=mixture.mixed if mixture else columns)


def _first_weights(tables: Tables) -> Floats:
    weights = np.zeros(tables.rows)
    weights[TICKS] = 1.0
    for rows in tables.windows:
        weights[rows] = 1.0
    return _rounded(tables, weights)


def _rounded(tables: Tables, weights: Floats) -> Floats:
    """The weights, none negative, those of each window adding up to 1 or a little less."""
    weights = np.maximum(weights, 0.0)
    for rows in tables.windows:
        total = weights[rows].sum()
        shares = weights[rows] / total if total > 0.0 else np.full(len(weights[rows]), 1.0 / len(weights[rows]))
        weights[rows] = np.maximum(np.floor(shares * _UNIT) - 1.0, 0.0) / _UNIT
    return weights


def _bound(tables: Tables, found: Minimum, weights: Floats, room: int) -> tuple[float, float]:
    """The bound that a minimum gives, and the error of its sums (of which the bound is free)."""
    paid = float(weights[KEPT]) * room
    largest = abs(tables.fixed) + found.value + abs(paid)
    terms = len(tables.op_of) + len(tables.edge_of)
    error = 0.0 if largest < 2**52 else largest * (terms + 4) * 2.0**-52
    # A tick for each weight covers the rounding of what it is multiplied by.
    rounding = float(len(weights)) if weights[1:].any() else 0.0
    return tables.fixed + found.value - paid - rounding - error, error


@dataclass(frozen=True, eq=False)
class Mixture:
    """What the best mixture takes, and makes the figures worth; its columns, those with the largest shares first."""

    value: float
    weights: Floats
    mixed: list[Column]


class Master:
    """The best mixture of columns, as if choices could be divided, by GLOP.

    With ``n[p]`` the share of column p and ``t[w]`` what window w takes:

        minimise   sum of ticks[p] n[p] + sum of t[w]
        subject to sum of n[p] = 1,   sum of kept[p] n[p] <= room,   t[w] >= sum of load[s, p] n[p] for its streams s
    """

    def __init__(self, tables: Tables, room: int) -> None:
        self.tables, self.room = tables, room

    def solved(self, columns: Sequence[Column]) -> Mixture | None:
        """None where GLOP finds no optimum."""
        tables = self.tables
        figures = np.stack([column.figures for column in columns], axis=1).astype(np.float64)
        unit = max(1.0, float((figures[TICKS] + figures[tables.streams].sum(axis=0)).max()))
        byte = max(1.0, float(self.room), float(figures[KEPT].max()))
        scaled = figures / unit
        scaled[KEPT] = figures[KEPT] / byte
        model = mathopt.Model()
        shares = [model.add_variable(lb=0.0) for _ in columns]
        times = [model.add_variable(lb=0.0) for _ in tables.windows]
        whole = model.add_linear_constraint(lb=1.0, ub=1.0)
        kept = model.add_linear_constraint(ub=self.room / byte)
        rows = {KEPT: kept}
        for time, window in zip(times, tables.windows, strict=True):
            model.objective.set_linear_coefficient(time, 1.0)
            for row in range(window.start, window.stop):
                rows[row] = model.add_linear_constraint(ub=0.0)
                rows[row].set_coefficient(time, -1.0)
        for share, column in zip(shares, scaled.T, strict=True):
            model.objective.set_linear_coefficient(share, float(column[TICKS]))
            whole.set_coefficient(share, 1.0)
            for row, constraint in rows.items():
                if column[row]:
                    constraint.set_coefficient(share, float(column[row]))
        result = mathopt.solve(model, mathopt.SolverType.GLOP)
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL or not result.has_dual_feasible_solution():
            return None
        duals, values = result.dual_values(), result.variable_values()
        weights = np.zeros(len(figures))
        weights[TICKS] = 1.0
        for row, constraint in rows.items():
            weights[row] = -duals[constraint]
        weights[KEPT] *= unit / byte
        order = sorted((number for number, share in enumerate(shares) if values[share] > 1e-9),
                       key=lambda number: (-values[shares[number]], number))  # fmt: skip
        value = result.objective_value() * unit + tables.fixed
        mixed = [columns[number] for number in order]
        return Mixture(value, _rounded(tables, weights), mixed)
