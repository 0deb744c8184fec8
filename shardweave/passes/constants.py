"""Constants of a step, made where they are wanted: each rank makes its own part of a mask, a range, a block of zeros.

What depends on no input has no place of its own. Asked for at a layout, an op that a rule splits is written on the
parts of its inputs, these on the parts of theirs, down to a `full` or a `arange` of local size. Where no rule does,
the constant is made whole and sliced.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardweave.errors import RuleError
from shardweave.ir import Axis, BoundRule, Layout, Mesh
from shardweave.passes.layouts import factors_of, input_layouts, output_layouts, through
from shardweave.passes.rules import find_rule
from shardweave.passes.rules.registry import Rule


@dataclass(frozen=True)
class Part:
    """How a part of a constant or a view is made: its op's rule, the axes on its factors, the parts of its inputs."""

    rule: Rule | None
    bound: BoundRule
    assignment: dict[Axis, str]
    inputs: tuple[Layout, ...]


def part(node: fx.Node, want: Layout, mesh: Mesh) -> Part | None:
    """How to make a constant at `want`; None where it has to be made whole."""
    rule = find_rule(node)
    if rule is None:
        return None
    try:
        bound = rule.bind(node)
    except RuleError:
        return None
    if rule.kind == "view":
        back = through(want, bound.outputs[0], bound.inputs[0], bound.sizes())
        return None if back is None else Part(rule, bound, {}, (back,))
    assignment = factors_of(want.dims, bound.outputs[0], bound.sizes())
    if any(bound.factor(name).blocked for name in assignment.values()):
        return None
    if output_layouts(bound, assignment, mesh) != (want,):
        return None
    return Part(rule, bound, assignment, input_layouts(bound, assignment, mesh))
