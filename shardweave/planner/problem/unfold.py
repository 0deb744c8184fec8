"""Unfold: the problem of a whole model from that of its folded one, by writing the layers down that were left out.

A layer that was left out has the ops and candidates of the last one of its run that was not, and stands to its
neighbours as that one does to the layer before it. Equal layers share their tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardweave.planner.problem.problem import Edge
from shardweave.planner.problem.problem import Op as Row
from shardweave.planner.problem.variables import Costed, Variable

Layer = str


def inside(name: str, layer: Layer) -> bool:
    """Whether an op of that name belongs to a layer.

    >>> inside("blocks.1.up", "blocks.1"), inside("blocks.1:add:0", "blocks.1"), inside("blocks.11.up", "blocks.1")
    (True, True, False)
    """
    return name.startswith(layer) and name[len(layer) : len(layer) + 1] in (".", ":", "")


def renamed(name: str, layer: Layer, other: Layer) -> str:
    """The name in one layer of what has this name in another.

    >>> renamed("blocks.1.up", "blocks.1", "blocks.7")
    'blocks.7.up'
    """
    return other + name[len(layer) :]


def unfold(
    costed: Costed, stands_for: Mapping[Layer, tuple[Layer, ...]], before: Mapping[Layer, Layer]
) -> Costed | None:
    """The problem with the layers that are left out; None where a layer is not like the one before it.

    Parameters
    ----------
    costed : Costed
        Of the folded step.
    stands_for : mapping of layer to layers
        `Fold.stands_for`.
    before : mapping of layer to layer
        The layer before each of these, which is in the folded step and in the same run.
    """
    for layer, others in stands_for.items():
        if others:
            larger = _with_copies(costed, layer, before[layer], others)
            if larger is None:
                return None
            costed = larger
    return costed


def _with_copies(costed: Costed, layer: Layer, before: Layer, others: tuple[Layer, ...]) -> Costed | None:
    problem, variables = costed.problem, costed.variables
    own = [index for index, variable in enumerate(variables) if inside(variable.name, layer)]
    earlier = {variable.name: index for index, variable in enumerate(variables) if inside(variable.name, before)}
    twin: dict[int, int] = {}  # of an op in `before`, the op in `layer`
    for index in own:
        same = earlier.get(renamed(variables[index].name, layer, before))
        if same is None or problem.ops[same].candidates is not problem.ops[index].candidates:
            return None
        twin[same] = index
    if len(twin) < len(earlier):
        return None
    last, count = max(own), len(own)
    place = {index: own.index(index) for index in own}

    def moved(index: int, copy: int) -> int:
        """Where an op of the folded problem is: itself, or its copy of that number (-1: itself)."""
        if index in place:
            return index if copy < 0 else last + 1 + copy * count + place[index]
        return index if index <= last else index + count * len(others)

    rows: list[Row] = list(problem.ops[: last + 1])
    listed = list(variables[: last + 1])
    for other in others:
        for index in own:
            name = renamed(variables[index].name, layer, other)
            rows.append(replace(problem.ops[index], name=name))
            listed.append(_copy(variables[index], name, layer, other))
    rows += problem.ops[last + 1 :]
    listed += variables[last + 1 :]
    edges: list[Edge] = []
    final = len(others) - 1
    for edge in problem.edges:
        producer, consumer = edge.producer, edge.consumer
        if producer in place and consumer not in place:  # what reads the layer now reads the last of its copies
            edges.append(replace(edge, producer=moved(producer, final), consumer=moved(consumer, -1)))
            continue
        edges.append(replace(edge, producer=moved(producer, -1), consumer=moved(consumer, -1)))
        if consumer in place:
            for copy in range(len(others)):
                if producer in place:
                    source = moved(producer, copy)
                elif producer in twin:
                    source = moved(twin[producer], copy - 1)
                else:
                    source = moved(producer, -1)
                edges.append(replace(edge, producer=source, consumer=moved(consumer, copy)))
    edges.sort(key=lambda edge: (edge.producer, edge.consumer))
    return replace(costed, problem=replace(problem, ops=tuple(rows), edges=tuple(edges)), variables=listed)


def _copy(variable: Variable, name: str, layer: Layer, other: Layer) -> Variable:
    op = variable.op
    if op is not None:
        states = [renamed(state, layer, other) if inside(state, layer) else state for state in op.companions]
        parameter = renamed(op.parameter, layer, other)
        op = replace(op, name=name, parameter=parameter, companions=tuple(states))
    return replace(variable, name=name, op=op)
