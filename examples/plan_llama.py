"""Plan a Llama from `transformers` for other machines, under smaller and smaller memory limits:

    python examples/plan_llama.py --preset dgx-a100 --nodes 2 --layers 4
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import shardweave as sw
from shardweave.ir.errors import InfeasibleError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="dgx-a100")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    arguments = parser.parse_args()

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=arguments.width,
        intermediate_size=arguments.width * 11 // 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):  # no memory is needed to plan
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(arguments.batch, arguments.context, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    cluster = sw.Cluster.preset(arguments.preset, nodes=arguments.nodes)

    console = Console(width=140)
    plan = sw.plan(model, cluster, batch)
    console.print(plan.explain())
    for share in (0.8, 0.6, 0.4):
        limit = int(share * plan.peak_memory)
        try:
            tighter = plan.resolve(memory_limit=limit)
        except InfeasibleError as error:
            console.print(f"{limit / 2**30:.2f} GiB: {error}", markup=False)
            break
        console.print(f"{limit / 2**30:.2f} GiB: a step takes {tighter.step_time * 1e3:.1f} ms ({tighter.status})")


if __name__ == "__main__":
    main()
