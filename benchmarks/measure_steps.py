"""Predicted against measured: many forced plans of two models on local ranks, their step times.

python benchmarks/measure_steps.py [--ranks 4] [--plans 24] [--rounds 21] [--json FILE]

Every plan is compiled and trained. The steps of all plans are timed in turn, round after round, so that what else the
machine does falls on all of them alike; a plan's time is the median of its rounds. The cluster is profiled first: its
collectives, its device, and each distinct op of the generated graphs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model.device_profile import profiled_ops
from shardweave.cost_model.options import Options
from shardweave.demo.model import GPT, GPTConfig
from shardweave.ir import Mesh, Strategy
from shardweave.ir.formatting import readable_seconds
from shardweave.planner.problem.space import legal
from shardweave.sharding.parallel_ops import Op
from tests.compiler.training import Forced, most


def any_of(seed: int) -> Forced:
    """Any legal strategy, the same for all ops of one kind in a network's layers."""

    def force(ops: Sequence[Op], mesh: Mesh) -> dict[str, Strategy]:
        rng = random.Random(seed)
        chosen: dict[str, Strategy] = {}
        for op in ops:
            kind = "".join(character for character in op.name if not character.isdigit())
            options = legal(op, mesh)
            if kind not in chosen or chosen[kind] not in options:
                chosen[kind] = rng.choice(options)
            chosen[op.name] = chosen[kind]
        return {op.name: chosen[op.name] for op in ops}

    return force


NAMED: dict[str, Forced] = {
    "dp": most(lambda s: (s.grid.data, -s.rest)),
    "zdp": most(lambda s: (s.grid.data, s.rest)),
    "columns": most(lambda s: (s.grid.x, -s.rest)),
    "rows": most(lambda s: (s.grid.y, -s.rest)),
    "columns and data": most(lambda s: (s.grid.x == 2, s.grid.y == 1, -s.rest)),
    "rows and data": most(lambda s: (s.grid.y == 2, s.grid.x == 1, -s.rest)),
    "2d": most(lambda s: (s.grid.x == 2, s.grid.y == 2, -s.rest)),
    "columns and sharded data": most(lambda s: (s.grid.x == 2, s.grid.y == 1, s.rest)),
}


def plans(count: int) -> dict[str, Forced]:
    """The named ones, and random ones."""
    return {**NAMED, **{f"random {seed}": any_of(seed) for seed in range(count - len(NAMED))}}


def gpt() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    config = GPTConfig(layers=2, width=512, heads=8, context=128)
    tokens = torch.randint(0, config.vocabulary, (16, config.context))
    return GPT(config), (tokens, tokens)


class Classifier(nn.Module):
    """Convolutions, then a perceptron: other ops, other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(4, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()
        )
        self.perceptron = nn.Sequential(nn.Linear(64 * 64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
        self.head = nn.Linear(512, 16)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        hidden = self.perceptron(self.convolutions(images).flatten(1))
        return nn.functional.cross_entropy(self.head(hidden), labels)


def classifier() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Classifier(), (torch.randn(128, 4, 32, 32), torch.randint(0, 16, (128,)))


MODELS = {"gpt": gpt, "classifier": classifier}


@dataclass(frozen=True)
class Row:
    """One plan of one model."""

    model: str
    plan: str
    predicted_seconds: float
    seconds: float


def measure(names: Sequence[str], count: int, rounds: int) -> list[Row]:
    """What each rank does; every rank returns the same rows but for its clock."""
    warnings.simplefilter("ignore")
    cluster = sw.Cluster.detect(profile="full")
    return [row for name in names for row in _measure(name, cluster, count, rounds)]


def _measure(name: str, cluster: sw.Cluster, count: int, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    compiler = Compiler(model, cluster, batch, None, None)
    compiled: dict[str, sw.ParallelModule] = {}
    for label, force in plans(count).items():
        compiler.options = Options(force=force(compiler.annotated.ops, cluster.mesh()))
        compiled[label] = compiler.compile(model, compiler.plan())
    lowered = {label: compiler.lower(parallel.plan) for label, parallel in compiled.items()}
    graphs = [graph for one in lowered.values() for graph in (one.step.forward, one.step.backward) if graph is not None]
    compiler.cluster = profiled_ops(cluster, graphs)
    predicted = {label: compiler.lowering.timeline(one) for label, one in lowered.items()}
    steps = {label: _stepper(parallel, batch) for label, parallel in compiled.items()}
    seconds: dict[str, list[float]] = {label: [] for label in steps}
    for turn in range(rounds + 1):
        for label, step in steps.items():
            dist.barrier()
            begun = time.perf_counter()
            step()
            dist.barrier()
            if turn:  # the first one warms up
                seconds[label].append(time.perf_counter() - begun)
    return [Row(name, label, predicted[label].step_time, statistics.median(own)) for label, own in seconds.items()]


def _stepper(parallel: Any, batch: tuple[Tensor, ...]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parallel.parameters())

    def step() -> None:
        parallel(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of ranks (no ties: these are measured numbers).

    >>> spearman([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    ranks = [np.argsort(np.argsort(np.asarray(values))) for values in (first, second)]
    return round(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), 12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--plans", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = sw.launch(measure, nprocs=given.ranks, args=(given.models, given.plans, given.rounds), timeout=3600)[0]
    for name in given.models:
        own = sorted((row for row in rows if row.model == name), key=lambda row: row.seconds)
        table = Table("plan", "predicted", "measured", title=name)
        for row in own:
            table.add_row(row.plan, readable_seconds(row.predicted_seconds), readable_seconds(row.seconds))
        Console().print(table)
        rank = spearman([row.predicted_seconds for row in own], [row.seconds for row in own])
        print(f"{name}: Spearman's correlation of {len(own)} step times {rank:.3f}")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
