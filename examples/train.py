"""Train the demo's GPT with a planned step. On every machine of a cluster, or on this one:

    torchrun --standalone --nproc-per-node 4 examples/train.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import shardweave as sw
from shardweave.demo.model import GPT, GPTConfig
from shardweave.demo.text import Text


def train(config: GPTConfig, steps: int, batch: int) -> list[float]:
    """The losses of `steps` steps; runs on every rank of the world."""
    torch.manual_seed(0)  # every rank starts from the same parameters
    text = Text.of_standard_library(batch, config.context)
    parallel = sw.compile_parallel(GPT(config), sw.Cluster.detect(), text.draw(0))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        tokens, targets = text.draw(step)  # the global batch: each rank takes its part
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
