"""The judge: what a plan's generated step takes, by simulating it, of deep models a few layers.

Of each stretch of equal layers that a plan spreads alike, two are lowered, scheduled and simulated. What they take of
the step's time, and what they hold of its memory, each of the others takes and holds as well (`extrapolation.py`).
Where sums of gradients take longer than a layer's kernels, so that they pile up, all layers are played (`unrolled`).
These are estimates, by which a plan is chosen: what the chosen one promises is simulated with all of its layers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch

from shardweave.cost_model import Options, Timeline, play
from shardweave.passes import Compiled, RepeatedLayers, layer_multiplicity
from shardweave.planner.problem.unfold import inside, renamed
from shardweave.planner.search.extrapolation import Layers, Taken, held_with_more, piles_up, taken_by, unrolled
from shardweave.planner.search.lowering import Decision, StepLowering
from shardweave.sharding import Run, layer_of, layers_of_ops

LEFT = 2
"""Layers of a stretch that are simulated."""


@dataclass(frozen=True)
class Judged:
    """What the simulator says of a step.

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
    def of(cls, timeline: Timeline) -> Judged:
        """Of a step that was simulated whole."""
        return cls(
            timeline.step_time,
            timeline.compute_time,
            timeline.exposed_communication,
            timeline.peak_memory,
            timeline.memory.at_peak(),
        )


Known = deque[tuple[tuple[Options, Decision], Judged]]
"""What plans take, on one cluster."""

Said = TypeVar("Said")

class Judge:
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

    def __call__(self, decision: Decision, options: Options) -> Judged:
        """What the step takes; `options` have the memory limit."""
        asked = options, decision
        found = next((judged for other, judged in self.known if other == asked), None)
        if found is None:
            found = self._simulated(decision, options)
            self.known.append((asked, found))
        return found

    def whole(self, decision: Decision, options: Options) -> Judged:
        """What the step takes, all of its layers lowered and simulated."""
        options = replace(options, recompute={**options.overlap.recompute, **decision.modes})
        return Judged.of(self.lowering.timeline(self.lowering.draft(self.steps.whole, decision, options)))

    def _simulated(self, decision: Decision, options: Options) -> Judged:
        few = self._few(decision, options)
        fold, annotated = self.steps.folded(few.left)
        decision, alike = few.decision, few.alike
        options = replace(options, recompute={**options.overlap.recompute, **decision.modes})
        compiled = self.lowering.draft(annotated, decision, options, alike)
        judged = Judged.of(timeline := self.lowering.timeline(compiled))
        if not fold.stands_for:
            return judged
        layers = Layers(layers_of_ops(annotated.captured.graph.graph))
        taken = [taken_by(timeline, layers, same).times(others) for same, others in alike]
        optimizer = self._optimizer(compiled, alike) - self._optimizer(compiled, ())
        compute, exposed = (sum(each) for each in zip(*taken, Taken(optimizer, 0.0)))
        seconds = Taken(judged.compute_time + compute, judged.exposed_communication + exposed)
        if piles_up(timeline.acts, layers, alike):
            acts = unrolled(timeline.acts, layers, alike, {*annotated.captured.parameters.values()})
            if acts is not None:
                played = play(acts, device=self.lowering.cluster.device)
                seconds = Taken(played.compute + optimizer, played.seconds - played.compute)
        held = held_with_more(timeline.memory, layers, alike)
        return Judged(sum(seconds), *seconds, held.peak, held.at_peak())

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
        left: dict[Run, int] = {}
        alike: list[tuple[Sequence[str], int]] = []
        places: dict[str, str] = {}
        runs = self.steps.runs(options) if not options.ablation.flat_parameter else []  # it has all layers
        for run in runs:
            begin = count = 0
            for length in _lengths(decision, run):
                few = min(LEFT, length)
                places.update(zip(run.layers[begin : begin + few], run.layers[count : count + few], strict=True))
                alike.append((run.layers[count : count + few], length - few))
                begin, count = begin + length, count + few
            left[run] = count
        layers = [layer for run in left for layer in run.layers]
        return _Few(left, _moved(decision, layers, places), alike)


class _Few(NamedTuple):
    """What is left of each run, what is decided of that, and how many more of each stretch there are."""

    left: dict[Run, int]
    decision: Decision
    alike: RepeatedLayers


def _lengths(decision: Decision, run: Run) -> list[int]:
    """Of the stretches of a run, cut where what is decided changes."""
    names = [name for name in (*decision.strategies, *decision.joins) if inside(name, run.layers[0])]
    said = [
        (decision.modes.get(layer), _said(decision, [renamed(name, run.layers[0], layer) for name in names]))
        for layer in run.layers
    ]
    return [len([*group]) for _, group in groupby(said)]


def _said(decision: Decision, names: Sequence[str]) -> list[object]:
    return [decision.strategies.get(name) or decision.joins.get(name) for name in names]


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

    return Decision(moved(decision.strategies), moved(decision.joins), moved(decision.modes))
