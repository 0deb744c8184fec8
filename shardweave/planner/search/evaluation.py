"""Evaluation of plans: lower a plan of one step on one cluster, and simulate the generated step.

Of each stretch of equal layers with one strategy, two layers are lowered, scheduled and simulated. Each of the others
adds as much to the step's time and memory as one of these: away from its ends a step is periodic. Memory is counted
once more for each layer that was left out, except for what one layer holds only while it is computed. Where gradient
reductions take longer than a layer's kernels, so that they queue up, one layer is repeated and all layers are
simulated.

These are estimates by which plans are compared. The figures of the plan that is returned come from a simulation of all
layers.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from shardweave.cost_model import (
    Cluster,
    MemoryCurve,
    Options,
    StreamOp,
    Timeline,
    Transfer,
    optimizer_seconds,
    replay,
    simulate,
)
from shardweave.ir import Assignment, OverlapConfig, PlanError, RecomputeMode, Strategy, readable_bytes
from shardweave.passes import Annotated, Compiled, RepeatedLayers, Shards, layer_multiplicity, lower
from shardweave.planner.search.layer_problem import Steps, inside, renamed
from shardweave.planner.search.plan import Plan
from shardweave.sharding import LayerRun, layer_of, layers_of_ops

MAX_CACHED_SHARDED_GRAPHS = 8
"""The number of decisions whose sharded graphs are cached: a plan under a similar limit asks for the same ones."""

Sharded = deque[tuple[tuple[object, ...], dict[int, Shards]]]
"""A cache of sharded graphs by decision and annotated step."""


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
        self._sharded: Sharded = deque(maxlen=MAX_CACHED_SHARDED_GRAPHS) if sharded is None else sharded

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

    def options_of(self, plan: Plan) -> Options:
        """The options for lowering a plan's step: the plan's own choices, else the user's."""
        return replace(
            self.options,
            micro_batches=plan.micro_batches,
            memory_limit=plan.schedule_limit or self.options.limit(self.cluster),
            optimizer=self.options.optimizer if plan.optimizer_bytes is None else plan.optimizer_bytes,
        ).with_overlap(plan.overlap)

    def draft(self, annotated: Annotated, decision: Decision, options: Options, alike: RepeatedLayers = ()) -> Compiled:
        """Lower a decision for a step, perhaps with fewer layers, for simulation only."""
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


LASTING = ("parameters", "optimizer", "copies", "buffers", "saved", "gradients")
"""The kinds of memory that layers hold while others are computed."""


class Taken(NamedTuple):
    """Seconds of a step, computing and waiting for collectives."""

    compute: float
    exposed: float

    def times(self, count: int) -> Taken:
        """So many times as much."""
        return Taken(count * self.compute, count * self.exposed)


@dataclass(frozen=True)
class Layers:
    """The layers of ops, by the name of their module, or among `others` by their own."""

    others: Mapping[str, str]

    def of(self, owner: str) -> str:
        """The layer of an event or of a memory change.

        >>> Layers({"add_7": "blocks.1"}).of("add_7"), Layers({}).of("blocks.2.up (mm_3)")
        ('blocks.1', 'blocks.2')
        """
        name = owner.partition(" ")[0]
        return self.others.get(name) or layer_of(name)


def taken_by(timeline: Timeline, layers: Layers, few: Sequence[str]) -> Taken:
    """The mean time of one of a few equal layers."""
    compute = exposed = 0.0
    for event in timeline.events:
        if event.kind in ("compute", "wait") and layers.of(event.op) in few:
            compute += event.seconds if event.kind == "compute" else 0.0
            exposed += event.seconds if event.kind == "wait" else 0.0
    return Taken(compute / len(few), exposed / len(few))


def held_with_more(memory: MemoryCurve, layers: Layers, alike: RepeatedLayers) -> MemoryCurve:
    """The curve with so many more of equal layers, each holding what the one of them holds that holds least."""
    mine: dict[str, list[int]] = {}
    for row, change in enumerate(memory.changes, start=1):
        if change.kind in LASTING:
            mine.setdefault(layers.of(change.owner), []).append(row)
    deltas = np.diff(memory.bytes, axis=0, prepend=0)
    found = memory.bytes.copy()
    for few, others in alike:
        if others:
            found += others * _least([_held(deltas, mine.get(layer, [])) for layer in few])
    return replace(memory, bytes=found)


def _held(deltas: NDArray[np.int64], rows: Sequence[int]) -> NDArray[np.int64]:
    """What these changes have led to, at each moment."""
    own = np.zeros_like(deltas)
    own[rows] = deltas[rows]
    return np.cumsum(own, axis=0)


