"""The demo's GPT, small, with biases (so that every kind of parameter occurs)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardweave.demo.model import GPT, GPTConfig

CONFIG = GPTConfig(vocabulary=64, context=16, layers=2, heads=4, width=32, bias=True)
TIED = GPTConfig(vocabulary=64, context=16, layers=2, heads=4, width=32, bias=False, tied=True)


def build(config: GPTConfig = CONFIG) -> nn.Module:
    return GPT(config)


def batch(generator: torch.Generator, size: int = 8, config: GPTConfig = CONFIG) -> dict[str, Tensor]:
    """A batch of which the loss is computed inside of the model."""
    text = torch.randint(0, config.vocabulary, (size, config.context + 1), generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
