"""What runs a generated step: `ParallelModule`, the executor, parameters, inputs, checkpoints, and the launcher of
local ranks. It needs a plan and two graphs, and no planner. May import `ir`, `distributed`, `ops`, `sharding`,
`cost_model`, `passes` and `report`.
"""

import shardweave.ops  # noqa: F401  (registers the ops that generated graphs call)
from shardweave.runtime.bound_step import CompiledStep, OtherCall, Recompile, compare_graphs
from shardweave.runtime.call_checks import AgreedCall, Batch, PredictedStep, agree_on_graph, group_of_calls, ranks_agree
from shardweave.runtime.checkpoint.checkpoint import Saving, load_checkpoint, save_checkpoint
from shardweave.runtime.checkpoint.weights import load_weights, save_weights
from shardweave.runtime.compute_kernels import InductorMode, RegionCompiler
from shardweave.runtime.execute import boxed
from shardweave.runtime.initialise import initialise, initialised
from shardweave.runtime.inputs import call_text, wants_gradient
from shardweave.runtime.launch import WorkerPool, launch
from shardweave.runtime.module import ParallelModule, become_parallel
from shardweave.runtime.module_tree import copy_with_tensors, named_tensors

__all__ = [
    "Batch",
    "CompiledStep",
    "InductorMode",
    "OtherCall",
    "ParallelModule",
    "PredictedStep",
    "Recompile",
    "RegionCompiler",
    "AgreedCall",
    "agree_on_graph",
    "Saving",
    "WorkerPool",
    "become_parallel",
    "boxed",
    "call_text",
    "compare_graphs",
    "copy_with_tensors",
    "group_of_calls",
    "initialise",
    "initialised",
    "launch",
    "load_checkpoint",
    "load_weights",
    "named_tensors",
    "ranks_agree",
    "save_checkpoint",
    "save_weights",
    "wants_gradient",
]
