"""The main job: train a GPT on real text with the same loop on one device and on all ranks, and compare the losses."""

from __future__ import annotations

import shutil
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich import progress as bars
from rich.console import Console
from torch import Tensor, nn

import shardweave as sw
from shardweave.demo.model import GPT, GPTConfig
from shardweave.ir import readable_bytes
from shardweave.report import Progress, source

TOLERANCE = 1e-5
"""The largest relative difference between the losses (float32) on one device and on many."""


@dataclass(frozen=True)
class Text:
    """A text as byte tokens, and its random batches.

    Parameters
    ----------
    tokens : Tensor
        The text's bytes, one dimension of ``torch.long``.
    batch : int
        Sequences in a batch.
    context : int
        Tokens in a sequence.

    Examples
    --------
    >>> text = Text(torch.arange(100), batch=2, context=8)
    >>> tokens, targets = text.draw(step=0)
    >>> bool((targets == tokens + 1).all())
    True
    """

    tokens: Tensor
    batch: int
    context: int

    @classmethod
    def of_standard_library(cls, batch: int, context: int, max_bytes: int = 4_000_000) -> Text:
        """The source of the top-level modules of Python's standard library, in the order of their names.

        Raises
        ------
        InputError
            If this Python is installed without the source of its library.
        """
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:max_bytes]
        if len(text) <= context + 1:
            raise sw.InputError(
                f"the standard library at {folder} has {len(text)} bytes of Python source, the demo needs more than "
                f"{context + 1}: run it with a Python that is installed with its sources"
            )
        return cls(torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), batch, context)

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each (batch, context), of step number `step`: the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.tokens) - self.context, (self.batch,), generator=generator).tolist()
        rows = torch.stack([self.tokens[start : start + self.context + 1] for start in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@dataclass(frozen=True)
class Recipe:
    """The model and the training, the same on one device and on many.

    Parameters
    ----------
    model : GPTConfig
        The sizes of the model.
    steps : int
        The number of optimizer steps.
    batch : int
        The number of sequences in the global batch.
    learning_rate : float
        The learning rate of AdamW after the warm-up.
    warm_up : int
        The number of steps over which the learning rate rises. Without warm-up AdamW's first steps have the size of the
        learning rate whatever the gradient, so that rounding of a gradient near zero changes a whole step.
    seed : int
        The seed of the initial parameters.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    steps: int = 30
    batch: int = 16
    learning_rate: float = 1e-3
    warm_up: int = 10
    seed: int = 0

    def build(self) -> GPT:
        """The model with its initial parameters, the same on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return GPT(self.model)

    def text(self) -> Text:
        return Text.of_standard_library(self.batch, self.model.context)


@dataclass(frozen=True)
class Run:
    """The result of a training: the loss of every step, and the median seconds of a step."""

    losses: tuple[float, ...]
    step_seconds: float


def train(recipe: Recipe, model: nn.Module, step: Callable[..., Any], title: str, show: bool = True) -> Run:
    """Train `model` with AdamW; `step` maps tokens and targets to the loss.

    Nothing in this loop depends on whether `step` runs on one device or on many.
    """
    text = recipe.text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / recipe.warm_up))
    losses, seconds = [], []
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("loss {task.fields[loss]}"),
    )
    progress = bars.Progress(*columns) if show else None
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
    """Train the unchanged model in this process alone."""
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


@dataclass(frozen=True)
class Result:
    """The plans and trainings of the demo.

    Parameters
    ----------
    plan : Plan
        The plan under the memory limit.
    data_parallel : Plan
        The plan of data parallelism, which does not fit into the limit.
    parallel, single : Run
        The trainings on all ranks and on one device.
    """

    plan: sw.Plan
    data_parallel: sw.Plan
    parallel: Run
    single: Run

    @property
    def difference(self) -> float:
        """The largest relative difference between the two loss curves."""
        pairs = zip(self.parallel.losses, self.single.losses, strict=True)
        return max(abs(a - b) / abs(b) for a, b in pairs)


