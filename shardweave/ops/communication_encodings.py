"""Encodings of values for communication: blocks of few bits, and integers that are ordered as floating-point numbers.

Quantized blocks (ZeRO++, arXiv 2306.10209)
    A row consists of parts: one, or those of all parameters of a bucket. Each part is cut into blocks; the last one may
    be shorter. For each block the op keeps the largest absolute value as the *scale* of one step, and for each element
    the number of steps from zero, rounded to the nearest: -127 to 127 in int8, or -7 to 7 in int4, two of them in a
    uint8. A value that is not finite makes its whole block not finite, so that a gradient scaler sees it.

Ordered bits
    gloo and NCCL lose a NaN in a maximum or minimum of floating-point numbers: gloo compares with ``<``, NCCL calls
    ``fmaxf``. Both compare integers exactly. So numbers are sent as integers of the same order: the bits of a positive
    number, and the flipped bits of a negative one. NaN becomes the integer that wins. No library compares 16-bit
    integers, so 16-bit numbers take twice the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardweave.ops.local_shards import register

STEPS = {8: 127, 4: 7}
"""The number of steps from zero to the largest value of a block, by the bits of an element."""


def full_precision(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales, and of values while they are scaled and summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def quantize_blocks(x: Tensor, sizes: Sequence[int], bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Quantize the rows of `x`, each of parts of these `sizes`, to `bits` an element, with a scale for each block.

    Examples
    --------
    >>> payload, scales = quantize_blocks(torch.tensor([1.0, -127.0, 50.4, 0.0, 254.0]), [5], 8, 4)
    >>> payload, scales
    (tensor([[   1, -127,   50,    0,  127]], dtype=torch.int8), tensor([[1., 2.]]))
    >>> [hex(byte) for byte in quantize_blocks(torch.tensor([7.0, -7.0, 1.0]), [3], 4, 4)[0][0].tolist()]
    ['0x1f', '0x9']
    """
    full, most = full_precision(x.dtype), STEPS[bits]
    parts = torch.split(x.reshape(-1, sum(sizes)), [*sizes], 1)
    values = x.new_zeros((parts[0].shape[0], _padded_size(sizes, block)), dtype=full)
    torch._foreach_copy_([*_part_views(values, sizes, block)], parts)
    blocks = values.view(values.shape[0], -1, block)
    scales = torch.linalg.vector_norm(blocks, math.inf, dim=-1).div_(most)
    scales.clamp_min_(torch.finfo(full).tiny)  # of a block of zeros; it keeps what is not a number
    blocks.div_(scales.unsqueeze(-1)).round_().clamp_(-most, most)
    codes = values.to(torch.int8) if bits == 8 else values.add_(8).to(torch.uint8)
    del values, blocks
    codes = torch.cat([*_part_views(codes, sizes, block)], 1)
    return codes if bits == 8 else _packed(codes), scales


