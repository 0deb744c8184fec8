"""Pace: collectives that can wait are held until the links that they need are free.

A layer waits for its activations' collectives, whatever the order. A parameter's gather that is under way meanwhile
takes a part of their links, and makes them, and the step, so much longer; between one of them and the next, in a
*pause*, these links are free. Each gather gets the last pause that has room for it before its use, from the last use to
the first (earliest due date, from behind: Jackson 1955). A gradient's reduction may use other links than activations
do, and share these with the gathers and reductions in the pauses: it is held for the next activation's collective.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardweave.passes.justify import Machines
from shardweave.passes.keys import cause_of
from shardweave.passes.tasks import Tasks, Transfers
from shardweave.passes.weave import Key, Moment

Edge = tuple[int, int]
"""Two tasks, of which the first comes before the second."""


def paced(tasks: Tasks, keys: Sequence[Key], moments: Sequence[Moment], most: int) -> list[list[Edge]]:
    """What comes before what where gathers are held for pauses, and where reductions are held for what they run beside.

    Each is left out where it holds nothing. Gathers are at most `most` moments ahead of their use.
    """
    begins = _begins(tasks, keys)
    return [edges for edges in (_in_pauses(tasks, begins, moments, most), _beside(tasks, begins)) if edges]


def _crowd(one: Transfers, other: Transfers) -> bool:
    """Whether two collectives that run at the same time ask more of a level's links than these have."""
    return any(part + other.demand.use.get(level, 0.0) > 1.0 for level, part in one.demand.use.items())


def _begins(tasks: Tasks, keys: Sequence[Key]) -> list[float]:
    """When each task begins if only activations' collectives, and what is computed, take time."""
    moves = [cause_of(tasks, task) in ("", "activation") for task in range(len(keys))]
    machines = Machines.of(tasks)
    machines = replace(
        machines,
        seconds=[seconds if mine else 0.0 for seconds, mine in zip(machines.seconds, moves)],
        machine=[machine if mine else "" for machine, mine in zip(machines.machine, moves)],
    )
    place = {task: float(index) for index, task in enumerate(sorted(range(len(keys)), key=keys.__getitem__))}
    return machines.scheduled([place[task] for task in range(len(keys))], 1)[1]


def _starts(tasks: Tasks, *causes: str) -> list[tuple[int, Transfers]]:
    found = enumerate(tasks.transfers)
    return [(task, moved) for task, moved in found if moved is not None and moved.what.cause in causes]


def _kinds(starts: Sequence[tuple[int, Transfers]]) -> list[Transfers]:
    """One collective of each group and use of links."""
    return list({(moved.group, *moved.demand.use.items()): moved for _, moved in starts}.values())


@dataclass
class _Pause:
    """Seconds in which no activation's collective runs, and the wait for the one before; -1 for the first."""

    wait: int
    begin: float
    end: float


def _in_pauses(tasks: Tasks, begins: Sequence[float], moments: Sequence[Moment], most: int) -> list[Edge]:
    pauses = list(_pauses(tasks, begins))
    due = [min(begins[use] for use in moment.uses) for moment in moments]
    edges: list[Edge] = []
    for number in reversed(range(len(moments))):
        moved = [tasks.transfers[start] for start in moments[number].starts]
        seconds = sum(each.demand.seconds for each in moved if each is not None)
        pause = _last_with_room(pauses, seconds, due[number - most] if number >= most else 0.0, due[number])
        if pause is not None and pause.wait >= 0:
            edges += [(pause.wait, start) for start in moments[number].starts]
    return edges


def _pauses(tasks: Tasks, begins: Sequence[float]) -> Iterator[_Pause]:
    """The times between activations' collectives that share links with gathers."""
    waits = {start: wait for wait, start in enumerate(tasks.started) if start >= 0}
    gathers = _kinds(_starts(tasks, "parameter"))
    busy = [
        (begins[start], begins[start] + moved.demand.seconds, waits[start])
        for start, moved in _starts(tasks, "activation")
        if start in waits and any(_crowd(moved, gather) for gather in gathers)
    ]
    free, before = 0.0, -1
    for begin, end, wait in [*sorted(busy), (math.inf, math.inf, -1)]:
        if begin > free:
            yield _Pause(before, free, begin)
        if end > free:
            free, before = end, wait


def _last_with_room(pauses: Sequence[_Pause], seconds: float, earliest: float, due: float) -> _Pause | None:
    """Where what is due then is gathered: in the last pause with room for it, or else the one with most."""
    room = {index: min(p.end, due) - p.begin for index, p in enumerate(pauses) if earliest <= p.begin < due}
    if not room or max(room.values()) <= 0:
        return None
    fitting = [index for index, free in room.items() if free >= seconds]
    pause = pauses[fitting[-1] if fitting else max(room, key=lambda index: (room[index], index))]
    pause.end = max(pause.begin, min(pause.end, due) - seconds)
    return pause


def _beside(tasks: Tasks, begins: Sequence[float]) -> list[Edge]:
    activations = sorted(_starts(tasks, "activation"), key=lambda each: begins[each[0]])
    times = [begins[start] for start, _ in activations]
    others = _kinds(_starts(tasks, "parameter", "gradient"))
    edges: list[Edge] = []
    for start, moved in _starts(tasks, "gradient"):
        if _is_needed(tasks, start) or not any(o.group != moved.group and _crowd(moved, o) for o in others):
            continue
        following = activations[bisect.bisect_left(times, begins[start]) :]
        long = moved.demand.seconds / 4  # some room for it
        beside = next((each for each in following if each[1].demand.seconds >= long), None)
        if beside is not None and not _crowd(moved, beside[1]):
            edges.append((beside[0], start))
    return edges


def _is_needed(tasks: Tasks, start: int) -> bool:
    """Whether something is computed, or moved, with what a collective brings."""
    users = tasks.users[start]
    return any(tasks.transfers[u] is not None or tasks.seconds[u] > 0 or _is_needed(tasks, u) for u in users)
