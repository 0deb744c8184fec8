"""The time of compute: what the roofline says of an op, or what was measured; and the FLOPs of a graph.

How long compute takes: a time measured on the device, or a roofline with efficiency curves.

    t = launch_latency + max(FLOPs / rate, (bytes + memory_half) / (memory_bandwidth * memory_efficiency))
    rate = peak * matmul_efficiency * m / (m + h) * n / (n + h) * k / (k + h)

(Williams, Waterman and Patterson 2009.) The curve of a product is Hockney's half-performance length (Hockney and
Jesshope, Parallel Computers 2, 1988, section 1.3.2) for each of its loops: computing ``m`` rows takes as long as
``m + h`` of them would at full rate, which is what padding to whole tiles costs on average, and filling a pipeline.
Each constant is a figure of the `Device`, with its source in the preset. The second of the two terms is read from
`Device.memory_times` where a profile measured them: what fits a cache, or is not new memory, moves much faster.

Where the cluster carries measured op times, an op that was measured takes its time; one that was measured at other
shapes takes the nearest one's, scaled by the formula's ratio of the two; and the formula holds for all others.

Which part of a step's FLOPs is sharded: what one device would do, against what all devices do together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from torch import fx

from shardweave.cost_model.machine import Machine
from shardweave.cost_model.measured_tables import interpolated
from shardweave.cost_model.op_work import Product, Work, node_work
from shardweave.sharding import info, op_of

__all__ = [
    "Product",
    "Work",
    "bytes_seconds",
    "formula_seconds",
    "matmul_seconds",
    "node_seconds",
    "node_work",
    "op_of",
    "work_seconds",
]


def node_seconds(node: fx.Node, cluster: Machine) -> float:
    """Seconds that `node` takes on one device of `cluster`; 0 where it runs no kernel (see `node_work`).

    Collectives are not compute: `collectives.collective_seconds` prices them.
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
    """The FLOPs of `graphs` by the op that they belong to: those of products, convolutions and attention (`node_work`).

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


def replicated(whole: Counter[Place], local: Counter[Place], devices: int) -> list[tuple[Place, float]]:
    """The ops of which devices do the same, largest first, each with its part of what all devices do together.

    Examples
    --------
    >>> whole = Counter({("up", False): 100, ("down", False): 100})
    >>> replicated(whole, Counter({("up", False): 25, ("down", False): 50}), devices=4)
    [(('down', False), 0.3333333333333333)]
    """
    together = devices * local.total()
    excess = {place: (devices * count - whole[place]) / together for place, count in local.items()}
    return sorted(((place, part) for place, part in excess.items() if part > 0), key=lambda item: -item[1])
