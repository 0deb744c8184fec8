"""How long compute takes: a time measured on the device, or a roofline with efficiency curves.

    t = launch_latency + max(FLOPs / rate, (bytes + memory_half) / (memory_bandwidth * memory_efficiency))
    rate = peak * matmul_efficiency * m / (m + h) * n / (n + h) * k / (k + h)

(Williams, Waterman and Patterson 2009.) The curve of a product is Hockney's half-performance length (Hockney and
Jesshope, Parallel Computers 2, 1988, section 1.3.2) for each of its loops: computing ``m`` rows takes as long as
``m + h`` of them would at full rate, which is what padding to whole tiles costs on average, and filling a pipeline.
Each constant is a figure of the `Device`, with its source in the preset. The second of the two terms is read from
`Device.memory_times` where a profile measured them: what fits a cache, or is not new memory, moves much faster.

Where the cluster carries measured op times, an op that was measured takes its time; one that was measured at other
shapes takes the nearest one's, scaled by the formula's ratio of the two; and the formula holds for all others.
"""

from __future__ import annotations

from functools import lru_cache

from torch import fx

from shardweave.cost_model.machine import Machine
from shardweave.cost_model.measured import interpolated
from shardweave.cost_model.products import Product
from shardweave.cost_model.signature import op_of
from shardweave.cost_model.work import Work, node_work

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
