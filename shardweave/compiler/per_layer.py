"""Per layer: what one layer takes of a simulated step, for those that are like it and were left out.

A step is periodic away from its ends: a layer computes what the next one computes, and its collectives are waited for
as long, where they do not pile up (`unrolled.py`). What memory holds at each moment is counted once more for each
layer that was left out, but for what one holds while it is computed, which is of one layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardweave.cost_model import Timeline
from shardweave.cost_model.curve import MemoryCurve
from shardweave.passes.annotate import layer_of
from shardweave.passes.schedule import Alike

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


def held_with_more(memory: MemoryCurve, layers: Layers, alike: Alike) -> MemoryCurve:
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
