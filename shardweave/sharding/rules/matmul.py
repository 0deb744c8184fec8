"""Rules of matrix products and of linear layers.

Matrix products: three loops, one of them contracted.

Linear ops: what they make of a partial sum is a partial sum.

A sum over micro-batches cannot be completed before the last one of them: it passes through everything that is linear
in it, up to the gradient or the loss that is added up.
"""

from __future__ import annotations

import torch
from torch import fx

from shardweave.sharding.rules.registry import rule, tensor_args

aten = torch.ops.aten

rule(aten.mm.default, "m k, k n -> m n")
rule(aten.bmm.default, "b m k, b k n -> b m n")
rule(aten.dot.default, "k, k -> ")
rule(aten.mv.default, "m k, k -> m")


FIRST = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.expand.default, aten.squeeze.dim, aten.unsqueeze.default, aten.clone.default,
    aten.mul.Scalar, aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim,
    aten._to_copy.default, aten.slice_backward.default, aten.select_backward.default, aten.div.Scalar,
    aten.detach.default, aten.alias.default, aten.div.Tensor,
}  # fmt: skip
"""Linear in their first argument."""
GRADIENTS = {
    aten.embedding_dense_backward.default, aten.native_layer_norm_backward.default,
    aten._fused_rms_norm_backward.default, aten.threshold_backward.default, aten.gelu_backward.default,
    aten.silu_backward.default, aten.tanh_backward.default, aten.sigmoid_backward.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.tril.default, aten.triu.default,
    aten.flip.default, aten.roll.default,
}  # fmt: skip
"""Linear in their first argument, too: gradients of ops, and what picks or moves entries."""
EACH = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}
"""Linear in each of their two arguments while the other one stays."""
TOGETHER = {aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default}
"""Linear in all their tensors at once."""


def linear_in(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """The sets of tensor arguments in which an op is linear, those of a set together.

    >>> graph = fx.Graph()
    >>> x, y = graph.placeholder("x"), graph.placeholder("y")
    >>> for node in (x, y):
    ...     node.meta["val"] = torch.empty(2)
    >>> call = graph.call_function
    >>> linear_in(call(aten.mul.Tensor, (x, y))), linear_in(call(aten.add.Tensor, (x, y)))
    (((0,), (1,)), ((0, 1),))
    >>> linear_in(call(aten.exp.default, (x,))), linear_in(call(aten.add.Tensor, (x, 1)))
    ((), ())
    """
    count = len(tensor_args(node))
    if node.target is aten._to_copy.default and not _is_floating(node.kwargs.get("dtype")):
        return ()
    if node.target in FIRST or node.target in GRADIENTS:
        return ((0,),)
    if node.target in EACH:
        return tuple((index,) for index in range(count))
    if node.target in TOGETHER:
        whole = count == 2 if node.target in (aten.add.Tensor, aten.sub.Tensor) else True
        return (tuple(range(count)),) if whole else ()
    return ()


def _is_floating(dtype: object) -> bool:
    return dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
