"""Baselines, the strategies of other systems as plans of the same compiler (``sw.baselines``), and their comparison.

A baseline is a set of options that leaves the planner no choice, or only the choices of that system. The compiler
lowers it as any plan, so that gathers are prefetched and reductions overlap with the backward. `shardweave.compare`
compares strategies in this way, not programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any, Literal

from torch import nn

from shardweave.compiler.api import LazyParallelModule
from shardweave.compiler.api import plan as make_plan
from shardweave.compiler.capture_errors import refuse_wrapped
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model import Cluster, ClusterLike, Options
from shardweave.ir import Ablation, InfeasibleError, ParallelError, PlanError, brief, readable_bytes, readable_seconds
from shardweave.planner import Plan
from shardweave.report import Progress, Report, Reporter

_PLAIN = {"sub_batches": 1, "buckets": False, "keep_gathered": False}
"""Options that switch off overlap which a system does not have."""


@dataclass(frozen=True)
class Baseline:
    """A system in one setting, as options of the compiler.

    Parameters
    ----------
    name : str
        The system.
    setting : str
        Distinguishes baselines of the same system.
    source : str
        Where the system is described.
    options : mapping
        The fields of `Options` that the system decides; the user sets the others.

    Examples
    --------
    >>> tensor = megatron(4, zero=1)
    >>> print(tensor, dict(tensor.options))
    Megatron-LM tensor 4, sequence parallel, ZeRO-1 {'force': {'*': 'tensor:4+zero1'}, 'sequence_parallel': True}
    >>> tensor.over(Options(precision="bf16")).force
    {'*': 'tensor:4+zero1'}
    """

    name: str
    setting: str
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return brief(self)

    def __str__(self) -> str:
        return f"{self.name} {self.setting}".strip()

    def over(self, options: Options | None = None) -> Options:
        """The user's options with those of the system. Overlap that the system does not have is switched off."""
        return replace(options or Options(), **{**_PLAIN, **self.options})

    def plan(
        self,
        model: nn.Module,
        cluster: ClusterLike,
        example_inputs: Any,
        *,
        options: Options | None = None,
        progress: Progress | bool | None = None,
    ) -> Plan:
        """The plan of the system; parameters as for `shardweave.plan`.

        Raises
        ------
        PlanError
            The model, its batch or the cluster do not admit it: the error names the size that does not divide.
        """
        return make_plan(model, cluster, example_inputs, options=self.over(options), progress=progress)


def ddp() -> Baseline:
    """DistributedDataParallel: every device has the whole model."""
    return _data("DDP", "", "arXiv 2006.15704", "dp")


def zero(stage: int) -> Baseline:
    """ZeRO: optimizer states (1), gradients too (2), parameters too (3) sharded over all devices."""
    if stage not in (1, 2, 3):
        raise PlanError(f"ZeRO has the stages 1, 2 and 3, got {stage!r}")
    return _data("ZeRO", f"stage {stage}", "arXiv 1910.02054", f"zero{stage}")


def fsdp(reshard: bool = True) -> Baseline:
    """FSDP with all devices in one group.

    Parameters
    ----------
    reshard : bool
        Whether a parameter is gathered again for the backward (``reshard_after_forward``).
    """
    setting = "" if reshard else "gathered once"
    return _data("FSDP", setting, "arXiv 2304.11277", "zero3", keep_gathered=not reshard)


def hsdp(degree: int | None = None) -> Baseline:
    """FSDP's hybrid sharding: states are sharded over `degree` devices (by default a node) and replicated."""
    return _grouped("FSDP", "hybrid", "arXiv 2304.11277", "hsdp", degree)


def mics(degree: int | None = None) -> Baseline:
    """MiCS: states are sharded over a group of `degree` devices, by default a node."""
    return _grouped("MiCS", "groups", "arXiv 2205.00119", "mics", degree)


def hpz(degree: int | None = None) -> Baseline:
    """ZeRO++'s secondary partition: parameters are gathered from `degree` devices, by default a node."""
    return _grouped("ZeRO++", "secondary partition", "arXiv 2306.10209", "hpz", degree)


