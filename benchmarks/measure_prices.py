"""The program's price of a step beside the simulator's, one strategy forced on all ops.

    python -m benchmarks.measure_prices [kind ...]

Prints, for each kind of choice, the seconds that the integer program counts, those that the simulator takes for the
generated step, and by how much the first are off.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.demo.model import GPT, GPTConfig

PLAIN: dict[str, Any] = {"micro_batches": 1, "sub_batches": 1, "buckets": False, "keep_gathered": False,
                         "recompute": "none"}  # fmt: skip

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": ("dp", {}),
    "ZeRO-2": ("zero2", {}),
    "ZeRO-3": ("zdp", {}),
    "ZeRO-3, kept": ("zdp", {"keep_gathered": True}),
    "hybrid sharding": ("hsdp", {}),
    "secondary partition": ("hpz", {}),
    "slices": ("zdp", {"operator_slices": 4}),
    "slices, kept": ("zdp", {"operator_slices": 4, "keep_gathered": True}),
    "quantized": ("zdp", {"quantize": "zero++"}),
    "recomputed": ("zdp", {"recompute": "full"}),
    "micro-batches": ("zero2", {"micro_batches": 2}),
    "ZeRO-2, buckets": ("zero2", {"buckets": True}),
    "data parallel, buckets": ("dp", {"buckets": True}),
    "sub-batches": ("zdp", {"sub_batches": 2}),
    "tensor 2": ("tensor:2", {}),
    "tensor 4": ("tensor:4", {}),
    "tensor 4, sub-batches": ("tensor:4", {"sub_batches": 2}),
    "tensor 8, recomputed": ("tensor:8", {"recompute": "fine"}),
}
"""For each kind of choice: what is forced on all ops, and the options beside it."""


def measure(kinds: list[str]) -> None:
    """Print a table of errors."""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=6, width=1024, heads=16, vocabulary=8192, context=512))
        tokens = torch.zeros(32, 512, dtype=torch.long)
    for name in ("rtx3090-pcie", "dgx-a100"):
        compiler = Compiler(model, sw.Cluster.preset(name, nodes=2), (tokens, tokens), None, None)
        for kind in kinds:
            forced, options = KINDS[kind]
            asked = sw.Options(force={"*": forced}, memory_limit="1TB", **{**PLAIN, **options})
            plan = compiler.with_(options=asked).plan()
            off = plan.program_time / plan.step_time - 1
            print(f"{name:13} {kind:22} {plan.program_time * 1e3:8.1f} ms {plan.step_time * 1e3:8.1f} ms {off:+7.1%}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(sys.argv[1:] or [*KINDS])
