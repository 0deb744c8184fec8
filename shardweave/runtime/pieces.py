"""Micro-batches at run time: a value cut along a time axis, and put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardweave.ir import Axis, Layout
from shardweave.runtime.parameters import COMBINE


def cut(value: torch.Tensor, layout: Layout, axis: Axis) -> list[torch.Tensor]:
    """The steps of a rank's `value` along a time axis; what does not lie on it is the same in all of them.

    >>> micro = Axis("micro", 2, 4, "time")
    >>> cut(torch.arange(4), Layout(((micro, 2),)), micro)
    [tensor([0, 1]), tensor([2, 3])]
    """
    if axis not in layout.shard_axes:
        return [value] * axis.size
    dim, outer, inner = layout.place(axis)
    shape = value.shape
    steps = value.reshape(*shape[:dim], outer, axis.size, inner, *shape[dim + 1 :]).unbind(dim + 1)
    return [step.flatten(dim, dim + 1).contiguous() for step in steps]


def joined(parts: Sequence[torch.Tensor], layout: Layout, axis: Axis) -> torch.Tensor:
    """The value whose steps along a time axis are `parts`: side by side, or combined where it is partial over the axis.

    >>> micro = Axis("micro", 2, 4, "time")
    >>> joined([torch.tensor([0, 1]), torch.tensor([2, 3])], Layout(((micro, 2),)), micro)
    tensor([0, 1, 2, 3])
    >>> joined([torch.tensor(1), torch.tensor(2)], Layout((), ((micro, "sum"),)), micro)
    tensor(3)
    """
    combine = dict(layout.partial).get(axis)
    if combine is not None:
        total = parts[0]
        for part in parts[1:]:
            total = COMBINE[combine](total, part)
        return total
    if axis not in layout.shard_axes:
        return parts[-1]
    dim, outer, inner = layout.place(axis)
    shape = parts[0].shape
    steps = [part.reshape(*shape[:dim], outer, inner, *shape[dim + 1 :]) for part in parts]
    return torch.stack(steps, dim + 1).flatten(dim, dim + 2)
