"""Evaluation of plans: what a choice of candidates decides, lowered on one cluster, and the generated step simulated.

Of each stretch of equal layers with one strategy, two layers are lowered, scheduled and simulated. Each of the others
adds as much to the step's time and memory as one of these (`extrapolation`).

These are estimates by which plans are compared. The figures of the plan that is returned come from a simulation of all
layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import fx

from shardweave.cost_model import (
    Cluster,
    Options,
    Timeline,
    liveness,
    optimizer_seconds,
    replay,
    simulate,
)
from shardweave.ir import Assignment, OverlapConfig, PlanError, RecomputeMode, Strategy, readable_bytes
from shardweave.passes import Annotated, Compiled, RepeatedLayers, Shards, layer_multiplicity, layer_outputs, lower
from shardweave.planner.problem.space import legal
from shardweave.planner.problem.step_choices import layer_named
from shardweave.planner.problem.variables import Costed
from shardweave.planner.search.extrapolation import (
    Layers,
    StepSeconds,
    mean_seconds,
    memory_with_repeated_layers,
    reductions_queue_up,
    with_repeated_layers,
)
from shardweave.planner.search.layer_problem import RecentCache, Steps, inside, renamed
from shardweave.planner.search.plan import OpChoice, Plan
from shardweave.sharding import LayerRun, info, last_match, layer_of, layers_of_ops

MAX_CACHED_SHARDED_GRAPHS = 8
"""The number of decisions whose sharded graphs are cached: a plan under a similar limit asks for the same ones."""

Sharded = RecentCache[tuple[object, ...], dict[int, Shards]]
"""Sharded graphs by decision, and by the identity of the annotated step."""


class Decision(NamedTuple):
    """The decisions of a plan by name: strategies of ops, layouts of joins, recompute modes of layers."""

    strategies: dict[str, Strategy]
    joins: dict[str, Assignment]
    modes: dict[str, RecomputeMode]
    """How layers are recomputed that the planner chose it for."""
    kept_slices: Mapping[str, int] = MappingProxyType({})
    """How many slices of each parameter stay gathered from the forward to the backward, where the planner chose it."""

    def overlap(self, given: OverlapConfig) -> OverlapConfig:
        """`given`, with these modes and kept slices."""
        kept = {name: count for name, count in self.kept_slices.items() if count}
        return replace(
            given,
            recompute={**given.recompute, **self.modes},
            keep_gathered={**given.keep_gathered, **kept},
        )


def decision(costed: Costed, choice: Sequence[int]) -> Decision:
    """The decision of a choice: strategies of ops, layouts of joins."""
    kept_slices: dict[str, int] = {}
    found = Decision({}, {}, {}, kept_slices)
    for variable, index in zip(costed.variables, choice, strict=True):
        if variable.op is not None:
            found.strategies[variable.name] = variable.strategies[index]
            if variable.strategies[index].rest > 1 and any(variable.kept_slices):  # or the backward does not read it
                parameters = variable.op.parameter, *variable.op.companions
                kept_slices.update(dict.fromkeys(parameters, variable.kept_slices[index]))
        elif variable.modes:
            found.modes[layer_named(variable.name)] = variable.modes[index]
        elif variable.ports:
            found.joins[variable.name] = next(iter(variable.ports[index].values())).in_space
    return found


def choice_of(costed: Costed, plan: Plan) -> tuple[int, ...] | None:
    """The choice that a plan stands for; None where it has another one for some op."""
    found: list[int] = []
    for variable in costed.variables:
        if variable.degrees:
            most = min(max(choice.strategy.degree for choice in plan.choices.values()), variable.degrees[-1])
            found.append(next(at for at, degree in enumerate(variable.degrees) if degree >= most))
            continue
        given = plan.choices.get(variable.name)
        if variable.modes:
            mode = last_match(plan.overlap.recompute, layer_named(variable.name), "none")
            found.append(variable.modes.index(mode))
            continue
        if variable.op is not None and given is not None and given.strategy in variable.strategies:
            kept = last_match(plan.overlap.keep_gathered, variable.op.parameter, 0)
            options = [*zip(variable.strategies, variable.kept_slices)]
            wanted = given.strategy, min(given.strategy.slices, kept)
            found.append(options.index(wanted) if wanted in options else variable.strategies.index(given.strategy))
        elif variable.op is None and variable.name in plan.joins:
            layouts = [named(next(iter(port.values())).in_space) for port in variable.ports]
            if dict(plan.joins[variable.name]) not in layouts:
                return None
            found.append(layouts.index(dict(plan.joins[variable.name])))
        else:
            return None
    return tuple(found)


def named(assignment: Assignment) -> dict[str, str]:
    """The factor that each axis is on, by its name."""
    return {axis.name: factor for axis, factor in assignment.items}


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
        self._sharded = Sharded(MAX_CACHED_SHARDED_GRAPHS) if sharded is None else sharded

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
                f"the plan has the overlap options {str(plan.overlap) or 'none'}, the options ask for "
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

    def completed(self, plan: Plan) -> Plan:
        """A plan with a strategy for each op of a step that may use other modules than the planned one.

        An op keeps the strategy of its parameter, as its name depends on the other ops of its module. Where the plan
        does not have the parameter, or has it in another shape, the op is data parallel, with whole states.
        """
        mesh, captured = self.cluster.mesh(), self.steps.whole.captured
        placeholders = {node.name: node for node in captured.graph.graph.find_nodes(op="placeholder")}
        shapes = {name: tuple(placeholders[node].meta["val"].shape) for node, name in captured.parameters.items()}
        planned = {choice.params[0]: choice for choice in plan.choices.values() if choice.params}
        choices = dict(plan.choices)
        for op in self.steps.whole.ops:
            own, before = plan.choices.get(op.name), plan.model_key.parameters.get(op.parameter)
            if own is None or op.parameter not in (own.params or (op.parameter,)):
                own = planned.get(op.parameter)
            if own is None or before not in (None, shapes.get(op.parameter)):
                fits = [each for each in legal(op, mesh) if each.rest == each.states == 1]
                own = OpChoice(fits[0], 0.0) if fits else None
            if own is not None:
                choices[op.name] = own
        return replace(plan, choices=choices)

    def options_of(self, plan: Plan) -> Options:
        """The options for lowering a plan's step: the plan's own choices, else the user's."""
        return replace(
            self.options,
            micro_batches=plan.micro_batches,
            memory_limit=plan.schedule_limit or self.options.limit(self.cluster),
            optimizer=self.options.optimizer if plan.optimizer_bytes is None else plan.optimizer_bytes,
        ).with_overlap(plan.overlap)

    def draft(
        self, annotated: Annotated, decision: Decision, options: Options, repeated: RepeatedLayers = ()
    ) -> Compiled:
        """Lower a decision for a step, perhaps with fewer layers, for simulation only."""
        strategies, joins = decision.strategies, decision.joins
        shards = self._shards(annotated, strategies, joins, options)
        mesh, cluster = self.cluster.mesh(), self.cluster
        return lower(annotated, strategies, mesh, options, None, joins, cluster, True, shards, repeated)

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
        micro_batch_graphs = make() if make is not None and (step.spec.micro_batches > 1 or not sums) else None
        return simulate(
            step.forward,
            step.backward,
            step.spec,
            self.cluster if plan is None else self._machine(plan),
            optimizer_bytes_per_parameter_byte=self._optimizer_bytes(compiled, plan),
            micro_batch_graphs=micro_batch_graphs,
            reduce_gradients=sums,
        )

    def optimizer_seconds(self, compiled: Compiled, sizes: Sequence[int]) -> float:
        """Seconds of the optimizer's step for parameters of these sizes in bytes."""
        return optimizer_seconds(sizes, self._optimizer_bytes(compiled), self.cluster)

    def _shards(
        self, annotated: Annotated, strategies: dict[str, Strategy], joins: dict[str, Assignment], options: Options
    ) -> Shards:
        """What `shard` made of these, kept for the next time: what is planned is lowered then, or planned again."""
        options = replace(options.with_overlap(OverlapConfig()), memory_limit=None, optimizer=options.optimizer_bytes)
        return self._sharded.get((strategies, joins, options), dict).setdefault(id(annotated), {})

    def _machine(self, plan: Plan) -> Cluster:
        """The cluster by whose figures a plan's step is ordered and simulated: the plan's own, so on all ranks."""
        return plan.cluster if plan.cluster.mesh() == self.cluster.mesh() else self.cluster

    def _optimizer_bytes(self, compiled: Compiled, plan: Plan | None = None) -> float:
        """Bytes of optimizer states for each byte of a parameter."""
        dtypes = {getattr(torch, parameter.dtype).to_real() for parameter in compiled.step.spec.parameters}
        itemsize = max(dtype.itemsize for dtype in dtypes)
        given = None if plan is None else plan.optimizer_bytes
        return (self.options.optimizer_bytes if given is None else given) / int(itemsize)


