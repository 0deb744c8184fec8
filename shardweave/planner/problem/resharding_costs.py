"""Resharding costs: seconds of layout changes, and of compute, on one device of a cluster.

An edge of the problem needs the cost of the change from each layout of its producer to each layout of its consumer:
on a thousand devices tens of thousands of changes. So a whole table is computed at once, with the steps of
`ir.layout.steps_between` but without their layouts. The change of an axis depends only on whether the value is
partial over it, and on its *places* before and after, that is, on which part of which dimension it shards. Two places
are equal, disjoint or overlapping. With a number for each place, a step of all changes is a comparison of a column of
numbers with a row of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from shardweave.cost_model import (
    Cluster,
    Work,
    bytes_seconds,
    collective_demand,
    crossed_level,
    node_work,
    product_of,
    work_seconds,
)
from shardweave.ir import (
    LOCAL_STEPS,
    Assignment,
    Axis,
    BoundRule,
    Dims,
    Layout,
    Mesh,
    Quantized,
    RedistributionKind,
    axes_size,
    digit_size,
    outermost_first,
    state_layouts,
    steps_between,
)
from shardweave.passes import FULL_BUCKET_RATIO, QUANTIZATION_BLOCK, quantization_stages
from shardweave.sharding import info, signature, tensor_args, tensor_shape

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Bits = Mapping[RedistributionKind, int]
Place = tuple[int, int, int]
"""A dimension, and its steps outside of the axis, without the axis' own and with them."""


@dataclass(frozen=True)
class Move:
    """One step of all changes of a table.

    Parameters
    ----------
    kind : RedistributionKind
    groups : array of int
        The axes that it is over, outermost first, as the bits of a number; 0 where a change has no such step.
    numel : array of int
        Elements on one device, where they are most: before a reduction or a slice, after a gather.
    copied : array of int
        Elements that are copied besides, to lie in a row: where what is cut is not the first dimension.
    """

    kind: RedistributionKind
    groups: Ints
    numel: Ints
    copied: Ints


