"""Parallel tensors: DTensors on which every op gives the result of one device, or raises a ParallelError.

Parameters, their gradients and the optimizer's states are such tensors. Their ops do not use DTensor's rules. These do
not know strided and padded layouts in every op, ignore assignments to a parameter's data, and draw other random numbers
on each rank. There are four cases:

- An elementwise op on tensors of equal layouts runs on this rank's parts, without communication.
- A sum or a norm of whole tensors is computed of the parts, then reduced over the ranks.
- Every other op runs on gathered tensors; tensors that it writes are sharded again. A view of a sharded tensor is a
  copy that knows its base: writes to the copy are written to the base.
- An op of a parallel tensor and a plain one, such as of a parameter and activations, runs on the gathered values. Its
  gradient is averaged over the ranks, as under DistributedDataParallel: it is one device's gradient if all ranks
  computed the same, else the mean over the ranks' batches.

Every op that gathers is collective: all ranks must call it.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map

from shardweave.distributed import RuntimeMesh, collective, world_group
from shardweave.ir import Axis, Layout, LayoutError, ParallelError
from shardweave.ops import all_reduced
from shardweave.runtime.parameters import (
    STRIDES_ARE_PLACES,
    Sharding,
    assemble,
    padded,
    part_shape,
    placements,
    set_sharding_in_step,
    sharding_in_step,
    unpadded,
)

aten = torch.ops.aten
Op = torch._ops.OpOverload
untraced = _disable_dynamo
"""``torch.compiler.disable`` without its import of Dynamo: `torch.compile` does not trace functions with it."""
_UNTAGGED_POINTWISE = {
    "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "_foreach_copy_", "detach", "alias", "clone",
    "_to_copy", "zeros_like", "ones_like", "full_like", "empty_like", "fill_", "zero_", "lift_fresh",
}  # fmt: skip
"""Elementwise ops that torch does not tag as pointwise."""
_RESIZING = {"resize_", "resize_as_", "set_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_"}
_DETACH = aten.detach.default
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
_WAIT_SECONDS = 20.0
_RANK_ATTRIBUTE = "_shardweave_rank"
"""Of a DTensor that was pickled: the rank whose part it holds."""


@dataclass(frozen=True)
class View:
    """The base of a view of a sharded tensor, and the ops that lead from the base to the view."""

    base: ParallelTensor
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    version: int

    def __deepcopy__(self, _: dict[int, Any]) -> View:
        return self

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of the gathered base."""
        for step in self.steps:
            whole = step(whole)
        return whole