def megatron(degree: int, sequence_parallel: bool = True, zero: Literal[0, 1, 2, 3] = 0) -> Baseline:
    """Megatron-LM: tensor parallelism, columns and rows alternating, with data parallelism over the other devices.

    Parameters
    ----------
    degree : int
        The degree of tensor parallelism.
    sequence_parallel : bool
        Whether the sums between layers are scattered (arXiv 2205.05198).
    zero : int
        The stage of ZeRO over the data-parallel devices; 1 is its distributed optimizer.
    """
    setting = f"tensor {degree}{', sequence parallel' * sequence_parallel}{f', ZeRO-{zero}' if zero else ''}"
    word = f"tensor:{degree}{f'+zero{zero}' if zero else ''}"
    return _tensor("Megatron-LM", setting, "arXiv 1909.08053", word, sequence_parallel=sequence_parallel)


def axonn(x: int, y: int, z: int, data: int) -> Baseline:
    """AxoNN on a grid: columns over x and rows over y, alternating; weights are sharded over z."""
    sizes = f"{x}x{y}x{z}x{data}"
    return _tensor("AxoNN", sizes, "arXiv 2305.13525", f"tensor:{sizes}")


def oases(degree: int) -> Baseline:
    """Oases with one degree in all layers: two sub-batches, fine recomputation, overlap across passes."""
    overlap = {"sub_batches": 2, "recompute": "fine"}
    return _tensor("Oases", f"tensor {degree}", "arXiv 2305.16121", f"tensor:{degree}", **overlap)


def merak(degree: int) -> Baseline:
    """Merak's tensor parallelism: two sub-batches, full recomputation, overlap inside of a pass only."""
    overlap = {"sub_batches": 2, "recompute": "full", "ablation": Ablation(cross_pass=False)}
    return _tensor("Merak", f"tensor {degree}", "arXiv 2206.04959", f"tensor:{degree}", **overlap)


def osdp(slices: int = 1) -> Baseline:
    """OSDP: for each op the planner chooses between DP and ZDP.

    Parameters
    ----------
    slices : int
        The number of slices of an op, of which one is gathered at a time; 1 is OSDP without operator splitting.
    """
    setting = f"{slices} slices" if slices > 1 else ""
    return Baseline("OSDP", setting, "arXiv 2209.13258", {"force": {"*": ("dp", "zdp")}, "operator_slices": slices})


def all_for(cluster: ClusterLike) -> tuple[Baseline, ...]:
    """All baselines that the sizes of a cluster admit, equal ones once.

    Examples
    --------
    >>> [str(baseline) for baseline in all_for(Cluster.local(2)) if baseline.name != "Megatron-LM"]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['DDP', 'ZeRO stage 1', 'ZeRO stage 2', 'FSDP', 'FSDP gathered once', 'AxoNN 1x2x1x1', 'Oases tensor 2',
      'Merak tensor 2', 'OSDP', 'OSDP 4 slices']
    """
    cluster = Cluster.of(cluster)
    axes = sorted(cluster.mesh().axes, key=lambda axis: axis.stride)
    sizes = list(accumulate((axis.size for axis in axes), mul))
    node, world = cluster.levels[0].size, cluster.world_size
    found = [ddp(), zero(1), zero(2), fsdp(), fsdp(reshard=False)]
    found += [hsdp(), hpz()] if 1 < node < world else []
    found += [mics(size) for size in sizes if size not in (node, world)]
    for t in sizes:  # without data parallelism there is nothing that ZeRO could shard over
        stages: tuple[Literal[0, 1], ...] = (0, 1) if world > t else (0,)
        found += [megatron(t, parallel, zero) for parallel in (False, True) for zero in stages]
    found += [axonn(*grid) for grid in _grids([1, *sizes])]
    found += [oases(t) for t in sizes] + [merak(t) for t in sizes]
    return (*found, osdp(), osdp(slices=4))


def _grids(sizes: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """All splits of the devices into x, y, z and data, except those that equal a setting of Megatron-LM or MiCS."""
    for first, x in enumerate(sizes):
        for second, xy in enumerate(sizes[first:], first):
            for xyz in sizes[second:]:
                if xy > 1 and xyz > x:
                    yield x, xy // x, xyz // xy, sizes[-1] // xyz


def _data(name: str, setting: str, source: str, word: str, **options: Any) -> Baseline:
    return Baseline(name, setting, source, {"force": {"*": word}, **options})


def _tensor(name: str, setting: str, source: str, word: str, **options: Any) -> Baseline:
    return Baseline(name, setting, source, {"force": {"*": word}, "sequence_parallel": False, **options})


def _grouped(name: str, setting: str, source: str, word: str, degree: int | None) -> Baseline:
    setting = f"{setting} of {'a node' if degree is None else degree}"
    return _data(name, setting, source, word if degree is None else f"{word}:{degree}")


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
