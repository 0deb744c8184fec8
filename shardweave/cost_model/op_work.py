"""The work of an op on one device: FLOPs, bytes moved, and the dimensions of its matrix product.

FLOPs are those of matmuls, convolutions and attention, as `torch.utils.flop_counter` counts them, and of shardweave's
own ops, by local shapes. The efficiency of a product depends on its dimensions. Every op reads its inputs and writes
its outputs once, as the generated code runs its ops one by one, unfused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from shardweave.sharding import (
    alias_of,
    is_start,
    is_wait,
    op_arguments,
    op_of,
    signature,
    tensor_bytes,
    tensor_shape,
    tensors,
)

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
    """The work of an op whose arguments from `first` on are the two factors."""

    def read(call: _Call) -> Product:
        left, right = call.shape(first), call.shape(first + 1)
        return Product(left[-2], right[-1], left[-1])

    return read


def _attention(first: int) -> Callable[[_Call], Product]:
    """The work of an op whose arguments from `first` on are queries and keys."""

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


_LOOKUPS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")  # read of a table what they return
_EMPTY = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")
_BLOCK = 128  # keys that a flash kernel looks at together
_COUNTED_AS = {  # ops that the registry lacks, with the arguments of one that it has
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_fused_attention_overrideable_backward": "_scaled_dot_product_flash_attention_backward",
}


@dataclass(frozen=True)
class Work:
    """The work of an op on one device: FLOPs and bytes.

    Parameters
    ----------
    flops : int
        Floating point operations; 0 for what is no product.
    num_bytes : int
        Bytes that it reads and writes.
    dtype : str
        What it computes in, by torch's name.
    product : Product, optional
        The dimensions of its product, where it is one: small ones are computed less efficiently.
    signature : str
        What a measured time is found by (`sharding.signature`); empty where the work is of no op in particular.
    computed : float
        The part of `flops` that the kernel computes. Causal attention is counted as if no key were masked, and its
        kernels leave out the blocks that are (FlashAttention-2, arXiv 2307.08691, section 3.1): of ``n`` blocks of 128
        queries and as many of keys, each query block computes those up to its own, ``(n + 1) / 2`` on average.
    """

    flops: int = 0
    num_bytes: int = 0
    dtype: str = "float32"
    product: Product | None = None
    signature: str = ""
    computed: float = 1.0

    @property
    def op(self) -> str:
        """The op's name, of a work with a signature.

        >>> Work(signature="aten.mm.default(float32[8,8], float32[8,8])").op
        'aten.mm.default'
        """
        return self.signature.partition("(")[0]


def node_work(node: fx.Node) -> Work | None:
    """The work of `node` by the local shapes in ``node.meta["val"]``; None where it runs no kernel.

    Views, waits, starts of collectives, placeholders and arithmetic on numbers run none.

    Examples
    --------
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(8, 8, device="meta")
    >>> y = graph.call_function(torch.ops.aten.mm.default, (x, x))
    >>> y.meta["val"] = torch.empty(8, 8, device="meta")
    >>> work = node_work(y)
    >>> work.flops, work.num_bytes, work.dtype, work.product
    (1024, 512, 'float32', Product(m=8, n=8, k=8))
    >>> work.signature
    'aten.mm.default(float32[8,8], float32[8,8])'
    """
    if node.op != "call_function" or is_wait(node) or is_start(node) or node.target is operator.getitem:
        return None
    target = op_of(node)
    if not isinstance(target, torch._ops.OpOverload) or (alias_of(node) is not None and not _writes(target)):
        return None
    value = node.meta.get("val")
    outputs = list(tensors(value))
    name = target._schema.name
    if name in _EMPTY or (not outputs and not _writes(target)):
        return None
    inputs = [tensor_bytes(source.meta.get("val")) for source in node.all_input_nodes]
    written = tensor_bytes(value)
    if name in _LOOKUPS and inputs:
        inputs[0] = min(inputs[0], written)
    flops = _flops(node, value)
    product = product_of(node) if flops else None
    computed = _causal_part(product.n) if product is not None and _is_causal(node) else 1.0
    return Work(flops, sum(inputs) + written, _dtype(node, outputs), product, signature(node), computed)


def _causal_part(keys: int) -> float:
    """The share of the blocks of scores that are not fully masked."""
    blocks = max(1.0, keys / _BLOCK)
    return (blocks + 1) / (2 * blocks)


def _is_causal(node: fx.Node) -> bool:
    place = _place_of_causal(op_of(node))
    args, kwargs = op_arguments(node)
    return bool(kwargs.get("is_causal", args[place] if -1 < place < len(args) else False))


@cache
def _place_of_causal(target: Any) -> int:
    """The position of the argument ``is_causal`` of an op; -1 if it has none."""
    names = [argument.name for argument in target._schema.arguments]
    return names.index("is_causal") if "is_causal" in names else -1


def _flops(node: fx.Node, value: object) -> int:
    count = _counter(op_of(node))
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg(op_arguments(node), lambda source: source.meta.get("val"))
    return int(count(*args, **kwargs, out_val=value))


@cache
def _counter(target: Any) -> Callable[..., int] | None:
    packet = target.overloadpacket
    name = _COUNTED_AS.get(packet.__name__)
    if name is not None and packet not in flop_registry:
        packet = getattr(torch.ops.aten, name)
    found: Callable[..., int] | None = flop_registry.get(packet, _VECTOR_PRODUCTS.get(packet))
    return found


def _vector_product(left: torch.Tensor, right: torch.Tensor, **_: object) -> int:
    return 2 * left.numel()


_VECTOR_PRODUCTS = {torch.ops.aten.mv: _vector_product, torch.ops.aten.dot: _vector_product}  # the registry has neither


def _dtype(node: fx.Node, outputs: list[torch.Tensor]) -> str:
    for source in node.all_input_nodes:
        for tensor in tensors(source.meta.get("val")):
            if tensor.is_floating_point():
                return str(tensor.dtype).removeprefix("torch.")
    return str(outputs[0].dtype).removeprefix("torch.") if outputs else "float32"


@cache
def _writes(target: Any) -> bool:
    return any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in target._schema.arguments
    )
