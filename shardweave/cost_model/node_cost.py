"""The cost of each node of a graph in seconds and bytes, and the time of the optimizer's step.

A node's cost depends on its op and on the shapes, strides and dtypes of its arguments, not on its name. Each distinct
node is priced once: a model of 96 layers has some hundred distinct nodes among tens of thousands.

Compute time is a time measured on the device, or a roofline with efficiency curves:

    t = launch_latency + max(FLOPs / rate, (bytes + memory_half) / (memory_bandwidth * memory_efficiency))
    rate = peak * matmul_efficiency * m / (m + h) * n / (n + h) * k / (k + h)

(Williams, Waterman and Patterson 2009.) The curve of a product is Hockney's half-performance length (Hockney and
Jesshope, Parallel Computers 2, 1988, section 1.3.2) for each of its loops: ``m`` rows take as long as ``m + h`` rows
at full rate. That is the average cost of padding to whole tiles and of filling a pipeline. Each constant is a figure
of the `Device`, with its source in the preset. `Device.memory_times` replaces the second term where a profile
measured it: data that fits a cache, or memory that is not new, moves much faster.

Where the cluster carries measured op times, a measured op takes its time. An op that was measured at other shapes takes
the time of the nearest shape, scaled by the formula's ratio of the two. The formula holds for all other ops.

The optimizer's step takes its passes over memory, and the work of torch on the host for each parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from shardweave.cost_model.collectives import Demand, collective_demand
from shardweave.cost_model.kernel_scratch import allocated_bytes, scratch_bytes, sent_copy_bytes
from shardweave.cost_model.machine import Machine
from shardweave.cost_model.measured_tables import interpolated
from shardweave.cost_model.op_work import Product, Work, node_work
from shardweave.ir import Collective
from shardweave.sharding import info, is_start, tensor_bytes, tensors


def node_seconds(node: fx.Node, cluster: Machine) -> float:
    """Seconds that `node` takes on one device of `cluster`; 0 where it runs no kernel (see `node_work`).

    Collectives are not compute: `collectives.collective_seconds` gives their time.
    """
    work = node_work(node)
    return 0.0 if work is None else work_seconds(work, cluster)


def work_seconds(work: Work, cluster: Machine) -> float:
    """Seconds of one kernel that does `work`: measured where `cluster` has a time for it, else by the formula."""
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
    """Seconds of one kernel that does `work`, by the formula alone."""
    return matmul_seconds(work.computed * work.flops, work.num_bytes, work.dtype, cluster, work.product)


def matmul_seconds(
    flops: float, num_bytes: float, dtype: str, cluster: Machine, product: Product | None = None
) -> float:
    """Seconds of one kernel that does `flops` in `dtype` and moves `num_bytes`; with 0 FLOPs, of any other kernel.

    Of a `product` small dimensions are computed at a lower rate; without one, at the rate of large ones.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> cluster = Cluster.preset("dgx-a100")
    >>> matmul_seconds(2 * 4096**3, 3 * 2 * 4096**2, "bfloat16", cluster) < 1e-3
    True
    """
    device = cluster.device
    arithmetic = flops / (device.peak(dtype) * device.matmul_efficiency)
    if product is not None:
        half = device.half_dimension(dtype)
        for size in product:
            arithmetic *= (size + half) / size if size else 1.0
    return device.launch_latency + max(arithmetic, bytes_seconds(num_bytes, cluster))


def bytes_seconds(num_bytes: float, cluster: Machine) -> float:
    """Seconds for reading or writing `num_bytes` of a device's memory, as one kernel: as measured, or at its rate."""
    device = cluster.device
    rate = device.memory_bandwidth * device.memory_efficiency
    if not num_bytes:
        return 0.0
    if device.memory_times:
        sizes, seconds = zip(*device.memory_times, strict=True)
        return interpolated(sizes, seconds, num_bytes, lambda size: size / rate)
    return (num_bytes + device.memory_half) / rate


Place = tuple[str, bool]
"""The name of an op (its module's), and whether it is its backward."""


def flops_by_op(graphs: fx.Graph | Iterable[fx.Graph]) -> Counter[Place]:
    """The FLOPs of `graphs` by op: products, convolutions and attention (`node_work`).

    Parameters
    ----------
    graphs : Graph or iterable of Graph
        A joint graph, or a forward and a backward one. Its nodes carry their values in ``meta["val"]``: global ones
        (an annotated graph), or one device's (a sharded one).
    """
    found: Counter[Place] = Counter()
    for graph in [graphs] if isinstance(graphs, fx.Graph) else graphs:
        for node in graph.nodes:
            if (work := node_work(node)) is not None and work.flops:
                found[info(node).op, info(node).backward] += work.flops
    return found


def sharded_share(whole: Counter[Place], local: Counter[Place], devices: int) -> float:
    """FLOPs of the step on one device, over those that all devices do together: 1 where nothing is done twice.

    It is not capped. Above 1, the sharded step does less than the whole one: it must have dropped or split an op in a
    way that the counting does not see, and the numbers of one of them are wrong.

    Examples
    --------
    >>> sharded_share(Counter({("up", False): 100}), Counter({("up", False): 50}), devices=4)
    0.5
    """
    together = devices * local.total()
    return whole.total() / together if together else 1.0


def replicated_ops(whole: Counter[Place], local: Counter[Place], devices: int) -> list[tuple[Place, float]]:
    """The ops that devices compute redundantly, largest first, each with its share of all devices' FLOPs.

    Examples
    --------
    >>> whole = Counter({("up", False): 100, ("down", False): 100})
    >>> replicated_ops(whole, Counter({("up", False): 25, ("down", False): 50}), devices=4)
    [(('down', False), 0.3333333333333333)]
    """
    together = devices * local.total()
    excess = {place: (devices * count - whole[place]) / together for place, count in local.items()}
    return sorted(((place, part) for place, part in excess.items() if part > 0), key=lambda item: -item[1])


class NodeCost(NamedTuple):
    """The cost of one node.

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


class NodeCosts:
    """The costs of nodes on a cluster.

    Examples
    --------
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
                found = self._distinct[key] = self._price(node)
            self._nodes[node] = found
        return found

    def collective(self, what: Collective) -> Demand:
        """The demand of a collective on the links."""
        key = what.kind, what.bytes, what.axes
        found = self._collectives.get(key)
        if found is None:
            found = self._collectives[key] = collective_demand(what.kind, what.bytes, what.axes, self.cluster)
        return found

    def _price(self, node: fx.Node) -> NodeCost:
        device = self.cluster.device
        sizes = tuple(allocated_bytes(tensor_bytes(value), device) for value in tensors(node.meta.get("val")))
        work = node_work(node)
        held = allocated_bytes(sent_copy_bytes(node, device), device) if is_start(node) else 0
        seconds = 0.0 if work is None else work_seconds(work, self.cluster)
        scratch = allocated_bytes(scratch_bytes(node, device), device)
        return NodeCost(seconds, work is not None, 0 if work is None else work.flops, sizes, scratch, held)


def node_key(node: fx.Node) -> Hashable:
    """The key of a node's cost, with its value. Equal nodes of equal layers have equal keys."""
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
"""Torch's seconds on the host for each parameter that is a DTensor, measured with torch 2.13 on one core of an AMD
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
