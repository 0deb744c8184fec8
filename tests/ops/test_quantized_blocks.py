"""Blocks of few bits: within half a step of what they hold, of any size; what is not finite stays so."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.ops.communication_encodings import STEPS, dequantize_blocks, quantize_blocks, sum_dequantized
from tests.passes.harness import examples

custom_ops = torch.ops.shardweave
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def half_steps(x: Tensor, bits: int, block: int) -> Tensor:
    """For each element of the rows of `x` half a step of its block, found one block after another."""
    found = [[torch.full_like(part, part.abs().max() / (2 * STEPS[bits])) for part in row.split(block)] for row in x]
    return torch.stack([torch.cat(parts) for parts in found])


def check(x: Tensor, got: Tensor, bits: int, block: int) -> None:
    """Within half a step, and the rounding of the scale and of the dtype; a step is no less than float32's least."""
    assert got.shape == x.shape and got.dtype == x.dtype and got.is_contiguous()
    numbers, half = torch.finfo(x.dtype), half_steps(x.double(), bits, block)
    rounding = (numbers.eps + 2e-7) * (x.double().abs() + half) + numbers.eps * numbers.tiny
    assert ((got.double() - x.double()).abs() <= half + rounding + torch.finfo(torch.float32).tiny).all()


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Rows of any number of elements, of magnitudes from denormal to near the largest, with blocks of zeros."""
    count, size, dtype = draw(st.integers(1, 4)), draw(st.integers(1, 70)), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    values = torch.randn(count, size, generator=generator, dtype=torch.float64).clamp(-3.9, 3.9) / 4
    magnitude = draw(st.sampled_from([0.0, 1e-42, 1e-6, 1.0, 6e4, 3e38]))
    spread = torch.rand(count, size, generator=generator, dtype=torch.float64) ** draw(st.sampled_from([0, 1, 20]))
    zeros = torch.rand(count, size, generator=generator) < draw(st.sampled_from([0.0, 0.5]))
    most = torch.finfo(dtype).max
    return (values * spread * min(magnitude, most)).masked_fill(zeros, 0.0).to(dtype)


@given(x=rows(), bits=st.sampled_from([8, 4]), block=st.sampled_from([1, 2, 7, 32, 256]))
@examples(300)
def test_what_comes_out_of_blocks_is_within_half_a_step(x: Tensor, bits: int, block: int) -> None:
    count, size = x.shape
    payload, scales = quantize_blocks(x, [size], bits, block)
    assert payload.dtype == (torch.int8 if bits == 8 else torch.uint8)
    assert payload.shape == (count, math.ceil(size * bits / 8)) and scales.shape == (count, math.ceil(size / block))
    check(x, dequantize_blocks(payload, scales, [size], block, x.dtype), bits, block)


@given(x=rows(), bits=st.sampled_from([8, 4]), block=st.sampled_from([1, 7, 32]))
@examples(100)
def test_a_sum_is_that_of_what_comes_out(x: Tensor, bits: int, block: int) -> None:
    """Parts are added in full precision, and the sum is rounded once."""
    count, size = x.shape
    payload, scales = (part.unsqueeze(1) for part in quantize_blocks(x, [size], bits, block))
    parts = dequantize_blocks(payload, scales, [size], block, scales.dtype)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(sum_dequantized(payload, scales, [size], block, x.dtype), total.to(x.dtype))


@given(
    x=rows(), bits=st.sampled_from([8, 4]), block=st.sampled_from([1, 7, 32]), seed=st.randoms(use_true_random=False)
)
@examples(100)
def test_no_block_holds_elements_of_two_parts(x: Tensor, bits: int, block: int, seed: random.Random) -> None:
    """Parts come out as they do alone, whatever lies beside them."""
    count, size = x.shape
    cuts = sorted(seed.sample(range(1, size), min(size - 1, 3)))
    sizes = [after - before for before, after in zip([0, *cuts], [*cuts, size])]
    found = dequantize_blocks(*quantize_blocks(x, sizes, bits, block), sizes, block, x.dtype)
    for part, got in zip(x.split(sizes, 1), found.split(sizes, 1), strict=True):
        alone = dequantize_blocks(*quantize_blocks(part, [part.shape[1]], bits, block), [part.shape[1]], block, x.dtype)
        assert torch.equal(got, alone)


@pytest.mark.parametrize("bits", STEPS)
def test_what_is_on_a_step_stays_as_it_is(bits: int) -> None:
    """So that what has been quantized once loses nothing in the same blocks."""
    most, size = STEPS[bits], 2 * STEPS[bits] + 1
    x = torch.arange(-most, most + 1.0).repeat(2, 1) * torch.tensor([[0.25], [3.0]])
    assert torch.equal(dequantize_blocks(*quantize_blocks(x, [size], bits, size), [size], size, x.dtype), x)


@pytest.mark.parametrize("bits", STEPS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen(bits: int, value: float) -> None:
    """A scaler of gradients looks for it; other blocks are not touched."""
    x = torch.ones(1, 8)
    x[0, 2] = value
    found = dequantize_blocks(*quantize_blocks(x, [8], bits, 4), [8], 4, x.dtype)
    assert not found[0, :4].isfinite().any() and torch.equal(found[0, 4:], x[0, 4:])


@pytest.mark.parametrize("bits", STEPS)
@pytest.mark.parametrize(("size", "dtype"), [(9, torch.bfloat16), (8, torch.float32), (5, torch.float64)])
def test_shapes_are_known_without_values(bits: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(6, size).to(dtype)

    def made(x: Tensor) -> list[Tensor]:
        payload, scales = custom_ops.quantize_blocks(x, [size], bits, 4)
        whole = custom_ops.dequantize_blocks(payload, scales, [size], 4, dtype)
        stacked = payload.view(3, 2, -1), scales.view(3, 2, -1)
        return [payload, scales, whole, custom_ops.sum_dequantized(*stacked, [size], 4, torch.float32)]

    with FakeTensorMode() as mode:
        fakes = made(mode.from_tensor(x))
    for fake, real in zip(fakes, made(x), strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
