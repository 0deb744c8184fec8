"""The work of an op on one device: FLOPs, bytes moved, and the dimensions of its matrix product.

FLOPs are those of matmuls, convolutions and attention, as `torch.utils.flop_counter` counts them, and of shardweave's
own ops, by local shapes. The efficiency of a product depends on its dimensions. Every op reads its inputs and writes
its outputs once, as generated code runs its ops unfused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
    """The dimensions of a product ``m k, k n -> m n``, or of one product of a batch."""

    m: int
    n: int
    k: int


def product_of(node: fx.Node, shape_of: ShapeOf = tensor_shape) -> Product | None:
    """The matrix product that `node` computes; None if it computes none, or one that is bound by memory.

    Of attention it is the product of queries and keys. Of a convolution, forward or backward, it is the implicit matrix
    product of cuDNN (Chetlur et al. 2014, arXiv 1410.0759, section 3): filters by positions. Experts multiply equal
    parts of the rows. Products with a vector and depthwise convolutions are bound by memory.

    Parameters
    ----------
    shape_of : callable
        The shape of a node's value; by default that of ``node.meta["val"]``.

    Examples
    --------
    >>> import torch
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> y = graph.call_function(torch.ops.aten.bmm.default, (x, x))
    >>> product_of(y, lambda source: (4, 8, 8))
    Product(m=8, n=8, k=8)
    """
    read = _product_reader(op_of(node))
    return None if read is None else read(_Call(node, shape_of))


@cache
def _argument_names(target: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in target._schema.arguments)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by the names of its schema, without defaults."""
    args, kwargs = op_arguments(node)
    return {**dict(zip(_argument_names(op_of(node)), args)), **kwargs}


class _Call:
    """The arguments of a node by name, with its tensors' shapes."""

    def __init__(self, node: fx.Node, shape_of: ShapeOf) -> None:
        self._node, self._shape_of, self._arguments = node, shape_of, named_arguments(node)

    def shape(self, name: str) -> Shape:
        """The shape of an argument; with "" that of the result."""
        return self._shape_of(self._arguments[name] if name else self._node)

    def value(self, name: str, default: Any) -> Any:
        return self._arguments.get(name, default)


def _matrices(call: _Call, left: str = "self", right: str = "mat2") -> Product:
    return Product(call.shape(left)[-2], call.shape(right)[-1], call.shape(left)[-1])


def _attention(call: _Call) -> Product:
    return Product(call.shape("query")[-2], call.shape("key")[-2], call.shape("query")[-1])


def _filters(call: _Call, weight: str, image: str, output: str) -> Product | None:
    """The product of filters and positions. A transposed convolution applies the filters at positions of its image.

    Values are given by the names of arguments; "" is the result.
    """
    kernel = call.shape(weight)
    filters = kernel[0] // call.value("groups", 1)
    if filters < 2:
        return None
    positions = call.shape(image if call.value("transposed", False) else output)
    return Product(positions[0] * math.prod(positions[2:]), filters, math.prod(kernel[1:]))


