"""Pooling: a window lies within one sample and one channel, so all but the pooled dimensions are free."""

from __future__ import annotations

import torch

from shardweave.passes.rules.registry import rule
from shardweave.passes.rules.spatial import lower_shape_only, places

aten = torch.ops.aten

_MAX = {
    2: [aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default],
    3: [aten.max_pool3d_with_indices.default, aten.adaptive_max_pool3d.default],
}
_MAX_BACKWARD = {
    2: [aten.max_pool2d_with_indices_backward.default, aten.adaptive_max_pool2d_backward.default],
    3: [aten.max_pool3d_with_indices_backward.default, aten.adaptive_max_pool3d_backward.default],
}
_AVERAGE = {
    1: [aten.avg_pool1d.default],
    2: [aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default],
    3: [aten.avg_pool3d.default, aten._adaptive_avg_pool3d.default],
}
_AVERAGE_BACKWARD = {
    2: [aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default],
    3: [aten.avg_pool3d_backward.default, aten._adaptive_avg_pool3d_backward.default],
}

for _count in (1, 2, 3):
    _whole, _pooled = f"... {places('x', _count)}", f"... {places('y', _count)}"
    for _target in _MAX.get(_count, []):
        rule(_target, f"{_whole} -> {_pooled}, {_pooled}")
    for _target in _MAX_BACKWARD.get(_count, []):
        rule(_target, f"{_pooled}, {_whole}, {_pooled} -> {_whole}")
    for _target in _AVERAGE[_count]:
        rule(_target, f"{_whole} -> {_pooled}")
    for _target in _AVERAGE_BACKWARD.get(_count, []):
        rule(_target, f"{_pooled}, {_whole} -> {_whole}", lower=lower_shape_only)
for _count, _target in ((2, aten.max_unpool2d.default), (3, aten.max_unpool3d.default)):
    _pooled = f"... {places('y', _count)}"
    rule(_target, f"{_pooled}, {_pooled} -> ... {places('x', _count)}")
