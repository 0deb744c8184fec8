"""Random calls of every op that has a rule: one entry an op, drawn by hypothesis."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

aten = torch.ops.aten
Call = tuple[tuple[Any, ...], dict[str, Any]]
CASES: dict[Any, Callable[[Draw], Call]] = {}
SIZES = [1, 2, 3, 4, 5, 6, 8, 12]


class Draw:
    """What a case draws from: hypothesis chooses sizes and flags, a generator seeded by it the numbers."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.seed = data.draw(st.integers(0, 10**6), label="seed")
        self.generator = torch.Generator().manual_seed(self.seed)
        self.rng = random.Random(self.seed)
        self.dtype = self.choice([torch.float32, torch.float64])

    def choice(self, options: list[Any]) -> Any:
        return self.data.draw(st.sampled_from(options))

    def flag(self) -> bool:
        return bool(self.choice([False, True]))

    def size(self, *, among: list[int] = SIZES) -> int:
        return int(self.choice(among))

    def sizes(self, least: int, most: int | None = None) -> list[int]:
        count = self.data.draw(st.integers(least, most if most is not None else least))
        return [self.size() for _ in range(count)]

    def tensor(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, dtype=self.dtype)

    def positive(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, dtype=self.dtype) + 0.5

    def integers(self, below: int, *size: int) -> Tensor:
        return torch.randint(0, below, size, generator=self.generator)

    def mask(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator) < 0.4

    def dim(self, rank: int) -> int:
        """A dimension, counted from the front or the back."""
        return int(self.choice(list(range(-rank, rank))))

    def broadcast(self, size: list[int]) -> list[int]:
        """A shape that broadcasts to `size`: some dimensions 1, some leading ones left out."""
        return [1 if self.flag() else length for length in size][self.choice(list(range(len(size) + 1))) :]


