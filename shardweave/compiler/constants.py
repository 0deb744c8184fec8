"""What is a constant of a captured step: attention masks that depend on no input, numbers of buffers, and sizes.

Masks are computed once, while a step is captured. The causal mask becomes ``is_causal=True``, and a mask that hides
nothing is left out: attention then takes its fast kernels, which have no mask. Models of `transformers` leave such
masks out in eager mode, where they look at the values, but build them whenever they are traced.

Such masks repeat one value along the batch, and parts of them along rows or columns. Each value is stored once: a mask
of 64 sequences of 8,192 tokens takes 64 MiB, not 4 GiB.

Numbers that a forward computes from buffers alone, branches on them, and the sizes of what masks of buffers select are
those of the capture. Each call compares the buffers with what they were (`guards.reads_of`).
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from shardweave.compiler.branch_selection import AUGMENTED_ASSIGNMENTS, writes_in_place
from shardweave.compiler.branches import Jump, branches_traced

ATTENTION = torch.nn.functional.scaled_dot_product_attention
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MAX_BYTES = 2**30
"""Of each tensor that is computed for a mask; larger masks stay, as computing them takes memory and seconds."""
DRAWN = "draws another number in each call, and a step would repeat one number"
INDEXED = "what is indexed by a tensor, or the result, is written in place later"
_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64}


class NotConstantError(Exception):
    """A value depends on more than the graph, or is too large."""


class ConstantOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets no op run that draws random numbers, leaves memory as it is, or has a result that is too large.

    Pointwise ops compute a value once that repeats along a dimension of all their inputs.
    """

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in op.tags or "empty" in op.name():
            raise NotConstantError
        if torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
            return _pointwise(op, args, kwargs or {})
        result = op(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and _stored(result).nbytes > _MAX_BYTES:
            raise NotConstantError
        return result


def _pointwise(op: Any, args: Any, kwargs: Any) -> Any:
    """The result of a pointwise op, computed from the elements that its inputs store and expanded to its shape."""
    shapes = [leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    args, kwargs = tree_map_only(Tensor, lambda x: _stored(x.expand(shape)) if x.dim() else x, (args, kwargs))
    stored = [leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    computed: torch.Size = torch.broadcast_shapes(*stored)  # type: ignore[no-untyped-call]
    if computed.numel() > _MAX_BYTES:  # a byte each, at the least
        raise NotConstantError
    return op(*args, **kwargs).expand(shape)


def _stored(value: Tensor) -> Tensor:
    """`value` without the repetitions along its expanded dimensions, which get size 1."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _without_repetitions(value: Any) -> Any:
    """`value`, expanded along the dimensions on which all its elements are the same."""
    if not isinstance(value, Tensor):
        return value
    stored = _stored(value)
    for dim, size in enumerate(stored.shape):
        first = stored.narrow(dim, 0, 1) if size > 1 else stored
        if size > 1 and bool((stored.narrow(dim, 1, 1) == first).all()) and bool((stored == first).all()):
            stored = first
    return stored.expand(value.shape)


def fold_constant_masks(graph: fx.Graph) -> None:
    """Replace the constant masks of attention in a graph of torch functions, as Dynamo makes it.

    Nothing is replaced in a graph that writes into a constant in place.

    Examples
    --------
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> ones = graph.call_function(torch.ones, (4, 4), {"dtype": torch.bool})
    >>> attention = graph.call_function(ATTENTION, (x, x, x), {"attn_mask": graph.call_method("tril", (ones,))})
    >>> fold_constant_masks(graph)
    >>> attention.kwargs
    {'attn_mask': None, 'is_causal': True}
    """
    constants = _constant_nodes(graph)
    if constants is None:
        return
    folded: dict[fx.Node, dict[str, Any] | None] = {}
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        given = dict(zip(_ARGUMENTS, node.args)) | node.kwargs
        mask = given.get("attn_mask")
        if mask not in constants or given.get("is_causal"):
            continue
        if mask not in folded:
            folded[mask] = _without_mask(mask, constants)
        if (instead := folded[mask]) is not None:
            given |= instead
            node.args = tuple(given.pop(name) for name in _ARGUMENTS[:3])
            node.kwargs = given


def _constant_nodes(graph: fx.Graph) -> list[fx.Node] | None:
    """The nodes that depend on no placeholder and no attribute, in order; None if one of them is written in place."""
    constants: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if writes_in_place(node) and any(source in constants for source in node.all_input_nodes):
            return None
        if all(source in constants for source in node.all_input_nodes):
            constants[node] = None
    return list(constants)


def _without_mask(mask: fx.Node, constants: Iterable[fx.Node]) -> dict[str, Any] | None:
    """What attention takes instead of `mask`; None if it needs the mask."""
    try:
        value = _value(mask, constants)
    except Exception:  # a function that runs apart from its graph may raise anything
        return None
    if value.dtype != torch.bool:  # what is added to the scores
        hidden = value <= torch.finfo(value.dtype).min
        if not bool((hidden | (value == 0)).all()):
            return None
        value = ~hidden
    rows, columns = value.shape[-2:]
    value = _stored(value)
    if bool(value.all()):
        return {"attn_mask": None, "is_causal": False}
    if rows == columns and _is_causal(value.expand(*value.shape[:-2], rows, columns)):
        return {"attn_mask": None, "is_causal": True}
    return None


def _is_causal(mask: Tensor) -> bool:
    """Whether a mask shows each row the columns up to its own; a block of rows at a time, which takes less memory."""
    return all(
        bool((block == torch.ones(block.shape[-2:], dtype=torch.bool).tril(1024 * index)).all())
        for index, block in enumerate(torch.split(mask, 1024, dim=-2))
    )


def _value(wanted: fx.Node, constants: Iterable[fx.Node]) -> Tensor:
    """The value of `wanted`, computed on the CPU from the nodes that it depends on."""
    needed, left = {wanted}, [wanted]
    while left:
        sources = set(left.pop().all_input_nodes) - needed
        needed |= sources
        left += sources
    values: dict[fx.Node, Any] = {}
    cpu = torch.device("cpu")
    with torch.no_grad(), ConstantOps():  # type: ignore[no-untyped-call]
        for node in constants:
            if node not in needed:
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = fx.node.map_aggregate((args, kwargs), lambda x: cpu if isinstance(x, torch.device) else x)
            call: Any = node.target
            if node.op == "call_method":
                call = getattr(Tensor, call)
            values[node] = _without_repetitions(call(*args, **kwargs))
            if node is wanted:
                break
    result = values[wanted]
    if not isinstance(result, Tensor) or result.dim() < 2:
        raise NotConstantError
    return result


def storage_of(tensor: Tensor) -> int:
    """What identifies the storage of a tensor, of which there may be several views."""
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def numbers_of_buffers(changing: Collection[int] = ()) -> Iterator[dict[Any, Tensor]]:
    """While this runs, Dynamo takes numbers that are computed from buffers and constants alone as constants.

    These are the conditions of branches, what ``.item()`` and ``int()`` return, and tensors in the place of numbers,
    as in ``pad(x, (padding, 0))``. How many elements a mask selects, or how often elements are repeated, is a constant
    of the step where these depend on buffers and constants alone: the sizes of such results are known. Where another
    tensor of one integer is an index, as in ``x[:, t]``, an op selects by it, whose result is a copy, or writes.
    ``x[t] += y`` does both.

    Yields Dynamo's sources of the buffers and their values, which become constants of the step. Tensors of the model
    that are neither buffers nor parameters are handled alike. Buffers in one of the storages `changing` are left out:
    the forward writes them.

    Raises
    ------
    RuntimeError
        A tensor that was indexed by a tensor, or the result, is written in place later: in eager mode that is a view.
    """
    from torch._dynamo import utils
    from torch._dynamo.variables import ConstantVariable, TensorVariable, VariableTracker
    from torch._subclasses.fake_impls import op_implementations_dict

    taken: dict[Any, Tensor] = {}
    running: list[fx.Node] = []
    scalar = torch.ops.aten._local_scalar_dense.default
    scalar_of, run, item = op_implementations_dict[scalar], utils.run_node, TensorVariable.method_item
    tolist = TensorVariable.method_tolist
    indexed: list[tuple[fx.Node, Any, int, Any, int]] = []  # what selects, with its tensor and its result
    augmented: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # what selects, with what changes and assigns the result

    def constant(node: Any, numbers_of: Callable[[Any], Any]) -> Any:
        """The `numbers_of` the value of a node of Dynamo's graph; None if it is no constant."""
        sources: dict[Any, Tensor] = {}
        try:
            with _disable_current_modes(), torch.no_grad(), ConstantOps():  # type: ignore[no-untyped-call]
                found = numbers_of(_value_of_buffers(node, sources, {}))
        except Exception:  # a function that runs apart from its graph may raise anything
            return None
        if any(type(source).__name__ == "RandomValueSource" for source in sources):
            raise RuntimeError(f"random {DRAWN}")
        if any(storage_of(value) in changing for value in sources.values()):
            return None
        taken.update(sources if found is not None else {})
        return found

    def number(node: fx.Node) -> Any:
        """The number in a node of Dynamo's graph; None if it is no constant."""
        return constant(node, lambda value: value.item())

    def number_of_fake(mode: Any, op: Any, value: Any) -> Any:
        given = running[-1].all_input_nodes if running else []
        node = next((each for each in given if each.meta.get("example_value") is value), None)
        if node is None or (found := number(node)) is None:
            value.item_memo = None  # a number that Dynamo would take as a constant, with a guard of its own
            return scalar_of(mode, op, value)
        arguments = running[-1].args, running[-1].kwargs
        running[-1].args, running[-1].kwargs = fx.node.map_arg(arguments, lambda x: found if x is node else x)
        return found

    def run_noted(tracer: Any, node: fx.Node, given: tuple[Any, ...], named: Mapping[str, Any], *others: Any) -> Any:
        running.append(node)
        try:
            if (form := _of_known_size(node, constant)) is not None:
                node.op, node.target = "call_function", form.target
                node.args, node.kwargs = (*node.args, *form.args), {**node.kwargs, **form.kwargs}
                given, named = (*given, *form.args), {**named, **form.kwargs}
            args = given, named, *others
            if node.target not in (operator.getitem, operator.setitem) or not has_open_index(node):
                return run(tracer, node, *args)
            if node.target is operator.setitem:
                note_augmented(node)
                node.target = _assign
                return run(tracer, node, *args)
            node.target = _selected
            result = run(tracer, node, *args)
            source = node.all_input_nodes[0].meta["example_value"]
            indexed.append((node, source, source._version, result, result._version))
            return result
        finally:
            running.pop()

    def note_augmented(node: fx.Node) -> None:
        """Note an assignment ``x[t] = part`` right after ``part += y``, of the part that ``x[t]`` selected before."""
        place, index, value = node.args
        if not isinstance(value, fx.Node) or value is not node.prev or value.target not in AUGMENTED_ASSIGNMENTS:
            return
        for selecting, source, version, result, before in indexed:
            is_same = selecting.args == (place, index) and value.args[0] is selecting
            if is_same and source._version == version and result._version == before + 1:
                augmented[selecting] = value, node

    def has_open_index(node: fx.Node) -> bool:
        """Whether all tensors in an index are integers without dimensions, one of which is no constant."""
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        others = slice, types.NoneType, types.EllipsisType
        if not all(type(each) is int or isinstance(each, (fx.Node, *others)) for each in index):
            return False
        given = [each for each in index if isinstance(each, fx.Node)]
        values: list[Any] = [each.meta.get("example_value") for each in (node.all_input_nodes[0], *given)]
        if not given or not all(isinstance(value, Tensor) for value in values):
            return False
        are_numbers = all(not value.dim() and value.dtype in _INTEGERS for value in values[1:])
        return are_numbers and any(number(each) is None for each in given)

    def item_of(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        found = number(self.proxy.node)
        return item(self, tx, *args, **kwargs) if found is None else ConstantVariable.create(found)

    def list_of(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        found = constant(self.proxy.node, lambda value: value.tolist())
        return tolist(self, tx, *args, **kwargs) if found is None else VariableTracker.build(tx, found)

    def branch(self: Any, instruction: Any, jumps_if: bool, jump: Jump) -> None:
        found = number(self.stack[-1].proxy.node)
        if found is not None:
            self.stack[-1] = ConstantVariable.create(bool(found))
        return jump(self, instruction)

    with (
        mock.patch.dict(op_implementations_dict, {scalar: number_of_fake}),
        mock.patch.object(utils, "run_node", run_noted),
        mock.patch.object(TensorVariable, "method_item", item_of),
        mock.patch.object(TensorVariable, "method_tolist", list_of),
        branches_traced(branch),
    ):
        yield taken
    for selecting, source, version, result, before in indexed:
        changed, assigning = augmented.get(selecting, (None, None))
        if [*selecting.users] == [changed] and changed is not None and [*changed.users] == [assigning]:
            continue  # nothing else reads the part, so that it need not follow later changes
        if source._version != version or result._version != before:
            raise RuntimeError(f"{INDEXED}\n{selecting.stack_trace or ''}")


class _Form(NamedTuple):
    """A function that a node calls instead of its own, and the arguments that it takes behind the node's."""

    target: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})


def _of_known_size(node: fx.Node, constant: Callable[[Any, Callable[[Any], Any]], Any]) -> _Form | None:
    """What computes the result of a node of Dynamo's graph in a known size.

    None if its size depends on no values, or on more than ``constant(source, numbers_of)`` knows.
    """
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    given: tuple[Any, ...] = node.args
    if node.target in (operator.getitem, operator.setitem):
        if node.target is operator.setitem and _num_dims(given[2]) < 1:
            return None  # a number, which is written where the mask is, whatever it selects
        index = given[1] if isinstance(given[1], tuple) else (given[1],)
        are_masks = [_num_dims(each) > 0 and each.meta["example_value"].dtype == torch.bool for each in index]
        counts = [constant(each, _count_nonzero) if is_mask else None for each, is_mask in zip(index, are_masks)]
        if any(are_masks) and [count is not None for count in counts] == are_masks:
            target = _selected_by_masks if node.target is operator.getitem else _assign_by_masks
            return _Form(target, (tuple(counts),))
    elif name in ("nonzero", "argwhere") or (name == "where" and len(given) == 1):
        if (count := constant(given[0], _count_nonzero)) is not None:
            return _Form(_nonzero, (count,), {"as_tuple": True} if name == "where" else {})
    elif name == "masked_select" and len(given) == 2 and _num_dims(given[0]) >= 0:
        broadcast: Callable[..., torch.Size] = torch.broadcast_shapes
        size = given[0].meta["example_value"].shape
        count = constant(given[1], lambda mask: _count_nonzero(mask.expand(broadcast(size, mask.shape))))
        if count is not None:
            return _Form(_masked_select, (count,))
    elif name == "repeat_interleave" and node.kwargs.get("output_size") is None:
        repeats = node.kwargs.get("repeats", given[min(1, len(given) - 1)])
        count = constant(repeats, lambda value: int(value.sum()) if value.numel() > 1 else None)
        if count is not None:
            return _Form(torch.repeat_interleave, (), {"output_size": count})
    return None


def _num_dims(value: Any) -> int:
    """The number of dimensions of a tensor in Dynamo's graph; -1 for others, such as numbers."""
    example = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return example.dim() if isinstance(example, Tensor) else -1


def _count_nonzero(x: Any) -> int:
    return int(x.count_nonzero())


def _nonzero(x: Tensor, count: int, as_tuple: bool = False) -> Any:
    """``x.nonzero(as_tuple=as_tuple)`` of `count` elements.

    >>> _nonzero(torch.tensor([3, 0, 2]), 2)
    tensor([[0],
            [2]])
    """
    found = torch.nonzero_static(x, size=count)
    return found.unbind(1) if as_tuple else found


def _selected_by_masks(x: Tensor, index: Any, counts: tuple[int | None, ...]) -> Tensor:
    """``x[index]``, whose masks select so many elements.

    >>> _selected_by_masks(torch.arange(6).view(2, 3), (slice(1), torch.tensor([True, False, True])), (None, 2))
    tensor([[0, 2]])
    """
    return x[_places(index, counts)]


def _assign_by_masks(x: Tensor, index: Any, value: Tensor, counts: tuple[int | None, ...]) -> None:
    """``x[index] = value``, whose masks select so many elements."""
    x[_places(index, counts)] = value


def _places(index: Any, counts: tuple[int | None, ...]) -> tuple[Any, ...]:
    """An index, with the places that its masks select instead of these."""
    places: list[Any] = []
    for each, count in zip(index if isinstance(index, tuple) else (index,), counts, strict=True):
        places += [each] if count is None else _nonzero(each, count, as_tuple=True)
    return tuple(places)


def _masked_select(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """``x.masked_select(mask)`` of `count` elements.

    >>> _masked_select(torch.arange(4).view(2, 2), torch.tensor([True, False]), 2)
    tensor([0, 2])
    """
    x, mask = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call]
    return x[_nonzero(mask, count, as_tuple=True)]


def _selected(x: Tensor, index: Any) -> Tensor:
    """``x[index]``, where what is a tensor in the index is an integer. The result is a copy."""
    index = index if isinstance(index, tuple) else (index,)
    for dim, each in _integers(index, x.dim(), lambda other: other is not None):
        x = x.index_select(dim, torch.where(each < 0, each + x.shape[dim], each).reshape(1))
    return x[tuple(0 if isinstance(each, Tensor) else each for each in index)]


def _assign(x: Tensor, index: Any, value: Any) -> None:
    """``x[index] = value``, where what is a tensor in the index is an integer."""
    index = index if isinstance(index, tuple) else (index,)
    part = x[tuple(slice(None) if isinstance(each, Tensor) else each for each in index)]
    given = list(_integers(index, part.dim(), lambda other: not isinstance(other, int)))
    dims = [dim for dim, _ in given]
    value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    value = value.expand([size for dim, size in enumerate(part.shape) if dim not in dims])
    is_meant = torch.ones((), dtype=torch.bool, device=x.device)
    for dim, each in given:
        size = part.shape[dim]
        torch._assert_async((each >= -size) & (each < size), f"an index is out of range for a size of {size}")
        places = torch.arange(size, device=x.device) == torch.where(each < 0, each + size, each)
        is_meant = is_meant & places.view(-1, *[1] * (part.dim() - dim - 1))
        value = value.unsqueeze(dim)
    part.copy_(torch.where(is_meant, value, part))


def _integers(index: tuple[Any, ...], num_dims: int, has_dim: Callable[[Any], bool]) -> Iterator[tuple[int, Tensor]]:
    """The tensors in an index, each with its dimension. `has_dim` says what else has one; a tensor has."""
    dim = 0
    for place, each in enumerate(index):
        if isinstance(each, Tensor):
            yield dim, each
        dim = num_dims - sum(map(has_dim, index[place + 1 :])) if each is ... else dim + has_dim(each)


def _value_of_buffers(node: fx.Node, sources: dict[Any, Tensor], known: dict[fx.Node, Any]) -> Any:
    """The value of a node of Dynamo's graph, of which `sources` gets the buffers that it is computed from.

    Raises
    ------
    NotConstantError
        It depends on inputs or parameters, on random numbers, or on what is written in place.
    """
    if node in known:
        return known[node]
    fake = node.meta.get("example_value")
    if isinstance(fake, Tensor) and fake._version:
        raise NotConstantError
    if node.op == "placeholder":
        given = node.meta["grapharg"]
        known[node] = value = given.example
        if type(value) is not Tensor or value.requires_grad or given.source is None:
            raise NotConstantError
        sources[given.source] = value
        return value
    if node.op not in ("call_function", "call_method"):
        raise NotConstantError
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: _value_of_buffers(arg, sources, known))
    call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
    known[node] = value = call(*args[node.op == "call_method" :], **kwargs)
    return value
