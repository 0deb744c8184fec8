"""The entry points: capture, `plan`, `compile_parallel`, `compare`, sweeps, the backend of ``torch.compile``, and
baselines. May import every room below it.
"""

from shardweave.compiler.api import compile_parallel, plan, space
from shardweave.compiler.baselines import Comparison, compare
from shardweave.compiler.compiler import Compiler
from shardweave.compiler.sweep import Sweep

__all__ = [
    "Comparison",
    "Compiler",
    "Sweep",
    "compare",
    "compile_parallel",
    "plan",
    "space",
]
