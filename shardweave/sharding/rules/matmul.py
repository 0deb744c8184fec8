"""Rules of matrix products, of ops that are linear in their input, of products with experts' weights, and of attention.

Matrix products
    Three loops; one of them is contracted.

Linear ops
    A linear op of a partial sum is a partial sum. A sum over micro-batches is complete only after the last one. It
    passes through linear ops up to the gradient or the loss that is accumulated.

Mixtures of experts
    The expert is a contracted factor, like the vocabulary of an embedding. A rank that holds some experts computes the
    rows of these experts. The other rows are zero, an ``"own"`` partial result. The next product with experts of the
    same rank reads only its own rows, so nothing is communicated between the two. Over an axis that shards the tokens,
    this is expert parallelism.

Fused attention
    Batch and heads are free. Query heads are ``(h r)``: `h` key-value heads, each with the `r` queries that share it
    (grouped and multi-query attention). Where `r` is sharded, the gradients of key and value are partial sums. Keys are
    blocked, as the softmax runs over them. Queries are blocked under a causal mask, which counts rows from the local
    start. Otherwise they are free, and the gradients of key and value are partial sums over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.ir import BoundRule, RuleError, axes_size
from shardweave.sharding.rules.registry import (
    RULES,
    Emitter,
    Factors,
    Rule,
    argument,
    argument_names,
    bind,
    bind_pattern,
    call_with,
    family,
    ordered_args,
    output_shapes,
    parse,
    register_decomposition,
    rule,
    shape,
    tensor_args,
)

aten = torch.ops.aten

rule(aten.mm.default, "m k, k n -> m n")
rule(aten.bmm.default, "b m k, b k n -> b m n")
rule(aten.dot.default, "k, k -> ")
rule(aten.mv.default, "m k, k -> m")


def _plus_bias(product: Tensor, bias: Tensor, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


@register_decomposition(aten.addmm.default)
def addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The product, then the bias: each part of a split ``k`` would add the bias again."""
    return _plus_bias(aten.mm.default(left, right), bias, beta, alpha)


@register_decomposition(aten.baddbmm.default)
def baddbmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """As `addmm`, for each of a batch."""
    return _plus_bias(aten.bmm.default(left, right), bias, beta, alpha)


@register_decomposition(aten.addbmm.default)
def addbmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """As `baddbmm`, summed over the batch."""
    return _plus_bias(aten.sum.dim_IntList(aten.bmm.default(left, right), [0]), bias, beta, alpha)


@register_decomposition(aten.addr.default)
def addr(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """An outer product, and the bias."""
    return _plus_bias(left.unsqueeze(1) * right, bias, beta, alpha)


LINEAR_IN_FIRST = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.expand.default, aten.squeeze.dim, aten.unsqueeze.default, aten.clone.default,
    aten.mul.Scalar, aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim,
    aten._to_copy.default, aten.slice_backward.default, aten.select_backward.default, aten.div.Scalar,
    aten.detach.default, aten.alias.default, aten.div.Tensor, aten._conj.default, aten._conj_physical.default,
    aten.view_as_real.default, aten.view_as_complex.default, aten._fft_c2c.default, aten._fft_r2c.default,
    aten._fft_c2r.default,
}  # fmt: skip
"""Ops that are linear in their first argument."""
LINEAR_GRADIENTS = {
    aten.embedding_dense_backward.default, aten.native_layer_norm_backward.default,
    aten._fused_rms_norm_backward.default, aten.threshold_backward.default, aten.gelu_backward.default,
    aten.silu_backward.default, aten.tanh_backward.default, aten.sigmoid_backward.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.tril.default, aten.triu.default,
    aten.flip.default, aten.roll.default, aten.select.int, aten.slice.Tensor,
}  # fmt: skip
"""Gradients, and ops that pick or move entries, are linear in their first argument, too."""
LINEAR_IN_EACH = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}
"""Ops that are linear in each of their two arguments while the other one is fixed."""
LINEAR_TOGETHER = {
    aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default, aten.slice_scatter.default,
    aten.select_scatter.default,
}  # fmt: skip
"""Ops that are linear in all their tensors together."""


def masks_with_zeros(node: fx.Node) -> bool:
    """Whether an op replaces entries by zeros: it is linear in the others."""
    if node.target is aten.masked_fill.Scalar:
        return bool(argument(node, "value") == 0)
    return node.target is aten.where.self and any(_is_zero(value) for value in node.args[1:])


