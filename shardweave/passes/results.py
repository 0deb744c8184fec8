"""Results: what a local graph returns, with all steps of its time axes together, and gradients where states rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardweave.ir import Layout
from shardweave.passes.annotate import info
from shardweave.passes.layouts import cut_as, drop
from shardweave.passes.local import Origin
from shardweave.passes.readers import Readers
from shardweave.passes.rules import is_view
from shardweave.passes.values import Rest, annotate_layouts
from shardweave.precision import Dtypes

aten = torch.ops.aten


class Results(Readers):
    """Values, and how the step returns them.

    Parameters
    ----------
    *values
        As of `Readers`.
    whole_sums, accumulates : bool
        As of `Shard`.
    """

    def __init__(self, *values: Any, whole_sums: bool, accumulates: bool) -> None:
        super().__init__(*values)
        self.whole_sums, self.accumulates = whole_sums, accumulates
        self.accumulators: dict[str, fx.Node] = {}
        """For each parameter with a gradient the node that adds the gradient to the sum of those before."""

    def returned(self, value: fx.Node, wanted: Layout | None) -> tuple[fx.Node, Layout]:
        """An output, and where it goes: as it is wanted, or as it lies, with the steps of woven axes together.

        To sum it over micro-batches is for the caller.
        """
        have = self.layout(value)
        want = drop(wanted or have.without_partial(), self.mesh.woven)
        times = tuple((axis, op) for axis, op in have.partial if axis in self.mesh.times)
        want = replace(want, partial=(*want.partial, *times))
        if not self._is_woven(have):
            return self.value(value, want), want
        origin = self._origin(value, have)
        node, have = self.local.ended(self.value(value, have), have, origin, self.mesh.unrolled)
        return self.local.redistribute(node, have, want, origin, lambda *_: None), want

    def _is_woven(self, layout: Layout) -> bool:
        """Whether a value differs from step to step of an unrolled axis."""
        return not set(self.mesh.unrolled).isdisjoint((*layout.shard_axes, *layout.partial_axes))

    def gradient(self, name: str, value: fx.Node) -> fx.Node:
        """The gradient of a parameter where its states rest, summed in the dtype for that, then in its master's."""
        origin = Origin(name, "gradient", "gradient", True)
        dtype = value.meta["val"].dtype
        dtypes = self.rest_axes.get(name, Rest()).dtypes or Dtypes(dtype, dtype)
        rests = self.rests.get(name) or Layout.replicated(value.meta["val"].shape)
        first = self.sums.get(name, rests) if self.whole_sums else rests
        summed = self._added if self.accumulates else self._summed
        found = summed(value, first, dtypes.reduced, origin)
        found = self.local.redistribute(found, first, rests, origin, lambda *_: None)
        return self.local.cast(found, dtypes.master, origin)

    def _added(self, value: fx.Node, want: Layout, dtype: torch.dtype, origin: Origin) -> fx.Node:
        """A gradient at `want`, together with those of the runs before.

        It is brought to where they are added up (over the other devices it stays a partial sum) and added to their sum;
        only that is brought on.
        """
        name, have = origin.op, drop(self.layout(value), self.mesh.unrolled)
        sums = self.sums.get(name, want)
        partial = [item for item in have.partial if item[0].kind == "space" and item[1] == "sum"]
        lies = replace(sums, partial=tuple(item for item in partial if item[0] not in sums.shard_axes))
        times = tuple((axis, "sum") for axis in self.mesh.times)
        mine = self._summed(value, replace(lies, partial=(*lies.partial, *times)), dtype, origin)
        with self.local.fake:
            like = torch.empty((), dtype=dtype, device=value.meta["val"].device)
        before = self.local.placeholder(f"sum_{name}", like, lies, origin, last=True)
        total = self.local.call(origin, aten.add_.Tensor, before, mine)
        annotate_layouts(total, (lies,))
        self.accumulators[name] = total
        return self.local.redistribute(total, lies, want, origin, lambda *_: None)

    def _summed(self, value: fx.Node, want: Layout, dtype: torch.dtype, origin: Origin) -> fx.Node:
        """A gradient at `want`, what is partial there summed in this dtype; over woven axes first, slice by slice."""
        have = self.layout(value)
        if not self._is_woven(have) and (dtype == value.meta["val"].dtype or have == want):
            return self.value(value, want, origin)
        cast = self.local.cast(self.value(value, have, origin), dtype, origin)
        cast, have = self.local.ended(cast, have, origin, self.mesh.woven)
        cut = cut_as(want, have, self.mesh.slices)
        if cut is None:
            cast, have = self.local.ended(cast, have, origin, self.mesh.slices)
        cast = self.local.redistribute(cast, have, cut or want, origin, lambda *_: None)
        return self.local.ended(cast, cut or want, origin, self.mesh.slices)[0]


def is_gradient(node: fx.Node) -> bool:
    """Whether nothing of the backward reads a value of it, views looked through, but its output."""
    users = list(node.users)
    if not users or not info(node).backward:
        return False
    return all(user.op == "output" or (is_view(user) and is_gradient(user)) for user in users)
