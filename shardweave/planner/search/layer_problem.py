"""The problem of a step of few layers of each kind, written out for all of them.

Steps: one captured step, annotated whole and folded, each once.

Priced: a folded step with its problem, and the problems of the whole step that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardweave.cost_model import Options
from shardweave.ir import Captured, PlanError
from shardweave.passes import Annotated, annotate
from shardweave.planner.problem.build_problem import Costing
from shardweave.planner.problem.operator_slicing import with_slices
from shardweave.planner.problem.output_resharding import with_outputs
from shardweave.planner.problem.recompute_costs import with_modes
from shardweave.planner.problem.unfold import inside, renamed, unfold
from shardweave.planner.problem.variables import Costed
from shardweave.sharding import Fold, Run, checkpoint_of, copied, covers, find_runs, fold


class Steps:
    """A captured step, in as many of its equal layers as are wanted."""

    def __init__(self, captured: Captured, options: Options) -> None:
        self.captured, self.options = captured, options
        self._runs: dict[Hashable, list[Run]] = {}
        self._folded: dict[Hashable, tuple[Fold, Annotated]] = {}

    @cached_property
    def whole(self) -> Annotated:
        """The whole step, annotated."""
        return annotate(replace(self.captured, graph=copied(self.captured.graph)), self.options)

    def runs(self, options: Options) -> list[Run]:
        """The runs of layers that are equal and of which the options say the same."""
        overlap = options.overlap
        chosen = overlap.recompute, overlap.operator_slices, overlap.keep_gathered, overlap.exclude_from_sub_batches
        patterns = (*options.force, *(pattern for patterns in chosen for pattern in patterns))

        def said(name: str) -> Hashable:
            return tuple(pattern for pattern in patterns if covers(pattern, name))

        if patterns not in self._runs:
            self._runs[patterns] = find_runs(self.captured, said)
        return self._runs[patterns]

    def folded(self, left: Mapping[Run, int]) -> tuple[Fold, Annotated]:
        """The step with so many layers of each run, annotated."""
        left = {run: count for run, count in left.items() if count < len(run.layers)}
        if not left:
            return Fold(self.whole.captured, ()), self.whole
        key = frozenset(left.items())
        if key not in self._folded:
            found = fold(self.captured, left)
            self._folded[key] = found, annotate(found.captured, self.options)
        return self._folded[key]


@dataclass(frozen=True)
class Priced:
    """A folded step with its problem."""

    fold: Fold
    annotated: Annotated
    costing: Costing
    costed: Costed
    buffer_bytes: int
    """Of the whole step's buffers."""

    @cached_property
    def unfolds(self) -> bool:
        """Whether the last layer of each run that is left is like the one before it."""
        return self._unfolded(self.costed) is not None

    @property
    def has_checkpoints(self) -> bool:
        """Whether the user says what is recomputed, by activation checkpoints in the model."""
        return any(checkpoint_of(node) for node in self.annotated.captured.graph.graph.nodes)

    @cached_property
    def computed_again(self) -> Costed:
        """The whole step's problem with a choice of recomputation for each layer."""
        return self.whole(with_modes(self.costing, self.costed))

    @cached_property
    def sliced(self) -> Costed:
        """The folded step's problem with slices of ops that gather much."""
        return with_slices(self.costing, self.costed)

    def ways_to_save(self, modes: bool) -> Iterator[Callable[[], Costed] | None]:
        """The whole step's problem with more and more ways to save memory; None stands for the one without any.

        Slices of ops that gather much are the last resort. The program's memory is rough: what gathers much may fit,
        though it counts too much, and is faster whole.
        """
        yield (lambda: self.computed_again) if modes else None
        if self.sliced is not self.costed:
            yield lambda: self.whole(with_modes(self.costing, self.sliced) if modes else self.sliced)

    def whole(self, costed: Costed) -> Costed:
        """The problem of the whole step, with what the options say of recomputation."""
        options = self.costing.options
        if options.recompute is not None:
            costed = with_modes(self.costing, costed, options.overlap.recompute)
        found = self._unfolded(costed)
        if found is None:
            raise PlanError("layers that are equal are not priced alike: a bug in shardweave")
        found = with_outputs(self.costing, found, self._last)
        left_out = self.buffer_bytes - buffer_bytes(self.annotated.captured)
        return replace(found, problem=replace(found.problem, fixed_bytes=found.problem.fixed_bytes + left_out))

    def _last(self, name: str) -> str:
        """The last variable of the whole step that one of the folded step stands for."""
        for layer, others in self.fold.stands_for.items():
            if others and inside(name, layer):
                return renamed(name, layer, others[-1])
        return name

    def _unfolded(self, costed: Costed) -> Costed | None:
        before = {run.layers[count - 1]: run.layers[count - 2] for run, count in self.fold.runs}
        return unfold(costed, self.fold.stands_for, before)


def buffer_bytes(captured: Captured) -> int:
    """What the buffers of a step take."""
    values = [node.meta["val"] for node in captured.graph.graph.nodes if node.name in captured.buffers]
    return sum(value.numel() * value.element_size() for value in values)
