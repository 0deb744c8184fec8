"""The judge: what a plan's generated step takes, by simulating it, of deep models a few layers.

Of each stretch of equal layers that a plan spreads alike, a few are lowered, scheduled and simulated, and once more
with one more of each; the difference stands for each of the others, shared out among stretches as the program sees
them. Away from its ends a step is periodic, so that this is what the whole step takes but for what the ends of a
stretch are worth.
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
    """What a plan says of each op, each join and each layer, by name, and the bytes that each keeps and its seconds."""

    strategies: dict[str, Strategy]
    joins: dict[str, Assignment]
    modes: dict[str, Mode]
    """How layers are recomputed that the planner chose it for."""
    kept_bytes: dict[str, int]
    seconds: dict[str, float]


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

    def extended(self, larger: Judged, times: float, times_bytes: float) -> Judged:
        """This, and so many times what `larger` has more: its seconds, and its bytes."""
        kinds = {**self.at_peak, **larger.at_peak}
        held = {kind: (self.at_peak.get(kind, 0), larger.at_peak.get(kind, 0)) for kind in kinds}
        return Judged(
            self.step_time + times * (larger.step_time - self.step_time),
            self.compute_time + times * (larger.compute_time - self.compute_time),
            max(0.0, self.exposed_communication + times * (larger.exposed_communication - self.exposed_communication)),
            int(self.peak_memory + times_bytes * (larger.peak_memory - self.peak_memory)),
            {kind: int(mine + times_bytes * (theirs - mine)) for kind, (mine, theirs) in held.items()},
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
        long = [stretch for stretch in stretches if len(stretch.layers) > LEFT]
        left = {stretch: min(LEFT, len(stretch.layers)) for stretch in stretches}
        judged = self._simulated(decision, options, left)
        if not long:
            return judged
        larger = self._simulated(decision, options, {**left, **dict.fromkeys(long, LEFT + 1)})
        return judged.extended(larger, _times(long, decision.seconds), _times(long, decision.kept_bytes))

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


def _times(stretches: Sequence[Run], figures: Mapping[str, float]) -> float:
    """How many times one more layer of each stretch is what is left out, a layer counting by its figure."""
    one = rest = 0.0
    for stretch in stretches:
        own = sum(figure for name, figure in figures.items() if inside(name, stretch.layers[0]))
        one += own
        rest += own * (len(stretch.layers) - LEFT)
    if not one:  # then they count alike
        return sum(len(stretch.layers) - LEFT for stretch in stretches) / len(stretches)
    return rest / one
