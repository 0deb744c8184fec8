"""Comparison of the planner's plan with plans of other systems for the same model and memory, printed as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardweave.compiler.api import LazyParallelModule
from shardweave.compiler.baselines import Baseline, all_for
from shardweave.compiler.capture_errors import refuse_wrapped
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model import ClusterLike, Options
from shardweave.ir import InfeasibleError, ParallelError, readable_bytes, readable_seconds
from shardweave.planner import Plan
from shardweave.report import Progress, Report, Reporter

OWN = Baseline("shardweave", "", "the planner's own plan")


@dataclass(frozen=True)
class Entry:
    """A baseline on one model and cluster.

    Parameters
    ----------
    baseline : Baseline
    plan : Plan, optional
        The fastest plan over the numbers of micro-batches; None where no number fits.
    times : mapping of int to float
        Simulated seconds a step of each number of micro-batches that has a plan.
    reason : str
        Why there is no plan.
    """

    baseline: Baseline
    plan: Plan | None
    times: Mapping[int, float]
    reason: str = ""

    def __repr__(self) -> str:
        return f"<Entry {self.baseline}: {self.plan!r}>" if self.plan else f"<Entry {self.baseline}: {self.reason}>"

    @property
    def step_time(self) -> float:
        """Seconds; infinite where there is no plan."""
        return self.plan.step_time if self.plan is not None else float("inf")

    def row(self, own: Entry) -> tuple[str, ...]:
        """The cells of the entry in `Comparison.explain`; `own` is the planner's own plan."""
        name = str(self.baseline)
        if self.plan is None:
            return name, "", "", "", "", "", self.reason
        return (
            name,
            str(self.plan.micro_batches),
            readable_seconds(self.step_time),
            f"{100 * (self.step_time / own.step_time - 1):+.1f} %",
            readable_seconds(self.plan.exposed_communication),
            readable_bytes(self.plan.peak_memory),
            self.baseline.source,
        )


@dataclass(frozen=True)
class Comparison:
    """The planner's own plan and the baselines, the fastest first; it prints as a table.

    Parameters
    ----------
    own : Entry
    baselines : tuple of Entry
    """

    own: Entry
    baselines: tuple[Entry, ...]

    @property
    def best(self) -> Entry | None:
        """The fastest of the baselines; None where none fits."""
        return next((entry for entry in self.baselines if entry.plan is not None), None)

    @property
    def gain(self) -> float:
        """How much longer a step of the best baseline takes, relative to the planner's own; infinite without one."""
        return self.best.step_time / self.own.step_time - 1 if self.best is not None else float("inf")

    def __repr__(self) -> str:
        best = f"; the best one, {self.best.baseline}, takes {100 * self.gain:.1f} % longer" if self.best else ""
        return f"<Comparison of {self.own.plan!r} with {len(self.baselines)} baselines{best}>"

    def explain(self, every: bool = False) -> Report:
        """A table: the planner's own plan, then the fastest setting of each system, or `every` setting."""
        own, best = self.own, self.best
        assert own.plan is not None
        cluster = own.plan.cluster
        title = f"{cluster.name}, {cluster.world_size} devices: {readable_seconds(own.step_time)} a step"
        gained = "no baseline fits" if best is None else f"{100 * self.gain:+.1f} % for {best.baseline}"
        fastest: dict[str, Entry] = {}
        for entry in self.baselines:
            fastest.setdefault(entry.baseline.name, entry)
        shown = self.baselines if every else tuple(fastest.values())
        lines = title, f"the best of {len(self.baselines)} baselines: {gained}"
        columns = ("system", "micro-batches ", "a step ", "longer ", "exposed comm. ", "memory ", "source, or why not")
        return Report(lines, columns, tuple(entry.row(own) for entry in (own, *shown)))

    def __str__(self) -> str:
        return str(self.explain())


def compare(
    model: nn.Module,
    cluster: ClusterLike,
    example_inputs: Any,
    *,
    baselines: Sequence[Baseline] | None = None,
    micro_batches: Sequence[int] | None = None,
    options: Options | None = None,
    progress: Progress | bool | None = None,
) -> Comparison:
    """The gain of the planner's plan over the plans of other systems.

    Each is planned under the same memory limit and simulated, at the number of micro-batches at which it is fastest.

    Parameters
    ----------
    model, cluster, example_inputs, options
        As for `shardweave.plan`. The options of a baseline replace those of `options`.
    baselines : sequence of Baseline, optional
        By default all that the cluster's sizes admit, `baselines.all_for`: on many devices these are a hundred.
    micro_batches : sequence of int, optional
        The numbers to try; by default that of the options. Where these leave it open, the planner's own choice for its
        plan, and for the baselines all powers of two that divide the batch, where the model returns a loss.
    progress : callable or bool, optional
        As for `shardweave.plan`; `Event.planned` is the baseline that is planned now.

    Returns
    -------
    Comparison
        Baselines that do not fit are in it, with the reason.

    Raises
    ------
    InfeasibleError
        The planner itself has no plan that fits.

    Examples
    --------
    >>> import torch
    >>> from shardweave.compiler.baselines import ddp, fsdp
    >>> from shardweave.cost_model import Cluster
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    >>> found = compare(model, Cluster.local(4), torch.randn(32, 64), baselines=[ddp(), fsdp()])
    >>> str(found.best.baseline), found.gain >= 0
    ('DDP', True)
    """
    refuse_wrapped(model, LazyParallelModule)
    with Reporter(progress) as told:
        compiler = Compiler(model, cluster, example_inputs, options, told)
        chosen = all_for(compiler.cluster) if baselines is None else baselines
        return compared(compiler, chosen, micro_batches)


def compared(
    compiler: Compiler,
    baselines: Sequence[Baseline],
    micro_batches: Sequence[int] | None = None,
) -> Comparison:
    """The same as `compare`, for a captured model."""
    counts = tuple(micro_batches or compiler.space.micro_batches)
    entries: list[Entry] = []
    for baseline in (OWN, *baselines):
        compiler.progress.planned = str(baseline)
        is_open = baseline is OWN and not micro_batches  # the planner chooses then
        entries.append(_entry(compiler, baseline, [compiler.options.micro_batches] if is_open else counts))
        if entries[0].plan is None:
            raise InfeasibleError(entries[0].reason)
    own, *others = entries
    return Comparison(own, tuple(sorted(others, key=lambda entry: entry.step_time)))


def _entry(compiler: Compiler, baseline: Baseline, counts: Iterable[int | None]) -> Entry:
    options = compiler.options if baseline is OWN else baseline.over(compiler.options)
    plans: list[Plan] = []
    reason = ""
    for count in counts:
        try:
            plans.append(compiler.with_(options=replace(options, micro_batches=count)).plan())
        except ParallelError as error:
            # A later count often fails since the batch does not divide; the first reason says more.
            reason = str(error) if not reason or isinstance(error, InfeasibleError) else reason
    best = min(plans, key=lambda plan: plan.step_time, default=None)
    return Entry(baseline, best, {plan.micro_batches: plan.step_time for plan in plans}, "" if plans else reason)