def _expert_mm(call: _Call) -> Product:
    rows, (experts, k, n) = call.shape("x")[0], call.shape("weight")
    return Product(max(1, rows // (experts * call.value("spread", 1))), n, k)


def _expert_outer(call: _Call) -> Product:
    (rows, m), n = call.shape("x"), call.shape("grad")[1]
    return Product(m, n, max(1, rows // (call.value("experts", 1) * call.value("spread", 1))))


def _recurrence(call: _Call) -> Product:
    """The product of a step."""
    return Product(call.shape("igates")[1], *call.shape("weight"))


_PRODUCT_READERS: dict[str, Callable[[_Call], Product | None]] = {  # by name: this room does not import ops
    "aten::mm": _matrices,
    "aten::bmm": _matrices,
    "aten::addmm": partial(_matrices, left="mat1"),
    "aten::baddbmm": partial(_matrices, left="batch1", right="batch2"),
    "aten::_scaled_mm": _matrices,
    "aten::convolution": partial(_filters, weight="weight", image="input", output=""),
    "aten::convolution_backward": partial(_filters, weight="weight", image="input", output="grad_output"),
    "shardweave::conv_input_grad": partial(_filters, weight="weight", image="", output="grad"),
    "shardweave::conv_weight_grad": partial(_filters, weight="", image="input", output="grad"),
    "shardweave::expert_mm": _expert_mm,
    "shardweave::expert_outer": _expert_outer,
    "shardweave::recurrence": _recurrence,
    "shardweave::recurrence_backward": _recurrence,
}


@cache
def _product_reader(target: Any) -> Callable[[_Call], Product | None] | None:
    name = target._schema.name
    return _attention if name.startswith("aten::_scaled_dot_product_") else _PRODUCT_READERS.get(name)


_LOOKUPS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")
"""Ops that read only as many bytes of a table as they return."""
_UNINITIALIZED = (
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
)
_FLASH_BLOCK_KEYS = 128
"""The number of keys in a block of a flash attention kernel."""
_SAME_FLOPS_AS = {  # ops without a formula in the registry, and an op with a formula and the same arguments
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
        Floating point operations of products; 0 for other ops.
    num_bytes : int
        Bytes that it reads and writes.
    dtype : str
        The dtype that it computes in, by torch's name.
    product : Product, optional
        The dimensions of its product: small ones are computed less efficiently.
    signature : str
        The key of its measured time (`sharding.signature`); "" if it is of no op in particular.
    computed : float
        The part of `flops` that the kernel computes. `flops` of causal attention include masked keys, and its kernels
        skip masked blocks (FlashAttention-2, arXiv 2307.08691, section 3.1): with ``n`` blocks of 128 keys, a block of
        queries computes ``(n + 1) / 2`` of them on average.
    """

    flops: int = 0
    num_bytes: int = 0
    dtype: str = "float32"
    product: Product | None = None
    signature: str = ""
    computed: float = 1.0

    @property
    def op(self) -> str:
        """The name of the op in the signature.

        >>> Work(signature="aten.mm.default(float32[8,8], float32[8,8])").op
        'aten.mm.default'
        """
        return self.signature.partition("(")[0]


def node_work(node: fx.Node) -> Work | None:
    """The work of `node` by the local shapes in ``node.meta["val"]``; None if it runs no kernel.

    Views, waits, starts of collectives, placeholders and arithmetic on numbers run no kernel.

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
    if not isinstance(target, torch._ops.OpOverload) or (alias_of(node) is not None and not _mutates(target)):
        return None
    value = node.meta.get("val")
    outputs = list(tensors(value))
    name = target._schema.name
    if name in _UNINITIALIZED or (not outputs and not _mutates(target)):
        return None
    inputs = [tensor_bytes(source.meta.get("val")) for source in node.all_input_nodes]
    written = tensor_bytes(value)
    if name in _LOOKUPS and inputs:
        inputs[0] = min(inputs[0], written)
    flops = _flops(node, value)
    product = product_of(node) if flops else None
    computed = _causal_part(product.n) if product is not None and named_arguments(node).get("is_causal") else 1.0
    return Work(flops, sum(inputs) + written, _dtype(node, outputs), product, signature(node), computed)


def _causal_part(keys: int) -> float:
    """The part of the blocks of scores that are not fully masked."""
    blocks = max(1.0, keys / _FLASH_BLOCK_KEYS)
    return (blocks + 1) / (2 * blocks)


def _flops(node: fx.Node, value: object) -> int:
    count = _flop_formula(op_of(node))
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg(op_arguments(node), lambda source: source.meta.get("val"))
    real_products = 4 if any(tensor.is_complex() for tensor in tensors(value)) else 1
    return real_products * int(count(*args, **kwargs, out_val=value))


@cache
def _flop_formula(target: Any) -> Callable[..., int] | None:
    packet = target.overloadpacket
    name = _SAME_FLOPS_AS.get(packet.__name__)
    if name is not None and packet not in flop_registry:
        packet = getattr(torch.ops.aten, name)
    found: Callable[..., int] | None = flop_registry.get(packet, _VECTOR_PRODUCTS.get(packet))
    return found


def _vector_product(left: torch.Tensor, right: torch.Tensor, **_: object) -> int:
    return 2 * left.numel()


_VECTOR_PRODUCTS = {torch.ops.aten.mv: _vector_product, torch.ops.aten.dot: _vector_product}  # not in the registry


def _dtype(node: fx.Node, outputs: list[torch.Tensor]) -> str:
    for source in node.all_input_nodes:
        for tensor in tensors(source.meta.get("val")):
            if tensor.is_floating_point() or tensor.is_complex():
                return str(tensor.dtype.to_real()).removeprefix("torch.")
    return str(outputs[0].dtype).removeprefix("torch.") if outputs else "float32"


@cache
def _mutates(target: Any) -> bool:
    return any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in target._schema.arguments
    )