def dequantize_blocks(payload: Tensor, scales: Tensor, sizes: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize_blocks`, within half a step of the original values.

    >>> x = torch.tensor([[1.0, -127.0, 50.4], [0.0, 0.0, 3.0]])
    >>> dequantize_blocks(*quantize_blocks(x, [3], 8, 2), [3], 2, torch.float32)
    tensor([[   1.0000, -127.0000,   50.4000],
            [   0.0000,    0.0000,    3.0000]])
    """
    values = _dequantized(payload, scales, sizes, block)
    values = values.to(dtype)  # not in the call below: its caller would keep the values alive until it returns
    return _concat_parts(values, sizes, block)


def sum_dequantized(payload: Tensor, scales: Tensor, sizes: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """Dequantize the blocks of each entry of the first dimension, and return their sum.

    >>> x = torch.tensor([[7.0, 1.0], [-7.0, 14.0]])
    >>> sum_dequantized(*quantize_blocks(x, [2], 4, 1), [2], 1, torch.float32)
    tensor([ 0., 15.])
    """
    total = _dequantized(payload[0], scales[0], sizes, block)
    for each, scale in zip(payload[1:], scales[1:]):
        total += _dequantized(each, scale, sizes, block)
    total = total.to(dtype)
    return _concat_parts(total, sizes, block)


def _padded_size(sizes: Sequence[int], block: int) -> int:
    """The number of elements in whole blocks for parts of these sizes."""
    return sum(-(-size // block) * block for size in sizes)


def _part_views(values: Tensor, sizes: Sequence[int], block: int) -> Iterator[Tensor]:
    """Views of the parts in `values`, where each part begins at a block."""
    offset = 0
    for size in sizes:
        yield values.narrow(-1, offset, size)
        offset += -(-size // block) * block


def _packed(codes: Tensor) -> Tensor:
    """Pack two codes into a byte, the first one in the lower half."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | codes[:, 1::2] << 4


def _dequantized(payload: Tensor, scales: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """Dequantize into whole blocks, in full precision. The padding between the parts has undefined values."""
    if payload.dtype == torch.uint8:
        payload = torch.stack((payload & 15, payload >> 4), -1).flatten(-2)[..., : sum(sizes)]
    values = scales.new_zeros((*scales.shape[:-1], scales.shape[-1] * block))
    torch._foreach_copy_([*_part_views(values, sizes, block)], torch.split(payload, [*sizes], -1))
    if payload.dtype == torch.uint8:
        values -= 8
    values.view(*scales.shape, block).mul_(scales.unsqueeze(-1))
    return values


def _concat_parts(values: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """Concatenate the parts of whole blocks, without the padding between them."""
    return values if values.shape[-1] == sum(sizes) else torch.cat([*_part_views(values, sizes, block)], -1)


def _fake_quantize(x: Tensor, sizes: Sequence[int], bits: int, block: int) -> tuple[Tensor, Tensor]:
    size = sum(sizes)
    rows, length = x.numel() // size, size if bits == 8 else -(-size // 2)
    payload = x.new_empty((rows, length), dtype=torch.int8 if bits == 8 else torch.uint8)
    return payload, x.new_empty((rows, _padded_size(sizes, block) // block), dtype=full_precision(x.dtype))


def _fake_dequantize(payload: Tensor, scales: Tensor, sizes: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    return payload.new_empty((*payload.shape[:-1], sum(sizes)), dtype=dtype)


def _fake_sum(payload: Tensor, scales: Tensor, sizes: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    return payload.new_empty((*payload.shape[1:-1], sum(sizes)), dtype=dtype)


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
    dtype = _integer(x.dtype)
    limits = torch.iinfo(dtype)
    flipped = _flipped(x.to(_full(dtype)).view(dtype))
    return flipped.masked_fill_(x.isnan(), limits.max if largest else limits.min)


def from_ordered_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `ordered_bits`."""
    return _flipped(bits).view(_full(bits.dtype)).to(dtype)


def all_reduced(values: Tensor, op: Any, group: dist.ProcessGroup) -> Tensor:
    """All-reduce floating-point `values` over a group by `dist.ReduceOp.SUM`, MAX or MIN. Collective.

    Maxima and minima keep NaN. `values` may be overwritten.
    """
    if op == dist.ReduceOp.SUM:
        dist.all_reduce(values, op, group=group)
        return values
    bits = ordered_bits(values, op == dist.ReduceOp.MAX)
    dist.all_reduce(bits, op, group=group)
    return from_ordered_bits(bits, values.dtype)


def _flipped(bits: Tensor) -> Tensor:
    """Negative numbers with all bits but the sign flipped. Applied twice, it changes nothing."""
    info = torch.iinfo(bits.dtype)
    return bits.bitwise_right_shift(info.bits - 1).bitwise_and_(info.max).bitwise_xor_(bits)


def _integer(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.float64 else torch.int32


def _full(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.int64 else torch.float32


def _fake_ordered(x: Tensor, largest: bool) -> Tensor:
    return torch.empty_like(x, dtype=_integer(x.dtype))


def _fake_from_ordered(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(bits, dtype=dtype)


_BLOCKS = "Tensor payload, Tensor scales, int[] sizes, int block, ScalarType dtype"
_QUANTIZE = "quantize_blocks(Tensor x, int[] sizes, int bits, int block) -> (Tensor, Tensor)"
register(_QUANTIZE, quantize_blocks, _fake_quantize)
register(f"dequantize_blocks({_BLOCKS}) -> Tensor", dequantize_blocks, _fake_dequantize)
register(f"sum_dequantized({_BLOCKS}) -> Tensor", sum_dequantized, _fake_sum)
register("ordered_bits(Tensor x, bool largest) -> Tensor", ordered_bits, _fake_ordered)
register("from_ordered_bits(Tensor bits, ScalarType dtype) -> Tensor", from_ordered_bits, _fake_from_ordered)
