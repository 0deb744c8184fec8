"""Extrapolation from few layers to all: what a simulated layer takes, and the whole step.

Per layer: what one layer takes of a simulated step, for those that are like it and were left out.

A step is periodic away from its ends: a layer computes what the next one computes, and its collectives are waited for
as long, where they do not pile up (`unrolled`). What memory holds at each moment is counted once more for each
layer that was left out, but for what one holds while it is computed, which is of one layer at a time.

Unrolled: the acts of a step of few layers as those of the step of all layers.

A step is periodic away from its ends, but for what piles up: a sum of gradients that takes longer than the kernels of
a layer is not waited for as long by each of them. So the acts of one layer are repeated for those that were left out,
each time with collectives of their own, and all are played.

A *period* begins with the first kernel of that of two equal layers which comes first, and ends before the first kernel
of the other one. What it starts for the other layer (gathers ahead of their use), the layer behind that one starts for
the next. What the first layer leaves for later (gradients of its weights, their sums) comes between the other one's
acts, and so in each repetition between those of the period.
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

from shardweave.cost_model import Act, MemoryCurve, Timeline, Transfer
from shardweave.passes import RepeatedLayers
from shardweave.sharding import layer_of

LASTING = ("parameters", "optimizer", "copies", "buffers", "saved", "gradients")
"""The kinds of memory that layers hold while others are computed."""


class Taken(NamedTuple):
    """Seconds of a step, computing and waiting for collectives."""

    compute: float
    exposed: float

    def times(self, count: int) -> Taken:
        """So many times as much."""
        return Taken(count * self.compute, count * self.exposed)


@dataclass(frozen=True)
class Layers:
    """The layers of ops, by the name of their module, or among `others` by their own."""

    others: Mapping[str, str]

    def of(self, owner: str) -> str:
        """The layer of what an event or a change of memory names.

        >>> Layers({"add_7": "blocks.1"}).of("add_7"), Layers({}).of("blocks.2.up (mm_3)")
        ('blocks.1', 'blocks.2')
        """
        name = owner.partition(" ")[0]
        return self.others.get(name) or layer_of(name)


def taken_by(timeline: Timeline, layers: Layers, few: Sequence[str]) -> Taken:
    """What one of a few equal layers takes, on average."""
    compute = exposed = 0.0
    for event in timeline.events:
        if event.kind in ("compute", "wait") and layers.of(event.op) in few:
            compute += event.seconds if event.kind == "compute" else 0.0
            exposed += event.seconds if event.kind == "wait" else 0.0
    return Taken(compute / len(few), exposed / len(few))


def held_with_more(memory: MemoryCurve, layers: Layers, alike: RepeatedLayers) -> MemoryCurve:
    """The curve with so many more of equal layers, each holding what the one of them holds that holds least."""
    mine: dict[str, list[int]] = {}
    for row, change in enumerate(memory.changes, start=1):
        if change.kind in LASTING:
            mine.setdefault(layers.of(change.owner), []).append(row)
    deltas = np.diff(memory.bytes, axis=0, prepend=0)
    found = memory.bytes.copy()
    for few, others in alike:
        if others:
            found += others * _least([_held(deltas, mine.get(layer, [])) for layer in few])
    return replace(memory, bytes=found)


def _held(deltas: NDArray[np.int64], rows: Sequence[int]) -> NDArray[np.int64]:
    """What these changes have led to, at each moment."""
    own = np.zeros_like(deltas)
    own[rows] = deltas[rows]
    return np.cumsum(own, axis=0)


def _least(held: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """At each moment the row with the smallest sum."""
    least = np.argmin([each.sum(axis=1) for each in held], axis=0)
    return np.asarray(np.stack(held)[least, np.arange(len(least))])


Key = tuple[int, str, str]
"""The stretch of layers that a collective is of, its group, and what it does: the same for each of the layers."""


def piles_up(acts: Sequence[Act], layers: Layers, alike: RepeatedLayers) -> bool:
    """Whether sums of gradients of a layer of which there are more take longer than its kernels in one of the graphs.

    What is waited for within a layer, as activations are and parameters, does not pile up.
    """
    more = {layer for few, others in alike if others for layer in few}
    ahead: defaultdict[tuple[int, str], float] = defaultdict(float)
    for act in acts:
        if not act.waits and (layer := layers.of(act.op)) in more:
            if act.transfer is None:
                ahead[act.part, layer] -= act.seconds
            elif act.transfer.cause == "gradient":
                ahead[act.part, layer] += act.transfer.demand.seconds
    return max(ahead.values(), default=0.0) > 0


def unrolled(
    acts: Sequence[Act], layers: Layers, alike: RepeatedLayers, parameters: Container[str]
) -> list[Act] | None:
    """The acts with so many more of equal layers.

    Parameters
    ----------
    acts : sequence of Act
        Of a step of few layers.
    layers : Layers
    alike : sequence of (sequence of str, int)
        Layers that are equal, and how many more of them there are.
    parameters : container of str
        The names of parameters: the kernels that cast them may come long before their layer's turn.

    Returns
    -------
    list of Act, optional
        None where no period is found.
    """
    found: list[Act] = []
    for _, part in groupby(acts, lambda act: act.part):
        longer = _Part([*part], layers, alike, parameters).unrolled()
        if longer is None:
            return None
        found += longer
    return found


class _Period(NamedTuple):
    end: int
    """The act before which its repetitions come."""
    acts: Sequence[Act]


class _Part:
    """The acts of one graph."""

    def __init__(self, acts: Sequence[Act], layers: Layers, alike: RepeatedLayers, parameters: Container[str]) -> None:
        self.acts, self.parameters = acts, parameters
        self.places: defaultdict[str, list[int]] = defaultdict(list)
        for place, act in enumerate(acts):
            self.places[layers.of(act.op)].append(place)
        self.more = [(few, others) for few, others in alike if others and any(layer in self.places for layer in few)]
        self.keys: dict[Transfer, Key] = {}
        for number, (few, _) in enumerate(self.more):
            for layer in few:
                for act in self._of(layer):
                    if act.transfer is not None:
                        kind, _, owner = act.transfer.name.partition(" ")
                        inside = owner.removeprefix(layer) if owner.startswith(layer) else ""  # or a sum's own name
                        self.keys[act.transfer] = number, act.transfer.group, kind + inside

    def unrolled(self) -> list[Act] | None:
        repeated: dict[int, list[Act]] = {}
        for few, others in self.more:
            period = self._period(few)
            if period is None:
                return None
            repeated[period.end] = [*period.acts] * others
        return self._matched(each for place, act in enumerate(self.acts) for each in (*repeated.get(place, ()), act))

    def _period(self, few: Sequence[str]) -> _Period | None:
        """The acts of a period; None of layers that have no kernels here, or share the buckets of their sums."""
        kernels = [self._kernels(layer) for layer in few]
        if len(few) != 2 or not all(kernels) or len({*map(self._sums, few)}) > 1:
            return None
        (mine, first), (others, second) = sorted(zip(kernels, few))
        begin, end, last = mine[0], others[0], others[-1]
        placed = [
            (float(place), self.acts[place]) for layer in few for place in self._from(layer, begin) if place < end
        ]
        ahead, behind = self._from(first, begin), self._from(second, end)
        for place in self._from(first, end):
            if place < last or not self.acts[place].waits:  # what is not needed before the end is waited for there
                twin = min(bisect(behind, place), len(ahead)) - 1
                placed.append((ahead[twin] + 0.5, self.acts[place]))
        acts = [act for _, act in sorted(placed, key=lambda each: each[0])]
        return _Period(end, self._balanced(acts, first, second, begin))

    def _balanced(self, acts: list[Act], first: str, second: str, begin: int) -> list[Act]:
        """With as many kernels and collectives as a layer has: near the ends others are started ahead of their period.

        What was started for the second layer before the period began comes first; what is too much and last goes.
        """
        lacking = self._count(self._of(first))
        lacking.subtract(self._count(acts))
        earlier = []
        for place in self.places[second]:
            what = self._what(self.acts[place])
            if place < begin and what is not None and lacking[what] > 0:
                lacking[what] -= 1
                earlier.append(self.acts[place])
        kept = []
        for act in reversed(acts):
            what = self._what(act)
            if what is not None and lacking[what] < 0:
                lacking[what] += 1
            else:
                kept.append(act)
        return [*earlier, *reversed(kept)]

    def _what(self, act: Act) -> Key | float | None:
        """What it starts, or the seconds of its kernel; None of a wait."""
        if act.waits:
            return None
        return act.seconds if act.transfer is None else self.keys[act.transfer]

    def _of(self, layer: str) -> list[Act]:
        return [self.acts[place] for place in self.places[layer]]

    def _from(self, layer: str, begin: int) -> list[int]:
        """Where its acts are from a place on."""
        return [place for place in self.places[layer] if place >= begin]

    def _kernels(self, layer: str) -> list[int]:
        """Where its kernels are, but for those of its parameters."""
        kernels = [place for place in self.places[layer] if self.acts[place].transfer is None]
        return [place for place in kernels if self.acts[place].op not in self.parameters]

    def _sums(self, layer: str) -> int:
        """How many of its gradients' sums are started."""
        return sum(act.transfer is not None and act.transfer.cause == "gradient" for act in self._of(layer))

    def _count(self, acts: Iterable[Act]) -> Counter[Key | float]:
        """How many collectives of each key are started, and kernels of each length run."""
        return Counter(what for act in acts if (what := self._what(act)) is not None)

    def _matched(self, acts: Iterable[Act]) -> list[Act] | None:
        """With a collective of its own for each start; a wait is for the oldest of its key, or comes at the end."""
        under_way: defaultdict[Key, deque[Transfer]] = defaultdict(deque)
        found = []
        for act in acts:
            key = None if act.transfer is None else self.keys.get(act.transfer)
            if act.transfer is None or key is None:
                found.append(act)
            elif not act.waits:
                own = Transfer(act.transfer.group, act.transfer.demand, name=act.transfer.name)
                under_way[key].append(own)
                found.append(act._replace(transfer=own))
            elif under_way[key]:
                found.append(act._replace(transfer=under_way[key].popleft()))
            else:
                return None
        part = self.acts[0].part
        return [*found, *(Act(part, "", transfer=each, waits=True) for left in under_way.values() for each in left)]
