"""How long planning takes, stage by stage, in CPU seconds: the figures of docs/measured.md.

python -m benchmarks.measure_planning                                  # Llama-3-8B, 32 layers, on 64 H100s
python -m benchmarks.measure_planning --model gpt3 --nodes 128         # like GPT-3-175B, 96 layers, on 1,024
python -m benchmarks.measure_planning --batch 64 --memory-gib 24       # more tokens, less memory
python -m benchmarks.measure_planning --model unet --nodes 2           # skip connections: a U-Net
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.planner.search import setting_search
from shardweave.planner.search import solver_cache as answers
from shardweave.planner.search.search import PlanSearch
from shardweave.report.progress import Event, Reporter
from tests.models.large import LARGE


def llama(layers: int) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes))
    return model


def gpt3(layers: int) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 51200, "n_embd": 12288, "n_head": 96, "n_positions": 2048}
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False, **sizes, **dropout))
    return model


def unet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return LARGE["unet (ddpm)"]()


def mixtral(layers: int) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    model: nn.Module = MixtralForCausalLM(MixtralConfig(num_hidden_layers=layers, use_cache=False, **sizes))
    return model


MODELS: dict[str, tuple[Callable[[int], nn.Module], int, int]] = {
    "llama": (llama, 32, 8192), "gpt3": (gpt3, 96, 2048), "mixtral": (mixtral, 32, 2048),
}  # fmt: skip
"""By name: what builds it from its number of layers, how many it has, and its sequence length."""


class Clock:
    """CPU seconds of this process by what they were spent on."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.stage, self.since = "start", time.process_time()
        self.outer: list[str] = []
        """The stages in which the calls are made that are counted apart."""

    def enter(self, stage: str) -> None:
        """What follows is spent on `stage`."""
        now = time.process_time()
        self.spent[self.stage] = self.spent.get(self.stage, 0.0) + now - self.since
        self.stage, self.since = stage, now

    def told(self, event: Event) -> None:
        """Planning goes on with another stage; a call that is counted apart stays so."""
        if self.outer:
            self.outer[-1] = event.stage
        else:
            self.enter(event.stage)

    def around(self, owner: Any, name: str, stage: str) -> None:
        """Count calls of a function apart from the stage that they are made in."""
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.outer.append(self.stage)
            self.enter(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(self.outer.pop())

        setattr(owner, name, counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["unet", *sorted(MODELS)], default="llama")
    parser.add_argument("--layers", type=int, help="by default the model's own number")
    parser.add_argument("--nodes", type=int, default=8, help="of 8 H100s")
    parser.add_argument("--batch", type=int, help="sequences; by default one a device")
    parser.add_argument("--memory-gib", type=float, help="memory limit a device")
    parser.add_argument("--micro-batches", type=int, help="by default the planner chooses")
    given = parser.parse_args()
    cluster = sw.Cluster.preset("dgx-h100", nodes=given.nodes)
    if given.model == "unet":
        model, inputs = unet()
    else:
        build, layers, length = MODELS[given.model]
        with torch.device("meta"):
            model = build(given.layers or layers).to(torch.bfloat16)
            tokens = torch.zeros(given.batch or cluster.world_size, length, dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens}
    limit = int(given.memory_gib * 2**30) if given.memory_gib else None
    clock = Clock()
    clock.around(answers, "solve", "solve: the solver")
    clock.around(setting_search.SettingSearch, "_simulated", "evaluate: lower, schedule, simulate")
    clock.around(PlanSearch, "_whole", "whole: the same of all layers")
    options = sw.Options(memory_limit=limit, micro_batches=given.micro_batches)
    plan = Compiler(model, cluster, inputs, options, Reporter(clock.told)).plan()
    clock.enter("end")
    for stage, seconds in clock.spent.items():
        print(f"{stage:34} {seconds:6.2f} CPU-s")
    planning = sum(seconds for stage, seconds in clock.spent.items() if stage not in ("start", "capture", "end"))
    print(f"{'from captured graph to plan':34} {planning:6.2f} CPU-s")
    print(f"{plan.status}, gap {100 * plan.gap:.3g} %, of the program's own answer {100 * plan.proven_gap:.3g} %")
    print(f"a step by the program {plan.program_time:.4f} s, by the simulator {plan.step_time:.4f} s")
    print(f"{plan.peak_memory / 2**30:.1f} of {plan.memory_limit / 2**30:.1f} GiB; {plan.overlap}")
    print(f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    print(plan.explain())


if __name__ == "__main__":
    main()