def case(*targets: Any) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
    def register(function: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
        for target in targets:
            assert target not in CASES
            CASES[target] = function
        return function

    return register


# -- products


@case(aten.mm.default)
def mm(d: Draw) -> Call:
    m, k, n = d.sizes(3)
    return (d.tensor(m, k), d.tensor(k, n)), {}


@case(aten.addmm.default)
def addmm(d: Draw) -> Call:
    m, k, n = d.sizes(3)
    scales = {"beta": 0.5, "alpha": 3.0} if d.flag() else {}
    return (d.tensor(*d.choice([[n], [m, n]])), d.tensor(m, k), d.tensor(k, n)), scales


@case(aten.bmm.default)
def bmm(d: Draw) -> Call:
    b, m, k, n = d.sizes(4)
    return (d.tensor(b, m, k), d.tensor(b, k, n)), {}


@case(aten.dot.default)
def dot(d: Draw) -> Call:
    (k,) = d.sizes(1)
    return (d.tensor(k), d.tensor(k)), {}


@case(aten.mv.default)
def mv(d: Draw) -> Call:
    m, k = d.sizes(2)
    return (d.tensor(m, k), d.tensor(k)), {}


# -- attention


def _attention(d: Draw) -> tuple[Tensor, Tensor, Tensor, bool, Tensor | None]:
    b, h = d.size(), d.size(among=[1, 2, 3, 4, 6])
    s, e = d.size(among=[1, 3, 4]), d.size(among=[2, 4])
    t = s if d.flag() else d.size(among=[2, 5])
    mask = None
    if d.flag():
        mask = d.tensor(b if d.flag() else 1, h if d.flag() else 1, s if d.flag() else 1, t)
    causal = mask is None and d.flag()
    return d.tensor(b, h, s, e), d.tensor(b, h, t, e), d.tensor(b, h, t, e), causal, mask


@case(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(d: Draw) -> Call:
    q, k, v, causal, mask = _attention(d)
    return (q, k, v, 0.0, causal), {"attn_mask": mask} if mask is not None else {}


@case(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(d: Draw) -> Call:
    q, k, v, causal, mask = _attention(d)
    given = {"attn_mask": mask} if mask is not None else {}
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, **given)
    return (d.tensor(*out.shape), q, k, v, out, lse, 0.0, causal), {**given, "scale": q.shape[-1] ** -0.5}


# -- tables


@case(aten.embedding.default)
def embedding(d: Draw) -> Call:
    v, width = d.sizes(2)
    padding = d.choice([-1, v - 1])
    return (d.tensor(v, width), d.integers(v, *d.sizes(1, 2)), padding), {}


@case(aten.embedding_dense_backward.default)
def embedding_backward(d: Draw) -> Call:
    v, width = d.sizes(2)
    size = d.sizes(1, 2)
    return (d.tensor(*size, width), d.integers(v, *size), v, d.choice([-1, v - 1]), False), {}


@case(aten.gather.default)
def gather(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.choice([-1, len(size) - 1]), d.integers(size[-1], *size[:-1], 1)), {}


@case(aten.scatter.src)
def scatter(d: Draw) -> Call:
    size = d.sizes(1, 3)
    index = d.integers(size[-1], *size[:-1], 1)
    return (d.tensor(*size), d.choice([-1, len(size) - 1]), index, d.tensor(*size[:-1], 1)), {}


# -- softmax and losses


@case(aten._log_softmax.default, aten._softmax.default)
def softmax(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.dim(len(size)), False), {}


@case(aten._log_softmax_backward_data.default)
def log_softmax_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    return (d.tensor(*size), torch.log_softmax(d.tensor(*size), dim), dim, d.dtype), {}


@case(aten._softmax_backward_data.default)
def softmax_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    return (d.tensor(*size), torch.softmax(d.tensor(*size), dim), dim, d.dtype), {}


def _nll(d: Draw) -> tuple[Tensor, Tensor, Tensor | None, int]:
    rows, classes = d.size(), d.size(among=[2, 3, 4, 6, 8])
    scores, target = torch.log_softmax(d.tensor(rows, classes), -1), d.integers(classes, rows)
    ignored = d.choice([-100, 1])
    if ignored == -100:  # and rows that are padding, whose impossible classes are -inf
        padding = d.mask(rows)
        target = target.masked_fill(padding, ignored)
        scores = scores.masked_fill(padding.unsqueeze(-1), -math.inf)
    return scores, target, d.positive(classes) if d.flag() else None, ignored


@case(aten.nll_loss_forward.default)
def nll(d: Draw) -> Call:
    scores, target, weight, ignored = _nll(d)
    return (scores, target, weight, d.choice([0, 1, 2]), ignored), {}


@case(aten.nll_loss_backward.default)
def nll_backward(d: Draw) -> Call:
    scores, target, weight, ignored = _nll(d)
    reduction = d.choice([0, 1, 2])
    grad = d.tensor(*(target.shape if reduction == 0 else ()))
    kept = target != ignored
    total = kept.to(d.dtype) if weight is None else torch.where(kept, weight[target.masked_fill(~kept, 0)], 0.0)
    return (grad, scores, target, weight, reduction, ignored, total.sum()), {}


@case(aten.mse_loss.default)
def mse(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.tensor(*size), d.choice([0, 1, 2])), {}


@case(aten.mse_loss_backward.default)
def mse_backward(d: Draw) -> Call:
    size, reduction = d.sizes(1, 3), d.choice([0, 1, 2])
    return (d.tensor(*(size if reduction == 0 else [])), d.tensor(*size), d.tensor(*size), reduction), {}


# -- norms


def _norm(d: Draw) -> tuple[Tensor, list[int], Tensor | None, Tensor | None]:
    size = d.sizes(1, 3)
    normalised = size[-d.choice(list(range(1, len(size) + 1))) :]
    weight = d.tensor(*normalised) if d.flag() else None
    bias = d.tensor(*normalised) if weight is not None and d.flag() else None
    return d.tensor(*size), normalised, weight, bias


@case(aten.native_layer_norm.default)
def layer_norm(d: Draw) -> Call:
    return (*_norm(d), 1e-5), {}


@case(aten.native_layer_norm_backward.default)
def layer_norm_backward(d: Draw) -> Call:
    x, normalised, weight, bias = _norm(d)
    _, mean, rstd = aten.native_layer_norm.default(x, normalised, weight, bias, 1e-5)
    mask = [d.flag() or weight is None, weight is not None, bias is not None]
    return (d.tensor(*x.shape), x, normalised, mean, rstd, weight, bias, mask), {}


# -- reductions


@case(aten.sum.default)
def total(d: Draw) -> Call:
    size = d.sizes(1, 3)
    value = d.mask(*size) if d.flag() else d.tensor(*size)
    return (value,), {"dtype": d.dtype} if d.flag() else {}


@case(aten.max.default, aten.min.default)
def extreme(d: Draw) -> Call:
    return (d.tensor(*d.sizes(1, 3)),), {}


def _dims(d: Draw, rank: int) -> list[int]:
    dims = d.data.draw(st.lists(st.integers(0, rank - 1), unique=True, max_size=rank))
    return [dim - rank * d.flag() for dim in dims]


@case(aten.sum.dim_IntList, aten.amax.default, aten.amin.default)
def reduction(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), _dims(d, len(size)), d.flag()), {}


@case(aten.mean.dim)
def mean_dim(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), _dims(d, len(size)), d.flag()), {}


