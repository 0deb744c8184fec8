"""The judge: what a plan's generated step takes, by simulating it, of deep models a few layers.

Of each stretch of equal layers that a plan spreads alike, two are lowered, scheduled and simulated. What they take of
the step's time, and what they hold of its memory, each of the others takes and holds as well (`per_layer.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from shardweave.compiler.fold import Run, layers_of_ops
from shardweave.compiler.per_layer import Layers, Taken, held_with_more, taken_by
from shardweave.compiler.pipeline import Annotated, Compiled, times_of
from shardweave.compiler.planner.unfold import inside, renamed
from shardweave.compiler.steps import Steps
from shardweave.cost_model import Timeline
from shardweave.ir import Assignment, Mode, Strategy
from shardweave.options import Options
from shardweave.passes.recompute import layer_of
from shardweave.passes.schedule import Alike

LEFT = 2
"""Layers of a stretch that are simulated."""


class Decision(NamedTuple):
    """What a plan says of each op, each join and each layer, by name."""

    strategies: dict[str, Strategy]
    joins: dict[str, Assignment]
    modes: dict[str, Mode]
    """How layers are recomputed that the planner chose it for."""


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


Lower = Callable[[Annotated, Decision, Options, Alike], Compiled]


class Judge:
    """Simulates plans of one step.

    Parameters
    ----------
    steps : Steps
        The step.
    lower : callable
        From an annotated step, what is decided, the options and what its layers stand for to the lowered step.
    simulate : callable
        From the lowered step to its timeline.
    optimizer : callable
        From the lowered step and the bytes of each trained parameter to the seconds of the optimizer's step.
    """

    def __init__(
        self,
        steps: Steps,
        lower: Lower,
        simulate: Callable[[Compiled], Timeline],
        optimizer: Callable[[Compiled, Sequence[int]], float],
    ) -> None:
        self.steps, self.lower, self.simulate, self.optimizer = steps, lower, simulate, optimizer

    def __call__(self, decision: Decision, options: Options) -> Judged:
        """What the step takes; `options` have the memory limit."""
        left = {stretch: min(LEFT, len(stretch.layers)) for stretch in self._stretches(decision, options)}
        fold, annotated = self.steps.folded(left)
        alike = [(run.layers[:count], len(run.layers) - count) for run, count in left.items()]
        gone = {layer for others in fold.stands_for.values() for layer in others}
        modes = {layer: mode for layer, mode in decision.modes.items() if layer not in gone}
        options = replace(options, recompute={**options.weaving.recompute, **modes})
        compiled = self.lower(annotated, decision, options, alike)
        judged = Judged.of(timeline := self.simulate(compiled))
        if not gone:
            return judged
        layers = Layers(layers_of_ops(annotated.captured.graph.graph))
        taken = [taken_by(timeline, layers, few).times(others) for few, others in alike]
        optimizer = self._optimizer(compiled, alike) - self._optimizer(compiled, ())
        compute, exposed = (sum(each) for each in zip(*taken, Taken(optimizer, 0.0)))
        held = held_with_more(timeline.memory, layers, alike)
        return Judged(
            judged.step_time + compute + exposed,
            judged.compute_time + compute,
            judged.exposed_communication + exposed,
            held.peak,
            held.at_peak(),
        )

    def _optimizer(self, compiled: Compiled, alike: Alike) -> float:
        """Seconds of the optimizer's step with so many more of each layer."""
        sizes, times = [], times_of(alike)
        for parameter in compiled.step.spec.parameters:
            if parameter.trainable:
                size = math.prod(parameter.layout.local_shape) * getattr(torch, parameter.dtype).itemsize
                sizes += [size] * times.get(layer_of(parameter.name), 1)
        return self.optimizer(compiled, sizes)

    def _stretches(self, decision: Decision, options: Options) -> list[Run]:
        """The runs, cut where what is decided changes."""
        found: list[Run] = []
        names = [*decision.strategies, *decision.joins]
        for run in self.steps.runs(options):
            first = [name for name in names if inside(name, run.layers[0])]
            said = [
                (decision.modes.get(layer), _said(decision, [renamed(name, run.layers[0], layer) for name in first]))
                for layer in run.layers
            ]
            begin = 0
            for end in range(1, len(said) + 1):
                if end == len(said) or said[end] != said[begin]:
                    found.append(Run(run.layers[begin:end]))
                    begin = end
        return found


def _said(decision: Decision, names: Sequence[str]) -> list[object]:
    return [decision.strategies.get(name) or decision.joins.get(name) for name in names]
