"""Scratch memory: allocations of kernels, collectives and optimizers beside their results, and the rounding of sizes.

The formulas of the CPU were measured: they give the bytes that torch 2.13's allocator handed out while each op of the
models in `tests/models` ran (`tests.peak_memory.changes`). Each formula names the kernel's source in
``aten/src/ATen/native``. The formulas of a GPU are read from the sources. The workspaces of cuBLAS (8 MiB a stream, 32
MiB on Hopper: ``aten/src/ATen/cuda/CublasHandlePool.cpp``), cuDNN and NCCL are not included: a plan's reserve is for
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardweave.cost_model.machine import Device
from shardweave.cost_model.op_work import named_arguments
from shardweave.distributed import is_sent_directly
from shardweave.sharding import info, is_start, op_of, tensor_bytes

_BLOCK_BYTES = {"cuda": 512, "cpu": 1}
"""Allocated sizes are multiples of it: ``kMinBlockSize`` of c10/cuda/CUDACachingAllocator.cpp. The CPU's allocator
aligns to 64 bytes (c10/core/alignment.h), but reports the size that was asked for, so measurements see no rounding."""
_CHANNEL_BLOCK = 16
"""oneDNN's blocked layouts pad channels to a multiple of this, with AVX-512."""


def allocated_bytes(num_bytes: int, device: Device) -> int:
    """Bytes of the block that the allocator of `device` gives for `num_bytes`.

    >>> from shardweave.cost_model import Cluster
    >>> [allocated_bytes(1000, Cluster.preset(name).device) for name in ("dgx-a100", "local-cpu")]
    [1024, 1000]
    """
    block = _BLOCK_BYTES[device.allocator]
    return -(-num_bytes // block) * block


def scratch_bytes(node: fx.Node, device: Device) -> int:
    """Bytes that `node` allocates beside its results, and frees when it ends.

    Examples
    --------
    A matrix product needs none.

    >>> from shardweave.cost_model import Cluster
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(8, 8, device="meta")
    >>> scratch_bytes(graph.call_function(torch.ops.aten.mm.default, (x, x)), Cluster.local(1).device)
    0
    """
    if node.op != "call_function":
        return 0
    if is_start(node):  # ProcessGroupGloo.cpp: an all-gather flattens what it sends
        flattens = device.allocator == "cpu" and _name(node) == "all_gather_into_tensor" and not _is_direct(node)
        return tensor_bytes(_value(node, "input")) if flattens else 0
    formula = (_CPU if device.allocator == "cpu" else _CUDA).get(_name(node))
    return 0 if formula is None else int(formula(node))


def sent_copy_bytes(start: fx.Node, device: Device) -> int:
    """Bytes of a copy that a collective holds from its start to its wait.

    Gloo has no reduce-scatter: torch reduces a copy of the whole input. What is sent directly (`distributed.gloo`) is
    as large, but the result, which is counted by itself, is made only after the wait. NCCL needs no copy.
    """
    if device.allocator != "cpu" or _name(start) != "reduce_scatter_tensor":
        return 0
    return tensor_bytes(_value(start, "input")) - (tensor_bytes(start.meta["val"]) if _is_direct(start) else 0)


def _is_direct(start: fx.Node) -> bool:
    collective = info(start).collective
    return collective is not None and is_sent_directly(start, collective.axes)


def optimizer_scratch_bytes(sizes: list[int], states: float, alone: bool, device: Device) -> int:
    """Bytes that an optimizer's step allocates beside parameters, gradients and states.

    Adam takes the root of its second moment and divides it, for one parameter after another: two temporaries, and the
    quotient of one parameter is freed after that of the next (``torch/optim/adam.py``, ``_single_tensor_adam``). So
    torch updates DTensors, and any tensors on a CPU. Plain tensors on a GPU are updated together
    (``_multi_tensor_adam``): one temporary for each. Optimizers with less than two states work in place (``sgd.py``).

    Parameters
    ----------
    sizes : list of int
        Bytes of each trainable parameter on this device, in their order.
    states : float
        Bytes of optimizer state for each byte of a parameter.
    alone : bool
        There is only one device, so parameters are plain tensors.

    Examples
    --------
    >>> from shardweave.cost_model import Cluster
    >>> optimizer_scratch_bytes([10, 6, 8], 2.0, False, Cluster.local(2).device)
    22
    """
    if states < 2 or not sizes:
        return 0
    if alone and device.allocator == "cuda":
        return sum(allocated_bytes(size, device) for size in sizes)
    blocks = [0, *(allocated_bytes(size, device) for size in sizes)]
    return max(before + 2 * size for before, size in zip(blocks, blocks[1:]))


def _name(node: fx.Node) -> str:
    packet = getattr(op_of(node), "overloadpacket", None)
    return str(getattr(packet, "__name__", ""))


def _value(node: fx.Node, name: str) -> Any:
    """The value of an argument: ``meta["val"]`` of a node, else the argument itself."""
    argument = named_arguments(node).get(name)
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _attention(node: fx.Node) -> int:
    """FlashAttentionKernel.cpp: a block of scores, two statistics a row, and a block of the result."""
    rows, columns, width = _attention_block(node)
    return 4 * rows * (columns + 2 + width)


def _attention_backward(node: fx.Node) -> int:
    """FlashAttentionKernel.cpp: a block of scores and one of their gradient, and a sum a row."""
    rows, columns, _ = _attention_block(node)
    return 4 * rows * (2 * columns + 1)


def _attention_block(node: fx.Node) -> tuple[int, int, int]:
    rows, width = (int(size) for size in _value(node, "query").shape[-2:])
    most = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(rows, most), min(int(_value(node, "key").shape[-2]), 512), width


def _convolution(node: fx.Node) -> int:
    """mkldnn/Conv.cpp: oneDNN's blocked copies. The plain result is allocated after the operands' copies are freed.

    oneDNN makes no copy of an image with few channels.
    """
    given, weight, result = _value(node, "input"), _value(node, "weight"), node.meta["val"]
    plain = tensor_bytes(result)
    if _is_pointwise(weight):
        return 0
    if _grouped(node):
        return tensor_bytes(given) + tensor_bytes(weight)
    operands = _padded(given) + _padded_weight(weight) if given.shape[1] >= _CHANNEL_BLOCK else 0
    return _padded(result) + max(operands, plain) - plain


def _input_gradient(node: fx.Node) -> int:
    """The same for the gradient, and a contiguous input whose shape alone is needed (`ops.layer_ops`)."""
    gradient, weight, result = _value(node, "grad"), _value(node, "weight"), node.meta["val"]
    plain = tensor_bytes(result)
    if _is_pointwise(weight):
        return plain
    if _grouped(node):
        return plain + tensor_bytes(gradient) + tensor_bytes(weight)
    return _padded(result) + max(_padded(gradient) + _padded_weight(weight), plain)


def _weight_gradient(node: fx.Node) -> int:
    """Blocked copies of gradient, input and result; of the result only for a 1x1 kernel."""
    gradient, given, result = _value(node, "grad"), _value(node, "input"), node.meta["val"]
    if _is_pointwise(result):
        return tensor_bytes(result)
    if _grouped(node):
        return tensor_bytes(given)
    if max(gradient.shape[1], given.shape[1]) < _CHANNEL_BLOCK:
        return tensor_bytes(gradient) + tensor_bytes(given) + tensor_bytes(result)
    return _padded(gradient) + _padded(given) + _padded_weight(result)


def _grouped(node: fx.Node) -> bool:
    return bool(_value(node, "groups") != 1)


def _is_pointwise(weight: torch.Tensor) -> bool:
    """A convolution of one tap, such as a 1x1 kernel."""
    return math.prod(weight.shape[2:]) == 1


def _padded(image: torch.Tensor) -> int:
    """Bytes of an image with its channels, the second dimension, in blocks."""
    channels = max(1, int(image.shape[1]))
    return tensor_bytes(image) // channels * _padded_channels(channels)


def _padded_weight(weight: torch.Tensor) -> int:
    """Bytes of a weight with its channels, the first two dimensions, in blocks."""
    outputs, inputs = max(1, int(weight.shape[0])), max(1, int(weight.shape[1]))
    return tensor_bytes(weight) // (outputs * inputs) * _padded_channels(outputs) * _padded_channels(inputs)


def _padded_channels(channels: int) -> int:
    return -(-channels // _CHANNEL_BLOCK) * _CHANNEL_BLOCK


def _expert_mm(node: fx.Node) -> int:
    """ops/layer_ops.py: the rows in their experts' order, and then the products in that order."""
    return max(tensor_bytes(_value(node, "x")), tensor_bytes(node.meta["val"]))


def _expert_outer(node: fx.Node) -> int:
    return tensor_bytes(_value(node, "x")) + tensor_bytes(_value(node, "grad"))


def _recurrence_backward(node: fx.Node) -> int:
    """ops/layer_ops.py: the gates of the hidden states, and the hidden states before each step."""
    states = _value(node, "states")
    return tensor_bytes(_value(node, "igates")) + tensor_bytes(states) // int(states.shape[0])


def _quantize(node: fx.Node) -> int:
    """The blocks in full precision and a byte for each element, before the result is allocated."""
    payload, scales = node.meta["val"]
    padded = int(scales.numel() * _value(node, "block"))
    return padded * (int(scales.element_size()) + 1) - tensor_bytes(payload)


def _dequantize(node: fx.Node) -> int:
    """Whole blocks in full precision, where these are not the result; then in its dtype, with the padding."""
    scales, result = _value(node, "scales"), node.meta["val"]
    padded = int(scales.numel() * _value(node, "block"))
    whole, spare = padded * int(scales.element_size()), padded - int(result.numel())
    if scales.dtype == result.dtype:
        return whole if spare else 0
    return whole + spare * int(result.element_size())


def _sum_dequantized(node: fx.Node) -> int:
    """The blocks of the sum and of the addend, and the addend's codes. The result is allocated after they are freed."""
    scales, result = _value(node, "scales"), node.meta["val"]
    one = tensor_bytes(scales) * int(_value(node, "block")) // int(scales.shape[0])
    codes = int(result.numel()) if _value(node, "payload").dtype == torch.uint8 else 0
    return 2 * one + codes - tensor_bytes(result)


def _ordered_bits(node: fx.Node) -> int:
    """A mask of the NaNs, or before it a copy in float32 of numbers in 16 bits."""
    x, result = _value(node, "x"), node.meta["val"]
    return int(x.numel()) if x.element_size() == result.element_size() else tensor_bytes(result)


def _from_ordered_bits(node: fx.Node) -> int:
    bits, result = _value(node, "bits"), node.meta["val"]
    return tensor_bytes(bits) if bits.element_size() != result.element_size() else 0


def _converted(node: fx.Node) -> int:
    result = node.meta["val"]
    return tensor_bytes(result) if _value(node, "self").dtype != result.dtype else 0


def _flash_backward(node: fx.Node) -> int:
    """flash_attn/flash_api.cpp, ``mha_bwd``: in float32, the sums of the query's gradient, and a number a row.

    Rows are rounded to 128, widths to 32.
    """
    batch, heads, rows, width = (int(size) for size in _value(node, "query").shape)
    rows, width = -(-rows // 128) * 128, -(-width // 32) * 32
    return 4 * batch * heads * rows * (width + 1)


_ANY_DEVICE: dict[str, Callable[[fx.Node], int]] = {
    "quantize_blocks": _quantize,
    "dequantize_blocks": _dequantize,
    "sum_dequantized": _sum_dequantized,
    "ordered_bits": _ordered_bits,
    "from_ordered_bits": _from_ordered_bits,
    "recurrence_backward": _recurrence_backward,
    "region": lambda node: int(_value(node, "scratch")),
}
_CPU: dict[str, Callable[[fx.Node], int]] = {
    **_ANY_DEVICE,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "convolution": _convolution,
    "conv_input_grad": _input_gradient,
    "conv_weight_grad": _weight_gradient,
    "expert_mm": _expert_mm,
    "expert_outer": _expert_outer,
    "native_batch_norm_backward": lambda node: tensor_bytes(_value(node, "input")),  # measured; Normalization.cpp
    "cumsum": _converted,  # ReduceOps.cpp: the input in the dtype of the sums
    "_safe_softmax": lambda node: int(_value(node, "self").numel()),  # attention.cpp: which entries are minus infinity
}
_CUDA: dict[str, Callable[[fx.Node], int]] = {
    **_ANY_DEVICE,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward,  # planned for GPUs on a laptop
}
