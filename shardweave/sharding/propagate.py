"""Sharding propagation: an op without a strategy of its own takes the layouts that its inputs arrive in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from shardweave.ir import Axis, BoundRule, Layout, Mesh, axes_size, factors_of, input_layouts, output_layouts
from shardweave.sharding.rules.registry import EVERY, Rule


@dataclass(frozen=True)
class OpInput:
    """An input of an op: its layout, its elements, whether it is a parameter, and whether the op is its only user."""

    layout: Layout
    numel: int
    is_parameter: bool = False
    single_user: bool = True


@dataclass(frozen=True)
class OpSharding:
    """How an op is sharded: its assignment, the layouts that it requires of its inputs, and those of its outputs.

    `blocked` are the axes that arrived on a factor that the op cannot split. They have to be gathered.
    """

    assignment: dict[Axis, str]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    blocked: frozenset[Axis]


def follow(
    bound: BoundRule,
    rule: Rule | None,
    arrivals: Sequence[OpInput],
    mesh: Mesh,
    linear: Sequence[tuple[int, ...]] = (),
    summed_to: int = 0,
) -> OpSharding:
    """The sharding of an op that follows its inputs: it keeps each axis that arrives on a factor that may be split.

    The largest input that is no partial sum decides first, then the others, so that a partial sum is scattered into
    the layout of the other inputs. Parameters decide only if all inputs are parameters.

    A partial sum over a time axis passes the op if the op is linear in that input. `linear` has the sets of inputs in
    which it is (`rules.matmul.linear_in`). `summed_to` is that of `passing_sums`.
    """
    sizes = bound.sizes()
    # 1. Find the partial results that pass the op.
    passing = _passing(bound, rule, arrivals)
    times = passing_sums(linear, arrivals, mesh, summed_to)
    passing |= dict.fromkeys(times.axes, "sum")
    # 2. Order the inputs by who decides, and keep their axes.
    deciding = [index for index, arrival in enumerate(arrivals) if not arrival.is_parameter]
    deciding = deciding or list(range(len(arrivals)))
    deciding.sort(key=lambda index: (bool(arrivals[index].layout.partial), -arrivals[index].numel, index))
    assignment: dict[Axis, str] = {}
    blocked: set[Axis] = set()
    for kind, index in product(("time", "space"), deciding):  # values can be gathered over devices, not over time
        for axis, name in factors_of(arrivals[index].layout.dims, bound.inputs[index], sizes).items():
            if axis.kind != kind or axis in passing or axis in assignment:
                continue
            if bound.factor(name).blocked:
                blocked.add(axis)
                continue
            mine = [other for other, factor in assignment.items() if factor == name]
            if sizes[name] % axes_size([axis, *mine]) == 0:
                assignment[axis] = name
    # 3. The layouts follow from the assignment and the partial results that pass.
    wanted = input_layouts(bound, assignment)
    results = output_layouts(bound, assignment, mesh)
    if passing:
        wanted = tuple(
            Layout(layout.dims, tuple(item for item in arrival.layout.partial if item[0] in passing))
            for layout, arrival in zip(wanted, arrivals)
        )
        wanted = times.of_inputs(wanted)
        results = tuple(Layout(layout.dims, _ordered(passing | dict(layout.partial), mesh)) for layout in results)
    wanted = accept_own_partials(rule, assignment, wanted)
    wanted = tuple(attainable_layout(want, arrival.layout) for want, arrival in zip(wanted, arrivals))
    return OpSharding(assignment, wanted, results, frozenset(blocked - set(assignment)))


def accept_own_partials(
    rule: Rule | None, assignment: Mapping[Axis, str], wanted: Sequence[Layout]
) -> tuple[Layout, ...]:
    """`wanted`; an input of which a rank reads only what it owns may also be an ``"own"`` partial result."""
    result = list(wanted)
    for factor, inputs in rule.owned.items() if rule is not None else ():
        own = tuple((axis, "own") for axis, name in assignment.items() if name.split(".")[0] == factor)
        for index in inputs:
            result[index] = Layout(result[index].dims, (*result[index].partial, *own))
    return tuple(result)


def attainable_layout(want: Layout, have: Layout) -> Layout:
    """`want`, without the partial axes that a value at `have` does not have: nothing makes a value partial.

    Time axes are the exception. A value that is the same in all steps becomes a partial sum as a share in each step.
    """
    if not want.partial:
        return want
    kept = [item for item in have.partial if item in want.partial]
    shares = [item for item in want.partial if item[0].kind == "time" and item[1] == "sum" and item not in kept]
    return Layout(want.dims, (*kept, *shares))


def _ordered(partial: Mapping[Axis, str], mesh: Mesh) -> tuple[tuple[Axis, str], ...]:
    return tuple((axis, partial[axis]) for axis in mesh.ordered(partial))


def _in_space(layout: Layout) -> tuple[tuple[Axis, str], ...]:
    """The axes of devices that a value is partial over."""
    return tuple(item for item in layout.partial if item[0].kind == "space")


@dataclass(frozen=True)
class PassingSums:
    """The axes over which partial sums pass an op, and the inputs that have to be partial over them."""

    axes: tuple[Axis, ...] = ()
    inputs: tuple[int, ...] = ()

    def of_inputs(self, wanted: Sequence[Layout]) -> tuple[Layout, ...]:
        """The required layouts `wanted`, with the partial sums that pass."""
        passed = tuple((axis, "sum") for axis in self.axes)
        return tuple(
            Layout(layout.dims, (*layout.partial, *passed)) if index in self.inputs else layout
            for index, layout in enumerate(wanted)
        )

    def of_outputs(self, results: Sequence[Layout], mesh: Mesh) -> tuple[Layout, ...]:
        """The output layouts `results`, with the partial sums that have passed."""
        passed = dict.fromkeys(self.axes, "sum")
        return tuple(Layout(layout.dims, _ordered(dict(layout.partial) | passed, mesh)) for layout in results)


def passing_sums(
    linear: Sequence[tuple[int, ...]],
    arrivals: Sequence[OpInput],
    mesh: Mesh,
    summed_to: int = 0,
    used: Collection[Axis] = (),
) -> PassingSums:
    """The partial sums that pass an op which is linear in these sets of its inputs.

    Parameters
    ----------
    summed_to : int
        Elements of what the result becomes, if that is summed in any case, as the gradient of a parameter is. Then a
        sum over devices passes, too, if the input is no smaller and has no other user.
    used : collection of Axis
        Axes of devices that are in use, over which no sum passes.
    """
    partial: dict[Axis, set[int]] = {}
    for index, arrival in enumerate(arrivals):
        for axis, op in arrival.layout.partial:
            if op == "sum":
                partial.setdefault(axis, set()).add(index)
    if not partial:
        return PassingSums()
    apart = {axis for arrival in arrivals for axis in arrival.layout.shard_axes}
    axes = [axis for axis in mesh.time_axes if axis in partial]
    if apart.isdisjoint(axes):
        for together in linear:
            if all(partial[axis] <= set(together) for axis in axes):
                first = arrivals[together[0]]
                late = len(together) == 1 and first.single_user and first.numel >= summed_to > 0
                others = [a for a in mesh.axes if late and a not in (*apart, *used) and partial.get(a) == set(together)]
                if axes or others:
                    return PassingSums((*axes, *others), together)
    return PassingSums()


def _passing(bound: BoundRule, rule: Rule | None, arrivals: Sequence[OpInput]) -> dict[Axis, str]:
    """The axes over which a partial result passes the op, and the kind of partial result that the output is.

    A sum passes if the op is linear and all its inputs are partial over the same axes. An ``"own"`` partial result
    passes an op that keeps its zeros. If the op also sums over a factor, an entry may have several owners, and the
    output is a plain sum.
    """
    if rule is None:
        return {}
    partials = [_in_space(arrival.layout) for arrival in arrivals]
    if rule.kind == "sum" and all(arrival.single_user for arrival in arrivals):
        first = set(partials[0]) if partials else set()
        if first and all(set(partial) == first for partial in partials) and all(op == "sum" for _, op in first):
            return dict.fromkeys((axis for axis, _ in first), "sum")
    present = {name for dims in bound.outputs for names in dims for name in names}
    sums = any(factor.name not in present and not factor.blocked for factor in bound.factors)  # blocked: selected from
    return {
        axis: "sum" if sums else "own"
        for axis in {axis for partial in partials for axis, _ in partial}
        if _keeps_zeros(rule, [dict(partial).get(axis) for partial in partials])
    }


def _keeps_zeros(rule: Rule, kinds: Sequence[str | None]) -> bool:
    """Whether the output is zero wherever the ``"own"`` inputs are zero."""
    mine = {index for index, kind in enumerate(kinds) if kind == "own"}
    if any(kind not in (None, "own") for kind in kinds) or not rule.zeros:
        return False
    if rule.zeros == EVERY:
        return len(mine) == len(kinds)
    return bool(mine & set(rule.zeros)) and mine <= {*rule.zeros, *rule.ignores}
