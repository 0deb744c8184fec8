"""The integer program as columns and rows, and the two solvers of OR-Tools that it is handed to.

`Program` knows no solver: each of its methods adds one equation of those that `shardweave.planner.solver.solver`
lists. `relax` hands its relaxation to GLOP and returns what every choice costs above the bound; `prove` hands it to
CP-SAT. All coefficients are integers, exact ticks and exact bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt.python import mathopt
from ortools.sat.python import cp_model

from shardweave.planner.problem.problem import FORBIDDEN, Edge, Problem
from shardweave.planner.solver.elimination import KEPT, TICKS, Tables


@dataclass(frozen=True)
class Row:
    """``low <= sum of coefficients * columns <= high``; `high` None for no limit."""

    columns: list[int]
    coefficients: list[int]
    low: int | None
    high: int | None


class Program:
    """Columns (integers from 0 to `upper`, with their `cost`) and rows of one problem.

    `choices` has the column of every ``x[o, c]``, `flows` that of every ``f[e, i, j]``, `peak` that of ``T``, `times`
    that of every ``t[w]``.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.tables = problem, Tables(problem)
        self.upper: list[int] = []
        self.cost: list[int] = []
        self.offset = 0
        self.rows: list[Row] = []
        self.choices = [[self._column() for _ in op.candidates] for op in problem.ops]
        self.choose_one()
        self.flows = [self.connect(edge) for edge in problem.edges]
        self.peak = self.hold()
        self.times: list[int] = []

    def _column(self, upper: int = 1) -> int:
        self.upper.append(upper)
        self.cost.append(0)
        return len(self.upper) - 1

    def choose_one(self) -> None:
        for columns in self.choices:
            self.rows.append(Row(columns, [1] * len(columns), 1, 1))

    def connect(self, edge: Edge) -> dict[tuple[int, int], int]:
        outs = [candidate.out_port for candidate in self.problem.ops[edge.producer].candidates]
        ins = [candidate.in_port for candidate in self.problem.ops[edge.consumer].candidates]
        pairs = [(i, j) for i in sorted(set(outs)) for j in sorted(set(ins)) if edge.ticks[i, j] != FORBIDDEN]
        flow = {pair: self._column() for pair in pairs}
        for side, op, ports in ((0, edge.producer, outs), (1, edge.consumer, ins)):
            for port in sorted(set(ports)):
                flowing = [column for pair, column in flow.items() if pair[side] == port]
                chosen = [column for column, own in zip(self.choices[op], ports, strict=True) if own == port]
                self.rows.append(Row(flowing + chosen, [1] * len(flowing) + [-1] * len(chosen), 0, 0))
        return flow

    def hold(self) -> int:
        transients = [[candidate.transient_bytes for candidate in op.candidates] for op in self.problem.ops]
        peak = self._column(max(map(max, transients), default=0))
        for columns, figures in zip(self.choices, transients, strict=True):
            self.rows.append(Row([peak, *columns], [1, *(-figure for figure in figures)], 0, None))
        return peak

    def _figures(self, row: int) -> tuple[list[int], list[int]]:
        """All ``x`` and ``f`` that have some of one figure, and how much."""
        columns: list[int] = []
        figures: list[int] = []
        for choices, number in zip(self.choices, self.tables.op_of, strict=True):
            columns += choices
            figures += self.tables.ops[number].figures[row].tolist()
        for flow, number in zip(self.flows, self.tables.edge_of, strict=True):
            table = self.tables.edges[number].figures[row]
            if table.any():
                columns += flow.values()
                figures += [int(table[ports]) for ports in flow]
        return columns, figures

    def _memory(self) -> tuple[list[int], list[int]]:
        columns, figures = self._figures(KEPT)
        return [*columns, self.peak], [*figures, 1]

    def limit_memory(self) -> None:
        self.rows.append(Row(*self._memory(), None, self.tables.room))

    def fill_windows(self) -> None:
        for rows in self.tables.windows:
            streams = [self._figures(row) for row in range(rows.start, rows.stop)]
            time = self._column(max(sum(figures) for _, figures in streams))
            for columns, figures in streams:
                self.rows.append(Row([time, *columns], [1, *(-figure for figure in figures)], 0, None))
            self.times.append(time)

    def minimise_time(self) -> None:
        self.fill_windows()
        for column, figure in zip(*self._figures(TICKS), strict=True):
            self.cost[column] = figure
        for column in self.times:
            self.cost[column] = 1
        self.offset = self.tables.fixed

    def minimise_memory(self) -> None:
        for column, figure in zip(*self._memory(), strict=True):
            self.cost[column] = figure
        self.offset = self.problem.fixed_bytes


@dataclass(frozen=True)
class Relaxation:
    """What linear duality says about every choice: ``its cost >= bound + sum of excess`` over what it uses.

    `candidates` and `edges` have the excess (ticks, >= 0) of every candidate and of every pair of ports; it is
    infinite where the pair is forbidden. `error` covers the rounding of the sums.
    """

    bound: float
    candidates: tuple[NDArray[np.float64], ...]
    edges: tuple[NDArray[np.float64], ...]
    error: float


