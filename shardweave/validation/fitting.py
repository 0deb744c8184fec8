"""Fitting: the constants of a cluster, within their ranges, at which the rows of a table are predicted best.

Gauss and Newton's method on the logarithms of constants and predictions: a relative error counts alike at every size.
A step is held by its range, and by a pull to where it began: what no row decides stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardweave.validation.clusters import Constant

_STEP = 0.03
"""By which part a constant is changed to see what it does."""
_PULL = 0.05
"""What leaving its first value by a factor of e counts, beside a relative error of one row."""
_SHORTEST = 1 / 8

Errors = Callable[[Mapping[str, float]], Sequence[float]]
"""From the values of constants to the logarithms of predicted over published."""


def fit(constants: Sequence[Constant], errors: Errors, rounds: int = 4) -> dict[str, float]:
    """The values of `constants` at which `errors` are least, as squares.

    Parameters
    ----------
    constants : sequence of Constant
        From where to begin, and within which ranges.
    errors : callable
    rounds : int
        Steps at most; each costs an evaluation a constant.

    Examples
    --------
    >>> from math import log
    >>> speed = Constant("speed", 1.0, 0.5, 3.0, "", True)
    >>> round(fit([speed], lambda values: [log(values["speed"] / 2)])["speed"], 1)
    2.0
    >>> fit([speed], lambda values: [log(values["speed"] / 9)])["speed"]  # out of its range
    3.0
    """
    keys = [each.key for each in constants]
    low, high = (np.log([getattr(each, side) for each in constants]) for side in ("low", "high"))
    first = np.log([each.value for each in constants])

    def missed(at: NDArray[np.float64]) -> NDArray[np.float64]:
        values = {key: float(np.exp(value)) for key, value in zip(keys, at, strict=True)}
        return np.array([*errors(values), *(_PULL * (at - first))])

    at, here = first, missed(first)
    for _ in range(rounds):
        slopes = []
        for index in range(len(keys)):
            moved = at.copy()
            moved[index] += _STEP if at[index] + _STEP <= high[index] else -_STEP
            slopes.append((missed(moved) - here) / (moved[index] - at[index]))
        step = np.linalg.lstsq(np.array(slopes).T, -here, rcond=None)[0]
        part = 1.0
        while part >= _SHORTEST:
            there = np.clip(at + part * step, low, high)
            found = missed(there)
            if found @ found < here @ here:
                break
            part /= 2
        else:
            break
        at, here = there, found
    chosen = np.exp(np.clip(at, low, high))
    return {
        each.key: min(max(float(value), each.low), each.high) for each, value in zip(constants, chosen, strict=True)
    }
