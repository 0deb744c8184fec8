"""Steps on one rank, beside eager mode and torch.compile: what the generated code costs by itself.

python -m benchmarks.measure_one_rank                   # GPT and Llama of 25 M parameters, a ViT, a ConvNet

The steps take turns, so that other work of the machine meets all. Each row has medians of forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import shardweave as sw


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 1024, (8, 128), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    pixels = torch.randn(8, 3, 64, 64, generator=numbers)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (8,), generator=numbers)}


def gpt() -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(vocab_size=1024, n_embd=512, n_layer=8, n_head=8, n_positions=128, use_cache=False, **off)
    )
    return model


def llama() -> nn.Module:
    sizes = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, use_cache=False, **sizes))
    return model


def vit() -> nn.Module:
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
    model: nn.Module = ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, num_labels=10, **sizes))
    return model


def convnet() -> nn.Module:
    config = ConvNextConfig(depths=[2, 2, 4, 2], hidden_sizes=[64, 128, 256, 512], num_labels=10)
    model: nn.Module = ConvNextForImageClassification(config)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "gpt": (gpt, tokens), "llama": (llama, tokens), "vit": (vit, images), "convnet": (convnet, images),
}  # fmt: skip


def measure(name: str, rounds: int) -> tuple[dict[str, float], float]:
    """The median seconds of each kind of step of a model, and the largest difference of losses."""
    build, batch = MODELS[name]
    inputs = batch()
    torch.manual_seed(0)
    model = build()
    steps: dict[str, Any] = {
        "eager": model,
        "torch.compile": torch.compile(copy.deepcopy(model)),
        "shardweave": sw.compile_parallel(copy.deepcopy(model), sw.Cluster.local(1), inputs, progress=False),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    losses: dict[str, float] = {}
    for _ in range(rounds):
        for kind, step in steps.items():
            step.zero_grad()
            begun = time.perf_counter()
            loss = step(**inputs).loss
            loss.backward()
            seconds[kind].append(time.perf_counter() - begun)
            losses[kind] = loss.item()
    torch._dynamo.reset()
    medians = {kind: statistics.median(taken[2:]) for kind, taken in seconds.items()}
    return medians, max(losses.values()) - min(losses.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in given.models:
        medians, difference = measure(name, given.rounds)
        times = ", ".join(f"{kind} {1e3 * seconds:.0f} ms" for kind, seconds in medians.items())
        print(f"{name:8} {times}; losses differ by {difference:.2g}")


if __name__ == "__main__":
    main()