class ParallelTensor(DTensor):
    """A sharded tensor, see the docstring of the module; `distribute` makes them."""

    __slots__ = ()
    sharding: Sharding
    view_of: View | None

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing: that of DTensor serves ``torch.export`` alone, and takes half the time of making one."""

    @classmethod
    def of(cls, local: torch.Tensor, sharding: Sharding, spec: DTensorSpec | None = None) -> ParallelTensor:
        """A tensor with `local` as this rank's part, without padding."""
        if spec is None:
            shape = torch.Size(sharding.layout.global_shape)
            whole = torch.empty(shape, device="meta") if sharding.layout.shard_axes else local
            meta = TensorMeta(shape, whole.stride(), local.dtype)
            where = placements(sharding.layout, sharding.mesh.mesh)
            assert sharding.mesh.device_mesh is not None
            spec = DTensorSpec(sharding.mesh.device_mesh, where, meta, **STRIDES_ARE_PLACES)
        made = cls(local.detach() if local.requires_grad else local, spec, requires_grad=False)
        made.sharding, made.view_of = sharding, None
        return made

    @classmethod
    def replicated(cls, whole: torch.Tensor, mesh: RuntimeMesh) -> ParallelTensor:
        """A tensor that is whole on every rank of `mesh`."""
        return cls.of(whole, Sharding(Layout.replicated(whole.shape), mesh))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and len(args) == 1 and type(args[0]) is cls:  # an attribute, most of the time
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        kwargs = kwargs or {}
        computes = func not in (torch.autograd.grad, torch.autograd.backward)  # need parallel tensors
        if computes and _has_plain_tensor((*args, *kwargs.values())) and not _writes_parallel(func, args):
            args, kwargs = tree_map(_gathered, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DETACH and args[0].view_of is None:  # autograd detaches each gradient that it keeps
            source: ParallelTensor = args[0]
            return ParallelTensor.of(source._local_tensor.detach(), source.sharding, source._spec)
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The tensor without autograd, sharing its memory. If a whole tensor is assigned, rank 0's values are taken."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.dtype != self.dtype or value.shape != self.shape:
            raise ParallelError(
                f"a parallel tensor is {tuple(self.shape)} of {self.dtype}, the tensor assigned to its data is "
                f"{tuple(value.shape)} of {value.dtype}: the step was compiled for the former. Assign a whole tensor "
                "like it, or compile a model in the new shape and dtype"
            )
        if isinstance(value, ParallelTensor) and value.sharding.layout == self.sharding.layout:
            self._local_tensor = value._local_tensor
            return
        local = self.sharding.part(broadcast_from_rank_0(value.detach(), self.sharding.mesh)).contiguous()
        self._local_tensor = local.clone() if local.data_ptr() == value.data_ptr() else local

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The gathered tensor, a plain one, on every rank. Collective. Its gradient is averaged over the ranks."""
        whole: torch.Tensor = _GatherFunction.apply(self)  # type: ignore[no-untyped-call]
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy with memory of its own, and copies of the gradient and the attributes."""
        if id(self) in memo:
            known: torch.Tensor = memo[id(self)]
            return known
        if not self.is_leaf:
            raise ParallelError(
                "only parallel tensors that a user made, as parameters are, can be deep-copied, as torch says of all "
                "tensors: detach() it first"
            )
        made = ParallelTensor.of(self._local_tensor.detach().clone(), self.sharding, self._spec)
        made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name != "view_of"})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain DTensor, so that files are read without this package."""
        made = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)  # type: ignore[no-untyped-call]
        for name, value in attributes_of(self).items():
            setattr(made, name, value)
        if self.sharding.layout.shard_axes:
            setattr(made, _RANK_ATTRIBUTE, self.sharding.mesh.rank)
        return made.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that users gave a tensor.

    >>> tensor = torch.zeros(2)
    >>> tensor.no_decay = True
    >>> attributes_of(tensor)
    {'no_decay': True}
    """
    return {name: value for name, value in vars(tensor).items() if name not in ("sharding", "view_of")}


class _GatherFunction(torch.autograd.Function):
    """Gathers a parallel tensor, and averages its gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: ParallelTensor) -> torch.Tensor:
        ctx.sharding = tensor.sharding
        return gather(_up_to_date(tensor), tensor.sharding.layout, tensor.sharding.mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        sharding: Sharding = ctx.sharding
        mesh = sharding.mesh
        total = gradient.clone(memory_format=torch.contiguous_format)
        group = mesh.world_group()
        with _exchange("all_reduce of", "a gradient", mesh, group):
            dist.all_reduce(total, group=group)
        return ParallelTensor.of(sharding.part(total / mesh.mesh.world_size).contiguous(), sharding)


def distribute(local: torch.Tensor, layout: Layout, mesh: RuntimeMesh) -> torch.Tensor:
    """A DTensor of `layout` with `local` as this rank's part, which shares its memory; no communication.

    `local` has the layout's local shape. The DTensor has it without padding, as DTensors have uneven shards. On a mesh
    without axes the result is `local` itself.

    Raises
    ------
    LayoutError
        If `local` has another shape than the layout gives it.
    """
    if tuple(local.shape) != layout.local_shape:
        raise LayoutError(f"this rank's part has shape {tuple(local.shape)}, but {layout} has {layout.local_shape}")
    if mesh.device_mesh is None:
        return local
    sharding = Sharding(layout, mesh)
    return ParallelTensor.of(unpadded(local, part_shape(layout, sharding.coordinates)), sharding)


def in_layout_of(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor like `parameter`, of its type and layout, from this rank's part `local` with or without padding."""
    if not isinstance(parameter, ParallelTensor):
        sharding = sharding_in_step(parameter)
        return local if sharding is None else gather(local, sharding.layout, sharding.mesh)
    return ParallelTensor.of(unpadded(local, parameter._local_tensor.shape), parameter.sharding, parameter._spec)


