"""The one-hot integer program of a problem, and the two solvers of OR-Tools that it is handed to.

`Program` knows no solver: each of its methods adds one equation of those that `shardweave.planner.solver.solver`
lists, with exact ticks and exact bytes as coefficients. `solve_by_highs` computes in floating point, and is fast;
`solve_by_cp_sat` computes in integers, and is exact to the last tick and byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2
from ortools.sat.python import cp_model

from shardweave.planner.problem.problem import Problem
from shardweave.planner.solver.elimination import KEPT, TICKS, Tables

_OBJECTIVE_SCALE = 1e3
"""The largest term of HiGHS's objective."""


@dataclass(frozen=True)
class Row:
    """``low <= sum of coefficients * columns <= high``; `high` None for no limit."""

    columns: list[int]
    coefficients: list[int]
    low: int | None
    high: int | None


class Program:
    """Columns (from 0 to `upper`, with their `cost`) and rows of one problem.

    `choices` has the column of every ``x[o, c]``, `flows` that of every ``f[e, i, j]``, `peak` that of ``T``.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.tables = problem, Tables(problem)
        self.upper: list[int] = []
        self.cost: list[int] = []
        self.offset = 0
        self.rows: list[Row] = []
        self.choices = [[self._column() for _ in op.candidates] for op in problem.ops]
        self.choose_one()
        self.flows = [self.connect(edge) for edge in range(len(problem.edges))]
        self.peak = self.hold()

    @classmethod
    def fastest(cls, problem: Problem) -> Program:
        """The program of the fastest choice within the memory limit."""
        program = cls(problem)
        program.limit_memory()
        program.minimise_time()
        return program

    @classmethod
    def smallest(cls, problem: Problem) -> Program:
        """The program of the choice that needs the least memory."""
        program = cls(problem)
        program.minimise_memory()
        return program

    def _column(self, upper: int = 1) -> int:
        self.upper.append(upper)
        self.cost.append(0)
        return len(self.upper) - 1

    def choose_one(self) -> None:
        for columns in self.choices:
            self.rows.append(Row(columns, [1] * len(columns), 1, 1))

    def connect(self, edge: int) -> dict[tuple[int, int], int]:
        """The flows of an edge; none where its pairs of ports are all allowed, and cost nothing."""
        tables = self.tables
        producer, consumer = int(tables.producers[edge]), int(tables.consumers[edge])
        outs, ins = (tables.ops[tables.op_of[producer]].outs, tables.ops[tables.op_of[consumer]].ins)
        at = np.ix_(np.unique(outs), np.unique(ins))
        table = tables.edges[tables.edge_of[edge]]
        if table.allowed[at].all() and not any(figures[at].any() for figures in table.figures):
            return {}
        pairs = [(i, j) for i in at[0].ravel().tolist() for j in at[1].ravel().tolist() if table.allowed[i, j]]
        flow = {pair: self._column() for pair in pairs}
        for side, op, ports in ((0, producer, outs.tolist()), (1, consumer, ins.tolist())):
            of_port: dict[int, tuple[list[int], list[int]]] = {port: ([], []) for port in ports}
            for pair, column in flow.items():
                of_port[pair[side]][0].append(column)
            for column, port in zip(self.choices[op], ports, strict=True):
                of_port[port][1].append(column)
            for flowing, chosen in of_port.values():
                self.rows.append(Row(flowing + chosen, [1] * len(flowing) + [-1] * len(chosen), 0, 0))
        return flow

    def hold(self) -> int:
        transients = [self.tables.ops[own].transient.tolist() for own in self.tables.op_of]
        peak = self._column(max(map(max, transients), default=0))
        for columns, figures in zip(self.choices, transients, strict=True):
            if any(figures):
                self.rows.append(Row([peak, *columns], [1, *(-figure for figure in figures)], 0, None))
        return peak

    def _figures(self, row: int) -> tuple[list[int], list[int]]:
        """All ``x`` and ``f`` that have some of one figure, and how much."""
        found: list[tuple[int, int]] = []
        for choices, number in zip(self.choices, self.tables.op_of, strict=True):
            found += zip(choices, self.tables.ops[number].figures[row].tolist(), strict=True)
        for flow, number in zip(self.flows, self.tables.edge_of, strict=True):
            table = self.tables.edges[number].figures[row]
            if flow and table.any():
                found += [(column, int(table[ports])) for ports, column in flow.items()]
        return [column for column, figure in found if figure], [figure for _, figure in found if figure]

    def _memory(self) -> tuple[list[int], list[int]]:
        columns, figures = self._figures(KEPT)
        return [*columns, self.peak], [*figures, 1]

    def limit_memory(self) -> None:
        self.rows.append(Row(*self._memory(), None, self.tables.room))

    def fill_windows(self) -> None:
        for rows in self.tables.windows:
            streams = [self._figures(row) for row in range(rows.start, rows.stop)]
            time = self._column(max(sum(figures) for _, figures in streams))
            self.cost[time] = 1
            for columns, figures in streams:
                self.rows.append(Row([time, *columns], [1, *(-figure for figure in figures)], 0, None))

    def minimise_time(self) -> None:
        self.fill_windows()
        for column, figure in zip(*self._figures(TICKS), strict=True):
            self.cost[column] = figure
        self.offset = self.tables.fixed

    def minimise_memory(self) -> None:
        for column, figure in zip(*self._memory(), strict=True):
            self.cost[column] = figure
        self.offset = self.problem.fixed_bytes


@dataclass(frozen=True)
class Answer:
    """What a solver says: the choice (None if it has none), the bound in the program's units, and its word."""

    choice: tuple[int, ...] | None
    bound: float
    status: str
    """``"OPTIMAL"`` (to the gap), ``"FEASIBLE"``, ``"INFEASIBLE"`` or ``"UNKNOWN"``."""


