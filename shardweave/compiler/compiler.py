"""The compiler: one model on one cluster, captured once, then planned and lowered."""

from __future__ import annotations

import copy
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from shardweave.compiler.capture import Captured, capture
from shardweave.compiler.collection import collected_later
from shardweave.compiler.index_checks import index_checks
from shardweave.compiler.judge import Decision, Judge, Judged, Known
from shardweave.compiler.model_key import ModelKey
from shardweave.compiler.pipeline import Annotated, Compiled, Shards, lower
from shardweave.compiler.plan import Plan
from shardweave.compiler.planner.force import forced_strategies
from shardweave.compiler.planning import Planning
from shardweave.compiler.samples import Samples, first_sized, of_all_ranks, refuse_broken
from shardweave.compiler.splits import fastest, powers
from shardweave.compiler.steps import Steps
from shardweave.compiler.sweep import Sweep, What, sweep
from shardweave.cost_model import Cluster, ClusterLike, Timeline, simulate
from shardweave.cost_model.acts import play
from shardweave.cost_model.optimizer import optimizer_seconds
from shardweave.errors import ParallelError, PlanError
from shardweave.ir import Assignment, Mesh, Strategy, Weaving
from shardweave.options import Options
from shardweave.passes.schedule import Alike
from shardweave.progress import LOGGER, Reporter
from shardweave.runtime import ParallelModule, become_parallel
from shardweave.runtime.agreement import Control, control, in_step
from shardweave.runtime.calls import Batch
from shardweave.runtime.state import named_tensors
from shardweave.units import readable_bytes

LESS = (1, 2, 4)
"""How many times what a whole step takes too much its order is given less, before other plans are looked for."""

FIGURES = ("step_time", "compute_time", "exposed_communication", "peak_memory")
"""What the simulator says of a plan's whole step."""

KEPT, JUDGED = 8, 256
"""Decisions of which the sharded graphs are kept, and of which what they take is: another plan of the step, under a
limit close by, asks for much the same."""


