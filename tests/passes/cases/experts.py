"""Cases of products with one of many weights a row."""

from __future__ import annotations

import torch
from torch import Tensor

import shardweave.ops.convolution_and_moe  # noqa: F401  (registers the ops)
from tests.passes.cases.draw import Call, Draw, case

custom_ops = torch.ops.shardweave


def _rows(d: Draw) -> tuple[list[int], Tensor]:
    rows, k, n, experts = d.size(), d.size(), d.size(), d.size(among=[1, 2, 3, 4, 6, 8])
    return [rows, k, n, experts], d.integers(experts, rows)


@case(custom_ops.expert_mm.default)
def expert_mm(d: Draw) -> Call:
    (rows, k, n, experts), expert = _rows(d)
    return (d.tensor(rows, k), d.tensor(experts, k, n), expert), {}


@case(custom_ops.expert_outer.default)
def expert_outer(d: Draw) -> Call:
    (rows, k, n, experts), expert = _rows(d)
    return (d.tensor(rows, k), d.tensor(rows, n), expert, experts), {}
