"""The integer program: which candidate each op takes, chosen by OR-Tools and proven.

With ``x[o, c]`` = 1 where op o takes candidate c, ``f[e, i, j]`` = 1 where edge e goes from out port i to in port j,
and ``T`` the largest transient memory:

=====  =============================================================  ==========================
(1)    sum over c of x[o, c] = 1                         for every o  `_Program.choose_one`
(2)    sum over j of f[e, i, j] = sum of x[producer, c with port i]   `_Program.connect`
       sum over i of f[e, i, j] = sum of x[consumer, c with port j]
(3)    T >= sum over c of transient[c] x[o, c]           for every o  `_Program.hold`
(4)    sum of kept[c] x[o, c] + T <= limit - fixed                    `_Program.limit_memory`
(5)    minimise sum of ticks[c] x[o, c] + sum of ticks[i, j] f[e, i, j]   `_Program.minimise_time`
(6)    minimise sum of kept[c] x[o, c] + T   (only after "infeasible")    `_Program.minimise_memory`
=====  =============================================================  ==========================

(2) is the flow form of the product of two choices: its relaxation is integral on a chain, so that only the memory limit
makes the program hard. All coefficients are integers, exact ticks and exact bytes: nothing is lost to a scale.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ortools.sat.python import cp_model

from shardweave.compiler.planner.problem import FORBIDDEN, TICKS_PER_SECOND, Edge, Problem, largest_terms, to_ticks
from shardweave.compiler.planner.reductions import invert, reduce
from shardweave.errors import InfeasibleError, PlanError


@dataclass(frozen=True)
class Progress:
    """After `seconds` the solver has found a step of `objective` seconds; none takes less than `bound` seconds."""

    seconds: float
    objective: float
    bound: float


@dataclass(frozen=True)
class Solution:
    """A chosen candidate for each op, and how good it is proven to be.

    Parameters
    ----------
    choice : tuple of int
        An index into each op's candidates.
    objective : float
        `Problem.objective` of the choice, in seconds.
    bound : float
        No choice within the limit is faster than that many seconds.
    gap : float
        ``(objective - bound) / objective``; 0 where optimal.
    status : {"optimal", "feasible"}
        Feasible where the time limit ended the proof.
    seconds : float
        What solving took.
    """

    choice: tuple[int, ...]
    objective: float
    bound: float
    gap: float
    status: Literal["optimal", "feasible"]
    seconds: float


def solve(problem: Problem, time_limit: float = 60.0, progress: Callable[[Progress], None] | None = None) -> Solution:
    """The fastest choice within the memory limit, with a proof.

    The same problem gives the same choice, unless the time limit ends the search: one worker, a fixed seed.

    Parameters
    ----------
    problem : Problem
    time_limit : float
        Seconds after which the best choice so far is returned as ``"feasible"`` with its gap.
    progress : callable, optional
        Called at every better choice.

    Raises
    ------
    InfeasibleError
        Nothing fits into the memory limit. The message has the smallest memory that would do, and what takes it.
    PlanError
        No choice at all has layouts that go together, or the time limit ended before any choice was found.

    Examples
    --------
    >>> from shardweave.compiler.planner.problem import Candidate, Op
    >>> fast, small = Candidate("fast", 1.0, state_bytes=8), Candidate("small", 1.5, state_bytes=4)
    >>> solution = solve(Problem((Op("up", (fast, small)), Op("down", (fast, small))), memory_limit=12))
    >>> solution.objective, solution.status, sum(solution.choice)
    (2.5, 'optimal', 1)
    """
    start = time.monotonic()
    smaller, kept = reduce(problem)
    program = _Program(smaller)
    program.limit_memory()
    program.minimise_time()
    status, solver = program.run(time_limit, _Reporter(start, progress) if progress else None)
    if status == cp_model.INFEASIBLE:
        raise _infeasible(problem, time_limit)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise PlanError(
            f"no choice for {len(problem.ops)} ops was found within time_limit = {time_limit:g} s: raise time_limit, "
            f"or memory_limit (now {problem.memory_limit} bytes)"
        )
    choice = invert(program.choice(solver), kept)
    objective = problem.objective(choice)
    if status == cp_model.OPTIMAL:
        return Solution(choice, objective, objective, 0.0, "optimal", time.monotonic() - start)
    bound = min(objective, max(0.0, solver.best_objective_bound / TICKS_PER_SECOND))
    gap = (objective - bound) / objective if objective else 0.0
    return Solution(choice, objective, bound, gap, "feasible", time.monotonic() - start)


class _Program:
    """The program of the module's docstring, equation by equation."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = cp_model.CpModel()
        self.x = [[self.model.new_bool_var(f"{op.name}: {c.label}") for c in op.candidates] for op in problem.ops]
        self.time: list[tuple[Any, int]] = []
        """Variables with their ticks."""
        self.memory: list[tuple[Any, int]] = []
        """Variables with their bytes."""
        self.choose_one()
        for edge in problem.edges:
            self.connect(edge)
        self.hold()

    def choose_one(self) -> None:
        for op, choices in zip(self.problem.ops, self.x, strict=True):
            self.model.add_exactly_one(choices)
            for candidate, chosen in zip(op.candidates, choices, strict=True):
                self.time.append((chosen, candidate.ticks))
                self.memory.append((chosen, candidate.kept_bytes))

    def connect(self, edge: Edge) -> None:
        sources = self._by_port(edge.producer, [c.out_port for c in self.problem.ops[edge.producer].candidates])
        targets = self._by_port(edge.consumer, [c.in_port for c in self.problem.ops[edge.consumer].candidates])
        flow = {(i, j): self.model.new_bool_var("") for i in sources for j in targets if edge.ticks[i, j] != FORBIDDEN}
        for i, chosen in sources.items():
            self.model.add(sum(flow[i, j] for j in targets if (i, j) in flow) == sum(chosen))
        for j, chosen in targets.items():
            self.model.add(sum(flow[i, j] for i in sources if (i, j) in flow) == sum(chosen))
        self.time += [(variable, int(edge.ticks[ports])) for ports, variable in flow.items()]

    def _by_port(self, index: int, ports: Sequence[int]) -> dict[int, list[Any]]:
        """The choices of op `index`, by the port that they have."""
        groups: dict[int, list[Any]] = {}
        for port, chosen in sorted(zip(ports, self.x[index], strict=True), key=lambda item: item[0]):
            groups.setdefault(port, []).append(chosen)
        return groups

    def hold(self) -> None:
        transients = [[candidate.transient_bytes for candidate in op.candidates] for op in self.problem.ops]
        peak = self.model.new_int_var(0, max(map(max, transients), default=0), "T")
        for choices, figures in zip(self.x, transients, strict=True):
            if any(figures):
                self.model.add(peak >= cp_model.LinearExpr.weighted_sum(choices, figures))
        self.memory.append((peak, 1))

    def limit_memory(self) -> None:
        self.model.add(_weighted(self.memory) <= self.problem.memory_limit - self.problem.fixed_bytes)

    def minimise_time(self) -> None:
        self.model.minimize(_weighted(self.time) + to_ticks(self.problem.fixed_seconds))

    def minimise_memory(self) -> None:
        self.model.minimize(_weighted(self.memory) + self.problem.fixed_bytes)

    def run(self, time_limit: float, reporter: cp_model.CpSolverSolutionCallback | None = None) -> tuple[Any, Any]:
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        return solver.solve(self.model, reporter), solver

    def choice(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        return tuple(next(i for i, chosen in enumerate(row) if solver.boolean_value(chosen)) for row in self.x)


class _Reporter(cp_model.CpSolverSolutionCallback):
    """Hands every better choice to the caller's `progress`."""

    def __init__(self, start: float, progress: Callable[[Progress], None]) -> None:
        super().__init__()
        self._start, self._progress = start, progress

    def on_solution_callback(self) -> None:
        seconds = time.monotonic() - self._start
        objective, bound = self.objective_value / TICKS_PER_SECOND, self.best_objective_bound / TICKS_PER_SECOND
        self._progress(Progress(seconds, objective, min(objective, max(0.0, bound))))


def _weighted(terms: Sequence[tuple[Any, int]]) -> Any:
    return cp_model.LinearExpr.weighted_sum([variable for variable, _ in terms], [figure for _, figure in terms])


def _infeasible(problem: Problem, time_limit: float) -> PlanError:
    """The error for a problem without a choice: the smallest memory that would do, and what takes it."""
    program = _Program(problem)
    program.minimise_memory()
    status, solver = program.run(time_limit)
    if status == cp_model.INFEASIBLE:
        return PlanError("no choice of candidates has layouts that go together on all edges: allow more candidates")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return InfeasibleError(f"nothing fits into the memory limit of {readable_bytes(problem.memory_limit)} a device")
    choice = program.choice(solver)
    chosen = problem.chosen(choice)
    terms = [(op.group or op.name, c.kept_bytes) for op, c in zip(problem.ops, chosen, strict=True)]
    parts = [
        f"{name}{f' x{times}' if times > 1 else ''} {readable_bytes(size)}"
        for name, times, size in largest_terms(terms)
    ]
    peak = max(range(len(chosen)), key=lambda index: chosen[index].transient_bytes)
    parts.append(f"{problem.ops[peak].name} while it runs {readable_bytes(chosen[peak].transient_bytes)}")
    if problem.fixed_bytes:
        parts.append(f"fixed {readable_bytes(problem.fixed_bytes)}")
    limit, needed = problem.memory_limit, problem.memory(choice)
    least = "smallest memory that does" if status == cp_model.OPTIMAL else "smallest memory found to do"
    return InfeasibleError(
        f"no plan fits into the memory limit of {limit} bytes ({readable_bytes(limit)}) a device; the {least} is "
        f"{needed} bytes ({readable_bytes(needed)}). Most of it: "
        f"{', '.join(parts)}. Raise memory_limit, or use more devices or a smaller batch."
    )


def readable_bytes(size: int) -> str:
    """`size` for people, in powers of 1024.

    >>> readable_bytes(1536), readable_bytes(80 * 2**30)
    ('1.5 KiB', '80.0 GiB')
    """
    value, units = float(size), ["KiB", "MiB", "GiB", "TiB"]
    if abs(value) < 1024:
        return f"{size} B"
    for unit in units:
        value /= 1024
        if abs(value) < 1024 or unit == units[-1]:
            break
    return f"{value:.1f} {unit}"