def mark_replicated(parameter: torch.Tensor, sharding: Sharding, name: str) -> None:
    """Mark a plain parameter that a user has put there, and give it rank 0's values. Collective.

    It stays whole on every rank; `sharding` says which part the step takes.
    """
    with torch.no_grad():
        parameter.copy_(broadcast_from_rank_0(parameter, sharding.mesh, name))
    set_sharding_in_step(parameter, sharding)


def gather(tensor: torch.Tensor, layout: Layout, mesh: RuntimeMesh, name: str = "") -> torch.Tensor:
    """All-gather `tensor` of `layout` into new memory on every rank. Collective. Errors show `name`."""
    local = padded(tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach(), layout)
    if not layout.shard_axes:
        return local.clone()
    group = mesh.group_over(layout.shard_axes)
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
    with _exchange("all_gather of", name or f"a tensor of shape {layout.global_shape}", mesh, group):
        dist.all_gather(parts, local.contiguous(), group=group)
    return assemble(dict(zip(dist.get_process_group_ranks(group), parts, strict=True)), layout, mesh.mesh)


# -- how an op is run


def _run(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    parallel = [tensor for tensor in tensors if type(tensor) is ParallelTensor]
    mesh = parallel[0].sharding.mesh
    written = written_tensors(func, args, kwargs)
    # 1. Make the other tensors of the op parallel, and run it again.
    if len(parallel) < len(tensors):
        alone, replaced = _apart_from_parallel(func, args, kwargs), {}
        for tensor in tensors:
            if id(tensor) in alone:
                replaced[id(tensor)] = ParallelTensor.replicated(tensor, mesh)
            elif type(tensor) is not ParallelTensor and (isinstance(tensor, DTensor) or tensor.dim()):
                replaced[id(tensor)] = _as_parallel(tensor, parallel, mesh, func, written)
        if replaced:
            back = {id(new): old for old in tensors if (new := replaced.get(id(old))) is not None}
            args, kwargs = tree_map(lambda x: replaced.get(id(x), x), (args, kwargs))
            return tree_map(lambda x: back.get(id(x), x), _run(func, args, kwargs))
    # 2. Run it on the parts if that is possible, else on gathered tensors.
    name = func._schema.name.removeprefix("aten::")
    if func is _UNSCALE:
        return _unscale(func, args, kwargs, mesh)
    drawn = torch.Tag.nondeterministic_seeded in func.tags
    if not drawn and not any(tensor.view_of for tensor in parallel):
        on_parts = elementwise(func) or _is_masked_write(func, args)
        if on_parts and (shardings := _common_shardings(args, kwargs, written)):
            return _run_on_parts(func, args, kwargs, shardings)
        if (reduced := _run_reduction(name, args, kwargs)) is not None:
            return reduced
    if name in _RESIZING:
        raise ParallelError(f"{name} would change the shape of a parallel tensor: make a new tensor from full_tensor()")
    return _run_gathered(func, args, kwargs, written, mesh, drawn)


def written_tensors(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op changes."""
    if not func._schema.is_mutable:
        return []
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def check_rank(tensor: DTensor, sharding: Sharding) -> None:
    """Raise ParallelError if a DTensor was read from a file in which a rank has saved another part of the tensor."""
    mesh, axes = sharding.mesh.mesh, [axis.name for axis in sharding.layout.shard_axes]
    rank, mine = getattr(tensor, _RANK_ATTRIBUTE, sharding.mesh.rank), sharding.coordinates
    if rank >= mesh.world_size or any(mesh.coordinates(rank)[name] != mine[name] for name in axes):
        raise ParallelError(
            f"rank {sharding.mesh.rank} was given a tensor of shape {tuple(tensor.shape)} that rank {rank} has saved, "
            f"with the part of rank {rank} alone. Of torch.save(parallel.state_dict(), ...), each rank writes and "
            "reads its own file; save_checkpoint, or torch.save(parallel.full_state_dict(), ...) on one rank, make one "
            "for all ranks"
        )


def _apart_from_parallel(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Plain tensors in lists of an elementwise op (buffers among parameters) that it computes with plain ones alone."""
    values = (*args, *kwargs.values())
    if not elementwise(func) or any(isinstance(value, DTensor) for value in values):
        return set()
    plain: set[int] = set()
    mixed: set[int] = set()
    for column in zip(*(value for value in values if isinstance(value, (list, tuple)) and value), strict=False):
        tensors = [item for item in column if isinstance(item, torch.Tensor)]
        found = mixed if any(isinstance(tensor, DTensor) for tensor in tensors) else plain
        found.update(map(id, tensors))
    return plain - mixed


def _as_parallel(
    tensor: torch.Tensor,
    parallel: list[ParallelTensor],
    mesh: RuntimeMesh,
    func: Op,
    written: list[torch.Tensor],
) -> ParallelTensor:
    """A plain tensor or DTensor of an op as a parallel tensor."""
    into = any(tensor is other for other in written)
    if isinstance(tensor, DTensor):
        for other in parallel:
            if other.shape == tensor.shape and other.placements == tensor.placements:
                check_rank(tensor, other.sharding)
                return ParallelTensor.of(tensor._local_tensor, other.sharding)
        if all(placement.is_replicate() for placement in tensor.placements):
            return ParallelTensor.replicated(tensor._local_tensor, mesh)
        if not into:
            return ParallelTensor.replicated(tensor.full_tensor(), mesh)
    if into or not written:
        shapes = ", ".join(str(tuple(other.shape)) for other in parallel[:3])
        raise ParallelError(
            f"{func} meets a {type(tensor).__name__} of shape {tuple(tensor.shape)} and parallel tensors ({shapes}), "
            "which are sharded over the ranks: use parameter.full_tensor(), a plain tensor on every rank"
        )
    return ParallelTensor.replicated(broadcast_from_rank_0(tensor, mesh), mesh)


def _common_shardings(
    args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]
) -> list[Sharding] | None:
    """The common sharding at each index of the op's lists of tensors (one for an op on tensors); None without one.

    Replicated tensors get that sharding, unless they are written.
    """
    lists = [
        items
        for argument in (*args, *kwargs.values())
        if isinstance(argument, (list, tuple))
        if (items := [item for item in argument if isinstance(item, ParallelTensor)])
    ]
    singles = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, ParallelTensor)]
    columns = [[*column, *singles] for column in zip(*lists, strict=False)] if lists else [singles]
    if lists and any(len(items) != len(lists[0]) for items in lists):
        return None
    found = []
    for column in columns:
        arrays = [tensor for tensor in column if tensor.dim()] or column[:1]
        sharding = next((tensor for tensor in arrays if tensor.sharding.layout.shard_axes), arrays[0]).sharding
        for tensor in arrays:
            layout = tensor.sharding.layout
            if layout != sharding.layout and (
                layout.shard_axes or tensor.shape != arrays[0].shape or any(tensor is other for other in written)
            ):
                return None
        if any(tensor.shape != arrays[0].shape for tensor in arrays):
            return None
        found.append(sharding)
    return found


