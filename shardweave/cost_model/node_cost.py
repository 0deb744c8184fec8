"""What each node of a graph takes: seconds and bytes, cached; and the optimizer's step.

What the nodes of a step take, each distinct one priced once: equal layers have equal nodes.

A node's price depends on its op and on the shapes, strides and dtypes of its arguments, not on its name. A model of 96
layers has some hundred distinct nodes among its ten thousands.

How long the optimizer's step takes: its passes over memory, and what torch does on the host for each parameter.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from shardweave.cost_model.collectives import Demand, collective_demand
from shardweave.cost_model.kernel_scratch import rounded, scratch_bytes, sent_copy_bytes
from shardweave.cost_model.machine import Machine
from shardweave.cost_model.op_time import bytes_seconds, work_seconds
from shardweave.cost_model.op_work import node_work
from shardweave.ir import Collective
from shardweave.sharding import info, is_start, tensor_bytes, tensors


class Price(NamedTuple):
    """Of one node.

    Parameters
    ----------
    seconds : float
        Of its kernel; 0 where it runs none.
    kernel : bool
        Whether it runs one.
    flops : int
    sizes : tuple of int
        Bytes of each tensor of its value, as the allocator rounds them.
    scratch : int
        Bytes that it takes while it runs.
    held : int
        Bytes that a collective takes from its start to its wait, beside its input and its result.
    """

    seconds: float
    kernel: bool
    flops: int
    sizes: tuple[int, ...]
    scratch: int
    held: int


class Prices:
    """The prices of nodes on a cluster.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(8, 8, device="meta")
    >>> first, second = (graph.call_function(torch.ops.aten.mm.default, (x, x)) for _ in range(2))
    >>> first.meta["val"] = second.meta["val"] = torch.empty(8, 8, device="meta")
    >>> prices = Prices(Cluster.local(1))
    >>> prices.of(first) is prices.of(second), prices.of(first).sizes
    (True, (256,))
    """

    def __init__(self, cluster: Machine) -> None:
        self.cluster = cluster
        self._nodes: dict[fx.Node, Price] = {}
        self._distinct: dict[Hashable, Price] = {}
        self._collectives: dict[Hashable, Demand] = {}

    def of(self, node: fx.Node) -> Price:
        """The price of a node whose ``meta["val"]`` is local."""
        found = self._nodes.get(node)
        if found is None:
            key = node_key(node)
            found = self._distinct.get(key)
            if found is None:
                found = self._distinct[key] = self._price(node)
            self._nodes[node] = found
        return found

    def collective(self, what: Collective) -> Demand:
        """What a collective asks of the links."""
        key = what.kind, what.bytes, what.axes
        found = self._collectives.get(key)
        if found is None:
            found = self._collectives[key] = collective_demand(what.kind, what.bytes, what.axes, self.cluster)
        return found

    def _price(self, node: fx.Node) -> Price:
        device = self.cluster.device
        sizes = tuple(rounded(tensor_bytes(value), device) for value in tensors(node.meta.get("val")))
        work = node_work(node)
        held = rounded(sent_copy_bytes(node, device), device) if is_start(node) else 0
        seconds = 0.0 if work is None else work_seconds(work, self.cluster)
        scratch = rounded(scratch_bytes(node, device), device)
        return Price(seconds, work is not None, 0 if work is None else work.flops, sizes, scratch, held)


def node_key(node: fx.Node) -> Hashable:
    """What the price of a node depends on, and its value; equal for equal nodes of equal layers."""
    if node.op != "call_function":
        return node.op, _signed(node)
    what = info(node).collective
    kind = None if what is None else (what.kind, what.axes)
    kwargs = tuple((name, _signed(value)) for name, value in node.kwargs.items()) if node.kwargs else ()
    return node.target, _signed(node), _signed(node.args), kwargs, kind


def _signed(value: Any) -> Hashable:
    if isinstance(value, fx.Node):
        return _shown(value.meta.get("val"))
    if isinstance(value, list | tuple):
        return tuple([_signed(item) for item in value])
    if isinstance(value, bool | int | float):
        return type(value), value  # 1, 1.0 and True are equal, and not the same to an op
    return value if isinstance(value, Hashable) else repr(value)


def _shown(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple([_shown(item) for item in value])
    return type(value).__name__


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
