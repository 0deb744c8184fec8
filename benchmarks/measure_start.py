"""Time to the first step, in a first run and in a second one, which takes measurements and plan from the cache.

python -m benchmarks.measure_start                # a Llama of 4 layers on two local ranks
python -m benchmarks.measure_start --layers 24
python -m benchmarks.measure_start --processor    # processor seconds of a rank, where the machine does other work too
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardweave as sw
from shardweave.report.progress import Event


def start(layers: int, cache: str, processor: bool) -> dict[str, float]:
    """Seconds of each part of the way to the first step, on one rank: as they pass, or those of its processor."""
    clock = time.process_time if processor else time.perf_counter
    os.environ["SHARDWEAVE_CACHE"] = cache
    torch.set_num_threads(1)
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, use_cache=False, **sizes))
    tokens = torch.randint(0, 1024, (8, 128))
    inputs = {"input_ids": tokens, "labels": tokens}
    stages: list[tuple[float, str]] = []
    begun = clock()
    cluster = sw.Cluster.detect()
    stages.append((clock(), "capture"))
    planning = ("annotate", "price", "solve", "simulate")

    def told(event: Event) -> None:
        stages.append((clock(), "plan" if event.stage in planning else event.stage))

    parallel: Any = sw.compile_parallel(model, cluster, inputs, progress=told)
    stages.append((clock(), "first step"))
    parallel(**inputs).loss.backward()
    spent = {"detect": stages[0][0] - begun, "capture": 0.0, "plan": 0.0, "generate": 0.0, "first step": 0.0}
    ends = [*(moment for moment, _ in stages[1:]), clock()]
    for (moment, stage), end in zip(stages, ends, strict=True):
        spent[stage if stage in spent else "generate"] += end - moment
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--processor", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        for run in ("first", "second"):
            spent = sw.launch(start, nprocs=given.ranks, args=(given.layers, cache, given.processor))[0]
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items())
            print(f"{run:6} run: {sum(spent.values()):5.1f} s to the end of the first step ({parts})")


if __name__ == "__main__":
    main()
