"""Sums scattered where values meet: sequence parallelism (Megatron-LM, arXiv 2205.05198).

A product split by rows leaves a partial sum on each device. What reads it together with other values (a residual sum,
and with it the norms after it) may take it whole, which is an all-reduce, or each device a part of it, which is a
reduce-scatter there and a gather before the next product: as much is sent, and the op and what follows it are computed
and kept once. Megatron-LM cuts the sequence; here it is the first loop of the value that the devices divide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardweave.ir import Assignment, Axis, BoundRule, Layout, Mesh, axes_size
from shardweave.passes.follow import Choice, accepting
from shardweave.passes.layouts import input_layouts, output_layouts
from shardweave.passes.rules.registry import Rule


@dataclass
class Scatters:
    """The ways to spread one op over devices from which partial sums come."""

    bound: BoundRule
    rule: Rule | None
    mesh: Mesh
    found: dict[Assignment, Choice] = field(default_factory=dict)
    sums: set[frozenset[Axis]] = field(default_factory=set)

    def add(self, whole: Choice, arriving: Layout) -> None:
        """The way that differs from `whole` in that a partial sum, arriving so, is scattered; if there is one."""
        axes = frozenset(axis for axis, op in arriving.partial if op == "sum" and axis.kind == "space")
        rows = self.bound.outputs[0][0] if self.bound.outputs[0] else ()
        # A value that lies in parts of its other dimensions, too (AxoNN's), is small already: fewer ways to weigh up.
        if not axes or axes & set(whole.assignment) or not set(whole.assignment.values()) <= set(rows):
            return
        for name in (name for names in self.bound.outputs[0] for name in names):
            mine = [axis for axis, other in whole.assignment.items() if other == name]
            factor = self.bound.factor(name)
            if not factor.blocked and factor.size % axes_size([*axes, *mine]) == 0:
                spread = Assignment.of({**whole.assignment, **dict.fromkeys(self.mesh.ordered(axes), name)})
                wanted = accepting(self.rule, spread.as_dict(), input_layouts(self.bound, spread.as_dict(), self.mesh))
                results = output_layouts(self.bound, spread.as_dict(), self.mesh)
                self.found.setdefault(spread, Choice(spread.as_dict(), wanted, results, whole.blocked))
                self.sums.add(axes)
                return

    def among(self, choices: Mapping[Assignment, Choice], wanted: bool | None) -> dict[Assignment, Choice]:
        """`choices` with the scattered ones, without them, or those alone that leave no such sum whole."""
        if wanted is False or not self.found:
            return dict(choices)
        every = {**self.found, **choices}
        if wanted is None:
            return every
        return {spread: choice for spread, choice in every.items()
                if any(axes <= set(choice.assignment) for axes in self.sums)}  # fmt: skip
