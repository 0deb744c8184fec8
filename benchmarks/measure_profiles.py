"""What measuring the running world is worth: steps planned by a preset's figures, by a brief and by a full profile.

python -m benchmarks.measure_profiles                      # two hosts, a link of 200 Mbit/s
python -m benchmarks.measure_profiles --mbit 1000 --batch 16

Two network namespaces, which only root can make, are the hosts: a pair of virtual interfaces joins them, and `tc tbf`
bounds its rate. They are removed at the end. The three steps take turns, so that other work of the machine meets all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardweave as sw

PROFILES: tuple[bool | Literal["full"], ...] = (False, True, "full")
ADDRESS = "10.85.0.{}"


@contextmanager
def hosts(mbit: int) -> Iterator[tuple[str, str]]:
    """The names of two namespaces, and of the interface of each, that a link of this rate joins."""
    names = (f"sw{os.getpid()}a", f"sw{os.getpid()}b")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        one, other = names
        _run("ip", "link", "add", one, "netns", one, "type", "veth", "peer", "name", other, "netns", other)
        for number, name in enumerate(names, 1):
            _run("ip", "-n", name, "address", "add", f"{ADDRESS.format(number)}/24", "dev", name)
            for interface in (name, "lo"):
                _run("ip", "-n", name, "link", "set", interface, "up")
            rate = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "100ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", name, "root", "tbf", *rate)
        yield names
    finally:
        for name in names:  # the interfaces go with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()} (this needs root, and the commands ip and tc)")


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
    with hosts(given.mbit) as names, tempfile.TemporaryDirectory() as cache:
        print(f"two hosts, {given.mbit} Mbit/s, batch {given.batch}")
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESS.format(1)}
        world |= {"MASTER_PORT": "29400", "SHARDWEAVE_CACHE": cache}
        ranks = []
        for rank, name in enumerate(names):
            own = {**os.environ, **world, "RANK": str(rank), "GLOO_SOCKET_IFNAME": name}
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.measure_profiles", *sys.argv[1:]]
            ranks.append(subprocess.Popen(command, env=own))
        for process in ranks:
            if process.wait():
                raise SystemExit(process.returncode)


if __name__ == "__main__":
    main()
