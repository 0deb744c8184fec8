"""Ops of whole layers, each with its own rule: the gradients of convolutions, the matmuls of a mixture of experts, the
steps of recurrent layers, the CTC loss, and regions in which sizes depend on values.

``aten.convolution_backward`` computes both gradients, and takes the input and the weight for both. Here each gradient
is an op of its own that takes what it depends on, and the shape of its result, so that each can be sharded by itself.

A mixture of experts sorts its tokens by expert, multiplies group by group, and sorts back. The ops here do all three,
so that everything outside of them keeps the order of the tokens, and each has a rule of one line.

A recurrent layer that is written out has a dozen ops for each step of its sequence. Here all steps are one op. What
does not depend on the step before, the product of the sequence and the weight, stays outside of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardweave.ir import InputError
from shardweave.ops.local_shards import LIBRARY, register

aten = torch.ops.aten
_OPTIONS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)
_TRANSPOSED = 3
"""The index of `transposed` among the options."""


def _gradient(index: int) -> Callable[..., Tensor]:
    """The gradient of a convolution's input (index 0) or weight (index 1), of which only the size is needed."""

    def gradient(grad: Tensor, other: Tensor, size: Sequence[int], *options: Any) -> Tensor:
        operands = [other, other]
        operands[index] = grad.new_empty(1).expand(size)
        mask = [index == 0, index == 1, False]
        result: Tensor = aten.convolution_backward.default(grad, *operands, None, *options, mask)[index]
        return result

    return gradient


for _index, _schema in enumerate(
    (
        f"conv_input_grad(Tensor grad, Tensor weight, SymInt[] input_size, {_OPTIONS}) -> Tensor",
        f"conv_weight_grad(Tensor grad, Tensor input, SymInt[] weight_size, {_OPTIONS}) -> Tensor",
    )
):
    register(_schema, _gradient(_index), _gradient(_index))


@register_flop_formula(torch.ops.shardweave.conv_input_grad)
def _input_grad_flops(grad: Any, weight: Any, input: Any, *options: Any, **_: Any) -> int:
    """Two FLOPs for each weight of the kernel, each sample, and each position that the kernel is applied at."""
    return int(2 * grad[0] * math.prod(weight) * math.prod((input if options[_TRANSPOSED] else grad)[2:]))


@register_flop_formula(torch.ops.shardweave.conv_weight_grad)
def _weight_grad_flops(grad: Any, input: Any, weight: Any, *options: Any, **_: Any) -> int:
    return int(_input_grad_flops(grad, weight, input, *options))


@torch.library.custom_op("shardweave::expert_mm", mutates_args=())
def expert_mm(x: Tensor, weight: Tensor, expert: Tensor, spread: int = 1) -> Tensor:
    """Each row of `x` times the weight of its expert: ``y[s] = x[s] @ weight[expert[s]]``.

    Parameters
    ----------
    x : Tensor
        Of shape (rows, k).
    weight : Tensor
        Of shape (experts, k, n).
    expert : Tensor
        Of shape (rows,): the expert of each row; a row whose expert is not in ``[0, experts)`` gives zeros and is not
        computed.
    spread : int
        The number of devices that the experts are sharded over: a rank computes about one in `spread` rows. Only the
        cost model uses it; it changes no result.

    Examples
    --------
    >>> weight = torch.stack([torch.eye(2), 2 * torch.eye(2)])
    >>> expert_mm(torch.ones(3, 2), weight, torch.tensor([1, 5, 0])).tolist()
    [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    """
    order, ends = _groups(expert, weight.shape[0])
    sorted_x, products = x.index_select(0, order), x.new_zeros(x.shape[0], weight.shape[2])
    for index, (start, end) in enumerate(ends):
        torch.mm(sorted_x[start:end], weight[index], out=products[start:end])
    del sorted_x
    return products.index_select(0, order.argsort())


@expert_mm.register_fake
def _(x: Tensor, weight: Tensor, expert: Tensor, spread: int = 1) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("shardweave::expert_outer", mutates_args=())
def expert_outer(x: Tensor, grad: Tensor, expert: Tensor, experts: int, spread: int = 1) -> Tensor:
    """The gradient of the weights of `expert_mm`: for each expert, the sum of ``outer(x[s], grad[s])`` over its rows.

    Parameters
    ----------
    x, grad : Tensor
        Of shapes (rows, k) and (rows, n).
    expert : Tensor
        Of shape (rows,); rows of other experts than ``[0, experts)`` are left out.

    Returns
    -------
    Tensor
        Of shape (experts, k, n).
    """
    order, ends = _groups(expert, experts)
    sorted_x, sorted_grad = x.index_select(0, order), grad.index_select(0, order)
    result = x.new_empty(experts, x.shape[1], grad.shape[1])
    for index, (start, end) in enumerate(ends):  # without rows: zeros
        torch.mm(sorted_x[start:end].t(), sorted_grad[start:end], out=result[index])
    return result


