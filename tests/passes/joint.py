"""Captured steps of the zoo, once a run, with the values of all their nodes on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from shardweave.compiler.capture import capture
from shardweave.cost_model.options import Options
from shardweave.demo.model import GPTConfig
from shardweave.ir.captured import Captured
from shardweave.passes.step_boundary import Annotated, annotate
from shardweave.sharding.graphs import copied
from tests.models import TODAY, ZOO, Case, gpt, llama, mlp


class Chain(nn.Module):
    """Linear layers and nothing else: what papers count the collectives of."""

    def __init__(self, sizes: Sequence[int] = (8, 16, 32, 8)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(F.relu(x) if index else x)
        return F.mse_loss(x, targets)


class CNN(nn.Module):
    """Batch, group and instance norm, plain, grouped and transposed convolutions, pools, and a stretch whose memory is
    channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=6)
        self.group_norm = nn.GroupNorm(6, 12)
        self.wide = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.last_norm = nn.BatchNorm2d(12)
        self.head = nn.Linear(12 * 4, 6)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        x = x + self.group_norm(self.grouped(x))
        x = self.up(F.instance_norm(F.silu(self.wide(x.contiguous(memory_format=torch.channels_last)))))
        x = F.avg_pool2d(F.relu(self.last_norm(x)), 2).flatten(1)
        return F.mse_loss(self.head(x), targets)


def _images(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    return {
        "x": torch.randn(size, 3, 8, 8, generator=generator),
        "targets": torch.randn(size, 6, generator=generator),
    }


SMALL = GPTConfig(vocabulary=24, context=4, layers=1, heads=4, width=16, bias=True)
SMALL_TIED = GPTConfig(vocabulary=24, context=4, layers=1, heads=4, width=16, bias=False, tied=True)
EVEN = (8, 16, 32, 8)
_llama = partial(llama.build, layers=1, heads=4, key_value_heads=2, width=16)
CASES = {
    "mlp": ZOO["mlp"],
    "chain": Case("chain", Chain, partial(mlp.batch, sizes=EVEN)),
    "mlp-even": Case("mlp-even", partial(mlp.build, EVEN), partial(mlp.batch, sizes=EVEN)),
    "gpt": Case("gpt", partial(gpt.build, SMALL), partial(gpt.batch, config=SMALL)),
    "gpt-tied": Case("gpt-tied", partial(gpt.build, SMALL_TIED), partial(gpt.batch, config=SMALL_TIED)),
    "cnn": Case("cnn", CNN, _images),
    "llama": Case("llama", _llama, llama.batch, ZOO["llama"].loss),
    "llama-tied": Case("llama-tied", partial(_llama, tied=True), llama.batch, ZOO["llama"].loss),
}
"""The zoo with one layer of each kind, so that many plans of it can be tried, and MLPs that every grid of 8 divides."""


@dataclass(frozen=True)
class Joint:
    """A step: the model, its batch, its annotated graph, and what every node of it computes on one device."""

    name: str
    model: nn.Module
    batch: dict[str, Tensor]
    captured: Captured
    annotated: Annotated
    values: dict[str, Any]

    def copy(self) -> fx.GraphModule:
        """The annotated graph, for a pass that changes it."""
        return copied(self.captured.graph)

    def inputs(self) -> list[Tensor]:
        """The values of the placeholders, in order."""
        return [self.values[node.name] for node in self.captured.graph.graph.nodes if node.op == "placeholder"]

    @property
    def tolerance(self) -> float:
        """Of float64's rounding; where the model itself turns to float32 (Llama's norms do), of that of float32."""
        values = [value for value in self.values.values() if isinstance(value, Tensor)]
        return 1e-5 if any(value.dtype == torch.float32 and value.numel() > 1 for value in values) else 1e-10

    def results(self) -> tuple[list[Any], list[Any]]:
        """The outputs, after the buffers that the step writes, and the gradients (None where there is none)."""
        nodes = self.captured.graph.graph.output_node().args[0]
        assert isinstance(nodes, (list, tuple))
        results = [self.values[node.name] if isinstance(node, fx.Node) else None for node in nodes]
        first = len(results) - len(self.captured.gradients)
        return results[:first], results[first:]


class _Record(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def values(self) -> dict[str, Any]:
        return {node.name: value for node, value in self.env.items()}


@cache
def joint(name: str, size: int = 8, targets: bool = True) -> Joint:
    """The step of a model on a batch of this size; without `targets` its loss is computed outside."""
    case = {**TODAY, **CASES}[name]
    model, batch = case.model(torch.float64), case.batch(0, size, torch.float64)
    if not targets:
        del batch["targets"]
    captured = capture(model, batch)
    annotated = annotate(captured, Options())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    names = {**captured.parameters, **captured.buffers, **captured.inputs}
    generator = torch.Generator().manual_seed(0)
    values: list[Tensor] = []
    for node in captured.graph.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            if node.name in names:
                values.append(tensors[names[node.name]].detach())
            elif value.dim() == 0:
                values.append(torch.ones((), dtype=value.dtype))
            else:
                values.append(torch.randn(value.shape, generator=generator, dtype=value.dtype))
    record = _Record(captured.graph)
    record.run(*values)
    return Joint(name, model, batch, captured, annotated, record.values())
