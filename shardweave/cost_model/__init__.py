"""What things cost: the machine, compute, collectives, memory, and the simulator that is the judge of a plan."""

from shardweave.cost_model.cluster import Cluster, Device, Level
from shardweave.cost_model.collectives import collective_seconds

__all__ = ["Cluster", "Device", "Level", "collective_seconds"]
