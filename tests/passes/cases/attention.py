"""Fused attention, of CPU and of CUDA captures; the latter's ops are given a CPU kernel, as their formulas say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.passes.cases.draw import Call, Draw, case

aten = torch.ops.aten
LIBRARY = torch.library.Library("aten", "IMPL")


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (scale or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: Any, kept: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, causal, scale)
    out = (scores.softmax(-1) * kept) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return out, scores.logsumexp(-1).float()


def _backward(
    grad: Tensor,
    values: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: Any,
    scale: Any,
    kept: Tensor | float = 1.0,
) -> list[Tensor]:
    """The gradients of query, key, value and scores, from what the forward saved (Dao 2023)."""
    q, k, v = values
    shared = q.shape[1] // k.shape[1]
    weights = (_scores(q, k, mask, causal, scale) - lse[..., None]).exp()
    inner = (grad @ v.repeat_interleave(shared, 1).mT) * kept - (grad * out).sum(-1, keepdim=True)
    scores = weights * inner
    scale = scale or q.shape[-1] ** -0.5
    return [
        scores @ k.repeat_interleave(shared, 1) * scale,
        (scores.mT @ q * scale).unflatten(1, (-1, shared)).sum(2),
        ((weights * kept).mT @ grad).unflatten(1, (-1, shared)).sum(2),
        scores,
    ]


def _kept(q: Tensor, k: Tensor, dropout: float, state: Tensor) -> Tensor | float:
    """What dropout keeps, scaled: drawn again from the same state in the backward."""
    if not dropout:
        return 1.0
    generator = torch.Generator().manual_seed(int(state[0]))
    drawn = torch.rand(*q.shape[:3], k.shape[2], generator=generator, dtype=q.dtype)
    return (drawn >= dropout).to(q.dtype) / (1 - dropout)


def _state(*size: int) -> Tensor:
    return torch.full(size, 7)


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
    state = torch.randint(2**40, (2,)) if dropout_p else _state(2)
    out, lse = _forward(q, k, v, None, is_causal, scale, _kept(q, k, dropout_p, state))
    return out, lse, None, None, q.shape[2], k.shape[2], state, _state(), q.new_empty(0)


def _flash_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) and seed.shape == (2,)
    kept = _kept(q, k, dropout_p, seed)
    return tuple(_backward(grad, (q, k, v), out, lse, None, is_causal, scale, kept)[:3])


def _padding(length: int) -> int:
    return -length % 32


def _efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    out, lse = _forward(q, k, v, bias, is_causal, scale)
    return out, torch.nn.functional.pad(lse, (0, _padding(q.shape[2]))), _state(), _state()


def _efficient_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, bias, out, lse, seed, offset, dropout_p, grad_input_mask, is_causal=False, *, scale=None
):
    assert lse.shape[-1] % 32 == 0
    found = _backward(grad, (q, k, v), out, lse[..., : q.shape[2]], bias, is_causal, scale)
    return (*found[:3], found[3].sum_to_size(bias.shape) if grad_input_mask[3] else None)


def _cudnn(  # type: ignore[no-untyped-def]
    q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    out, lse = _forward(q, k, v, bias, is_causal, scale)
    return out, lse[..., None], None, None, q.shape[2], k.shape[2], _state(), _state(), None


def _cudnn_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale=None
):
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    return tuple(_backward(grad, (q, k, v), out, lse[..., 0], bias, is_causal, scale)[:3])


def _overrideable(  # type: ignore[no-untyped-def]
    q, k, v, bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    out, lse = _forward(q, k, v, bias, is_causal, scale)
    return out, lse, None, None, q.shape[2], k.shape[2], _state(), _state(), None


def _overrideable_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, bias, needed, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    found = _backward(grad, (q, k, v), out, lse, bias, is_causal, scale)
    return (*found[:3], found[3].sum_to_size(bias.shape) if needed[3] else None)


for _name, _kernel in {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
    "fused_overrideable": _overrideable,
    "flash_backward": _flash_backward,
    "efficient_backward": _efficient_backward,
    "cudnn_backward": _cudnn_backward,
    "fused_overrideable_backward": _overrideable_backward,
}.items():
    _first, *_rest = _name.split("_")
    LIBRARY.impl("_".join(["_scaled_dot_product", _first, "attention", *_rest]), _kernel, "CPU")


Values = tuple[Tensor, Tensor, Tensor, bool]


def _values(d: Draw, shared: bool = True) -> Values:
    """Query, key, value and whether a causal mask is wanted; `shared`: several query heads may share a key's."""
    b, h, r = d.size(among=[1, 2, 3, 4, 6]), d.size(among=[1, 2, 3, 4]), d.size(among=[1, 2, 4]) if shared else 1
    s, e = d.size(among=[1, 2, 3, 4, 6]), d.size(among=[2, 4])
    t = s if d.flag() else d.size(among=[2, 5])
    return d.tensor(b, h * r, s, e), d.tensor(b, h, t, e), d.tensor(b, h, t, e), d.flag()


