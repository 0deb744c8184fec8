"""Sharding rules: the registry with its grammar of patterns, and one file for each family of ops."""

from __future__ import annotations

import torch
from torch import fx

from shardweave.sharding.rules import index, matmul, norm, pointwise, reduction, spatial, view  # noqa: F401
from shardweave.sharding.rules.pointwise import ADDITIONS, POINTWISE
from shardweave.sharding.rules.registry import RULES, Emitter, Rule, bind, parse, rule, tensor_args

pointwise.keep_zeros()

__all__ = ["RULES", "Emitter", "Rule", "bind", "find_rule", "is_view", "parse", "rule"]


def find_rule(node: fx.Node) -> Rule | None:
    """The rule of a node's op: a registered one, or the pointwise rule if torch tags the op as pointwise."""
    found = RULES.get(node.target)
    if node.target in ADDITIONS and len(tensor_args(node)) < 2:
        return POINTWISE  # a number would be added once on every rank of a partial sum
    if found is None and isinstance(node.target, torch._ops.OpOverload):
        tags = node.target.tags
        if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
            return POINTWISE
    return found


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of its input."""
    found = find_rule(node)
    return found is not None and found.kind == "view"