def solve_by_highs(
    program: Program,
    time_limit: float,
    gap: float = 0.0,
    node_limit: int | None = None,
    target: float = -math.inf,
    heuristic: bool = False,
) -> Answer:
    """Solve the program by HiGHS until objective and bound are within `gap`, or the objective is at most `target`.

    Continuous columns are scaled to [0, 1] and rows to coefficients of at most 1, as its tolerances are absolute. So
    the memory limit holds to about a ten-millionth, and a choice is to be checked. HiGHS's presolve may lose the best
    choice, and call another one optimal, or fail (OR-Tools 9.15): it is used only for a `heuristic` program, of which
    nothing but the choice counts.
    """
    model = mathopt.Model()
    upper, cost = np.array(program.upper, dtype=float), np.array(program.cost, dtype=float)
    unit = float((cost * upper).max(initial=0.0)) / _OBJECTIVE_SCALE or 1.0
    whole = {column for columns in program.choices for column in columns}
    columns = [
        model.add_variable(lb=0.0, ub=1.0 if top else 0.0, is_integer=number in whole)
        for number, top in enumerate(program.upper)
    ]
    for column, value in zip(columns, (cost * upper / unit).tolist(), strict=True):
        if value:
            model.objective.set_linear_coefficient(column, value)
    for row in program.rows:
        values = np.array(row.coefficients, dtype=float) * upper[row.columns]
        scale = float(np.abs(values).max(initial=0.0)) or 1.0
        constraint = model.add_linear_constraint(
            lb=-math.inf if row.low is None else row.low / scale, ub=math.inf if row.high is None else row.high / scale
        )
        for index, value in zip(row.columns, (values / scale).tolist(), strict=True):
            constraint.set_coefficient(columns[index], value)
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=max(0.0, time_limit)),
        relative_gap_tolerance=gap,
        absolute_gap_tolerance=0.0,
        node_limit=node_limit,
        random_seed=0,
        presolve=None if heuristic else mathopt.Emphasis.OFF,
        highs=highs_pb2.HighsOptionsProto(double_options={"objective_target": (target - program.offset) / unit}),
    )
    try:
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
    except (AttributeError, RuntimeError, ValueError):  # HiGHS failed; MathOpt cannot convert all of its errors
        return Answer(None, -math.inf, "UNKNOWN")
    bound = result.termination.objective_bounds.dual_bound * unit + program.offset
    if not result.has_primal_feasible_solution():
        infeasible = result.termination.reason == mathopt.TerminationReason.INFEASIBLE
        return Answer(None, bound, "INFEASIBLE" if infeasible else "UNKNOWN")
    values = result.variable_values()
    choice = tuple(max(range(len(own)), key=lambda i: values[columns[own[i]]]) for own in program.choices)
    optimal = result.termination.reason == mathopt.TerminationReason.OPTIMAL
    return Answer(choice, bound, "OPTIMAL" if optimal else "FEASIBLE")


def solve_by_cp_sat(program: Program, time_limit: float, gap: float = 0.0) -> Answer:
    """Solve the program by CP-SAT, one worker and a fixed seed, until objective and bound are within `gap`."""
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
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.0, time_limit)
    solver.parameters.num_workers = 1
    solver.parameters.relative_gap_limit = gap
    solver.parameters.random_seed = 0
    # Figures are this large that its presolve may lose the best choice, and call another one optimal (OR-Tools 9.15)
    solver.parameters.cp_model_presolve = False
    status = solver.solve(model)
    choice = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        choice = tuple(
            next(i for i, column in enumerate(columns) if solver.value(variables[column]))
            for columns in program.choices
        )
    return Answer(choice, solver.best_objective_bound, solver.status_name(status))
