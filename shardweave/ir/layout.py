"""Layouts: how a value is sharded, and over which axes it is a partial result; and the algebra of layouts.

The algebra goes from assignments to layouts, through views, and to the collectives from one layout to another.

Redistribution
    `steps_between` gives a short list of steps, each of one kind, in this order:

    1. Reduce partial results: by reduce-scatter where the result is wanted sharded, else by all-reduce.
    2. Slice dimensions that are whole on each device.
    3. Move axes from one dimension to another, by all-to-all.
    4. All-gather dimensions that are wanted whole.
    5. Slice the remaining dimensions.

    All axes of one kind are handled in one step over their joint group: a value is reduced once and gathered once.

Padding
    States are sharded over all their axes, also over those that divide no dimension. DTensor, and FSDP with it, cuts
    such a dimension into parts rounded up, of which the last are shorter or empty. A generated graph is the same on all
    ranks, so each rank has a *place* with room for the longest part, and collectives move places. A step ``unpad``
    removes the padding after the gather of a parameter. A step ``pad`` inserts it before a gradient is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Literal

from shardweave.ir.errors import LayoutError
from shardweave.ir.mesh import Axis, Digit, Mesh, axes_size
from shardweave.ir.op_rule import BoundRule, Dims

MAX_CACHED = 2**14
"""How many pairs of layouts are cached with their relation: equal layers, and plans of one step, ask for the same."""


def normalise(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    """`digits` with neighbouring local digits merged and those of size 1 dropped.

    >>> normalise([4, 1, 8]), normalise([1])
    ((32,), ())
    """
    merged: list[Digit] = []
    for digit in digits:
        if isinstance(digit, int) and merged and isinstance(merged[-1], int):
            merged[-1] *= digit
        elif digit != 1:
            merged.append(digit)
    return tuple(merged)


@dataclass(frozen=True)
class Padding:
    """The sharding of a dimension that its axes do not divide, in *places* of one length on all devices.

    A block of `size` rows is cut over `levels`, outermost first, each time into equal parts rounded up, so that the
    last ones are shorter or empty, as in ``torch.chunk`` and DTensor. A place has room for the longest part. A shorter
    part is at the front of its place; the rows behind it are padding.

    Parameters
    ----------
    dim : int
        The dimension. A block is a run of its innermost rows; the digits outside of the block divide the dimension.
    size : int
        The rows of a block.
    levels : tuple of int
        The number of parts of each cut.

    Examples
    --------
    >>> padding = Padding(0, 10, (2, 2, 2))
    >>> padding.counts, padding.place, padding.padded
    ((2, 1, 1, 1, 2, 1, 1, 1), 2, 16)
    """

    dim: int
    size: int
    levels: tuple[int, ...]

    @property
    def place(self) -> int:
        """Rows of the place of one part."""
        return -(-self.size // math.prod(self.levels))

    @property
    def padded(self) -> int:
        """Rows of all places of a block together."""
        return self.place * math.prod(self.levels)

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each part, in order."""
        return _counts(self.size, self.levels)

    @property
    def in_front(self) -> bool:
        """Whether the places of a block hold its rows contiguously, with all padding at the end.

        >>> Padding(0, 7, (2, 2)).in_front, Padding(0, 5, (2, 2)).in_front
        (True, False)
        """
        return self.counts == _counts(self.size, (math.prod(self.levels),))

    def before(self, row: int) -> int:
        """How many rows of the value come before `row` of its places.

        >>> [Padding(0, 10, (2, 2, 2)).before(row) for row in (0, 2, 4, 8, 16, 18)]
        [0, 2, 3, 5, 10, 12]
        """
        blocks, row = divmod(row, self.padded)
        part, row = divmod(row, self.place)
        counts = self.counts
        return blocks * self.size + sum(counts[:part]) + min(row, counts[part])


