"""The compiler: one model on one cluster, captured once, then planned and lowered."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion

from shardweave.compiler.capture import capture
from shardweave.compiler.capture_errors import internal_errors
from shardweave.compiler.guards import index_checks
from shardweave.compiler.plan_cache import SWITCH, cached_plan, is_on, plan_key, save_plan
from shardweave.cost_model import (
    Cluster,
    ClusterLike,
    Options,
    current_device,
    hardware,
    measured_on,
    profiled_ops,
    save_ops,
    saved_ops,
)
from shardweave.distributed import (
    Failure,
    collective,
    control,
    gather_from_ranks,
    raise_failures,
    run_on_all_ranks,
    run_on_each_rank,
)
from shardweave.ir import (
    Captured,
    ClusterError,
    InputError,
    LayoutError,
    LostRankError,
    ParallelError,
    PlanError,
    axes_size,
    outermost_first,
    readable_bytes,
)
from shardweave.passes import (
    Annotated,
    Compiled,
    Samples,
    check_local_batch,
    global_example,
    inputs_with_first_size,
)
from shardweave.planner import (
    MAX_CACHED_SHARDED_GRAPHS,
    MAX_CACHED_SIMULATIONS,
    Known,
    ModelKey,
    Plan,
    PlanEvaluator,
    PlanSearch,
    Sharded,
    Space,
    StepLowering,
    Steps,
)
from shardweave.report import LOGGER, Reporter
from shardweave.runtime import (
    Batch,
    CompiledStep,
    OtherCall,
    ParallelModule,
    PredictedStep,
    Recompile,
    RegionCompiler,
    become_parallel,
    call_text,
    named_tensors,
)
from shardweave.sharding import idle_axes

_NO_LIMIT = 2**60
_OP_PROFILE_SECONDS = 20.0
"""The time for measuring the ops of a step, once on a machine."""


class Compiler:
    """One model on one cluster: captured and annotated once, then planned and lowered.

    A plan keeps its compiler. The compiler does not keep the model, so that a plan does not keep the weights. A step
    that is `captured` already is taken as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        cluster: ClusterLike,
        example_inputs: Any,
        options: Options | None,
        progress: Reporter | None,
        batch: Batch = "global",
        captured: Captured | None = None,
    ) -> None:
        self.name, self.cluster, self.batch = type(model).__name__, Cluster.of(cluster), batch
        self.options = options or Options()
        if batch == "local" and self.options.outputs == "auto":  # a rank's own rows are not among those of one shard
            self.options = replace(self.options, outputs="part")
        self.progress = progress or Reporter(False)
        self._sharded = Sharded(MAX_CACHED_SHARDED_GRAPHS)
        self._evaluated, self._evaluated_whole = Known(MAX_CACHED_SIMULATIONS), Known(MAX_CACHED_SIMULATIONS)
        self.captured: Captured
        self.steps: Steps
        with self.progress, gc_paused():
            self.progress("capture")
            if captured is not None:
                self._take(captured)
            elif batch == "local" and self.cluster.world_size > 1:
                self._capture_global_batch(model, example_inputs)
            else:
                self._take(capture(model, example_inputs, self.options.mixed_precision))

    def _take(self, captured: Captured) -> None:
        self.captured = captured
        self.options = self.options.with_states_of(self._largest_itemsize)
        self.steps = Steps(captured, self.options)

    @property
    def _largest_itemsize(self) -> int:
        """Bytes of a number of the largest dtype that the user's parameters have."""
        return max((dtypes.master.itemsize for dtypes in self.captured.dtypes.values()), default=4)

    def _samples(self, model: nn.Module, example_inputs: Any) -> Samples:
        """Capture the step of these inputs; returns its samples."""
        self._take(capture(model, example_inputs, self.options.mixed_precision))
        return Samples.of(self.annotated.captured, self.annotated.classes)

    def _capture_global_batch(self, model: nn.Module, example_inputs: Any) -> None:
        """Capture the step of the global batch from one rank's local batch.

        A captured step says which inputs have a batch dimension. Before the capture, those with as many rows as the
        first one are taken for them. If that is ambiguous or wrong, the step of one rank's batch is captured first.
        """
        ranks = self.cluster.world_size
        having, clear = inputs_with_first_size(model, example_inputs)
        found: Samples | None = None
        if clear:
            try:
                found = self._samples(model, global_example(model, example_inputs, ranks, having))
            except ParallelError:  # some input got too few or too many rows
                found = None
        if found is None or set(found.inputs) != having:
            having = frozenset(self._samples(model, example_inputs).inputs) or having  # a batch of one row says nothing
            found = self._samples(model, global_example(model, example_inputs, ranks, having))
        if set(found.inputs) != having:
            raise PlanError(
                f"it cannot be told which inputs have a batch dimension: {', '.join(sorted(having)) or 'none'} in one "
                f"rank's batch, {', '.join(sorted(found.inputs)) or 'none'} in that of {ranks} ranks. Compile with "
                'batch="global", or pass a batch of other sizes than the dimensions of the model'
            )
        check_local_batch(found, ranks)

    @property
    def annotated(self) -> Annotated:
        """The whole step, its ops with their rules."""
        return self.steps.whole

    @property
    def model_key(self) -> ModelKey:
        nodes = {node.name: node.meta["val"] for node in self.captured.graph.graph.nodes if node.op == "placeholder"}
        return ModelKey(
            {name: tuple(nodes[node].shape) for node, name in self.captured.parameters.items()},
            {name: tuple(nodes[node].shape) for node, name in self.captured.inputs.items()},
            self.options.mixed_precision,
        )

    # -- planning

    def plan(self, weigh: bool = False, start: Plan | None = None) -> Plan:
        """The best plan. The search starts at `start`, a plan of the same model.

        With `weigh` the gain of each choice for the whole step is measured, which doubles the time of planning.
        """
        with self.progress, gc_paused():
            return self._of_this_step(self.search.best(weigh, start))

    def known_plan(self) -> Plan:
        """The best plan, of an earlier run of the same step if there is one."""
        if not is_on():
            return self.plan()
        key = plan_key(self.captured, self.cluster, self.options)
        known = cached_plan(key, self.model_key, self.cluster)
        if known is not None:
            LOGGER.info("the plan is that of an earlier run (%s=0 plans anew)", SWITCH)
            return self._of_this_step(known)
        found = self.plan()
        save_plan(key, found, self.options)
        return found

    def _of_this_step(self, plan: Plan) -> Plan:
        """A plan that can show its timeline, and be made again with other options."""
        return plan.with_model(lambda sums: self.search.timeline(plan, sums), self._resolved)

    @property
    def lowering(self) -> StepLowering:
        """Lowers and simulates plans of this step."""
        return StepLowering(self.steps, self.cluster, self.options, self._sharded)

    @property
    def evaluate(self) -> PlanEvaluator:
        """Simulates plans of this step by a few of their layers."""
        return PlanEvaluator(self.lowering, self._evaluated)

    @property
    def search(self) -> PlanSearch:
        """Searches the plans of this step."""
        known = self._evaluated_whole
        return PlanSearch(self.lowering, self.evaluate, self.model_key, self.name, self.progress, known)

    @property
    def space(self) -> Space:
        """What may be chosen for this step."""
        return self.search.space

    def _resolved(self, start: Plan, changes: dict[str, Any]) -> Plan:
        """A plan with other options, from an earlier one."""
        # These change the capture, or do not matter to the plan.
        fixed = {"precision", "replicate_unknown_ops", "timeout", "check_inputs", "inductor", "measure_ops"}
        known = {each.name for each in fields(Options)} - fixed
        if unknown := [name for name in changes if name not in known]:
            raise PlanError(f"resolve can change {', '.join(sorted(known))}, not {', '.join(unknown)}: plan anew")
        if "force" in changes:
            changes = {**changes, "force": {**self.options.force, **changes["force"]}}
        return self.with_(options=replace(self.options, **changes)).plan(weigh=True, start=start)

    def with_(self, cluster: Cluster | None = None, options: Options | None = None) -> Compiler:
        """This compiler, its capture shared, for another cluster or with other options."""
        other = copy.copy(self)
        other.cluster = cluster or self.cluster
        other.options = (options or self.options).with_states_of(self._largest_itemsize)
        if other.cluster is not self.cluster:
            other._evaluated, other._evaluated_whole = Known(MAX_CACHED_SIMULATIONS), Known(MAX_CACHED_SIMULATIONS)
        return other

    def with_measured_ops(self) -> Compiler:
        """This compiler, with times of the step's ops on this machine, if they are to be measured. Collective.

        The ops are those of a data parallel step. An op of another shape takes the time of the nearest one, scaled.

        Raises
        ------
        ClusterError
            If they are to be measured, but the cluster was not.
        """
        # 1. Decide, on all ranks together.
        if not self._measures_ops():
            return self
        # 2. Take the times of an earlier run.
        plain = replace(
            self.options, force={"*": "dp"}, memory_limit=_NO_LIMIT, sub_batches=1, buckets=False, recompute="none",
            micro_batches=self.options.micro_batches or 1,
        )  # fmt: skip
        key, timeout = plan_key(self.captured, self.cluster, plain), self.options.collective_timeout
        with collective("reading the times of the step's ops", timeout=timeout):
            saved = saved_ops(self.cluster, key)
        if saved is not None:
            return self.with_(cluster=saved)
        # 3. Plan and lower a data parallel step, and run its ops.
        try:
            trial = self.with_(options=plain)
            step = trial.lower_on_all_ranks(trial.agreed_plan()).step
        except LostRankError:
            raise
        except ParallelError as error:
            warnings.warn(f"the step's ops are not measured, as it cannot be data parallel: {error}", stacklevel=2)
            return self
        graphs = [graph for graph in (step.forward, step.backward) if graph is not None]
        with self.progress, collective("measuring the ops of the step", timeout=timeout):
            self.progress("measure ops")
            measured = profiled_ops(self.cluster, graphs, seconds_budget=_OP_PROFILE_SECONDS, in_step=True)
            save_ops(measured, key)
        return self.with_(cluster=measured)

    def _measures_ops(self) -> bool:
        """Whether the step's ops are measured. Collective where that is ``"auto"``.

        Raises
        ------
        ClusterError
            If they are to be measured, but the cluster was not.
        """
        asked = self.options.measure_ops
        if asked is True and self.cluster.measured is None:
            raise ClusterError(
                "measure_ops: expected a cluster that was measured on the running machine, got the figures of "
                f"{self.cluster.name!r}. Compile for Cluster.detect(), or leave measure_ops out"
            )
        if asked != "auto":
            return asked
        if self.cluster.world_size == 1 or current_device().type != "cpu":
            return False
        answers = gather_from_ranks((hardware(), self.cluster.fingerprint), self.options.collective_timeout)
        ranks, figures = zip(*answers, strict=True)
        return len(set(figures)) == 1 and measured_on(self.cluster, list(ranks))

    # -- compiling

    def lower(self, plan: Plan, accumulates: bool = False, draft: bool = False) -> Compiled:
        """The generated step of a plan: see `StepLowering.lower`."""
        return self.lowering.lower(plan, accumulates, draft, lambda name, _: self.progress(name))

    @classmethod
    def compiled(
        cls,
        model: nn.Module,
        cluster: Cluster,
        example_inputs: Any,
        plan: Plan | None,
        options: Options | None,
        progress: Reporter | None,
        batch: Batch = "global",
        into: nn.Module | None = None,
    ) -> ParallelModule:
        """Make the module that `compile_parallel` returns. Collective: an error on one rank is raised on all.

        The module `into`, where there is one, becomes the parallel module.
        """
        # 1. Capture on each rank.
        timeout = (options or Options()).collective_timeout

        def start() -> Compiler:
            check_world(cluster)
            made = cls(model, cluster, example_inputs, options, progress, batch)
            if plan is not None:
                plan.check(made.model_key, cluster)
            return made

        compiler = run_on_each_rank(control(timeout), "the capture of the model", start)
        # 2. Compare the captures of the ranks.
        missing = tuple(name for name, tensor in named_tensors(model) if tensor.is_meta)
        digests, without_values = zip(*gather_from_ranks((compiler.digest(), missing), timeout))
        unset = without_values[0]
        if any(not set(unset) <= set(others) for others in without_values):
            raise ParallelError(meta_mismatch_message(without_values))
        if len(set(digests)) > 1:
            meant, *given = zip(*gather_from_ranks((batch, compiler.options, compiler.model_key), timeout))
            if len(set(meant)) > 1:
                raise ParallelError(f"the ranks compile with different meanings of batch= ({meant}): give all the same")
            raise ParallelError(mismatch_message([*zip(*given)]))
        # 3. Plan, lower, place the parameters.
        planned = compiler if plan is not None else compiler.with_measured_ops()
        return planned.compile(model, plan, into, unset)

    def digest(self) -> str:
        """A hash of the options and of the model's names and shapes, which all ranks must share."""
        text = repr((_option_reprs(self.options), self.model_key.to_dict(), self.batch))
        return hashlib.sha256(text.encode()).hexdigest()

    def compile(
        self,
        model: nn.Module,
        plan: Plan | None,
        into: nn.Module | None = None,
        unset: Collection[str] | None = None,
    ) -> ParallelModule:
        """The parallel module of the captured `model` with this plan, or with the best one. Collective.

        The module `into`, where there is one, becomes the parallel module. Rank 0 has values of all tensors but those
        that are `unset`, by default those on the meta device; other ranks may have more tensors there.
        """
        chosen = plan or self.agreed_plan()
        self.steps.priced.clear()  # they are large, and what is trained is not planned again
        lowered = self.lower_on_all_ranks(chosen)
        made = chosen.with_timeline(lambda sums: self.lowering.timeline(lowered, sums, chosen))
        first = self.compiled_step(lowered)
        assert self.captured.call is not None
        again = Recompile(
            self.captured.call.signature, partial(self.compile_again, made, lowered), self.options.recompile_limit
        )
        make: Callable[..., ParallelModule] = ParallelModule if into is None else partial(become_parallel, into)

        def place_parameters() -> ParallelModule:
            return make(
                model,
                first,
                plan=made,
                timeout=self.options.collective_timeout,
                batch=self.batch,
                whole=self.options.outputs == "whole",
                checked_calls=self.options.checked_calls,
                predicted=predicted_step(chosen, self.options),
                inductor=self.options.inductor,
                recompile=again,
                unset=unset,
            )

        return run_on_each_rank(control(self.options.collective_timeout), "placing the parameters", place_parameters)

    def compiled_step(self, lowered: Compiled) -> CompiledStep:
        """The lowered step, with what a call of the captured model needs."""
        call, captured = self.captured.call, self.captured
        assert call is not None
        shapes = {spec.name: torch.Size(spec.layout.global_shape) for spec in lowered.step.spec.inputs}
        leaves = [shapes.get(name, constant) for name, constant in zip(call.names, call.constants, strict=True)]
        return CompiledStep(
            lowered.step,
            call.flatten,
            call.unflatten,
            lowered.graphs,
            captured.reads,
            index_checks(self.annotated.captured) if self.cluster.world_size > 1 else None,
            call_text(call.names, leaves, captured.training, lowered.step.spec.trains, captured.input_gradients),
        )

    def compile_again(self, plan: Plan, first: Compiled, call: OtherCall) -> CompiledStep:
        """The step of another call of the model, from the `plan` of the `first` step. Collective.

        Raises
        ------
        InputError
            If the plan does not fit the inputs.
        """

        # Another thread may compile. A forward may ask whether gradients are recorded, also where none is wanted.
        records = call.trains or torch.is_grad_enabled()

        def compile() -> CompiledStep | Exception:
            try:
                with internal_errors(call.model), torch.set_grad_enabled(records):
                    return self._lowered_again(plan, first, call)
            except Exception as error:  # a control group that is closed would end all later calls
                return error

        timeout = self.options.collective_timeout
        made = run_on_each_rank(control(timeout), "compiling the step for other inputs", compile)
        caught = made if isinstance(made, Exception) else None
        failures = gather_from_ranks(None if caught is None else Failure.of(caught), timeout)
        raise_failures(failures, caught, "compiling the step for other inputs failed")
        assert isinstance(made, CompiledStep)
        return made

    def _lowered_again(self, plan: Plan, first: Compiled, call: OtherCall) -> CompiledStep:
        # 1. Capture the step of the global batch. What the options say of the batch is for the first step.
        model, inputs, parts = call.model, call.example_inputs, call.parts
        known = {each.name: each for each in first.step.spec.inputs}
        if parts > 1:
            rows, _ = inputs_with_first_size(model, inputs)
            batched = {name for name in rows if name not in known or known[name].layout.shard_axes}
            inputs = global_example(model, inputs, parts, batched)
        options = replace(self.options, micro_batches=None, sub_batches=None)
        made = Compiler(model, self.cluster, inputs, options, None, self.batch)
        # 2. Lower it with the strategies of the plan, as far as its batch can be cut. Its parameters stay.
        captured = made.annotated.captured
        at_rest = {name: call.layouts[name] for name in captured.parameters.values()}
        made.annotated.captured, made.annotated.first = replace(captured, at_rest=at_rest), first.step.spec
        plan = made.lowering.completed(plan)
        # Axes that do not divide the batch are idle; those that shard the batch of every op are kept first.
        data, batch = first.step.spec.data_axes, made.annotated.batch
        ops = [op.name for op in made.annotated.ops if op.batch > 1 and op.name in plan.choices]
        used = [plan.choices[name].strategy.axes(self.cluster.mesh()) for name in ops]
        others = {axis for axes in used for axis in (*axes.z, *axes.data)}.difference(data)
        sharding = [*data, *outermost_first(others)]
        idle = idle_axes(batch, sharding)
        made.annotated.leave_idle(idle)
        planned, ranks = axes_size(data), axes_size(axis for axis in data if axis not in idle)
        accumulates = plan.micro_batches if made.annotated.tangents else 1
        samples = batch // axes_size(axis for axis in sharding if axis not in idle)
        micro_batches = math.gcd(accumulates, max(samples, 1))
        is_cut = samples // micro_batches % plan.overlap.sub_batches == 0
        overlap = plan.overlap if is_cut else replace(plan.overlap, sub_batches=1)
        try:
            lowered = made.lower(replace(plan, micro_batches=micro_batches, overlap=overlap))
        except (PlanError, LayoutError) as error:
            raise InputError(
                f"the plan of the first step does not fit these inputs: {error}. Pass inputs of sizes that its "
                "strategies divide, as those of the first step; or compile the model with these inputs"
            ) from error
        # 3. Check its memory. Ranks with more samples than the plan gives them may compute as many as that at a time.
        needed, limit = made.lowering.timeline(lowered, plan=plan).peak_memory, options.limit(self.cluster)
        most = max(self.annotated.batch // axes_size(sharding) // plan.micro_batches, 1)
        more = next((n for n in range(micro_batches + 1, samples + 1) if samples % n == 0 and samples // n <= most), 0)
        if needed > limit and idle and more and made.annotated.tangents:
            with contextlib.suppress(PlanError, LayoutError):  # the model needs the whole batch at once
                lowered = made.lower(replace(plan, micro_batches=more, overlap=replace(plan.overlap, sub_batches=1)))
                needed = made.lowering.timeline(lowered, plan=plan).peak_memory
        if needed > limit:
            raise InputError(
                f"the step for these inputs takes {needed} bytes ({readable_bytes(needed)}) a device, and the memory "
                f"limit is {limit} ({readable_bytes(limit)}): pass smaller inputs, or compile the model with these"
            )
        if batch and ranks < planned and dist.get_rank() == 0:
            warnings.warn(
                f"a batch of {batch} does not divide into the {planned} parts of the plan: it is computed in {ranks}, "
                f"{planned // ranks} ranks each computing the same, so that a call takes the time and memory of "
                f"{batch // ranks * planned} samples. A batch that is a multiple of {planned}, or drop_last=True in "
                "the loader, avoids it",
                stacklevel=2,
            )
        return made.compiled_step(lowered)

    def agreed_plan(self) -> Plan:
        """Rank 0's plan, or its error, on all ranks: a time limit would give each rank another plan. Collective.

        The plan is that of an earlier run of the same step, if there is one.
        """
        if self.cluster.world_size == 1:
            return self.known_plan()

        def make() -> dict[str, Any] | ParallelError:
            try:
                return self.known_plan().to_dict()
            except ParallelError as error:
                return error

        if dist.get_rank() > 0:
            LOGGER.info("rank %d waits for the plan of rank 0", dist.get_rank())
        answer = run_on_all_ranks(control(self.options.collective_timeout), "planning", make, only=0)[0]
        if isinstance(answer, ParallelError):
            raise answer
        assert answer is not None
        return Plan.from_dict(answer)

    def lower_on_all_ranks(self, plan: Plan) -> Compiled:
        """Lower a plan; an error of one rank is raised on all. Collective."""
        groups = control(self.options.collective_timeout)
        with gc_paused():
            return run_on_each_rank(groups, "generating the step", lambda: self.lower(plan))


def predicted_step(plan: Plan, options: Options) -> PredictedStep | None:
    """The step time that a plan predicts; None if it is for another kind of device than that of this rank."""
    cluster = plan.cluster
    if cluster.device.allocator != current_device().type:
        return None
    if cluster.measured is None:
        source = (
            f"Its figures are those of {cluster.name!r}, and nothing was measured: plan for Cluster.detect(), which "
            "measures this machine"
        )
    else:
        source = (
            'Cluster.detect(profile="full", cache=False) measures this machine again, and more of it; plan for that, '
            "while nothing else runs"
        )
    compiles = RegionCompiler(options.inductor, cluster.device.allocator).is_on
    return PredictedStep(plan.step_time, source, may_take_less=compiles)


def _option_reprs(options: Options) -> dict[str, str]:
    return {each.name: repr(getattr(options, each.name)) for each in fields(options)}


def meta_mismatch_message(without: Sequence[Sequence[str]]) -> str:
    """The error message for ranks that have values for different tensors. `without` has each rank's missing names.

    >>> meta_mismatch_message([(), ("up.weight",)]).split(". ")[0]
    'the ranks hold different tensors on the meta device: rank 0 has values for all, rank 1 has none for up.weight'
    """
    told = [
        f"rank {rank} has none for {', '.join(names[:3])}{' and more' if names[3:] else ''}"
        if names
        else f"rank {rank} has values for all"
        for rank, names in enumerate(without)
    ]
    return (
        f"the ranks hold different tensors on the meta device: {', '.join(told[:4])}. Build it with values on "
        "rank 0, which sends them to the others; or on the meta device on all ranks, and give it values once it is "
        "compiled, by shardweave.initialise, load_weights, load_checkpoint or load_state_dict"
    )


def mismatch_message(given: Sequence[tuple[Options, ModelKey]]) -> str:
    """The error message for options or models that differ between ranks, given in the order of ranks.

    >>> key = ModelKey({"up.weight": (8, 4)})
    >>> mismatch_message([(Options(), key), (Options(time_limit=5.0), key)])
    'the ranks compile with different options (time_limit is 30.0 on rank 0 and 5.0 on rank 1): give all the same'
    """
    options, key = _option_reprs(given[0][0]), given[0][1]
    for rank, (others, other) in enumerate(given):
        theirs = _option_reprs(others)
        changed = [f"{name} is {options[name]} on rank 0 and {theirs[name]} on rank {rank}" for name in options
                   if options[name] != theirs[name]]  # fmt: skip
        if changed:
            return f"the ranks compile with different options ({'; '.join(changed)}): give all the same"
        if different := key.differences(other, ("on rank 0", f"on rank {rank}")):
            listed = "; ".join(different[:5]) + (f"; and {len(different) - 5} more" if len(different) > 5 else "")
            return (
                f"the ranks compile different models, or for inputs of different shapes ({listed}): give all ranks the "
                "same model, and example inputs of the same shapes"
            )
    return "the ranks compile models whose parameters or inputs come in another order: give all ranks the same model"


def check_world(cluster: Cluster) -> None:
    """`ParallelError` where the running world has another size than `cluster`, or torch is too old for its ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1 and TorchVersion(torch.__version__) < "2.13.0a0":
        raise ParallelError(
            f"{world} ranks need torch 2.13, and this is {torch.__version__}: its DTensors cannot hold parallel "
            "parameters. Install torch 2.13; with this one, a step on one rank runs, and plans are made for any cluster"
        )
    if world != cluster.world_size:
        raise ParallelError(
            f"the cluster {cluster.name} has {cluster.world_size} devices, the running world {world} rank(s): "
            "start as many ranks as the cluster has devices, or compile for Cluster.detect()"
        )


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection: it took a quarter of planning, for graphs that are all still in use.

    Examples
    --------
    >>> with gc_paused():
    ...     gc.isenabled()
    False
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
