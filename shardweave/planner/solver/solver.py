"""Which candidate each op takes: the fastest choice within the memory limit, found and proven with OR-Tools.

With ``x[o, c]`` = 1 where op o takes candidate c, ``f[e, i, j]`` = 1 where edge e goes from out port i to in port j,
``T`` the largest transient memory and ``t[w]`` the time of window w:

===  ========================================================================  =========================
(1)  sum over c of x[o, c] = 1                                   for every op  `Program.choose_one`
(2)  sum over j of f[e, i, j] = sum of x[producer, c] with out port i,         `Program.connect`
     sum over i of f[e, i, j] = sum of x[consumer, c] with in port j
(3)  T >= sum over c of transient[c] x[o, c]                     for every op  `Program.hold`
(4)  sum of kept[c] x[o, c] + sum of kept[i, j] f[e, i, j] + T                 `Program.limit_memory`
     <= limit - fixed
(5)  t[w] >= sum of load[s, c] x[o, c] + sum of load[s, i, j] f[e, i, j]       `Program.fill_windows`
                                                   for every stream s of w
(6)  minimise sum of ticks[c] x[o, c] + sum of ticks[i, j] f[e, i, j]          `Program.minimise_time`
     + sum of t[w]
(7)  minimise the left side of (4)   (in place of (4) to (6): for the          `Program.minimise_memory`
     smallest memory that would do)
===  ========================================================================  =========================

(1) and (6) under (4) are the program of OSDP (arXiv 2209.13258, equation 1), with more kinds of candidates: grids,
whose communication is priced by AxoNN's equations 4 to 10 (arXiv 2305.13525), and factors at rest, whose memory and
communication are those of AMSP (arXiv 2311.00257, equations 1 to 7). (2) is what a change of layout costs between two
ops; (5) is the maximum of computation and communication at once of Oases (arXiv 2305.16121, equations 2 to 6), here for
any streams of a window.

`branch_and_bound.Search` finds the choice. `docs/solver.md` has its steps, and what each method is worth.

Why not another candidate: what each op's best other one would change, all other ops left as they are.

Tidying: of choices that are as good, the one with the fewest kinds of layers, each kind in one stretch.

A solver does not tell equal layers apart, so a choice for a few of them may be anywhere. Plans are for people to read,
and a stretch of equal layers is evaluated by a few of them (`search.evaluation`). Ops of different layers with the same
name take the same strategy (`Candidate.data`), too, where that costs next to nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from shardweave.ir import InfeasibleError, PlanError, readable_bytes
from shardweave.planner.problem.problem import TICKS_PER_SECOND, Problem, largest_terms
from shardweave.planner.solver.branch_and_bound import Progress, Search
from shardweave.planner.solver.elimination import KEPT, Elimination, Tables
from shardweave.planner.solver.ilp import Answer, Program, solve_by_cp_sat
from shardweave.planner.solver.lagrangian import least_memory

ROUNDING_TOLERANCE = 1e-9
"""Which part of an objective its bound may lie below it by the order in which sums were taken."""


def relative_gap(objective: float, bound: float) -> float:
    """``(objective - bound) / objective``; 0 where only rounding lies between the two.

    >>> relative_gap(2.0, 1.5), relative_gap(2.0, 2.0 - 1e-15), relative_gap(0.0, 0.0)
    (0.25, 0.0, 0.0)
    """
    gap = (objective - bound) / objective if objective else 0.0
    return gap if gap > ROUNDING_TOLERANCE else 0.0


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
    status : {"optimal", "feasible"}
        Feasible where the time limit, or the gap that was asked for, ended the proof.
    seconds : float
        What solving took.
    """

    choice: tuple[int, ...]
    objective: float
    bound: float
    status: Literal["optimal", "feasible"]
    seconds: float

    @property
    def gap(self) -> float:
        """How far above the bound it may be: ``(objective - bound) / objective``; 0 where optimal."""
        return relative_gap(self.objective, self.bound)

    def held_to(self, bound: float) -> Solution:
        """The same choice against another bound: optimal where nothing lies between the two.

        Examples
        --------
        >>> found = Solution((1,), objective=2.0, bound=2.0, status="optimal", seconds=0.1).held_to(1.5)
        >>> found.status, found.gap
        ('feasible', 0.25)
        """
        held = replace(self, bound=bound)
        return replace(held, status="feasible" if held.gap else "optimal")