@cache
def _counts(size: int, levels: tuple[int, ...]) -> tuple[int, ...]:
    parts = [size]
    for level in levels:
        parts = [max(0, min(-(-n // level), n - step * -(-n // level))) for n in parts for step in range(level)]
    return tuple(parts)


@dataclass(frozen=True)
class Layout:
    """The layout of a value: the digits of each dimension, and the axes over which it is a partial result.

    A dimension is a product of *digits*, like a number in a mixed radix: an `Axis` is a digit that is sharded over it,
    an int is a digit that each device has whole.

    Parameters
    ----------
    dims : tuple of tuple of Digit
        The digits of each dimension, outermost first, normalised. A dimension of size 1 is ``()``.
    partial : tuple of (Axis, str)
        The axes over which the value still has to be reduced, and how: ``"sum"``, ``"max"``, ``"min"``, or ``"own"``
        for a sum in which each entry is on one rank and zero on the others.
    padding : Padding, optional
        The padding of a dimension that its axes do not divide; its digits are then those of the places. Only optimizer
        states, parameters between steps, and gradients on the way there are padded.

    Examples
    --------
    >>> x = Axis("gpu0", 2)
    >>> layout = Layout(((x, 4), (16,)))
    >>> layout.global_shape, layout.local_shape, str(layout)
    ((8, 16), (4, 16), '[gpu0 4, 16]')
    """

    dims: tuple[tuple[Digit, ...], ...]
    partial: tuple[tuple[Axis, str], ...] = ()
    padding: Padding | None = None

    @cached_property
    def _hash(self) -> int:  # depends on numbers alone, so it is equal in a process that reads a pickled layout
        return hash((self.dims, self.partial_axes))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def replicated(cls, shape: Sequence[int]) -> Layout:
        """The layout of a value of `shape` that is replicated on every device."""
        return cls(tuple(normalise([int(size)]) for size in shape))

    @cached_property
    def global_shape(self) -> tuple[int, ...]:
        shape = self.padded_shape
        if (padding := self.padding) is None:
            return shape
        return tuple(
            size // padding.padded * padding.size if dim == padding.dim else size for dim, size in enumerate(shape)
        )

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The global shape, with the padding of a padded dimension."""
        return tuple(math.prod(d if isinstance(d, int) else d.size for d in dim) for dim in self.dims)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape on each device. A padded dimension has the length of its place, which the part may not fill."""
        return tuple(math.prod(d for d in dim if isinstance(d, int)) for dim in self.dims)

    @cached_property
    def shard_axes(self) -> tuple[Axis, ...]:
        """The axes that some dimension is sharded over, in the order of the dimensions."""
        return tuple(d for dim in self.dims for d in dim if isinstance(d, Axis))

    @cached_property
    def partial_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not self.shard_axes

    def without_partial(self) -> Layout:
        return replace(self, partial=())

    def place(self, axis: Axis) -> tuple[int, int, int]:
        """The dimension that an axis shards, and how many local rows are outside and inside of the axis there.

        >>> micro, gpu = Axis("micro", 2, 2, "time"), Axis("gpu0", 2)
        >>> Layout(((16,), (3, micro, gpu, 4))).place(micro)
        (1, 3, 4)
        """
        dim = next(dim for dim, digits in enumerate(self.dims) if axis in digits)
        at = self.dims[dim].index(axis)
        outer, inner = (
            math.prod(digit for digit in part if isinstance(digit, int))
            for part in (self.dims[dim][:at], self.dims[dim][at + 1 :])
        )
        return dim, outer, inner

    def __str__(self) -> str:
        dims = [" ".join(d.name if isinstance(d, Axis) else str(d) for d in dim) or "1" for dim in self.dims]
        if self.padding is not None:
            dims[self.padding.dim] += f" of {self.global_shape[self.padding.dim]}"
        partial = "".join(f" +{axis.name}" if op == "sum" else f" {op}({axis.name})" for axis, op in self.partial)
        return f"[{', '.join(dims)}]{partial}"


Digits = tuple[Digit, ...]
Units = list[tuple[Digit, Digit]]


def digit_size(digit: Digit) -> int:
    """Number of steps of a digit."""
    return digit.size if isinstance(digit, Axis) else digit


def outermost_first(axes: Iterable[Axis]) -> list[Axis]:
    """The axes in their order on one factor: the widest strides outermost."""
    return sorted(axes, key=lambda axis: -axis.stride)


def dims_layout(dims: Dims, sizes: Mapping[str, int], assignment: Mapping[Axis, str]) -> tuple[Digits, ...]:
    """The digits of each dimension of a value whose factors are split over these axes, the widest strides outermost.

    This is the order of ranks, so that gathers need no copy. Grids take their x and y axes innermost. The batch of an
    op with fewer of these axes is therefore a part of the batch of an op with more: no gather is needed between them.

    Raises
    ------
    LayoutError
        If the axes of a factor do not divide it.
    """
    return _dims_layout(dims, sizes, _by_factor(assignment))


def _by_factor(assignment: Mapping[Axis, str]) -> dict[str, list[Axis]]:
    """The axes of each factor, outermost first."""
    found: dict[str, list[Axis]] = {}
    for axis in outermost_first(assignment):
        found.setdefault(assignment[axis], []).append(axis)
    return found


def _dims_layout(dims: Dims, sizes: Mapping[str, int], by_factor: Mapping[str, list[Axis]]) -> tuple[Digits, ...]:
    result = []
    for names in dims:
        digits: list[Digit] = []
        for name in names:
            axes = by_factor.get(name, [])
            local, rest = divmod(sizes[name], axes_size(axes))
            if rest:
                raise LayoutError(
                    f"the factor {name} of size {sizes[name]} cannot be split over {', '.join(map(str, axes))}"
                )
            digits += [*axes, local]
        result.append(normalise(digits))
    return tuple(result)


def output_layouts(rule: BoundRule, assignment: Mapping[Axis, str], mesh: Mesh) -> tuple[Layout, ...]:
    """The layouts of an op's outputs: sharded on the factors that they have, partial over the axes of the others."""
    sizes, by_factor, ordered = rule.sizes(), _by_factor(assignment), mesh.ordered(assignment)
    layouts = []
    for index, dims in enumerate(rule.outputs):
        present = {name for names in dims for name in names}
        partial = tuple(
            (axis, rule.factor(assignment[axis]).reduce)
            for axis in ordered
            if index not in rule.never_partial
            and assignment[axis] not in present
            and any(assignment[axis] in names for dims in rule.inputs for names in dims)
        )
        layouts.append(Layout(_dims_layout(dims, sizes, by_factor), partial))
    return tuple(layouts)


def input_layouts(rule: BoundRule, assignment: Mapping[Axis, str]) -> tuple[Layout, ...]:
    """The layouts that an op needs its inputs at."""
    sizes, by_factor = rule.sizes(), _by_factor(assignment)
    return tuple(Layout(_dims_layout(dims, sizes, by_factor)) for dims in rule.inputs)


def split_digits(digits: Sequence[Digit], sizes: Sequence[int]) -> list[Digits] | None:
    """Split `digits` into consecutive runs with these products; None if a split would fall inside an axis.

    >>> split_digits((32,), [4, 8]), split_digits((6,), [4])
    ([(4,), (8,)], None)
    """
    if 0 in digits:  # a dimension without elements
        return [normalise([size]) for size in sizes] if len(digits) == 1 else None
    queue = list(digits)
    runs: list[Digits] = []
    for size in sizes:
        run: list[Digit] = []
        while size > 1:
            if not queue:
                return None
            digit = queue.pop(0)
            steps = digit_size(digit)
            if size % steps == 0:
                run.append(digit)
                size //= steps
            elif isinstance(digit, int) and steps % size == 0:
                run.append(size)
                queue.insert(0, steps // size)
                size = 1
            else:
                return None
        runs.append(normalise(run))
    return runs if all(digit == 1 for digit in queue) else None


def factors_of(dims: Sequence[Digits], names: Dims, sizes: Mapping[str, int]) -> dict[Axis, str]:
    """The factor that each axis of a value splits. Axes of a dimension that has no such factors are left out."""
    found: dict[Axis, str] = {}
    for digits, factors in zip(dims, names):
        runs = split_digits(digits, [sizes[name] for name in factors])
        for name, run in zip(factors, runs or ()):
            found.update({digit: name for digit in run if isinstance(digit, Axis)})
    return found


def layout_through_view(layout: Layout, source: Dims, target: Dims, sizes: Mapping[str, int]) -> Layout | None:
    """The layout on the other side of a view; None if the view would split an axis, or the layout is padded."""
    return None if layout.padding is not None else _through_view(layout, source, target, tuple(sizes.items()))


@lru_cache(MAX_CACHED)
def _through_view(layout: Layout, source: Dims, target: Dims, factors: tuple[tuple[str, int], ...]) -> Layout | None:
    sizes = dict(factors)
    by_factor: dict[str, Digits] = {}
    for digits, names in zip(layout.dims, source):
        runs = split_digits(digits, [sizes[name] for name in names])
        if runs is None:
            return None
        by_factor.update(zip(names, runs))
    kept = {name for names in target for name in names}
    if any(isinstance(digit, Axis) for name, run in by_factor.items() if name not in kept for digit in run):
        return None  # the other side does not have this factor: it must be whole
    dims = tuple(
        normalise(digit for name in names for digit in by_factor.get(name, (sizes[name],))) for names in target
    )
    return Layout(dims, layout.partial)


def without_axes(layout: Layout, axes: Iterable[Axis]) -> Layout:
    """`layout` with these axes gathered, and without its padding if that leaves no axis to pad for."""
    gone = set(axes)
    if gone.isdisjoint(layout.shard_axes):
        return layout
    dims = tuple(normalise(d.size if isinstance(d, Axis) and d in gone else d for d in dim) for dim in layout.dims)
    return without_padding(replace(layout, dims=dims))


def with_axes_joined(layout: Layout, axes: Collection[Axis]) -> Layout:
    """`layout` with all that is along these axes concatenated or summed."""
    return replace(without_axes(layout, axes), partial=tuple(item for item in layout.partial if item[0] not in axes))


def sliced_like(layout: Layout, other: Layout, axes: Iterable[Axis]) -> Layout | None:
    """`layout` also sharded over those of `axes` that shard `other`, at the same places; None if its axes cross these.

    >>> part, gpu = Axis("slice2", 2, 0, "time"), Axis("gpu0", 2)
    >>> str(sliced_like(Layout(((8,), (gpu, 4))), Layout(((part, 4), (8,))), [part]))
    '[slice2 4, gpu0 4]'
    >>> sliced_like(Layout(((gpu, 4), (8,))), Layout(((part, 4), (8,))), [part])
    """
    dims = list(layout.dims)
    for axis in axes:
        if axis not in other.shard_axes:
            continue
        dim = next(dim for dim, digits in enumerate(other.dims) if axis in digits)
        at = other.dims[dim].index(axis)
        outer, inner = (
            math.prod(map(digit_size, digits)) for digits in (other.dims[dim][:at], other.dims[dim][at + 1 :])
        )
        runs = split_digits(dims[dim], [outer, axis.size, inner])
        if runs is None or runs[1] != (axis.size,):
            return None
        dims[dim] = normalise([*runs[0], axis, *runs[2]])
    return replace(layout, dims=tuple(dims))


def state_layouts(compute: Layout, stages: Sequence[Sequence[Axis]], mesh: Mesh) -> list[Layout]:
    """The layouts of the stages of a parameter's sharding: `compute`, further sharded over the axes of each stage.

    Axes that divide a dimension come first (`state_layout`). Axes that divide none pad one dimension, for all stages
    together (`padded_state_layout`): the layout of a stage is that of the last one, with the axes of the later stages
    gathered.
    """
    found, layout = [], compute
    for axes in stages:
        layout = state_layout(layout, axes, mesh)
        found.append(layout)
    left = [axis for axes in stages for axis in axes if axis not in layout.shard_axes]
    padded = padded_state_layout(compute, layout, left, mesh)
    if padded is None:
        return found
    later = [[axis for axes in stages[index + 1 :] for axis in axes] for index, _ in enumerate(stages)]
    return [without_axes(padded, axes) for axes in later]


def state_layout(compute: Layout, axes: Sequence[Axis], mesh: Mesh) -> Layout:
    """`compute` further sharded over `axes`, each innermost on a dimension that it divides.

    Each axis takes the first dimension on which it is a plain DTensor shard, in mesh order. Axes that divide no
    dimension are left out (see `state_layouts`).
    """
    dims = [list(dim) for dim in compute.dims]
    order: dict[Digit, int] = {axis: index for index, axis in enumerate(mesh.axes)}
    for axis in mesh.ordered(axes):
        best: tuple[int, int, int] | None = None
        for dim, digits in enumerate(dims):
            at = max((index for index, digit in enumerate(digits) if isinstance(digit, Axis)), default=-1) + 1
            local = digits[at] if at < len(digits) else 1
            if not isinstance(local, int) or local % axis.size:
                continue
            before = digits[:at]
            strided = any(digit not in order for digit in before)  # local digits, or slices of an op
            disordered = any(order.get(digit, -1) > order[axis] for digit in before)
            score = 2 * strided + disordered
            if best is None or score < best[0]:
                best = score, dim, at
        if best is not None:
            _, dim, at = best
            local = dims[dim][at]
            assert isinstance(local, int)
            dims[dim][at : at + 1] = [axis, local // axis.size]
    return Layout(tuple(normalise(dim) for dim in dims))


RedistributionKind = Literal["all_reduce", "reduce_scatter", "slice", "all_to_all", "all_gather", "pad", "unpad"]
LOCAL_STEPS: tuple[RedistributionKind, ...] = ("slice", "pad", "unpad")
"""The kinds of steps without communication."""


@dataclass(frozen=True)
class RedistributionStep:
    """One step of a redistribution, of one kind, over the joint group of `axes`."""

    kind: RedistributionKind
    axes: tuple[Axis, ...]
    before: Layout
    after: Layout
    reduce: str = "sum"

    @property
    def units(self) -> list[Units]:
        """For each dimension, the digits before and after, split so that they correspond one to one."""
        return [_align(b, a) or [] for b, a in zip(self.before.dims, self.after.dims)]


def _align(before: Digits, after: Digits) -> Units | None:
    """Pairs of digits that cover the same rows of a dimension; None if this would split an axis."""
    left, right = list(before), list(after)
    units: Units = []
    while left and right:
        a, b = left.pop(0), right.pop(0)
        size_a, size_b = digit_size(a), digit_size(b)
        if size_a == size_b:
            units.append((a, b))
        elif size_a % size_b == 0 and isinstance(a, int):
            units.append((size_b, b))
            left.insert(0, size_a // size_b)
        elif size_b % size_a == 0 and isinstance(b, int):
            units.append((a, size_a))
            right.insert(0, size_b // size_a)
        else:
            return None
    return units if not left and not right else None


def steps_between(have: Layout, want: Layout) -> list[RedistributionStep]:
    """The steps from one layout of a value to another (see the module's docstring).

    Raises
    ------
    LayoutError
        If the layouts belong to values of different shapes, or `want` is partial over an axis that `have` is not.
    """
    if have.global_shape != want.global_shape:
        raise LayoutError(f"{have} and {want} are layouts of different shapes")
    if not set(want.partial) <= set(have.partial):
        raise LayoutError(f"a value at {have} cannot become the partial result {want}")
    if have.padding is not None and have.padding != want.padding:
        bare = want if want.padding is None else without_axes(want, axes_of(want.dims[want.padding.dim]))
        places, whole = _in_places(bare, have)
        return [*_steps(have, places), RedistributionStep("unpad", (), places, whole), *steps_between(whole, want)]
    if have.padding != want.padding:
        places, whole = _in_places(have, want)
        return [*_steps(have, whole), RedistributionStep("pad", (), whole, places), *_steps(places, want)]
    return [*_steps(have, want)]


def _in_places(layout: Layout, padded: Layout) -> tuple[Layout, Layout]:
    """`layout` with the padding of `padded`, and without. A dimension is gathered if `layout` cuts padded blocks."""
    assert padded.padding is not None
    places = with_padding(layout, padded.padding)
    if places is None:
        layout = without_axes(layout, axes_of(layout.dims[padded.padding.dim]))
        places = with_padding(layout, padded.padding)
        assert places is not None
    return places, layout


def axes_of(digits: Digits) -> list[Axis]:
    """The axes among the digits of a dimension."""
    return [digit for digit in digits if isinstance(digit, Axis)]


@lru_cache(MAX_CACHED)
def _steps(have: Layout, want: Layout) -> tuple[RedistributionStep, ...]:
    """The steps between two layouts of the same padding."""
    steps: list[RedistributionStep] = []
    current = have

    def move(kind: RedistributionKind, after: Layout, reduce: str = "sum", moved: Iterable[Axis] = ()) -> None:
        nonlocal current
        changed = set(current.shard_axes) ^ set(after.shard_axes) | set(current.partial_axes) - set(after.partial_axes)
        changed |= set(moved)
        if after != current:
            axes = tuple(sorted(changed, key=lambda axis: -axis.stride))
            steps.append(RedistributionStep(kind, axes, current, after, reduce))
            current = after

    # 1. Reduce.
    pending = [(axis, "sum" if op == "own" else op) for axis, op in have.partial if (axis, op) not in want.partial]
    for op in sorted({op for _, op in pending}):
        mine = {axis for axis, other in pending if other == op}
        scattered = _replace_digits(current, want, _scattered_where_wanted(mine))
        gone = set(scattered.shard_axes) - set(current.shard_axes)
        left = tuple(p for p in current.partial if p[0] not in gone)
        move("reduce_scatter", replace(scattered, partial=left), op)
        rest = mine - gone
        move("all_reduce", replace(current, partial=tuple(p for p in current.partial if p[0] not in rest)), op)

    # 2. Slice.
    def free(h: Digit, w: Digit) -> Digit:
        taken = current.shard_axes
        return w if isinstance(h, int) and isinstance(w, Axis) and w not in taken else h

    move("slice", _replace_digits(current, want, free))
    # 3. Move axes between dimensions.
    moved = _axes_to_exchange(current, want)

    def exchanged(have: Digit, want: Digit) -> Digit:
        return want if have != want and (have in moved or want in moved) else have

    move("all_to_all", _replace_digits(current, want, exchanged), moved=moved)
    # 4. Gather. A dimension whose digits do not correspond is gathered whole.
    whole = [digits if _align(digits, after) is not None else (size,)
             for digits, after, size in zip(current.dims, want.dims, current.padded_shape)]  # fmt: skip
    gathered = replace(current, dims=tuple(normalise(digits) for digits in whole))
    move("all_gather", _replace_digits(gathered, want, lambda h, w: h.size if isinstance(h, Axis) and h != w else h))
    # 5. Slice the rest.
    move("slice", _replace_digits(current, want, free))
    if current != want:
        raise LayoutError(f"no way from {have} to {want}")
    return tuple(steps)


def _axes_to_exchange(have: Layout, want: Layout) -> set[Axis]:
    """The axes that move from one dimension to another: candidates for an all-to-all."""
    units = [unit for before, after in zip(have.dims, want.dims) for unit in _align(before, after) or ()]
    left = {h for h, w in units if isinstance(h, Axis) and isinstance(w, int)}
    return left & {w for h, w in units if isinstance(w, Axis) and isinstance(h, int)}


def _scattered_where_wanted(axes: set[Axis]) -> Callable[[Digit, Digit], Digit]:
    """A choice of digits: the wanted one if it is in `axes` and the value is whole there, else the present one."""
    return lambda have, want: want if isinstance(have, int) and want in axes else have


def _replace_digits(current: Layout, want: Layout, choose: Callable[[Digit, Digit], Digit]) -> Layout:
    """`current` with each digit replaced by ``choose(digit, wanted digit)``."""
    dims = []
    for digits, after in zip(current.dims, want.dims):
        units = _align(digits, after)
        dims.append(digits if units is None else normalise(choose(h, w) for h, w in units))
    return replace(current, dims=tuple(dims))


def padded_state_layout(compute: Layout, rest: Layout, left: Sequence[Axis], mesh: Mesh) -> Layout | None:
    """`rest` also sharded over axes that divide no dimension (`left`), by padding one; None if it stays as it is.

    The padded dimension is the first of which a device has several rows, so that the part of a device is a view of its
    place. The axes that shard this dimension in `rest` are applied anew, together with the others, in the order of the
    mesh, as DTensor does. A parameter with fewer elements than there are devices stays as it is. So does an axis that
    would have to be cut before the axes that `compute` has on the dimension.

    Examples
    --------
    >>> mesh = Mesh.of_levels([("gpu", 3)])
    >>> whole = Layout.replicated((7, 5))
    >>> str(padded_state_layout(whole, whole, mesh.axes, mesh))
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


def with_padding(layout: Layout, padding: Padding) -> Layout | None:
    """`layout`, which is not padded, with this padding; None if it cuts a block of rows.

    >>> x = Axis("gpu0", 2)
    >>> str(with_padding(Layout(((x, 5), (4,))), Padding(0, 5, (2, 2))))
    '[gpu0 8 of 10, 4]'
    """
    outer, rows = _rows(layout, padding.dim)
    if rows % padding.size:
        return None
    dims = [*layout.dims]
    dims[padding.dim] = normalise([*outer, rows // padding.size * padding.padded])
    return replace(layout, dims=tuple(dims), padding=padding)


def without_padding(layout: Layout) -> Layout:
    """`layout` without its padding, if each device has whole blocks. The inverse of `with_padding`.

    >>> str(without_padding(Layout(((8,), (4,)), padding=Padding(0, 5, (2, 2)))))
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
    """The digits of a dimension outside of its innermost contiguous rows on a device, and the number of these rows."""
    digits = list(layout.dims[dim])
    rows = digits.pop() if digits and isinstance(digits[-1], int) else 1
    assert isinstance(rows, int)
    return digits, rows
