"""Custom operators (``torch.ops.shardweave.*``) that generated graphs call: quantized blocks, padding, gradients of
convolutions, mixtures of experts, random numbers that do not depend on the layout, checked indices, slices of a time
axis. Importing this package registers them. May import `ir`.
"""

from shardweave.ops import convolution_grads, experts, quantized_blocks  # noqa: F401  (registers the ops)
from shardweave.ops.checked_index import Check, IndexChecks
from shardweave.ops.ordered_bits import all_reduced
from shardweave.ops.padding import unpad
from shardweave.ops.seeded_random import Seeds, mixed, seeded
from shardweave.ops.time_axis import coordinate, is_coordinate, joined, total

__all__ = [
    "Check",
    "IndexChecks",
    "Seeds",
    "all_reduced",
    "coordinate",
    "is_coordinate",
    "joined",
    "mixed",
    "seeded",
    "total",
    "unpad",
]
