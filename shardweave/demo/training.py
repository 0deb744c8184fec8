"""The same training loop on one device and, with a compiled step, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import shardweave as sw
from shardweave.demo.model import GPT, GPTConfig
from shardweave.demo.text import Text
from shardweave.report import source


@dataclass(frozen=True)
class Recipe:
    """What is trained on what and for how long: the same on one device and on many.

    Parameters
    ----------
    model : GPTConfig
        The model's sizes.
    steps : int
        Optimizer steps.
    batch : int
        Sequences in the global batch.
    learning_rate : float
        Of AdamW, after the warm-up.
    warm_up : int
        Steps over which the learning rate rises. Without it AdamW's first steps are the gradients' signs, which
        turns the last bit of a gradient near zero into a whole step.
    seed : int
        Of the model's first parameters.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    steps: int = 30
    batch: int = 16
    learning_rate: float = 1e-3
    warm_up: int = 10
    seed: int = 0

    def build(self) -> GPT:
        """The model with its first parameters, the same on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return GPT(self.model)

    def text(self) -> Text:
        return Text.of_standard_library(self.batch, self.model.context)


@dataclass(frozen=True)
class Run:
    """What came of a training: the loss of every step, and the median of a step's measured seconds."""

    losses: tuple[float, ...]
    step_seconds: float


def train(recipe: Recipe, model: nn.Module, step: Callable[..., Any], title: str, show: bool = True) -> Run:
    """Train `model` with AdamW; `step` maps tokens and targets to the loss.

    This is the whole loop: nothing in it depends on whether `step` runs on one device or on many.
    """
    text = recipe.text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / recipe.warm_up))
    losses, seconds = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, TextColumn("loss {task.fields[loss]}")) if show else None
    with progress or nullcontext():
        task = progress.add_task(title, total=recipe.steps, loss="-") if progress else None
        for index in range(recipe.steps):
            tokens, targets = text.draw(index)
            started = time.perf_counter()
            loss: Tensor = step(tokens, targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            schedule.step()
            seconds.append(time.perf_counter() - started)
            losses.append(loss.item())
            if progress and task is not None:
                progress.update(task, advance=1, loss=f"{losses[-1]:.3f}")
                if not progress.console.is_terminal and (index + 1) % 10 == 0:
                    progress.console.print(f"{title}: step {index + 1}, loss {losses[-1]:.4f}")
    return Run(tuple(losses), sorted(seconds)[len(seconds) // 2])


def train_single(recipe: Recipe) -> Run:
    """Train on this process alone, the model as it is."""
    model = recipe.build()
    return train(recipe, model, model, "one device")


def train_on_rank(recipe: Recipe, plan_path: str, graphs_path: str) -> Run:
    """Train on one rank of the running world; rank 0 writes the graphs and shows progress."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plan = sw.Plan.load(plan_path)
    parallel = sw.compile_parallel(recipe.build(), plan.cluster, recipe.text().draw(0), plan=plan)
    assert isinstance(parallel, sw.ParallelModule)  # for the type checker: inputs were given, so it is compiled
    if rank == 0:
        write_graphs(parallel.graphs, Path(graphs_path))
    return train(recipe, parallel, parallel, f"{ranks} ranks", show=rank == 0)


def write_graphs(graphs: dict[str, torch.fx.GraphModule], folder: Path) -> None:
    """Write the graph after each stage as Python text, numbered in the order of the stages."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, (stage, graph) in enumerate(graphs.items()):
        (folder / f"{index:02}_{stage}.py").write_text(source(graph))
