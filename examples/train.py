"""Train the demo's GPT with a planned step. Run this on every machine of a cluster, or on this machine alone:

    torchrun --standalone --nproc-per-node 4 examples/train.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

import shardweave as sw
from shardweave.demo.model import GPT, GPTConfig
from shardweave.demo.run import Text


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into sequences of `context` tokens, each with the tokens that follow as its targets."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = self.tokens[start : start + self.context + 1]
        return piece[:-1], piece[1:]


def train(config: GPTConfig, steps: int, batch: int) -> list[float]:
    """The losses of `steps` steps; runs on every rank of the world."""
    torch.manual_seed(0)  # every rank starts from the same parameters
    data = Sequences(Text.of_standard_library(batch, config.context).tokens, config.context)
    example = default_collate([data[index] for index in range(batch)])  # a global batch, for its shapes
    parallel = sw.compile_parallel(GPT(config), sw.Cluster.detect(), example)
    sampler = parallel.sampler(data)  # each rank reads only its part of each global batch
    loader = DataLoader(data, batch // parallel.data_world_size, sampler=sampler, drop_last=True)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses = []
    for _, (tokens, targets) in zip(range(steps), loader):
        loss = parallel(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    losses = train(GPTConfig(layers=arguments.layers), arguments.steps, arguments.batch)
    if dist.get_rank() == 0:
        print(" ".join(f"{loss:.3f}" for loss in losses))
    dist.barrier()  # or a rank that leaves early would break the others' connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
