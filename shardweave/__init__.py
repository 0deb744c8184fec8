"""shardweave: an auto-parallel compiler for PyTorch.

>>> import shardweave as sw
>>> sw.Cluster.preset("dgx-a100", nodes=2).world_size
16
"""

from shardweave.compiler import Comparison, Sweep, baselines, compare, compile_parallel, plan, space
from shardweave.cost_model import Cluster, Options, Timeline
from shardweave.ir import (
    Ablation,
    CaptureError,
    CheckpointNotFound,
    ClusterError,
    Grid,
    IndexRangeError,
    InfeasibleError,
    InputError,
    InternalError,
    LaunchError,
    LayoutError,
    LostRankError,
    ParallelError,
    PlanError,
    Precision,
    RuleError,
    Strategy,
    VerifyError,
)
from shardweave.planner import Plan, Space
from shardweave.runtime import (
    ParallelModule,
    Saving,
    initialise,
    initialised,
    launch,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    save_weights,
)
from shardweave.sharding import rule

__version__ = "0.1.0"

__all__ = [
    "Ablation",
    "CaptureError",
    "CheckpointNotFound",
    "Cluster",
    "ClusterError",
    "Comparison",
    "Grid",
    "InfeasibleError",
    "IndexRangeError",
    "InputError",
    "InternalError",
    "LaunchError",
    "LayoutError",
    "LostRankError",
    "Options",
    "ParallelError",
    "ParallelModule",
    "Plan",
    "PlanError",
    "Precision",
    "RuleError",
    "Saving",
    "Space",
    "Strategy",
    "Sweep",
    "Timeline",
    "VerifyError",
    "baselines",
    "compare",
    "compile_parallel",
    "initialise",
    "initialised",
    "launch",
    "load_checkpoint",
    "load_weights",
    "plan",
    "rule",
    "save_checkpoint",
    "save_weights",
    "space",
]
