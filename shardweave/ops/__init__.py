"""Custom operators (``torch.ops.shardweave.*``) that generated graphs call: quantized blocks, padding, gradients of
convolutions, mixtures of experts, recurrent layers, the CTC loss, random numbers that do not depend on the layout,
checked indices, slices of a time axis. Importing this package registers them. May import `ir`.
"""

from shardweave.ops.communication_encodings import all_reduced
from shardweave.ops.layer_ops import REGION_NAMES
from shardweave.ops.local_shards import IndexChecks, IndexRange, coordinate, is_coordinate, joined, total, unpad
from shardweave.ops.seeded_random import Seeds, hash_seeds, seeded

__all__ = [
    "IndexRange",
    "IndexChecks",
    "REGION_NAMES",
    "Seeds",
    "all_reduced",
    "coordinate",
    "is_coordinate",
    "joined",
    "hash_seeds",
    "seeded",
    "total",
    "unpad",
]
