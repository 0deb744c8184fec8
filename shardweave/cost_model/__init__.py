"""What things cost: the machine, compute, collectives, memory, and the simulator that is the judge of a plan."""

from shardweave.cost_model.cluster import Cluster, ClusterLike
from shardweave.cost_model.collectives import collective_seconds
from shardweave.cost_model.machine import Device, Level, Machine
from shardweave.cost_model.measured_tables import CollectiveTable, Curve, Measured
from shardweave.cost_model.op_tables import OpTable, OpTime
from shardweave.cost_model.op_time import (
    Product,
    Work,
    flops_by_op,
    matmul_seconds,
    node_seconds,
    node_work,
    replicated,
    sharded_share,
    work_seconds,
)
from shardweave.cost_model.simulator import simulate
from shardweave.cost_model.timeline import Timeline

__all__ = [
    "Cluster",
    "ClusterLike",
    "CollectiveTable",
    "Curve",
    "Device",
    "Level",
    "Machine",
    "Measured",
    "OpTable",
    "OpTime",
    "Product",
    "Timeline",
    "Work",
    "collective_seconds",
    "flops_by_op",
    "matmul_seconds",
    "node_seconds",
    "node_work",
    "replicated",
    "sharded_share",
    "simulate",
    "work_seconds",
]
