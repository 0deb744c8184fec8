"""Reductions: a reduced dimension is a factor that the output does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardweave.ir import BoundRule, Dims, Factor
from shardweave.passes.rules.registry import RULES, Rule, argument, output_shapes, shape, tensor_args

aten = torch.ops.aten

REDUCTIONS: dict[Any, str] = {
    aten.sum.default: "sum",
    aten.sum.dim_IntList: "sum",
    aten.amax.default: "max",
    aten.amin.default: "min",
    aten.max.default: "max",
    aten.min.default: "min",
}


def bind_reduction(node: fx.Node) -> BoundRule:
    """One factor a dimension of the input; those that are reduced combine as the op does."""
    size, (result,) = shape(tensor_args(node)[0]), output_shapes(node)
    has_dims = any(arg.name == "dim" for arg in node.target._schema.arguments)  # type: ignore[union-attr]
    dims = argument(node, "dim") if has_dims else None
    reduced = {dim % max(len(size), 1) for dim in (dims if dims else range(len(size)))}
    op = REDUCTIONS[node.target]
    factors = tuple(
        Factor(f"i{index}", length, reduce=op if index in reduced else "sum")
        for index, length in enumerate(size)
        if length > 1
    )
    given: Dims = tuple((f"i{index}",) if length > 1 else () for index, length in enumerate(size))
    kept = [names for index, names in enumerate(given) if index not in reduced]
    if len(result) == len(size):
        kept = [() if index in reduced else names for index, names in enumerate(given)]
    return BoundRule(factors, (given,), (tuple(kept),))


for _target in REDUCTIONS:
    RULES[_target] = Rule(bind_reduction, source="reduced dimensions are contracted; blocked: nothing")
