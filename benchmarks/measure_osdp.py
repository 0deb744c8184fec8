"""What OSDP's mixtures of DP and ZDP are worth, by real plans: ``python -m benchmarks.measure_osdp``.

Prints a Markdown table for docs/validation.md: models like those of OSDP's Table 1 (arXiv 2209.13258) in one
micro-batch on its server of 8 TITAN RTX, within 8 and 16 GB: a step with DP, with FSDP (all ZDP), and with the strategy
that the planner gives each op, which may be DP or ZDP and nothing else. Some minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardweave.compiler.compiler import Compiler
from shardweave.cost_model import Cluster
from shardweave.cost_model.options import Options
from shardweave.ir import Ablation
from shardweave.ir.errors import InfeasibleError
from shardweave.planner.search.plan import Plan
from shardweave.validation import Setting
from shardweave.validation.osdp import BLOCKING, GPUS, OVERLAP, SEQUENCE, SEQUENCES
from shardweave.validation.setting import MinGPTBlock, MinGPTSizes

LIMITS = (8, 16)
STRATEGIES: dict[str, Any] = {"DP": "dp", "FSDP": "zero3", "mixture": ("dp", "zero3")}


@dataclass(frozen=True)
class Family:
    """A kind of models of Table 1: the widths of its layers, and how much faster than FSDP the paper prints it."""

    name: str
    widths: Sequence[int]
    published: str


FAMILIES = (
    Family("N&D, 48 layers of 1024", (1024,) * 48, "up to 23 %"),
    Family("W&S, 2 layers of 6144", (6144,) * 2, "up to 92 %*"),
    Family("I&C, 12 layers of 1024 and 12 of 2048", (1024,) * 12 + (2048,) * 12, "up to 168 %*"),
)


class Layers(nn.Module):
    """The layers of the authors' model; where the width changes, a linear layer brings it to the next one's."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, widths[0])
        self.blocks = nn.ModuleList(MinGPTBlock(MinGPTSizes(1, width)) for width in widths)
        before = (widths[0], *widths[:-1])
        self.bridges = nn.ModuleDict(
            {str(at): nn.Linear(old, new, bias=False) for at, (old, new) in enumerate(zip(before, widths, strict=True))
             if old != new}
        )  # fmt: skip
        self.head = nn.Linear(widths[-1], 10, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for at, block in enumerate(self.blocks):
            x = block(self.bridges[str(at)](x) if str(at) in self.bridges else x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def plans(setting: Setting, widths: Sequence[int], limits: Sequence[float] = LIMITS) -> dict[float, dict[str, Plan]]:
    """By memory limit in GB, the plan of each system that has one."""
    with torch.device("meta"):
        model, batch = Layers(widths), torch.zeros(GPUS * SEQUENCES, SEQUENCE, dtype=torch.long)
    compiler = Compiler(model, Cluster.local(1), (batch, batch), Options(), None)
    cluster = setting.cluster("osdp-titan")
    found: dict[float, dict[str, Plan]] = {}
    for limit in limits:
        asked = {**OVERLAP, "buckets": True, "micro_batches": 1, "recompute": "none", "operator_slices": 1}
        asked["ablation"] = Ablation(blocking=BLOCKING)
        asked |= {"time_limit": 3.0, "memory_limit": int(limit * 2**30)}
        found[limit] = {}
        for name, strategy in STRATEGIES.items():
            try:
                found[limit][name] = setting.plan(compiler, cluster, force={"*": strategy}, **asked)
            except InfeasibleError:
                continue
    return found


def share(plan: Plan) -> float:
    """The part of the parameters that is ZDP."""
    sizes = {name: torch.Size(shape).numel() for name, shape in plan.model_key.parameters.items()}
    sharded = [op for op, choice in plan.choices.items() if choice.strategy.rest > 1]
    return sum(size for name, size in sizes.items() if any(name.startswith(op) for op in sharded)) / sum(sizes.values())


def main() -> None:
    print("| model | limit | DP | FSDP | mixture | of it ZDP | faster than FSDP | published |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for family in FAMILIES:
        for limit, found in plans(Setting(), family.widths).items():
            said = [f"{1e3 * found[name].step_time:.0f} ms" if name in found else "does not fit" for name in STRATEGIES]
            part = f"{100 * share(found['mixture']):.0f} %" if "mixture" in found else ""
            both = "mixture" in found and "FSDP" in found
            gain = f"{100 * (found['FSDP'].step_time / found['mixture'].step_time - 1):.0f} %" if both else ""
            row = [family.name, f"{limit} GB", *said, part, gain, family.published]
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