@case(aten.mean.default)
def mean(d: Draw) -> Call:
    return (d.tensor(*d.sizes(1, 3)),), {}


# -- views


def regrouped(d: Draw, size: list[int]) -> list[int]:
    """A random shape with as many elements as `size`, mostly one that shares factors with it."""
    parts: list[int] = []
    for length in size:
        cut = d.rng.choice([n for n in range(1, length + 1) if length % n == 0])
        parts += [cut, length // cut]
    if d.rng.random() < 0.2:
        d.rng.shuffle(parts)
    merged = [1]
    for part in parts:
        if d.rng.random() < 0.5:
            merged[-1] *= part
        else:
            merged.append(part)
    return merged


@case(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(d: Draw) -> Call:
    size = d.sizes(1, 3)
    target = regrouped(d, size)
    if d.flag():
        target[d.rng.randrange(len(target))] = -1
    return (d.tensor(*size), target), {}


def _with_ones(d: Draw) -> list[int]:
    return [1 if d.rng.random() < 0.3 else length for length in d.sizes(1, 4)]


@case(aten.squeeze.default)
def squeeze(d: Draw) -> Call:
    return (d.tensor(*_with_ones(d)),), {}


@case(aten.squeeze.dim)
def squeeze_dim(d: Draw) -> Call:
    size = _with_ones(d)
    return (d.tensor(*size), d.dim(len(size))), {}


@case(aten.squeeze.dims)
def squeeze_dims(d: Draw) -> Call:
    size = _with_ones(d)
    return (d.tensor(*size), _dims(d, len(size))), {}


@case(aten.unsqueeze.default)
def unsqueeze(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.dim(len(size) + 1)), {}


@case(aten.flatten.using_ints)
def flatten(d: Draw) -> Call:
    size = d.sizes(1, 4)
    start = d.choice(list(range(len(size))))
    return (d.tensor(*size), start, d.choice(list(range(start, len(size))))), {}


@case(aten.permute.default)
def permute(d: Draw) -> Call:
    size = d.sizes(1, 4)
    order = d.data.draw(st.permutations(range(len(size))))
    return (d.tensor(*size), [dim - len(size) * d.flag() for dim in order]), {}


@case(aten.transpose.int)
def transpose(d: Draw) -> Call:
    size = d.sizes(2, 4)
    return (d.tensor(*size), d.dim(len(size)), d.dim(len(size))), {}


@case(aten.t.default)
def t(d: Draw) -> Call:
    return (d.tensor(*d.sizes(1, 2)),), {}


@case(aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
def identity(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)),), {}


@case(aten.clone.default)
def clone(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)),), {"memory_format": torch.contiguous_format} if d.flag() else {}


