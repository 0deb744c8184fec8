"""An adapter: elementwise ops on DTensors that lie alike run where they lie, without a search for how.

For every new combination of op and placements DTensor prices all combinations of placements on all mesh dimensions, to
find in the end that tensors which lie alike need no communication. A mesh of prime axes has many dimensions, and the
search grows tenfold with each: an addition took 0.04 s on three, 4 s on five; with a strided shard a division took
6.7 s on three (torch 2.13, CPU). So an optimizer's first step would not end on a large mesh. `install` answers these
questions at once, and leaves all others to DTensor. The answers are DTensor's own: no redistribution, outputs lie as
the inputs do.

And two corrections. A scaler of gradients looks for infinities on each rank, and DTensor tells the others where the
first gradient of its list is sharded: where another one is too, ranks would disagree whether to step. `_non_finite`
asks wherever one is. And a mask of a tensor's own shape, which Rprop writes through, is elementwise as well.

Only `install` touches DTensor's internals; where it does not find what it knows, it leaves everything as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from shardweave.distributed import collective

_UNTAGGED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "_foreach_copy_")
_CHECK = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
untraced = _disable_dynamo
"""As ``torch.compiler.disable``, which would import Dynamo here: `torch.compile` of a parallel module, or of a training
step with one, leaves what is marked so as it is, since it is compiled already."""

_Handler = Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], object]


def install() -> None:
    """Put the short cut before DTensor's sharding propagation; once, however often it is called."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    names = ("propagate_op_sharding", "propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached")
    if hasattr(propagator, "shardweave_installed") or not all(hasattr(propagator, name) for name in names):
        return
    propagator.shardweave_installed = True
    for name in names[:2]:
        setattr(propagator, name, _ShortCut(getattr(propagator, name), propagator._propagate_tensor_meta_non_cached))
    handlers: dict[torch._ops.OpOverload, _Handler] = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})
    if _CHECK in handlers:
        handlers[_CHECK] = partial(_non_finite, handlers[_CHECK])


def _non_finite(original: _Handler, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Unscale gradients in place, and tell all ranks whether any of them has one that is not finite."""
    gradients, found, *scale = args
    if any(not isinstance(grad, DTensor) or grad.device_mesh != gradients[0].device_mesh for grad in gradients):
        return original(op, args, kwargs)
    mesh = gradients[0].device_mesh
    op([grad._local_tensor for grad in gradients], found, *scale, **kwargs)
    for dim in range(mesh.ndim):
        if any(not grad.placements[dim].is_replicate() for grad in gradients):
            with collective("the search for gradients that are not finite", mesh.get_group(dim)):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return None


class _ShortCut:
    """DTensor's `propagate` with the short cut before it; everything else is looked up on `propagate` itself."""

    def __init__(self, propagate: Callable[[OpSchema], OutputSharding], meta: Callable[[OpSchema], Any]) -> None:
        self._propagate = propagate
        self._meta = meta

    def __call__(self, schema: OpSchema) -> OutputSharding:
        if (elementwise(schema.op) or _masked(schema)) and (specs := _aligned(schema)):
            meta = self._meta(schema)
            if meta is None:
                return OutputSharding(None)
            if isinstance(meta, TensorMeta):
                return OutputSharding(specs[0].shallow_copy_with_tensor_meta(meta))
            if len(meta) == len(specs):
                return OutputSharding(tuple(s.shallow_copy_with_tensor_meta(m) for s, m in zip(specs, meta)))
        return self._propagate(schema)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._propagate, name)


@lru_cache(None)
def elementwise(op: torch._ops.OpOverload) -> bool:
    """Whether each element of what `op` returns or changes depends on that element of its tensors, and on scalars.

    >>> aten = torch.ops.aten
    >>> elementwise(aten.addcdiv_.default), elementwise(aten._foreach_lerp_.Scalar)
    (True, True)
    >>> elementwise(aten.mm.default), elementwise(aten._foreach_norm.Scalar), elementwise(aten.bernoulli_.float)
    (False, False, False)
    """
    name = op._schema.name.removeprefix("aten::")
    if len(op._schema.returns) > 1 or any(argument.is_out for argument in op._schema.arguments):
        return False
    if name in _UNTAGGED:
        return True
    if name.startswith("_foreach_"):
        packet = getattr(torch.ops.aten, name.removeprefix("_foreach_").removesuffix("_"), None)
        tags = [getattr(packet, overload).tags for overload in packet.overloads()] if packet else []
    else:
        tags = [op.tags]
    return any(torch.Tag.pointwise in tag and torch.Tag.nondeterministic_seeded not in tag for tag in tags)


def _masked(schema: OpSchema) -> bool:
    """Whether the op is ``tensor[mask] = number``, with a mask of the tensor's shape."""
    if schema.op is not torch.ops.aten.index_put_.default:
        return False
    tensor, indices, value, *_ = schema.args_schema
    if not isinstance(tensor, DTensorSpec) or not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return False
    mask = indices[0]
    is_mask = isinstance(mask, DTensorSpec) and mask.tensor_meta is not None and mask.tensor_meta.dtype == torch.bool
    return is_mask and mask.shape == tensor.shape and isinstance(value, DTensorSpec) and _is_scalar(value)


def _aligned(schema: OpSchema) -> list[DTensorSpec]:
    """For each tensor of the op's lists (one for an op on tensors) how it lies, if all that meet it lie alike."""
    result: list[DTensorSpec] = []
    for column in _columns((*schema.args_schema, *schema.kwargs_schema.values())):
        arrays = [spec for spec in column if not _is_scalar(spec)] or column[:1]
        if not arrays or any(_place(spec) != _place(arrays[0]) or _is_partial(spec) for spec in arrays):
            return []
        result.append(arrays[0])
    return result


def _columns(arguments: tuple[object, ...]) -> Iterator[list[DTensorSpec]]:
    """The tensors that meet each other in the op: all of them, or the ones at one index of its lists."""
    singles = [argument for argument in arguments if isinstance(argument, DTensorSpec)]
    lists = [
        [item for item in argument if isinstance(item, DTensorSpec)]
        for argument in arguments
        if isinstance(argument, (list, tuple))
    ]
    lists = [items for items in lists if items]  # without lists of numbers, or of nothing: the maxima without amsgrad
    if not lists:
        yield singles
        return
    length = max(map(len, lists))
    if any(len(items) != length for items in lists):
        yield []
        return
    for index in range(length):
        yield [*(items[index] for items in lists), *singles]


def _is_scalar(spec: DTensorSpec) -> bool:
    return not spec.shape and all(isinstance(placement, Replicate) for placement in spec.placements)


def _is_partial(spec: DTensorSpec) -> bool:
    return any(placement.is_partial() for placement in spec.placements)


def _place(spec: DTensorSpec) -> tuple[object, ...]:
    return (
        spec.mesh,
        spec.placements,
        spec.shape,
        spec.shard_order,
        getattr(spec, "use_strided_shard_as_shard_order", None),
    )