@expert_outer.register_fake
def _(x: Tensor, grad: Tensor, expert: Tensor, experts: int, spread: int = 1) -> Tensor:
    return x.new_empty(experts, x.shape[1], grad.shape[1])


def _groups(expert: Tensor, experts: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """The stable order of the rows by expert, and the start and end of each expert's rows in it."""
    group = torch.where((expert < 0) | (expert >= experts), experts, expert)
    order = torch.argsort(group, stable=True)
    ends = torch.bincount(group, minlength=experts + 1).cumsum(0)[:experts].tolist()
    return order, list(zip([0, *ends], ends))


@register_flop_formula(torch.ops.shardweave.expert_mm)
def _expert_mm_flops(x: Any, weight: Any, expert: Any, spread: int = 1, **_: Any) -> int:
    return int(2 * x[0] * x[1] * weight[2] // spread)


@register_flop_formula(torch.ops.shardweave.expert_outer)
def _expert_outer_flops(x: Any, grad: Any, expert: Any, experts: int, spread: int = 1, **_: Any) -> int:
    return int(2 * x[0] * x[1] * grad[1] // spread)


# -- recurrent layers

Steps = tuple[Tensor, ...]


def _tanh(igates: Tensor, hgates: Tensor, *_: Tensor) -> Steps:
    return (torch.tanh(igates + hgates),)


def _relu(igates: Tensor, hgates: Tensor, *_: Tensor) -> Steps:
    return (torch.relu(igates + hgates),)


def _gru(igates: Tensor, hgates: Tensor, hidden: Tensor) -> Steps:
    _, update, new = _gru_gates(igates, hgates)
    return ((hidden - new) * update + new,)


def _gru_gates(igates: Tensor, hgates: Tensor) -> Steps:
    inputs, states = igates.chunk(3, -1), hgates.chunk(3, -1)
    reset, update = (inputs[0] + states[0]).sigmoid(), (inputs[1] + states[1]).sigmoid()
    return reset, update, (inputs[2] + states[2] * reset).tanh()


def _lstm(igates: Tensor, hgates: Tensor, hidden: Tensor, cell: Tensor) -> Steps:
    entered, forget, new, shown = _lstm_gates(igates, hgates)
    cell = forget * cell + entered * new
    return shown * cell.tanh(), cell


def _lstm_gates(igates: Tensor, hgates: Tensor) -> Steps:
    entered, forget, new, shown = (igates + hgates).chunk(4, -1)
    return entered.sigmoid(), forget.sigmoid(), new.tanh(), shown.sigmoid()


def _sigmoid_grad(grad: Tensor, value: Tensor) -> Tensor:
    return grad * value * (1 - value)


def _tanh_grad(grad: Tensor, value: Tensor) -> Tensor:
    return grad * (1 - value * value)


# The gradients of a step: of its igates, its hgates, and what of those of its states does not come through the hgates.
# `after` and `before` are the states after and before it; `grads` are the gradients of those after it.


def _tanh_backward(igates: Tensor, hgates: Tensor, after: Steps, before: Steps, grads: Steps) -> tuple[Steps, Steps]:
    grad = _tanh_grad(grads[0], after[0])
    return (grad, grad), (torch.zeros_like(grads[0]),)


def _relu_backward(igates: Tensor, hgates: Tensor, after: Steps, before: Steps, grads: Steps) -> tuple[Steps, Steps]:
    grad = grads[0] * (after[0] > 0)
    return (grad, grad), (torch.zeros_like(grads[0]),)


def _gru_backward(igates: Tensor, hgates: Tensor, after: Steps, before: Steps, grads: Steps) -> tuple[Steps, Steps]:
    reset, update, new = _gru_gates(igates, hgates)
    grad_new = _tanh_grad(grads[0] * (1 - update), new)
    grad_update = _sigmoid_grad(grads[0] * (before[0] - new), update)
    grad_reset = _sigmoid_grad(grad_new * hgates.chunk(3, -1)[2], reset)
    inputs = torch.cat([grad_reset, grad_update, grad_new], -1)
    return (inputs, torch.cat([grad_reset, grad_update, grad_new * reset], -1)), (grads[0] * update,)


def _lstm_backward(igates: Tensor, hgates: Tensor, after: Steps, before: Steps, grads: Steps) -> tuple[Steps, Steps]:
    entered, forget, new, shown = _lstm_gates(igates, hgates)
    seen = after[1].tanh()
    cell = grads[1] + _tanh_grad(grads[0] * shown, seen)
    parts = [
        _sigmoid_grad(cell * new, entered),
        _sigmoid_grad(cell * before[1], forget),
        _tanh_grad(cell * entered, new),
        _sigmoid_grad(grads[0] * seen, shown),
    ]
    grad = torch.cat(parts, -1)
    return (grad, grad), (torch.zeros_like(grads[0]), cell * forget)


_CELLS: dict[str, tuple[Callable[..., Steps], Callable[..., tuple[Steps, Steps]]]] = {
    "tanh": (_tanh, _tanh_backward),
    "relu": (_relu, _relu_backward),
    "gru": (_gru, _gru_backward),
    "lstm": (_lstm, _lstm_backward),
}


def _order(steps: int, reverse: bool) -> list[int]:
    return list(range(steps))[:: -1 if reverse else 1]


def _within(lengths: Tensor | None, step: int, new: Steps, old: Sequence[Any]) -> Steps:
    """`new` in the rows that are longer than `step`, `old` in the others."""
    if lengths is None:
        return new
    longer = (lengths > step)[:, None]
    return tuple(torch.where(longer, *pair) for pair in zip(new, old, strict=True))


def _recurrence(
    igates: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor,
    lengths: Tensor | None,
    cell: str,
    reverse: bool,
) -> Tensor:
    """The states of a recurrent layer after each step.

    `igates` (steps, rows, gates) are the products of the inputs, `weight` (gates, hidden) and `bias` make those of the
    hidden state. `initial` (states, rows, hidden) has the hidden state before the first step, of an LSTM also the cell.
    Where a row has ended, by its length in `lengths`, its states stay as they are. The result is of shape (states,
    steps, rows, hidden).
    """
    states = igates.new_empty(initial.shape[0], igates.shape[0], *initial.shape[1:])
    before = initial.unbind()
    for step in _order(igates.shape[0], reverse):
        hgates = torch.nn.functional.linear(before[0], weight, bias)
        before = _within(lengths, step, _CELLS[cell][0](igates[step], hgates, *before), before)
        for index, state in enumerate(before):
            states[index, step] = state
    return states


def _recurrence_backward(
    grad: Tensor,
    igates: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor,
    lengths: Tensor | None,
    states: Tensor,
    cell: str,
    reverse: bool,
) -> list[Tensor]:
    """The gradients of `igates` and `initial`, and for a GRU of the hidden states' gates, which are else the first."""
    order = _order(igates.shape[0], reverse)
    hgates = torch.nn.functional.linear(before_steps(states[:1], initial[:1], reverse)[0], weight, bias)
    found = torch.empty_like(igates), torch.empty_like(igates) if cell == "gru" else None
    coming = tuple(torch.zeros_like(state) for state in initial)
    for index in reversed(range(len(order))):
        step = order[index]
        before = states[:, order[index - 1]] if index else initial
        grads = tuple(late + mine for late, mine in zip(coming, grad[:, step]))
        (inputs, hidden), direct = _CELLS[cell][1](igates[step], hgates[step], states[:, step], before, grads)
        coming = _within(lengths, step, (direct[0] + hidden @ weight, *direct[1:]), grads)
        for result, value in zip(found, _within(lengths, step, (inputs, hidden), (0.0, 0.0))):
            if result is not None:
                result[step] = value
    return [found[0], torch.stack(coming), *(result for result in found[1:] if result is not None)]


def before_steps(states: Tensor, initial: Tensor, reverse: bool) -> Tensor:
    """The states before each step, from those after each step."""
    parts = [states[:, 1:], initial.unsqueeze(1)] if reverse else [initial.unsqueeze(1), states[:, :-1]]
    return torch.cat(parts, 1)


_ARGUMENTS = "Tensor igates, Tensor weight, Tensor? bias, Tensor initial, Tensor? lengths"
register(
    f"recurrence({_ARGUMENTS}, str cell, bool reverse) -> Tensor",
    _recurrence,
    lambda igates, weight, bias, initial, *_: igates.new_empty(
        initial.shape[0], igates.shape[0], *initial.shape[1:]
    ),
)
register(
    f"recurrence_backward(Tensor grad, {_ARGUMENTS}, Tensor states, str cell, bool reverse) -> Tensor[]",
    _recurrence_backward,
    lambda grad, igates, weight, bias, initial, lengths, states, cell, reverse: [
        torch.empty_like(igates), torch.empty_like(initial), *([torch.empty_like(igates)] if cell == "gru" else [])
    ],
)  # fmt: skip


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, cell, reverse = inputs
    ctx.options = cell, reverse
    ctx.save_for_backward(*tensors, output)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    igates, weight, bias, initial, lengths, states = ctx.saved_tensors
    op = torch.ops.shardweave.recurrence_backward.default
    inputs, first, *others = op(grad, igates, weight, bias, initial, lengths, states, *ctx.options)
    gates = (others[0] if others else inputs).flatten(0, 1)
    before = before_steps(states[:1], initial[:1], ctx.options[-1])[0].flatten(0, 1)
    return inputs, gates.t() @ before, None if bias is None else gates.sum(0), first, None, None, None


torch.library.register_autograd("shardweave::recurrence", _gradients, setup_context=_save_for_backward, lib=LIBRARY)


@register_flop_formula(torch.ops.shardweave.recurrence)
def _recurrence_flops(igates: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * math.prod(igates) * weight[1])


@register_flop_formula(torch.ops.shardweave.recurrence_backward)
def _recurrence_backward_flops(grad: Any, igates: Any, weight: Any, *_: Any, **__: Any) -> int:
    """The gates of the hidden states again, and the gradients of these states."""
    return int(4 * math.prod(igates) * weight[1])


# -- the CTC loss, whose `log_alpha` torch makes as long as the longest target, which no graph can know


def _ctc_loss(log_probs: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The loss of each row, and `log_alpha` as for targets as long as `targets` (rows, length) are wide."""
    loss, alpha = aten._ctc_loss.Tensor(log_probs, targets, *rest)
    return loss, torch.nn.functional.pad(alpha, (0, 2 * targets.shape[1] + 1 - alpha.shape[2]))


_CTC = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
register(
    f"ctc_loss({_CTC}, int blank, bool zero_infinity) -> (Tensor, Tensor)",
    _ctc_loss,
    lambda log_probs, targets, *_: (
        log_probs.new_empty(log_probs.shape[1]),
        log_probs.new_empty(log_probs.shape[1], log_probs.shape[0], 2 * targets.shape[1] + 1),
    ),
)
register(
    f"ctc_loss_backward(Tensor grad, {_CTC}, Tensor loss, Tensor log_alpha, int blank, bool zero_infinity) -> Tensor",
    aten._ctc_loss_backward.Tensor,
    lambda grad, log_probs, *_: torch.empty_like(log_probs),
)


def _save_ctc(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)


def _ctc_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    op = torch.ops.shardweave.ctc_loss_backward.default
    return op(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), *[None] * 5


torch.library.register_autograd("shardweave::ctc_loss", _ctc_gradients, setup_context=_save_ctc, lib=LIBRARY)


# -- regions of ops between which sizes or numbers depend on the values of tensors (`compiler.capture` makes them)

REGION_NAMES = {
    "torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan, "math": math, "operator": operator,
    "getattr": getattr,
    **{f"math_{name}": function for name, function in vars(math).items() if callable(function)},
    **{function.__name__: function for function in (abs, float, int, max, min, pow, round)},
}  # fmt: skip
"""What the code of a region may refer to. Functions of numbers have the names that fx gives them."""


@cache
def _region_function(code: str) -> Callable[..., list[Tensor]]:
    names: dict[str, Any] = dict(REGION_NAMES)
    exec(code, names)  # written by a capture of this process or, from a saved graph, by an earlier one
    function: Callable[..., list[Tensor]] = names["region"]
    return function


def _region(inputs: list[Tensor], code: str, shapes: str, flops: int, scratch: int) -> list[Tensor]:
    """What the function `region` of `code` returns, as tensors of their own that are as `shapes` says."""
    results, taken = [], {tensor.untyped_storage()._cdata for tensor in inputs}
    for value in _region_function(code)(*inputs):
        aliased = value.untyped_storage()._cdata in taken
        results.append(value.clone(memory_format=torch.contiguous_format) if aliased else value.contiguous())
        taken.add(results[-1].untyped_storage()._cdata)
    found = ", ".join(" ".join([str(value.dtype)[6:], *map(str, value.shape)]) for value in results)
    if found != shapes:
        raise InputError(
            f"what is computed from a selection by values is {found}, but the captured step has {shapes}: the model "
            "combines the selection with a tensor of a fixed size, and this batch selects another number of elements"
        )
    return results


def _region_shapes(inputs: list[Tensor], code: str, shapes: str, flops: int, scratch: int) -> list[Tensor]:
    """Tensors as `shapes` lists them: ``"float32 16 8, int64"``."""
    made = []
    for described in shapes.split(", "):
        dtype, *sizes = described.split(" ")
        made.append(inputs[0].new_empty([int(size) for size in sizes], dtype=getattr(torch, dtype)))
    return made


register(
    "region(Tensor[] inputs, str code, str shapes, int flops, int scratch) -> Tensor[]", _region, _region_shapes
)


@register_flop_formula(torch.ops.shardweave.region)
def _region_flops(inputs: Any, code: str, shapes: str, flops: int, scratch: int, **_: Any) -> int:
    return flops
