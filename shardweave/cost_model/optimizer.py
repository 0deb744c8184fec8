"""How long the optimizer's step takes: its passes over memory, and what torch does on the host for each parameter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardweave.cost_model.compute import bytes_seconds
from shardweave.cost_model.machine import Machine

_STATES = (0.0, 1.0, 2.0)
_PASSES = (3.0, 8.0, 20.0)
"""Reads and writes of a parameter's size in a step of SGD, of momentum, of AdamW: counted in torch 2.13's
``torch/optim/sgd.py`` and ``adam.py`` (``_single_tensor_adam``), an in-place op reading what it writes."""
_HOST_SECONDS = (1.0e-5, 4.3e-5, 1.6e-4)
"""What torch takes on the host for one parameter that is a DTensor: measured with torch 2.13 on one core of an AMD
EPYC, 50 parameters of 16 elements."""


def optimizer_seconds(sizes: Sequence[int], states: float, cluster: Machine) -> float:
    """Seconds of an optimizer's step: on a GPU the host runs ahead of the device, on a CPU it is the device.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each trainable parameter on this device.
    states : float
        Bytes of states for each of a parameter: 0 for SGD, 1 for momentum, 2 for AdamW.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.local(2)
    >>> optimizer_seconds([2**20], 2.0, cluster) > optimizer_seconds([2**20], 0.0, cluster)
    True
    """
    if cluster.device.allocator == "cpu":
        return sum(optimizer_loads(size, states, cluster)[1] for size in sizes)
    return max(_host_seconds(states) * len(sizes), bytes_seconds(_passes(states) * sum(sizes), cluster))


def optimizer_loads(size: int, states: float, cluster: Machine) -> tuple[float, float]:
    """Seconds that one parameter of so many bytes adds to the host's work and to the device's, which go on at once.

    On a CPU, which is both, one parameter comes after another, in kernels that read two tensors and write one.

    >>> from shardweave.cost_model import Cluster
    >>> host, device = optimizer_loads(2**20, 2.0, Cluster.preset("dgx-a100"))
    >>> max(host, device) == optimizer_seconds([2**20], 2.0, Cluster.preset("dgx-a100"))
    True
    """
    passes, host = _passes(states), _host_seconds(states)
    if cluster.device.allocator == "cpu":
        return 0.0, host + passes / 3 * bytes_seconds(3 * size, cluster)
    return host, bytes_seconds(passes * size, cluster)


def _passes(states: float) -> float:
    return float(np.interp(states, _STATES, _PASSES))


def _host_seconds(states: float) -> float:
    return float(np.interp(states, _STATES, _HOST_SECONDS))
