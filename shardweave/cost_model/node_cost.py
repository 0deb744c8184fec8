"""The cost of each node of a graph in seconds and bytes, and the time of the optimizer's step.

A node's cost depends on its op and on the shapes, strides and dtypes of its arguments, not on its name. The cost of
equal nodes is computed once: a model of 96 layers has some hundred distinct nodes among tens of thousands.

Compute time is measured on the device, or given by a roofline with efficiency curves:

    t = launch_latency + max(FLOPs / rate, (bytes + memory_half) / (memory_bandwidth * memory_efficiency))
    rate = peak * matmul_efficiency * m / (m + h) * n / (n + h) * k / (k + h)

(Williams, Waterman and Patterson 2009.) The curve of a product is Hockney's half-performance length (Hockney and
Jesshope, Parallel Computers 2, 1988, section 1.3.2) for each of its loops: ``m`` rows take as long as ``m + h`` rows
at full rate. That is the average cost of padding to whole tiles and of filling a pipeline. Each constant is a figure
of the `Device`, with its source in the preset. `Device.memory_times`, if a profile measured it, replaces the second
term: data that fits a cache moves much faster.

An op that the cluster has a measured time for takes that time. An op that was measured at other shapes takes the time
of the nearest shape, scaled by the formula's ratio of the two. The formula holds for all other ops.

The optimizer's step takes its reads and writes of memory, and the time of torch on the host for each parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import fx

from shardweave.cost_model.collectives import Demand, collective_demand
from shardweave.cost_model.kernel_scratch import allocated_bytes, scratch_bytes, sent_copy_bytes
from shardweave.cost_model.machine import Machine
from shardweave.cost_model.measured_tables import interpolated
from shardweave.cost_model.op_work import Work, node_work
from shardweave.ir import Collective
from shardweave.sharding import argument_key, info, is_start, tensor_bytes, tensors


def node_seconds(node: fx.Node, cluster: Machine) -> float:
    """Seconds that `node` takes on one device of `cluster`; 0 where it runs no kernel (see `node_work`).

    Of a collective this is 0: see `collectives.collective_seconds`.
    """
    work = node_work(node)
    return 0.0 if work is None else work_seconds(work, cluster)


def work_seconds(work: Work, cluster: Machine) -> float:
    """Seconds of one kernel that does `work`: the measured time if `cluster` has one, else by the formula."""
    if cluster.measured is None or not work.signature:
        return formula_seconds(work, cluster)
    return _measured_seconds(work, cluster)


@lru_cache(maxsize=65536)
def _measured_seconds(work: Work, cluster: Machine) -> float:
    assert cluster.measured is not None
    table = cluster.measured.ops
    exact = table.seconds(work.signature)
    if exact is not None:
        return exact
    nearest = table.nearest(work)
    if nearest is None:
        return formula_seconds(work, cluster)
    return nearest.seconds * formula_seconds(work, cluster) / formula_seconds(nearest.work, cluster)


def formula_seconds(work: Work, cluster: Machine) -> float:
    """Seconds of one kernel that does `work`, by the formula alone.

    A product with small dimensions is computed at a lower rate. Work without a product is computed at the full rate.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("dgx-a100")
    >>> formula_seconds(Work(2 * 4096**3, 3 * 2 * 4096**2, "bfloat16"), cluster) < 1e-3
    True
    """
    device = cluster.device
    arithmetic = work.computed * work.flops / (device.peak(work.dtype) * device.matmul_efficiency)
    if work.product is not None:
        half = device.half_dimension(work.dtype)
        for size in work.product:
            arithmetic *= (size + half) / size if size else 1.0
    return device.launch_latency + max(arithmetic, bytes_seconds(work.num_bytes, cluster))


def bytes_seconds(num_bytes: float, cluster: Machine) -> float:
    """Seconds of one kernel that reads or writes `num_bytes` of memory: as measured, or at the device's bandwidth."""
    device = cluster.device
    rate = device.memory_bandwidth * device.memory_efficiency
    if not num_bytes:
        return 0.0
    if device.memory_times:
        sizes, seconds = zip(*device.memory_times, strict=True)
        return interpolated(sizes, seconds, num_bytes, lambda size: size / rate)
    return (num_bytes + device.memory_half) / rate


OpPass = tuple[str, bool]
"""The name of an op (that of its module), and whether it is the backward."""


def flops_by_op(graphs: fx.Graph | Iterable[fx.Graph]) -> Counter[OpPass]:
    """The FLOPs of `graphs` by op: products, convolutions and attention (`node_work`).

    Parameters
    ----------
    graphs : Graph or iterable of Graph
        A joint graph, or a forward and a backward one. Its nodes carry their values in ``meta["val"]``: global ones
        (an annotated graph), or one device's (a sharded one).
    """
    found: Counter[OpPass] = Counter()
    for graph in [graphs] if isinstance(graphs, fx.Graph) else graphs:
        for node in graph.nodes:
            if (work := node_work(node)) is not None and work.flops:
                found[info(node).op, info(node).backward] += work.flops
    return found


class NodeCost(NamedTuple):
    """The cost of one node.

    Parameters
    ----------
    seconds : float
        The time of its kernel; 0 without a kernel.
    kernel : bool
        It runs a kernel.
    flops : int
    sizes : tuple of int
        Allocated bytes of each tensor of its value.
    scratch : int
        Bytes that it allocates and frees while it runs.
    held : int
        Bytes that a collective holds from its start to its wait, beside its input and its result.
    """

    seconds: float
    kernel: bool
    flops: int
    sizes: tuple[int, ...]
    scratch: int
    held: int