def _mask(d: Draw, q: Tensor, k: Tensor, ranks: list[int]) -> Tensor | None:
    """A mask that is added to the scores (a boolean one comes as 0 and -inf), broadcast somehow, or none."""
    if d.flag():
        return None
    size = [length if d.flag() else 1 for length in (*q.shape[:3],)]
    whole = [*size, k.shape[2]][-d.choice(ranks) :]
    mask = d.tensor(*whole)
    return mask if d.flag() else torch.zeros_like(mask).masked_fill(d.mask(*whole[:-1], k.shape[2]), -torch.inf)


def _finite(mask: Tensor | None) -> Tensor | None:
    """With no row that sees nothing, whose result is a matter of taste."""
    if mask is None:
        return None
    mask[..., 0] = 0
    return mask


def _cpu(d: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
    q, k, v, causal = _values(d)
    mask = _finite(_mask(d, q, k, [2, 4]))
    kwargs = {"attn_mask": mask} if mask is not None else {}
    return (q, k, v, 0.0, causal and mask is None), kwargs


@case(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(d: Draw) -> Call:
    args, kwargs = _cpu(d)
    return args, {**kwargs, "scale": 0.3} if d.flag() else kwargs


@case(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(d: Draw) -> Call:
    (q, k, v, _, causal), kwargs = _cpu(d)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, **kwargs)
    return (d.tensor(*out.shape), q, k, v, out, lse, 0.0, causal), {**kwargs, "scale": q.shape[-1] ** -0.5}


@case(aten._scaled_dot_product_flash_attention.default)
def flash(d: Draw) -> Call:
    q, k, v, causal = _values(d)
    return (q, k, v, 0.0, causal), {"scale": 0.3} if d.flag() else {}


@case(aten._scaled_dot_product_flash_attention_backward.default)
def flash_backward(d: Draw) -> Call:
    q, k, v, causal = _values(d)
    out, lse, *rest = _flash(q, k, v, 0.0, causal)
    return (d.tensor(*out.shape), q, k, v, out, lse, *rest[:4], 0.0, causal, *rest[4:6]), {}


@case(aten._scaled_dot_product_efficient_attention.default)
def efficient(d: Draw) -> Call:
    q, k, v, causal = _values(d, shared=False)
    return (q, k, v, _finite(_mask(d, q, k, [4])), True, 0.0, causal), {}


@case(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(d: Draw) -> Call:
    q, k, v, causal = _values(d, shared=False)
    mask = _finite(_mask(d, q, k, [4]))
    out, lse, *states = _efficient(q, k, v, mask, True, 0.0, causal)
    needed = [True, True, True, mask is not None and d.flag()]
    return (d.tensor(*out.shape), q, k, v, mask, out, lse, *states, 0.0, needed, causal), {}


@case(aten._scaled_dot_product_cudnn_attention.default)
def cudnn(d: Draw) -> Call:
    q, k, v, causal = _values(d)
    return (q, k, v, _finite(_mask(d, q, k, [4])), True, 0.0, causal), {}


@case(aten._scaled_dot_product_cudnn_attention_backward.default)
def cudnn_backward(d: Draw) -> Call:
    q, k, v, causal = _values(d)
    mask = _finite(_mask(d, q, k, [4]))
    out, lse, cum_q, cum_k, max_q, max_k, *states = _cudnn(q, k, v, mask, True, 0.0, causal)
    given = (d.tensor(*out.shape), q, k, v, out, lse, *states[:2], mask, cum_q, cum_k, max_q, max_k, 0.0, causal)
    return given, {}


@case(aten._scaled_dot_product_fused_attention_overrideable.default)
def overrideable(d: Draw) -> Call:
    q, k, v, causal = _values(d, shared=False)
    return (q, k, v, _finite(_mask(d, q, k, [4])), 0.0, causal), {}


@case(aten._scaled_dot_product_fused_attention_overrideable_backward.default)
def overrideable_backward(d: Draw) -> Call:
    q, k, v, causal = _values(d, shared=False)
    mask = _finite(_mask(d, q, k, [4]))
    out, lse, cum_q, cum_k, max_q, max_k, *states = _overrideable(q, k, v, mask, 0.0, causal)
    needed = [True, True, True, mask is not None]
    grad = d.tensor(*out.shape)
    given = (grad, q, k, v, mask, needed, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, *states[:2])
    return given, {}
