"""Normalisations over a sample's own values: the normalised dimensions stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import BoundRule, Dims, Factor
from shardweave.passes.rules.registry import RULES, Emitter, Rule, argument, output_shapes, rule, shape, tensor_args
from shardweave.passes.rules.spatial import row_major

aten = torch.ops.aten


def bind_layer_norm(node: fx.Node) -> BoundRule:
    """``... [d], [d], [d] -> ... [d], ... 1, ... 1`` for any number of normalised dimensions, and its backward."""
    normalised = len(argument(node, "normalized_shape"))
    whole = shape(tensor_args(node)[0])
    free = len(whole) - normalised
    factors = tuple(Factor(f"i{index}", size, blocked=index >= free) for index, size in enumerate(whole) if size > 1)
    names = [(f"i{index}",) if size > 1 else () for index, size in enumerate(whole)]

    def dims(size: tuple[int, ...]) -> Dims:
        if len(size) == normalised and free:
            return tuple(names[free:])
        return tuple(() if length == 1 else name for name, length in zip(names, size))

    return BoundRule(
        factors,
        tuple(dims(shape(arg)) for arg in tensor_args(node)),
        tuple(dims(size) for size in output_shapes(node)),
    )


RULES[aten.native_layer_norm.default] = Rule(bind_layer_norm, source="... [d], [d], [d] -> ... [d], ... 1, ... 1")
RULES[aten.native_layer_norm_backward.default] = Rule(
    bind_layer_norm, source="... [d], ... [d], ... 1, ... 1, [d], [d] -> ... [d], [d], [d]"
)
RULES[aten._fused_rms_norm.default] = Rule(bind_layer_norm, source="... [d], [d] -> ... [d], ... 1")
RULES[aten._fused_rms_norm_backward.default] = Rule(
    bind_layer_norm, source="... [d], ... [d], ... 1, [d] -> ... [d], [d]"
)


def lower_group_norm(emit: Emitter) -> fx.Node:
    """The batch, the channels and the groups that this rank has, of row-major values.

    The op refuses others, and its backward's CPU kernel is silently wrong where the gradient lies otherwise.
    """
    backward = emit.node.target is aten.native_group_norm_backward.default
    groups = (emit.input_layouts[2] if backward else emit.output_layouts[1]).local_shape[1]
    sizes = {"N": emit.input_layouts[0].local_shape[0], "C": emit.input_layouts[0].local_shape[1], "group": groups}
    names = [declared.name for declared in emit.node.target._schema.arguments]  # type: ignore[union-attr]
    given = [sizes.get(name, value) for name, value in zip(names, emit.args)]
    values = 2 if backward else 1
    return emit.call(emit.node.target, *(row_major(emit, value) for value in given[:values]), *given[values:])


_GROUPED = "n (g [c]) [...]"
rule(
    aten.native_group_norm.default,
    f"{_GROUPED}, (g [c]), (g [c]) -> {_GROUPED}, n g, n g",
    lower=lower_group_norm,
)
rule(
    aten.native_group_norm_backward.default,
    f"{_GROUPED}, {_GROUPED}, n g, n g, (g [c]) -> {_GROUPED}, (g [c]), (g [c])",
    lower=lower_group_norm,
)


def group_norm_gradient(node: fx.Node) -> Callable[..., Any] | None:
    """The form of a group norm's backward whose values are captured in another order than row-major.

    Autograd gives the kernel two values that lie alike, but a gradient that another form computes (a convolution's)
    may lie otherwise than the captured one did, and the CPU kernel would be silently wrong.
    """
    if all(argument(node, name).meta["val"].is_contiguous() for name in ("grad_out", "input")):
        return None

    def form(grad: Tensor, x: Tensor, *rest: Any) -> Any:
        grad, x = (aten.clone.default(value, memory_format=torch.contiguous_format) for value in (grad, x))
        return aten.native_group_norm_backward.default(grad, x, *rest)

    return form


NORM_CONDITIONAL: dict[Any, Callable[[fx.Node], Callable[..., Any] | None]] = {
    aten.native_group_norm_backward.default: group_norm_gradient
}
