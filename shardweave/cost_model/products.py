"""The dimensions of the product that an op computes: what its efficiency depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import fx

from shardweave.cost_model.signature import op_arguments, op_of, tensor_shape

Shape = Sequence[int]
ShapeOf = Callable[[fx.Node], Shape]


class Product(NamedTuple):
    """A product ``m k, k n -> m n`` (one of a batch of them)."""

    m: int
    n: int
    k: int


def product_of(node: fx.Node, shape_of: ShapeOf = tensor_shape) -> Product | None:
    """The product that `node` computes; None where it computes none, or where none of its loops is tiled.

    Attention is its first product, scores from queries and keys; a convolution the product of its filters with the
    places that they are applied at (the implicit matrix product of cuDNN: Chetlur et al. 2014, arXiv 1410.0759,
    section 3), forward and backward alike; experts multiply equal parts of the rows. Products with a vector and
    convolutions with a filter a channel are bound by memory and have no tiles.

    Parameters
    ----------
    shape_of : callable
        The shape of a node's value; that of ``node.meta["val"]`` if not given.

    Examples
    --------
    >>> import torch
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> y = graph.call_function(torch.ops.aten.bmm.default, (x, x))
    >>> product_of(y, lambda source: (4, 8, 8))
    Product(m=8, n=8, k=8)
    """
    read = _reader(op_of(node))
    if read is None:
        return None
    return read(_Call(node, op_arguments(node)[0], shape_of))


class _Call:
    """The arguments of a node, with its tensors' shapes."""

    def __init__(self, node: fx.Node, args: Sequence[Any], shape_of: ShapeOf) -> None:
        self._node, self._args, self._shape_of = node, args, shape_of

    def shape(self, position: int) -> Shape:
        return self._shape_of(self._args[position])

    def output(self) -> Shape:
        return self._shape_of(self._node)

    def value(self, position: int, default: Any) -> Any:
        return self._args[position] if position < len(self._args) else default


def _matrices(first: int) -> Callable[[_Call], Product]:
    """Of an op whose arguments from `first` on are the two factors."""

    def read(call: _Call) -> Product:
        left, right = call.shape(first), call.shape(first + 1)
        return Product(left[-2], right[-1], left[-1])

    return read


def _attention(first: int) -> Callable[[_Call], Product]:
    """Of an op whose arguments from `first` on are queries and keys."""

    def read(call: _Call) -> Product:
        queries, keys = call.shape(first), call.shape(first + 1)
        return Product(queries[-2], keys[-2], queries[-1])

    return read


def _filters(weight: Shape, places: Shape, groups: int) -> Product | None:
    filters = weight[0] // groups
    if filters < 2:
        return None
    return Product(places[0] * math.prod(places[2:]), filters, math.prod(weight[1:]))


def _convolution(call: _Call) -> Product | None:
    return _filters(call.shape(1), call.shape(0) if call.value(6, False) else call.output(), call.value(8, 1))


def _convolution_backward(call: _Call) -> Product | None:
    return _filters(call.shape(2), call.shape(1) if call.value(7, False) else call.shape(0), call.value(9, 1))


def _input_grad(call: _Call) -> Product | None:
    return _filters(call.shape(1), call.output() if call.value(6, False) else call.shape(0), call.value(8, 1))


def _weight_grad(call: _Call) -> Product | None:
    return _filters(call.output(), call.shape(1) if call.value(6, False) else call.shape(0), call.value(8, 1))


def _expert_mm(call: _Call) -> Product:
    rows, (experts, k, n) = call.shape(0)[0], call.shape(1)
    return Product(max(1, rows // (experts * call.value(3, 1))), n, k)


def _expert_outer(call: _Call) -> Product:
    (rows, m), n = call.shape(0), call.shape(1)[1]
    return Product(m, n, max(1, rows // (call.value(3, 1) * call.value(4, 1))))


_READERS: dict[str, Callable[[_Call], Product | None]] = {  # the names of shardweave's own ops: they need no import
    "aten::mm": _matrices(0),
    "aten::bmm": _matrices(0),
    "aten::addmm": _matrices(1),
    "aten::baddbmm": _matrices(1),
    "aten::_scaled_mm": _matrices(0),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "shardweave::conv_input_grad": _input_grad,
    "shardweave::conv_weight_grad": _weight_grad,
    "shardweave::expert_mm": _expert_mm,
    "shardweave::expert_outer": _expert_outer,
}


@cache
def _reader(target: Any) -> Callable[[_Call], Product | None] | None:
    name = target._schema.name
    if name.startswith("aten::_scaled_dot_product_"):
        return _attention(1 if name.endswith("_backward") else 0)
    return _READERS.get(name)
