"""What measuring the running world is worth: steps planned by a preset's figures, by a brief and by a full profile.

python -m benchmarks.measure_profiles                      # two hosts, a link of 200 Mbit/s
python -m benchmarks.measure_profiles --mbit 1000 --batch 16

The three steps take turns, so that other work of the machine meets all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardweave as sw
from benchmarks.hosts import hosts, run_ranks

PROFILES: tuple[bool | Literal["full"], ...] = (False, True, "full")


def llama() -> nn.Module:
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    torch.manual_seed(0)
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, use_cache=False, **sizes)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def measure(batch: int, rounds: int) -> None:
    """What each rank does; rank 0 prints."""
    warnings.simplefilter("ignore")  # that the preset predicts another step is what is measured here
    torch.set_num_threads(1)
    tokens = torch.randint(0, 1024, (batch, 128), generator=torch.Generator().manual_seed(1))
    steps: list[tuple[str, float, sw.Plan, Any, torch.optim.Optimizer]] = []
    for profile in PROFILES:
        begun = time.perf_counter()
        cluster = sw.Cluster.detect(profile=profile)
        took = time.perf_counter() - begun
        parallel: Any = sw.compile_parallel(llama(), cluster, {"input_ids": tokens, "labels": tokens}, progress=False)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        steps.append((f"profile={profile!r}", took, parallel.plan, parallel, optimizer))
    seconds: dict[str, list[float]] = {name: [] for name, *_ in steps}
    for _ in range(rounds):
        for name, _, _, parallel, optimizer in steps:
            dist.barrier()
            begun = time.perf_counter()
            parallel(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds[name].append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        for name, took, plan, *_ in steps:
            step = statistics.median(seconds[name][3:])
            predicted = f"a step predicted {1e3 * plan.step_time:5.0f} ms"
            print(f"{name:16} measured in {took:4.1f} s; {predicted}, takes {1e3 * step:5.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=200, help="rate of the link")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 tokens")
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        measure(given.batch, given.rounds)
        dist.destroy_process_group()
        return
    with hosts(2, given.mbit) as names, tempfile.TemporaryDirectory() as cache:
        print(f"two hosts, {given.mbit} Mbit/s, batch {given.batch}" if names else f"loopback, batch {given.batch}")
        run_ranks(names, 1, "benchmarks.measure_profiles", sys.argv[1:], {"SHARDWEAVE_CACHE": cache})


if __name__ == "__main__":
    main()
