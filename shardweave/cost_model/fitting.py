"""Latency and bandwidth of the levels, fitted to what was measured: for what the table itself does not hold."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardweave.cost_model.forms import library_forms, lines
from shardweave.cost_model.machine import M


def fitted_links(cluster: M) -> M:
    """`cluster` with the links that explain its measured collectives best.

    A price is linear in the start's latency and, for each level, in a hop's latency and in the seconds a byte. Fitted
    are the constants, none negative, with the least sum of squared relative errors over all points of groups that cross
    one level. Levels that were not measured keep theirs.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> from shardweave.cost_model import CollectiveTable, Curve, Measured
    >>> curves = [Curve("all_reduce", (n, 1), (1e3, 1e6, 1e9), tuple(
    ...     1e-4 + 2 * (n - 1) * 1e-5 + 2 * (n - 1) / n * size / 5e9 for size in (1e3, 1e6, 1e9))) for n in (2, 4)]
    >>> fitted = fitted_links(replace(Cluster.local(4), measured=Measured(CollectiveTable(tuple(curves)))))
    >>> f"{fitted.levels[0].bandwidth:.2e} {fitted.levels[0].latency:.2e} {fitted.device.collective_latency:.2e}"
    '5.00e+09 1.00e-05 1.00e-04'
    """
    if cluster.measured is None:
        return cluster
    count = len(cluster.levels)
    rows, unit = [], _unit(cluster)
    for curve in cluster.measured.collectives.curves:
        crossed = [index for index, extent in enumerate(curve.members) if extent > 1]
        if len(crossed) != 1:
            continue
        (line,) = lines(curve.kind, library_forms(curve.kind, unit)[0], curve.members, unit)
        hops = line.latency - unit.device.collective_latency  # of one second each
        for size, seconds in zip(curve.bytes, curve.seconds, strict=True):
            row = np.zeros(1 + 2 * count)
            row[0], row[1 + crossed[0]], row[1 + count + crossed[0]] = 1, hops, line.beta * size
            rows.append(row / seconds)
    if not rows:
        return cluster
    matrix = np.array(rows)
    constants = _non_negative(matrix)
    levels = []
    for index, level in enumerate(cluster.levels):
        latency, slower = float(constants[1 + index]), float(constants[1 + count + index])
        if matrix[:, 1 + count + index].any() and slower > 0:
            shared = None if level.shared_bandwidth is None else level.shared_bandwidth / slower
            level = replace(level, latency=latency, bandwidth=level.bandwidth / slower, shared_bandwidth=shared)
        levels.append(level)
    device = replace(cluster.device, collective_latency=float(constants[0]))
    return replace(cluster, levels=tuple(levels), device=device)


def _unit(cluster: M) -> M:
    """`cluster` with hops of one second each, so that a price's latency counts them."""
    levels = tuple(replace(level, latency=1.0) for level in cluster.levels)
    return replace(cluster, levels=levels, device=replace(cluster.device, collective_latency=0.0), measured=None)


def _non_negative(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The `x >= 0` with the least ``|matrix @ x - 1|``: the best of the unbounded solutions of all sets of unknowns.

    >>> _non_negative(np.array([[1.0, 0.0], [0.0, 4.0]])).tolist()
    [1.0, 0.25]
    """
    columns = [index for index in range(matrix.shape[1]) if matrix[:, index].any()]
    best, least = np.zeros(matrix.shape[1]), float(len(matrix))
    for size in range(1, len(columns) + 1):
        for used in itertools.combinations(columns, size):
            found = np.linalg.lstsq(matrix[:, used], np.ones(len(matrix)), rcond=None)[0]
            error = float(((matrix[:, used] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(matrix.shape[1]), error
                best[list(used)] = found
    return best
