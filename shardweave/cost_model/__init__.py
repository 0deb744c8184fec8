"""What things cost: the machine, compute, collectives, memory, and the simulator that is the judge of a plan."""

from shardweave.cost_model.cluster import Cluster, Device, Level
from shardweave.cost_model.collectives import collective_seconds
from shardweave.cost_model.compute import matmul_seconds, node_seconds, node_work
from shardweave.cost_model.flops import flops_by_op, replicated, sharded_share
from shardweave.cost_model.simulator import simulate
from shardweave.cost_model.timeline import Timeline

__all__ = [
    "Cluster",
    "Device",
    "Level",
    "Timeline",
    "collective_seconds",
    "flops_by_op",
    "matmul_seconds",
    "node_seconds",
    "node_work",
    "replicated",
    "sharded_share",
    "simulate",
]
