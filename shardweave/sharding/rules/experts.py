"""Mixtures of experts: the expert is a factor, contracted like the vocabulary of an embedding.

A rank that holds some of the experts computes the rows that go to them and gives zeros for the others. Each row then
lies on one rank alone (an ``"own"`` partial result), and the next product with experts of the same rank reads just
those rows: nothing moves between the two. Spread over an axis that the tokens were on, that is expert parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.ir import axes_size
from shardweave.sharding.rules.registry import Emitter, rule

aten = torch.ops.aten


def _lower(emit: Emitter, experts: int, *rest: Any) -> fx.Node:
    """Count experts from the first one of this rank: those of other ranks then lie outside."""
    axes = [axis for axis, name in emit.assignment.items() if name.split(".")[0] == "e"]
    first, second, expert = emit.args[:3]
    if axes:
        expert = emit.call(aten.sub.Tensor, expert, emit.offset(axes, experts))
    return emit.call(emit.node.target, first, second, expert, *rest, axes_size(axes))


def lower_mm(emit: Emitter) -> fx.Node:
    """The rows of this rank's experts."""
    return _lower(emit, emit.input_layouts[1].local_shape[0])


def lower_outer(emit: Emitter) -> fx.Node:
    """The gradients of this rank's experts."""
    experts = emit.output_layouts[0].local_shape[0]
    return _lower(emit, experts, experts)


rule(
    torch.ops.shardweave.expert_mm.default,
    "s k, e k n, s -> s n",
    reduce={"e": "own"},
    owned={"e": (0,)},
    lower=lower_mm,
)
rule(torch.ops.shardweave.expert_outer.default, "s k, s n, s -> e k n", owned={"e": (0, 1)}, lower=lower_outer)
