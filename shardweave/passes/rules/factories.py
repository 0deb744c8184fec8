"""Values made in the likeness of others: they take a shape and a dtype from an input, and no numbers.

Written as `full`, they depend on no input: they are constants of the step, and a partial sum need not be summed to
ask it for its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _full(x: Tensor, size: Sequence[int], value: float, dtype: torch.dtype | None, device: Any) -> Any:
    return aten.full.default(list(size), value, dtype=dtype or x.dtype, device=device or x.device)


def _new(value: float) -> Callable[..., Any]:
    def form(
        x: Tensor,
        size: Sequence[int],
        stride: Sequence[int] = (),
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Any:
        return _full(x, size, value, dtype, device)

    return form


def _like(value: float) -> Callable[..., Any]:
    def form(
        x: Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Any:
        return _full(x, x.shape, value, dtype, device)

    return form


def new_full(x: Tensor, size: Sequence[int], fill_value: float, **options: Any) -> Any:
    """A value of another shape, filled."""
    return _new(fill_value)(x, size, **options)


def full_like(x: Tensor, fill_value: float, **options: Any) -> Any:
    """A value of the same shape, filled."""
    return _like(fill_value)(x, **options)


def fill_tensor(x: Tensor, value: Tensor) -> Any:
    """A value of the same shape, filled with a value of the graph."""
    return aten.expand.default(_cast(value, x.dtype), list(x.shape))


def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """`source` in the likeness of `x`."""
    source = _cast(source, x.dtype)
    return source if source.shape == x.shape else aten.expand.default(source, list(x.shape))


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype == dtype else aten._to_copy.default(value, dtype=dtype)


FACTORIES: dict[Any, Callable[..., Any]] = {
    aten.new_zeros.default: _new(0),
    aten.new_ones.default: _new(1),
    aten.new_full.default: new_full,
    aten.new_empty.default: _new(0),
    aten.new_empty_strided.default: _new(0),
    aten.zeros_like.default: _like(0),
    aten.ones_like.default: _like(1),
    aten.full_like.default: full_like,
    aten.empty_like.default: _like(0),
    aten.zero.default: _like(0),
    aten.fill.Scalar: full_like,
    aten.fill.Tensor: fill_tensor,
    aten.copy.default: copy,
}
