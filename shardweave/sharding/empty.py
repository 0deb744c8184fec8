"""Values without elements, such as the weight of ``nn.Linear(8, 0)``: they are taken out of the graph.

Nothing of them can be split or moved, and no rule has a loop of no steps. A value without elements becomes a constant
of its shape, and so does what is computed from such values alone: the sum of no elements, a product over no steps.
What joins them with others is left without them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardweave.ir import RuleError
from shardweave.sharding.rules.registry import tensor_args

aten = torch.ops.aten

WRITES = {
    aten.index_put.default, aten._unsafe_index_put.default, aten.index_add.default, aten.index_copy.default,
    aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.scatter.src, aten.scatter.value,
    aten.scatter_add.default, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_reduce.two,
    aten.slice_scatter.default, aten.masked_scatter.default,
}  # fmt: skip
"""Ops that write into their first argument: of nothing to write, the result is that argument."""


def take_out_empty(graph: fx.Graph) -> None:
    """Leave no op of `graph` that reads or gives a tensor without elements; `RuleError` for an op that has to."""
    if not any(_is_empty(node.meta.get("val")) for node in graph.nodes):
        return
    for node in list(graph.nodes):
        if node.op == "call_function":
            _rewrite(graph, node)
        elif node.op == "placeholder" and _is_empty(node.meta.get("val")):
            late = next(other for other in graph.nodes if other.op != "placeholder")
            node.replace_all_uses_with(_full(graph, node, 0, late))
    graph.eliminate_dead_code()


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or _is_unused_result(node):
        return  # several results are read through their `getitem` nodes, which are rewritten one by one
    if _is_empty(value):
        _replace(graph, node, _full(graph, node, 0))
        return
    source = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, fx.Node):
        return
    arguments = tensor_args(source)
    empty = _empty_arguments(source)
    if not empty:
        return
    if node.target is aten.cat.default:
        kept = [argument for argument in arguments if argument not in empty]
        if len(kept) == 1:
            _replace(graph, node, kept[0])
        else:
            node.args = (kept, *node.args[1:])
    elif source.target is aten.addmm.default and arguments[0] not in empty:
        _replace(graph, node, _bias(graph, node))
    elif source.target in WRITES and arguments[0] not in empty:
        _replace(graph, node, arguments[0])
    elif len(empty) == len(arguments) or (_is_backward(source) and arguments[0] in empty):
        fill = _fill(source, node)
        _replace(graph, node, _full(graph, node, fill))
    else:
        raise RuleError(
            f"{source.target} reads a tensor without elements, of shape {tuple(empty[0].meta['val'].shape)}, together "
            "with others: leave that tensor out where it has no elements, or give it at least one"
        )


def _empty_arguments(node: fx.Node) -> list[fx.Node]:
    return [item for item in tensor_args(node) if _is_empty(item.meta["val"]) and not _is_unused_result(item)]


def _is_unused_result(node: fx.Node) -> bool:
    """Whether a value without elements is a result that an op does not need here, as batch norm's saved mean when it
    evaluates: its gradient's op takes it as such."""
    if node.target is not operator.getitem or not _is_empty(node.meta["val"]):
        return False
    parent = node.args[0]
    if not isinstance(parent, fx.Node) or not isinstance(parent.target, torch._ops.OpOverload):
        return False
    return len(parent.target._schema.returns) > 1 and not _empty_arguments(parent)


def _bias(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The bias of an `addmm`, to which a product over no steps adds nothing."""
    bias, value, beta = node.args[0], node.meta["val"], node.kwargs.get("beta", 1)
    with graph.inserting_before(node):
        made = graph.call_function(aten.expand.default, (bias, list(value.shape)))
        made.meta = dict(node.meta)
        if beta != 1:
            made = graph.call_function(aten.mul.Scalar, (made, beta))
            made.meta = dict(node.meta)
    return made


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 0


def _is_backward(node: fx.Node) -> bool:
    """Whether an op computes gradients: of a gradient without elements they are zeros."""
    return isinstance(node.target, torch._ops.OpOverload) and "_backward" in str(node.target)


def _fill(source: fx.Node, node: fx.Node) -> Any:
    """The number that all elements of an op's result have, or of one of its results, of values without elements."""
    if _is_backward(source):
        return 0

    def real(leaf: fx.Node) -> Any:
        value = leaf.meta["val"]
        return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

    args, kwargs = fx.node.map_arg((source.args, source.kwargs), real)
    kwargs = {name: item for name, item in kwargs.items() if name != "device"}
    result = source.target(*args, **kwargs)  # type: ignore[operator]
    value = result if source is node else result[node.args[1]]
    first = value.flatten()[0].item()
    return first


def _full(graph: fx.Graph, node: fx.Node, fill: Any, at: fx.Node | None = None) -> fx.Node:
    """A constant like the value of `node`, all of whose elements are `fill`, in its place or before the node `at`."""
    value = node.meta["val"]
    with graph.inserting_before(at or node):
        made = graph.call_function(
            aten.full.default, (list(value.shape), fill), {"dtype": value.dtype, "device": value.device}
        )
    made.meta = {key: item for key, item in node.meta.items() if key not in ("val", "desc")}
    with value.fake_mode:
        made.meta["val"] = aten.full.default(list(value.shape), fill, dtype=value.dtype, device=value.device)
    return made


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)