SIMULATED_LAYERS = 2
"""The number of layers of a stretch that are simulated, where it is long."""

MAX_WHOLE_LAYERS = 4
"""Stretches of so many layers are simulated whole: that takes at most twice as long, and is no estimate."""


@dataclass(frozen=True)
class Evaluation:
    """The simulator's figures of a step.

    Parameters
    ----------
    step_time, compute_time, exposed_communication : float
        Seconds.
    peak_memory : int
        Bytes a device.
    at_peak : mapping of str to int
        What they hold.
    is_estimate : bool
        Whether only a few of the layers were simulated.
    """

    step_time: float
    compute_time: float
    exposed_communication: float
    peak_memory: int
    at_peak: Mapping[str, int]
    is_estimate: bool = False

    @classmethod
    def of(cls, timeline: Timeline) -> Evaluation:
        """The evaluation of a step that was simulated with all layers."""
        return cls(
            timeline.step_time,
            timeline.compute_time,
            timeline.exposed_communication,
            timeline.peak_memory,
            timeline.memory.at_peak(),
        )


Known = RecentCache[tuple[str, Decision], Evaluation]
"""Evaluations by `Options.key` and decision."""

Said = TypeVar("Said")


class PlanEvaluator:
    """Simulates plans of one step.

    Parameters
    ----------
    lowering : StepLowering
        Of the step, on its cluster.
    known : Known, optional
        What has been simulated; what is, is added.
    """

    def __init__(self, lowering: StepLowering, known: Known | None = None) -> None:
        self.lowering, self.steps = lowering, lowering.steps
        self.known = Known() if known is None else known

    def __call__(self, decision: Decision, options: Options) -> Evaluation:
        """Evaluate a decision; `options` have the memory limit."""
        return self.known.get((options.key, decision), lambda: self._simulated(decision, options))

    def whole(self, decision: Decision, options: Options) -> Evaluation:
        """Evaluate a decision with all layers lowered and simulated."""
        options = options.with_overlap(decision.overlap(options.overlap))
        return Evaluation.of(self.lowering.timeline(self.lowering.draft(self.steps.whole, decision, options)))

    def _simulated(self, decision: Decision, options: Options) -> Evaluation:
        few = self._few(decision, options)
        fold, annotated = self.steps.folded(few.left)
        decision, repeated = few.decision, few.repeated
        options = options.with_overlap(decision.overlap(options.overlap))
        compiled = self.lowering.draft(annotated, decision, options, repeated)
        evaluation = Evaluation.of(timeline := self.lowering.timeline(compiled))
        if not fold.stands_for:
            return evaluation
        layers = Layers(layers_of_ops(annotated.captured.graph.graph))
        taken = [mean_seconds(timeline, layers, same).times(others) for same, others in repeated]
        optimizer = self._optimizer(compiled, repeated) - self._optimizer(compiled, ())
        compute, exposed = (sum(each) for each in zip(*taken, StepSeconds(optimizer, 0.0)))
        seconds = StepSeconds(evaluation.compute_time + compute, evaluation.exposed_communication + exposed)
        if reductions_queue_up(timeline.stream_ops, layers, repeated):
            ops = with_repeated_layers(timeline.stream_ops, layers, repeated, {*annotated.captured.parameters.values()})
            if ops is not None:
                played = replay(ops, device=self.lowering.cluster.device)
                seconds = StepSeconds(played.compute + optimizer, played.seconds - played.compute)
        forward = compiled.step.forward.graph
        outputs = layer_outputs(forward, liveness(forward).where, lambda node: layers.of(info(node).op or node.name))
        held = memory_with_repeated_layers(timeline.memory, layers, repeated, {node.name for node, _ in outputs})
        return Evaluation(sum(seconds), *seconds, held.peak, held.at_peak(), is_estimate=True)

    def _optimizer(self, compiled: Compiled, repeated: RepeatedLayers) -> float:
        """Seconds of the optimizer's step with so many more of each layer."""
        sizes, times = [], layer_multiplicity(repeated)
        for parameter in compiled.step.spec.parameters:
            if parameter.trainable:
                size = math.prod(parameter.layout.local_shape) * getattr(torch, parameter.dtype).itemsize
                sizes += [size] * times.get(layer_of(parameter.name), 1)
        return self.lowering.optimizer_seconds(compiled, sizes)

    def _few(self, decision: Decision, options: Options) -> _Few:
        """The layers that are simulated: the first of each run, of which is decided what is of those of its stretches.

        They are equal, so it makes no difference which ones are left out; the first ones are sharded once for plans
        whose stretches differ in their lengths alone.
        """
        left: dict[LayerRun, int] = {}
        repeated: list[tuple[Sequence[str], int]] = []
        places: dict[str, str] = {}
        runs = self.steps.runs(options) if not options.ablation.flat_parameter else []  # it has all layers
        for run in runs:
            begin = count = 0
            for length in _lengths(decision, run):
                few = length if length <= MAX_WHOLE_LAYERS else SIMULATED_LAYERS
                places.update(zip(run.layers[begin : begin + few], run.layers[count : count + few], strict=True))
                repeated.append((run.layers[count : count + few], length - few))
                begin, count = begin + length, count + few
            left[run] = count
        layers = [layer for run in left for layer in run.layers]
        return _Few(left, _moved(decision, layers, places), repeated)


