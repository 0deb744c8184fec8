"""Cases of products with one of many weights a row, of recurrent layers, the CTC loss, and matrices side by side."""

from __future__ import annotations

import torch
from torch import Tensor

import shardweave.ops.layer_ops  # noqa: F401  (registers the ops)
from tests.passes.cases.draw import Call, Draw, case

aten, custom_ops = torch.ops.aten, torch.ops.shardweave


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
    lengths = d.choice([None, 1 + d.integers(steps, rows)])
    arguments = d.tensor(steps, rows, gates), d.tensor(gates, hidden), bias, d.tensor(states, rows, hidden), lengths
    return (arguments, {}), cell, [states, steps, rows, hidden]


@case(custom_ops.recurrence.default)
def recurrence(d: Draw) -> Call:
    (arguments, _), cell, _ = _recurrent(d)
    return (*arguments, cell, d.flag()), {}


@case(custom_ops.recurrence_backward.default)
def recurrence_backward(d: Draw) -> Call:
    (arguments, _), cell, size = _recurrent(d)
    return (d.tensor(*size), *arguments, d.tensor(*size), cell, d.flag()), {}


def _alignment(d: Draw) -> tuple[Tensor, ...]:
    steps, rows, labels, length = d.size() + 8, d.size(), d.size() + 1, d.size(among=[1, 2, 4])
    log_probs = d.tensor(steps, rows, labels).log_softmax(-1)
    full = torch.full((rows,), steps), torch.full((rows,), length)  # torch leaves what is beyond the lengths unset
    return log_probs, 1 + d.integers(labels - 1, rows, length), *full


@case(custom_ops.ctc_loss.default)
def ctc_loss(d: Draw) -> Call:
    return (*_alignment(d), 0, d.flag()), {}


@case(custom_ops.ctc_loss_backward.default)
def ctc_loss_backward(d: Draw) -> Call:
    arguments, zero_infinity = _alignment(d), d.flag()
    results = custom_ops.ctc_loss.default(*arguments, 0, zero_infinity)
    return (d.tensor(arguments[0].shape[1]), *arguments, *results, 0, zero_infinity), {}


def _matrices(d: Draw) -> Tensor:
    """Symmetric and positive definite, so that no result jumps."""
    size = d.size()
    made = d.tensor(*d.sizes(0, 2), size, size)
    return made @ made.mT + (1 + torch.arange(size, dtype=made.dtype)) * torch.eye(size, dtype=made.dtype)


@case(aten._linalg_det.default, aten._linalg_slogdet.default, aten._linalg_eigh.default, aten.linalg_inv_ex.default)
@case(aten.linalg_cholesky_ex.default, aten.linalg_lu_factor_ex.default, aten._linalg_svd.default)
@case(aten.linalg_qr.default)
def matrices(d: Draw) -> Call:
    return (_matrices(d) / 8,), {}


@case(custom_ops.checked_matrices.default)
def checked(d: Draw) -> Call:
    matrices = _matrices(d)
    *_, info = torch.linalg.inv_ex(matrices)
    return (d.choice([matrices, matrices[..., 0]]), info, "linalg.inv", info.dim() == 0), {}


@case(custom_ops.asserted.default)
def asserted(d: Draw) -> Call:
    value = d.tensor(*d.sizes(1, 3))
    return (value, d.choice([value, value.sum()]) < 1e9, True, "small"), {}


@case(aten._linalg_solve_ex.default)
def solve(d: Draw) -> Call:
    matrix = _matrices(d)
    return (matrix, d.tensor(*d.choice([matrix.shape[:-1], (*matrix.shape[:-1], 3), matrix.shape[-1:]]))), {}


@case(aten.linalg_solve_triangular.default)
def solve_triangular(d: Draw) -> Call:
    matrix = _matrices(d)
    return (matrix, d.tensor(*matrix.shape[:-1], 3)), {"upper": d.flag()}


@case(aten.linalg_lu_solve.default)
def lu_solve(d: Draw) -> Call:
    matrix = _matrices(d)
    return (*torch.linalg.lu_factor(matrix), d.tensor(*matrix.shape[:-1], 3)), {}


@case(aten._cdist_forward.default)
def distances(d: Draw) -> Call:
    first, second, width, *batch = d.sizes(3, 5)
    return (d.tensor(*batch, first, width), d.tensor(*batch, second, width), d.choice([1.0, 2.0]), None), {}


@case(custom_ops.region.default)
def region(d: Draw) -> Call:
    """The sum of the rows of which another value is positive, and a pointwise result."""
    rows, width = d.size(), d.size()
    code = """def region(a0, a1):
    v0 = torch.ops.aten.index.Tensor(a0, [torch.ops.aten.gt.Scalar(a1, 0)])
    return [v0.sum(0), torch.ops.aten.relu.default(a0)]"""
    x = d.tensor(rows, width)
    dtype = str(x.dtype).removeprefix("torch.")
    return ([x, d.tensor(rows)], code, f"{dtype} {width}, {dtype} {rows} {width}", 0, 0), {}