def group_axes(group: int, axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """The axes of one of `Move.groups`, outermost first; `axes` as given to `moves_between`."""
    return tuple(axis for index, axis in enumerate(outermost_first(axes)) if group >> index & 1)


def moves_between(
    sources: Sequence[Layout], targets: Sequence[Layout], axes: Sequence[Axis], paired: bool = False
) -> list[Move]:
    """The moves from each of `sources` (the rows) to each of `targets` (the columns), in their order.

    Where a layout is wanted partial, what is partial in the same way stays so (`attainable_layout`).

    Parameters
    ----------
    sources, targets : sequences of Layout
        Of one value, without padding.
    axes : sequence of Axis
        All that these layouts have.
    paired : bool
        Only from each of `sources` to that of `targets` in the same place: the arrays have one dimension.

    Examples
    --------
    >>> gpu, node = Axis("gpu0", 2), Axis("node0", 4, 2)
    >>> sources = [Layout(((8,),), ((gpu, "sum"),)), Layout(((node, gpu),))]
    >>> for move in moves_between(sources, [Layout(((8,),)), Layout(((gpu, 4),))], (gpu, node)):
    ...     print(move.kind, move.groups.tolist(), move.numel.tolist())
    reduce_scatter [[0, 2], [0, 0]] [[8, 8], [1, 1]]
    all_reduce [[2, 0], [0, 0]] [[8, 4], [1, 1]]
    all_gather [[0, 0], [3, 3]] [[8, 4], [8, 8]]
    slice [[0, 0], [0, 2]] [[8, 4], [8, 8]]
    """
    axes = outermost_first(axes)
    arrays = _Arrays(axes)
    source, target = arrays.rows(sources), arrays.rows(targets)
    table = np.arange(len(sources))[:, None], np.arange(len(targets))[None, :]
    at = (np.arange(len(sources)),) if paired else table
    row, column, shape = at[0], at[-1], np.broadcast_shapes(*(index.shape for index in at))
    reduces = arrays.reduces
    dims, overlap = arrays.relations()
    across = overlap & ~np.eye(len(dims), dtype=bool)
    source_on, target_on, source_across = source.touch(overlap), target.touch(overlap), source.touch(across)
    opposed = np.zeros((int(dims.max()) + 1, *shape), dtype=bool)  # dimensions that are gathered whole
    for index in range(len(axes)):
        new = target.places[column, index]
        for dim in np.unique(dims[new]):
            opposed[dim] |= source_across[row, new] & (dims[new] == dim)

    scattered, reduced = ({op: _Groups(shape) for op in reduces} for _ in range(2))
    sliced, exchanged, gathered, cut = (_Groups(shape) for _ in range(4))
    for index, axis in enumerate(axes):
        old, new = source.places[row, index], target.places[column, index]
        fixed = opposed[dims[old], *at]
        room = (new > 0) & ~source_on[row, new] & ~opposed[dims[new], *at]
        before, after = source.partial[row, index], target.partial[column, index]
        pending = (before > 0) & (before != after)
        for op, numbers in reduces.items():
            mine = pending & np.isin(before, numbers)
            scattered[op].add(axis, index, mine & room, dims[new] > 1)
            reduced[op].add(axis, index, mine & ~room)
        slices = room & (old == 0)
        sliced.add(axis, index, slices & ~pending)
        exchanges = room & (old > 0) & ~target_on[column, old] & ~fixed
        exchanged.add(axis, index, exchanges, exchanges)
        done = (old == new) & ~fixed | slices | exchanges
        gathered.add(axis, index, (old > 0) & ~done, dims[old] > 1)
        cut.add(axis, index, (new > 0) & ~done)

    numel = np.broadcast_to(source.numel[row], shape)
    found: list[Move] = []
    for op in reduces:
        found.append(Move("reduce_scatter", scattered[op].axes, numel, numel * scattered[op].apart))
        numel = numel // scattered[op].size
        found.append(Move("all_reduce", reduced[op].axes, numel, np.zeros_like(numel)))
    found.append(Move("slice", sliced.axes, numel, numel // sliced.size * (sliced.axes > 0)))
    numel = numel // sliced.size
    found.append(Move("all_to_all", exchanged.axes, numel, numel * exchanged.apart))
    numel = numel * gathered.size
    found.append(Move("all_gather", gathered.axes, numel, numel * gathered.apart))
    found.append(Move("slice", cut.axes, numel, numel // cut.size * (cut.axes > 0)))
    return [move for move in found if move.groups.any()]


class _Groups:
    """The group of one step of each change: its axes as bits, its size, whether it moves what does not lie in a row."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.axes, self.size = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.int64)
        self.apart = np.zeros(shape, dtype=bool)

    def add(self, axis: Axis, index: int, where: Bools, apart: Bools | bool = False) -> None:
        """One axis more, where it takes part."""
        if where.any():
            self.axes += where * (1 << index)
            self.size *= np.where(where, axis.size, 1)
            self.apart |= where & apart


@dataclass(frozen=True)
class _Rows:
    """Layouts as rows: for each axis the number of its place (0: none), and of how the value is partial (0: not)."""

    places: Ints
    partial: Ints
    numel: Ints

    def touch(self, relation: Bools) -> Bools:
        """By layout and place: whether one of the layout's axes lies in this relation to the place."""
        return np.asarray(relation[self.places].any(axis=1))


class _Arrays:
    """Layouts of one value as arrays, with a number for each place and for each way of being partial."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.columns = {axis.name: index for index, axis in enumerate(axes)}
        self.places: dict[Place, int] = {}
        self.ways: dict[str, int] = {}

    def rows(self, layouts: Sequence[Layout]) -> _Rows:
        different = {layout: row for row, layout in enumerate(dict.fromkeys(layouts))}
        places = np.zeros((len(different), len(self.columns)), dtype=np.int64)
        partial = np.zeros_like(places)
        for layout, row in different.items():
            for dim, digits in enumerate(layout.dims):
                steps = 1
                for digit in digits:
                    outside, steps = steps, steps * digit_size(digit)
                    if isinstance(digit, Axis):
                        place = dim, outside, steps
                        places[row, self.columns[digit.name]] = self.places.setdefault(place, len(self.places) + 1)
            for axis, op in layout.partial:
                partial[row, self.columns[axis.name]] = self.ways.setdefault(op, len(self.ways) + 1)
        numel = np.array([math.prod(layout.local_shape) for layout in different], dtype=np.int64)
        row_of = np.array([different[layout] for layout in layouts], dtype=np.int64)
        return _Rows(places[row_of], partial[row_of], numel[row_of])

    @property
    def reduces(self) -> dict[str, list[int]]:
        """What is reduced together: ``"own"`` is a sum."""
        found: dict[str, list[int]] = {}
        for op in sorted(self.ways):
            found.setdefault("sum" if op == "own" else op, []).append(self.ways[op])
        return dict(sorted(found.items()))

    def relations(self) -> tuple[Ints, Bools]:
        """The dimension of each place, from 1 on (0 is no place), and which places have steps in common."""
        dims, outside, steps = np.array([(-1, 1, 1), *self.places]).T
        apart = (outside[:, None] % steps[None, :] == 0) | (outside[None, :] % steps[:, None] == 0)
        return dims + 1, ~apart & (dims[:, None] == dims[None, :])


_MAX_CACHED_TABLES = 32
"""Tables of changes that are remembered: one is of some megabytes on thousands of devices, and soon asked for again."""

Links = NDArray[np.float64]
"""Seconds of changes of layout by what takes them, `Prices.num_links` rows: copies that the device makes; collectives,
by the outermost level that they cross; and how long the same collectives keep the links of inner levels busy. There may
be a dimension before these rows: the way there, and the gradient's way back."""


def local_numel(layout: Layout) -> int:
    """Elements on one device."""
    return math.prod(layout.local_shape)


def tensor_outputs(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node computes."""
    value = node.meta["val"]
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, torch.Tensor)]


class Prices:
    """Prices on one cluster; what has been priced is remembered.

    Parameters
    ----------
    mesh : Mesh
    cluster : Cluster
    bits : mapping of {"parameters", "gradients"} to int, optional
        What is moved quantized, as `passes.Quantize` does.
    merged_bytes : int
        Of all gradients, where their reductions are merged into buckets, as `passes.Bucket` does; 0 where they are not.
    """

    def __init__(
        self, mesh: Mesh, cluster: Cluster, bits: Mapping[Quantized, int] | None = None, merged_bytes: int = 0
    ) -> None:
        self.mesh, self.cluster, self.bits, self.merged_bytes = mesh, cluster, bits or {}, merged_bytes
        self._axes = (*mesh.axes, *mesh.time_axes, *mesh.slice_axes)
        self.levels = [level.name for level in cluster.levels if level.size > 1] or [cluster.levels[0].name]
        self.num_links = 1 + 2 * len(self.levels)
        self._collectives: dict[tuple[str, tuple[Axis, ...], bool], dict[int, Links]] = {}
        self._groups: dict[tuple[str, int, bool], tuple[tuple[Axis, ...], dict[int, Links]]] = {}
        self._works: dict[fx.Node, Work | None] = {}
        self._state_layouts: dict[tuple[Layout, tuple[tuple[Axis, ...], ...]], list[Layout]] = {}
        self._computed: dict[tuple[object, ...], float] = {}
        self._tables = lru_cache(_MAX_CACHED_TABLES)(self._priced)

    def table(
        self, sources: Sequence[Layout], targets: Sequence[Layout], gradients: Sequence[Layout], itemsize: int
    ) -> Links:
        """From each of `sources` to each of `targets`, and back from where these leave the gradient.

        An array of the two ways, what takes them, and the two.
        """
        return np.stack([self._changes(sources, targets, itemsize), self.gradients(gradients, sources, itemsize)])

    def gradients(self, gradients: Sequence[Layout], sources: Sequence[Layout], itemsize: int) -> Links:
        """The second of `table`'s ways alone: an array of what takes it, and the two."""
        return self._changes(gradients, [whole(source) for source in sources], itemsize).swapaxes(1, 2)

    def pairs(
        self, sources: Sequence[Layout], targets: Sequence[Layout], gradients: Sequence[Layout], itemsize: int
    ) -> Links:
        """As `table`, from each of `sources` only to what is in the same place."""
        back = self.one_way(gradients, [whole(source) for source in sources], itemsize)
        return np.stack([self.one_way(sources, targets, itemsize), back])

    def gathers(self, sources: Sequence[Layout], targets: Sequence[Layout], itemsize: float) -> Links:
        """As `one_way`, of parameters: their all-gathers may be quantized."""
        return self.one_way(sources, targets, itemsize, {"all_gather": self.bits.get("parameters", 0)})

    def scatters(self, sources: Sequence[Layout], targets: Sequence[Layout], itemsize: float) -> Links:
        """As `one_way`, of gradients: their reduce-scatters may be quantized, their reductions merged."""
        bits: Bits = {"reduce_scatter": self.bits.get("gradients", 0)}
        return self.one_way(sources, targets, itemsize, bits, is_merged=self.merged_bytes > 0)

    def one_way(
        self,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        itemsize: float,
        bits: Bits = MappingProxyType({}),
        is_merged: bool = False,
    ) -> Links:
        """From each of `sources` to that of `targets` in the same place: an array of what takes it, and these.

        `bits` has the bits of an element in each kind of collective that moves quantized blocks. Collectives that are
        merged with others have a part of the latency of a bucket.
        """
        links = np.zeros((self.num_links, len(sources)))
        pairs = enumerate(zip(sources, targets))
        moved = [index for index, (source, target) in pairs if source is not target and source != target]
        plain = [index for index in moved if sources[index].padding is None and targets[index].padding is None]
        if plain:
            ends = [sources[i] for i in plain], [targets[i] for i in plain]
            links[:, plain] = self._priced(*ends, itemsize, paired=True, bits=bits, is_merged=is_merged)
        for index in sorted({*moved} - {*plain}):
            for step in steps_between(sources[index], targets[index]):
                if step.kind not in LOCAL_STEPS:
                    size = max(local_numel(step.before), local_numel(step.after)) * itemsize
                    links[:, index] += self.collective(step.kind, step.axes, int(size), is_merged)
        return links

    def _changes(self, sources: Sequence[Layout], targets: Sequence[Layout], itemsize: float) -> Links:
        """What takes a change from each of `sources` to each of `targets`, of which many are equal."""
        different, rows = _distinct(sources)
        others, columns = _distinct(targets)
        return self._tables(different, others, itemsize)[:, rows[:, None], columns]

    def _priced(
        self,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        itemsize: float,
        paired: bool = False,
        bits: Bits = MappingProxyType({}),
        is_merged: bool = False,
    ) -> Links:
        """What changes of layout take: a table of them, or a column."""
        shape = (len(sources),) if paired else (len(sources), len(targets))
        links: Links = np.zeros((self.num_links, *shape))
        for move in moves_between(sources, targets, self._axes, paired):
            sizes, size_of = np.unique((move.copied * itemsize).astype(np.int64), return_inverse=True)
            links[0] += np.array([self.copy(int(size)) for size in sizes])[size_of].reshape(move.copied.shape)
            if move.kind not in LOCAL_STEPS:
                sizes = (move.numel * itemsize).astype(np.int64)
                self._add(links, move.kind, move.groups, sizes, itemsize, bits.get(move.kind, 0), is_merged)
        return links

    def _add(
        self,
        links: Links,
        kind: RedistributionKind,
        groups: Ints,
        sizes: Ints,
        itemsize: float,
        bits: int,
        is_merged: bool,
    ) -> None:
        """Add what one step of all changes takes; few of their groups and sizes differ."""
        on = groups > 0
        different, size_of = np.unique(sizes[on], return_inverse=True)
        pairs, pair_of = np.unique(groups[on] * len(different) + size_of, return_inverse=True)
        numbers = [divmod(int(pair), len(different)) for pair in pairs]
        priced = [
            self._quantized(kind, group_axes(group, self._axes), int(different[size]), itemsize, bits)
            if bits
            else self._of_group(kind, group, int(different[size]), is_merged)
            for group, size in numbers
        ]
        links[:, on] += np.array(priced)[pair_of].T

    def _quantized(
        self, kind: RedistributionKind, axes: tuple[Axis, ...], num_bytes: int, itemsize: float, bits: int
    ) -> Links:
        """What a collective takes that moves quantized blocks, with the kernels before and after it."""
        space = [axis for axis in axes if axis.kind == "space"]
        links, elements, part = np.zeros(self.num_links), num_bytes / itemsize, bits / 8
        if kind == "all_gather":
            own = elements / axes_size(space)
            links[0] += self._kernel(own * (itemsize + part)) + self._kernel(elements * (part + itemsize))
            return links + self._blocks("all_gather", tuple(space), elements, bits)
        stages = quantization_stages(space)
        for stage in stages:
            left = elements / axes_size(stage)
            links[0] += self._kernel(elements * (itemsize + part)) + self._kernel(elements * part + left * itemsize)
            if stage is not stages[-1]:  # the rows for each rank are put next to each other
                links[0] += self._kernel(2 * elements * part)
            links += self._blocks("all_to_all", stage, elements, bits)
            elements = left
        return links

    def _blocks(self, kind: RedistributionKind, axes: tuple[Axis, ...], elements: float, bits: int) -> Links:
        """Moving quantized elements, and then the scales of their blocks."""
        scales = 4 * elements / QUANTIZATION_BLOCK
        return self.collective(kind, axes, int(elements * bits / 8)) + self.collective(kind, axes, int(scales))

    def _kernel(self, num_bytes: float) -> float:
        """Seconds of a kernel that reads and writes so many bytes together."""
        return self.cluster.device.launch_latency + bytes_seconds(int(num_bytes), self.cluster)

    def copy(self, num_bytes: int) -> float:
        """Seconds of reading and writing so many bytes."""
        return self._kernel(2 * num_bytes) if num_bytes else 0.0

    def _of_group(self, kind: str, group: int, num_bytes: int, is_merged: bool) -> Links:
        """`collective` over the axes of one of a move's groups: looked up by its number, as axes take long to hash."""
        key = kind, group, is_merged
        if key not in self._groups:
            axes = group_axes(group, self._axes)
            self._groups[key] = axes, self._collectives.setdefault((kind, axes, is_merged), {})
        axes, prices = self._groups[key]
        return prices[num_bytes] if num_bytes in prices else self.collective(kind, axes, num_bytes, is_merged)

    def collective(self, kind: str, axes: tuple[Axis, ...], num_bytes: int, is_merged: bool = False) -> Links:
        """What a collective takes, as `Links`: nothing over time axes."""
        prices = self._collectives.setdefault((kind, axes, is_merged), {})
        if num_bytes not in prices:
            space = tuple(axis for axis in axes if axis.kind == "space")
            prices[num_bytes] = self._collective(kind, space, num_bytes, is_merged)
        return prices[num_bytes]

    def _collective(self, kind: str, axes: tuple[Axis, ...], num_bytes: int, is_merged: bool) -> Links:
        links = np.zeros(self.num_links)
        if axes:
            demand = collective_demand(kind, num_bytes, axes, self.cluster)
            outermost = crossed_level(axes, self.cluster)
            latency = demand.latency
            if is_merged:  # a part of the one latency of a full bucket, or of the only one
                share = max(demand.transfer / FULL_BUCKET_RATIO, latency * num_bytes / self.merged_bytes)
                latency = min(latency, share)
            links[1 + self.levels.index(outermost)] = latency + demand.transfer
            for level, use in demand.use.items():
                if level != outermost:
                    links[1 + len(self.levels) + self.levels.index(level)] = use * demand.transfer
        return links

    def state_layouts(self, used: Layout, stages: tuple[tuple[Axis, ...], ...]) -> list[Layout]:
        """The layouts at rest of a parameter that its op needs at `used`, of its gradient, and of its states."""
        key = used, stages
        if key not in self._state_layouts:
            free = [[axis for axis in stage if axis not in used.shard_axes] for stage in stages]
            self._state_layouts[key] = state_layouts(used, free, self.mesh)
        return self._state_layouts[key]

    def compute(self, node: fx.Node, assignment: Assignment, batch: Sequence[str] = (), parts: int = 1) -> float:
        """Seconds of an op at an assignment: the axes share its FLOPs, its bytes and its product follow local sizes.

        Of all `parts` of its `batch`, one after another, where one of these factors can be cut into so many.
        """
        if node not in self._works:
            self._works[node] = node_work(node)
        work, bound = self._works[node], info(node).rule
        if work is None or bound is None:
            return 0.0
        sizes, devices = bound.sizes(), 1
        for axis, factor in assignment.items:
            sizes[factor] //= axis.size
            devices *= axis.size
        cut = next((name for name in batch if sizes[name] % parts == 0), None) if parts > 1 else None
        if cut is None:
            parts = 1
        else:
            sizes[cut] //= parts
        key = node, devices, parts, *sizes.values()
        if key not in self._computed:
            self._computed[key] = parts * self._compute(node, work, bound, sizes, devices * parts)
        return self._computed[key]

    def _compute(self, node: fx.Node, work: Work, bound: BoundRule, sizes: Mapping[str, int], devices: int) -> float:
        def shape(dims: Dims) -> tuple[int, ...]:
            return tuple(math.prod(sizes[name] for name in names) for names in dims)

        inputs = [(argument, shape(dims)) for argument, dims in zip(tensor_args(node), bound.inputs)]
        outputs = [(value, shape(dims)) for value, dims in zip(tensor_outputs(node), bound.outputs)]
        moved = sum(math.prod(local) * source.meta["val"].element_size() for source, local in inputs)
        moved += sum(math.prod(local) * value.element_size() for value, local in outputs)
        shapes = {**dict(inputs), node: outputs[0][1]}

        def local_shape(source: fx.Node) -> tuple[int, ...]:
            return shapes[source] if source in shapes else tensor_shape(source)

        local = Work(
            work.flops // devices,
            min(moved, work.num_bytes),
            work.dtype,
            product_of(node, local_shape) if work.product is not None else None,
            signature(node, local_shape) if self.cluster.measured is not None else "",
            work.computed,
        )
        return work_seconds(local, self.cluster)


def _distinct(layouts: Sequence[Layout]) -> tuple[tuple[Layout, ...], Ints]:
    """The different ones, and for each layout the number of its own."""
    numbers: dict[Layout, int] = {}
    number_of = [numbers.setdefault(layout, len(numbers)) for layout in layouts]
    return tuple(numbers), np.array(number_of, dtype=np.int64)


def whole(layout: Layout) -> Layout:
    """Where the gradient of a value is wanted: of a partial sum it is whole."""
    return replace(layout, partial=()) if layout.partial else layout
