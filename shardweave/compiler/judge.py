"""The judge: what a plan's generated step takes, by simulating it, of deep models a few layers.

Of each stretch of equal layers that a plan spreads alike, a few are lowered, scheduled and simulated, once more with
one layer more; the difference stands for each of the others. Away from its ends a step is periodic, so that this is
what the whole step takes but for what the ends of a stretch are worth (docs/simulator.md has figures).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardweave.compiler.fold import Run
from shardweave.compiler.pipeline import Annotated, Compiled
from shardweave.compiler.planner.unfold import inside, renamed
from shardweave.compiler.steps import Steps
from shardweave.cost_model import Timeline
from shardweave.ir import Assignment, Mode, Strategy
from shardweave.options import Options

LEFT = 2
"""Layers of a stretch that are simulated, and one more for the difference."""


class Decision(NamedTuple):
    """What a plan says of each op, each join and each layer, by name, and the bytes that each keeps."""

    strategies: dict[str, Strategy]
    joins: dict[str, Assignment]
    modes: dict[str, Mode]
    """How layers are recomputed that the planner chose it for."""
    kept_bytes: dict[str, int]


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

    def extended(self, smaller: Judged, larger: Judged, times: int) -> Judged:
        """This, and as many times as said what `larger` has more than `smaller`."""

        def more(mine: float, less: float, more: float) -> float:
            return mine + times * (more - less)

        kinds = {**self.at_peak, **smaller.at_peak, **larger.at_peak}
        held = [{kind: part.at_peak.get(kind, 0) for kind in kinds} for part in (self, smaller, larger)]
        return Judged(
            more(self.step_time, smaller.step_time, larger.step_time),
            more(self.compute_time, smaller.compute_time, larger.compute_time),
            more(self.exposed_communication, smaller.exposed_communication, larger.exposed_communication),
            int(more(self.peak_memory, smaller.peak_memory, larger.peak_memory)),
            {kind: int(more(*(part[kind] for part in held))) for kind in kinds},
        )


Lower = Callable[[Annotated, Decision, Options], Compiled]


class Judge:
    """Simulates plans of one step.

    Parameters
    ----------
    steps : Steps
        The step.
    lower : callable
        From an annotated step, what is decided and the options to the lowered step.
    simulate : callable
        From the lowered step to its timeline.
    """

    def __init__(self, steps: Steps, lower: Lower, simulate: Callable[[Compiled], Timeline]) -> None:
        self.steps, self.lower, self.simulate = steps, lower, simulate

    def __call__(self, decision: Decision, options: Options) -> Judged:
        """What the step takes; `options` have the memory limit."""
        stretches = self._stretches(decision, options)
        left = {stretch: min(LEFT, len(stretch.layers)) for stretch in stretches}
        judged = first = self._simulated(decision, options, left)
        for stretch in stretches:
            if len(stretch.layers) > LEFT:
                larger = self._simulated(decision, options, {**left, stretch: LEFT + 1})
                judged = judged.extended(first, larger, len(stretch.layers) - LEFT)
        return judged

    def _simulated(self, decision: Decision, options: Options, left: Mapping[Run, int]) -> Judged:
        fold, annotated = self.steps.folded(left)
        gone = [layer for layers in fold.stands_for.values() for layer in layers]
        held = sum(size for name, size in decision.kept_bytes.items() if any(inside(name, layer) for layer in gone))
        assert options.memory_limit is not None
        left_modes = {layer: mode for layer, mode in decision.modes.items() if layer not in gone}
        smaller = replace(
            options,
            memory_limit=max(1, options.memory_limit - held),
            recompute={**options.weaving.recompute, **left_modes},
        )
        return Judged.of(self.simulate(self.lower(annotated, decision, smaller)))

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
