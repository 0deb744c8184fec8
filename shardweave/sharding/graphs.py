"""Read fx graphs: values, sizes, names and signatures of nodes; copies of graphs, and decompositions of nodes.

Two nodes with the same signature share one measured time. This is the only module that touches torch's private lazy
GraphModule, which compiles the code of a graph when the code is read or run.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._pytree import tree_map_only

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.ir import META, Collective, NodeInfo, VerifyError
from shardweave.ops import seeded

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_COPIES_STRIDED = ("aten::reshape", "aten::contiguous", "aten::to", "aten::flatten")  # views of contiguous values
_DEQUANTIZE = torch.ops.shardweave.dequantize_blocks.default
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.reshape.default,
           torch.ops.aten.split_with_sizes_copy.default, torch.ops.shardweave.quantize_blocks.default,
           _DEQUANTIZE)  # fmt: skip
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
    """Bytes of the tensors in `value`; an expanded dimension counts once.

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
    """The `NodeInfo` of `node`; an empty one if no pass has set it."""
    found = node.meta.get(META)
    return found if isinstance(found, NodeInfo) else _NOTHING


def is_wait(node: fx.Node) -> bool:
    """Whether `node` waits for a collective."""
    return node.target is _WAIT


def is_start(node: fx.Node) -> bool:
    """Whether `node` starts a collective."""
    return getattr(node.target, "namespace", "") == "_c10d_functional" and not is_wait(node)


def collective(node: fx.Node) -> Collective:
    """The collective that `node` starts; `VerifyError` if no pass has set it."""
    found = info(node).collective
    if found is None:
        raise VerifyError(
            f"{node.name}: expected node.meta[{META!r}].collective on a node that starts a collective, got nothing; "
            "the pass that inserts it has to note it"
        )
    return found


def gathers_parameter(node: fx.Node) -> bool:
    """Whether `node` starts the gather of a parameter, or dequantizes its gathered blocks."""
    what = info(node).collective
    gathers = what is not None and what.kind == "all_gather" and what.cause == "parameter"
    return gathers or node.target is _DEQUANTIZE


def copied_from(node: fx.Node) -> set[fx.Node]:
    """The placeholders that `node` views, casts, copies, joins or gathers; none if `node` computes something.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> copy = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": torch.bfloat16})
    >>> copied_from(copy), copied_from(graph.call_function(torch.ops.aten.neg.default, (copy,)))
    ({x}, set())
    """
    found, rest = set[fx.Node](), [node]
    while rest:
        node = rest.pop()
        if node.op == "placeholder":
            found.add(node)
        elif node.target == torch.ops.aten.cat.default:
            rest += node.all_input_nodes
        elif node.target in _COPIES or is_start(node) or alias_of(node) is not None:
            rest.append(node.all_input_nodes[0])
        else:
            return set()
    return found


def alias_of(node: fx.Node) -> fx.Node | None:
    """The input whose memory the output of `node` shares; None if it has memory of its own.

    An element of a tuple shares the memory of the tuple. The caller tells the elements of a new tuple apart.
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
    """Whether torch can view a strided tensor in another shape without a copy.

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


def op_name(node: fx.Node) -> str:
    """The name of the module that the node belongs to (``"blocks.0.attention.qkv"``); without one, the node's own."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if stack:
        path = str(list(stack.values())[-1][0])
        path = re.sub(r"^L\['\w+'\]\.?", "", path)
        path = re.sub(r"\.?(?:__dict__\['_modules'\]|_modules)\['([^']+)'\]", r".\1", path)
        return path.lstrip(".") or node.name
    return node.name


def describe(node: fx.Node) -> str:
    """A node for an error message: its op, its module, and the user's line."""
    trace = str(node.meta.get("stack_trace", ""))
    lines = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s+(.+)', trace)
    where = "".join(f" ({file}:{line}: {code.strip()})" for file, line, code in lines[-1:])
    return f"{node.target} in {op_name(node)}{where}"