class _Few(NamedTuple):
    """What is left of each run, what is decided of that, and how many more of each stretch there are."""

    left: dict[LayerRun, int]
    decision: Decision
    repeated: RepeatedLayers


def complexity(decision: Decision, runs: Sequence[LayerRun]) -> int:
    """How much there is to know of a plan: its strategies, those without a name twice, and stretches of equal layers.

    Parameters
    ----------
    decision : Decision
    runs : sequence of LayerRun
        The equal layers of the step.

    Examples
    --------
    >>> from shardweave.ir import Grid
    >>> zero3, own = Strategy(Grid(data=8), rest=8), Strategy(Grid(data=8), rest=2, states=4)
    >>> complexity(Decision({"up": zero3, "down": own}, {}, {}), ())
    3
    """
    strategies = {*decision.strategies.values()}
    return sum(1 if each.is_preset else 2 for each in strategies) + sum(len(_lengths(decision, run)) for run in runs)


def _lengths(decision: Decision, run: LayerRun) -> list[int]:
    """Of the stretches of a run, cut where what is decided changes."""
    decided = *decision.strategies, *decision.joins, *decision.kept_slices
    names = [name for name in decided if inside(name, run.layers[0])]
    said = [
        (decision.modes.get(layer), _said(decision, [renamed(name, run.layers[0], layer) for name in names]))
        for layer in run.layers
    ]
    return [len([*group]) for _, group in groupby(said)]


def _said(decision: Decision, names: Sequence[str]) -> list[object]:
    known: tuple[Mapping[str, object], ...] = decision.strategies, decision.joins, decision.kept_slices
    return [tuple(each.get(name) for each in known) for name in names]


def _moved(decision: Decision, layers: Sequence[str], places: Mapping[str, str]) -> Decision:
    """What is decided of some of the layers, as if they were others; of the rest of the layers nothing."""

    def moved(what: Mapping[str, Said]) -> dict[str, Said]:
        found = {}
        for name, said in what.items():
            layer = next((layer for layer in layers if inside(name, layer)), None)
            if layer is None:
                found[name] = said
            elif layer in places:
                found[renamed(name, layer, places[layer])] = said
        return found

    return Decision(*(moved(each) for each in decision))  # type: ignore[arg-type]  # each is of its own kind
