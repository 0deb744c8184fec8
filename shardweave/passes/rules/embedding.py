"""Embeddings: a table lookup is a product with a one-hot matrix, so its vocabulary is a contracted factor.

A shard of the vocabulary looks up the tokens that it holds and gives zeros for the others (Megatron's
vocabulary-parallel embedding); the sum over the shards is the lookup.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from shardweave.ir import BoundRule
from shardweave.passes.rules.lookup import local_index
from shardweave.passes.rules.registry import RULES, Emitter, argument, rule

aten = torch.ops.aten


def lower_embedding(emit: Emitter) -> fx.Node:
    """Look up what this rank's part of the vocabulary holds, zeros elsewhere."""
    weight, index, *rest = emit.args
    found = local_index(emit, index, emit.input_layouts[0].dims[0])
    if found is None:
        return emit.call(aten.embedding.default, weight, index)
    rows = emit.call(aten.embedding.default, weight, found[0])
    outside = emit.call(aten.unsqueeze.default, found[1], -1)
    return emit.call(aten.masked_fill.Scalar, rows, outside, 0)


def lower_embedding_backward(emit: Emitter) -> fx.Node:
    """Scatter the gradient's rows whose tokens this rank holds."""
    grad, index, _, padding, scale = emit.args
    local = emit.output_layouts[0].local_shape[0]
    found = local_index(emit, index, emit.output_layouts[0].dims[0], is_checked=True)  # by the lookup
    if found is None:
        return emit.call(aten.embedding_dense_backward.default, grad, index, local, padding, scale)
    outside = emit.call(aten.unsqueeze.default, found[1], -1)
    rows = emit.call(aten.masked_fill.Scalar, grad, outside, 0)
    if padding >= 0:  # the padding token is named by its global number: take its rows out before the shift
        is_padding = emit.call(aten.unsqueeze.default, emit.call(aten.eq.Scalar, index, padding), -1)
        rows = emit.call(aten.masked_fill.Scalar, rows, is_padding, 0)
    return emit.call(aten.embedding_dense_backward.default, rows, found[0], local, -1, scale)


rule(aten.embedding.default, "v d, ... -> ... d", lower=lower_embedding)
rule(aten.embedding_dense_backward.default, "... d, ... -> v d", lower=lower_embedding_backward)

_PATTERN = RULES[aten.embedding_dense_backward.default]


def bind_embedding_backward(node: fx.Node) -> BoundRule:
    """As the pattern says; with ``scale_grad_by_freq``, which counts the tokens of the whole batch, only by width."""
    bound = _PATTERN.bind(node)
    if not argument(node, "scale_grad_by_freq"):
        return bound
    return replace(bound, factors=tuple(replace(each, blocked=each.name != "d") for each in bound.factors))


def scaled_by_frequency(grad: Tensor, index: Tensor, rows: int, padding: int, scale: bool) -> Tensor:
    """The gradient of a table, each token's part divided by how often it is looked up, in ops that can be split."""
    if not scale:
        plain: Tensor = aten.embedding_dense_backward.default(grad, index, rows, padding, False)
        return plain
    one = aten.ones_like.default(aten.slice.Tensor(grad, -1, 0, 1))
    counts = aten.embedding_dense_backward.default(one, index, rows, padding, False)
    shares = grad / aten.embedding.default(counts, index)
    result: Tensor = aten.embedding_dense_backward.default(shares, index, rows, padding, False)
    return result


RULES[aten.embedding_dense_backward.default] = replace(
    _PATTERN, bind=bind_embedding_backward, decompose=scaled_by_frequency
)
