"""shardweave: an auto-parallel compiler for PyTorch.

>>> import shardweave as sw
>>> sw.Cluster.preset("dgx-a100", nodes=2).world_size
16
"""

from shardweave.compiler import baselines
from shardweave.compiler.api import compile_parallel, plan
from shardweave.compiler.comparison import Comparison, compare
from shardweave.compiler.sweep import Sweep
from shardweave.cost_model import Cluster, Timeline
from shardweave.cost_model.options import Options
from shardweave.ir import Grid, Strategy
from shardweave.ir.errors import (
    CaptureError,
    CheckpointNotFound,
    ClusterError,
    IndexRangeError,
    InfeasibleError,
    InputError,
    InternalError,
    LaunchError,
    LayoutError,
    LostRankError,
    ParallelError,
    PlanError,
    RuleError,
    VerifyError,
)
from shardweave.ir.precision import Precision
from shardweave.planner.search.plan import Plan
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
from shardweave.sharding.rules import rule

__version__ = "0.1.0"

__all__ = [
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
]