def linear_in(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """The sets of tensor arguments in which an op is linear; it is linear in all arguments of a set together.

    >>> graph = fx.Graph()
    >>> x, y = graph.placeholder("x"), graph.placeholder("y")
    >>> for node in (x, y):
    ...     node.meta["val"] = torch.empty(2)
    >>> call = graph.call_function
    >>> linear_in(call(aten.mul.Tensor, (x, y))), linear_in(call(aten.add.Tensor, (x, y)))
    (((0,), (1,)), ((0, 1),))
    >>> linear_in(call(aten.exp.default, (x,))), linear_in(call(aten.add.Tensor, (x, 1)))
    ((), ())
    >>> zero = call(aten.scalar_tensor.default, (0,))
    >>> zero.meta["val"] = torch.tensor(0)
    >>> linear_in(call(aten.where.self, (y, x, zero)))
    ((1,),)
    """
    count = len(tensor_args(node))
    if node.target is aten._to_copy.default and not _is_floating(node.kwargs.get("dtype")):
        return ()
    pads_zeros = node.target is aten.constant_pad_nd.default and argument(node, "value") == 0
    if node.target in LINEAR_IN_FIRST or node.target in LINEAR_GRADIENTS or pads_zeros:
        return ((0,),)
    if masks_with_zeros(node):
        return ((2 if node.target is aten.where.self and _is_zero(node.args[1]) else count - 2,),)
    if node.target in LINEAR_IN_EACH:
        return tuple((index,) for index in range(count))
    if node.target in LINEAR_TOGETHER:
        adds_number = count < 2 and node.target in (aten.add.Tensor, aten.sub.Tensor)
        return () if adds_number else (tuple(range(count)),)
    return ()


def _is_zero(value: object) -> bool:
    """Whether a value of the graph is a constant of zeros."""
    if not isinstance(value, fx.Node):
        return False
    if value.target in (aten.full.default, aten.scalar_tensor.default):
        return bool(argument(value, "fill_value" if value.target is aten.full.default else "s") == 0)
    return value.target is aten.zeros.default


def _is_floating(dtype: object) -> bool:
    return dtype is None or (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex))


def _lower_experts(emit: Emitter, experts: int, *rest: Any) -> fx.Node:
    """Number experts from the first one of this rank, so that those of other ranks are out of range."""
    axes = [axis for axis, name in emit.assignment.items() if name.split(".")[0] == "e"]
    first, second, expert = emit.args[:3]
    if axes:
        expert = emit.call(aten.sub.Tensor, expert, emit.offset(axes, experts))
    return emit.call(emit.node.target, first, second, expert, *rest, axes_size(axes))


def lower_expert_mm(emit: Emitter) -> fx.Node:
    """Compute the rows of this rank's experts."""
    return _lower_experts(emit, emit.input_layouts[1].local_shape[0])


def lower_expert_outer(emit: Emitter) -> fx.Node:
    """Compute the gradients of this rank's experts."""
    experts = emit.output_layouts[0].local_shape[0]
    return _lower_experts(emit, experts, experts)


rule(
    torch.ops.shardweave.expert_mm.default,
    "s k, e k n, s -> s n",
    reduce={"e": "own"},
    owned={"e": (0,)},
    lower=lower_expert_mm,
)
rule(torch.ops.shardweave.expert_outer.default, "s k, s n, s -> e k n", owned={"e": (0, 1)}, lower=lower_expert_outer)

rule(torch.ops.shardweave.recurrence.default, "[s] b [g], [g] [h], [g], [k] b [h], b -> [k] [s] b [h]")
_RECURRENCE_BACKWARD = "[k] [s] b [h], [s] b [g], [g] [h], [g], [k] b [h], b, [k] [s] b [h] -> [s] b [g], [k] b [h]"


def bind_recurrence_backward(node: fx.Node) -> BoundRule:
    """The gradients of both kinds of gates, where there are two."""
    return bind_pattern(node, _RECURRENCE_BACKWARD + ", [s] b [g]" * (len(node.meta["val"]) - 2))


family(
    [torch.ops.shardweave.recurrence_backward.default],
    bind_recurrence_backward,
    "the gradients of igates and initial, for a GRU of both kinds of gates, in the same loops; blocked: all but `b`",
)


def bind_batched_matrices(node: fx.Node) -> BoundRule:
    """A loop for each dimension before the last two of the first argument; all is blocked where others broadcast."""
    first, *others = map(shape, tensor_args(node))
    results = output_shapes(node)
    batch = first[:-2]
    aligned = all(len(size) == len(first) or size == first[:-1] for size in others) and all(
        size[: len(batch)] == batch for size in (*others, *results)
    )
    factors = Factors()
    rows = [factors.new(size) for size in batch] if aligned else []

    def dims(size: Sequence[int]) -> list[tuple[str, ...]]:
        return [*rows, *(factors.new(length, blocked=True) for length in size[len(rows) :])]

    return factors.rule(map(dims, [first, *others]), map(dims, results))


BATCHED_MATRICES = [
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten._linalg_solve_ex.default,
    aten._linalg_svd.default,
    aten._linalg_eigh.default,
    aten.linalg_inv_ex.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_lu_solve.default,
    aten.linalg_solve_triangular.default,
    aten.linalg_qr.default,
    aten._cdist_forward.default,
]
family(
    BATCHED_MATRICES, bind_batched_matrices, "matrices side by side; blocked: their own two dimensions, and all else"
)


