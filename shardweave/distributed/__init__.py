"""The process groups of a running world: one for each group of mesh axes, their timeouts, what happens when a rank is
lost, and agreement between ranks on a value or an error. May import `ir`.
"""

from shardweave.distributed.agreement import (
    Control,
    Failure,
    all_gather_objects,
    checkpoint_group,
    control,
    control_of,
    error_text,
    gather_from_ranks,
    raise_failures,
    run_checkpoint_step,
    run_on_all_ranks,
    run_on_each_rank,
    world_group,
)
from shardweave.distributed.failures import collective, forget_failure, lost_rank, raise_if_rank_lost
from shardweave.distributed.gloo import (
    exchange,
    gather,
    is_sent_directly,
    sends_directly,
    single_threaded_gloo,
    sum_of_parts,
)
from shardweave.distributed.process_groups import RuntimeMesh, group_of, is_collective

__all__ = [
    "Control",
    "RuntimeMesh",
    "collective",
    "control",
    "control_of",
    "error_text",
    "world_group",
    "forget_failure",
    "Failure",
    "all_gather_objects",
    "raise_failures",
    "gather_from_ranks",
    "group_of",
    "run_on_all_ranks",
    "run_on_each_rank",
    "lost_rank",
    "exchange",
    "gather",
    "is_collective",
    "is_sent_directly",
    "sends_directly",
    "sum_of_parts",
    "single_threaded_gloo",
    "checkpoint_group",
    "raise_if_rank_lost",
    "run_checkpoint_step",
]
