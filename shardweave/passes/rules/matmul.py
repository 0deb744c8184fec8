"""Matrix products: three loops, one of them contracted."""

from __future__ import annotations

import torch

from shardweave.passes.rules.registry import rule

aten = torch.ops.aten

rule(aten.mm.default, "m k, k n -> m n")
rule(aten.bmm.default, "b m k, b k n -> b m n")
rule(aten.dot.default, "k, k -> ")
rule(aten.mv.default, "m k, k -> m")
