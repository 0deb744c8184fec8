"""What runs a generated step: it knows graphs and their calling convention, and nothing of the compiler."""

import shardweave.runtime.convolution  # noqa: F401  (the ops that generated graphs call)
import shardweave.runtime.padding  # noqa: F401
from shardweave.runtime.checkpoint import load_checkpoint, save_checkpoint
from shardweave.runtime.initialise import initialise, initialised
from shardweave.runtime.launch import WorkerPool, launch
from shardweave.runtime.mesh import RuntimeMesh
from shardweave.runtime.module import ParallelModule, Step, become_parallel
from shardweave.runtime.saving import Saving
from shardweave.runtime.weights import load_weights, save_weights

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
