"""The front door: `plan` and `compile_parallel`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any, overload

import torch.distributed as dist
from torch import nn

from shardweave.compiler.capture_errors import defects_named, refuse_wrapped
from shardweave.compiler.compiler import Compiler
from shardweave.compiler.sweep import Sweep, What, batches
from shardweave.cost_model import Cluster, ClusterLike, Options
from shardweave.ir import ParallelError, PlanError
from shardweave.planner import Plan
from shardweave.report import Progress, Reporter
from shardweave.runtime import Batch, ParallelModule


@overload
def plan(
    model: nn.Module,
    cluster: ClusterLike,
    example_inputs: Any,
    *,
    options: Options | None = None,
    progress: Progress | bool | None = None,
    sweep: None = None,
) -> Plan:
    """One plan."""


@overload
def plan(
    model: nn.Module,
    cluster: ClusterLike,
    example_inputs: Any,
    *,
    options: Options | None = None,
    progress: Progress | bool | None = None,
    sweep: What,
) -> Sweep:
    """The plans of a sweep."""


def plan(
    model: nn.Module,
    cluster: ClusterLike,
    example_inputs: Any,
    *,
    options: Options | None = None,
    progress: Progress | bool | None = None,
    sweep: What | None = None,
) -> Plan | Sweep:
    """A fast plan to train `model` on `cluster` under a memory limit: the fastest that is found.

    An integer program chooses, the simulator checks. No GPU, no process group and no memory for the model are needed.

    Parameters
    ----------
    model : nn.Module
        May lie on the meta device.
    cluster : Cluster, str or path
        A cluster, a preset's name (``"dgx-a100"``) or the path of a cluster file.
    example_inputs : tensor, tuple, dict or (tuple, dict)
        The global batch of one step; only shapes and dtypes matter. Where the batch size is left open (``sweep``), a
        function from it to a batch.
    options : Options, optional
    progress : callable or bool, optional
        Told each `shardweave.report.Event`: the stage, the best step so far, the program's bound, the seconds left.
        By default a live line shows them on a terminal; elsewhere a line comes every few seconds, through the logger
        ``"shardweave"`` (INFO) where logging is configured, else on stderr. With False nothing is shown.
    sweep : "memory", "batch", or sequence of memory limits or of clusters, optional
        Plan again and again: from what the fastest plan needs down to the smallest memory that does, in batches of more
        and more samples, under each of these memory limits (as in `Options`), or on each of these clusters.

    Returns
    -------
    Plan or Sweep
        Its figures are those of the simulated step; its `status`, `bound` and `gap` are about the integer program and
        its own count of seconds (see `Plan`). Of a sweep all plans, with the Pareto curve of memory against time and
        the fastest; of one over batch sizes the one of which a sample takes the least time (OSDP, arXiv 2209.13258,
        Algorithm 1), in one micro-batch unless the options say otherwise.

    Raises
    ------
    CaptureError, RuleError
        The model cannot be captured, is compiled, wrapped or sharded already, or has an op without a rule.
    InfeasibleError
        Nothing fits into the memory limit: with the smallest one that would do.
    InternalError
        A defect of shardweave; what to try meanwhile is in the message.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    >>> found = plan(model, Cluster.local(4), torch.randn(32, 64))
    >>> found.status, sorted(found.choices)
    ('optimal', ['0', '2'])
    >>> found = plan(model, Cluster.local(4), lambda size: torch.randn(size, 64), sweep="batch")
    >>> found.best.tokens == found.batch >= 4
    True
    """
    refuse_wrapped(model, LazyParallelModule)
    if (sweep == "batch") != callable(example_inputs):
        raise PlanError(
            f"a batch size that is left open is sweep='batch' with a function from it to a batch, got sweep={sweep!r} "
            f"with {type(example_inputs).__name__}: for example example_inputs=lambda size: torch.zeros(size, 64)"
        )
    with Reporter(progress) as told, defects_named(model):
        if sweep == "batch":
            options = options or Options()
            one = replace(options, micro_batches=options.micro_batch_count)
            machine = Cluster.of(cluster)

            def planned(size: int) -> Plan:
                told.planned = f"batch {size}"
                return Compiler(model, machine, example_inputs(size), one, told).plan()

            return batches(machine, one.limit(machine), planned)
        compiler = Compiler(model, cluster, example_inputs, options, told)
        return compiler.plan(weigh=True) if sweep is None else compiler.sweep(sweep)


def compile_parallel(
    model: nn.Module,
    cluster: ClusterLike | None = None,
    example_inputs: Any = None,
    *,
    plan: Plan | None = None,
    options: Options | None = None,
    progress: Progress | bool | None = None,
    batch: Batch = "global",
) -> nn.Module:
    """`model` as a module that trains on all ranks of the running world.

    Call it on every rank. Without a plan, rank 0 makes one and the others take it.

    Parameters
    ----------
    cluster : Cluster, optional
        As for `plan`; by default the running world, `Cluster.detect()`.
    example_inputs : optional
        As for `plan`; with ``batch="local"`` the batch of this rank. Without them the first call is captured.
    plan : Plan, optional
        Must be for this model, these inputs (the global batch) and as many devices.
    progress : callable or bool, optional
        As for `plan`; nothing is shown by ranks other than 0, which wait for its plan.
    batch : {"global", "local"}
        What each rank passes. ``"global"``: all ranks the same whole batch, or each its own part of it, as a loader
        with ``parallel.sampler(dataset)`` reads it. ``"local"``: each rank samples of its own, as under
        DistributedDataParallel with a DistributedSampler; the global batch is all of them together, and outputs are of
        the rank's own samples. In the first calls the ranks compare what they pass (``Options.check_inputs``). See
        docs/inputs.md.

    Returns
    -------
    ParallelModule
        An nn.Module with the model's own parameter names. ``.graphs`` has the graph after each stage,
        ``.plan`` the plan.

    Raises
    ------
    ParallelError
        Besides what `plan` raises: the world has another size than the cluster, or the plan is for another model. What
        goes wrong on one rank is raised on all, with the rank and its cause.
    LostRankError
        A rank has ended or does not answer within the timeout (`Options.timeout`, or ``init_process_group``'s).
        Planning may take longer than that.
    """
    refuse_wrapped(model, LazyParallelModule)
    if batch not in ("global", "local"):
        raise ParallelError(f"batch must be 'global' or 'local', got {batch!r}: see docs/inputs.md")
    if cluster is None:
        cluster = Cluster.detect() if dist.is_initialized() else Cluster.local(1)
    cluster = Cluster.of(cluster)
    told = Reporter.of_ranks(progress)
    if example_inputs is None:
        return LazyParallelModule(model, cluster, plan, options, told, batch)
    return _compile(model, cluster, plan, options, told, batch, example_inputs)


class LazyParallelModule(nn.Module):
    """A model that is captured at its first call, whose inputs are the example, and is then its parallel module.

    Until then it has the model's attributes and methods; modes (``train()``, ``eval()``) and hooks are taken over. It
    has no parameters: those that an optimizer is to have are made at the first call.
    """

    def __init__(
        self,
        model: nn.Module,
        cluster: Cluster,
        plan: Plan | None,
        options: Options | None,
        progress: Reporter,
        batch: Batch,
    ) -> None:
        super().__init__()
        vars(self).update(_model=model, _compile=partial(_compile, model, cluster, plan, options, progress, batch))
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compile for these inputs, then run. Later calls are calls of the compiled parallel module."""
        own = vars(self)
        hooks = {name: own[name] for name, value in own.items() if isinstance(value, OrderedDict) and "hooks" in name}
        compiled: nn.Module = self._compile((args, kwargs), self)
        for name, registered in hooks.items():
            vars(compiled)[name].update(registered)
        return compiled.forward(*args, **kwargs)

    def train(self, mode: bool = True) -> LazyParallelModule:
        """Set the mode of the model that is to be captured."""
        self._model.train(mode)
        vars(self)["training"] = mode
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: before the first call there are no gradients."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ParallelError(
            "this model is not captured yet, so that it has no parameters, buffers or modules of its own, and none of "
            "what a compiled model has: pass example_inputs to compile_parallel, or call it once first"
        )

    named_parameters = named_buffers = named_modules = named_children = _refuse
    state_dict = load_state_dict = register_parameter = register_buffer = add_module = _refuse

    def __getattr__(self, name: str) -> Any:
        model = vars(self).get("_model")
        if name.startswith("__") or model is None:
            return super().__getattr__(name)
        if name in _AFTER_THE_FIRST_CALL or name in model._parameters or name in model._buffers:
            self._refuse()
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ParallelError(
            f"{name} is set on a model that is not captured yet: set it on the model itself, or after the first call"
        )


_AFTER_THE_FIRST_CALL = {name for name in vars(ParallelModule) if not name.startswith("_")} | {
    "graphs", "plan", "spec", "mesh", "unset",
}  # fmt: skip


def _compile(
    model: nn.Module,
    cluster: Cluster,
    plan: Plan | None,
    options: Options | None,
    progress: Reporter,
    batch: Batch,
    example_inputs: Any,
    into: nn.Module | None = None,
) -> nn.Module:
    with progress, defects_named(model):
        return Compiler.compiled(model, cluster, example_inputs, plan, options, progress, batch, into)
