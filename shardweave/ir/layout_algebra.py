"""Layout algebra: the sizes of local tensors, and the collectives that turn one layout into another, with joint
groups and padding.

The algebra of layouts: from assignments to layouts, through views, and from one layout to another.

A change of layout is a short list of steps, each of one kind: reduce what is partial (scattering it where it is
wanted in parts), slice what can be sliced at once, exchange what only moves from one dimension to another, gather what
lies in parts, slice the rest. All axes of a kind go together, so that a value is reduced once and gathered once, over
joint groups. Places with room to spare (`padding`) are packed once they are gathered, and spread before they are cut.

Padding: states rest over all their axes, also where these divide no dimension.

DTensor, and FSDP with it, cuts such a dimension into parts rounded up, of which the last are shorter or empty. A
generated graph is the same on all ranks, so that each rank there has a *place* with room for the longest part. Places
are what collectives move; once gathered, their rows are packed (an ``unpad``), and a gradient's rows are spread to
their places (a ``pad``) before it is reduced to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardweave.ir.errors import LayoutError
from shardweave.ir.layout import Layout, Padding, normalise
from shardweave.ir.mesh import Axis, Digit, Mesh, axes_size
from shardweave.ir.op_rule import BoundRule, Dims

Digits = tuple[Digit, ...]
Units = list[tuple[Digit, Digit]]


def digit_size(digit: Digit) -> int:
    """Number of steps of a digit."""
    return digit.size if isinstance(digit, Axis) else digit


def outermost_first(axes: Iterable[Axis]) -> list[Axis]:
    """The order of axes on one factor: the widest strides outermost."""
    return sorted(axes, key=lambda axis: -axis.stride)


def dims_layout(dims: Dims, sizes: Mapping[str, int], assignment: Mapping[Axis, str], mesh: Mesh) -> tuple[Digits, ...]:
    """Where a value's dimensions lie when its factors have these axes: on each atom, the widest strides outermost.

    That is the order of ranks, so that gathers need no copy; and as grids take their x and y axes innermost, the
    batch of an op with fewer of them is a part of the batch of one with more: no gather is needed between the two.

    Raises
    ------
    LayoutError
        Where the axes of a factor do not divide it.
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
    """Where the outputs lie: sharded on the factors that they have, partial over the axes of those they do not."""
    sizes, by_factor, ordered = rule.sizes(), _by_factor(assignment), mesh.ordered(assignment)
    layouts = []
    for index, dims in enumerate(rule.outputs):
        present = {name for names in dims for name in names}
        partial = tuple(
            (axis, rule.factor(assignment[axis]).reduce)
            for axis in ordered
            if index not in rule.apart and assignment[axis] not in present and _in_inputs(rule, assignment[axis])
        )
        layouts.append(Layout(_dims_layout(dims, sizes, by_factor), partial))
    return tuple(layouts)


def input_layouts(rule: BoundRule, assignment: Mapping[Axis, str], mesh: Mesh) -> tuple[Layout, ...]:
    """Where the op needs its inputs."""
    sizes, by_factor = rule.sizes(), _by_factor(assignment)
    return tuple(Layout(_dims_layout(dims, sizes, by_factor)) for dims in rule.inputs)


def _in_inputs(rule: BoundRule, factor: str) -> bool:
    return any(factor in names for dims in rule.inputs for names in dims)


def cut(digits: Sequence[Digit], sizes: Sequence[int]) -> list[Digits] | None:
    """`digits` cut into consecutive runs with these products; None where a cut would fall inside an axis.

    >>> cut((32,), [4, 8]), cut((6,), [4])
    ([(4,), (8,)], None)
    """
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
    """The factor that each axis of a value lies on; axes of a dimension that has no such atoms are left out."""
    found: dict[Axis, str] = {}
    for digits, factors in zip(dims, names):
        runs = cut(digits, [sizes[name] for name in factors])
        for name, run in zip(factors, runs or ()):
            found.update({digit: name for digit in run if isinstance(digit, Axis)})
    return found


def through(layout: Layout, source: Dims, target: Dims, sizes: Mapping[str, int]) -> Layout | None:
    """The layout on the other side of a view; None where the view cuts an axis, or rows lie in places with padding."""
    if layout.padding is not None:
        return None
    by_factor: dict[str, Digits] = {}
    for digits, names in zip(layout.dims, source):
        runs = cut(digits, [sizes[name] for name in names])
        if runs is None:
            return None
        by_factor.update(zip(names, runs))
    kept = {name for names in target for name in names}
    if any(isinstance(digit, Axis) for name, run in by_factor.items() if name not in kept for digit in run):
        return None  # the other side does not have this loop: it must lie whole
    dims = tuple(
        normalise(digit for name in names for digit in by_factor.get(name, (sizes[name],))) for names in target
    )
    return Layout(dims, layout.partial)


