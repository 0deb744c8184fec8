"""Time axes in a local graph: the ops that bring the steps of an axis together, until `split` writes every step.

Before `split` a graph computes one step of each woven axis: what depends on the axis' coordinate is one of its steps,
and `total` or `joined` is where the region of the axis ends. They stand for ops on all steps and are never run.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from shardweave.ir import VerifyError

_COORDINATE = "coord_"


def coordinate(axis: str) -> str:
    """The placeholder of an axis' coordinate."""
    return f"{_COORDINATE}{axis}"


def is_coordinate(node: fx.Node) -> bool:
    """Whether a node of a local graph is the placeholder of some axis' coordinate."""
    return node.op == "placeholder" and node.name.startswith(_COORDINATE)


def total(value: Tensor, axis: str, size: int) -> Tensor:
    """The sum of `value` over the steps of a time axis."""
    return _only_in_graphs(value)


def joined(value: Tensor, axis: str, size: int, dim: int, outer: int, inner: int) -> Tensor:
    """The steps of `value` along a time axis side by side: on `dim`, inside of `outer` local steps, outside of `inner`.

    >>> with torch._subclasses.FakeTensorMode():
    ...     joined(torch.ones(4, 3), "sub", 2, 0, 1, 4).shape
    torch.Size([8, 3])
    """
    _only_in_graphs(value)
    shape = list(value.shape)
    shape[dim] *= size
    return value.new_empty(shape)


def _only_in_graphs(value: Tensor) -> Tensor:
    if not isinstance(value, torch._subclasses.FakeTensor):
        raise VerifyError("the steps of a time axis are brought together by `split`: run the graph after it")
    return value.clone()
