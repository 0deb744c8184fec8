"""Which of AxoNN's grids communicate least: on a cluster's links, or by the bandwidths of its authors' program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from shardweave.cost_model import Cluster, collective_seconds
from shardweave.demo import GPTConfig
from shardweave.ir import Grid, InputError, Strategy

Bandwidths = Sequence[Mapping[str, Any]]
"""Rows of the authors' table: GiB/s of a group of ``my`` devices that are ``ip`` apart."""


def ranking(
    cluster: Cluster, config: GPTConfig, batch: int, degree: int = 1, bandwidths: Bandwidths = ()
) -> list[Grid]:
    """All grids of a cluster's devices, those first that communicate least.

    By `communication_seconds`, or by `table_seconds` where there are `bandwidths`.

    >>> from shardweave.validation.clusters import cluster_of
    >>> cluster, small = cluster_of("axonn").fitted(4, 2), GPTConfig(256, 2048, 2, 8, 1024)
    >>> ranking(cluster, small, batch=8, degree=4)[0]  # data parallelism between nodes, weights gathered inside
    Grid(z=4, data=2)
    """
    devices = cluster.world_size
    powers = [2**exponent for exponent in range(devices.bit_length())]
    grids = [
        Grid(x, y, z, devices // (x * y * z))
        for x, y, z in product(powers, repeat=3)
        if degree <= x * y * z <= devices and batch % (devices // (x * y)) == 0
    ]

    def seconds(grid: Grid) -> float:
        if bandwidths:
            return table_seconds(bandwidths, config, batch, grid)
        return communication_seconds(cluster, config, batch, grid)

    return sorted(grids, key=lambda grid: (seconds(grid), str(grid)))


def communication_seconds(cluster: Cluster, config: GPTConfig, batch: int, grid: Grid) -> float:
    """What a layer's collectives take one after another, by the volumes of AxoNN's equations 1 to 5.

    A weight of ``k, n`` is gathered over z for the forward, its repetition and the backward, and its gradient scattered
    there and reduced over data; outputs are reduced over y, in the repetition too, and gradients of inputs over x. In
    every second layer x and y are swapped. Which links a group gets, and shares, the cluster says: placement.
    """
    axes = Strategy(grid).axes(cluster.mesh())
    tokens = batch * config.context // (grid.z * grid.data)
    seconds = 0.0
    for index, (inner, outer) in enumerate(products(config.width)):
        columns, rows_ = (grid.x, grid.y) if index % 2 == 0 else (grid.y, grid.x)
        over_columns, over_rows = (axes.x, axes.y) if index % 2 == 0 else (axes.y, axes.x)
        weight = 2 * inner * outer / (columns * rows_)
        for kind, count, size, over in (
            ("all_gather", 3, weight, axes.z),
            ("reduce_scatter", 1, weight, axes.z),
            ("all_reduce", 1, weight / grid.z, axes.data),
            ("all_reduce", 2, 2 * tokens * outer / columns, over_rows),
            ("all_reduce", 1, 2 * tokens * inner / rows_, over_columns),
        ):
            seconds += count * collective_seconds(kind, size, over, cluster)
    return seconds


def products(width: int) -> tuple[tuple[int, int], ...]:
    """Rows and columns of a layer's weights."""
    return (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)


def table_seconds(bandwidths: Bandwidths, config: GPTConfig, batch: int, grid: Grid) -> float:
    """As `communication_seconds`, as the authors' program counts it (axonn-ai/Megatron-AxoNN, ``comm_model.py``).

    Rings without latency, at the bandwidth of a table; weights are gathered twice, and their gradients reduced over
    data in float32.

    >>> rows = [{"ip": 1, "my": ">=2", "bw": 1.0}, {"ip": ">=2", "my": "any", "bw": 0.5}]
    >>> gather = table_seconds(rows, GPTConfig(256, 2048, 1, 8, 1024), 2, Grid(z=2))
    >>> round(gather * 2**30) == 3 * 12 * 1024**2  # two gathers and a scatter of half of each weight's two bytes
    True
    """
    tokens, width, seconds = batch * config.context // (grid.z * grid.data), config.width, 0.0
    apart = {"x": 1, "y": grid.x, "z": grid.x * grid.y, "data": grid.x * grid.y * grid.z}
    for index, (inner, outer) in enumerate(products(width)):
        x, y = ("x", "y") if index % 2 == 0 else ("y", "x")
        columns, rows = getattr(grid, x), getattr(grid, y)
        weight = 2 * inner * outer / (columns * rows)
        for axis, passes, size in (
            ("z", 3, weight),
            ("data", 4, weight / grid.z),
            (y, 4, 2 * tokens * outer / columns),
            (x, 2, 2 * tokens * inner / rows),
        ):
            devices = getattr(grid, axis)
            if devices > 1:
                moved = passes * size * (devices - 1) / devices
                seconds += moved / (2**30 * _bandwidth(bandwidths, apart[axis], devices))
    return seconds


def _bandwidth(bandwidths: Bandwidths, apart: int, devices: int) -> float:
    for row in bandwidths:
        if _is(row["ip"], apart) and _is(row["my"], devices):
            return float(row["bw"])
    raise InputError(
        f"axonn.yaml, code_comm_model: no bandwidth for groups of {devices} devices that are {apart} apart"
    )


def _is(said: int | str, number: int) -> bool:
    """Whether ``4``, ``">=4"``, ``">4"`` or ``"any"`` is said of a number."""
    if isinstance(said, str) and said != "any":
        return number >= int(said[2:]) if said.startswith(">=") else number > int(said[1:])
    return said in ("any", number)
