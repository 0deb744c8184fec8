"""Small training steps, clusters and options, drawn at random: what the laws of planning are tested on."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.demo.model import GPT, GPTConfig
from tests.planner.planners import Planner

PRESETS = ("rtx3090-pcie", "rtx3090-nvlink", "dgx-a100", "dgx-h100", "perlmutter")


class Gated(nn.Module):
    """A gated block of products, as in a Llama."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Loss(nn.Module):
    """The mean square of what some layers return, one after another."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def drawn_model(draw: random.Random) -> tuple[nn.Module, Any]:
    """A model on the meta device and its inputs."""
    kind, batch = draw.choice(["gpt", "products", "gated", "images"]), draw.choice([16, 32, 64, 128])
    with torch.device("meta"):
        if kind == "gpt":
            heads, context, width = draw.choice([4, 8, 12]), draw.choice([64, 256, 1024]), draw.choice([32, 64, 128])
            sizes = draw.choice([512, 8192, 50304]), context, draw.randint(1, 3), heads, heads * width
            tokens = torch.zeros(batch, context, dtype=torch.long)
            return GPT(GPTConfig(*sizes)), (tokens, tokens)
        if kind == "products":
            widths = [draw.choice([256, 512, 768, 1024, 2048, 4096, 8192]) for _ in range(draw.randint(2, 5))]
            layers = [layer for sizes in zip(widths, widths[1:]) for layer in (nn.Linear(*sizes), nn.GELU())]
            return Loss(*layers), torch.zeros(batch * draw.choice([1, 16, 128]), widths[0])
        if kind == "gated":
            width, length = draw.choice([512, 1024, 2048]), draw.choice([64, 512])
            hidden = draw.choice([2, 3, 4]) * width
            return Loss(*(Gated(width, hidden) for _ in range(draw.randint(1, 6)))), torch.zeros(batch, length, width)
        channels = [3, *(draw.choice([32, 64, 128, 256]) for _ in range(draw.randint(2, 4)))]
        layers = [layer for sizes in zip(channels, channels[1:])
                  for layer in (nn.Conv2d(*sizes, 3, padding=1), nn.ReLU())]  # fmt: skip
        return Loss(*layers), torch.zeros(batch, 3, 32, 32)


def drawn_cluster(draw: random.Random) -> sw.Cluster:
    """One or two nodes of a preset, each of its links faster or slower by up to eight times."""
    cluster = sw.Cluster.preset(draw.choice(PRESETS), nodes=draw.choice([1, 2]))
    return scaled(cluster, [2 ** draw.uniform(-3, 3) for _ in cluster.levels])


def scaled(cluster: sw.Cluster, factors: Sequence[float]) -> sw.Cluster:
    """The cluster with the bandwidth of each level so many times as large."""
    levels = [replace(level, bandwidth=level.bandwidth * by) for level, by in zip(cluster.levels, factors, strict=True)]
    return replace(cluster, levels=tuple(levels))


def drawn_options(draw: random.Random, cluster: sw.Cluster, number: int) -> dict[str, Any]:
    """So many options that leave less to the planner."""
    node = cluster.levels[0].size
    choices: dict[str, Sequence[Any]] = {
        "force": [
            {"*": "dp"},
            {"*": "zero1"},
            {"*": "zero2"},
            {"*": "zero3"},
            {"*": f"hsdp:{node}"},
            {"*": f"tensor:{node}"},
            {"*": ("dp", "zero3")},
            {"*": ("dp", "zero1", "zero2", "zero3")},
        ],
        "recompute": ["none", "full", "fine"],
        "keep_gathered": [True, False],
        "sub_batches": [1, 2],
        "buckets": [True, False, "small"],
        "micro_batches": [1, 2, 4],
        "operator_slices": [1, 2],
        "sequence_parallel": [True, False],
    }
    return {name: draw.choice(choices[name]) for name in draw.sample(sorted(choices), number)}


@dataclass(frozen=True)
class Drawn:
    """A step on a cluster, and options.

    Parameters
    ----------
    planner : Planner
        Of the step.
    cluster : Cluster
    options, fewer : mapping of str to object
        Options of `plan`; and the same with others that leave less to the planner.
    memory_part : float, optional
        The part of the memory of a plan that there is; None for all that the devices have.
    factors : tuple of float
        By how much each level's bandwidth is larger on a faster cluster.

    Examples
    --------
    >>> drawn = Drawn.of(7)
    >>> drawn.options.items() <= drawn.fewer.items(), len(drawn.factors) == len(drawn.cluster.levels)
    (True, True)
    """

    planner: Planner
    cluster: sw.Cluster
    options: Mapping[str, Any]
    fewer: Mapping[str, Any]
    memory_part: float | None
    factors: tuple[float, ...]

    @staticmethod
    def of(seed: int) -> Drawn:
        """What is drawn for a seed."""
        draw = random.Random(seed)
        model, inputs = drawn_model(draw)
        cluster = drawn_cluster(draw)
        options = drawn_options(draw, cluster, draw.choice([0, 0, 0, 1, 2]))
        if draw.random() < 0.75:  # to plan for several takes as many times as long
            options["micro_batches"] = 1
        fewer = drawn_options(draw, cluster, draw.choice([1, 1, 2]))
        part = draw.uniform(0.75, 1.0) if draw.random() < 0.5 else None
        factors = tuple(draw.choice([1.0, 1.5, 4.0]) for _ in cluster.levels)
        return Drawn(Planner(model, cluster, inputs), cluster, options, {**fewer, **options}, part, factors)
