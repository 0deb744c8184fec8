"""Scratch: what the CPU's allocator gave while an op ran, against the formulas; the GPU's by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._C._dynamo.eval_frame import set_eval_frame

from shardweave.cost_model import Cluster
from shardweave.cost_model.kernel_scratch import (
    allocated_bytes,
    optimizer_scratch_bytes,
    scratch_bytes,
    sent_copy_bytes,
)
from shardweave.ir import Mesh
from shardweave.ops.communication_encodings import ordered_bits, quantize_blocks
from shardweave.sharding.graphs import tensor_bytes
from tests.cost_model.handmade import Builder, aten
from tests.peak_memory import measured_peak, most_at_once

CPU, GPU = Cluster.local(2).device, Cluster.preset("dgx-a100").device
OPTIONS = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
IMAGE, WEIGHT, MADE = (4, 32, 16, 16), (64, 32, 3, 3), (4, 64, 16, 16)
POINT = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
ATTENTION = (2, 4, 40, 16)

custom_ops = torch.ops.shardweave


def blocks(rows: int | tuple[int, ...], sizes: list[int], bits: int) -> list[torch.Tensor]:
    """Numbers in blocks, and their scales."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    found = quantize_blocks(torch.rand(math.prod(rows), sum(sizes)), sizes, bits, 256)
    return [each.view(*rows, -1) for each in found]


CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mm": (aten.mm.default, ((64, 32), (32, 48))),
    "softmax": (aten._softmax.default, ((64, 32), -1, False)),
    "convolution": (aten.convolution.default, (IMAGE, WEIGHT, None, *OPTIONS)),
    "convolution, few channels": (aten.convolution.default, ((4, 3, 16, 16), (64, 3, 3, 3), None, *OPTIONS)),
    "convolution, one tap": (aten.convolution.default, (IMAGE, (64, 32, 1, 1), None, *POINT)),
    "its input": (torch.ops.shardweave.conv_input_grad.default, (MADE, WEIGHT, list(IMAGE), *OPTIONS)),
    "its weight": (torch.ops.shardweave.conv_weight_grad.default, (MADE, IMAGE, list(WEIGHT), *OPTIONS)),
    "attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, (ATTENTION,) * 3),
    "attention, long": (aten._scaled_dot_product_flash_attention_for_cpu.default, ((1, 2, 800, 16),) * 3),
    "attention, backward": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        (*(torch.rand(2, 40, 4, 16).transpose(1, 2),) * 5, (2, 4, 40), 0.0, False),  # as models have it
    ),
    "norm, backward": (
        aten.native_batch_norm_backward.default,
        ((8, 16, 8, 8), (8, 16, 8, 8), (16,), None, None, (16,), (16,), True, 1e-5, [True] * 3),
    ),
    **{
        f"{name} of {dtype}": case
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        for name, case in {
            "ordered bits": (custom_ops.ordered_bits.default, (torch.rand(64, 32).to(dtype), True)),
            "out of ordered bits": (
                custom_ops.from_ordered_bits.default, (ordered_bits(torch.rand(64, 32).to(dtype), True), dtype)
            ),
        }.items()
    },
    **{
        f"{name}, int{bits} of {dtype}, {sizes}": case
        for bits in (8, 4)
        for dtype in (torch.float32, torch.bfloat16)
        for sizes in ([4096], [3000, 1000])
        for name, case in {
            "blocks": (custom_ops.quantize_blocks.default, (torch.rand(4, sum(sizes)).to(dtype), sizes, bits, 256)),
            "out of blocks": (custom_ops.dequantize_blocks.default, (*blocks(4, sizes, bits), sizes, 256, dtype)),
            "a sum of blocks": (custom_ops.sum_dequantized.default, (*blocks((4, 2), sizes, bits), sizes, 256, dtype)),
        }.items()
        if bits == 8 or name != "out of blocks"  # parameters move in int8
    },
    "embedding, backward": (aten.embedding_dense_backward.default, ((8, 16), torch.zeros(8).long(), 32, -1, False)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What other threads take is not seen."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_an_op_takes_what_is_predicted(name: str) -> None:
    check(*CASES[name])


@pytest.mark.parametrize("name", [name for name in CASES if "blocks" in name])
def test_our_own_ops_take_no_more_where_dynamo_runs_their_frames(name: str) -> None:
    """Python then keeps a caller's temporaries until the call returns: 32 kB more of blocks in parts."""
    before = set_eval_frame(False)
    try:
        check(*CASES[name])
    finally:
        set_eval_frame(before)


def check(op: Any, arguments: tuple[Any, ...]) -> None:
    real = [torch.rand(a) if isinstance(a, tuple) else a for a in arguments]
    real = [a.clone() if isinstance(a, torch.Tensor) else a for a in real]
    held = [value for value in real if isinstance(value, torch.Tensor)]
    op(*real)  # what is made once stays out
    measured = measured_peak(lambda: op(*real), held) - sum(value.nbytes for value in held)
    node = noted(op, real)
    predicted = tensor_bytes(node.meta["val"]) + scratch_bytes(node, CPU)
    assert predicted == pytest.approx(measured, rel=0.05)


def noted(op: Any, arguments: list[Any]) -> fx.Node:
    """A call of `op` with these arguments; no shape of it is made up."""
    builder = Builder([])
    given = [builder.like(f"x{i}", _meta(a)) if isinstance(a, torch.Tensor) else a for i, a in enumerate(arguments)]
    node = builder.graph.call_function(op, tuple(given))
    node.meta["val"] = op(*arguments)
    return node


def _meta(value: torch.Tensor) -> Any:
    node = fx.Graph().placeholder("x")
    node.meta["val"] = value.to("meta")
    return node


def test_sizes_are_rounded_as_the_allocator_does() -> None:
    assert [allocated_bytes(size, GPU) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert [allocated_bytes(size, CPU) for size in (0, 1, 513)] == [0, 1, 513]


def test_what_gloo_sends_directly_is_whole_until_it_is_added_up_and_nccl_needs_no_copy() -> None:
    axes = Cluster.local(2).mesh().axes
    builder = Builder(axes)
    start = builder.start("reduce_scatter", builder.tensor("x", 8, 4), axes, "x", "gradient")
    assert sent_copy_bytes(start, CPU) == 128 - 64 and sent_copy_bytes(start, GPU) == 0  # 64 are the result's
    gather = builder.start("all_gather", builder.tensor("y", 8, 4), axes, "y", "parameter")
    assert scratch_bytes(gather, CPU) == scratch_bytes(gather, GPU) == 0


def test_gloo_copies_what_it_moves_by_itself() -> None:
    """Where two members are behind a link, an all-gather is gloo's own; so is a maximum anywhere."""
    axes = Mesh.of_levels([("cpu", 2), ("node", 2)]).axes
    builder = Builder(axes)
    gather = builder.start("all_gather", builder.tensor("y", 8, 4), axes, "y", "parameter")
    assert scratch_bytes(gather, CPU) == 128 and scratch_bytes(gather, GPU) == 0
    summing = builder.start("reduce_scatter", builder.tensor("x", 8, 4), axes, "x", "gradient")
    assert sent_copy_bytes(summing, CPU) == 128 - 32
    summing.update_arg(1, "max")
    assert sent_copy_bytes(summing, CPU) == 128 and sent_copy_bytes(summing, GPU) == 0


def test_flash_attention_on_a_gpu_sums_the_querys_gradient_in_float32() -> None:
    op, arguments = CASES["attention, backward"]
    node = noted(op, [torch.rand(a) if isinstance(a, tuple) else a for a in arguments])
    assert scratch_bytes(node, GPU) == 4 * 2 * 4 * 128 * (32 + 1)


def test_the_optimizers_temporaries() -> None:
    assert optimizer_scratch_bytes([1024, 512], 1.0, False, CPU) == 0
    assert optimizer_scratch_bytes([1024, 512], 2.0, True, GPU) == 1536
    weights = [torch.nn.Parameter(torch.rand(size)) for size in (100, 30, 90)]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.rand_like(weight)
    optimizer.step()
    held = [*weights, *(w.grad for w in weights if w.grad is not None)]
    states = [value for state in optimizer.state.values() for value in state.values()]
    measured = measured_peak(optimizer.step, [*held, *states])
    before = sum(value.nbytes for value in (*held, *states))
    predicted = optimizer_scratch_bytes([weight.nbytes for weight in weights], 2.0, True, CPU)
    assert measured - before == pytest.approx(predicted, abs=64)  # 64: numbers


def test_a_block_at_the_address_of_another_tells_that_it_was_taken_back() -> None:
    assert most_at_once([(1, 8), (1, 8), (2, 4)]) == 12
    assert most_at_once([(1, 8), (1, -8), (1, 8), (5, -100)]) == 8
