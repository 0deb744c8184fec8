"""shardweave: an auto-parallel compiler for PyTorch.

>>> import shardweave as sw
>>> sw.Cluster.preset("dgx-a100", nodes=2).world_size
16
"""

from shardweave.compiler.api import compile_parallel, plan
from shardweave.compiler.plan import Plan
from shardweave.cost_model import Cluster, Timeline
from shardweave.errors import (
    CaptureError,
    ClusterError,
    InfeasibleError,
    InputError,
    LaunchError,
    LayoutError,
    ParallelError,
    PlanError,
    RuleError,
    VerifyError,
)
from shardweave.ir import Grid, Strategy
from shardweave.options import Options
from shardweave.passes.rules import rule
from shardweave.runtime import ParallelModule, initialise, initialised, launch, load_weights, save_weights

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Cluster",
    "ClusterError",
    "Grid",
    "InfeasibleError",
    "InputError",
    "LaunchError",
    "LayoutError",
    "Options",
    "ParallelError",
    "ParallelModule",
    "Plan",
    "PlanError",
    "RuleError",
    "Strategy",
    "Timeline",
    "VerifyError",
    "compile_parallel",
    "initialise",
    "initialised",
    "launch",
    "load_weights",
    "plan",
    "rule",
    "save_weights",
]
