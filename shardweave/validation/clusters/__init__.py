"""The clusters of the papers: one file each, with the constants that stand for what datasheets do not say.

A file has two parts: `cluster`, as `Cluster.load` reads it, and `constants`, the figures of it that are no line rate or
size: each with the range that it may be in, fixed before anything was fitted, and its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from shardweave.cost_model import Cluster
from shardweave.ir import ClusterError

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
