"""Returned: what it takes to bring the model's outputs to where a call returns them.

A batch is spread over the axes that *every* op puts on its batch (`pipeline.data_axes`), and what a model returns that
is no loss comes back as its batch went in. Tensor parallelism takes the innermost axes, so these are all axes outside
of the largest degree of any op. That is one more variable, the *border*: the degree that no op exceeds. Each op has an
edge to it, which forbids more; those that outputs follow have the changes of layout on theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from shardweave.ir import Layout, axes_size, normalise
from shardweave.planner.problem.build_problem import Costing
from shardweave.planner.problem.graph_analysis import root_of
from shardweave.planner.problem.problem import Candidate, Edge
from shardweave.planner.problem.problem import Op as Row
from shardweave.planner.problem.resharding_costs import Links, local_numel
from shardweave.planner.problem.variables import Costed, Variable
from shardweave.sharding import graph_outputs

BORDER = ":returned"
"""The name of the variable."""


def with_outputs(costing: Costing, costed: Costed, named: Callable[[str], str]) -> Costed:
    """The problem of a whole step with what its outputs take; as it is where they are returned as they lie.

    Parameters
    ----------
    costing : Costing
        Of the folded step.
    costed : Costed
        Of the whole step.
    named : callable
        From the name of a variable of the folded step to that of the last one that it stands for.
    """
    outputs = _outputs(costing)
    if not outputs:
        return costed
    whole = costing.annotated.captured.whole or costing.options.outputs == "whole"
    of_ops = [
        [strategy.degree for strategy in variable.strategies] if variable.op and variable.op.batch > 1 else []
        for variable in costed.variables
    ]
    degrees = [1] if whole else sorted({degree for own in of_ops for degree in own} or {costing.mesh.world_size})
    border = len(costed.variables)
    place = {variable.name: index for index, variable in enumerate(costed.variables)}
    edges: dict[int, Edge] = {}
    for index, (variable, own) in enumerate(zip(costed.variables, of_ops, strict=True)):
        if own and not whole:
            least = np.full((len(variable.ports), 1), math.inf)
            np.minimum.at(least[:, 0], variable.port_of, own)
            edges[index] = Edge(index, border, np.where(least <= degrees, 0.0, math.inf))
    for node in outputs:
        number = costing.follows[node]
        index = place[named(costing.variables[number].name)]
        links = costing.windows.activations(_links(costing, node, degrees))
        loads, kept = costing.windows.loads(costing.options.turns * links), _kept(costing, node, degrees)
        known = edges.get(index, Edge(index, border, np.zeros(kept.shape)))
        edges[index] = replace(
            known,
            loads=loads if known.loads is None else known.loads + loads,
            kept=kept if known.kept is None else known.kept + kept,
        )
    levels = tuple(Candidate(f"batch outside of {degree}", 0.0, in_port=at) for at, degree in enumerate(degrees))
    problem = replace(
        costed.problem,
        ops=(*costed.problem.ops, Row(BORDER, levels)),
        edges=tuple(sorted((*costed.problem.edges, *edges.values()), key=lambda edge: (edge.producer, edge.consumer))),
    )
    return replace(costed, problem=problem, variables=[*costed.variables, Variable(BORDER, -1, degrees=tuple(degrees))])


def _outputs(costing: Costing) -> list[fx.Node]:
    """The outputs that go where the batch came from, or are returned whole (`boundary.Boundary`)."""
    captured, mode = costing.annotated.captured, costing.options.outputs
    returned = not costing.annotated.loss_inside if mode == "auto" else mode != "sharded"
    if not (captured.whole or returned):
        return []
    first = len(captured.mutated_buffers)
    values = graph_outputs(captured.graph.graph)[first : first + len(captured.outputs)]
    return [value for value in values if isinstance(value, fx.Node) and value in costing.follows
            and isinstance(value.meta["val"], torch.Tensor) and value.meta["val"].dim()]  # fmt: skip


def _links(costing: Costing, node: fx.Node, degrees: list[int]) -> Links:
    """What brings an output from each port to where each degree has it, and its gradient back."""
    haves = [port[0] for port in costing.lies[node]]
    value = node.meta["val"]
    wants = [_wanted(costing, tuple(value.shape), degree) for degree in degrees]
    return costing.prices.table(haves, wants, wants, value.element_size())


def _kept(costing: Costing, node: fx.Node, degrees: list[int]) -> NDArray[np.int64]:
    """Bytes of an output, and of its gradient, as it is returned at each degree beyond those as it lies, by port."""
    value, facts = node.meta["val"], costing.facts
    wanted = [local_numel(_wanted(costing, tuple(value.shape), degree)) for degree in degrees]
    lies = [local_numel(port[0]) for port in costing.lies[node]]
    times = costing.options.turns * (1 + (root_of(node) in facts.differentiated))
    beyond = np.maximum(0, np.array(wanted, dtype=np.int64) - np.array(lies, dtype=np.int64)[:, None])
    return np.asarray(times * value.element_size() * beyond)


def _wanted(costing: Costing, shape: tuple[int, ...], degree: int) -> Layout:
    """The batch over all axes outside of the innermost ones that make up a degree."""
    layout = Layout.replicated(shape)
    if shape[0] != costing.annotated.batch or costing.options.outputs == "whole" or costing.annotated.captured.whole:
        return layout
    axes = costing.mesh.innermost_first
    count = next(count for count in range(len(axes) + 1) if axes_size(axes[:count]) >= degree)
    outside = (*costing.mesh.time_axes, *reversed(axes[count:]))
    if shape[0] % axes_size(outside):
        return layout
    return Layout((normalise([*outside, shape[0] // axes_size(outside)]), *layout.dims[1:]))
