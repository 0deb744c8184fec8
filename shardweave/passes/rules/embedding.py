"""Embeddings: a table lookup is a product with a one-hot matrix, so its vocabulary is a contracted factor.

A shard of the vocabulary looks up the tokens that it holds and gives zeros for the others (Megatron's
vocabulary-parallel embedding); the sum over the shards is the lookup.
"""

from __future__ import annotations

import torch
from torch import fx

from shardweave.errors import RuleError
from shardweave.passes.rules.lookup import local_index
from shardweave.passes.rules.registry import Emitter, rule

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
    if scale and emit.assignment:
        raise RuleError(
            f"{emit.node}: scale_grad_by_freq counts the tokens of the whole batch, which no rank has: use an "
            "embedding without it, or force the op to be computed whole"
        )
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
