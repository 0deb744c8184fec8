"""The process groups of a running world: one for each group of mesh axes, their timeouts, what happens when a rank is
lost, and agreement between ranks on a value or an error. May import `ir`.
"""

from shardweave.distributed.agreement import (
    Control,
    control,
    control_of,
    everyone,
    from_all,
    in_step,
    own_group,
    together,
)
from shardweave.distributed.failures import collective, forget_failure, lost_rank, refuse_if_lost
from shardweave.distributed.process_groups import COLLECTIVES, RuntimeMesh, group_of, one_at_a_time

__all__ = [
    "COLLECTIVES",
    "Control",
    "RuntimeMesh",
    "collective",
    "control",
    "control_of",
    "everyone",
    "forget_failure",
    "from_all",
    "group_of",
    "in_step",
    "lost_rank",
    "one_at_a_time",
    "own_group",
    "refuse_if_lost",
    "together",
]
