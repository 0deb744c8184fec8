"""Ops that draw numbers. They keep another law than the others (see `test_random_ops`), for which they say how likely a
result is not above some value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.passes.cases.draw import Call, Draw, case

aten = torch.ops.aten
RANDOM: dict[Any, tuple[float, float]] = {}
"""For each op a value, and the probability that what it draws is not above it."""


def drawing(value: float, chance: float, *targets: Any) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
    """Enter a case whose drawn numbers are with this chance not above `value`."""
    RANDOM.update(dict.fromkeys(targets, (value, chance)))
    return case(*targets)


def _many(d: Draw) -> list[int]:
    """A shape with so many steps that two parts are alike by no chance."""
    return [d.choice([6, 8, 12]), d.choice([1, 4]), d.choice([36, 48])]


def _like(d: Draw, value: float) -> torch.Tensor:
    return torch.full(_many(d), value, dtype=d.dtype)


def _created(d: Draw) -> dict[str, Any]:
    return {"dtype": d.dtype, "device": torch.device("cpu"), "pin_memory": False}


@drawing(0, 0.3, aten.native_dropout.default)
def native_dropout(d: Draw) -> Call:
    return (_like(d, 2.0), 0.3, True), {}


@drawing(0, 0.25, aten.bernoulli.default)
def bernoulli(d: Draw) -> Call:
    return (_like(d, 0.75),), {}


@drawing(0, 0.25, aten.bernoulli.p)
def bernoulli_p(d: Draw) -> Call:
    return (_like(d, 3.0), 0.75), {}


@drawing(0.25, 0.25, aten.rand_like.default)
def rand_like(d: Draw) -> Call:
    return (_like(d, 1.0),), {"pin_memory": False}


@drawing(0, 0.5, aten.randn_like.default)
def randn_like(d: Draw) -> Call:
    return (_like(d, 1.0),), {"pin_memory": False}


@drawing(1, 0.4, aten.randint_like.default)
def randint_like(d: Draw) -> Call:
    return (_like(d, 1.0), 5), {"pin_memory": False}


@drawing(2, 0.25, aten.randint_like.low_dtype)
def randint_like_low(d: Draw) -> Call:
    return (_like(d, 1.0), 2, 6), {"pin_memory": False}


@drawing(2, 0.25, aten.uniform.default)
def uniform(d: Draw) -> Call:
    return (_like(d, 1.0), 1.0, 5.0), {}


@drawing(3, 0.5, aten.normal_functional.default)
def normal_functional(d: Draw) -> Call:
    return (_like(d, 1.0), 3.0, 2.0), {}


@drawing(3, 0.5, aten.normal.Tensor_float)
def normal_around(d: Draw) -> Call:
    return (_like(d, 3.0), 2.0), {}


@drawing(3, 0.5, aten.normal.float_Tensor)
def normal_wide(d: Draw) -> Call:
    return (3.0, _like(d, 2.0)), {}


@drawing(3, 0.5, aten.normal.Tensor_Tensor)
def normal_of_two(d: Draw) -> Call:
    mean = _like(d, 3.0)
    return (mean, torch.full(mean.shape[-1:], 2.0, dtype=d.dtype) if d.flag() else mean / 2), {}


@drawing(math.log(2), 0.5, aten.exponential.default)
def exponential(d: Draw) -> Call:
    return (_like(d, 1.0),), {}


@drawing(1, 0.4, aten.geometric.default)
def geometric(d: Draw) -> Call:
    return (_like(d, 1.0), 0.4), {}


@drawing(0, 0.5, aten.cauchy.default)
def cauchy(d: Draw) -> Call:
    return (_like(d, 1.0),), {}


@drawing(math.e, 0.5, aten.log_normal.default)
def log_normal(d: Draw) -> Call:
    return (_like(d, 0.0), 1.0, 2.0), {}


@drawing(0, math.exp(-1), aten.poisson.default)
def poisson(d: Draw) -> Call:
    return (_like(d, 1.0),), {}


@drawing(0, 0.25, aten.binomial.default)
def binomial(d: Draw) -> Call:
    count = _like(d, 2.0)
    return (count, count / 4), {}


@drawing(-0.25, 0.5, aten.rrelu_with_noise_functional.default)
def rrelu(d: Draw) -> Call:
    x = _like(d, -1.0)
    return (x, torch.zeros_like(x), 0.125, 0.375, True), {}


@drawing(0.25, 0.25, aten.rand.default)
def rand(d: Draw) -> Call:
    return (_many(d),), _created(d)


@drawing(0, 0.5, aten.randn.default)
def randn(d: Draw) -> Call:
    return (_many(d),), _created(d)


@drawing(1, 0.4, aten.randint.default)
def randint(d: Draw) -> Call:
    return (5, _many(d)), _created(d)


@drawing(2, 0.25, aten.randint.low)
def randint_low(d: Draw) -> Call:
    return (2, 6, _many(d)), _created(d)


@drawing(3, 0.5, aten.normal.float_float)
def normal(d: Draw) -> Call:
    return (3.0, 2.0, _many(d)), _created(d)


@drawing(99, 0.5, aten.randperm.default)
def randperm(d: Draw) -> Call:
    return (200,), {"device": torch.device("cpu"), "pin_memory": False}


@drawing(0, 0.2, aten.multinomial.default)
def multinomial(d: Draw) -> Call:
    rows = d.choice([180, 240])
    weights = torch.tensor([0.2, 0.5, 0.0, 0.3], dtype=d.dtype).expand(rows, 4).contiguous()
    return (weights, 6, True), {}


# What reads what was drawn, and what is drawn into, are ordinary ops.


@case(aten.rrelu_with_noise_backward.default)
def rrelu_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.tensor(*size), d.tensor(*size), 0.125, 0.375, True, False), {}
