"""The clusters of the papers: one file each, and fits of their constants to a table's rows.

A file has two parts: `cluster`, as `Cluster.load` reads it, and `constants`, the figures that no datasheet says. Each
constant has a source, and a range that was fixed before anything was fitted.

`fit` finds the constants, within their ranges, that predict the rows of a table best, by Gauss and Newton's method on
the logarithms of constants and predictions, so that a relative error counts alike at every size. A step is limited by
the range, and pulled towards the constants' first values, where constants stay that no row decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from shardweave.cost_model import Cluster
from shardweave.ir import ClusterError

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


MOST = 8
"""Constants that a cluster may have."""


@dataclass(frozen=True)
class Constant:
    """One figure of a cluster that a datasheet does not give.

    Parameters
    ----------
    key : str
        Where it is in the cluster: ``"levels.node.efficiency"``, ``"device.matmul_efficiency"``.
    value, low, high : float
        What it is, and the range that it may be in.
    source : str
        Where the range is from.
    fitted : bool
        Whether the value was found by fitting the paper's rows; else it is the source's.
    """

    key: str
    value: float
    low: float
    high: float
    source: str
    fitted: bool


@dataclass(frozen=True)
class Described:
    """A cluster and its constants.

    >>> described = Described.of("amsp")
    >>> described.cluster.device.matmul_efficiency == {c.key: c for c in described.constants}[
    ...     "device.matmul_efficiency"
    ... ].value
    True
    """

    cluster: Cluster
    constants: tuple[Constant, ...]

    @classmethod
    def of(cls, name: str) -> Described:
        """That of a file of this folder.

        Raises
        ------
        ClusterError
            Where it has too many constants, or one that is out of its range or no figure of the cluster.
        """
        text = (resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")
        return cls.from_dict(yaml.safe_load(text))

    def with_values(self, values: Mapping[str, float]) -> Cluster:
        """The cluster with other values of some constants, by their keys.

        >>> slower = Described.of("amsp").with_values({"levels.node.efficiency": 0.7})
        >>> slower.levels[-1].efficiency
        0.7
        """
        data = self.cluster.to_dict()
        parts = {f"levels.{level['name']}": level for level in data["levels"]} | {"device": data["device"]}
        for key, value in values.items():
            part, _, name = key.rpartition(".")
            parts[part][name] = value
        return Cluster.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Described:
        """That of plain types, as a file has them."""
        cluster = Cluster.from_dict(data["cluster"])
        constants = []
        for key, said in data["constants"].items():
            low, high = map(float, said["range"])
            constants.append(Constant(key, _at(cluster, key), low, high, said["source"], bool(said["fitted"])))
        if len(constants) > MOST:
            raise ClusterError(f"{cluster.name}: at most {MOST} constants, got {len(constants)}")
        for each in constants:
            if not each.low <= each.value <= each.high:
                raise ClusterError(f"{cluster.name}, {each.key}: expected {each.low} to {each.high}, got {each.value}")
        return cls(cluster, tuple(constants))


def cluster_of(name: str) -> Cluster:
    """The cluster of a file, with its constants as committed."""
    return Described.of(name).cluster


def _at(cluster: Cluster, key: str) -> float:
    part, _, name = key.rpartition(".")
    owners: dict[str, object] = {f"levels.{level.name}": level for level in cluster.levels}
    value = getattr(owners.get(part, cluster.device if part == "device" else None), name, None)
    if not isinstance(value, int | float):
        raise ClusterError(f"{cluster.name}: constants.{key} is no figure of the cluster")
    return float(value)
