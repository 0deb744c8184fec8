"""Priced: a folded step with its problem, and the problems of the whole step that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from shardweave.compiler.captured import Captured
from shardweave.compiler.fold import Fold
from shardweave.compiler.pipeline import Annotated
from shardweave.compiler.planner.costing import Costing
from shardweave.compiler.planner.recomputation import with_modes
from shardweave.compiler.planner.returned import with_outputs
from shardweave.compiler.planner.rows import Costed
from shardweave.compiler.planner.slicing import with_slices
from shardweave.compiler.planner.unfold import inside, renamed, unfold
from shardweave.errors import PlanError
from shardweave.passes.annotate import checkpoint_of


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
            costed = with_modes(self.costing, costed, options.weaving.recompute)
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
