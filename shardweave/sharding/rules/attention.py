"""Fused attention: batch and heads are free, and so are the queries where no row is told apart by its number.

Query heads are ``(h r)``: `h` key-value heads, each with the `r` queries that share it (grouped and multi-query
attention), both free; where `r` is split, the gradients of key and value are partial sums. Keys are blocked, as the
softmax runs over them. Queries are blocked under a causal mask, which counts rows from the local start, and free
otherwise, the gradients of key and value being partial sums over them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardweave.ir import BoundRule, RuleError
from shardweave.sharding.rules.grammar import bind, parse
from shardweave.sharding.rules.registry import RULES, Emitter, Rule, argument, ordered_args, shape, tensor_args

aten = torch.ops.aten

FORWARD = [
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
]
BACKWARD = [
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
]
PATTERNS = {
    "query": "b (h r) {s} [d]",
    "key": "b h [t] [d]",
    "value": "b h [t] [e]",
    "out": "b (h r) {s} [e]",
    "logsumexp": "b (h r) {s}",
    "mask": "b? (h? r?) {s}? [t]?",
}
ROLES = {"grad_out": "out", "grad_out_": "out", "attn_mask": "mask", "attn_bias": "mask"}
RESULTS = ("out", "logsumexp")
GRADIENTS = ("query", "key", "value", "mask")
LENGTHS = {"max_q": "query", "max_k": "key"}


def bind_attention(node: fx.Node) -> BoundRule:
    """The pattern of each value by its role in the schema; seeds and the like are states of one rank."""
    assert isinstance(node.target, torch._ops.OpOverload)
    # The efficient kernel pads the rows of its logsumexp to 32, so that a part's are no slice of the whole one's.
    padded = "efficient" in str(node.target)
    rows = "[s]" if padded or argument(node, "is_causal") else "s"

    def pattern(role: str, rank: int, number: int) -> str:
        if role == "logsumexp" and padded:
            return "b (h r) [l]"
        text = PATTERNS.get(role, "").format(s=rows)
        if role == "mask":
            return " ".join(text.replace("h? r?", "h?_r?").split()[-rank:]).replace("_", " ")
        return text + " 1" * (role == "logsumexp" and rank == 4) or " ".join(f"[z{number}_{d}]" for d in range(rank))

    given = [(role, shape(value)) for role, value in _by_role(node) if value in tensor_args(node)]
    results = RESULTS if node.target in FORWARD else GRADIENTS
    values = node.meta["val"]
    roles = [*results, *("state" for _ in values[len(results) :])]
    made = [(role, tuple(value.shape)) for role, value in zip(roles, values) if isinstance(value, torch.Tensor)]
    texts = [pattern(role, len(size), number) for number, (role, size) in enumerate([*given, *made])]
    parsed = parse(f"{', '.join(texts[: len(given)])} -> {', '.join(texts[len(given) :])}")
    rule = bind(parsed, [size for _, size in given], [size for _, size in made], {})
    return replace(rule, apart=frozenset(index for index, (role, _) in enumerate(made) if role == "state"))


def _by_role(node: fx.Node) -> list[tuple[str, Any]]:
    """The arguments with what they are to attention: the names of schemas differ a little."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [declared.name for declared in node.target._schema.arguments]
    return [(ROLES.get(name, name), value) for name, value in zip(names, ordered_args(node))]


def lower_attention(emit: Emitter) -> fx.Node:
    """The op on local tensors; the backward is told how long the local sequences are."""
    target, args = emit.node.target, list(emit.args)
    assert isinstance(target, torch._ops.OpOverload)
    names = [declared.name for declared in target._schema.arguments]
    lengths = {name: shape(emit.args[names.index(role)])[2] for name, role in LENGTHS.items()}
    args = [lengths.get(name, value) for name, value in zip(names, args)]
    return emit.call(target, *args, **emit.kwargs)


def forward_of(node: fx.Node) -> fx.Node | None:
    """The forward that a backward with dropout belongs to: the mask is drawn again from the seed that it kept.

    Two assignments would draw two masks.
    """
    if argument(node, "dropout_p") == 0:
        return None
    found = dict(_by_role(node))["logsumexp"]
    while found.target not in FORWARD:
        if not found.all_input_nodes:
            raise RuleError(f"{node.target}: what it reads comes from no attention that shardweave knows")
        found = found.all_input_nodes[0]
    assert isinstance(found, fx.Node)
    return found


_BLOCKED = "; blocked: keys `t` and head sizes `d`, `e`; queries `s` too where causal or in the efficient kernel"
for _target in FORWARD:
    _source = f"query `b (h r) s d`, key `b h t d`, value `b h t e` -> out `b (h r) s e`{_BLOCKED}"
    RULES[_target] = Rule(bind_attention, lower_attention, source=_source)
for _target in BACKWARD:
    _source = f"the gradients of query, key, value and mask, in the same loops{_BLOCKED}"
    RULES[_target] = Rule(bind_attention, lower_attention, source=_source, partner=forward_of)
