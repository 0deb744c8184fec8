"""Rules of indexing by tensors: `index`, `index_put`, embeddings, `gather` and `scatter`.

Index and index_put
    An indexed dimension is a contracted factor: the result does not have it. A rank that holds a part of the dimension
    looks up its entries and gives zeros for the others. The sum over the ranks is the lookup. In writes, a rank writes
    the entries of its part. The loops of the index tensors are loops of the result. An index that counts a whole
    dimension (``x[arange(batch), last]``) makes this dimension and that of the result the same loop.

Embeddings
    A table lookup is a product with a one-hot matrix, so the vocabulary is a contracted factor (Megatron's
    vocabulary-parallel embedding).

Gather and scatter
    These have one index for each element along a dimension; all other dimensions are free. The dimension itself is
    looked up as in `index`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.ir import META, Axis, BoundRule, Digit, RuleError, axes_size
from shardweave.sharding.rules.registry import (
    RULES,
    Emitter,
    Factors,
    Names,
    Rule,
    argument,
    register_conditional,
    register_decomposition,
    rule,
    shape,
    tensor_args,
)

aten = torch.ops.aten
custom_ops = torch.ops.shardweave
MAX_EVALUATED_ELEMENTS = 1 << 20
"""The largest constant index that is evaluated to see whether it counts a dimension."""


@dataclass(frozen=True)
class Indexing:
    """The indexing of a call: the broadcast shape of the index tensors, and its position in the result.

    Parameters
    ----------
    size : tuple of int
        The shape of the indexed value.
    indices : tuple of nodes
        The index of each dimension, or None.
    index_shape : tuple of int
        The broadcast shape of the index tensors.
    at : int
        The first dimension of the result that is one of `index_shape`.
    """

    size: tuple[int, ...]
    indices: tuple[fx.Node | None, ...]
    index_shape: tuple[int, ...]
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
        """The number of result dimensions after those of the index tensors."""
        return sum(index is None for index in self.indices) - self.at

    def counted(self) -> dict[int, int]:
        """The dimensions that a constant index counts from 0 to their end, each with its dimension of `index_shape`."""
        found: dict[int, int] = {}
        for dim, index in enumerate(self.indices):
            along = counted_dim(index, self.size[dim]) if index is not None else None
            if index is not None and along is not None:
                along += len(self.index_shape) - len(shape(index))
                if along not in found.values():
                    found[dim] = along
        return found


def bind_index(node: fx.Node) -> BoundRule:
    """The rule of `index` and of `index_put` (see the module's docstring)."""
    how, put = Indexing.of(node), node.target is aten.index_put.default
    counted = how.counted()
    factors = Factors()
    # The order of two writes to one position is undefined, so only sums of writes can be computed in parts.
    overwrites = put and not argument(node, "accumulate")
    # Flags cannot be summed over ranks.
    looked_up_flags = not put and argument(node, "self").meta["val"].dtype == torch.bool
    spread = [
        factors.new(size, blocked=overwrites and dim not in counted.values(), name=f"n{dim}")
        for dim, size in enumerate(how.index_shape)
    ]
    whole = [
        spread[counted[dim]]
        if dim in counted
        else factors.new(
            size, blocked=looked_up_flags and index is not None, name=f"{'i' if index is None else 'v'}{dim}"
        )
        for dim, (index, size) in enumerate(zip(how.indices, how.size))
    ]
    free = [names for names, index in zip(whole, how.indices) if index is None]
    result = [*free[: how.at], *spread, *free[how.at :]]

    def aligned(value: fx.Node, names: Sequence[Names]) -> list[Names]:
        size = shape(value)
        return [mine if length > 1 else () for mine, length in zip(names[len(names) - len(size) :], size)]

    inputs = [whole, *(aligned(index, spread) for index in how.indices if index is not None)]
    if put:
        inputs.append(aligned(argument(node, "values"), result))
    return factors.rule(inputs, [whole if put else result])


def _local_indices(emit: Emitter, how: Indexing) -> tuple[list[fx.Node | None], fx.Node | None, int]:
    """The local indices, a mask of those outside of this rank's part, and the first dimension that has such."""
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
    """Look up the entries of this rank, zeros elsewhere."""
    how = Indexing.of(emit.node)
    indices, missed, _ = _local_indices(emit, how)
    found = emit.call(aten.index.Tensor, emit.args[0], indices)
    if missed is None:
        return found
    return emit.call(aten.masked_fill.Scalar, found, _trailing(emit, missed, how.after), 0)


def lower_index_put(emit: Emitter) -> fx.Node:
    """Write the entries of this rank's part; others are added as zeros, or written to a row that is cut off."""
    how = Indexing.of(emit.node)
    value, _, source, *accumulate = emit.args
    indices, missed, first = _local_indices(emit, how)
    if missed is None:
        return emit.call(aten.index_put.default, value, indices, source, *accumulate)
    if accumulate and accumulate[0]:
        source = emit.call(aten.where.ScalarSelf, _trailing(emit, missed, how.after), 0, source)
        return emit.call(aten.index_put.default, value, indices, source, True)
    local = emit.input_layouts[0].local_shape
    indices[first] = emit.call(aten.where.ScalarSelf, missed, local[first], indices[first])
    written = emit.call(aten.index_put.default, with_spare_row(emit, value, first), indices, source)
    return emit.call(aten.slice.Tensor, written, first, 0, local[first])


def with_spare_row(emit: Emitter, value: fx.Node, dim: int) -> fx.Node:
    """`value` with one more row along `dim`, for entries of other ranks."""
    rank = value.meta["val"].dim()
    return emit.call(aten.constant_pad_nd.default, value, [0, 0] * (rank - 1 - dim) + [0, 1])


_SOURCE = "indexed dimensions are contracted, the index's are the result's; blocked: indexed dimensions of flags"
_PUT_SOURCE = "a part takes the writes that fall into it; blocked: the index's dimensions, unless it accumulates"
RULES[aten.index.Tensor] = Rule(bind_index, lower_index, source=_SOURCE)
RULES[aten.index_put.default] = Rule(bind_index, lower_index_put, source=_PUT_SOURCE)


# -- other spellings


def _along(dim: int, index: Tensor, rank: int) -> list[Tensor | None]:
    return [*[None] * (dim % max(rank, 1)), index.reshape(-1)]


@register_decomposition(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    """Fill rows by `index_put`."""
    filled = value.to(x.dtype) if isinstance(value, Tensor) else aten.full.default([], value, dtype=x.dtype)
    return aten.index_put.default(x, _along(dim, index, x.dim()), filled)


@register_decomposition(aten.take.default)
def take(x: Tensor, index: Tensor) -> Any:
    """Index the flattened value."""
    return aten.index.Tensor(x.reshape(-1), [index])


def added_to_zeros(op: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """`x` plus the result of `op` on zeros: parts of a split index would each add all of `x`."""
    zeros = aten.full.default(list(x.shape), 0, dtype=x.dtype, device=x.device)
    return x + op(zeros, *args)


def _mask_of(node: fx.Node) -> fx.Node | None:
    """The mask among the indices of an `index_put`."""
    given = argument(node, "indices")
    return next((index for index in given if index is not None and index.meta["val"].dtype == torch.bool), None)


def writes_by_mask(node: fx.Node) -> bool:
    """Whether a node writes values of their own into the elements that a mask selects."""
    if node.target is not aten.index_put.default or _mask_of(node) is None:
        return False
    alone = sum(index is not None for index in argument(node, "indices")) == 1
    one = all(isinstance(size, int) and size == 1 for size in argument(node, "values").meta["val"].shape)
    return not (alone and one) or bool(argument(node, "accumulate"))


def _fill_by_mask(x: Tensor, indices: Sequence[Tensor | None], value: Tensor, *_: Any) -> Tensor:
    """One number where a mask, which covers some dimensions of `x`, is true."""
    (mask,) = (index for index in indices if index is not None)
    after = x.dim() - len(indices) + 1 - mask.dim()
    return torch.where(mask.reshape([*mask.shape, *[1] * after]), value.reshape([]), x)


@register_conditional(aten.index_put.default)
def accumulated(node: fx.Node) -> Callable[..., Tensor] | None:
    """Decompose an `index_put` that writes one number by a mask, or accumulates on a value that is not zero."""
    mask = _mask_of(node)
    if mask is not None and not writes_by_mask(node) and not argument(node, "accumulate"):
        return _fill_by_mask
    if not argument(node, "accumulate") or is_zero(argument(node, "self")):
        return None
    return partial(added_to_zeros, aten.index_put.default)


VIEWS = [
    aten.expand.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.view.default,
    aten.permute.default,
    aten.transpose.int,
]


def is_zero(node: fx.Node) -> bool:
    """Whether a node is a constant of zeros, or a view of one."""
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    made_zero = node.target is aten.full.default and isinstance(node.args[1], (int, float)) and node.args[1] == 0
    return made_zero or node.target is aten.zeros.default


def checked(emit: Emitter, index: fx.Node, start: Any, low: int, high: int) -> fx.Node:
    """`index` minus `start`; a rank raises an error for an index below `low` or not below `high`."""
    known = emit.node.meta.get(META)
    what = f"{emit.node.target} of {known.op}" if known is not None else str(emit.node.target)
    return emit.call(custom_ops.checked_index.default, index, start, low, high, what)


def local_index(
    emit: Emitter, index: fx.Node, digits: Sequence[Digit], is_checked: bool = False
) -> tuple[fx.Node, fx.Node] | None:
    """The local index into this rank's part of a dimension, and a mask of indices outside of that part.

    The local index of an outside one is some index inside. None if the dimension with these `digits` is not sharded. An
    index outside of the whole dimension is an error, as in torch, unless it `is_checked` elsewhere.
    """
    axes = [digit for digit in digits if isinstance(digit, Axis)]
    if not axes:
        return None
    local = math.prod(digit for digit in digits if isinstance(digit, int))
    whole = local * axes_size(axes)
    if all(isinstance(digit, Axis) for digit in digits[: len(axes)]):  # one piece
        start = emit.offset(axes, local)
        moved = emit.call(aten.sub.Tensor, index, start) if is_checked else checked(emit, index, start, 0, whole)
        below, above = emit.call(aten.lt.Scalar, moved, 0), emit.call(aten.ge.Scalar, moved, local)
        outside = emit.call(aten.logical_or.default, below, above)
        return emit.call(aten.masked_fill.Scalar, moved, outside, 0), outside
    index = index if is_checked else checked(emit, index, 0, 0, whole)
    place: fx.Node | None = None
    missed: fx.Node | None = None
    low = step = 1
    for digit in reversed(digits):  # several pieces: compare and keep the index's own digits
        size = digit.size if isinstance(digit, Axis) else digit
        part = emit.call(aten.floor_divide.Scalar, index, low) if low > 1 else index
        part = emit.call(aten.remainder.Scalar, part, size)
        if isinstance(digit, Axis):
            other = emit.call(aten.ne.Scalar, part, emit.offset([digit], 1))
            missed = other if missed is None else emit.call(aten.logical_or.default, missed, other)
        else:
            part = emit.call(aten.mul.Scalar, part, step)
            place = part if place is None else emit.call(aten.add.Tensor, place, part)
            step *= digit
        low *= size
    if missed is None:
        return None
    return emit.call(aten.mul.Scalar, index, 0) if place is None else place, missed


def constant(node: fx.Node) -> torch.Tensor | None:
    """The integers that a node always computes; None if it depends on an input, or is large or random."""
    try:
        result = _evaluate(node, {})
    except _Unknown:
        return None
    return result if isinstance(result, torch.Tensor) and not result.is_floating_point() else None


class _Unknown(Exception):
    """A value is not a small constant of the graph."""


def _evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    if node in known:
        return known[node]
    value, target = node.meta.get("val"), node.target
    if not isinstance(value, torch.Tensor) or value.numel() > MAX_EVALUATED_ELEMENTS:
        raise _Unknown
    if node.op == "get_attr":
        held = getattr(node.graph.owning_module, str(target), None)
        if isinstance(held, torch.Tensor) and type(held) is torch.Tensor:
            return held.cpu()
        raise _Unknown
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        raise _Unknown
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise _Unknown
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda leaf: _evaluate(leaf, known))
    kwargs = {name: item for name, item in kwargs.items() if name not in ("device", "pin_memory")}
    known[node] = target(*args, **kwargs)
    return known[node]


def counted_dim(node: fx.Node, size: int) -> int | None:
    """The dimension along which a constant index is ``0, 1, ..., size - 1``; None if it is not, or has others."""
    shape = [int(length) for length in node.meta["val"].shape]
    long = [dim for dim, length in enumerate(shape) if length > 1]
    if len(long) != 1 or shape[long[0]] != size:
        return None
    values = constant(node)
    if values is None or values.dtype == torch.bool or not torch.equal(values.flatten().long(), torch.arange(size)):
        return None
    return long[0]


def lower_embedding(emit: Emitter) -> fx.Node:
    """Look up the tokens of this rank's part of the vocabulary, zeros elsewhere."""
    weight, index, *rest = emit.args
    found = local_index(emit, index, emit.input_layouts[0].dims[0])
    if found is None:
        return emit.call(aten.embedding.default, weight, index)
    rows = emit.call(aten.embedding.default, weight, found[0])
    outside = emit.call(aten.unsqueeze.default, found[1], -1)
    return emit.call(aten.masked_fill.Scalar, rows, outside, 0)


def lower_embedding_backward(emit: Emitter) -> fx.Node:
    """Sum up the rows of the gradient whose tokens this rank holds."""
    grad, index, _, padding, scale = emit.args
    local = emit.output_layouts[0].local_shape[0]
    found = local_index(emit, index, emit.output_layouts[0].dims[0], is_checked=True)  # by the lookup
    if found is None:
        return emit.call(aten.embedding_dense_backward.default, grad, index, local, padding, scale)
    outside = emit.call(aten.unsqueeze.default, found[1], -1)
    rows = emit.call(aten.masked_fill.Scalar, grad, outside, 0)
    if padding >= 0:  # the padding token is a global number: zero its rows before the shift
        is_padding = emit.call(aten.unsqueeze.default, emit.call(aten.eq.Scalar, index, padding), -1)
        rows = emit.call(aten.masked_fill.Scalar, rows, is_padding, 0)
    return emit.call(aten.embedding_dense_backward.default, rows, found[0], local, -1, scale)


rule(aten.embedding.default, "v d, ... -> ... d", lower=lower_embedding)
rule(aten.embedding_dense_backward.default, "... d, ... -> v d", lower=lower_embedding_backward)

_EMBEDDING_BACKWARD = RULES[aten.embedding_dense_backward.default]


def bind_embedding_backward(node: fx.Node) -> BoundRule:
    """The pattern; with ``scale_grad_by_freq``, which counts tokens of the whole batch, only the width is free."""
    bound = _EMBEDDING_BACKWARD.bind(node)
    if not argument(node, "scale_grad_by_freq"):
        return bound
    return replace(bound, factors=tuple(replace(each, blocked=each.name != "d") for each in bound.factors))


def scaled_by_frequency(grad: Tensor, index: Tensor, rows: int, padding: int, scale: bool) -> Tensor:
    """The gradient of a table, each row divided by its number of lookups, in ops that can be split."""
    if not scale:
        plain: Tensor = aten.embedding_dense_backward.default(grad, index, rows, padding, False)
        return plain
    one = aten.ones_like.default(aten.slice.Tensor(grad, -1, 0, 1))
    counts = aten.embedding_dense_backward.default(one, index, rows, padding, False)
    shares = grad / aten.embedding.default(counts, index)
    result: Tensor = aten.embedding_dense_backward.default(shares, index, rows, padding, False)
    return result


RULES[aten.embedding_dense_backward.default] = replace(
    _EMBEDDING_BACKWARD, bind=bind_embedding_backward, decompose=scaled_by_frequency
)


SCATTERS = [
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
]


def bind_pick(node: fx.Node) -> BoundRule:
    """``i v, i n -> i n`` (gather) and ``i v, i n, i n -> i v`` (scatter).

    If the index is shorter than the value along ``i``, that dimension is blocked. Writes to one position along ``n``
    are ordered, so only a `scatter_add` can be computed in parts.
    """
    sizes = [shape(arg) for arg in tensor_args(node)]
    rank = len(sizes[0])
    dim = argument(node, "dim") % max(rank, 1)
    gather = node.target is aten.gather.default
    contracted = gather or node.target is aten.scatter_add.default
    is_flag = gather and tensor_args(node)[0].meta["val"].dtype == torch.bool
    factors = Factors()

    def dims(value: int) -> list[Names]:
        names = []
        for at, size in enumerate(sizes[value]):
            others = {other[at] for other in sizes[bool(at == dim) :]}
            if at != dim:
                name, blocked = f"i{at}", len(others) > 1
            elif value == 0:
                names.append(factors.new(size, is_flag, name="v"))
                continue
            else:
                name, blocked = "n", len(others) > 1 or not contracted
            names.append(factors.new(size, blocked, name=name if len(others) == 1 else f"{name}x{size}"))
        return names

    inputs = [dims(value) if sizes[value] else [] for value in range(len(sizes))]
    return factors.rule(inputs, [inputs[1 if gather else 0]])


def _local_index_of(emit: Emitter) -> tuple[int, fx.Node, tuple[fx.Node, fx.Node] | None]:
    value, dim, index = emit.args[:3]
    dim %= max(value.meta["val"].dim(), 1)
    digits = emit.input_layouts[0].dims
    return dim, index, local_index(emit, index, digits[dim]) if digits else None


def lower_gather(emit: Emitter) -> fx.Node:
    """Gather the entries of this rank, zeros elsewhere."""
    dim, index, found = _local_index_of(emit)
    if found is None:
        return emit.call(aten.gather.default, emit.args[0], dim, index)
    picked = emit.call(aten.gather.default, emit.args[0], dim, found[0])
    return emit.call(aten.masked_fill.Scalar, picked, found[1], 0)


def lower_scatter(emit: Emitter) -> fx.Node:
    """Write the entries of this rank's part."""
    target, (value, _, _, *rest) = emit.node.target, emit.args
    dim, index, found = _local_index_of(emit)
    if found is None:
        return emit.call(target, value, dim, index, *rest, **emit.kwargs)
    place, outside = found
    matching = rest and isinstance(rest[0], fx.Node) and rest[0].meta["val"].shape == index.meta["val"].shape
    if target is aten.scatter_add.default and matching:
        source = emit.call(aten.masked_fill.Scalar, rest[0], outside, 0)
        return emit.call(target, value, dim, place, source)
    single = (
        index.meta["val"].shape[dim] == 1
    )  # then no other write can go to a position that is read for an outside index
    if single and (target is aten.scatter.value or target is aten.scatter.src and matching):
        kept = emit.call(aten.gather.default, value, dim, place)
        if target is aten.scatter.value:
            inside = emit.call(aten.logical_not.default, outside)
            source = emit.call(aten.masked_fill.Scalar, kept, inside, rest[0])
        else:
            source = emit.call(aten.where.self, outside, kept, rest[0])
        return emit.call(aten.scatter.src, value, dim, place, source)
    local = value.meta["val"].shape[dim]
    place = emit.call(aten.masked_fill.Scalar, place, outside, local)
    written = emit.call(target, with_spare_row(emit, value, dim), dim, place, *rest, **emit.kwargs)
    return emit.call(aten.slice.Tensor, written, dim, 0, local)


_SHORT = "`i` where the index is shorter than the value"
RULES[aten.gather.default] = Rule(bind_pick, lower_gather, source=f"`i v, i n -> i n`; blocked: {_SHORT}, `v` of flags")
for _target in SCATTERS:
    RULES[_target] = Rule(
        bind_pick, lower_scatter, source=f"`i v, i n, i n -> i v`; blocked: {_SHORT}, `n` but of a `scatter_add`"
    )


@register_conditional(aten.scatter_add.default)
def scatter_added(node: fx.Node) -> Callable[..., Any] | None:
    """Decompose a `scatter_add` to a value that is not zero."""
    return None if is_zero(argument(node, "self")) else partial(added_to_zeros, aten.scatter_add.default)


@register_conditional(aten.scatter_reduce.two)
def scatter_summed(node: fx.Node) -> Callable[..., Any] | None:
    """Decompose a `scatter_reduce` that sums into `scatter_add`."""
    if argument(node, "reduce") != "sum" or not argument(node, "include_self"):
        return None

    def form(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Any:
        return aten.scatter_add.default(x, dim, index, source)

    return form
