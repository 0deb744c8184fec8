"""What runs a generated step: it knows graphs and their calling convention, and nothing of the compiler."""

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.distributed.process_groups import RuntimeMesh
from shardweave.runtime.checkpoint.checkpoint import Saving, load_checkpoint, save_checkpoint
from shardweave.runtime.checkpoint.weights import load_weights, save_weights
from shardweave.runtime.initialise import initialise, initialised
from shardweave.runtime.launch import WorkerPool, launch
from shardweave.runtime.module import ParallelModule, Step, become_parallel

__all__ = [
    "ParallelModule",
    "RuntimeMesh",
    "Saving",
    "Step",
    "WorkerPool",
    "become_parallel",
    "initialise",
    "initialised",
    "launch",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
    "save_weights",
]
