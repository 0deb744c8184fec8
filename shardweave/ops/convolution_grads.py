"""The two gradients of a convolution as ops of their own.

``aten.convolution_backward`` computes both, and takes the input and the weight for both. Here each gradient takes
what it depends on, and the shape of what it is the gradient of: so each can be spread by itself, and neither asks for
a tensor that it does not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

aten = torch.ops.aten
_OPTIONS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)
_LIBRARY: Any = torch.library.Library("shardweave", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"conv_input_grad(Tensor grad, Tensor weight, SymInt[] input_size, {_OPTIONS}) -> Tensor")
_LIBRARY.define(f"conv_weight_grad(Tensor grad, Tensor input, SymInt[] weight_size, {_OPTIONS}) -> Tensor")


def _input_grad(
    grad: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of a convolution's input, which itself is not needed: as in ``torch.nn.grad.conv2d_input``."""
    shape_only = grad.new_empty(1).expand(input_size)
    options = (stride, padding, dilation, transposed, output_padding, groups)
    result: Tensor
    result, _, _ = aten.convolution_backward.default(grad, shape_only, weight, None, *options, [True, False, False])
    return result


def _weight_grad(
    grad: Tensor,
    input: Tensor,
    weight_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of a convolution's weight, which itself is not needed."""
    shape_only = grad.new_empty(1).expand(weight_size)
    options = (stride, padding, dilation, transposed, output_padding, groups)
    result: Tensor
    _, result, _ = aten.convolution_backward.default(grad, input, shape_only, None, *options, [False, True, False])
    return result


for _name, _function in (("conv_input_grad", _input_grad), ("conv_weight_grad", _weight_grad)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardweave::{_name}", _function, lib=_LIBRARY)


def _flops(grad: Sequence[int], kernel: Sequence[int], applied: Sequence[int]) -> int:
    """Two for each use of each weight: one a sample and a place that the kernel is applied at."""
    return 2 * grad[0] * math.prod(kernel) * math.prod(applied[2:])


@register_flop_formula(torch.ops.shardweave.conv_input_grad)
def _input_grad_flops(
    grad: Sequence[int],
    weight: Sequence[int],
    input_size: Sequence[int],
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    *_: object,
    **__: object,
) -> int:
    return _flops(grad, weight, input_size if transposed else grad)


@register_flop_formula(torch.ops.shardweave.conv_weight_grad)
def _weight_grad_flops(
    grad: Sequence[int],
    input: Sequence[int],
    weight_size: Sequence[int],
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    *_: object,
    **__: object,
) -> int:
    return _flops(grad, weight_size, input if transposed else grad)