def drop(layout: Layout, axes: Iterable[Axis]) -> Layout:
    """`layout` with these axes gathered; without its padding where that leaves no axis to pad for."""
    gone = set(axes)
    if gone.isdisjoint(layout.shard_axes):
        return layout
    dims = tuple(normalise(d.size if isinstance(d, Axis) and d in gone else d for d in dim) for dim in layout.dims)
    return packed(replace(layout, dims=dims))


def together(layout: Layout, axes: Collection[Axis]) -> Layout:
    """`layout` with all steps of these axes side by side, or summed."""
    return replace(drop(layout, axes), partial=tuple(item for item in layout.partial if item[0] not in axes))


def cut_as(layout: Layout, other: Layout, axes: Iterable[Axis]) -> Layout | None:
    """`layout` cut by those of `axes` that cut `other`, in the same places; None where its own axes cross these.

    >>> part, gpu = Axis("slice2", 2, 0, "time"), Axis("gpu0", 2)
    >>> str(cut_as(Layout(((8,), (gpu, 4))), Layout(((part, 4), (8,))), [part]))
    '[slice2 4, gpu0 4]'
    >>> cut_as(Layout(((gpu, 4), (8,))), Layout(((part, 4), (8,))), [part])
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
        runs = cut(dims[dim], [outer, axis.size, inner])
        if runs is None or runs[1] != (axis.size,):
            return None
        dims[dim] = normalise([*runs[0], axis, *runs[2]])
    return replace(layout, dims=tuple(dims))


def rest_layouts(compute: Layout, stages: Sequence[Sequence[Axis]], mesh: Mesh) -> list[Layout]:
    """Where states rest: `compute`, sharded over the axes of the first stage, then over those of the next besides.

    Axes that divide a dimension come first (`rest_layout`). Those that divide none pad one, for all stages together
    (`padding.padded_rest`): the layout of a stage is that of the last, with the axes of the later ones gathered.
    """
    found, layout = [], compute
    for axes in stages:
        layout = rest_layout(layout, axes, mesh)
        found.append(layout)
    left = [axis for axes in stages for axis in axes if axis not in layout.shard_axes]
    padded = padded_rest(compute, layout, left, mesh)
    if padded is None:
        return found
    later = [[axis for axes in stages[index + 1 :] for axis in axes] for index, _ in enumerate(stages)]
    return [drop(padded, axes) for axes in later]


def rest_layout(compute: Layout, axes: Sequence[Axis], mesh: Mesh) -> Layout:
    """Where states rest: `compute`, with `axes` innermost on a dimension that they divide.

    Each axis takes the first dimension on which it is a plain shard, in mesh order; axes that divide none are left
    out (see `rest_layouts`).
    """
    dims = [list(dim) for dim in compute.dims]
    order: dict[Digit, int] = {axis: index for index, axis in enumerate(mesh.axes)}
    for axis in mesh.ordered(axes):
        best: tuple[int, int] | None = None
        for dim, digits in enumerate(dims):
            at = max((index for index, digit in enumerate(digits) if isinstance(digit, Axis)), default=-1) + 1
            local = digits[at] if at < len(digits) else 1
            if not isinstance(local, int) or local % axis.size:
                continue
            before = digits[:at]
            strided = any(digit not in order for digit in before)  # local steps, or an op's slices
            disordered = any(order.get(digit, -1) > order[axis] for digit in before)
            score = 2 * strided + disordered
            if best is None or score < best[0]:
                best = score, dim
        if best is not None:
            digits = dims[best[1]]
            at = max((index for index, digit in enumerate(digits) if isinstance(digit, Axis)), default=-1) + 1
            local = digits[at]
            assert isinstance(local, int)
            digits[at : at + 1] = [axis, local // axis.size]
    return Layout(tuple(normalise(dim) for dim in dims))


StepKind = Literal["all_reduce", "reduce_scatter", "slice", "all_to_all", "all_gather", "pad", "unpad"]
LOCAL: tuple[StepKind, ...] = ("slice", "pad", "unpad")
"""The kinds of steps without communication."""


@dataclass(frozen=True)
class Step:
    """One step of a change of layout, of one kind, over the joint group of `axes`.

    `units` are, for each dimension, the digits before and after, cut so that they correspond one to one.
    """

    kind: StepKind
    axes: tuple[Axis, ...]
    before: Layout
    after: Layout
    reduce: str = "sum"

    @property
    def units(self) -> list[Units]:
        """The digits before and after, cut so that they correspond one to one, for each dimension."""
        return [_align(b, a) or [] for b, a in zip(self.before.dims, self.after.dims)]


def _align(before: Digits, after: Digits) -> Units | None:
    """Pairs of digits that cover the same steps of a dimension; None where an axis is opposed to a cut of its steps."""
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


def steps_between(have: Layout, want: Layout) -> list[Step]:
    """The steps from one layout of a value to another, cheapest first (see the module's docstring).

    Raises
    ------
    LayoutError
        Where the layouts are of values of different shapes, or `want` is partial where `have` is not.
    """
    if have.global_shape != want.global_shape:
        raise LayoutError(f"{have} and {want} are layouts of different shapes")
    if not set(want.partial) <= set(have.partial):
        raise LayoutError(f"a value at {have} cannot become the partial result {want}")
    if have.padding is not None and have.padding != want.padding:
        bare = want if want.padding is None else drop(want, axes_of(want.dims[want.padding.dim]))
        places, whole = _with_places(bare, have)
        return [*_steps(have, places), Step("unpad", (), places, whole), *steps_between(whole, want)]
    if have.padding != want.padding:
        places, whole = _with_places(have, want)
        return [*_steps(have, whole), Step("pad", (), whole, places), *_steps(places, want)]
    return _steps(have, want)


def _with_places(layout: Layout, padded: Layout) -> tuple[Layout, Layout]:
    """`layout` in the places of `padded`, and packed: itself, or with a dimension whole of which it cuts the blocks."""
    assert padded.padding is not None
    places = spread(layout, padded.padding)
    if places is None:
        layout = drop(layout, axes_of(layout.dims[padded.padding.dim]))
        places = spread(layout, padded.padding)
        assert places is not None
    return places, layout


def axes_of(digits: Digits) -> list[Axis]:
    """The axes among the digits of a dimension."""
    return [digit for digit in digits if isinstance(digit, Axis)]


def _steps(have: Layout, want: Layout) -> list[Step]:
    """The steps between two layouts in the same places."""
    steps: list[Step] = []
    current = have

    def move(kind: StepKind, after: Layout, reduce: str = "sum", moved: Iterable[Axis] = ()) -> None:
        nonlocal current
        changed = set(current.shard_axes) ^ set(after.shard_axes) | set(current.partial_axes) - set(after.partial_axes)
        changed |= set(moved)
        if after != current:
            axes = tuple(sorted(changed, key=lambda axis: -axis.stride))
            steps.append(Step(kind, axes, current, after, reduce))
            current = after

    pending = [(axis, "sum" if op == "own" else op) for axis, op in have.partial if (axis, op) not in want.partial]
    for op in sorted({op for _, op in pending}):
        mine = {axis for axis, other in pending if other == op}
        scattered = _replace(current, want, _taking(mine))
        gone = set(scattered.shard_axes) - set(current.shard_axes)
        left = tuple(p for p in current.partial if p[0] not in gone)
        move("reduce_scatter", replace(scattered, partial=left), op)
        rest = mine - gone
        move("all_reduce", replace(current, partial=tuple(p for p in current.partial if p[0] not in rest)), op)

    def free(h: Digit, w: Digit) -> Digit:
        taken = current.shard_axes
        return w if isinstance(h, int) and isinstance(w, Axis) and w not in taken else h

    move("slice", _replace(current, want, free))
    moved = _moved(current, want)
    move("all_to_all", _replace(current, want, lambda h, w: _other(h, w, moved)), moved=moved)
    # A dimension whose digits do not correspond is gathered whole.
    whole = [digits if _align(digits, after) is not None else (size,)
             for digits, after, size in zip(current.dims, want.dims, current.padded_shape)]  # fmt: skip
    gathered = replace(current, dims=tuple(normalise(digits) for digits in whole))
    move("all_gather", _replace(gathered, want, lambda h, w: h.size if isinstance(h, Axis) and h != w else h))
    move("slice", _replace(current, want, free))
    if current != want:
        raise LayoutError(f"no way from {have} to {want}")
    return steps


def _moved(have: Layout, want: Layout) -> set[Axis]:
    """The axes that only change their place: what has them is wanted whole, what is whole is wanted in their parts."""
    units = [unit for before, after in zip(have.dims, want.dims) for unit in _align(before, after) or ()]
    left = {h for h, w in units if isinstance(h, Axis) and isinstance(w, int)}
    return left & {w for h, w in units if isinstance(w, Axis) and isinstance(h, int)}


def _other(have: Digit, want: Digit, moved: set[Axis]) -> Digit:
    """The digit after the axes of `moved` have changed their places."""
    return want if have != want and (have in moved or want in moved) else have


def _taking(axes: set[Axis]) -> Callable[[Digit, Digit], Digit]:
    """Choose the wanted digit where it is one of `axes` and the value is whole there."""
    return lambda have, want: want if isinstance(have, int) and want in axes else have


def _replace(current: Layout, want: Layout, choose: Callable[[Digit, Digit], Digit]) -> Layout:
    """`current` with each digit replaced by what `choose` makes of it and of the digit wanted in its place."""
    dims = []
    for digits, after in zip(current.dims, want.dims):
        units = _align(digits, after)
        dims.append(digits if units is None else normalise(choose(h, w) for h, w in units))
    return replace(current, dims=tuple(dims))


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