def bind_checked(node: fx.Node) -> BoundRule:
    """The dimensions of flags and error codes are the first ones of the checked value."""
    value, flags = map(shape, tensor_args(node))
    factors = Factors()
    names = [factors.new(size) for size in value]
    return factors.rule([names, names[: len(flags)]], [names])


family(
    [torch.ops.shardweave.checked_matrices.default, torch.ops.shardweave.asserted.default],
    bind_checked,
    "a value with a flag for each element, or an error code for each matrix; blocked: nothing",
)


ATTENTION_FORWARD = [
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
]
ATTENTION_BACKWARD = [
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
]
ATTENTION_PATTERNS = {
    "query": "b (h r) {s} [d]",
    "key": "b h [t] [d]",
    "value": "b h [t] [e]",
    "out": "b (h r) {s} [e]",
    "logsumexp": "b (h r) {s}",
    "mask": "b? (h? r?) {s}? [t]?",
}
ATTENTION_ROLES = {"grad_out": "out", "grad_out_": "out", "attn_mask": "mask", "attn_bias": "mask"}
ATTENTION_RESULTS = ("out", "logsumexp")
ATTENTION_GRADIENTS = ("query", "key", "value", "mask")
ATTENTION_LENGTHS = {"max_q": "query", "max_k": "key"}


def bind_attention(node: fx.Node) -> BoundRule:
    """Bind each value by its role in the schema. Seeds and other random states belong to one rank."""
    assert isinstance(node.target, torch._ops.OpOverload)
    # The efficient kernel pads the rows of its logsumexp to 32: the rows of a part are no slice of all rows.
    padded = "efficient" in str(node.target)
    rows = "[s]" if padded or argument(node, "is_causal") else "s"

    def pattern(role: str, rank: int, number: int) -> str:
        if role == "logsumexp" and padded:
            return "b (h r) [l]"
        text = ATTENTION_PATTERNS.get(role, "").format(s=rows)
        if role == "mask":
            return " ".join(text.replace("h? r?", "h?_r?").split()[-rank:]).replace("_", " ")
        return text + " 1" * (role == "logsumexp" and rank == 4) or " ".join(f"[z{number}_{d}]" for d in range(rank))

    given = [(role, shape(value)) for role, value in _by_role(node) if value in tensor_args(node)]
    results = ATTENTION_RESULTS if node.target in ATTENTION_FORWARD else ATTENTION_GRADIENTS
    values = node.meta["val"]
    roles = [*results, *("state" for _ in values[len(results) :])]
    made = [(role, tuple(value.shape)) for role, value in zip(roles, values) if isinstance(value, torch.Tensor)]
    texts = [pattern(role, len(size), number) for number, (role, size) in enumerate([*given, *made])]
    parsed = parse(f"{', '.join(texts[: len(given)])} -> {', '.join(texts[len(given) :])}")
    rule = bind(parsed, [size for _, size in given], [size for _, size in made], {})
    return replace(rule, never_partial=frozenset(index for index, (role, _) in enumerate(made) if role == "state"))


def _by_role(node: fx.Node) -> list[tuple[str, Any]]:
    """The arguments with their roles in attention: schemas name them differently."""
    pairs = zip(argument_names(node), ordered_args(node))
    return [(ATTENTION_ROLES.get(name, name), value) for name, value in pairs]


def lower_attention(emit: Emitter) -> fx.Node:
    """The op on local tensors; the backward gets the lengths of the local sequences."""
    names = argument_names(emit.node)
    lengths = {name: shape(emit.args[names.index(role)])[2] for name, role in ATTENTION_LENGTHS.items()}
    return call_with(emit, **lengths)


def forward_of(node: fx.Node) -> fx.Node | None:
    """The forward of a backward with dropout, which draws the same mask again from the seed of the forward.

    With different assignments the two would draw different masks.
    """
    if argument(node, "dropout_p") == 0:
        return None
    found = dict(_by_role(node))["logsumexp"]
    while found.target not in ATTENTION_FORWARD:
        if not found.all_input_nodes:
            raise RuleError(f"{node.target}: what it reads comes from no attention that shardweave knows")
        found = found.all_input_nodes[0]
    assert isinstance(found, fx.Node)
    return found


_BLOCKED = "; blocked: keys `t` and head sizes `d`, `e`; queries `s` too where causal or in the efficient kernel"
for _target in ATTENTION_FORWARD:
    _source = f"query `b (h r) s d`, key `b h t d`, value `b h t e` -> out `b (h r) s e`{_BLOCKED}"
    RULES[_target] = Rule(bind_attention, lower_attention, source=_source)
for _target in ATTENTION_BACKWARD:
    _source = f"the gradients of query, key, value and mask, in the same loops{_BLOCKED}"
    RULES[_target] = Rule(bind_attention, lower_attention, source=_source, partner=forward_of)
