"""From the simulated step of two of each stretch of equal layers to the step of all of them.

Away from its ends a step of equal layers is periodic. So each layer that was left out adds the mean time of those that
were simulated (`mean_seconds`), and what one of these holds (`memory_with_repeated_layers`). Where reductions of
gradients take longer than a layer's kernels, they queue up, and the step is not a sum of layers: `with_repeated_layers`
finds the period in the order of the streams' ops and repeats it, for `cost_model.replay`.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardweave.cost_model import MemoryCurve, StreamOp, Timeline, Transfer
from shardweave.passes import RepeatedLayers
from shardweave.sharding import layer_of

LASTING = ("parameters", "optimizer", "copies", "buffers", "saved", "gradients")
"""The kinds of memory that layers hold while others are computed."""

COMPUTED = ("saved", "working")
"""The kinds of values that layers compute."""


class StepSeconds(NamedTuple):
    """Seconds of a step, computing and waiting for collectives."""

    compute: float
    exposed: float

    def times(self, count: int) -> StepSeconds:
        """So many times as much."""
        return StepSeconds(count * self.compute, count * self.exposed)


@dataclass(frozen=True)
class Layers:
    """The layers of ops, by the name of their module, or among `others` by their own."""

    others: Mapping[str, str]

    def of(self, owner: str) -> str:
        """The layer of an event or of a memory change.

        >>> Layers({"add_7": "blocks.1"}).of("add_7"), Layers({}).of("blocks.2.up (mm_3)")
        ('blocks.1', 'blocks.2')
        """
        name = owner.partition(" ")[0]
        return self.others.get(name) or layer_of(name)


def mean_seconds(timeline: Timeline, layers: Layers, few: Sequence[str]) -> StepSeconds:
    """The mean time of one of a few equal layers."""
    compute = exposed = 0.0
    for event in timeline.events:
        if event.kind in ("compute", "wait") and layers.of(event.op) in few:
            compute += event.seconds if event.kind == "compute" else 0.0
            exposed += event.seconds if event.kind == "wait" else 0.0
    return StepSeconds(compute / len(few), exposed / len(few))


def memory_with_repeated_layers(
    memory: MemoryCurve, layers: Layers, repeated: RepeatedLayers, outputs: Container[str]
) -> MemoryCurve:
    """The curve with so many more of equal layers, which run between the last two of those that were simulated.

    While one of these two is computed, the layers left out hold what the other one does: the forward and the backward
    have both passed them, or have yet to.

    Parameters
    ----------
    memory : MemoryCurve
    layers : Layers
    repeated : sequence of (sequence of str, int)
        Layers that are equal, and how many more of them there are.
    outputs : container of str
        The names of values that layers leave to what comes behind them. The last of equal layers may hold another
        one than the layers before it, as its neighbour is another.
    """
    inside, passed_on, computed = dict[str, list[int]](), dict[str, list[int]](), dict[str, list[int]]()
    for row, change in enumerate(memory.changes, start=1):
        layer = layers.of(change.owner)
        if change.kind in LASTING:
            rows = passed_on if value_of(change.owner) in outputs else inside
            rows.setdefault(layer, []).append(row)
        if change.kind in COMPUTED and change.bytes > 0:
            computed.setdefault(layer, []).append(row)
    deltas = np.diff(memory.bytes, axis=0, prepend=0)
    found = memory.bytes.copy()
    for few, others in repeated:
        if others:
            first, last = few[-2:][0], few[-1]
            by_first, by_last = (_held(deltas, inside.get(layer, [])) for layer in (first, last))
            found += others * _held_between(by_first, by_last, computed.get(first, []), computed.get(last, []))
            found += others * _held(deltas, passed_on.get(first, []))
    return replace(memory, bytes=found)


def value_of(owner: str) -> str:
    """The name of the value that a memory change is of.

    >>> value_of("blocks.2.up (mm_3)"), value_of("add_7")
    ('mm_3', 'add_7')
    """
    return owner.rpartition(" ")[2].strip("()")


def _held(deltas: NDArray[np.int64], rows: Sequence[int]) -> NDArray[np.int64]:
    """What these changes have led to, at each moment."""
    own = np.zeros_like(deltas)
    own[rows] = deltas[rows]
    return np.cumsum(own, axis=0)


def _held_between(
    by_first: NDArray[np.int64], by_last: NDArray[np.int64], first: Sequence[int], last: Sequence[int]
) -> NDArray[np.int64]:
    """What each layer between two equal ones holds at each moment: what the one of these holds that is not computed.

    `first` and `last` are the moments at which values of the two are computed. Of each kind of memory it is at most
    what both hold at once: the first one may save more, beside a neighbour that is not equal.
    """
    last_is_computed = np.zeros(len(by_first), dtype=bool)
    computed = sorted([*((row, False) for row in first), *((row, True) for row in last)])
    for (row, is_last), (end, _) in zip(computed, [*computed[1:], (len(by_first), False)], strict=True):
        last_is_computed[row:end] = is_last
    other = np.where(last_is_computed[:, None], by_first, by_last)
    return np.asarray(np.minimum(other, np.minimum(by_first, by_last).max(axis=0)))


Key = tuple[int, str, str]
"""The stretch of layers that a collective is of, its group, and what it does: the same for each of the layers."""


def reductions_queue_up(ops: Sequence[StreamOp], layers: Layers, repeated: RepeatedLayers) -> bool:
    """Whether sums of gradients of a layer of which there are more take longer than its kernels in one of the graphs.

    What is waited for within a layer, as activations are and parameters, does not queue up.
    """
    more = {layer for few, others in repeated if others for layer in few}
    ahead: defaultdict[tuple[int, str], float] = defaultdict(float)
    for op in ops:
        if not op.waits and (layer := layers.of(op.op)) in more:
            if op.transfer is None:
                ahead[op.part, layer] -= op.seconds
            elif op.transfer.cause == "gradient":
                ahead[op.part, layer] += op.transfer.demand.seconds
    return max(ahead.values(), default=0.0) > 0


def with_repeated_layers(
    ops: Sequence[StreamOp], layers: Layers, repeated: RepeatedLayers, parameters: Container[str]
) -> list[StreamOp] | None:
    """The ops with so many more of equal layers.

    Parameters
    ----------
    ops : sequence of StreamOp
        Of a step of few layers.
    layers : Layers
    repeated : sequence of (sequence of str, int)
        Layers that are equal, and how many more of them there are.
    parameters : container of str
        The names of parameters: the kernels that cast them may come long before their layer's turn.

    Returns
    -------
    list of StreamOp, optional
        None where no period is found.
    """
    found: list[StreamOp] = []
    for _, part in groupby(ops, lambda op: op.part):
        longer = _GraphOps([*part], layers, repeated, parameters).with_repeated_layers()
        if longer is None:
            return None
        found += longer
    return found


class _Period(NamedTuple):
    end: int
    """The op before which its repetitions come."""
    ops: Sequence[StreamOp]


class _GraphOps:
    """The ops of one graph."""

    def __init__(
        self, ops: Sequence[StreamOp], layers: Layers, repeated: RepeatedLayers, parameters: Container[str]
    ) -> None:
        self.ops, self.parameters = ops, parameters
        self.places: defaultdict[str, list[int]] = defaultdict(list)
        for place, op in enumerate(ops):
            self.places[layers.of(op.op)].append(place)
        self.more = [(few, others) for few, others in repeated if others and any(layer in self.places for layer in few)]
        self.keys: dict[Transfer, Key] = {}
        for number, (few, _) in enumerate(self.more):
            for layer in few:
                for op in self._of(layer):
                    if op.transfer is not None:
                        kind, _, owner = op.transfer.name.partition(" ")
                        inside = owner.removeprefix(layer) if owner.startswith(layer) else ""  # or a sum's own name
                        self.keys[op.transfer] = number, op.transfer.group, kind + inside

    def with_repeated_layers(self) -> list[StreamOp] | None:
        repeated: dict[int, list[StreamOp]] = {}
        for few, others in self.more:
            period = self._period(few)
            if period is None:
                return None
            repeated[period.end] = [*period.ops] * others
        return self._matched(each for place, op in enumerate(self.ops) for each in (*repeated.get(place, ()), op))

    def _period(self, few: Sequence[str]) -> _Period | None:
        """The ops of a period; None of layers that have no kernels here, or share the buckets of their sums."""
        kernels = [self._kernels(layer) for layer in few]
        if len(few) != 2 or not all(kernels) or len({*map(self._sums, few)}) > 1:
            return None
        (mine, first), (others, second) = sorted(zip(kernels, few))
        begin, end, last = mine[0], others[0], others[-1]
        placed = [(float(place), self.ops[place]) for layer in few for place in self._from(layer, begin) if place < end]
        ahead, behind = self._from(first, begin), self._from(second, end)
        for place in self._from(first, end):
            if place < last or not self.ops[place].waits:  # what is not needed before the end is waited for there
                twin = min(bisect(behind, place), len(ahead)) - 1
                placed.append((ahead[twin] + 0.5, self.ops[place]))
        ops = [op for _, op in sorted(placed, key=lambda each: each[0])]
        return _Period(end, self._balanced(ops, first, second, begin))

    def _balanced(self, ops: list[StreamOp], first: str, second: str, begin: int) -> list[StreamOp]:
        """With as many kernels and collectives as a layer has: near the ends others are started ahead of their period.

        What was started for the second layer before the period began comes first; what is too much and last goes.
        """
        lacking = self._count(self._of(first))
        lacking.subtract(self._count(ops))
        earlier = []
        for place in self.places[second]:
            what = self._what(self.ops[place])
            if place < begin and what is not None and lacking[what] > 0:
                lacking[what] -= 1
                earlier.append(self.ops[place])
        kept = []
        for op in reversed(ops):
            what = self._what(op)
            if what is not None and lacking[what] < 0:
                lacking[what] += 1
            else:
                kept.append(op)
        return [*earlier, *reversed(kept)]

    def _what(self, op: StreamOp) -> Key | float | None:
        """What it starts, or the seconds of its kernel; None of a wait."""
        if op.waits:
            return None
        return op.seconds if op.transfer is None else self.keys[op.transfer]

    def _of(self, layer: str) -> list[StreamOp]:
        return [self.ops[place] for place in self.places[layer]]

    def _from(self, layer: str, begin: int) -> list[int]:
        """Where its ops are from a place on."""
        return [place for place in self.places[layer] if place >= begin]

    def _kernels(self, layer: str) -> list[int]:
        """Where its kernels are, but for those of its parameters."""
        kernels = [place for place in self.places[layer] if self.ops[place].transfer is None]
        return [place for place in kernels if self.ops[place].op not in self.parameters]

    def _sums(self, layer: str) -> int:
        """How many of its gradients' sums are started."""
        return sum(op.transfer is not None and op.transfer.cause == "gradient" for op in self._of(layer))

    def _count(self, ops: Iterable[StreamOp]) -> Counter[Key | float]:
        """How many collectives of each key are started, and kernels of each length run."""
        return Counter(what for op in ops if (what := self._what(op)) is not None)

    def _matched(self, ops: Iterable[StreamOp]) -> list[StreamOp] | None:
        """With a collective of its own for each start; a wait is for the oldest of its key, or comes at the end."""
        under_way: defaultdict[Key, deque[Transfer]] = defaultdict(deque)
        found = []
        for op in ops:
            key = None if op.transfer is None else self.keys.get(op.transfer)
            if op.transfer is None or key is None:
                found.append(op)
            elif not op.waits:
                own = Transfer(op.transfer.group, op.transfer.demand, name=op.transfer.name)
                under_way[key].append(own)
                found.append(op._replace(transfer=own))
            elif under_way[key]:
                found.append(op._replace(transfer=under_way[key].popleft()))
            else:
                return None
        part = self.ops[0].part
        left = [each for transfers in under_way.values() for each in transfers]
        return [*found, *(StreamOp(part, "", transfer=each, waits=True) for each in left)]
