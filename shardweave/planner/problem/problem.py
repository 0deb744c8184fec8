"""What the planner decides, as a plain table: ops, their candidates, what a change of layout costs, the memory limit.

The one idea: whoever prices candidates knows graphs, layouts and clusters; whoever chooses among them knows none of
these. Between the two lies a `Problem`: pick one candidate for each op so that

    time   = fixed_seconds + sum of the candidates' seconds + sum of the edges' seconds[out port, in port]
             + sum over the windows of the largest of their streams' loads

is smallest while

    memory = fixed_bytes + sum of (state_bytes + max(saved_bytes, left_bytes))
             + sum of the edges' bytes[out port, in port] + largest transient_bytes  <=  memory_limit.

The backward frees what an op saved and leaves its gradient. Wherever it is, each op holds one or the other: the sum of
the larger of both bounds every point of the step, and is met at its turn to the backward where all save more.

A *window* is a part of the step (the forward, the backward) in which streams (compute, the links of a level) work at
once: it takes as long as the busiest of them, the sum of what the candidates and edges load on it. So communication
that others hide costs nothing until its link is full.

Times are counted in ticks of ``2**-40`` s (0.9 ps), each term rounded to the nearest tick. Sums of ticks are exact,
whatever their order, so the laws of the optimum (more memory never makes it slower) hold to the last bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardweave.ir import PlanError

TICKS_PER_SECOND = 2**40
"""Sums up to ``2**13`` s (more than two hours a step) of such ticks are exact in a float, too."""

FORBIDDEN = -1
"""Stands in `Edge.ticks` for a pair of ports that cannot be chosen together."""

_MAX_TICKS = 2**61
"""What any sum of times must stay below for the solver's 64-bit integers."""


def to_ticks(seconds: float) -> int:
    """`seconds` in ticks, rounded to the nearest.

    >>> to_ticks(1.0) == TICKS_PER_SECOND, to_ticks(1e-14)
    (True, 0)
    """
    return round(seconds * TICKS_PER_SECOND)


@dataclass(frozen=True)
class Candidate:
    """One way to spread an op over the devices, with all that it costs on one device.

    Parameters
    ----------
    label : str
        For people to read.
    seconds : float
        Time that the op takes in one step, forward and backward, its own communication included.
    state_bytes : int
        What its parameters, gradients and optimizer states occupy all the time.
    saved_bytes : int
        What it keeps from the forward for the backward.
    left_bytes : int
        What there is in its place once its backward is done: gradients, and what the optimizer's step needs.
    transient_bytes : int
        What it needs beside that only while it runs, such as gathered copies.
    in_port, out_port : int
        The layout it wants its inputs in and the one that it leaves its output in: indices into `Edge.seconds`.
    data : object
        The caller's own (a strategy, say): hashable. The planner only asks whether it equals another one.
    loads : tuple of float
        Seconds on each stream of each window, in the order of `Problem.windows`; none of them where it is empty.
    """

    label: str
    seconds: float
    state_bytes: int = 0
    saved_bytes: int = 0
    transient_bytes: int = 0
    in_port: int = 0
    out_port: int = 0
    data: Hashable = None
    loads: tuple[float, ...] = ()
    left_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """What adds up over the ops."""
        return self.state_bytes + max(self.saved_bytes, self.left_bytes)

    @cached_property
    def ticks(self) -> int:
        return to_ticks(self.seconds)

    @cached_property
    def load_ticks(self) -> tuple[int, ...]:
        return tuple(map(to_ticks, self.loads))


@dataclass(frozen=True)
class Op:
    """An op to decide on. Ops of one `group` with equal tables are equal layers."""

    name: str
    candidates: tuple[Candidate, ...]
    group: str = ""

    @cached_property
    def in_ports(self) -> tuple[int, ...]:
        """The ports that its candidates want their inputs in, ascending."""
        return tuple(sorted({candidate.in_port for candidate in self.candidates}))

    @cached_property
    def out_ports(self) -> tuple[int, ...]:
        """The ports that its candidates leave their outputs in, ascending."""
        return tuple(sorted({candidate.out_port for candidate in self.candidates}))


