"""What a node of a generated graph means to the cost model: its tensors, what it aliases, what it communicates."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

import shardweave.runtime.ordered_bits  # noqa: F401  (registers the ops)
import shardweave.runtime.quantization  # noqa: F401  (registers the ops)
from shardweave.errors import VerifyError
from shardweave.ir import META, Collective, NodeInfo

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_COPIES_STRIDED = ("aten::reshape", "aten::contiguous", "aten::to", "aten::flatten")  # views where they can be
_DEQUANTIZE = torch.ops.shardweave.dequantize_blocks.default
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.reshape.default,
           torch.ops.shardweave.quantize_blocks.default, _DEQUANTIZE)  # fmt: skip
_RESHAPES = ("aten::reshape", "aten::flatten")
_NOTHING = NodeInfo()


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in `value`, a tensor or nested lists of them.

    >>> sum(t.numel() for t in tensors([torch.ones(2), None, (torch.ones(3),)]))
    5
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def tensor_bytes(value: object) -> int:
    """Bytes of the tensors in `value`; of an expanded dimension one step counts.

    >>> tensor_bytes(torch.ones(4, 1).expand(4, 8))
    16
    """
    total = 0
    for tensor in tensors(value):
        size = tensor.element_size()
        for steps, stride in zip(tensor.shape, tensor.stride(), strict=True):
            size *= int(steps) if stride != 0 or steps == 0 else 1
        total += size
    return total


def node_nodes(value: object) -> Iterator[fx.Node]:
    """The nodes in `value`, an argument of a node or of the graph's output."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from node_nodes(item)


def info(node: fx.Node) -> NodeInfo:
    """What shardweave noted on `node`; an empty note where there is none."""
    found = node.meta.get(META)
    return found if isinstance(found, NodeInfo) else _NOTHING


def is_wait(node: fx.Node) -> bool:
    """Whether `node` waits for a collective."""
    return node.target is _WAIT


def is_start(node: fx.Node) -> bool:
    """Whether `node` starts a collective."""
    return getattr(node.target, "namespace", "") == "_c10d_functional" and not is_wait(node)


def collective(node: fx.Node) -> Collective:
    """What the starting `node` communicates; `VerifyError` where no pass noted it."""
    found = info(node).collective
    if found is None:
        raise VerifyError(
            f"{node.name}: expected node.meta[{META!r}].collective on a node that starts a collective, got nothing; "
            "the pass that inserts it has to note it"
        )
    return found


def gathers_parameter(node: fx.Node) -> bool:
    """Whether `node` has a parameter gathered, or its blocks: as a collective of it begins, or out of its blocks."""
    what = info(node).collective
    gathers = what is not None and what.kind == "all_gather" and what.cause == "parameter"
    return gathers or node.target is _DEQUANTIZE


def copied_from(node: fx.Node) -> fx.Node | None:
    """The placeholder whose values `node` has: looked at, cast, copied or gathered; None where something is computed.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> copy = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": torch.bfloat16})
    >>> copied_from(copy), copied_from(graph.call_function(torch.ops.aten.neg.default, (copy,)))
    (x, None)
    """
    while node.op != "placeholder":
        if not (node.target in _COPIES or is_start(node) or alias_of(node) is not None):
            return None
        node = node.all_input_nodes[0]
    return node


def alias_of(node: fx.Node) -> fx.Node | None:
    """The input in whose memory the output of `node` lies, or None where it has memory of its own.

    An element of a tuple lies in the tuple's memory: the caller tells the elements of a fresh tuple apart.
    """
    if node.op != "call_function" or not node.args:
        return None
    if node.target is operator.getitem:
        return next(node_nodes(node.args[0]), None)
    position = _alias_position(node.target)
    if position is None or position >= len(node.args):
        return None
    base = next(node_nodes(node.args[position]), None)
    if base is not None and _schema_name(node.target) in _COPIES_STRIDED:
        value, result = base.meta.get("val"), node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        if value.is_contiguous():
            return base
        same = isinstance(result, torch.Tensor) and _is_view(tuple(value.shape), value.stride(), tuple(result.shape))
        return base if same and _schema_name(node.target) in _RESHAPES else None
    return base


@cache
def _is_view(shape: tuple[int, ...], stride: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a strided tensor can be seen in another shape without a copy: asked of torch itself.

    >>> _is_view((2, 3, 4), (4, 8, 1), (2, 3, 2, 2)), _is_view((2, 3, 4), (4, 8, 1), (6, 4))
    (True, False)
    """
    try:
        torch.empty_strided(shape, stride, device="meta").view(wanted)
    except RuntimeError:
        return False
    return True


@cache
def _alias_position(target: Any) -> int | None:
    """The position of the argument that the outputs of an op alias, from its schema."""
    if target in (_WAIT, torch.ops.aten._unsafe_view.default):  # their schemas do not say so
        return 0
    schema = getattr(target, "_schema", None)
    if schema is None or not any(result.alias_info for result in schema.returns):
        return None
    return next((i for i, argument in enumerate(schema.arguments) if argument.alias_info), None)


@cache
def _schema_name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return str(schema.name) if schema is not None else ""
