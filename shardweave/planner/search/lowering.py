"""Lowering plans of one step on one cluster, and simulating what that gives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from shardweave.cost_model import Cluster, Options, Timeline, optimizer_seconds, simulate
from shardweave.ir import Assignment, Mode, OverlapConfig, PlanError, Strategy, readable_bytes
from shardweave.passes import Annotated, Compiled, RepeatedLayers, Shards, lower
from shardweave.planner.search.layer_problem import Steps
from shardweave.planner.search.plan import Plan

KEPT_DECISIONS = 8
"""Decisions of which the sharded graphs are kept: a plan under a limit close by asks for the same ones again."""

Sharded = deque[tuple[tuple[object, ...], dict[int, Shards]]]
"""Sharded graphs by what was decided, and by the annotated step that they are of."""


class Decision(NamedTuple):
    """What a plan says of each op, each join and each layer, by name."""

    strategies: dict[str, Strategy]
    joins: dict[str, Assignment]
    modes: dict[str, Mode]
    """How layers are recomputed that the planner chose it for."""


class StepLowering:
    """Lowers plans of one step on one cluster, and simulates the lowered steps.

    Parameters
    ----------
    steps : Steps
        The step, whole and with fewer of its equal layers.
    cluster : Cluster
    options : Options
    sharded : Sharded, optional
        What has been sharded for the step so far; it grows.
    """

    def __init__(self, steps: Steps, cluster: Cluster, options: Options, sharded: Sharded | None = None) -> None:
        self.steps, self.cluster, self.options = steps, cluster, options
        self._sharded: Sharded = deque(maxlen=KEPT_DECISIONS) if sharded is None else sharded

    def lower(
        self,
        plan: Plan,
        accumulates: bool = False,
        draft: bool = False,
        on_pass: Callable[[str, fx.GraphModule], None] | None = None,
    ) -> Compiled:
        """The generated step of a plan.

        Parameters
        ----------
        plan : Plan
        accumulates : bool
            Lower a draft that runs several times and adds its gradients up, for `Step.micro_batch_graphs` alone.
        draft : bool
            It is simulated and not run.
        on_pass : callable, optional
            Told the name and the graph after each pass, of what is no draft.

        Raises
        ------
        PlanError
            Where the plan is not one of this step under these options.
        """
        strategies = {name: choice.strategy for name, choice in plan.choices.items()}
        missing = [op.name for op in self.steps.whole.ops if op.name not in strategies]
        if missing:
            raise PlanError(f"the plan has no strategy for {', '.join(missing)}: make a plan for this model")
        mesh, joins = self.cluster.mesh(), self.joins_of(plan)
        if self.options.micro_batches not in (None, plan.micro_batches):
            raise PlanError(
                f"the plan is for {plan.micro_batches} micro-batches a call, Options(micro_batches="
                f"{self.options.micro_batches}) asks for others: leave the option out, or make a plan with it"
            )
        if not self.options.overlap.within(plan.overlap):
            raise PlanError(
                f"the plan is woven with {str(plan.overlap) or 'no options'}, the options ask for "
                f"{str(self.options.overlap) or 'none'}: leave these options out, or make a plan with them"
            )
        if self.options.memory_limit is not None and self.options.limit(self.cluster) < plan.peak_memory:
            raise PlanError(
                f"the plan takes {plan.peak_memory} bytes ({readable_bytes(plan.peak_memory)}) a device, "
                f"Options(memory_limit={self.options.memory_limit!r}) allows less: leave the option out, or make a "
                "plan with it"
            )
        options = self.options_of(plan)
        shards = self._shards(self.steps.whole, strategies, joins, options)
        draft, cluster, on_stage = draft or accumulates, self._machine(plan), None if draft else on_pass
        return lower(
            self.steps.whole,
            strategies,
            mesh,
            options,
            on_stage,
            joins,
            cluster,
            draft,
            shards,
            accumulates=accumulates,
        )

    def options_of(self, plan: Plan) -> Options:
        """The options that a plan's step is lowered with: its own where it says something."""
        return replace(
            self.options,
            micro_batches=plan.micro_batches,
            memory_limit=plan.schedule_limit or self.options.limit(self.cluster),
            optimizer=self.options.optimizer if plan.optimizer_bytes is None else plan.optimizer_bytes,
        ).with_overlap(plan.overlap)

    def draft(self, annotated: Annotated, decision: Decision, options: Options, alike: RepeatedLayers = ()) -> Compiled:
        """What is decided of a step, perhaps one with fewer layers, lowered to be simulated and not to be run."""
        strategies, joins = decision.strategies, decision.joins
        shards = self._shards(annotated, strategies, joins, options)
        mesh, cluster = self.cluster.mesh(), self.cluster
        return lower(annotated, strategies, mesh, options, None, joins, cluster, True, shards, alike)

    def joins_of(self, plan: Plan) -> dict[str, Assignment]:
        """How the ops are spread that bring several others together."""
        mesh = self.cluster.mesh()
        return {
            name: Assignment.of({mesh.axis(axis): factor for axis, factor in assignment.items()})
            for name, assignment in plan.joins.items()
        }

    def timeline(self, compiled: Compiled, sums: bool = True, plan: Plan | None = None) -> Timeline:
        """The simulated schedule of a lowered step, on the cluster and with the optimizer that a plan was made for.

        Without sums of gradients, as `Plan.timeline` says.
        """
        step = compiled.step
        make = step.micro_batch_graphs
        turns = make() if make is not None and (step.spec.micro_batches > 1 or not sums) else None
        return simulate(
            step.forward,
            step.backward,
            step.spec,
            self.cluster if plan is None else self._machine(plan),
            optimizer_bytes_per_parameter_byte=self._optimizer_bytes(compiled, plan),
            turns=turns,
            sums=sums,
        )

    def optimizer_seconds(self, compiled: Compiled, sizes: Sequence[int]) -> float:
        """What the optimizer's step takes with parameters of these bytes."""
        return optimizer_seconds(sizes, self._optimizer_bytes(compiled), self.cluster)

    def _shards(
        self, annotated: Annotated, strategies: dict[str, Strategy], joins: dict[str, Assignment], options: Options
    ) -> Shards:
        """What `shard` made of these, kept for the next time: what is planned is lowered then, or planned again."""
        options = replace(options.with_overlap(OverlapConfig()), memory_limit=None, optimizer=options.optimizer_bytes)
        decided = strategies, joins, options
        known = next((each for each in self._sharded if each[0] == decided), None)
        if known is None:
            known = decided, {}
            self._sharded.append(known)
        return known[1].setdefault(id(annotated), {})

    def _machine(self, plan: Plan) -> Cluster:
        """The cluster by whose figures a plan's step is ordered and simulated: the plan's own, so on all ranks."""
        return plan.cluster if plan.cluster.mesh() == self.cluster.mesh() else self.cluster

    def _optimizer_bytes(self, compiled: Compiled, plan: Plan | None = None) -> float:
        """Bytes of optimizer states for each byte of a parameter."""
        itemsize = max(getattr(torch, parameter.dtype).itemsize for parameter in compiled.step.spec.parameters)
        given = None if plan is None else plan.optimizer_bytes
        return (self.options.optimizer_bytes if given is None else given) / int(itemsize)