def make_plans(
    recipe: Recipe, ranks: int, memory_share: float = 0.6, progress: Progress | bool | None = None
) -> tuple[sw.Plan, sw.Plan]:
    """The plan of plain data parallelism, and the best one under `memory_share` of its peak memory."""
    with torch.device("meta"):  # planning needs shapes alone
        model = GPT(recipe.model)
    cluster = sw.Cluster.local(ranks)
    batch = recipe.text().draw(0)
    everywhere = sw.Options(force={"*": "dp"})
    data_parallel = sw.plan(model, cluster, batch, options=everywhere, progress=progress)
    limited = sw.Options(memory_limit=int(memory_share * data_parallel.peak_memory))
    return data_parallel, sw.plan(model, cluster, batch, options=limited, progress=progress)


def run_demo(recipe: Recipe, ranks: int, out: Path, console: Console) -> Result:
    """Plan, train on `ranks` local ranks, train the same on one device, compare; leave everything in `out`.

    Raises
    ------
    ParallelError
        If the losses differ by more than `TOLERANCE`.
    """
    out.mkdir(parents=True, exist_ok=True)
    graphs = out / "graphs"
    shutil.rmtree(graphs, ignore_errors=True)  # an earlier run may have had other stages

    count = sum(p.numel() for p in recipe.build().parameters())
    console.rule("Plan")
    sizes = f"{recipe.batch} sequences of {recipe.model.context} bytes a step"
    console.print(f"A byte-level GPT of {count / 1e6:.1f} M parameters on {ranks} ranks, {sizes}.")
    with console.status("planning") as status:
        data_parallel, plan = make_plans(recipe, ranks, progress=lambda stage: status.update(f"planning: {stage}"))
    console.print(
        f"Plain data parallelism would take {readable_bytes(data_parallel.peak_memory)} a device; "
        f"the limit is {readable_bytes(plan.memory_limit)}, the plan takes {readable_bytes(plan.peak_memory)}."
    )
    console.print(plan.explain())
    plan.save(out / "plan.json")
    timeline = plan.timeline()
    timeline.save_trace(out / "trace.json")
    timeline.plot(out / "timeline.png", memory_limit=plan.memory_limit)

    console.rule("Train")
    arguments = (recipe, str(out / "plan.json"), str(graphs))
    parallel = sw.launch(train_on_rank, nprocs=ranks, args=arguments)[0]
    # In one launched rank, so that it has as many threads as each rank above.
    single = sw.launch(train_single, nprocs=1, args=(recipe,))[0]
    result = Result(plan, data_parallel, parallel, single)
    plot_losses(parallel.losses, single.losses, f"{ranks} ranks", out / "losses.png")

    console.rule("Compare")
    console.print(f"loss: {parallel.losses[0]:.3f} in the first step, {parallel.losses[-1]:.3f} in step {recipe.steps}")
    console.print(f"a step: {parallel.step_seconds:.2f} s on {ranks} ranks, {single.step_seconds:.2f} s on one device")
    console.print(f"largest relative difference of the losses: {result.difference:.1e} (at most {TOLERANCE:.0e})")
    console.print(f"In {out}/: plan.json, graphs/*.py, trace.json (opens in ui.perfetto.dev), timeline.png, losses.png")
    if not result.difference <= TOLERANCE:
        raise sw.ParallelError(
            f"the losses on {ranks} ranks differ from one device's by {result.difference:.1e} relative, "
            f"expected at most {TOLERANCE:.0e}: this is a bug in shardweave, please report it with {out}/graphs"
        )
    return result


def plot_losses(parallel: Sequence[float], single: Sequence[float], label: str, path: Path | None = None) -> Figure:
    """Plot the losses of a parallel and a single-device training, and below them their relative difference.

    Parameters
    ----------
    parallel, single : sequence of float
        The loss of every step.
    label : str
        The label of the parallel curve.
    path : Path, optional
        Where to save the figure.

    Examples
    --------
    >>> len(plot_losses([2.0, 1.0], [2.0, 1.0], "4 ranks").axes)
    2
    """
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    steps = range(1, len(single) + 1)
    above.plot(steps, single, color="#b0b7c3", linewidth=5, label="one device")
    above.plot(steps, parallel, color="#1f5fa8", linewidth=1.5, marker="o", markersize=3, label=label)
    above.set_ylabel("loss (nats per byte)")
    above.legend(frameon=False)
    # The logarithmic axis shows a difference of 0 as its smallest value.
    below.semilogy(steps, [max(abs(a - b) / abs(b), 1e-9) for a, b in zip(parallel, single)], color="#c2571a")
    below.set_ylabel("relative\ndifference")
    below.set_xlabel("step")
    below.set_ylim(1e-9, 1e-4)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
