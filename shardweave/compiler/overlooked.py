"""Overlooked: of a problem with few choices, those that the program takes for a little too large, and that may fit."""

from __future__ import annotations

import math
from itertools import product

from shardweave.compiler.planner.problem import Problem

FEW = 2**12
"""Choices of a problem up to which each is looked at."""

SLACK = 1.15
"""How many times the limit one may count."""

MOST = 32
"""How many are simulated."""


def overlooked(problem: Problem, limit: int, ceiling: float) -> list[tuple[int, ...]]:
    """Choices that may fit and take less than `ceiling` seconds, the fastest first; the smallest first where it is inf.

    None of a problem with many choices.

    Examples
    --------
    >>> from shardweave.compiler.planner.problem import Candidate, Op
    >>> ways = Candidate("dp", 1.0, 102), Candidate("zdp", 2.0, 100), Candidate("tensor", 3.0, 90)
    >>> problem = Problem((Op("head", ways),), (), memory_limit=100)
    >>> overlooked(problem, 100, ceiling=2.5), overlooked(problem, 99, ceiling=float("inf"))
    ([(0,), (1,)], [(2,), (1,), (0,)])
    """
    if math.prod(len(op.candidates) for op in problem.ops) > FEW:
        return []
    found = []
    for choice in product(*(range(len(op.candidates)) for op in problem.ops)):
        seconds = problem.objective(choice)
        if seconds < ceiling and (size := problem.memory(choice)) <= SLACK * limit:
            found.append((seconds if ceiling < math.inf else size, choice))
    return [choice for _, choice in sorted(found)[:MOST]]