def _run_on_parts(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], shardings: list[Sharding]) -> Any:
    """Run an elementwise op on this rank's parts."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != shardings[0].mesh.device_type:
        raise ParallelError(
            f"a parallel tensor is on {shardings[0].mesh.device_type} and cannot be moved to {device}: compile the "
            "model there, or move parameter.full_tensor()"
        )

    def local(value: Any, sharding: Sharding) -> Any:
        if not isinstance(value, ParallelTensor):
            return value
        if value.sharding.layout == sharding.layout or not value.dim():
            return value._local_tensor
        return sharding.part(value._local_tensor)

    def locals_of(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            same_length = len(value) == len(shardings)
            return [local(item, sharding) for item, sharding in zip(value, shardings)] if same_length else value
        return local(value, shardings[0])

    result = func(*map(locals_of, args), **{key: locals_of(value) for key, value in kwargs.items()})
    if func._schema.is_mutable:
        first = args[0]
        return first if result is not None else None
    if isinstance(result, (list, tuple)):
        return [ParallelTensor.of(value, sharding) for value, sharding in zip(result, shardings, strict=True)]
    specs = [
        value._spec
        for value in tree_leaves((args, kwargs))
        if isinstance(value, ParallelTensor) and value.sharding is shardings[0] and value.dtype == result.dtype
    ]
    return ParallelTensor.of(result, shardings[0], specs[0] if specs else None)


@cache
def elementwise(op: Op) -> bool:
    """Whether each element of the results of `op` depends on that element of its tensors, and on scalars only.

    >>> elementwise(aten.addcdiv_.default), elementwise(aten._foreach_lerp_.Scalar)
    (True, True)
    >>> elementwise(aten.mm.default), elementwise(aten._foreach_norm.Scalar), elementwise(aten.bernoulli_.float)
    (False, False, False)
    """
    name = op._schema.name.removeprefix("aten::")
    if len(op._schema.returns) > 1 or any(argument.is_out for argument in op._schema.arguments):
        return False
    if name in _UNTAGGED_POINTWISE:
        return True
    if name.startswith("_foreach_"):
        packet = getattr(aten, name.removeprefix("_foreach_").removesuffix("_"), None)
        tags = [getattr(packet, overload).tags for overload in packet.overloads()] if packet else []
    else:
        tags = [op.tags]
    return any(torch.Tag.pointwise in tag and torch.Tag.nondeterministic_seeded not in tag for tag in tags)


def _is_masked_write(func: Op, args: tuple[Any, ...]) -> bool:
    """Whether the op is ``tensor[mask] = number``, with a mask of the tensor's shape."""
    if func is not aten.index_put_.default or len(args[1]) != 1:
        return False
    mask = args[1][0]
    return (
        isinstance(mask, torch.Tensor)
        and mask.dtype == torch.bool
        and mask.shape == args[0].shape
        and not args[2].dim()
    )


