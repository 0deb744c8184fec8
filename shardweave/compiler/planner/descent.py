"""Feasible choices by local improvement: for graphs that nothing exact gets through in time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardweave.compiler.planner.tables import KEPT, Tables

_ROUNDS = 8
"""Rounds over all ops at one price; most end after three."""

_PRICES = 24
"""Prices that are tried: bisection to a part in ten million of the first one."""


def descend(tables: Tables, offer: Callable[[tuple[int, ...]], None]) -> None:
    """Offer choices that no change of a single op makes faster, at prices of memory up to the smallest that fit.

    The price is bisected: fast choices that do not fit lie on one side, choices that do on the other. Each price
    begins at the choice of the price before.
    """
    ops = [tables.ops[number] for number in tables.op_of]
    if not ops:
        offer(())
        return
    held = [op.figures[KEPT] + op.transient for op in ops]
    spread = sum(float(np.ptp(tables.time(op.figures))) for op in ops)
    choice = [int(own.argmin()) for own in held]
    offer(tuple(choice))
    low, high = 0.0, 1024 * (spread + 1.0) / (sum(float(np.ptp(own)) for own in held) + 1.0)
    for attempt in range(_PRICES):
        price = high if attempt == 0 else 0.0 if attempt == 1 else (low * high) ** 0.5 if low else high / 16
        choice = _settled(tables, choice, price)
        offer(tuple(choice))
        if tables.problem.memory(choice) <= tables.problem.memory_limit:
            high = price
        elif attempt > 1:
            low = price


def _settled(tables: Tables, choice: list[int], price: float) -> list[int]:
    choice = list(choice)
    for _ in range(_ROUNDS):
        changed = False
        total, _ = tables.sums(choice)
        for op, own in enumerate(choice):
            figures, allowed = tables.around(op, choice)
            rest = total - figures[:, own]
            held = figures[KEPT] + tables.ops[tables.op_of[op]].transient
            cost = np.where(allowed, tables.time(rest[:, None] + figures) + price * held, np.inf)
            best = int(cost.argmin())
            if cost[best] < cost[own]:
                choice[op], changed = best, True
                total = rest + figures[:, best]
        if not changed:
            break
    return choice
