"""Fused attention: batch and heads are free; the sequence is not, since causal masks count from the local start."""

from __future__ import annotations

import torch

from shardweave.passes.rules.registry import rule

aten = torch.ops.aten

rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    "b h [s] [d], b h [t] [d], b h [t] [e], b? h? [s]? [t] -> b h [s] [e], b h [s]",
)
rule(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    "b h [s] [e], b h [s] [d], b h [t] [d], b h [t] [e], b h [s] [e], b h [s], b? h? [s]? [t]"
    " -> b h [s] [d], b h [t] [d], b h [t] [e]",
)
