"""Cases of products with one of many weights a row, and of recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor

import shardweave.ops.layer_ops  # noqa: F401  (registers the ops)
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


GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}


def _recurrent(d: Draw) -> tuple[Call, str, list[int]]:
    cell = d.choice([*GATES])
    states, (steps, rows, hidden) = 2 if cell == "lstm" else 1, (d.size(), d.size(), d.size())
    gates = hidden * GATES[cell]
    bias = d.choice([None, d.tensor(gates)])
    arguments = d.tensor(steps, rows, gates), d.tensor(gates, hidden), bias, d.tensor(states, rows, hidden)
    return (arguments, {}), cell, [states, steps, rows, hidden]


@case(custom_ops.recurrence.default)
def recurrence(d: Draw) -> Call:
    (arguments, _), cell, _ = _recurrent(d)
    return (*arguments, cell, d.flag()), {}


@case(custom_ops.recurrence_backward.default)
def recurrence_backward(d: Draw) -> Call:
    (arguments, _), cell, size = _recurrent(d)
    return (d.tensor(*size), *arguments, d.tensor(*size), cell, d.flag()), {}