def argument_key(value: Any) -> Hashable:
    """A key of an argument, or of several: shapes, strides and dtypes of tensors, and constants as they are.

    >>> argument_key([torch.ones(2), 3]) == argument_key([torch.zeros(2), 3]), argument_key(1) == argument_key(1.0)
    (True, False)
    """
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.device
    if isinstance(value, (list, tuple)):  # not list | tuple, which makes a new union at each call
        return tuple([argument_key(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, argument_key(item)) for name, item in value.items()])
    if isinstance(value, (bool, int, float)):
        return type(value), value  # 1, 1.0 and True are equal, but ops treat them differently
    return value if isinstance(value, Hashable) else repr(value)


def fake_result(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    fake_mode: Any,
    known: dict[object, Any] | None = None,
) -> Any:
    """The fake result of a call, whose arguments are nodes with fake values, or constants.

    `known` is a cache: equal layers make equal calls.
    """
    key = None if known is None else (target, argument_key(args), argument_key(kwargs))
    if known is not None and (found := known.get(key)) is not None:
        return found
    values, keywords = fx.node.map_arg((args, dict(kwargs)), lambda leaf: leaf.meta["val"])
    with fake_mode:
        result = target(*values, **keywords)
    if known is not None:
        known[key] = result
    return result


INHERITED_META = ("partitioner_tag", "nn_module_stack", "fwd_nn_module_stack", "stack_trace", "recompute",
                  "ac_graph_id")  # fmt: skip
"""Metadata that the nodes of a decomposition copy from the node that they replace."""


def decompose(node: fx.Node, form: Callable[..., Any], known: dict[object, Any]) -> list[fx.Node]:
    """Replace `node` by the ops of `form`, traced on its arguments, and return the new nodes.

    A form that writes into an argument is not taken: the node stays as it is.

    `known` is a cache: calls with equal arguments have equal traces.
    """
    leaves = list(node.all_input_nodes)
    places = {leaf: f"%{index}" for index, leaf in enumerate(leaves)}  # strings, as numbers are arguments, too
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), places.__getitem__)
    key = "form", form, argument_key(leaves), str((args, kwargs))
    if key not in known:
        known[key] = _traced(node, form, leaves)
    traced = known[key]
    if any(isinstance(op := inner.target, torch._ops.OpOverload) and op._schema.is_mutable for inner in traced.nodes):
        return []
    mapping: dict[fx.Node, Any] = {}
    added: list[fx.Node] = []
    arguments = iter(leaves)
    with node.graph.inserting_before(node):
        for inner in traced.nodes:
            if inner.op == "placeholder":
                mapping[inner] = next(arguments)
            elif inner.op == "output":
                result = fx.node.map_arg(inner.args[0], lambda leaf: mapping[leaf])
            else:
                copy = node.graph.node_copy(inner, lambda leaf: mapping[leaf])
                copy.meta |= {key: node.meta[key] for key in INHERITED_META if key in node.meta}
                mapping[inner] = copy
                added.append(copy)
    if isinstance(result, (tuple, list)):
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])  # type: ignore[index]
            node.graph.erase_node(user)
    else:
        node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return added


def _traced(node: fx.Node, form: Callable[..., Any], leaves: Sequence[fx.Node]) -> fx.Graph:
    """The graph of `form`, called as `node` calls its op, with fake values for `leaves`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    fake = leaves[0].meta["val"].fake_mode

    def call(*values: Any) -> Any:
        lookup = dict(zip(leaves, values))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda leaf: lookup[leaf])
        given = (list(each) if isinstance(each, list) else each for each in args)  # some forms write into their lists
        return form(*given, **kwargs)

    with fake:  # values of their own, as nodes of a saved graph share theirs, and a trace tells arguments apart by them
        traced = make_fx(call)(*tree_map_only(torch.Tensor, torch.Tensor.detach, [leaf.meta["val"] for leaf in leaves]))
    traced.graph.eliminate_dead_code()
    return traced.graph


def module_of(constants: fx.GraphModule, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """`graph` as a module with the tensors and the meta of `constants`.

    >>> double = fx.symbolic_trace(lambda x: x + x)
    >>> module_of(double, double.graph)(2)
    4
    """
    module = _LazyGraphModule(constants, graph, name)
    module.meta.update(constants.meta)
    return module


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """`module` with a graph of its own; tensors and the nodes' values are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return module_of(module, graph)


