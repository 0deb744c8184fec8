"""The order in which `Elimination` takes the ops: greedily what leaves the smallest table, equal ops together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_FEWEST = 2
"""States that an op counts as at least: arrays have a limit of axes, too."""


def ordered(near: Sequence[set[int]], states: Sequence[int], roles: Sequence[int], largest: int) -> list[int] | None:
    """All ops in order; None where a step's table would have more than `largest` entries.

    Ops of one role go together but for neighbours, so that the steps of equal layers are equal, too. Where nothing
    but a chain of them is left, or a ring as a tied weight makes it, every second one goes. Those that would leave
    more than the one in the middle wait, as ops at the ends of a model may.

    Parameters
    ----------
    near : sequence of sets of int
        Each op's neighbours; used up.
    states : sequence of int
        How many states each op has.
    roles : sequence of int
        For each op a number, the same for equal ones in equal surroundings.
    largest : int

    Examples
    --------
    >>> ordered([{1}, {0, 2}, {1, 3}, {2, 4}, {3}], states=[2] * 5, roles=[0, 1, 0, 1, 0], largest=8)
    [0, 2, 4, 3, 1]
    """
    equal: dict[int, list[int]] = {}
    for op, role in enumerate(roles):
        equal.setdefault(role, []).append(op)

    def entries(ops: Iterable[int]) -> int:
        return math.prod(max(_FEWEST, states[op]) for op in ops)

    def result(members: Sequence[int]) -> int:
        """What the op in the middle leaves; those at the ends of a model have other neighbours."""
        return entries(near[members[len(members) // 2]])

    order: list[int] = []
    while equal:
        role = min(equal, key=lambda role: (result(equal[role]), role))
        left: list[int] = []
        most, ops = result(equal[role]), equal.pop(role)
        # The first of a chain has another neighbour: it goes last, so that all others of the chain are equal
        changed: set[int] = set() if near[ops[0]].isdisjoint(ops) else {ops[0]}
        for op in ops:
            if op in changed or entries(near[op]) > most:
                left.append(op)
                continue
            if entries((op, *near[op])) > largest:
                return None
            changed |= near[op]
            order.append(op)
            join(near, op)
        if left:
            equal[role] = left
    return order


def join(near: Sequence[set[int]], op: int) -> None:
    """Make neighbours of all that `op` leaves behind."""
    for other in near[op]:
        near[other] |= near[op]
        near[other] -= {op, other}