@dataclass(frozen=True, eq=False)
class Edge:
    """What it costs to bring the output of op `producer` to op `consumer` (indices into `Problem.ops`).

    ``seconds[i, j]`` is for a producer's candidate with `out_port` i and a consumer's with `in_port` j; ``inf``
    where the two cannot go together. `loads` has such a table for each stream of `Problem.windows`, `kept` one of bytes
    that are kept; None stands for zeros.
    """

    producer: int
    consumer: int
    seconds: NDArray[np.float64]
    loads: NDArray[np.float64] | None = None
    kept: NDArray[np.int64] | None = None

    @cached_property
    def ticks(self) -> NDArray[np.int64]:
        """`seconds` in ticks, `FORBIDDEN` where infinite."""
        finite = np.isfinite(self.seconds)
        ticks = np.rint(np.where(finite, self.seconds, 0.0) * TICKS_PER_SECOND).astype(np.int64)
        return np.where(finite, ticks, FORBIDDEN)

    @cached_property
    def ticks_of_loads(self) -> NDArray[np.int64] | None:
        """`loads` in ticks."""
        return None if self.loads is None else np.rint(self.loads * TICKS_PER_SECOND).astype(np.int64)

    @cached_property
    def most_seconds(self) -> float:
        """The most that a pair of ports that may go together takes, its loads one after the other."""
        total = self.seconds if self.loads is None else self.seconds + self.loads.sum(axis=0)
        return float(total.max(initial=0.0, where=total < math.inf))

    @cached_property
    def is_defined(self) -> bool:
        """Whether every entry is a time."""
        tables = [table for table in (self.seconds, self.loads, self.kept) if table is not None]
        return all(bool((table >= 0).all()) for table in tables)


