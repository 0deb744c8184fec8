"""Feasible choices by local improvement: for graphs that nothing exact gets through in time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardweave.compiler.planner.problem import FORBIDDEN, Problem

_ROUNDS = 8
"""Rounds over all ops at one price; most end after three."""

_PRICES = 24
"""Prices that are tried: bisection to a part in ten million of the first one."""


def descend(problem: Problem, offer: Callable[[tuple[int, ...]], None]) -> None:
    """Offer choices that no change of a single op makes faster, at prices of memory up to the smallest that fit.

    The price is bisected: fast choices that do not fit lie on one side, choices that do on the other. Each price
    begins at the choice of the price before.
    """
    figures = [
        np.array(
            [(c.ticks, c.kept_bytes, c.transient_bytes, c.in_port, c.out_port) for c in op.candidates], dtype=np.int64
        ).T
        for op in problem.ops
    ]
    if not figures:
        offer(())
        return
    spread = sum(float(table[0].max() - table[0].min()) for table in figures)
    held = sum(float((table[1] + table[2]).max() - (table[1] + table[2]).min()) for table in figures)
    choice = [int((table[1] + table[2]).argmin()) for table in figures]
    offer(tuple(choice))
    low, high = 0.0, 1024 * (spread + 1.0) / (held + 1.0)
    for attempt in range(_PRICES):
        price = high if attempt == 0 else 0.0 if attempt == 1 else (low * high) ** 0.5 if low else high / 16
        choice = _settled(problem, figures, choice, price)
        offer(tuple(choice))
        if problem.memory(choice) <= problem.memory_limit:
            high = price
        elif attempt > 1:
            low = price


def _settled(problem: Problem, figures: list[NDArray[np.int64]], choice: list[int], price: float) -> list[int]:
    choice = list(choice)
    for _ in range(_ROUNDS):
        changed = False
        for op, (ticks, kept, transient, ins, outs) in enumerate(figures):
            cost = ticks + price * (kept + transient)
            for edge in problem.edges_of[op]:
                if edge.producer == op:
                    row = edge.ticks[outs, figures[edge.consumer][3][choice[edge.consumer]]]
                else:
                    row = edge.ticks[figures[edge.producer][4][choice[edge.producer]], ins]
                cost = cost + np.where(row == FORBIDDEN, np.inf, row)
            best = int(cost.argmin())
            if cost[best] < cost[choice[op]]:
                choice[op], changed = best, True
        if not changed:
            break
    return choice