def solve(
    problem: Problem,
    time_limit: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
    hint: Sequence[int] | None = None,
    gap: float = 0.0,
    ceiling: float = math.inf,
    rough: bool = False,
) -> Solution:
    """The fastest choice within the memory limit, with a proof.

    The same problem gives the same choice, unless the time limit ends the search: one worker, a fixed seed.

    Parameters
    ----------
    problem : Problem
    time_limit : float
        Seconds after which the best choice so far is returned as ``"feasible"`` with its gap.
    progress : callable, optional
        Called at every better choice, and as the bound is looked at again.
    hint : sequence of int, optional
        A choice to begin with, such as that of a similar problem; of use where it is feasible.
    gap : float, optional
        The search ends where it has proven that the best choice is at most this part slower than the fastest, or where
        the programs that are left are too large: the gap is then larger.
    ceiling : float, optional
        The search ends where it has proven that every choice takes at least so many seconds.
    rough : bool, optional
        The search ends without the program that closes the gap: the gap may then be larger than was asked for.

    Raises
    ------
    InfeasibleError
        Nothing fits into the memory limit. The message has the smallest memory that would do, and what takes it.
    PlanError
        No choice at all has layouts that go together, or the time limit ended before any choice was found.

    Examples
    --------
    >>> from shardweave.planner.problem.problem import Candidate, Op
    >>> fast, small = Candidate("fast", 1.0, state_bytes=8), Candidate("small", 1.5, state_bytes=4)
    >>> solution = solve(Problem((Op("up", (fast, small)), Op("down", (fast, small))), memory_limit=12))
    >>> solution.objective, solution.status, sum(solution.choice)
    (2.5, 'optimal', 1)
    """
    start = time.monotonic()
    search = Search(problem, start + time_limit, progress, gap, ceiling)
    if hint is not None:
        search.incumbent.offer(tuple(hint))
    search.run(rough)
    choice = search.incumbent.choice
    if choice is None:
        if search.incumbent.proven:
            raise _infeasible(problem, time_limit)
        raise PlanError(
            f"no choice for {len(problem.ops)} ops was found within time_limit = {time_limit:g} s: raise time_limit, "
            f"or memory_limit (now {problem.memory_limit} bytes)"
        )
    objective, bound = problem.objective(choice), search.incumbent.least_seconds
    bound = objective if objective - bound <= ROUNDING_TOLERANCE * abs(objective) else bound
    status: Literal["optimal", "feasible"] = "optimal" if bound == objective else "feasible"
    return Solution(choice, objective, bound, status, time.monotonic() - start)


def _infeasible(problem: Problem, time_limit: float) -> PlanError:
    """The error for a problem without a choice: the smallest memory that would do, and what takes it."""
    proof = _least_memory(problem, time_limit)
    limit = problem.memory_limit
    if proof.status == "INFEASIBLE":
        return PlanError("no choice of candidates has layouts that go together on all edges: allow more candidates")
    if proof.choice is None:
        return InfeasibleError(f"nothing fits into the memory limit of {readable_bytes(limit)} a device: raise it")
    chosen = problem.chosen(proof.choice)
    terms = [(op.group or op.name, c.kept_bytes) for op, c in zip(problem.ops, chosen, strict=True)]
    parts = [
        f"{name}{f' x{times}' if times > 1 else ''} {readable_bytes(size)}"
        for name, times, size in largest_terms(terms)
    ]
    transients = [(candidate.transient_bytes, op.name) for op, candidate in zip(problem.ops, chosen, strict=True)]
    peak, name = max(transients, key=lambda transient: transient[0], default=(0, ""))
    if peak:
        parts.append(f"{name} while it runs {readable_bytes(peak)}")
    if problem.fixed_bytes:
        parts.append(f"fixed {readable_bytes(problem.fixed_bytes)}")
    needed = problem.memory(proof.choice)
    least = "smallest memory that does" if proof.status == "OPTIMAL" else "smallest memory found to do"
    return InfeasibleError.needing(
        needed,
        f"no plan fits into the memory limit of {limit} bytes ({readable_bytes(limit)}) a device; the {least} is "
        f"{needed} bytes ({readable_bytes(needed)}). Most of it: {', '.join(parts)}. Raise memory_limit, or use more "
        "devices or a smaller batch.",
    )


def smallest(problem: Problem, time_limit: float = 60.0) -> tuple[int, ...] | None:
    """The choice that needs the least memory, or the least that was found in time; None where there is no choice."""
    return _least_memory(problem, time_limit).choice


def _least_memory(problem: Problem, time_limit: float) -> Answer:
    elimination = Elimination.of(problem)
    if elimination is not None:
        choice = least_memory(elimination)
        return Answer(choice, 0.0, "INFEASIBLE" if choice is None else "OPTIMAL")
    return solve_by_cp_sat(Program.smallest(problem), time_limit)


class Alternative(NamedTuple):
    """Another candidate of an op.

    Parameters
    ----------
    candidate : int
        Which one.
    seconds : float
        How much longer the step would take with it (negative: shorter).
    missing_bytes : int
        How much the memory limit would have to be raised for it; 0 where it fits.
    """

    candidate: int
    seconds: float
    missing_bytes: int


def alternatives(problem: Problem, choice: Sequence[int]) -> tuple[Alternative | None, ...]:
    """For each op the fastest candidate that was not chosen, whether it fits or not (a faster one never does).

    None where the op has no other candidate whose layouts go with its neighbours'.

    >>> from shardweave.planner.problem.problem import Candidate, Op
    >>> op = Op("up", (Candidate("fast", 1.0, state_bytes=8), Candidate("small", 1.5, state_bytes=4)))
    >>> alternatives(Problem((op,), memory_limit=6), (1,))
    (Alternative(candidate=0, seconds=-0.5, missing_bytes=2),)
    """
    tables, chosen = Tables(problem), problem.chosen(choice)
    total, _ = tables.sums(choice)
    now = tables.ticks(total)
    peaks = sorted((candidate.transient_bytes for candidate in chosen), reverse=True)
    found: list[Alternative | None] = []
    for op, own in enumerate(choice):
        mine, allowed = tables.around(op, choice)
        then = (total - mine[:, own])[:, None] + mine
        seconds = (tables.ticks(then) - now) / TICKS_PER_SECOND
        others_peak = peaks[0] if chosen[op].transient_bytes < peaks[0] else max(peaks[1:], default=0)
        peak = np.maximum(others_peak, tables.ops[tables.op_of[op]].transient)
        missing = np.maximum(0, then[KEPT] + peak - tables.room)
        options = [
            Alternative(index, float(seconds[index]), int(missing[index]))
            for index in range(len(mine[0]))
            if index != own and allowed[index] and allowed[own]
        ]
        found.append(min(options, key=lambda option: (option.seconds, option.missing_bytes), default=None))
    return tuple(found)
