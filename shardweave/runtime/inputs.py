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
    whole = checked(values, specs, device_type)
    return [localized(value, spec, coordinates) for value, spec in zip(whole, specs, strict=True)]


def checked(
    values: Sequence[object],
    specs: Sequence[ValueSpec],
    device_type: str = "cpu",
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> list[torch.Tensor]:
    """The tensors of a call, which are those that the step was compiled for.

    Parameters
    ----------
    shapes : sequence of tuple of int, optional
        What each must be on this rank; by default global, or this rank's part.
    """
    if len(values) != len(specs):
        names = ", ".join(spec.name for spec in specs)
        raise InputError(f"the step takes {len(specs)} tensors ({names}), but the call passes {len(values)}")
    found = []
    for index, (value, spec) in enumerate(zip(values, specs, strict=True)):
        tensor = _typed(value, spec, device_type)
        shape, layout = tuple(tensor.shape), spec.layout
        if shapes is None and shape not in (layout.local_shape, layout.global_shape):
            raise InputError(
                f"input {spec.name!r} must have the global shape {layout.global_shape} or this rank's part of it, "
                f"{layout.local_shape}, but has {shape}. The step was compiled for these shapes: pass one of them, or "
                "compile for the new one"
            )
        if shapes is not None and shape != shapes[index]:
            of = (
                f"this rank's part of the global {layout.global_shape}"
                if spec.rows
                else "without a batch dimension, the same on all ranks"
            )
            raise InputError(
                f"input {spec.name!r} must have the shape {shapes[index]} ({of}), as the step was compiled with "
                f'batch="local", but has {shape}: pass that shape on every rank (drop_last=True leaves out a smaller '
                "last batch), or compile for the new one"
            )
        found.append(tensor)
    return found


def localized(value: torch.Tensor, spec: ValueSpec, coordinates: Mapping[str, int]) -> torch.Tensor:
    """This rank's contiguous part of a checked input, which is global or that part."""
    if tuple(value.shape) == spec.layout.local_shape:  # first: where nothing is sharded, it is the global shape too
        return value.contiguous()
    return local_part(value, spec.layout, coordinates).contiguous()


def _typed(value: object, spec: ValueSpec, device_type: str) -> torch.Tensor:
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
    return value