_Change = tuple[Edge, tuple[int, int], int]
"""An edge of a table, the ports that it brings together, and how many edges of the same table do."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One candidate is to be chosen for each op; the module's docstring has time and memory.

    Parameters
    ----------
    ops : tuple of Op
    edges : tuple of Edge
        Any graph over the ops; several edges between two ops add up.
    memory_limit : int
        Bytes a device.
    fixed_bytes, fixed_seconds : int, float
        What every choice costs.
    windows : tuple of tuples of str
        The names of the streams of each window.

    Raises
    ------
    PlanError
        An op without candidates, an edge to no op, a port without a row or column, a negative or undefined figure.

    Examples
    --------
    >>> fast, small = Candidate("fast", 1.0, state_bytes=8), Candidate("small", 1.5, state_bytes=4, in_port=1)
    >>> change = Edge(0, 1, np.array([[0.0, 0.25]]))
    >>> problem = Problem((Op("up", (fast,)), Op("down", (fast, small))), (change,), memory_limit=12)
    >>> problem.objective((0, 1)), problem.memory((0, 1)), problem.feasible((0, 0))
    (2.75, 12, False)
    """

    ops: tuple[Op, ...]
    edges: tuple[Edge, ...] = ()
    memory_limit: int = 2**62
    fixed_bytes: int = 0
    fixed_seconds: float = 0.0
    windows: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        largest = 0
        checked: dict[object, int] = {}  # equal layers share their tables
        for op in self.ops:
            if id(op.candidates) not in checked:
                _check_op(op, self.num_streams)
                checked[id(op.candidates)] = to_ticks(max(c.seconds + sum(c.loads) for c in op.candidates))
            largest += checked[id(op.candidates)]
        for edge in self.edges:
            self._check_ends(edge)
            ends = (id(self.ops[end].candidates) for end in (edge.producer, edge.consumer))
            key = id(edge.seconds), id(edge.loads), id(edge.kept), *ends
            if key not in checked:
                self._check_tables(edge)
                checked[key] = to_ticks(edge.most_seconds)
            largest += checked[key]
        if largest + abs(to_ticks(self.fixed_seconds)) >= _MAX_TICKS:
            raise PlanError(
                f"the ops' times add up to {largest / TICKS_PER_SECOND:.3g} s, expected less than "
                f"{_MAX_TICKS / TICKS_PER_SECOND:.3g} s a step: check the cluster's figures (SI units)"
            )

    def _check_ends(self, edge: Edge) -> None:
        if not (0 <= edge.producer < len(self.ops) and 0 <= edge.consumer < len(self.ops)) or (
            edge.producer == edge.consumer
        ):
            raise PlanError(
                f"an edge goes from op {edge.producer} to op {edge.consumer}, expected two different ones "
                f"of the {len(self.ops)} ops"
            )

    def _check_tables(self, edge: Edge) -> None:
        producer, consumer = self.ops[edge.producer], self.ops[edge.consumer]
        needed = 1 + producer.out_ports[-1], 1 + consumer.in_ports[-1]
        shape = edge.seconds.shape
        if len(shape) != 2 or shape[0] < needed[0] or shape[1] < needed[1]:
            raise PlanError(
                f"the edge {producer.name} -> {consumer.name} has a table of shape {shape}, expected at least "
                f"{needed}: one row an out port, one column an in port"
            )
        expected = {"loads": (self.num_streams, *shape), "kept": shape}
        for name, table in (("loads", edge.loads), ("kept", edge.kept)):
            if table is not None and table.shape != expected[name]:
                raise PlanError(
                    f"the edge {producer.name} -> {consumer.name} has {name} of shape {table.shape}, expected "
                    f"{expected[name]}"
                )
        if not edge.is_defined:
            raise PlanError(f"the edge {producer.name} -> {consumer.name} has a negative or undefined figure")

    @cached_property
    def num_streams(self) -> int:
        """Streams of all windows together."""
        return sum(map(len, self.windows))

    def ticks(self, choice: Sequence[int]) -> int | None:
        """The time of `choice` in ticks; None where it puts two ports together that cannot be."""
        chosen = self.chosen(choice)
        total = to_ticks(self.fixed_seconds) + sum(candidate.ticks for candidate in chosen)
        changes = [*self._changes(chosen)]
        for edge, ports, count in changes:
            # One entry, not `Edge.ticks`: a thousand layers share a table, but not what an edge remembers of it
            seconds = float(edge.seconds[ports])
            if math.isinf(seconds):
                return None
            total += count * to_ticks(seconds)
        return total + self.window_ticks(self._load_ticks(chosen, changes))

    def load_ticks(self, choice: Sequence[int]) -> tuple[int, ...]:
        """What `choice` loads on each stream of each window, in ticks."""
        chosen = self.chosen(choice)
        return self._load_ticks(chosen, self._changes(chosen))

    def _load_ticks(self, chosen: Sequence[Candidate], changes: Iterable[_Change]) -> tuple[int, ...]:
        total = np.zeros(self.num_streams, dtype=np.int64)
        times = Counter(map(id, chosen))
        for each in {id(candidate): candidate for candidate in chosen if candidate.loads}.values():
            total += times[id(each)] * np.array(each.load_ticks)
        for edge, (row, column), count in changes:
            if edge.loads is not None:
                loads = edge.loads[:, row, column]
                total += count * np.rint(loads * TICKS_PER_SECOND).astype(np.int64)
        return tuple(map(int, total))

    def _changes(self, chosen: Sequence[Candidate]) -> Iterator[_Change]:
        """The changes of layout of a choice: those by one table, which equal layers share, once with their number."""
        for edge, ends in self._ends_by_tables:
            ports = Counter((chosen[producer].out_port, chosen[consumer].in_port) for producer, consumer in ends)
            for each, count in ports.items():
                yield edge, each, count

    @cached_property
    def _ends_by_tables(self) -> list[tuple[Edge, list[tuple[int, int]]]]:
        found: dict[tuple[int, int, int], tuple[Edge, list[tuple[int, int]]]] = {}
        for edge in self.edges:
            _, ends = found.setdefault((id(edge.seconds), id(edge.loads), id(edge.kept)), (edge, []))
            ends.append((edge.producer, edge.consumer))
        return [*found.values()]

    def window_ticks(self, loads: Sequence[int]) -> int:
        """What the windows take at these loads, one a stream: each as long as its busiest stream."""
        total, first = 0, 0
        for streams in self.windows:
            total += max(loads[first : first + len(streams)], default=0)
            first += len(streams)
        return total

    def objective(self, choice: Sequence[int]) -> float:
        """The time of `choice` in seconds; ``inf`` where it puts two ports together that cannot be."""
        ticks = self.ticks(choice)
        return math.inf if ticks is None else ticks / TICKS_PER_SECOND

    def memory(self, choice: Sequence[int]) -> int:
        """The memory of `choice` in bytes a device."""
        chosen = self.chosen(choice)
        transient = max((candidate.transient_bytes for candidate in chosen), default=0)
        kept = sum(candidate.kept_bytes for candidate in chosen)
        moved = sum(
            count * int(edge.kept[ports]) for edge, ports, count in self._changes(chosen) if edge.kept is not None
        )
        return self.fixed_bytes + kept + moved + transient

    def kept_by_op(self, choice: Sequence[int]) -> list[int]:
        """The bytes that each op keeps under `choice`; what an edge keeps belongs to its producer."""
        chosen = self.chosen(choice)
        found = [candidate.kept_bytes for candidate in chosen]
        for edge in self.edges:
            if edge.kept is not None:
                found[edge.producer] += int(edge.kept[chosen[edge.producer].out_port, chosen[edge.consumer].in_port])
        return found

    def seconds_by_op(self, choice: Sequence[int]) -> list[float]:
        """What each op takes under `choice` on the busiest stream of each window; an edge belongs to its producer.

        They add up to the objective, but for what is fixed.
        """
        chosen, busiest = self.chosen(choice), self.busiest(choice)
        found = [
            candidate.seconds + sum(candidate.loads[stream] for stream in busiest if candidate.loads)
            for candidate in chosen
        ]
        for edge in self.edges:
            at = chosen[edge.producer].out_port, chosen[edge.consumer].in_port
            loads = 0.0 if edge.loads is None else float(edge.loads[busiest, at[0], at[1]].sum())
            found[edge.producer] += float(edge.seconds[at]) + loads
        return found

    def busiest(self, choice: Sequence[int]) -> list[int]:
        """The stream of each window that it waits for, by its number: the first of equal ones."""
        loads, found, first = self.load_ticks(choice), [], 0
        for streams in self.windows:
            last = first + len(streams)
            found += [max(range(first, last), key=loads.__getitem__)] if streams else []
            first = last
        return found

    def feasible(self, choice: Sequence[int]) -> bool:
        """Whether `choice` fits into the memory limit and all its ports go together."""
        return self.memory(choice) <= self.memory_limit and self.ticks(choice) is not None

    def chosen(self, choice: Sequence[int]) -> list[Candidate]:
        """The candidates that the indices `choice` name, one an op."""
        return [op.candidates[index] for op, index in zip(self.ops, choice, strict=True)]


