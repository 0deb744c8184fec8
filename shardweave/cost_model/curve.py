"""Memory over time: how many bytes are in use for what, and which values they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardweave.cost_model.memory import KINDS


class Change(NamedTuple):
    """From `seconds` on, so many more `bytes` (fewer where below 0) are in use for `kind`, by the value `owner`."""

    seconds: float
    kind: str
    bytes: int
    owner: str = ""


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Bytes in use over time, by what they are for.

    ``bytes[i, k]`` are in use for ``kinds[k]`` from ``seconds[i]`` on until ``seconds[i + 1]``, and ``changes[i - 1]``
    led there.
    """

    seconds: NDArray[np.float64]
    bytes: NDArray[np.int64]
    kinds: tuple[str, ...] = KINDS
    changes: tuple[Change, ...] = ()

    @classmethod
    def of(cls, changes: Sequence[Change], end: float) -> MemoryCurve:
        """The curve of changes in the order in which they happen, until `end`.

        >>> MemoryCurve.of([Change(0.0, "saved", 5), Change(1.0, "saved", -2)], 2.0).total.tolist()
        [0, 5, 3, 3]
        """
        column = {kind: index for index, kind in enumerate(KINDS)}
        deltas = np.zeros((len(changes) + 2, len(KINDS)), dtype=np.int64)
        seconds = np.zeros(len(changes) + 2)
        for row, change in enumerate(changes, start=1):
            deltas[row, column[change.kind]] = change.bytes
            seconds[row] = change.seconds
        seconds[-1] = end
        return cls(seconds, np.cumsum(deltas, axis=0), KINDS, tuple(changes))

    @property
    def total(self) -> NDArray[np.int64]:
        """Bytes in use at each of `seconds`."""
        return np.asarray(self.bytes.sum(axis=1), dtype=np.int64)

    @property
    def peak(self) -> int:
        """The most bytes in use at once."""
        return int(self.total.max())

    @property
    def peak_seconds(self) -> float:
        """When the peak is first reached."""
        return float(self.seconds[self._peak_row])

    @property
    def _peak_row(self) -> int:
        return int(self.total.argmax())

    def at_peak(self) -> dict[str, int]:
        """What the peak consists of, largest first."""
        return self._by_kind(self._peak_row)

    def at_rest(self) -> dict[str, int]:
        """What is in use between steps, largest first."""
        return self._by_kind(-1)

    def largest_at_peak(self, count: int) -> list[tuple[str, str, int]]:
        """The `count` largest values in use at the peak: whose, what for, and bytes.

        >>> curve = MemoryCurve.of([Change(0.0, "saved", 5, "x"), Change(1.0, "saved", 7, "y")], 2.0)
        >>> curve.largest_at_peak(1)
        [('y', 'saved', 7)]
        """
        sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
        for change in self.changes[: self._peak_row]:
            sizes[change.owner, change.kind] += change.bytes
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:count]
        return [(owner, kind, size) for (owner, kind), size in largest if size > 0]

    def _by_kind(self, row: int) -> dict[str, int]:
        found = ((kind, int(size)) for kind, size in zip(self.kinds, self.bytes[row], strict=True) if size)
        return dict(sorted(found, key=lambda item: -item[1]))