def op_of(node: fx.Node) -> Any:
    """The op that `node` calls; for a random op, the op that runs under a seed."""
    return node.args[0] if node.target is seeded else node.target


def op_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `op_of(node)`: those of a random op without its seed and position."""
    return (node.args[4:] if node.target is seeded else node.args), dict(node.kwargs)


def tensor_shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of the tensor in ``node.meta["val"]``; of several, that of the first."""
    value = node.meta["val"]
    return tuple((value if isinstance(value, torch.Tensor) else value[0]).shape)


def signature(node: fx.Node, shape_of: Callable[[fx.Node], Sequence[int]] = tensor_shape) -> str:
    """The op of `node`, the dtypes, shapes and memory order of its input tensors, and its other arguments.

    Numbers that are computed in the graph (the coordinate of a rank) are all written ``int``: they change no shape. The
    device of a new tensor is left out, since a table of times is for one device.

    Parameters
    ----------
    shape_of : callable
        The shape of a node's tensor; that of ``node.meta["val"]`` if not given.

    Examples
    --------
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(4, 8, device="meta").t()
    >>> signature(graph.call_function(torch.ops.aten.sum.dim_IntList, (x, [0])))
    'aten.sum.dim_IntList(float32[8,4]^1,0, [0])'
    """
    args, kwargs = op_arguments(node)
    parts = [_text(argument, shape_of) for argument in args]
    parts += [f"{name}={_text(value, shape_of)}" for name, value in sorted(kwargs.items()) if name not in _PLACES]
    return f"{op_of(node)}({', '.join(parts)})"


_PLACES = ("device", "pin_memory")


def _text(value: object, shape_of: Callable[[fx.Node], Sequence[int]]) -> str:
    if isinstance(value, fx.Node):
        held = value.meta.get("val")
        if isinstance(held, torch.Tensor):
            dtype = str(held.dtype).removeprefix("torch.")
            return f"{dtype}[{','.join(map(str, shape_of(value)))}]{_order(held)}"
        return "int" if isinstance(held, int) else type(held).__name__
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item, shape_of) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(item, shape_of)}' for key, item in value.items())}}}"
    return str(value)


def _order(tensor: torch.Tensor) -> str:
    """The dimensions of `tensor` from the outermost in memory; nothing if it is contiguous.

    A ``*`` marks an expanded dimension. A ``~`` at the end says that there are gaps between the elements.

    >>> _order(torch.ones(2, 3)), _order(torch.ones(2, 3).t()), _order(torch.ones(4, 1).expand(4, 2))
    ('', '^1,0', '^0,1*')
    >>> _order(torch.ones(4, 8)[:, ::2])
    '^0,1~'
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    long = [dim for dim, size in enumerate(shape) if size != 1]  # the order of a dimension of size one does not matter
    expanded = {dim for dim in long if strides[dim] == 0}
    order = sorted(long, key=lambda dim: -strides[dim])
    step, gaps = 1, False
    for dim in reversed(order):
        if dim not in expanded:
            gaps, step = gaps or strides[dim] != step, step * shape[dim]
    if 0 in shape or (order == long and not gaps and not expanded):
        return ""
    marked = [f"{dim}*" if dim in expanded else str(dim) for dim in order]
    return f"^{','.join(marked)}{'~' if gaps else ''}"