@case(aten.expand.default)
def expand(d: Draw) -> Call:
    target = d.sizes(1, 4)
    source = d.broadcast(target)
    aligned = len(target) - len(source)
    sizes = [
        -1 if index >= aligned and source[index - aligned] == length and d.flag() else length
        for index, length in enumerate(target)
    ]
    return (d.tensor(*source), sizes), {}


def _piece(d: Draw, whole: int) -> tuple[int, int, int]:
    """Bounds of a slice: often an equal chunk."""
    if d.flag():
        part = d.choice([n for n in range(1, whole + 1) if whole % n == 0])
        start = part * d.choice(list(range(whole // part)))
        return start, start + part, 1
    start = d.choice(list(range(whole)))
    return start, d.choice(list(range(start + 1, whole + 1))), d.choice([1, 2])


@case(aten.slice.Tensor)
def slice_(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    start, end, step = _piece(d, size[dim])
    if d.flag() and start:
        start -= size[dim]
    if end == size[dim] and d.flag():
        end = 2**63 - 1
    return (d.tensor(*size), dim, start, end, step), {}


@case(aten.slice_backward.default)
def slice_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    start, end, step = _piece(d, size[dim])
    part = list(size)
    part[dim] = math.ceil((end - start) / step)
    return (d.tensor(*part), size, dim, start, end, step), {}


@case(aten.select.int)
def select(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    return (d.tensor(*size), dim, d.dim(size[dim])), {}


@case(aten.select_backward.default)
def select_backward(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    part = [length for index, length in enumerate(size) if index != dim % len(size)]
    return (d.tensor(*part), size, dim, d.dim(size[dim])), {}


@case(aten.cat.default)
def cat(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    values = []
    equal = d.flag()
    for _ in range(d.choice([1, 2, 3])):
        part = list(size)
        part[dim] = part[dim] if equal else d.size()
        values.append(d.tensor(*part))
    return (values + values[: d.flag()], dim), {}


@case(aten.stack.default)
def stack(d: Draw) -> Call:
    size = d.sizes(0, 3)
    values = [d.tensor(*size) for _ in range(d.choice([1, 2, 3]))]
    return (values + values[: d.flag()], d.dim(len(size) + 1)), {}


@case(aten.unbind.int)
def unbind(d: Draw) -> Call:
    size = d.sizes(1, 3)
    return (d.tensor(*size), d.dim(len(size))), {}


@case(aten.split.Tensor)
def split(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    return (d.tensor(*size), d.choice(list(range(1, size[dim] + 1))), dim), {}


@case(aten.split_with_sizes.default)
def split_with_sizes(d: Draw) -> Call:
    size = d.sizes(1, 3)
    dim = d.dim(len(size))
    part = d.size()
    parts = [part] * d.choice([1, 2, 3]) if d.flag() else d.sizes(1, 3)
    size[dim] = sum(parts)
    return (d.tensor(*size), parts, dim), {}


@case(aten.constant_pad_nd.default)
def pad(d: Draw) -> Call:
    size = d.sizes(1, 3)
    count = d.choice(list(range(1, len(size) + 1)))
    return (d.tensor(*size), [d.choice([0, 1, 2]) for _ in range(2 * count)], d.choice([0.0, 1.5])), {}


# -- pointwise


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
    aten.zeros_like.default,
    aten.ones_like.default,
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


@case(aten.full_like.default)
def full_like(d: Draw) -> Call:
    return (d.tensor(*d.sizes(0, 3)), 1.5), {}


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