def relax(program: Program, time_limit: float) -> Relaxation | None:
    """Solve the relaxation by GLOP; None where that finds no duals.

    The bound and the excesses are computed here from the duals by weak duality, so they hold however rough these are.
    """
    upper, cost = np.array(program.upper, dtype=float), np.array(program.cost, dtype=float)
    duals = _glop_duals(program, upper, cost, time_limit)
    if duals is None:
        return None
    excess, bound, size = cost.copy(), float(program.offset), 0.0
    for row, dual in zip(program.rows, duals, strict=True):
        side = row.low if dual > 0 else row.high
        if side is None or dual == 0:
            continue
        excess[row.columns] -= dual * np.array(row.coefficients, dtype=float)
        bound += dual * side
        size += abs(dual * side)

    def above_least(values: NDArray[np.float64]) -> NDArray[np.float64]:
        nonlocal bound
        least = values.min()
        bound += least
        return np.asarray(values - least)

    candidates = tuple(above_least(excess[columns]) for columns in program.choices)
    edges = []
    for flow, edge in zip(program.flows, program.problem.edges, strict=True):
        if not flow:
            return None
        table = np.full(edge.ticks.shape, np.inf)
        for ports, column in flow.items():
            table[ports] = excess[column]
        edges.append(above_least(table))
    bound += sum(min(0.0, float(excess[column] * upper[column])) for column in (program.peak, *program.times))
    return Relaxation(bound, candidates, tuple(edges), 1.0 + 1e-12 * (size + abs(bound)))


def _glop_duals(
    program: Program, upper: NDArray[np.float64], cost: NDArray[np.float64], time_limit: float
) -> list[float] | None:
    """One dual a row. Columns are scaled to [0, 1], rows and costs to about 1, as GLOP likes them."""
    model = mathopt.Model()
    unit = float((cost * upper).max(initial=1.0))
    columns = [model.add_variable(lb=0.0, ub=1.0 if top else 0.0) for top in program.upper]
    for column, value in zip(columns, cost * upper / unit, strict=True):
        if value:
            model.objective.set_linear_coefficient(column, value)
    rows, scales = [], []
    for row in program.rows:
        values = np.array(row.coefficients, dtype=float) * upper[row.columns]
        scale = float(np.abs(values).max(initial=0.0)) or 1.0
        low = -math.inf if row.low is None else row.low / scale
        high = math.inf if row.high is None else row.high / scale
        constraint = model.add_linear_constraint(lb=low, ub=high)
        for index, value in zip(row.columns, values / scale, strict=True):
            constraint.set_coefficient(columns[index], value)
        rows.append(constraint)
        scales.append(scale)
    limit = mathopt.SolveParameters(time_limit=timedelta(seconds=max(0.0, time_limit)))
    result = mathopt.solve(model, mathopt.SolverType.GLOP, params=limit)
    if result.termination.reason != mathopt.TerminationReason.OPTIMAL or not result.has_dual_feasible_solution():
        return None
    duals = result.dual_values()
    return [duals[row] * unit / scale for row, scale in zip(rows, scales, strict=True)]


@dataclass(frozen=True)
class Proof:
    """What CP-SAT says: the choice (None if it has none), the bound in the program's units, and its word."""

    choice: tuple[int, ...] | None
    bound: float
    status: str
    """``"OPTIMAL"``, ``"FEASIBLE"``, ``"INFEASIBLE"`` or ``"UNKNOWN"``."""


def prove(
    program: Program,
    time_limit: float,
    hint: Sequence[int] | None = None,
    report: Callable[[float, float], None] | None = None,
    gap: float = 0.0,
) -> Proof:
    """Solve the program by CP-SAT, one worker and a fixed seed, until objective and bound are within `gap`.

    `report` gets objective and bound of better choices.
    """
    model = cp_model.CpModel()
    variables = [model.new_int_var(0, top, "") for top in program.upper]
    for row in program.rows:
        total = cp_model.LinearExpr.weighted_sum([variables[i] for i in row.columns], row.coefficients)
        if row.low == row.high and row.low is not None:
            model.add(total == row.low)
        elif row.low is not None:
            model.add(total >= row.low)
        elif row.high is not None:
            model.add(total <= row.high)
    model.minimize(cp_model.LinearExpr.weighted_sum(variables, program.cost) + program.offset)
    for columns, index in zip(program.choices, hint or (), strict=False):
        model.add_hint(variables[columns[index]], 1)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.0, time_limit)
    solver.parameters.num_workers = 1
    solver.parameters.relative_gap_limit = gap
    solver.parameters.random_seed = 0
    # Figures are this large that its presolve may lose the best choice, and call another one optimal (OR-Tools 9.15)
    solver.parameters.cp_model_presolve = False
    status = solver.solve(model, _Reporter(report) if report else None)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    choice = (
        tuple(
            next(i for i, column in enumerate(columns) if solver.value(variables[column]))
            for columns in program.choices
        )
        if found
        else None
    )
    return Proof(choice, solver.best_objective_bound, solver.status_name(status))


class _Reporter(cp_model.CpSolverSolutionCallback):
    def __init__(self, report: Callable[[float, float], None]) -> None:
        super().__init__()
        self._report = report

    def on_solution_callback(self) -> None:
        self._report(self.objective_value, self.best_objective_bound)
