"""The clusters of the papers: one file each, and fits of their constants to a table's rows.

A file has two parts: `cluster`, as `Cluster.load` reads it, and `constants`, the figures that no datasheet says. Each
constant has a source, and a range that was fixed before anything was fitted.

`fit` finds the constants, within their ranges, that predict the rows of a table best, by Gauss and Newton's method on
the logarithms of constants and predictions, so that a relative error counts alike at every size. A step is limited by
the range. A small penalty keeps constants that no row determines at their first values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

import shardweave as sw

MAX_CONSTANTS = 8
"""The number of constants that a cluster may have."""
_DIFFERENCE = 0.03
"""The relative change of a constant for its finite difference."""
_PENALTY = 0.05
"""The error, as a relative error of one row, of a constant that differs from its first value by a factor of e."""
_SHORTEST_STEP = 1 / 8
"""The shortest step that is tried, as a part of the full one."""

Errors = Callable[[Mapping[str, float]], Sequence[float]]
"""Maps the values of constants to the logarithms of predicted over published, one for each row."""


def fit(constants: Sequence[Constant], errors: Errors, rounds: int = 4) -> dict[str, float]:
    """The values of `constants` with the smallest sum of squared `errors`.

    Parameters
    ----------
    constants : sequence of Constant
        The first values, and the allowed ranges.
    errors : callable
    rounds : int
        The largest number of steps. Each evaluates `errors` once for every constant.

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

    def residuals(at: NDArray[np.float64]) -> NDArray[np.float64]:
        values = {key: float(np.exp(value)) for key, value in zip(keys, at, strict=True)}
        return np.array([*errors(values), *(_PENALTY * (at - first))])

    at, current = first, residuals(first)
    for _ in range(rounds):
        slopes = []
        for index in range(len(keys)):
            moved = at.copy()
            moved[index] += _DIFFERENCE if at[index] + _DIFFERENCE <= high[index] else -_DIFFERENCE
            slopes.append((residuals(moved) - current) / (moved[index] - at[index]))
        step = np.linalg.lstsq(np.array(slopes).T, -current, rcond=None)[0]
        part = 1.0
        while part >= _SHORTEST_STEP:
            moved = np.clip(at + part * step, low, high)
            found = residuals(moved)
            if found @ found < current @ current:
                break
            part /= 2
        else:
            break
        at, current = moved, found
    chosen = np.exp(np.clip(at, low, high))
    return {
        each.key: min(max(float(value), each.low), each.high) for each, value in zip(constants, chosen, strict=True)
    }


@dataclass(frozen=True)
class Constant:
    """A figure of a cluster that no datasheet gives.

    Parameters
    ----------
    key : str
        Its place in the cluster: ``"levels.node.efficiency"``, ``"device.matmul_efficiency"``.
    value, low, high : float
        Its value and range.
    source : str
        The source of the range.
    fitted : bool
        Whether the value was fitted to the paper's rows. Otherwise it is from the source.
    """

    key: str
    value: float
    low: float
    high: float
    source: str
    fitted: bool


@dataclass(frozen=True)
class CalibratedCluster:
    """A cluster and its constants.

    >>> described = CalibratedCluster.of("amsp")
    >>> described.cluster.device.matmul_efficiency == {c.key: c for c in described.constants}[
    ...     "device.matmul_efficiency"
    ... ].value
    True
    """

    cluster: sw.Cluster
    constants: tuple[Constant, ...]

    @classmethod
    def of(cls, name: str) -> CalibratedCluster:
        """The description in a file of this folder.

        Raises
        ------
        ClusterError
            If it has too many constants, or one that is out of its range or is no figure of the cluster.
        """
        text = (resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")
        return cls.from_dict(yaml.safe_load(text))

    def with_values(self, values: Mapping[str, float]) -> sw.Cluster:
        """The cluster with other values of some constants, given by key.

        >>> slower = CalibratedCluster.of("amsp").with_values({"levels.node.efficiency": 0.7})
        >>> slower.levels[-1].efficiency
        0.7
        """
        data = self.cluster.to_dict()
        parts = {f"levels.{level['name']}": level for level in data["levels"]} | {"device": data["device"]}
        for key, value in values.items():
            part, _, name = key.rpartition(".")
            parts[part][name] = value
        return sw.Cluster.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CalibratedCluster:
        """The description of plain types, as in a file."""
        cluster = sw.Cluster.from_dict(data["cluster"])
        constants = []
        for key, given in data["constants"].items():
            low, high = map(float, given["range"])
            constants.append(Constant(key, _at(cluster, key), low, high, given["source"], bool(given["fitted"])))
        if len(constants) > MAX_CONSTANTS:
            raise sw.ClusterError(f"{cluster.name}: at most {MAX_CONSTANTS} constants, got {len(constants)}")
        for each in constants:
            if not each.low <= each.value <= each.high:
                allowed = f"{each.low} to {each.high}"
                raise sw.ClusterError(f"{cluster.name}, {each.key}: expected {allowed}, got {each.value}")
        return cls(cluster, tuple(constants))


def cluster_of(name: str) -> sw.Cluster:
    """The cluster of a file, with the constants of the file."""
    return CalibratedCluster.of(name).cluster


def _at(cluster: sw.Cluster, key: str) -> float:
    part, _, name = key.rpartition(".")
    owners: dict[str, object] = {f"levels.{level.name}": level for level in cluster.levels}
    value = getattr(owners.get(part, cluster.device if part == "device" else None), name, None)
    if not isinstance(value, int | float):
        raise sw.ClusterError(f"{cluster.name}: constants.{key} is no figure of the cluster")
    return float(value)