class Compiler:
    """One model on one cluster: captured and annotated once, then planned and lowered.

    It does not keep the model, so that a plan, which keeps its compiler, does not keep the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        cluster: ClusterLike,
        example_inputs: Any,
        options: Options | None,
        progress: Reporter | None,
        batch: Batch = "global",
    ) -> None:
        self.name, self.cluster, self.batch = type(model).__name__, Cluster.of(cluster), batch
        self.options = options or Options()
        if batch == "local" and self.options.outputs == "auto":  # a rank's own rows are not among those of one shard
            self.options = replace(self.options, outputs="part")
        self.progress = progress or Reporter(False)
        self._shards_of: deque[tuple[tuple[object, ...], dict[int, Shards]]] = deque(maxlen=KEPT)
        self._judged: Known = deque(maxlen=JUDGED)
        self._judged_whole: Known = deque(maxlen=JUDGED)
        self.captured: Captured
        self.steps: Steps
        with self.progress:
            self.progress("capture")
            if batch == "local" and self.cluster.world_size > 1:
                self._start_for_all_ranks(model, example_inputs)
            else:
                self._start(model, example_inputs)

    def _start(self, model: nn.Module, example_inputs: Any) -> None:
        self.captured = self._capture(model, example_inputs)
        self.steps = Steps(self.captured, self.options)

    def _samples(self, model: nn.Module, example_inputs: Any) -> Samples:
        """The batch of the step of these inputs, which becomes this compiler's."""
        self._start(model, example_inputs)
        return Samples.of(self.annotated.captured, self.annotated.classes)

    def _start_for_all_ranks(self, model: nn.Module, example_inputs: Any) -> None:
        """Capture the step of the global batch, from what one rank passes.

        Which inputs have a batch dimension is known of a captured step: it is supposed of those that have as many rows
        as the first. Where that is not clear, or wrong, it is found in the step of one rank's batch.
        """
        ranks = self.cluster.world_size
        having, clear = first_sized(model, example_inputs)
        found: Samples | None = None
        if clear:
            try:
                found = self._samples(model, of_all_ranks(model, example_inputs, ranks, having))
            except ParallelError:  # with too few or too many rows in some input
                found = None
        if found is None or set(found.inputs) != having:
            having = frozenset(self._samples(model, example_inputs).inputs) or having  # of one row, nothing is known
            found = self._samples(model, of_all_ranks(model, example_inputs, ranks, having))
        if set(found.inputs) != having:
            raise PlanError(
                f"it cannot be told which inputs have a batch dimension: {', '.join(sorted(having)) or 'none'} in one "
                f"rank's batch, {', '.join(sorted(found.inputs)) or 'none'} in that of {ranks} ranks. Compile with "
                'batch="global", or pass a batch of other sizes than the dimensions of the model'
            )
        refuse_broken(found, ranks)

    def _capture(self, model: nn.Module, example_inputs: Any) -> Captured:
        return capture(model, example_inputs, self.options.mixed)

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
            self.options.mixed,
        )

    # -- planning

    def plan(self, weigh: bool = False, start: Plan | None = None) -> Plan:
        """The best plan.

        Parameters
        ----------
        weigh : bool
            With what each choice for the whole step is worth, which takes as long again.
        start : Plan, optional
            A plan of the same model, to begin with.
        """
        with self.progress, collected_later():
            found = self._planned(weigh, start)
        return found.with_model(lambda sums: self._simulated(found, sums), self._resolved)

    def _planned(self, weigh: bool, start: Plan | None) -> Plan:
        """The best plan whose whole step keeps to the memory limit when simulated.

        Plans are chosen by what few of their layers take. Where all of them take more, the next one is looked for
        under a limit that is smaller by what the estimate was off, until one keeps to the user's.
        """
        begun, margin = time.monotonic(), 0
        given, limit = self.options.micro_batches, self.options.limit(self.cluster)
        while True:
            counts = powers(self.annotated) if given is None else [given]
            made = fastest(self._planning(count, start, margin) for count in counts)
            plan = made.planning.plan(made, self.model_key, begun)
            self.progress("simulate", incumbent=plan.step_time)
            found, off = self._kept_to(limit, plan)
            if found is not None:
                savings = made.planning.savings(made) if weigh else ()
                return replace(found, savings=savings, planning_seconds=time.monotonic() - begun)
            margin += off
            if margin >= limit:  # the smallest plan was simulated whole when it was found
                raise PlanError(
                    f"the memory limit of {limit} bytes a device is met by none of the plans that were simulated "
                    "whole: raise memory_limit a little, or force a strategy"
                )

    def _kept_to(self, limit: int, plan: Plan) -> tuple[Plan | None, int]:
        """The plan as its whole step is simulated, if that keeps to a memory limit; and by how much it missed it.

        Its order is made for a little less where it misses the limit by a little.
        """
        whole = self._whole(plan)
        most, tried = whole.peak_memory, plan
        for times in LESS:
            if whole.peak_memory <= limit:
                break
            less = plan.schedule_limit - times * (most - limit)
            if less <= 0 or (times > 1 and whole.peak_memory >= most):
                break
            tried = replace(plan, schedule_limit=less)
            whole = self._whole(tried)
        if whole.peak_memory > limit:
            return None, max(most - limit, most - plan.peak_memory)
        figures = {name: getattr(whole, name) for name in FIGURES}
        return replace(tried, **figures), 0

    def _whole(self, plan: Plan) -> Judged:
        """What a plan's whole step takes; that of a plan which was made before is known."""
        strategies = {name: choice.strategy for name, choice in plan.choices.items()}
        asked = self._lowering(plan), Decision(strategies, self.joins_of(plan), {})
        found = next((judged for other, judged in self._judged_whole if other == asked), None)
        if found is None:
            found = Judged.of(self._simulated(plan))
            self._judged_whole.append((asked, found))
        return found

    def _simulated(self, plan: Plan, sums: bool = True) -> Timeline:
        """The simulated schedule of a plan's whole step."""
        return self.timeline(self.lower(plan, not sums, draft=True), sums, plan)

    def _planning(self, micro_batches: int, start: Plan | None = None, margin: int = 0) -> Planning:
        """Of a step of so many micro-batches, from an earlier plan, with so much of the memory limit left free."""
        limit = self.options.limit(self.cluster)
        options = replace(self.options, memory_limit=limit, micro_batches=micro_batches)
        name = self.name
        return Planning(self.steps, self.cluster, options, self._forced, self.judge, self.progress, name, start, margin)

    def _resolved(self, start: Plan, changes: dict[str, Any]) -> Plan:
        """A plan with other options, from an earlier one."""
        # What changes the capture, or is no matter of the plan
        fixed = {"precision", "allow_unruled", "timeout", "check_inputs"}
        known = {each.name for each in fields(Options)} - fixed
        if unknown := [name for name in changes if name not in known]:
            raise PlanError(f"resolve can change {', '.join(sorted(known))}, not {', '.join(unknown)}: plan anew")
        if "force" in changes:
            changes = {**changes, "force": {**self.options.force, **changes["force"]}}
        return self.with_(options=replace(self.options, **changes)).plan(weigh=True, start=start)

    def with_(self, cluster: Cluster | None = None, options: Options | None = None) -> Compiler:
        """This compiler, its capture shared, for another cluster or with other options."""
        other = copy.copy(self)
        other.cluster, other.options = cluster or self.cluster, options or self.options
        if other.cluster is not self.cluster:
            other._judged, other._judged_whole = deque(maxlen=JUDGED), deque(maxlen=JUDGED)
        return other

    def sweep(self, what: What) -> Sweep:
        """The plans of a sweep."""

        def planned(cluster: Cluster, limit: int | None, start: Plan | None) -> Plan:
            options = self.options if limit is None else replace(self.options, memory_limit=limit)
            limited = "" if limit is None else f", at most {readable_bytes(limit)}"
            self.progress.planned = f"{cluster.name}{limited}"
            return self.with_(cluster, options).plan(start=start)

        with self.progress:
            return sweep(what, self.cluster, planned)

    def _forced(self, annotated: Annotated, mesh: Mesh) -> dict[str, list[Strategy]]:
        """The strategies of the ops that may not have every one."""
        undivided = self.options.weaving.undivided
        return forced_strategies(self.options.force, annotated.ops, mesh, annotated.batch, undivided)

    def timeline(self, compiled: Compiled, sums: bool = True, plan: Plan | None = None) -> Timeline:
        """The simulated schedule of a lowered step, on the cluster and with the optimizer that a plan was made for.

        Without sums of gradients, as `Plan.timeline` says.
        """
        step = compiled.step
        turns = step.turns() if step.turns is not None and (step.spec.micro_batches > 1 or not sums) else None
        return simulate(
            step.forward,
            step.backward,
            step.spec,
            self.cluster if plan is None else self._machine(plan),
            optimizer_bytes_per_parameter_byte=self._optimizer_bytes(compiled, plan),
            turns=turns,
            sums=sums,
        )

    def _optimizer_bytes(self, compiled: Compiled, plan: Plan | None = None) -> float:
        """Bytes of optimizer states for each byte of a parameter."""
        itemsize = max(getattr(torch, parameter.dtype).itemsize for parameter in compiled.step.spec.parameters)
        given = None if plan is None else plan.optimizer_bytes
        return (self.options.optimizer_bytes if given is None else given) / int(itemsize)

    def _machine(self, plan: Plan) -> Cluster:
        """The cluster by whose figures a plan's step is ordered and simulated: the plan's own, so on all ranks."""
        return plan.cluster if plan.cluster.mesh() == self.cluster.mesh() else self.cluster

    @property
    def judge(self) -> Judge:
        """Simulates plans of this step."""
        play_here = partial(play, device=self.cluster.device)
        return Judge(self.steps, self._lowered, self.timeline, self._optimizer_seconds, play_here, self._judged)

    def _optimizer_seconds(self, compiled: Compiled, sizes: Sequence[int]) -> float:
        """What the optimizer's step takes with parameters of these bytes."""
        return optimizer_seconds(sizes, self._optimizer_bytes(compiled), self.cluster)

    # -- compiling

    def joins_of(self, plan: Plan) -> dict[str, Assignment]:
        """How the ops are spread that bring several others together."""
        mesh = self.cluster.mesh()
        return {
            name: Assignment.of({mesh.axis(axis): factor for axis, factor in assignment.items()})
            for name, assignment in plan.joins.items()
        }

    def lower(self, plan: Plan, in_turns: bool = False, draft: bool = False) -> Compiled:
        """The generated step of a plan.

        Parameters
        ----------
        plan : Plan
        in_turns : bool
            A draft of what runs several times, for its forms alone.
        draft : bool
            It is simulated and not run.
        """
        strategies = {name: choice.strategy for name, choice in plan.choices.items()}
        missing = [op.name for op in self.annotated.ops if op.name not in strategies]
        if missing:
            raise PlanError(f"the plan has no strategy for {', '.join(missing)}: make a plan for this model")
        mesh, joins = self.cluster.mesh(), self.joins_of(plan)
        if self.options.micro_batches not in (None, plan.micro_batches):
            raise PlanError(
                f"the plan is for {plan.micro_batches} micro-batches a call, Options(micro_batches="
                f"{self.options.micro_batches}) asks for others: leave the option out, or make a plan with it"
            )
        if not self.options.weaving.within(plan.weaving):
            raise PlanError(
                f"the plan is woven with {str(plan.weaving) or 'no options'}, the options ask for "
                f"{str(self.options.weaving) or 'none'}: leave these options out, or make a plan with them"
            )
        if self.options.memory_limit is not None and self.options.limit(self.cluster) < plan.peak_memory:
            raise PlanError(
                f"the plan takes {plan.peak_memory} bytes ({readable_bytes(plan.peak_memory)}) a device, "
                f"Options(memory_limit={self.options.memory_limit!r}) allows less: leave the option out, or make a "
                "plan with it"
            )
        options = self._lowering(plan)
        shards = self._shards(self.annotated, strategies, joins, options)
        draft, cluster, on_stage = draft or in_turns, self._machine(plan), None if draft else self._stage
        return lower(
            self.annotated, strategies, mesh, options, on_stage, joins, cluster, draft, shards, in_turns=in_turns
        )

    def _lowering(self, plan: Plan) -> Options:
        """The options that a plan's step is lowered with: its own where it says something."""
        return replace(
            self.options,
            micro_batches=plan.micro_batches,
            memory_limit=plan.schedule_limit or self.options.limit(self.cluster),
            optimizer=self.options.optimizer if plan.optimizer_bytes is None else plan.optimizer_bytes,
        ).woven(plan.weaving)

    def _lowered(self, annotated: Annotated, decision: Decision, options: Options, alike: Alike = ()) -> Compiled:
        strategies, joins = decision.strategies, decision.joins
        shards = self._shards(annotated, strategies, joins, options)
        mesh, cluster = self.cluster.mesh(), self.cluster
        return lower(annotated, strategies, mesh, options, None, joins, cluster, True, shards, alike)

    def _shards(
        self, annotated: Annotated, strategies: dict[str, Strategy], joins: dict[str, Assignment], options: Options
    ) -> Shards:
        """What `shard` made of these, kept for the next time: what is planned is lowered then, or planned again."""
        options = replace(options.woven(Weaving()), memory_limit=None, optimizer=options.optimizer_bytes)
        decided = strategies, joins, options
        known = next((each for each in self._shards_of if each[0] == decided), None)
        if known is None:
            known = decided, {}
            self._shards_of.append(known)
        return known[1].setdefault(id(annotated), {})

    def _stage(self, name: str, _: fx.GraphModule) -> None:
        self.progress(name)

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
        """What `compile_parallel` returns. Collective: what fails on one rank is raised on all.

        The module `into`, where there is one, becomes the parallel module.
        """
        control = control_of(options)
        made: list[Compiler] = []

        def start() -> tuple[str, tuple[str, ...]]:
            check_world(cluster)
            made.append(cls(model, cluster, example_inputs, options, progress, batch))
            if plan is not None:
                plan.check(made[0].model_key, cluster)
            return made[0].digest(), tuple(name for name, tensor in named_tensors(model) if tensor.is_meta)

        digests, without_values = zip(*in_step(control, "the capture of the model", start))
        if len(set(without_values)) > 1:
            raise ParallelError(unlike_values(without_values))
        if len(set(digests)) > 1:
            meant = in_step(control, "the comparison of the ranks' batches", lambda: batch)
            if len(set(meant)) > 1:
                raise ParallelError(f"the ranks compile with different meanings of batch= ({meant}): give all the same")
            mine = made[0].options, made[0].model_key
            given = in_step(control, "the comparison of the ranks' models", lambda: mine)
            raise ParallelError(unlike([each for each in given if each is not None]))
        return made[0].compile(model, plan, into)

    def digest(self) -> str:
        """A fingerprint of what has to be the same on all ranks: the options, and the names and shapes of the model."""
        text = repr((_in_words(self.options), self.model_key.to_dict(), self.batch))
        return hashlib.sha256(text.encode()).hexdigest()

    def compile(self, model: nn.Module, plan: Plan | None, into: nn.Module | None = None) -> ParallelModule:
        """The step of a plan, or of the best one, for the captured `model`, on the running world. Collective.

        The module `into`, where there is one, becomes the parallel module.
        """
        control = control_of(self.options)
        chosen = plan or self.agreed_plan()
        lowered = self.lowered_together(chosen)
        made = chosen.with_timeline(lambda sums: self.timeline(lowered, sums, chosen))
        call = self.captured.call
        assert call is not None
        modules: list[ParallelModule] = []
        make: Callable[..., ParallelModule] = ParallelModule if into is None else partial(become_parallel, into)

        def build() -> None:
            module = make(
                model,
                lowered.step,
                flatten=call.flatten,
                unflatten=call.unflatten,
                graphs=lowered.graphs,
                plan=made,
                reads=self.captured.reads,
                timeout=self.options.patience,
                checks=index_checks(self.annotated.captured) if self.cluster.world_size > 1 else None,
                batch=self.batch,
                whole=self.options.outputs == "whole",
                check_inputs=self.options.checks,
            )
            modules.append(module)

        in_step(control, "placing the parameters", build)
        return modules[0]

    def agreed_plan(self) -> Plan:
        """Rank 0's plan on all ranks, or its error: a time limit could end elsewhere on each. Collective."""
        if self.cluster.world_size == 1:
            return self.plan()

        def make() -> dict[str, Any] | ParallelError:
            try:
                return self.plan().to_dict()
            except ParallelError as error:
                return error

        if dist.get_rank() > 0:
            LOGGER.info("rank %d waits for the plan of rank 0", dist.get_rank())
        answer = in_step(control_of(self.options), "planning", make, only=0)[0]
        if isinstance(answer, ParallelError):
            raise answer
        assert answer is not None
        return Plan.from_dict(answer)

    def lowered_together(self, plan: Plan) -> Compiled:
        """The generated step of a plan; an error of one rank is raised on all. Collective."""
        found: list[Compiled] = []
        in_step(control_of(self.options), "generating the step", lambda: found.append(self.lower(plan)))
        return found[0]


