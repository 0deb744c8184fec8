"""The main entry points: `plan` and `compile_parallel`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, overload

import torch.distributed as dist
from torch import nn

from shardweave.compiler.capture_errors import internal_errors, refuse_wrapped
from shardweave.compiler.compiler import Compiler
from shardweave.compiler.sweep import Sweep, SweepTarget, sweep_batches, sweep_options
from shardweave.cost_model import Cluster, ClusterLike, Options
from shardweave.ir import ParallelError, PlanError
from shardweave.planner import Plan, Space
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
    sweep: SweepTarget,
) -> Sweep:
    """The plans of a sweep."""


def plan(
    model: nn.Module,
    cluster: ClusterLike,
    example_inputs: Any,
    *,
    options: Options | None = None,
    progress: Progress | bool | None = None,
    sweep: SweepTarget | None = None,
) -> Plan | Sweep:
    """The fastest plan found to train `model` on `cluster` within a memory limit.

    An integer program chooses strategies, and the simulator checks them. No GPU, no process group and no memory for the
    model are needed.

    Parameters
    ----------
    model : nn.Module
        May lie on the meta device.
    cluster : Cluster, str or path
        A cluster, a preset's name (``"dgx-a100"``) or the path of a cluster file.
    example_inputs : tensor, tuple, dict or (tuple, dict)
        The global batch of one step; only shapes and dtypes matter. With ``sweep="batch"``, a function from the batch
        size to a batch.
    options : Options, optional
    progress : callable or bool, optional
        Called with each `shardweave.report.Event`: the stage, the best step so far, the bound, the seconds left. By
        default a line on the terminal shows them; elsewhere a line comes every few seconds, through the logger
        ``"shardweave"`` (INFO) where logging is configured, else on stderr. False shows nothing.
    sweep : "memory", "batch", or sequence of memory limits or of clusters, optional
        Make several plans: ``"memory"`` from the memory of the fastest plan down to the smallest that is possible,
        ``"batch"`` for growing batch sizes, else one for each of these memory limits (as in `Options`) or clusters.

    Returns
    -------
    Plan or Sweep
        A plan's figures are those of the simulated step; its `status`, `bound` and `gap` are about the integer program
        and its own count of seconds (see `Plan`). A sweep has all plans, the Pareto curve of memory against time, and
        the fastest plan. The best of a sweep over batch sizes takes the least time for a sample (OSDP, arXiv
        2209.13258, Algorithm 1); its plans have one micro-batch unless the options say otherwise.

    Raises
    ------
    CaptureError, RuleError
        The model cannot be captured, is compiled, wrapped or sharded already, or has an op without a rule.
    InfeasibleError
        Nothing fits into the memory limit: with the smallest one that would do.
    InternalError
        A defect of shardweave; the message says what to try meanwhile.

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
            "sweep='batch' goes with example_inputs that is a function from a batch size to a batch, got "
            f"sweep={sweep!r} with {type(example_inputs).__name__}: for example "
            "example_inputs=lambda size: torch.zeros(size, 64)"
        )
    with Reporter(progress) as reporter, internal_errors(model):
        if sweep == "batch":
            return sweep_batches(model, cluster, example_inputs, options, reporter)
        compiler = Compiler(model, cluster, example_inputs, options, reporter)
        return compiler.plan(weigh=True) if sweep is None else sweep_options(compiler, sweep)


def space(
    model: nn.Module, cluster: ClusterLike, example_inputs: Any, *, options: Options | None = None
) -> Space:
    """What `plan` may choose for `model` on `cluster`: of each op, of each layer, and for the whole step.

    Parameters are those of `plan`.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    >>> x = torch.randn(32, 64)
    >>> print(space(model, Cluster.local(4), x, options=Options(force={"0": ["zero3", "column:4"]}, buckets=False)))
    the step: 1 micro-batch; 1 or 2 sub-batches; without buckets
    each layer: recomputation none, fine or full
    each sum: whole or scattered
    0: 2 strategies on 2 grids
    2: 16 strategies on 7 grids
    >>> found = space(model, Cluster.local(4), x)
    >>> [str(each) for each in found.strategies(found.annotated.ops[0])][:3]
    ['(1, 1, 1, 4) DP', '(1, 1, 2, 2) rest/2', '(1, 1, 1, 4) ZDP']
    """
    refuse_wrapped(model, LazyParallelModule)
    with internal_errors(model):
        return Compiler(model, cluster, example_inputs, options, None).space


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
        As for `plan`; only rank 0 shows it.
    batch : {"global", "local"}
        The meaning of the batch that a rank passes. ``"global"``: all ranks pass the same whole batch, or each its own
        part of it, as a loader with ``parallel.sampler(dataset)`` reads it. ``"local"``: each rank passes samples of
        its own, as under DistributedDataParallel with a DistributedSampler; these samples together are the global
        batch, and the outputs are those of the rank's own samples. In the first calls the ranks compare their inputs
        (``Options.check_inputs``). See docs/inputs.md.

    Returns
    -------
    ParallelModule
        An nn.Module with the model's own parameter names. ``.graphs`` has the graph after each stage,
        ``.plan`` the plan.

    Raises
    ------
    ParallelError
        As `plan` does; if the world has another size than the cluster; if the plan is for another model. An error on
        one rank is raised on all ranks, with the rank and its cause.
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
    reporter = Reporter.of_ranks(progress)

    def compile(example_inputs: Any, into: nn.Module | None = None) -> nn.Module:
        with reporter, internal_errors(model):
            return Compiler.compiled(model, cluster, example_inputs, plan, options, reporter, batch, into)

    return LazyParallelModule(model, compile) if example_inputs is None else compile(example_inputs)


class LazyParallelModule(nn.Module):
    """A model that is compiled at its first call, for the inputs of that call, and becomes its own parallel module.

    Before that it has the model's attributes and methods; ``train()``, ``eval()`` and hooks are taken over. It has no
    parameters: the first call makes them.
    """

    def __init__(self, model: nn.Module, compile: Callable[..., nn.Module]) -> None:
        super().__init__()
        vars(self).update(_model=model, _compile=compile)
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compile for these inputs, then run. Later calls reach the parallel module that this object has become."""
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
