"""The main job, from planning to the comparison with one device."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

import shardweave as sw
from shardweave.demo.figure import plot_losses
from shardweave.demo.model import GPT
from shardweave.demo.training import Recipe, Run, train_on_rank, train_single
from shardweave.ir import ParallelError, readable_bytes
from shardweave.report import Progress

TOLERANCE = 1e-5
"""The largest relative difference of a loss (float32) between one device and many."""


@dataclass(frozen=True)
class Result:
    """What the demo found.

    Parameters
    ----------
    plan : Plan
        The plan under the memory limit.
    data_parallel : Plan
        The plan that the limit rules out.
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
    # In a rank of its own, so that it has as many threads as each of those had.
    single = sw.launch(train_single, nprocs=1, args=(recipe,))[0]
    result = Result(plan, data_parallel, parallel, single)
    plot_losses(parallel.losses, single.losses, f"{ranks} ranks", out / "losses.png")

    console.rule("Compare")
    console.print(f"loss: {parallel.losses[0]:.3f} in the first step, {parallel.losses[-1]:.3f} in step {recipe.steps}")
    console.print(f"a step: {parallel.step_seconds:.2f} s on {ranks} ranks, {single.step_seconds:.2f} s on one device")
    console.print(f"largest relative difference of the losses: {result.difference:.1e} (at most {TOLERANCE:.0e})")
    console.print(f"In {out}/: plan.json, graphs/*.py, trace.json (opens in ui.perfetto.dev), timeline.png, losses.png")
    if not result.difference <= TOLERANCE:
        raise ParallelError(
            f"the losses on {ranks} ranks differ from one device's by {result.difference:.1e} relative, "
            f"expected at most {TOLERANCE:.0e}: this is a bug in shardweave, please report it with {out}/graphs"
        )
    return result
