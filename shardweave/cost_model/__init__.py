"""The cost model: clusters and their presets, collectives, compute, memory, the simulator of a generated step, its
timeline, and the profiling of a running machine; and `Options`. May import `ir`, `distributed`, `ops` and `sharding`.
"""

from shardweave.cost_model.cluster import Cluster, ClusterLike, measured_on
from shardweave.cost_model.cluster_description import short_repr
from shardweave.cost_model.collectives import (
    Demand,
    collective_demand,
    collective_seconds,
    crossed_level,
    group_extents,
)
from shardweave.cost_model.device_profile import current_device, profiled_ops, save_ops, saved_ops
from shardweave.cost_model.kernel_scratch import allocated_bytes
from shardweave.cost_model.machine import Device, Level, Machine
from shardweave.cost_model.measured_tables import (
    CollectiveTable,
    Curve,
    Measured,
    OpTable,
    OpTime,
    cache_directory,
    hardware,
    store_cached,
    store_file,
)
from shardweave.cost_model.memory import (
    NO_SHARING,
    Liveness,
    MemoryCurve,
    MicroBatchSharing,
    Storage,
    liveness,
    output_storages,
    peak_live_bytes,
    storage_bytes,
)
from shardweave.cost_model.node_cost import (
    NodeCosts,
    bytes_seconds,
    flops_by_op,
    node_key,
    node_seconds,
    optimizer_loads,
    optimizer_seconds,
    work_seconds,
)
from shardweave.cost_model.op_work import Product, Work, node_work, product_of
from shardweave.cost_model.options import OLD_OPTION_NAMES, ZERO_PLUS_PLUS, Forced, Options
from shardweave.cost_model.simulator import simulate
from shardweave.cost_model.streams import NO_CONTENTION, Contention, Streams, Transfer
from shardweave.cost_model.timeline import COMPUTE, ReplayTimes, StreamOp, Timeline, replay

__all__ = [
    "OLD_OPTION_NAMES",
    "NO_CONTENTION",
    "StreamOp",
    "COMPUTE",
    "Cluster",
    "ClusterLike",
    "CollectiveTable",
    "Contention",
    "Curve",
    "Demand",
    "Device",
    "Forced",
    "Level",
    "Liveness",
    "Machine",
    "Measured",
    "MemoryCurve",
    "NO_SHARING",
    "OpTable",
    "OpTime",
    "Options",
    "ReplayTimes",
    "NodeCosts",
    "Product",
    "MicroBatchSharing",
    "Storage",
    "Streams",
    "Timeline",
    "Transfer",
    "Work",
    "ZERO_PLUS_PLUS",
    "bytes_seconds",
    "collective_demand",
    "cache_directory",
    "current_device",
    "hardware",
    "measured_on",
    "profiled_ops",
    "save_ops",
    "saved_ops",
    "store_cached",
    "store_file",
    "collective_seconds",
    "crossed_level",
    "flops_by_op",
    "group_extents",
    "liveness",
    "peak_live_bytes",
    "node_key",
    "node_seconds",
    "node_work",
    "optimizer_loads",
    "optimizer_seconds",
    "output_storages",
    "replay",
    "product_of",
    "allocated_bytes",
    "short_repr",
    "simulate",
    "storage_bytes",
    "work_seconds",
]