class NodeCosts:
    """The costs of nodes on a cluster.

    Examples
    --------
    >>> import torch
    >>> from shardweave.cost_model import Cluster
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(8, 8, device="meta")
    >>> first, second = (graph.call_function(torch.ops.aten.mm.default, (x, x)) for _ in range(2))
    >>> first.meta["val"] = second.meta["val"] = torch.empty(8, 8, device="meta")
    >>> costs = NodeCosts(Cluster.local(1))
    >>> costs.of(first) is costs.of(second), costs.of(first).sizes
    (True, (256,))
    """

    def __init__(self, cluster: Machine) -> None:
        self.cluster = cluster
        self._nodes: dict[fx.Node, NodeCost] = {}
        self._distinct: dict[Hashable, NodeCost] = {}
        self._collectives: dict[Hashable, Demand] = {}

    def of(self, node: fx.Node) -> NodeCost:
        """The cost of a node whose ``meta["val"]`` is local."""
        found = self._nodes.get(node)
        if found is None:
            key = node_key(node)
            found = self._distinct.get(key)
            if found is None:
                found = self._distinct[key] = self._compute(node)
            self._nodes[node] = found
        return found

    def collective(self, call: Collective) -> Demand:
        """The demand of a collective on the links."""
        key = call.kind, call.bytes, call.axes
        if key not in self._collectives:
            self._collectives[key] = collective_demand(call.kind, call.bytes, call.axes, self.cluster)
        return self._collectives[key]

    def _compute(self, node: fx.Node) -> NodeCost:
        device = self.cluster.device
        sizes = tuple(allocated_bytes(tensor_bytes(value), device) for value in tensors(node.meta.get("val")))
        work = node_work(node)
        held = allocated_bytes(sent_copy_bytes(node, device), device) if is_start(node) else 0
        seconds = 0.0 if work is None else work_seconds(work, self.cluster)
        scratch = allocated_bytes(scratch_bytes(node, device), device)
        return NodeCost(seconds, work is not None, 0 if work is None else work.flops, sizes, scratch, held)


def node_key(node: fx.Node) -> Hashable:
    """The key of a node's cost, with its value. Equal nodes of equal layers have equal keys.

    The number of its inputs belongs to it: ``x * x`` reads half of the bytes that ``x * y`` does.
    """
    if node.op != "call_function":
        return node.op, argument_key(node.meta.get("val"))
    call = info(node).collective
    kind = None if call is None else (call.kind, call.axes)
    arguments = argument_key(node.args), argument_key(node.kwargs), len(node.all_input_nodes)
    return node.target, argument_key(node.meta.get("val")), *arguments, kind


_STATE_COPIES = (0.0, 1.0, 2.0)
"""Optimizer states for each parameter: of SGD, SGD with momentum, AdamW."""
_READS_AND_WRITES = (3.0, 8.0, 20.0)
"""How often a step of these optimizers reads or writes as many bytes as a parameter has: counted in torch 2.13's
``torch/optim/sgd.py`` and ``adam.py`` (``_single_tensor_adam``). An in-op op reads and writes."""
_HOST_SECONDS = {"cuda": (1.0e-5, 4.3e-5, 1.6e-4), "cpu": (5.2e-6, 1.03e-5, 2.65e-5)}
"""Torch's seconds on the host for each parameter in a step of these optimizers, measured with torch 2.13 on one core
of an AMD EPYC, 50 parameters of 16 elements. On CPUs the step runs on this rank's parts (`runtime/optimizers.py`). For
GPUs these are the seconds of DTensors, from before it did, so that they are too long: none was there to measure."""


def optimizer_seconds(sizes: Sequence[int], states: float, cluster: Machine) -> float:
    """Seconds of an optimizer's step. A GPU works beside the host; on a CPU both are one.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each trainable parameter on this device.
    states : float
        Bytes of state for each byte of a parameter: 0 for SGD, 1 for momentum, 2 for AdamW.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.local(2)
    >>> optimizer_seconds([2**20], 2.0, cluster) > optimizer_seconds([2**20], 0.0, cluster)
    True
    """
    if cluster.device.allocator == "cpu":
        return sum(optimizer_loads(size, states, cluster)[1] for size in sizes)
    host = _host_seconds(states, cluster) * len(sizes)
    return max(host, bytes_seconds(_reads_and_writes(states) * sum(sizes), cluster))


def optimizer_loads(size: int, states: float, cluster: Machine) -> tuple[float, float]:
    """Seconds of the host and of the device for one parameter of `size` bytes. Host and device work at the same time.

    On a CPU all seconds are the device's, in kernels that read two tensors and write one.

    >>> from shardweave.cost_model import Cluster
    >>> host, device = optimizer_loads(2**20, 2.0, Cluster.preset("dgx-a100"))
    >>> max(host, device) == optimizer_seconds([2**20], 2.0, Cluster.preset("dgx-a100"))
    True
    """
    traffic, host = _reads_and_writes(states), _host_seconds(states, cluster)
    if cluster.device.allocator == "cpu":
        return 0.0, host + traffic / 3 * bytes_seconds(3 * size, cluster)
    return host, bytes_seconds(traffic * size, cluster)


def _reads_and_writes(states: float) -> float:
    return float(np.interp(states, _STATE_COPIES, _READS_AND_WRITES))


def _host_seconds(states: float, cluster: Machine) -> float:
    return float(np.interp(states, _STATE_COPIES, _HOST_SECONDS[cluster.device.allocator]))
