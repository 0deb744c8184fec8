"""Hand-written networks with what people put into them: convolutions, batch norm, pooling, dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions around a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.norm(self.first(x))))


class CNN(nn.Module):
    """A small residual network with a classifier of two layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = Block(8)
        self.grow = nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(16 * 4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout))
        self.classes = nn.Linear(32, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(self.block(self.stem(images)), 2)
        x = F.adaptive_avg_pool2d(F.relu(self.grow(x)), 2)
        return F.cross_entropy(self.classes(self.head(x.flatten(1))), labels)


class Classic(nn.Module):
    """A perceptron with batch norm, dropout and a concatenation of its input."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.norm = nn.BatchNorm1d(32)
        self.second = nn.Linear(32 + 12, 16)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.dropout(F.leaky_relu(self.norm(self.first(x))))
        return F.smooth_l1_loss(self.last(F.gelu(self.second(torch.cat([hidden, x], dim=1)))), targets)


def cnn(dropout: float = 0.0) -> nn.Module:
    return CNN(dropout)


def classic(dropout: float = 0.0) -> nn.Module:
    return Classic(dropout)


def images(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    """Images and their classes."""
    return {
        "images": torch.randn(size, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 8, (size,), generator=generator),
    }


def vectors(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    """A regression batch."""
    return {"x": torch.randn(size, 12, generator=generator), "targets": torch.randn(size, 4, generator=generator)}