def control_of(options: Options | None) -> Control | None:
    """The groups in which the running ranks agree, with the timeout of the options. Collective at the first call."""
    return control(options.patience if options is not None else None)


def _in_words(options: Options) -> dict[str, str]:
    return {each.name: repr(getattr(options, each.name)) for each in fields(options)}


def unlike_values(without: Sequence[Sequence[str]]) -> str:
    """What to say of ranks that have values for different tensors; of each those that it has none for.

    >>> unlike_values([(), ("up.weight",)]).split(". ")[0]
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
        "all ranks; or on the meta device on all of them, and give it values once it is compiled, by "
        "shardweave.initialise, load_weights, load_checkpoint or load_state_dict"
    )


def unlike(given: Sequence[tuple[Options, ModelKey]]) -> str:
    """What is not the same on all ranks, of their options and models, in the order of ranks.

    >>> key = ModelKey({"up.weight": (8, 4)})
    >>> unlike([(Options(), key), (Options(time_limit=5.0), key)])
    'the ranks compile with different options (time_limit is 30.0 on rank 0 and 5.0 on rank 1): give all the same'
    """
    options, key = _in_words(given[0][0]), given[0][1]
    for rank, (others, other) in enumerate(given):
        theirs = _in_words(others)
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
    """`ParallelError` where the running world has another size than `cluster`."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != cluster.world_size:
        raise ParallelError(
            f"the cluster {cluster.name} has {cluster.world_size} devices, the running world {world} rank(s): "
            "start as many ranks as the cluster has devices, or compile for Cluster.detect()"
        )
