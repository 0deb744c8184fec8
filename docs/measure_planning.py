"""Plan Llama-3-8B for 64 H100s and print how long each stage took: the figures of docs/measured.md.

python docs/measure_planning.py [--layers 32]
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardweave as sw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    layers = parser.parse_args().layers
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128256,
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=layers,
                num_attention_heads=32,
                num_key_value_heads=8,
                use_cache=False,
            )
        )
        tokens = torch.zeros(16, 8192, dtype=torch.long)
    begun = [("start", time.process_time())]
    plan = sw.plan(
        model,
        sw.Cluster.preset("dgx-h100", nodes=8),
        {"input_ids": tokens, "labels": tokens},
        progress=lambda stage: begun.append((stage, time.process_time())),
    )
    begun.append(("done", time.process_time()))
    for (stage, start), (_, end) in zip(begun[1:], begun[2:]):
        print(f"{stage:10} {end - start:6.1f} CPU-s")
    print(plan.explain())
    print(f"program {plan.step_time:.3f} s, simulated {plan.timeline().step_time:.3f} s")
    print(f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
