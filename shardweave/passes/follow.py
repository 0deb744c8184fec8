"""Following: how an op without a strategy of its own is spread, given where its inputs lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardweave.ir import Axis, BoundRule, Layout, Mesh, axes_size
from shardweave.passes.layouts import factors_of, input_layouts, output_layouts
from shardweave.passes.rules.registry import Rule


@dataclass(frozen=True)
class Arrival:
    """An input of an op: where it lies, how large it is, whether it is a parameter, whether the op is its only user."""

    layout: Layout
    numel: int
    is_parameter: bool = False
    single_user: bool = True


@dataclass(frozen=True)
class Choice:
    """How a following op is spread: its assignment, where it wants its inputs, where its outputs then lie.

    `blocked` are the axes that arrived on a factor that the op cannot split, and so have to be gathered.
    """

    assignment: dict[Axis, str]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    blocked: frozenset[Axis]


def follow(bound: BoundRule, rule: Rule | None, arrivals: Sequence[Arrival], mesh: Mesh) -> Choice:
    """Keep every axis that some input brings on a factor that may be split.

    The largest input that is no partial sum decides first, then the others; a partial sum is thereby scattered
    into where the other inputs lie. Parameters decide only where nothing else does.
    """
    sizes = bound.sizes()
    passing = _passing(rule, arrivals)
    deciding = [index for index, arrival in enumerate(arrivals) if not arrival.is_parameter]
    deciding = deciding or list(range(len(arrivals)))
    deciding.sort(key=lambda index: (bool(arrivals[index].layout.partial), -arrivals[index].numel, index))
    assignment: dict[Axis, str] = {}
    blocked: set[Axis] = set()
    for index in deciding:
        for axis, name in factors_of(arrivals[index].layout.dims, bound.inputs[index], sizes).items():
            if axis in passing or axis in assignment:
                continue
            if bound.factor(name).blocked:
                blocked.add(axis)
                continue
            mine = [other for other, factor in assignment.items() if factor == name]
            if sizes[name] % axes_size([axis, *mine]) == 0:
                assignment[axis] = name
    wanted = input_layouts(bound, assignment, mesh)
    results = output_layouts(bound, assignment, mesh)
    if passing:
        partial = tuple((axis, "sum") for axis in mesh.ordered(passing))
        wanted = tuple(Layout(layout.dims, partial) for layout in wanted)
        results = tuple(Layout(layout.dims, (*partial, *layout.partial)) for layout in results)
    return Choice(assignment, wanted, results, frozenset(blocked - set(assignment)))


def _passing(rule: Rule | None, arrivals: Sequence[Arrival]) -> set[Axis]:
    """The axes over which a partial sum passes through: the op is linear, and all its inputs are partial over them."""
    if rule is None or rule.kind != "sum" or not all(arrival.single_user for arrival in arrivals):
        return set()
    partials = [arrival.layout.partial for arrival in arrivals]
    if not partials or any(set(partial) != set(partials[0]) for partial in partials):
        return set()
    return {axis for axis, op in partials[0]} if all(op == "sum" for _, op in partials[0]) else set()
