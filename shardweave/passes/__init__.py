"""Graph passes: they lower an annotated step and its strategies to the forward and backward graphs that run.

`pipeline.PASSES` has the passes in their order. This room may import `ir`, `ops`, `sharding` and `cost_model`.
"""

from shardweave.passes.bucket import FULL_BUCKET_RATIO
from shardweave.passes.codegen import MicroBatchGraphs, Step, graph_hash
from shardweave.passes.pipeline import Compiled, Shards, layer_multiplicity, lower, with_times
from shardweave.passes.quantize import QUANTIZATION_BLOCK, quantization_stages
from shardweave.passes.recompute import recompute_fusible, region_of
from shardweave.passes.schedule import RepeatedLayers, layer_outputs
from shardweave.passes.step_boundary import (
    Annotated,
    Samples,
    annotate,
    check_local_batch,
    global_example,
    inputs_with_first_size,
    join_names,
)

__all__ = [
    "FULL_BUCKET_RATIO",
    "QUANTIZATION_BLOCK",
    "Annotated",
    "Compiled",
    "MicroBatchGraphs",
    "RepeatedLayers",
    "Samples",
    "Shards",
    "Step",
    "annotate",
    "check_local_batch",
    "global_example",
    "graph_hash",
    "inputs_with_first_size",
    "join_names",
    "layer_multiplicity",
    "layer_outputs",
    "lower",
    "quantization_stages",
    "recompute_fusible",
    "region_of",
    "with_times",
]
