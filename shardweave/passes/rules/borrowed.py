"""Forms that torch itself has: losses and activations as pointwise ops, and sums over the global number of elements.

The one place that touches torch's table of decompositions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten
BORROWED: dict[Any, Callable[..., Any]] = dict(
    get_decompositions(
        [
            aten.smooth_l1_loss.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_backward.default,
            aten.soft_margin_loss.default,
            aten.soft_margin_loss_backward.default,
            aten.log_sigmoid_backward.default,
            aten._prelu_kernel.default,
            aten._prelu_kernel_backward.default,
            aten.addmv.default,
        ]
    )
)
