"""Maxima and minima over ranks that keep what is not a number, as torch's own ``amax`` and ``amin`` do.

Neither gloo nor NCCL does so for floating point: gloo compares with ``<``, NCCL calls ``fmaxf``, and a NaN that one
rank holds is lost. They do compare integers, so numbers are sent as integers that are ordered as they are: the bits of
a positive number are, and those of a negative one once they are flipped. NaN becomes the integer that wins. It is one
collective of as many bytes, for 16-bit numbers, which no library compares as integers, of twice as many.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LIBRARY: Any = torch.library.Library("shardweave", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("ordered_bits(Tensor x, bool largest) -> Tensor")
_LIBRARY.define("from_ordered_bits(Tensor bits, ScalarType dtype) -> Tensor")


def ordered_bits(x: Tensor, largest: bool) -> Tensor:
    """Integers in the order of the numbers of `x`; NaN is above all others, or below where `largest` is False.

    Examples
    --------
    >>> x = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 1e-40, 3.0, torch.inf, torch.nan])
    >>> ordered_bits(x, True).argsort().tolist(), ordered_bits(x, False).argsort().tolist()
    ([0, 1, 2, 3, 4, 5, 6, 7], [7, 0, 1, 2, 3, 4, 5, 6])
    >>> from_ordered_bits(ordered_bits(x, False), x.dtype)
    tensor([       -inf, -2.0000e+00, -0.0000e+00,  0.0000e+00,  9.9999e-41,
             3.0000e+00,         inf,         nan])
    """
    kind = _integer(x.dtype)
    ends = torch.iinfo(kind)
    flipped = _flipped(x.to(_full(kind)).view(kind))
    return flipped.masked_fill_(x.isnan(), ends.max if largest else ends.min)


def from_ordered_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers whose `ordered_bits` these are."""
    return _flipped(bits).view(_full(bits.dtype)).to(dtype)


def all_reduced(values: Tensor, op: Any, group: dist.ProcessGroup) -> Tensor:
    """What floating-point `values` are over a group, combined by `dist.ReduceOp.SUM`, MAX or MIN. Collective.

    `values` may be written into.
    """
    if op == dist.ReduceOp.SUM:
        dist.all_reduce(values, op, group=group)
        return values
    bits = ordered_bits(values, op == dist.ReduceOp.MAX)
    dist.all_reduce(bits, op, group=group)
    return from_ordered_bits(bits, values.dtype)


def _flipped(bits: Tensor) -> Tensor:
    """All bits but the sign of those that are negative, the other way round; twice, they are as before."""
    ends = torch.iinfo(bits.dtype)
    return bits.bitwise_right_shift(ends.bits - 1).bitwise_and_(ends.max).bitwise_xor_(bits)


def _integer(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.float64 else torch.int32


def _full(kind: torch.dtype) -> torch.dtype:
    return torch.float64 if kind == torch.int64 else torch.float32


def _fake_ordered(x: Tensor, largest: bool) -> Tensor:
    return torch.empty_like(x, dtype=_integer(x.dtype))


def _fake_from_ordered(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(bits, dtype=dtype)


for _name, _function, _fake in (
    ("ordered_bits", ordered_bits, _fake_ordered),
    ("from_ordered_bits", from_ordered_bits, _fake_from_ordered),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardweave::{_name}", _fake, lib=_LIBRARY)
