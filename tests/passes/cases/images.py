"""Pooling, resizing, padding and sampling of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.passes.cases.draw import Call, Draw, case

aten = torch.ops.aten


def _image(d: Draw, places: int, batched: bool = False) -> Tensor:
    """An image of odd and even sizes, batched or not."""
    leading = [d.size(among=[1, 2, 3, 4, 6]) for _ in range(2 if batched or d.flag() else 1)]
    return d.tensor(*leading, *(d.size(among=[4, 5, 7]) for _ in range(places)))


def _enter(target: Any, draw: Callable[[Draw], Call]) -> None:
    case(target)(draw)


# -- pooling


def _window(d: Draw, places: int) -> tuple[list[int], list[int], list[int]]:
    """A kernel, its stride and its padding."""
    kernel = [d.size(among=[2, 3]) for _ in range(places)]
    return kernel, [d.size(among=[1, 2]) for _ in kernel], [d.size(among=[0, 1]) for _ in kernel]


def _max_pool(d: Draw, places: int) -> tuple[Any, ...]:
    return (_image(d, places), *_window(d, places), [1] * places, d.flag())


def _max_pool_backward(d: Draw, places: int, forward: Any) -> tuple[Any, ...]:
    x, *options = _max_pool(d, places)
    out, indices = forward(x, *options)
    return d.tensor(*out.shape), x, *options, indices


def _average(d: Draw, places: int) -> tuple[Any, ...]:
    return (_image(d, places), *_window(d, places), d.flag(), d.flag())


def _average_backward(d: Draw, places: int, forward: Any) -> tuple[Any, ...]:
    x, *options = _average(d, places)
    divisor = d.choice([None, 3])
    return d.tensor(*forward(x, *options, divisor).shape), x, *options, divisor


def _adaptive(d: Draw, places: int) -> tuple[Any, ...]:
    return _image(d, places), [d.size(among=[1, 2, 3]) for _ in range(places)]


def _adaptive_backward(d: Draw, places: int, forward: Any) -> tuple[Any, ...]:
    x, size = _adaptive(d, places)
    results = forward(x, size)
    if isinstance(results, Tensor):
        return d.tensor(*results.shape), x
    return d.tensor(*results[0].shape), x, results[1]


def _unpool(d: Draw, places: int, forward: Any) -> tuple[Any, ...]:
    x = _image(d, places)
    out, indices = forward(x, [2] * places)
    options = ([2] * places, [0] * places) if places == 3 else ()
    return out, indices, list(x.shape[-places:]), *options


def _enter_pools() -> None:
    _enter(aten.avg_pool1d.default, lambda d: (_average(d, 1), {}))
    for places in (2, 3):
        largest = getattr(aten, f"max_pool{places}d_with_indices").default
        back = getattr(aten, f"max_pool{places}d_with_indices_backward").default
        _enter(largest, lambda d, n=places: (_max_pool(d, n), {}))
        _enter(back, lambda d, n=places, op=largest: (_max_pool_backward(d, n, op), {}))
        average = getattr(aten, f"avg_pool{places}d").default
        back = getattr(aten, f"avg_pool{places}d_backward").default
        _enter(average, lambda d, n=places: ((*_average(d, n), d.choice([None, 3])), {}))
        _enter(back, lambda d, n=places, op=average: (_average_backward(d, n, op), {}))
        for name in (f"_adaptive_avg_pool{places}d", f"adaptive_max_pool{places}d"):
            adaptive, back = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
            _enter(adaptive, lambda d, n=places: (_adaptive(d, n), {}))
            _enter(back, lambda d, n=places, op=adaptive: (_adaptive_backward(d, n, op), {}))
        unpool = getattr(aten, f"max_unpool{places}d").default
        _enter(unpool, lambda d, n=places, op=largest: (_unpool(d, n, op), {}))


_enter_pools()

# -- upsampling

_CORNERS = ["linear1d", "bilinear2d", "bicubic2d", "bilinear2d_aa", "bicubic2d_aa", "trilinear3d"]
_NEAREST = [f"nearest{exact}{places}d" for exact in ("", "_exact") for places in (1, 2, 3)]


def _upsample(d: Draw, name: str, overload: str) -> tuple[Any, ...]:
    places = int(name.split("d")[0][-1])
    x = _image(d, places, batched=True)
    corners = (d.flag(),) if name in _CORNERS else ()
    if overload == "vec" and d.flag():
        return x, None, *corners, [d.choice([0.5, 2.0]) for _ in range(places)]
    size = [d.size(among=[2, 5, 8]) for _ in range(places)]
    return x, size, *corners, *([None] if overload == "vec" else [])


def _upsample_backward(d: Draw, name: str) -> tuple[Any, ...]:
    x, size, *corners = _upsample(d, name, "default")
    return d.tensor(*x.shape[:2], *size), size, list(x.shape), *corners


for _name in (*_CORNERS, *_NEAREST):
    _full = f"_upsample_{_name}" if "exact" in _name or "aa" in _name else f"upsample_{_name}"
    _packet, _back = getattr(aten, _full), getattr(aten, f"{_full}_backward")
    _enter(_packet.default, lambda d, name=_name: (_upsample(d, name, "default"), {}))
    _enter(_packet.vec, lambda d, name=_name: (_upsample(d, name, "vec"), {}))
    _enter(_back.default, lambda d, name=_name: (_upsample_backward(d, name), {}))

# -- padding


def _pad(d: Draw, places: int) -> tuple[Any, ...]:
    return _image(d, places), [d.size(among=[0, 1, 2]) for _ in range(2 * places)]


def _pad_backward(d: Draw, places: int, forward: Any) -> tuple[Any, ...]:
    x, padding = _pad(d, places)
    return d.tensor(*forward(x, padding).shape), x, padding


for _mode in ("reflection", "replication"):
    for _places in (1, 2, 3):
        _op, _back = getattr(aten, f"{_mode}_pad{_places}d"), getattr(aten, f"{_mode}_pad{_places}d_backward")
        _enter(_op.default, lambda d, n=_places: (_pad(d, n), {}))
        _enter(_back.default, lambda d, n=_places, op=_op.default: (_pad_backward(d, n, op), {}))

# -- columns, sampling and shuffles


def _unfold(d: Draw) -> tuple[Tensor, list[list[int]]]:
    kernel, stride, padding = _window(d, 2)
    return _image(d, 2), [kernel, [1, 1], padding, stride]


@case(aten.im2col.default)
def im2col(d: Draw) -> Call:
    x, options = _unfold(d)
    return (x, *options), {}


@case(aten.col2im.default)
def col2im(d: Draw) -> Call:
    x, options = _unfold(d)
    return (d.tensor(*aten.im2col.default(x, *options).shape), list(x.shape[-2:]), *options), {}


def _grid(d: Draw, places: int) -> tuple[Any, ...]:
    x = _image(d, places, batched=True)
    grid = d.tensor(x.shape[0], *(d.size(among=[1, 2, 3, 4]) for _ in range(places)), places)
    return x, grid, d.choice([0, 1]), d.choice([0, 1, 2]), d.flag()


def _grid_backward(d: Draw, places: int) -> tuple[Any, ...]:
    x, grid, *options = _grid(d, places)
    mask = [d.flag(), True]
    return d.tensor(*x.shape[:2], *grid.shape[1:-1]), x, grid, *options, mask


for _places in (2, 3):
    _op, _back = getattr(aten, f"grid_sampler_{_places}d"), getattr(aten, f"grid_sampler_{_places}d_backward")
    _enter(_op.default, lambda d, n=_places: (_grid(d, n), {}))
    _enter(_back.default, lambda d, n=_places: (_grid_backward(d, n), {}))


@case(aten.pixel_shuffle.default)
def pixel_shuffle(d: Draw) -> Call:
    factor = d.choice([1, 2, 3])
    channels = d.size(among=[1, 2, 3, 4]) * factor**2
    return (d.tensor(*d.sizes(0, 2), channels, d.size(), d.size()), factor), {}


@case(aten.pixel_unshuffle.default)
def pixel_unshuffle(d: Draw) -> Call:
    factor = d.choice([1, 2, 3])
    height, width = (factor * d.size(among=[1, 2, 3, 4]) for _ in range(2))
    return (d.tensor(*d.sizes(1, 2), height, width), factor), {}


@case(aten.channel_shuffle.default)
def channel_shuffle(d: Draw) -> Call:
    groups = d.size()
    return (d.tensor(d.size(), groups * d.size(), *d.sizes(1, 2)), groups), {}
