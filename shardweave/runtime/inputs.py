"""What a call passes in: the whole batch or this rank's part of it, told apart by shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardweave.errors import InputError
from shardweave.ir import ValueSpec
from shardweave.precision import dtype_name
from shardweave.runtime.parameters import local_part


def localize(
    values: Sequence[object], specs: Sequence[ValueSpec], coordinates: Mapping[str, int], device_type: str = "cpu"
) -> list[torch.Tensor]:
    """This rank's contiguous part of each input.

    Parameters
    ----------
    values : sequence of Tensor
        For each spec the global tensor, or the part of it that this rank holds.
    specs : sequence of ValueSpec
        What the step was compiled for.
    coordinates : mapping of str to int
        This rank's coordinate on each axis.
    device_type : str
        Where the tensors must lie.

    Raises
    ------
    InputError
        If the number of inputs, a shape, a dtype or a device is another one, or an input requires a gradient.

    Examples
    --------
    >>> from shardweave.ir import Axis, Layout
    >>> tokens = ValueSpec("tokens", Layout(((Axis("gpu0", 2), 2), (3,))), "int64")
    >>> localize([torch.arange(12).view(4, 3)], [tokens], {"gpu0": 1})
    [tensor([[ 6,  7,  8],
            [ 9, 10, 11]])]
    >>> localize([torch.zeros(3, 3, dtype=torch.int64)], [tokens], {"gpu0": 1})
    Traceback (most recent call last):
    shardweave.errors.InputError: input 'tokens' must have the global shape (4, 3) or this rank's part of it, \
(2, 3), but has (3, 3). The step was compiled for these shapes: pass one of them, or compile for the new one
    """
    if len(values) != len(specs):
        names = ", ".join(spec.name for spec in specs)
        raise InputError(f"the step takes {len(specs)} tensors ({names}), but the call passes {len(values)}")
    return [_localize(value, spec, coordinates, device_type) for value, spec in zip(values, specs, strict=True)]


def _localize(value: object, spec: ValueSpec, coordinates: Mapping[str, int], device_type: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"input {spec.name!r} must be a tensor, but is a {type(value).__name__}: {value!r}")
    if dtype_name(value.dtype) != spec.dtype:
        raise InputError(
            f"input {spec.name!r} must have dtype {spec.dtype}, but has {dtype_name(value.dtype)}: convert it with "
            f".to(torch.{spec.dtype}), or compile for the new dtype"
        )
    if value.device.type != device_type:
        raise InputError(f"input {spec.name!r} must lie on {device_type}, but lies on {value.device}: move it there")
    if value.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"input {spec.name!r} requires a gradient, but a compiled step has gradients of parameters only: "
            "detach it, or move what computes it into the model"
        )
    layout, shape = spec.layout, tuple(value.shape)
    if shape == layout.local_shape:  # first: where nothing is sharded, it is the global shape too
        return value.contiguous()
    if shape == layout.global_shape:
        return local_part(value, layout, coordinates).contiguous()
    raise InputError(
        f"input {spec.name!r} must have the global shape {layout.global_shape} or this rank's part of it, "
        f"{layout.local_shape}, but has {shape}. The step was compiled for these shapes: pass one of them, or compile "
        "for the new one"
    )
