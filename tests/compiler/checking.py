"""Models with asserts, apart from tests, as pytest rewrites the asserts of test modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Checking(nn.Module):
    """Checks its hidden values in several ways, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert not (x > 1000).any(), "large input"
        hidden = self.up(x)
        if torch.isnan(hidden).any() or torch.isinf(hidden).any():
            raise ValueError(f"bad values of shape {hidden.shape}")
        hidden = torch.relu(hidden)
        torch._assert((hidden < 100).all(), "large hidden values")
        variance = self.down(hidden).square() + 0.1
        loss: Tensor = nn.functional.gaussian_nll_loss(self.down(hidden), y, variance)
        return loss


class CheckedLoss(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x).square().mean()
        assert loss < 100, "large loss"
        return loss
