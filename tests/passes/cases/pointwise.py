"""Pointwise ops: the registered ones, and a sample of those that torch tags so."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.passes.cases.draw import Call, Draw, case

aten = torch.ops.aten


def _pair(d: Draw) -> tuple[Tensor, Tensor]:
    size = d.sizes(0, 3)
    left, right = d.tensor(*size), d.positive(*d.broadcast(size))
    return (left, right)


@case(aten.add.Tensor, aten.sub.Tensor)
def add(d: Draw) -> Call:
    left, right = _pair(d)
    form = d.choice(["tensors", "scaled", "number"])
    if form == "number":
        return (left, 0.5), {}
    return (left, right), {"alpha": 2} if form == "scaled" else {}


@case(aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.minimum.default, aten.pow.Tensor_Tensor)
def binary(d: Draw) -> Call:
    left, right = _pair(d)
    return (left.abs() + 0.1, right), {}


@case(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar, aten.rsub.Scalar)
def with_number(d: Draw) -> Call:
    return (d.positive(*d.sizes(0, 3)), 2.5), {}


@case(
    aten.neg.default,
    aten.exp.default,
    aten.relu.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.silu.default,
    aten.erf.default,
    aten.cos.default,
    aten.sin.default,
    aten.abs.default,
    aten.hardtanh.default,
    aten.leaky_relu.default,
    aten.elu.default,
    aten.softplus.default,
    aten.hardswish.default,
)
def unary(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)),), {}


@case(aten.log.default, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default)
def unary_positive(d: Draw) -> Call:
    return (d.positive(*d.sizes(0, 3)),), {}


@case(aten.gelu.default)
def gelu(d: Draw) -> Call:
    return (d.tensor(*d.sizes(1, 3)),), {"approximate": d.choice(["none", "tanh"])}


@case(aten.gelu_backward.default)
def gelu_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.tensor(*size)), {"approximate": d.choice(["none", "tanh"])}


@case(aten.silu_backward.default, aten.tanh_backward.default, aten.sigmoid_backward.default)
def unary_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.tensor(*size)), {}


@case(aten.threshold_backward.default)
def threshold_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.tensor(*size), 0), {}


@case(aten.hardtanh_backward.default)
def hardtanh_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.tensor(*size), -0.5, 0.7), {}


@case(aten.leaky_relu_backward.default)
def leaky_relu_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.tensor(*size), 0.1, False), {}


@case(aten.elu_backward.default)
def elu_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), 1.0, 1.0, 1.0, False, d.tensor(*size)), {}


@case(aten.softplus_backward.default)
def softplus_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.tensor(*size), 1.0, 20.0), {}


@case(aten.native_dropout_backward.default)
def dropout_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.mask(*size), 1.25), {}


@case(aten._to_copy.default)
def to_copy(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)),), {"dtype": d.choice([torch.float32, torch.float64])}


@case(aten.masked_fill.Scalar)
def masked_fill(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.mask(*d.broadcast(size)), -1.0), {}


@case(aten.masked_fill.Tensor)
def masked_fill_tensor(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.mask(*d.broadcast(size)), d.tensor()), {}


@case(aten.where.self)
def where(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.mask(*d.broadcast(size)), d.tensor(*d.broadcast(size)), d.tensor(*size)), {}


@case(aten.lt.Scalar, aten.eq.Scalar, aten.ge.Scalar)
def compare(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)), 0.1), {}


@case(aten.logical_not.default)
def logical_not(d: Draw) -> Call:
    return (d.mask(*d.sizes(0, 3)),), {}


@case(aten.logical_and.default, aten.logical_or.default)
def logical(d: Draw) -> Call:
    size = d.sizes(0, 3)
    return (d.mask(*size), d.mask(*d.broadcast(size))), {}


@case(aten.complex.default, aten.polar.default)
def from_two_reals(d: Draw) -> Call:
    return _pair(d), {}


@case(
    aten._conj_physical.default,
    aten._conj.default,
    aten._neg_view.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
)
def of_complex(d: Draw) -> Call:
    return (d.complex(*d.sizes(0, 3)),), {}
