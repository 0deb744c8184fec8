"""Padding: states rest over all their axes, also where these divide no dimension.

DTensor, and FSDP with it, cuts such a dimension into parts rounded up, of which the last are shorter or empty. A
generated graph is the same on all ranks, so that each rank there has a *place* with room for the longest part. Places
are what collectives move; once gathered, their rows are packed (an ``unpad``), and a gradient's rows are spread to
their places (a ``pad``) before it is reduced to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from shardweave.ir import Axis, Layout, Mesh, Padding, axes_size, normalise


def padded_rest(compute: Layout, rest: Layout, left: Sequence[Axis], mesh: Mesh) -> Layout | None:
    """`rest`, sharded also over the axes that were left as they divide no dimension; None where it stays as it is.

    The dimension is the first of which a device still has several rows: what it holds then lies at the front of its
    place in memory, a view. The axes that `rest` has there already are cut anew with the others, in the order of the
    mesh, which is DTensor's. A parameter stays as it is where it has fewer elements than there are devices, and an axis
    is left where `compute` has the dimension in another way than DTensor cuts first.

    Examples
    --------
    >>> mesh = Mesh.of_levels([("gpu", 3)])
    >>> whole = Layout.replicated((7, 5))
    >>> str(padded_rest(whole, whole, mesh.axes, mesh))
    '[gpu0 3 of 7, 5]'
    """
    dim = next((dim for dim, size in enumerate(rest.local_shape) if size > 1), None)
    if dim is None or not left:
        return None
    *outer, size = compute.dims[dim]
    order: dict[int | Axis, int] = {axis: index for index, axis in enumerate(mesh.axes)}
    first = max((order.get(digit, -1) for digit in outer), default=-1)
    mine = [digit for digit in rest.dims[dim] if isinstance(digit, Axis) and digit not in outer]
    axes = mesh.ordered([*mine, *(axis for axis in left if order[axis] > first)])
    parts = axes_size({*rest.shard_axes, *axes} - {*compute.shard_axes})
    if not isinstance(size, int) or any(digit not in order for digit in outer):
        return None
    if len(axes) == len(mine) or order[axes[0]] < first or math.prod(compute.local_shape) < parts:
        return None
    padding = Padding(dim, size, tuple(axis.size for axis in axes))
    dims = [*rest.dims]
    dims[dim] = normalise([*outer, *axes, padding.place])
    return replace(rest, dims=tuple(dims), padding=padding)


def spread(layout: Layout, padding: Padding) -> Layout | None:
    """`layout`, which is not padded, with its blocks of rows in places; None where it cuts a block.

    >>> x = Axis("gpu0", 2)
    >>> str(spread(Layout(((x, 5), (4,))), Padding(0, 5, (2, 2))))
    '[gpu0 8 of 10, 4]'
    """
    outer, rows = _rows(layout, padding.dim)
    if rows % padding.size:
        return None
    dims = [*layout.dims]
    dims[padding.dim] = normalise([*outer, rows // padding.size * padding.padded])
    return replace(layout, dims=tuple(dims), padding=padding)


def packed(layout: Layout) -> Layout:
    """`layout` without its padding where each device has whole blocks; the inverse of `spread`.

    >>> str(packed(Layout(((8,), (4,)), padding=Padding(0, 5, (2, 2)))))
    '[5, 4]'
    """
    if (padding := layout.padding) is None:
        return layout
    outer, rows = _rows(layout, padding.dim)
    if rows % padding.padded:
        return layout
    dims = [*layout.dims]
    dims[padding.dim] = normalise([*outer, rows // padding.padded * padding.size])
    return replace(layout, dims=tuple(dims), padding=None)


def _rows(layout: Layout, dim: int) -> tuple[list[int | Axis], int]:
    """The digits of a dimension outside of the run of rows that lie together on a device, and the length of the run."""
    digits = list(layout.dims[dim])
    rows = digits.pop() if digits and isinstance(digits[-1], int) else 1
    assert isinstance(rows, int)
    return digits, rows
