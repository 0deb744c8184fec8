"""Graph passes: from an annotated step and its strategies to the two graphs that run. `pipeline` has their order. May
import `ir`, `ops`, `sharding` and `cost_model`.
"""

from shardweave.passes.annotated_step import Annotated, annotate, join_names
from shardweave.passes.codegen import Step, graph_hash
from shardweave.passes.overlap_options import with_times
from shardweave.passes.pipeline import Compiled, Shards, lower, times_of
from shardweave.passes.recompute import region_of
from shardweave.passes.schedule import Alike

__all__ = [
    "Alike",
    "Annotated",
    "Compiled",
    "Shards",
    "Step",
    "annotate",
    "graph_hash",
    "join_names",
    "lower",
    "region_of",
    "times_of",
    "with_times",
]
