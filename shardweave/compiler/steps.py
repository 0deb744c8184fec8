"""Steps: one captured step, annotated whole and folded, each once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cached_property

from shardweave.compiler.captured import Captured
from shardweave.compiler.fold import Fold, Run, find_runs, fold
from shardweave.compiler.pipeline import Annotated, annotate
from shardweave.options import Options
from shardweave.passes.annotate import covers
from shardweave.passes.modules import copied


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
        weaving = options.weaving
        chosen = weaving.recompute, weaving.operator_slices, weaving.keep_gathered, weaving.undivided
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
