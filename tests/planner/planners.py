"""Planning again and again for one captured step: what the tests of planning share."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model.options import Options
from shardweave.demo.model import GPT, GPTConfig
from shardweave.passes.codegen import Step
from shardweave.sharding.parallel_ops import Op


class Planner:
    """As `sw.plan`, with the capture done once, and options that hold where a plan says nothing else."""

    def __init__(self, model: nn.Module, cluster: sw.Cluster, inputs: Any, **options: Any) -> None:
        self._compiler = Compiler(model, cluster, inputs, None, None)
        self._options = options

    def on(self, cluster: sw.Cluster) -> Planner:
        """The same model on another cluster."""
        other = copy.copy(self)
        other._compiler = self._compiler.with_(cluster)
        return other

    @property
    def ops(self) -> dict[str, Op]:
        """The ops that a plan decides on, by name."""
        return {op.name: op for op in self._compiler.annotated.ops}

    def plan(self, **options: Any) -> sw.Plan:
        compiler = copy.copy(self._compiler)
        compiler.options = Options(**{**self._options, **options})
        return compiler.plan()

    def lowered(self, plan: sw.Plan) -> Step:
        """The generated step of a plan."""
        return self._compiler.lower(plan).step

    def smallest(self) -> int:
        """The memory that an error names as the smallest."""
        try:
            self.plan(memory_limit=1)
        except sw.InfeasibleError as error:
            return smallest_named(error)
        raise AssertionError("a plan fits into one byte")


def smallest_named(error: sw.InfeasibleError) -> int:
    """The bytes that an error says would do."""
    found = re.search(r"smallest .*?(\d+) bytes", str(error))
    assert found is not None, str(error)
    return int(found[1])


def kind(strategy: sw.Strategy) -> str:
    """``"tensor"``, ``"sharded"`` or ``"data"``: what a strategy is called in the papers."""
    if strategy.grid.x * strategy.grid.y > 1:
        return "tensor"
    return "sharded" if strategy.rest > 1 else "data"


def kinds(plan: sw.Plan) -> set[str]:
    return {kind(choice.strategy) for choice in plan.choices.values()}


@dataclass(frozen=True)
class MetaGPT:
    """A GPT on the meta device and its inputs."""

    config: GPTConfig
    batch: int

    def build(self) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
        with torch.device("meta"):
            tokens = torch.zeros(self.batch, self.config.context, dtype=torch.long)
            return GPT(self.config), (tokens, tokens)


WIDE = MetaGPT(GPTConfig(vocabulary=512, context=128, layers=2, heads=16, width=2048), 256)
"""Much to compute for each parameter: without a tight limit, data parallelism is best on one node."""