def _least(held: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """At each moment the row with the smallest sum."""
    least = np.argmin([each.sum(axis=1) for each in held], axis=0)
    return np.asarray(np.stack(held)[least, np.arange(len(least))])


Key = tuple[int, str, str]
"""The stretch of layers that a collective is of, its group, and what it does: the same for each of the layers."""


def piles_up(acts: Sequence[StreamOp], layers: Layers, alike: RepeatedLayers) -> bool:
    """Whether sums of gradients of a layer of which there are more take longer than its kernels in one of the graphs.

    What is waited for within a layer, as activations are and parameters, does not pile up.
    """
    more = {layer for few, others in alike if others for layer in few}
    ahead: defaultdict[tuple[int, str], float] = defaultdict(float)
    for act in acts:
        if not act.waits and (layer := layers.of(act.op)) in more:
            if act.transfer is None:
                ahead[act.part, layer] -= act.seconds
            elif act.transfer.cause == "gradient":
                ahead[act.part, layer] += act.transfer.demand.seconds
    return max(ahead.values(), default=0.0) > 0


def unrolled(
    acts: Sequence[StreamOp], layers: Layers, alike: RepeatedLayers, parameters: Container[str]
) -> list[StreamOp] | None:
    """The acts with so many more of equal layers.

    Parameters
    ----------
    acts : sequence of StreamOp
        Of a step of few layers.
    layers : Layers
    alike : sequence of (sequence of str, int)
        Layers that are equal, and how many more of them there are.
    parameters : container of str
        The names of parameters: the kernels that cast them may come long before their layer's turn.

    Returns
    -------
    list of StreamOp, optional
        None where no period is found.
    """
    found: list[StreamOp] = []
    for _, part in groupby(acts, lambda act: act.part):
        longer = _Part([*part], layers, alike, parameters).unrolled()
        if longer is None:
            return None
        found += longer
    return found


class _Period(NamedTuple):
    end: int
    """The act before which its repetitions come."""
    acts: Sequence[StreamOp]


class _Part:
    """The acts of one graph."""

    def __init__(
        self, acts: Sequence[StreamOp], layers: Layers, alike: RepeatedLayers, parameters: Container[str]
    ) -> None:
        self.acts, self.parameters = acts, parameters
        self.places: defaultdict[str, list[int]] = defaultdict(list)
        for place, act in enumerate(acts):
            self.places[layers.of(act.op)].append(place)
        self.more = [(few, others) for few, others in alike if others and any(layer in self.places for layer in few)]
        self.keys: dict[Transfer, Key] = {}
        for number, (few, _) in enumerate(self.more):
            for layer in few:
                for act in self._of(layer):
                    if act.transfer is not None:
                        kind, _, owner = act.transfer.name.partition(" ")
                        inside = owner.removeprefix(layer) if owner.startswith(layer) else ""  # or a sum's own name
                        self.keys[act.transfer] = number, act.transfer.group, kind + inside

    def unrolled(self) -> list[StreamOp] | None:
        repeated: dict[int, list[StreamOp]] = {}
        for few, others in self.more:
            period = self._period(few)
            if period is None:
                return None
            repeated[period.end] = [*period.acts] * others
        return self._matched(each for place, act in enumerate(self.acts) for each in (*repeated.get(place, ()), act))

    def _period(self, few: Sequence[str]) -> _Period | None:
        """The acts of a period; None of layers that have no kernels here, or share the buckets of their sums."""
        kernels = [self._kernels(layer) for layer in few]
        if len(few) != 2 or not all(kernels) or len({*map(self._sums, few)}) > 1:
            return None
        (mine, first), (others, second) = sorted(zip(kernels, few))
        begin, end, last = mine[0], others[0], others[-1]
        placed = [
            (float(place), self.acts[place]) for layer in few for place in self._from(layer, begin) if place < end
        ]
        ahead, behind = self._from(first, begin), self._from(second, end)
        for place in self._from(first, end):
            if place < last or not self.acts[place].waits:  # what is not needed before the end is waited for there
                twin = min(bisect(behind, place), len(ahead)) - 1
                placed.append((ahead[twin] + 0.5, self.acts[place]))
        acts = [act for _, act in sorted(placed, key=lambda each: each[0])]
        return _Period(end, self._balanced(acts, first, second, begin))

    def _balanced(self, acts: list[StreamOp], first: str, second: str, begin: int) -> list[StreamOp]:
        """With as many kernels and collectives as a layer has: near the ends others are started ahead of their period.

        What was started for the second layer before the period began comes first; what is too much and last goes.
        """
        lacking = self._count(self._of(first))
        lacking.subtract(self._count(acts))
        earlier = []
        for place in self.places[second]:
            what = self._what(self.acts[place])
            if place < begin and what is not None and lacking[what] > 0:
                lacking[what] -= 1
                earlier.append(self.acts[place])
        kept = []
        for act in reversed(acts):
            what = self._what(act)
            if what is not None and lacking[what] < 0:
                lacking[what] += 1
            else:
                kept.append(act)
        return [*earlier, *reversed(kept)]

    def _what(self, act: StreamOp) -> Key | float | None:
        """What it starts, or the seconds of its kernel; None of a wait."""
        if act.waits:
            return None
        return act.seconds if act.transfer is None else self.keys[act.transfer]

    def _of(self, layer: str) -> list[StreamOp]:
        return [self.acts[place] for place in self.places[layer]]

    def _from(self, layer: str, begin: int) -> list[int]:
        """Where its acts are from a place on."""
        return [place for place in self.places[layer] if place >= begin]

    def _kernels(self, layer: str) -> list[int]:
        """Where its kernels are, but for those of its parameters."""
        kernels = [place for place in self.places[layer] if self.acts[place].transfer is None]
        return [place for place in kernels if self.acts[place].op not in self.parameters]

    def _sums(self, layer: str) -> int:
        """How many of its gradients' sums are started."""
        return sum(act.transfer is not None and act.transfer.cause == "gradient" for act in self._of(layer))

    def _count(self, acts: Iterable[StreamOp]) -> Counter[Key | float]:
        """How many collectives of each key are started, and kernels of each length run."""
        return Counter(what for act in acts if (what := self._what(act)) is not None)

    def _matched(self, acts: Iterable[StreamOp]) -> list[StreamOp] | None:
        """With a collective of its own for each start; a wait is for the oldest of its key, or comes at the end."""
        under_way: defaultdict[Key, deque[Transfer]] = defaultdict(deque)
        found = []
        for act in acts:
            key = None if act.transfer is None else self.keys.get(act.transfer)
            if act.transfer is None or key is None:
                found.append(act)
            elif not act.waits:
                own = Transfer(act.transfer.group, act.transfer.demand, name=act.transfer.name)
                under_way[key].append(own)
                found.append(act._replace(transfer=own))
            elif under_way[key]:
                found.append(act._replace(transfer=under_way[key].popleft()))
            else:
                return None
        part = self.acts[0].part
        left = [each for transfers in under_way.values() for each in transfers]
        return [*found, *(StreamOp(part, "", transfer=each, waits=True) for each in left)]


SIMULATED_LAYERS = 2
"""The number of layers of a stretch that are simulated."""


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
    """

    step_time: float
    compute_time: float
    exposed_communication: float
    peak_memory: int
    at_peak: Mapping[str, int]

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


Known = deque[tuple[tuple[Options, Decision], Evaluation]]
"""Evaluates plans of one step on one cluster."""

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
        self.known: Known = deque() if known is None else known

    def __call__(self, decision: Decision, options: Options) -> Evaluation:
        """Evaluate a decision; `options` have the memory limit."""
        asked = options, decision
        found = next((evaluation for other, evaluation in self.known if other == asked), None)
        if found is None:
            found = self._simulated(decision, options)
            self.known.append((asked, found))
        return found

    def whole(self, decision: Decision, options: Options) -> Evaluation:
        """Evaluate a decision with all layers lowered and simulated."""
        options = options.with_overlap(decision.overlap(options.overlap))
        return Evaluation.of(self.lowering.timeline(self.lowering.draft(self.steps.whole, decision, options)))

    def _simulated(self, decision: Decision, options: Options) -> Evaluation:
        few = self._few(decision, options)
        fold, annotated = self.steps.folded(few.left)
        decision, alike = few.decision, few.alike
        options = options.with_overlap(decision.overlap(options.overlap))
        compiled = self.lowering.draft(annotated, decision, options, alike)
        evaluation = Evaluation.of(timeline := self.lowering.timeline(compiled))
        if not fold.stands_for:
            return evaluation
        layers = Layers(layers_of_ops(annotated.captured.graph.graph))
        taken = [taken_by(timeline, layers, same).times(others) for same, others in alike]
        optimizer = self._optimizer(compiled, alike) - self._optimizer(compiled, ())
        compute, exposed = (sum(each) for each in zip(*taken, Taken(optimizer, 0.0)))
        seconds = Taken(evaluation.compute_time + compute, evaluation.exposed_communication + exposed)
        if piles_up(timeline.stream_ops, layers, alike):
            acts = unrolled(timeline.stream_ops, layers, alike, {*annotated.captured.parameters.values()})
            if acts is not None:
                played = replay(acts, device=self.lowering.cluster.device)
                seconds = Taken(played.compute + optimizer, played.seconds - played.compute)
        held = held_with_more(timeline.memory, layers, alike)
        return Evaluation(sum(seconds), *seconds, held.peak, held.at_peak())

    def _optimizer(self, compiled: Compiled, alike: RepeatedLayers) -> float:
        """Seconds of the optimizer's step with so many more of each layer."""
        sizes, times = [], layer_multiplicity(alike)
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
        alike: list[tuple[Sequence[str], int]] = []
        places: dict[str, str] = {}
        runs = self.steps.runs(options) if not options.ablation.flat_parameter else []  # it has all layers
        for run in runs:
            begin = count = 0
            for length in _lengths(decision, run):
                few = min(SIMULATED_LAYERS, length)
                places.update(zip(run.layers[begin : begin + few], run.layers[count : count + few], strict=True))
                alike.append((run.layers[count : count + few], length - few))
                begin, count = begin + length, count + few
            left[run] = count
        layers = [layer for run in left for layer in run.layers]
        return _Few(left, _moved(decision, layers, places), alike)


class _Few(NamedTuple):
    """What is left of each run, what is decided of that, and how many more of each stretch there are."""

    left: dict[LayerRun, int]
    decision: Decision
    alike: RepeatedLayers


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