def _run_reduction(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduce whole tensors (sum, mean, norm) from their parts; None for other ops."""
    if name == "_foreach_norm":
        power, dtype = _values(args[1:], kwargs, ("ord", "dtype"), (2, None))
        return _norms(list(args[0]), float(power), dtype)
    if name == "linalg_vector_norm":
        power, dim, keeps, dtype = _values(args[1:], kwargs, ("ord", "dim", "keepdim", "dtype"), (2, None, False, None))
        return None if dim is not None or keeps else _norms([args[0]], float(power), dtype)[0]
    if name not in ("sum", "mean") or len(args) > 1 or "dim" in kwargs:
        return None
    tensor: ParallelTensor = args[0]
    total = tensor._local_tensor.sum(**kwargs) if name == "sum" else tensor._local_tensor.sum(**kwargs) / tensor.numel()
    return ParallelTensor.replicated(_all_reduced(total, tensor.sharding), tensor.sharding.mesh)


def _values(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str], defaults: Sequence[Any]
) -> Iterator[Any]:
    given = dict(zip(names, args)) | kwargs
    return iter([given.get(name, default) for name, default in zip(names, defaults)])


def _norms(tensors: list[ParallelTensor], power: float, dtype: torch.dtype | None) -> list[ParallelTensor]:
    """The norm of each tensor, with one collective for all tensors that are sharded over the same axes."""
    parts = [tensor._local_tensor for tensor in tensors]
    least = math.inf if power < 0 else 0.0
    some = [part if part.numel() else part.new_full((), least) for part in parts]  # an empty tensor has no maximum
    norms = [torch.linalg.vector_norm(part, power, dtype=dtype) for part in some]
    groups: dict[tuple[Axis, ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.sharding.layout.shard_axes:
            groups.setdefault(tensor.sharding.layout.shard_axes, []).append(index)
    for members in groups.values():
        values = torch.stack([norms[index].to(torch.float64) for index in members])
        if math.isinf(power):
            op = dist.ReduceOp.MAX if power > 0 else dist.ReduceOp.MIN
            values = _all_reduced(values, tensors[members[0]].sharding, op)
        elif power == 0:
            values = _all_reduced(values, tensors[members[0]].sharding)
        else:
            values = _all_reduced(values.pow(power), tensors[members[0]].sharding).pow(1 / power)
        for index, value in zip(members, values):
            norms[index] = value.to(norms[index].dtype)
    return [ParallelTensor.replicated(n, t.sharding.mesh) for n, t in zip(norms, tensors, strict=True)]


def _all_reduced(value: torch.Tensor, sharding: Sharding, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    if sharding.layout.shard_axes:
        group = sharding.mesh.group_over(sharding.layout.shard_axes)
        with _exchange("all_reduce of", "a sum over a tensor", sharding.mesh, group):
            return all_reduced(value, op, group)
    return value


def _unscale(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: RuntimeMesh) -> None:
    """Unscale gradients, which changes them. All ranks see whether a gradient of any rank is not finite."""
    gradients, found, *scale = args
    found = found._local_tensor if isinstance(found, DTensor) else found
    func([grad._local_tensor for grad in gradients], found, *scale, **kwargs)
    axes = {axis for grad in gradients for axis in grad.sharding.layout.shard_axes}
    if axes:
        group = mesh.group_over(axis for axis in mesh.mesh.axes if axis in axes)
        with collective("the all_reduce of whether gradients are finite", group):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)


def _run_gathered(
    func: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: list[torch.Tensor],
    mesh: RuntimeMesh,
    drawn: bool,
) -> Any:
    """Run any op on gathered tensors. Tensors that it writes are sharded again."""
    # 1. Gather the arguments; of a view that is written, gather the base.
    wholes: dict[int, torch.Tensor] = {}
    bases: dict[int, torch.Tensor] = {}  # the gathered bases of written views
    sharded: dict[int, ParallelTensor] = {}
    for leaf in tree_leaves((args, kwargs)):
        if not isinstance(leaf, ParallelTensor) or id(leaf) in wholes:
            continue
        if leaf.view_of is not None and any(leaf is other for other in written):
            base = leaf.view_of.base
            bases[id(leaf)] = gather(base, base.sharding.layout, mesh)
            wholes[id(leaf)] = leaf.view_of.of(bases[id(leaf)])
        elif leaf.sharding.layout.shard_axes:
            wholes[id(leaf)] = gather(leaf, leaf.sharding.layout, mesh)
            sharded[id(leaf)] = leaf
        else:
            wholes[id(leaf)] = _up_to_date(leaf)._local_tensor
    # 2. Run the op, with the random numbers of rank 0.
    given, named = tree_map(lambda x: wholes.get(id(x), x), (args, kwargs))
    with _agreed_random(kwargs.get("generator"), mesh) if drawn else contextlib.nullcontext():
        result = func(*given, **named)
    # 3. Write the results back into this rank's parts.
    originals = {id(wholes[id(leaf)]): leaf for leaf in written if id(leaf) in wholes}
    for leaf in written:
        if not isinstance(leaf, ParallelTensor):
            continue
        if leaf.view_of is not None:
            base = leaf.view_of.base
            base._local_tensor.copy_(base.sharding.part(bases[id(leaf)]))
            leaf._local_tensor.copy_(wholes[id(leaf)])
            leaf.view_of = View(base, leaf.view_of.steps, base._local_tensor._version)
        elif id(leaf) in sharded:
            leaf._local_tensor.copy_(leaf.sharding.part(wholes[id(leaf)]))
    # 4. Wrap the results; views remember their base.
    source = args[0] if args and isinstance(args[0], ParallelTensor) else None
    is_view = source is not None and not written and any(r.alias_info is not None for r in func._schema.returns)
    count = iter(range(len(tree_leaves(result))))

    def wrapped(value: Any) -> Any:
        index = next(count)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in originals:
            return originals[id(value)]
        made = ParallelTensor.replicated(value, mesh)
        if is_view and source is not None and (source.view_of is not None or source.sharding.layout.shard_axes):
            base, before = (source, ()) if source.view_of is None else (source.view_of.base, source.view_of.steps)
            step = _view_step(func, given[1:], named, index)
            made.view_of = View(base, (*before, step), base._local_tensor._version)
        return made

    return tree_map(wrapped, result)


def _view_step(
    func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], index: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda whole: [x for x in tree_leaves(func(whole, *args, **kwargs)) if isinstance(x, torch.Tensor)][index]


def _up_to_date(tensor: ParallelTensor) -> ParallelTensor:
    """`tensor` itself. The copy in a view is updated if its base has changed."""
    view = tensor.view_of
    if view is not None and view.base._local_tensor._version != view.version:
        whole = gather(view.base, view.base.sharding.layout, view.base.sharding.mesh)
        tensor._local_tensor.copy_(view.of(whole))
        tensor.view_of = View(view.base, view.steps, view.base._local_tensor._version)
    return tensor


# -- parallel tensors and plain ones


def _has_plain_tensor(values: tuple[Any, ...]) -> bool:
    """Whether a plain tensor is among the arguments. Scalars count only if they require a gradient."""
    for value in values:
        if isinstance(value, (list, tuple)):
            if _has_plain_tensor(tuple(value)):
                return True
        elif (
            isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
            and (value.dim() or (value.requires_grad and torch.is_grad_enabled()))
        ):
            return True
    return False


def _writes_parallel(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function of torch writes its first argument, a parallel tensor."""
    name = getattr(func, "__name__", "")
    writes = name in ("__setitem__", "__set__") or (
        name.startswith("__i") and name.endswith("__") and name != "__invert__"
    )
    writes = writes or (name.endswith("_") and not name.endswith("__"))
    first = args[0] if args else None
    if isinstance(first, (list, tuple)):
        first = first[0] if first else None
    return writes and isinstance(first, ParallelTensor)


def _gathered(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ParallelTensor) else value


def broadcast_from_rank_0(value: torch.Tensor, mesh: RuntimeMesh, name: str = "") -> torch.Tensor:
    """Rank 0's values of a whole tensor, in new memory on the mesh's device. Collective. Errors show `name`."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    whole = value.detach().to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    if mesh.device_mesh is not None and whole.numel():
        group = world_group(mesh)
        with _exchange("broadcast of rank 0's", name or f"values of shape {tuple(value.shape)}", mesh, group):
            flat = whole.view(-1).view(torch.uint8)  # bytes, as backends lack some dtypes
            dist.broadcast(flat, src=0, group=group)
    return whole


@contextlib.contextmanager
def _agreed_random(generator: torch.Generator | None, mesh: RuntimeMesh) -> Iterator[None]:
    """Draw rank 0's random numbers on all ranks. The generator of a rank whose state differed is restored."""
    if generator is None:
        device = torch.device(mesh.device_type)
        generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[
            torch.cuda.current_device()
        ]  # fmt: skip
    mine = generator.get_state()
    first = broadcast_from_rank_0(mine.to(mesh.device_type), mesh).to(mine.device)
    same = torch.equal(first, mine)
    generator.set_state(first)
    try:
        yield
    finally:
        if not same:
            generator.set_state(mine)


@contextlib.contextmanager
def _exchange(kind: str, what: str, mesh: RuntimeMesh, group: dist.ProcessGroup) -> Iterator[None]:
    """A collective of the user's code. Warns on stderr if other ranks do not join it within `_WAIT_SECONDS`."""

    def tell() -> None:
        print(
            f"shardweave: rank {mesh.rank} has waited {_WAIT_SECONDS:.0f} s for the other ranks, to exchange {what}. "
            "Parameters are sharded over the ranks: code that computes with them has to be called on all ranks, not on "
            "one alone. For one rank, take parallel.full_state_dict() on all of them first",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(_WAIT_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        with collective(f"the {kind} {what}", group):
            yield
    finally:
        timer.cancel()


torch.serialization.add_safe_globals([ParallelTensor])
