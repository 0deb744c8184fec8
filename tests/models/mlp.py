"""A perceptron whose sizes (6, 10, 15, 7) few axes divide, with a norm, a residual and a buffer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (6, 10, 15, 7)


class MLP(nn.Module):
    """Three linear layers; without targets it returns its prediction, for a loss that is computed outside."""

    scale: Tensor

    def __init__(self, sizes: tuple[int, int, int, int] = SIZES) -> None:
        super().__init__()
        inputs, hidden, wide, outputs = sizes
        self.first = nn.Linear(inputs, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.second = nn.Linear(hidden, wide)
        self.back = nn.Linear(wide, hidden, bias=False)
        self.last = nn.Linear(hidden, outputs)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, hidden))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        hidden = hidden + self.back(F.gelu(self.second(self.norm(hidden))))
        prediction: Tensor = self.last(hidden)
        return prediction if targets is None else F.mse_loss(prediction, targets)


def build(sizes: tuple[int, int, int, int] = SIZES) -> nn.Module:
    return MLP(sizes)


def batch(generator: torch.Generator, size: int = 8, sizes: tuple[int, int, int, int] = SIZES) -> dict[str, Tensor]:
    """A regression batch."""
    return {
        "x": torch.randn(size, sizes[0], generator=generator),
        "targets": torch.randn(size, sizes[-1], generator=generator),
    }
