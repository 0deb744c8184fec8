"""Rows in places with room to spare, as ops that generated graphs call: see `ir.Padding`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardweave.ir import Padding

_LIBRARY: Any = torch.library.Library("shardweave", "FRAGMENT")  # type: ignore[no-untyped-call]
_ARGUMENTS = "(Tensor x, int dim, int size, int[] levels) -> Tensor"
_LIBRARY.define(f"pad{_ARGUMENTS}")
_LIBRARY.define(f"unpad{_ARGUMENTS}")


def pad(x: Tensor, dim: int, size: int, levels: Sequence[int]) -> Tensor:
    """The rows of dimension `dim` in their places: each block of `size` cut over `levels`; zeros elsewhere.

    >>> pad(torch.arange(1, 6), 0, 5, [2, 2])
    tensor([1, 2, 3, 0, 4, 0, 5, 0])
    """
    padding = Padding(dim, size, tuple(levels))
    blocks = x.shape[dim] // size
    result = x.new_zeros(_resized(x, dim, blocks * padding.padded))
    torch._foreach_copy_(_parts(result, padding, blocks), torch.split(x, [*padding.counts * blocks], dim))
    return result


def unpad(x: Tensor, dim: int, size: int, levels: Sequence[int]) -> Tensor:
    """The rows of dimension `dim` out of their places, packed: the inverse of `pad`.

    >>> unpad(torch.tensor([1, 2, 3, 0, 4, 0, 5, 0]), 0, 5, [2, 2])
    tensor([1, 2, 3, 4, 5])
    """
    padding = Padding(dim, size, tuple(levels))
    return torch.cat(_parts(x, padding, x.shape[dim] // padding.padded), dim)


def _parts(x: Tensor, padding: Padding, blocks: int) -> list[Tensor]:
    """Views of the parts that lie in the places of `x`."""
    counts = padding.counts * blocks
    return [x.narrow(padding.dim, index * padding.place, count) for index, count in enumerate(counts)]


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


def _fake_pad(x: Tensor, dim: int, size: int, levels: Sequence[int]) -> Tensor:
    return x.new_empty(_resized(x, dim, x.shape[dim] // size * Padding(dim, size, tuple(levels)).padded))


def _fake_unpad(x: Tensor, dim: int, size: int, levels: Sequence[int]) -> Tensor:
    return x.new_empty(_resized(x, dim, x.shape[dim] // Padding(dim, size, tuple(levels)).padded * size))


for _name, _function, _fake in (("pad", pad, _fake_pad), ("unpad", unpad, _fake_unpad)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardweave::{_name}", _fake, lib=_LIBRARY)
