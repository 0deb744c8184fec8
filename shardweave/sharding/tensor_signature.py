"""What two nodes must share for one measured time to hold for both: their signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardweave.ops import seeded


def op_of(node: fx.Node) -> Any:
    """The op that `node` calls; of one that draws random numbers, the op that is run under a seed."""
    return node.args[0] if node.target is seeded else node.target


def op_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `op_of(node)`: those of a node that draws without its seed and place."""
    return (node.args[4:] if node.target is seeded else node.args), dict(node.kwargs)


def tensor_shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of the tensor in ``node.meta["val"]``; of several, that of the first."""
    value = node.meta["val"]
    return tuple((value if isinstance(value, torch.Tensor) else value[0]).shape)


def signature(node: fx.Node, shape_of: Callable[[fx.Node], Sequence[int]] = tensor_shape) -> str:
    """The op of `node`, the dtypes, shapes and order in memory of the tensors that it takes, and its other arguments.

    Numbers that are computed in the graph (the place of a rank) are all written ``int``: they change no shape. Which
    device a tensor is made on is left out, since a table of times is one device's.

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
    """How `tensor` lies in memory: nothing where it is contiguous, else its dimensions from the outermost.

    A ``*`` marks what is expanded, and a ``~`` at the end says that there are gaps between the elements.

    >>> _order(torch.ones(2, 3)), _order(torch.ones(2, 3).t()), _order(torch.ones(4, 1).expand(4, 2))
    ('', '^1,0', '^0,1*')
    >>> _order(torch.ones(4, 8)[:, ::2])
    '^0,1~'
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    long = [dim for dim, size in enumerate(shape) if size != 1]  # a dimension of one lies in any order
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
