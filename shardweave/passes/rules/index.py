"""Indexing by tensors: a dimension that is looked up is a loop of its own, which the result does not have.

A rank that holds a part of it looks up what it holds and gives zeros for the rest; the sum over the ranks is the
lookup. In writes, a rank writes what falls into its part. The loops of the index tensors are those of the result. An
index that counts a whole dimension (``x[arange(batch), last]``) makes the dimension and the result's the same loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.errors import RuleError
from shardweave.ir import BoundRule, Dims, Factor
from shardweave.passes.rules.lookup import checked, counts, local_index
from shardweave.passes.rules.registry import RULES, Emitter, Rule, argument, shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Indexing:
    """How an op indexes: the shape that the index tensors have together, and where it stands in the result.

    Parameters
    ----------
    size : tuple of int
        The shape of the indexed value.
    indices : tuple of nodes
        For each dimension of it, its index, or None.
    spread : tuple of int
        The common shape of the index tensors.
    at : int
        The first dimension of the result that is one of `spread`.
    """

    size: tuple[int, ...]
    indices: tuple[fx.Node | None, ...]
    spread: tuple[int, ...]
    at: int

    @classmethod
    def of(cls, node: fx.Node) -> Indexing:
        size = shape(argument(node, "self"))
        given = list(argument(node, "indices"))
        present = [dim for dim, index in enumerate(given) if index is not None]
        for dim in present:
            if given[dim].meta["val"].dtype in (torch.bool, torch.uint8):
                raise RuleError(
                    f"{node.target} by a mask: how many elements it selects depends on the data; "
                    "multiply by the mask, or use torch.where"
                )
        together = present == list(range(present[0], present[-1] + 1))
        spread = tuple(torch.broadcast_shapes(*(shape(given[dim]) for dim in present)))  # type: ignore[no-untyped-call]
        return cls(size, (*given, *[None] * (len(size) - len(given))), spread, present[0] if together else 0)

    @property
    def after(self) -> int:
        """How many dimensions of the result follow those of the index tensors."""
        return sum(index is None for index in self.indices) - self.at

    def counted(self) -> dict[int, int]:
        """The dimensions that a constant index counts from end to end, each with its dimension of `spread`."""
        found: dict[int, int] = {}
        for dim, index in enumerate(self.indices):
            along = counts(index, self.size[dim]) if index is not None else None
            if index is not None and along is not None:
                along += len(self.spread) - len(shape(index))
                if along not in found.values():
                    found[dim] = along
        return found


def bind_index(node: fx.Node) -> BoundRule:
    """The rule of `index` and of `index_put` (see the module's docstring)."""
    how, put = Indexing.of(node), node.target is aten.index_put.default
    counted = how.counted()
    factors: dict[str, Factor] = {}

    def name(text: str, size: int, blocked: bool = False) -> tuple[str, ...]:
        if size > 1:
            factors.setdefault(text, Factor(text, size, blocked))
        return (text,) if size > 1 else ()

    # Which of two writes to one place wins is not said, so only sums of them can be made in parts.
    overwrites = put and not argument(node, "accumulate")
    is_flag = argument(node, "self").meta["val"].dtype == torch.bool  # flags cannot be summed over ranks
    spread = [name(f"n{dim}", size, overwrites and dim not in counted.values()) for dim, size in enumerate(how.spread)]
    whole = [
        spread[counted[dim]] if dim in counted else name(f"i{dim}" if index is None else f"v{dim}", size,
                                                         index is not None and is_flag and not put)
        for dim, (index, size) in enumerate(zip(how.indices, how.size))
    ]  # fmt: skip
    free = [names for names, index in zip(whole, how.indices) if index is None]
    result = [*free[: how.at], *spread, *free[how.at :]]

    def aligned(value: fx.Node, names: list[tuple[str, ...]]) -> Dims:
        size = shape(value)
        return tuple(mine if length > 1 else () for mine, length in zip(names[len(names) - len(size) :], size))

    inputs: list[Dims] = [tuple(whole), *(aligned(index, spread) for index in how.indices if index is not None)]
    if put:
        inputs.append(aligned(argument(node, "values"), result))
    return BoundRule(tuple(factors.values()), tuple(inputs), (tuple(whole if put else result),))


def _places(emit: Emitter, how: Indexing) -> tuple[list[fx.Node | None], fx.Node | None, int]:
    """The local indices, where one of them lies outside of this rank's part, and the first dimension that has such."""
    indices: list[fx.Node | None] = [*emit.args[1], *[None] * (len(how.size) - len(emit.args[1]))]
    missed: fx.Node | None = None
    first = -1
    for dim, (index, digits) in enumerate(zip(indices, emit.input_layouts[0].dims)):
        if index is None or not emit.input_layouts[0].local_shape[dim] < how.size[dim]:
            continue
        is_counted = emit.rule.inputs[0][dim][0].startswith("n")
        if not is_counted:
            index = checked(emit, index, 0, -how.size[dim], how.size[dim])
            index = emit.call(aten.remainder.Scalar, index, how.size[dim])  # -1 is the last one
        found = local_index(emit, index, digits, is_checked=True)
        if found is None:
            continue
        indices[dim] = found[0]
        if not is_counted:
            missed = found[1] if missed is None else emit.call(aten.logical_or.default, missed, found[1])
            first = dim if first < 0 else first
    return indices, missed, first


def _trailing(emit: Emitter, mask: fx.Node, count: int) -> fx.Node:
    for _ in range(count):
        mask = emit.call(aten.unsqueeze.default, mask, -1)
    return mask


def lower_index(emit: Emitter) -> fx.Node:
    """Look up what this rank holds, zeros elsewhere."""
    how = Indexing.of(emit.node)
    indices, missed, _ = _places(emit, how)
    found = emit.call(aten.index.Tensor, emit.args[0], indices)
    if missed is None:
        return found
    return emit.call(aten.masked_fill.Scalar, found, _trailing(emit, missed, how.after), 0)


def lower_index_put(emit: Emitter) -> fx.Node:
    """Write what falls into this rank's part; the rest is added as zeros, or written to a row that is cut off."""
    how = Indexing.of(emit.node)
    value, _, source, *accumulate = emit.args
    indices, missed, first = _places(emit, how)
    if missed is None:
        return emit.call(aten.index_put.default, value, indices, source, *accumulate)
    if accumulate and accumulate[0]:
        source = emit.call(aten.where.ScalarSelf, _trailing(emit, missed, how.after), 0, source)
        return emit.call(aten.index_put.default, value, indices, source, True)
    local = emit.input_layouts[0].local_shape
    indices[first] = emit.call(aten.where.ScalarSelf, missed, local[first], indices[first])
    written = emit.call(aten.index_put.default, spare(emit, value, first), indices, source)
    return emit.call(aten.slice.Tensor, written, first, 0, local[first])


def spare(emit: Emitter, value: fx.Node, dim: int) -> fx.Node:
    """`value` with one more row along `dim`, for what other ranks hold."""
    rank = value.meta["val"].dim()
    return emit.call(aten.constant_pad_nd.default, value, [0, 0] * (rank - 1 - dim) + [0, 1])


_SOURCE = "indexed dimensions are contracted, the index's are the result's; blocked: indexed dimensions of flags"
_PUT_SOURCE = "a part takes the writes that fall into it; blocked: the index's dimensions, unless it accumulates"
RULES[aten.index.Tensor] = Rule(bind_index, lower_index, source=_SOURCE)
RULES[aten.index_put.default] = Rule(bind_index, lower_index_put, source=_PUT_SOURCE)


# -- other spellings


def _along(dim: int, index: Tensor, rank: int) -> list[Tensor | None]:
    return [*[None] * (dim % max(rank, 1)), index.reshape(-1)]


def index_select(x: Tensor, dim: int, index: Tensor) -> Any:
    """Rows by number."""
    if x.dim() == 0:
        return x
    return aten.index.Tensor(x, _along(dim, index, x.dim()))


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    """Rows added by number."""
    source = source if alpha == 1 else source * alpha
    return aten.index_put.default(x, _along(dim, index, x.dim()), source, True)


def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """Rows written by number."""
    return aten.index_put.default(x, _along(dim, index, x.dim()), source)


def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    """Rows filled by number."""
    filled = value.to(x.dtype) if isinstance(value, Tensor) else aten.full.default([], value, dtype=x.dtype)
    return aten.index_put.default(x, _along(dim, index, x.dim()), filled)


def take(x: Tensor, index: Tensor) -> Any:
    """Elements by their number in the whole value."""
    return aten.index.Tensor(x.reshape(-1), [index])


def unsafe_index(x: Tensor, indices: list[Tensor | None]) -> Any:
    """`index`: that its indices need no check is forgotten."""
    return aten.index.Tensor(x, indices)


def unsafe_index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """`index_put`: that its indices need no check is forgotten."""
    return aten.index_put.default(x, indices, values, accumulate)


def added(op: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """What `op` adds to zeros, added to `x`: parts of a split index would each add the whole of `x`."""
    zeros = aten.full.default(list(x.shape), 0, dtype=x.dtype, device=x.device)
    return x + op(zeros, *args)


def accumulated(node: fx.Node) -> Callable[..., Tensor] | None:
    """The form of an `index_put` that accumulates on what is not zero."""
    if not argument(node, "accumulate") or is_zero(argument(node, "self")):
        return None
    return partial(added, aten.index_put.default)


_LOOKING = [
    aten.expand.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.view.default,
    aten.permute.default,
    aten.transpose.int,
]


def is_zero(node: fx.Node) -> bool:
    """Whether a node is zeros just made."""
    while node.target in _LOOKING:
        node = node.args[0]  # type: ignore[assignment]
    made_zero = node.target is aten.full.default and isinstance(node.args[1], (int, float)) and node.args[1] == 0
    return made_zero or node.target is aten.zeros.default


INDEX_FORMS: dict[Any, Callable[..., Any]] = {
    aten.index_select.default: index_select,
    aten.index_add.default: index_add,
    aten.index_copy.default: index_copy,
    aten.index_fill.int_Scalar: index_fill,
    aten.index_fill.int_Tensor: index_fill,
    aten.take.default: take,
    aten._unsafe_index.Tensor: unsafe_index,
    aten._unsafe_index_put.default: unsafe_index_put,
}
INDEX_CONDITIONAL: dict[Any, Callable[[fx.Node], Callable[..., Any] | None]] = {aten.index_put.default: accumulated}
