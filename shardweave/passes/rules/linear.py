"""Linear ops: what they make of a partial sum is a partial sum.

A sum over micro-batches cannot be completed before the last one of them: it passes through everything that is linear
in it, up to the gradient or the loss that is added up.
"""

from __future__ import annotations

import torch
from torch import fx

from shardweave.passes.rules.registry import tensor_args

aten = torch.ops.aten

FIRST = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.expand.default, aten.squeeze.dim, aten.unsqueeze.default, aten.clone.default,
    aten.mul.Scalar, aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim,
    aten._to_copy.default, aten.slice_backward.default, aten.select_backward.default, aten.div.Scalar,
    aten.detach.default, aten.alias.default, aten.div.Tensor,
}  # fmt: skip
"""Linear in their first argument."""
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
    if node.target in FIRST:
        return ((0,),)
    if node.target in EACH:
        return tuple((index,) for index in range(count))
    if node.target in TOGETHER:
        whole = count == 2 if node.target in (aten.add.Tensor, aten.sub.Tensor) else True
        return (tuple(range(count)),) if whole else ()
    return ()


def _is_floating(dtype: object) -> bool:
    return dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