def largest_terms(terms: Iterable[tuple[str, int]], count: int = 5) -> list[tuple[str, int, int]]:
    """The `count` names with the largest sums, as (name, how many terms, sum), largest first.

    >>> largest_terms([("mlp", 3), ("head", 4), ("mlp", 3)], count=1)
    [('mlp', 2, 6)]
    """
    sums: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for name, value in terms:
        sums[name] += value
        times[name] += 1
    return [(name, times[name], value) for name, value in sorted(sums.items(), key=lambda item: -item[1])[:count]]


def _check_op(op: Op, num_streams: int) -> None:
    if not op.candidates:
        raise PlanError(f"op {op.name} has no candidates: no grid divides its sizes, or `force` leaves none")
    for candidate in op.candidates:
        figures = (
            candidate.seconds,
            candidate.state_bytes,
            candidate.saved_bytes,
            candidate.left_bytes,
            candidate.transient_bytes,
            candidate.in_port,
            candidate.out_port,
            *candidate.loads,
        )
        if candidate.loads and len(candidate.loads) != num_streams:
            raise PlanError(
                f"candidate {candidate.label!r} of op {op.name} has {len(candidate.loads)} loads, expected one "
                f"for each of the windows' {num_streams} streams"
            )
        if not (min(figures) >= 0 and sum(figures) < math.inf):  # no sum with nan is less
            raise PlanError(
                f"candidate {candidate.label!r} of op {op.name} has a negative or undefined figure: {candidate}"
            )


Kept = tuple[tuple[int, ...], ...]
"""For each op, which of its candidates a restricted problem has (their indices in the first one)."""


def invert(choice: Sequence[int], kept: Kept) -> tuple[int, ...]:
    """The choice for the first problem that `choice` for the smaller one stands for.

    >>> invert((1, 0), kept=((0, 2), (1,)))
    (2, 1)
    """
    return tuple(indices[index] for index, indices in zip(choice, kept, strict=True))


def restricted(problem: Problem, kept: Kept) -> Problem:
    """`problem` with only the candidates `kept` of each op."""
    tables: dict[tuple[int, tuple[int, ...]], tuple[Candidate, ...]] = {}
    ops = []
    for op, indices in zip(problem.ops, kept, strict=True):
        if len(indices) < len(op.candidates):
            key = id(op.candidates), indices
            if key not in tables:  # equal layers share one table before and after
                tables[key] = tuple(op.candidates[index] for index in indices)
            op = replace(op, candidates=tables[key])
        ops.append(op)
    return replace(problem, ops=tuple(ops))
