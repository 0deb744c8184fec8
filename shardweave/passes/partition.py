"""Shard: the global joint graph becomes the local one that every rank runs, with its collectives.

Every op is written once, at its strategy's layout; ops without one *follow* their inputs. Views are transparent: a
layout change is made at the value that they look at, once for each target layout, and the views are written again
on the result. A partial sum passes views and sums with one user, and is reduced where it is first used otherwise.

Values at layouts: where each value of the global graph lies in the local one, and how it gets where it is wanted.

A value has one *canonical* place, where it was computed or reduced to. Wanted elsewhere, it is brought there once for
each layout and remembered. Views have no place of their own: what they look at is brought to the layout that makes
them lie as wanted, and they are written on it. Nor have constants: see `constants`.

Readers: what others that read a value say of where an op should take it.

Results: what a local graph returns, with all steps of its time axes together, and gradients where states rest.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from shardweave.ir import (
    META,
    Assignment,
    Axis,
    BoundRule,
    Dtypes,
    Layout,
    LayoutError,
    Mesh,
    NodeInfo,
    VerifyError,
    axes_size,
    cut_as,
    drop,
    factors_of,
    input_layouts,
    output_layouts,
    rest_layouts,
    through,
    together,
)
from shardweave.passes.base import Pass, Property
from shardweave.passes.spmd_builder import TAKEN, LocalGraph, OpEmitter, Origin, Part, part, remove_dead
from shardweave.sharding import (
    Arrival,
    Choice,
    Rule,
    accepting,
    bind_new,
    checkpoint_of,
    covered,
    decompose,
    depends_on_inputs,
    describe,
    find_rule,
    follow,
    graph_outputs,
    info,
    is_view,
    linear_in,
    met,
    module_of,
    passing_sums,
    source_of,
    tensor_args,
)


class Rest(NamedTuple):
    """The axes that a parameter rests on in a step, those besides on which its gradient is added up, and those
    besides on which its states rest between steps.

    `dtypes` are those of its master and of its gradient's sum; None: as the step computes with it.
    """

    parameter: tuple[Axis, ...] = ()
    gradient: tuple[Axis, ...] = ()
    states: tuple[Axis, ...] = ()
    dtypes: Dtypes | None = None


class Total(NamedTuple):
    """A sum over time axes that inputs alone decide: where each step finds it, and its part that each computes."""

    placeholder: fx.Node
    part: fx.Node


class Values:
    """The values of one global graph while its local graph is written.

    Parameters
    ----------
    local : LocalGraph
    names : mapping of str to str
        What buffers and inputs are called, by placeholder.
    rest_axes : mapping of str to Rest
        What each parameter and its states rest on, beside the axes of the layout that it is first needed in.
    """

    def __init__(self, local: LocalGraph, mesh: Mesh, names: Mapping[str, str], rest_axes: Mapping[str, Rest]) -> None:
        self.local, self.mesh = local, mesh
        self.names, self.rest_axes = names, rest_axes
        self.canonical: dict[fx.Node, tuple[fx.Node, Layout]] = {}
        self.memo: dict[tuple[fx.Node, Layout, bool], fx.Node] = {}
        self.constants: set[fx.Node] = set()
        self.parameters: dict[fx.Node, str] = {}
        self.rests: dict[str, Layout] = {}
        """Where each parameter's states rest."""
        self.sums: dict[str, Layout] = {}
        """Where each parameter's gradient is added up."""
        self.working: list[fx.Node] = []
        """The copies of parameters that are gathered once a step."""
        self.totals: list[Total] = []
        self.given: set[fx.Node] = set()
        """Global values that depend on inputs alone."""
        self.current: fx.Node | None = None
        self.at_once = False
        """Whether what is being written takes all steps of the woven axes at once."""
        self.backward = False

    def arrival(self, value: fx.Node) -> Arrival:
        root = self._root(value)
        layout = self.layout(value)
        if value in self.given:  # it is found as a whole
            layout = replace(layout, partial=tuple(item for item in layout.partial if item[0].kind == "space"))
        if self.at_once:
            layout = together(layout, self.mesh.woven)
        return Arrival(layout, value.meta["val"].numel(), root in self.parameters, self._single_user(value))

    def _has_place(self, value: fx.Node) -> bool:
        """Whether a value is no view: it lies somewhere, or is a constant that is made wherever it is wanted."""
        return value in self.canonical or value in self.constants

    def _root(self, value: fx.Node) -> fx.Node:
        while not self._has_place(value):
            value = tensor_args(value)[0]
        return value

    def _single_user(self, value: fx.Node) -> bool:
        """Whether the value that `value` looks at has one user, views looked through."""
        while True:
            if len(value.users) != 1:
                return False
            if self._has_place(value):
                return True
            value = tensor_args(value)[0]

    def layout(self, value: fx.Node) -> Layout:
        """Where a global value lies now."""
        if value in self.canonical:
            return self.canonical[value][1]
        if value in self.constants:
            return Layout.replicated(value.meta["val"].shape)
        return self._view(value)[1]

    def _view(self, view: fx.Node) -> tuple[Layout, Layout]:
        """Where a view wants what it looks at, and where it then lies itself: axes that it would cut are gathered."""
        bound = bound_rule(view)
        have = self.layout(tensor_args(view)[0])
        result = through(have, bound.inputs[0], bound.outputs[0], bound.sizes())
        if result is None:
            kept = factors_of(have.dims, bound.inputs[0], bound.sizes())
            have = drop(have, set(have.shard_axes) - set(kept))
            result = through(have, bound.inputs[0], bound.outputs[0], bound.sizes())
        if result is None:
            have = drop(have, have.shard_axes)
            result = through(have, bound.inputs[0], bound.outputs[0], bound.sizes())
        if result is None:
            raise LayoutError(f"{view} cannot be computed at {have}")
        return have, result

    def value(self, node: fx.Node, want: Layout, origin: Origin | None = None) -> fx.Node:
        """The local node that holds a global value at `want`."""
        root = self._root(node)
        # A gathered parameter is freed after its forward use: the backward gathers it again. A constant is not kept
        # either: the backward makes its own. Nor is a slice.
        whole = drop(want, self.mesh.slices)
        key = node, want, self.backward and (root in self.parameters or root in self.constants or whole != want)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._materialise(node, want, origin)
        return found

    def _materialise(self, node: fx.Node, want: Layout, origin: Origin | None) -> fx.Node:
        whole = drop(want, self.mesh.slices)
        if whole != want and self._is_cut_late(node):
            origin = Origin(info(node).op, "slice", backward=self.backward)
            return self.local.redistribute(self.value(node, whole), whole, want, origin, lambda *_: None)
        if node in self.constants:
            return self._constant(node, want)
        first = self._before_steps(node, want) if self.mesh.woven else None
        if first is not None:
            where = origin or self._origin(node, first)
            return self.local.redistribute(self.value(node, first, origin), first, want, where, lambda *_: None)
        if node in self.canonical:
            if node in self.parameters and self.parameters[node] not in self.rests:
                self._rest(node, want)
            written, have = self.canonical[node]
            if have == want:
                return written
            origin = origin or self._origin(node, have)
            written, have = self._together(written, have, want, origin)
            if have == want:
                return written

            def reduced(result: fx.Node, layout: Layout) -> None:
                self.canonical[node] = result, layout

            times = tuple(item for item in have.partial if item[0].kind == "time" and item not in want.partial)
            if not times:
                return self.local.redistribute(written, have, want, origin, reduced)
            self._check_given(node, times[0][0])
            part = self.local.redistribute(written, have, replace(want, partial=times), origin, reduced)
            part, lies = self.local.ended(part, replace(want, partial=times), origin, self.mesh.woven)
            if lies != want:
                part = self._total(node, part, want)
            self.canonical[node] = part, want
            return part
        bound, rule = bound_rule(node), find_rule(node)
        source = tensor_args(node)[0]
        back = through(want, bound.outputs[0], bound.inputs[0], bound.sizes())
        if back is None:
            first, lies = self._view(node)
            where = origin or self._origin(node, lies)
            written, have = self._together(self.value(node, lies), lies, want, where)
            return self.local.redistribute(written, have, want, where, lambda *_: None)
        inner = self.value(source, back, origin)
        return self._write(node, [inner], want, Part(rule, bound, {}, (back,)))

    def _before_steps(self, node: fx.Node, want: Layout) -> Layout | None:
        """Where a value is brought before steps of woven axes are taken of it; None where it is there."""
        have = self.layout(node)
        first = drop(want, set(self.mesh.woven).difference(have.shard_axes, have.partial_axes))
        return None if first in (want, have) else first

    def _together(self, written: fx.Node, have: Layout, want: Layout, origin: Origin) -> tuple[fx.Node, Layout]:
        """What the steps of woven axes have, for a reader that takes all of them at once; else what one has."""
        if not self.at_once:
            return written, have
        wanted = {*want.shard_axes, *want.partial_axes}
        return self.local.ended(written, have, origin, [axis for axis in self.mesh.woven if axis not in wanted])

    def _is_cut_late(self, node: fx.Node) -> bool:
        """Whether slices of a value are taken of what is whole; a parameter's are gathered one by one."""
        lies = self.layout(node)
        return drop(lies, self.mesh.slices) == lies and self._root(node) not in self.parameters

    def _write(self, node: fx.Node, values: Sequence[fx.Node], want: Layout, made: Part) -> fx.Node:
        """A view or a constant in its local form, on local values of what it is made from."""
        where = Origin(info(node).op, backward=self.backward)
        emitter = OpEmitter(
            self.local, self.canonical, node, iter(values), made.inputs, (want,), made.assignment, made.bound, where
        )
        written = emitter.emit(made.rule)
        check_shape(node, written.meta["val"], want)
        annotate_layouts(written, (want,))
        return written

    def _constant(self, node: fx.Node, want: Layout) -> fx.Node:
        """A part of a constant, made as such where its rule allows it."""
        origin = Origin(info(node).op, backward=self.backward)
        whole = Layout.replicated(node.meta["val"].shape)
        if want == whole:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._whole_constant)
            return self.local.call(origin, node.target, *args, **kwargs)  # type: ignore[arg-type]
        made = part(node, want, self.mesh)
        if made is None:
            return self.local.redistribute(self.value(node, whole), whole, want, origin, lambda *_: None)
        values = [self.value(source, lies) for source, lies in zip(tensor_args(node), made.inputs)]
        return self._write(node, values, want, made)

    def _whole_constant(self, leaf: fx.Node) -> fx.Node:
        if leaf in self.constants:
            return self.value(leaf, Layout.replicated(leaf.meta["val"].shape))
        return self.canonical[leaf][0]

    def _rest(self, node: fx.Node, want: Layout) -> None:
        """Let a parameter rest as it is first needed, spread further over its axes of rest; its states further still.

        Between steps it lies as its states do. It is gathered from there once, for both forward and backward; what the
        step computes with in another dtype is cast before that.
        """
        name, written = self.parameters[node], self.canonical[node][0]
        axes = self.rest_axes.get(name, Rest())
        every = axes.parameter, axes.gradient, axes.states
        free = [[axis for axis in part if axis not in want.shard_axes] for part in every]
        stages = [drop(lies, self.mesh.slices) for lies in rest_layouts(want, free, self.mesh)]
        in_step, self.sums[name], layout = stages
        value = node.meta["val"]
        dtype = axes.dtypes.master if axes.dtypes else value.dtype
        with self.local.fake:
            written.meta["val"] = torch.empty(layout.local_shape, dtype=dtype, device=value.device)
        written.meta[META] = replace(info(written), layouts=(layout,))
        origin = Origin(name, "gather for the step", "parameter", self.backward)
        working = self.local.cast(written, value.dtype, origin)
        working = self.local.redistribute(working, layout, in_step, origin, lambda *_: None)
        if working is not written:
            self.working.append(working)
        self.canonical[node] = working, in_step
        self.rests[name] = layout

    def _check_given(self, node: fx.Node, axis: Axis) -> None:
        """Refuse a sum over a time axis inside of its steps, unless inputs alone decide it."""
        if node not in self.given:
            reader = self.current or node
            raise LayoutError(
                f"{info(reader).op}: {reader.target} needs the sum over the whole batch of {info(node).op} "
                f"({node.name}), so the batch cannot be computed in {axis.name}-batches, one after another: use "
                f"{axis.name}_batches=1, or move what needs the whole batch out of the model"
            )

    def _total(self, node: fx.Node, part: fx.Node, want: Layout) -> fx.Node:
        """The sum over all micro-batches of a value that inputs alone decide: it is found before the first of them."""
        origin = Origin(info(node).op)
        total = self.local.placeholder(f"total_{len(self.totals)}", node.meta["val"], want, origin, last=True)
        self.totals.append(Total(total, part))
        return total

    def _origin(self, node: fx.Node, have: Layout) -> Origin:
        if node in self.parameters:
            return Origin(self.parameters[node], "gather from rest", "parameter", self.backward)
        name = self.names.get(node.name) or info(node).op or node.name
        reason = f"sum of {name}" if have.partial else f"layout of {name}"
        return Origin(name, reason, "activation", self.backward)


def bound_rule(node: fx.Node) -> BoundRule:
    """The rule that `annotate` bound to a node."""
    rule = info(node).rule
    if rule is None:
        raise VerifyError(f"{describe(node)} was bound to no rule: a bug in shardweave")
    return rule


def annotate_layouts(node: fx.Node, layouts: Sequence[Layout]) -> None:
    """Note where a node's outputs lie; a view that turned out to be its base keeps what the base has."""
    if not info(node).layouts:
        node.meta[META] = replace(info(node), layouts=tuple(layouts))


def check_shape(node: fx.Node, value: torch.Tensor, layout: Layout) -> None:
    """`VerifyError` where a local value does not have the shape that its layout gives it."""
    if tuple(value.shape) != layout.local_shape:
        raise VerifyError(
            f"the local form of {node.target} ({node.name}, {info(node).op}) has the shape {tuple(value.shape)}, "
            f"its layout {layout} says {layout.local_shape}: its rule or its lowering is wrong"
        )


class Readers(Values):
    """Values, and the ops that are known to read them.

    Parameters
    ----------
    local, mesh, names, rest_axes
        As of `Values`.
    assignments : mapping of str to Assignment
        The ops that do not follow their inputs, by node name.
    """

    def __init__(
        self,
        local: LocalGraph,
        mesh: Mesh,
        names: Mapping[str, str],
        rest_axes: Mapping[str, Rest],
        assignments: Mapping[str, Assignment],
    ) -> None:
        super().__init__(local, mesh, names, rest_axes)
        self.assignments = assignments

    def arrivals_of(self, node: fx.Node, follows: bool) -> list[Arrival]:
        """Where the inputs of an op arrive; one that follows them takes them as others do."""
        arguments = tensor_args(node)
        arrivals = [self.arrival(argument) for argument in arguments]
        if not follows:
            return arrivals
        arrivals = [self._as_read_elsewhere(node, each, have) for each, have in zip(arguments, arrivals)]
        return [self._as_gathered(node, each, have) for each, have in zip(arguments, arrivals)]

    def _as_read_elsewhere(self, node: fx.Node, value: fx.Node, arrival: Arrival) -> Arrival:
        """Where a sum arrives at `node`: scattered, if another reader takes it so, as it lies with what else it reads.

        A gradient is read with the value that its op has saved, for the gradient of a norm's weight, and without it.
        """
        sums = {axis for axis, op in arrival.layout.partial if op == "sum" and axis.kind == "space"}
        if not sums or arrival.single_user:
            return arrival
        for user in value.users:
            arguments = tensor_args(user) if user.op == "call_function" else []
            others = [other for other in arguments if other is not value]
            decides = user is not node and others and user.name not in self.assignments
            if not decides or not all(map(self._placed, others)):
                continue
            bound, rule = bound_rule(user), find_rule(user)
            at = [self.arrival(argument) for argument in arguments]
            want = follow(bound, rule, at, self.mesh).inputs[arguments.index(value)]
            if sums <= set(want.shard_axes) and not want.partial:
                return replace(arrival, layout=want)
        return arrival

    def _placed(self, value: fx.Node) -> bool:
        """Whether it is known where a value, or what it looks at, lies."""
        while is_view(value) and not self._has_place(value):
            value = tensor_args(value)[0]
        return self._has_place(value)

    def _as_gathered(self, node: fx.Node, value: fx.Node, arrival: Arrival) -> Arrival:
        """Where a value arrives at `node`: gathered, if it is for another op, and what `node` gives would be next.

        Where layers of unlike degrees meet, a residual stream and its norm are gathered once, not each for itself.
        """
        if self.backward or arrival.single_user or arrival.is_parameter:
            return arrival
        results = [each for each in node.users if each.target is operator.getitem] or [node]
        elsewhere, behind = self._cut_by([value], node), self._cut_by(results, node)
        gone = {axis for axis in arrival.layout.shard_axes if axis.kind == "space"}.difference(*elsewhere, *behind)
        if not elsewhere or not behind or not gone:
            return arrival
        return replace(arrival, layout=drop(arrival.layout, gone))

    def _cut_by(self, values: Sequence[fx.Node], but: fx.Node) -> list[set[Axis]]:
        """The axes that each forward op of known assignment cuts one of these values by, views looked through."""
        found = []
        for read, user in [(value, user) for value in values for user in value.users if user is not but]:
            explicit = self.assignments.get(user.name)
            if user.op == "call_function" and is_view(user):
                found += self._cut_by([user], but)
            elif explicit is not None and not info(user).backward:
                wants = input_layouts(bound_rule(user), explicit.as_dict(), self.mesh)
                found.append(set(wants[tensor_args(user).index(read)].shard_axes))
        return found


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


@dataclass(frozen=True)
class Shard(Pass):
    """Write the local graph.

    Requires an annotated joint graph; ensures that every node has its local fake value and its layouts, and that
    every started collective is waited for.
    """

    name = "shard"
    requires: ClassVar[frozenset[Property]] = frozenset({"joint"})
    ensures: ClassVar[frozenset[Property]] = frozenset({"local"})
    mesh: Mesh
    """The axes, in layout order."""
    assignments: Mapping[str, Assignment]
    """The ops that do not follow their inputs, by node name."""
    sources: Mapping[str, Layout]
    """Where inputs, buffers and tangents lie, by placeholder, and parameters that may not rest elsewhere; what is not
    named is whole."""
    outputs: Sequence[Layout | None]
    """Where the graph's outputs are wanted; None: as they lie, and for a gradient, where its parameter rests."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """The parameters' names, by placeholder."""
    tangents: Mapping[str, int] = field(default_factory=dict)
    """The output, counted over all, that a tangent's placeholder belongs to: it lies as that output."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names of buffers and inputs, by placeholder."""
    inputs: Collection[str] = ()
    """The placeholders of a call's inputs."""
    gradients: Sequence[str] = ()
    """The parameters whose gradients are the last outputs."""
    rests: Mapping[str, Rest] = field(default_factory=dict)
    """The axes that a parameter and its states rest on, beside those of the layout that it is first needed in."""
    accumulates: bool = False
    """Gradients are added up over several runs of the graph: see `Sharder.accumulators`."""
    known: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    """What local ops give, where graphs of the same fake mode have been written before: see `LocalGraph`."""
    whole_sums: bool = False
    """Each device gets the whole sum of the gradients that it adds up, of which its states take a part."""
    undivided: Collection[str] = ()
    """Patterns of modules that take all steps of the woven axes at once."""

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        return Sharder(self, graph_module).run()


class Sharder(Results):
    """One run of the pass: the local graph so far, and which layout each global value has."""

    def __init__(self, options: Shard, graph_module: fx.GraphModule) -> None:
        fake = next(
            node.meta["val"].fake_mode
            for node in graph_module.graph.nodes
            if hasattr(node.meta.get("val"), "fake_mode")
        )
        super().__init__(
            LocalGraph(options.mesh, fake, known=options.known),
            options.mesh,
            options.names,
            options.rests,
            options.assignments,
            whole_sums=options.whole_sums,
            accumulates=options.accumulates,
        )
        self.options, self.module = options, graph_module
        self.results: dict[int, Any] = {}
        self.assigned: dict[fx.Node, Assignment] = {}
        self.lies: dict[int, Layout] = {}
        """Where the outputs of the forward lie."""
        self.inside: dict[int, Layout] = {}
        """Where they lie in each step of the woven axes."""
        self.followed: dict[object, tuple[Rule | None, Choice]] = options.known.setdefault(("follow", options.mesh), {})

    def run(self) -> fx.GraphModule:
        """The local graph; `rests` then holds where each parameter rests between steps."""
        graph, ended = self.module.graph, False
        self.dependent = depends_on_inputs(graph)
        for node in list(graph.nodes):
            self._note_given(node)
            self.backward = info(node).backward
            self.local.checkpoint = checkpoint_of(node)
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self.at_once = False
                self._outputs(graph, backward=True)
            else:
                if self.backward and not ended:
                    self._outputs(graph, backward=False)
                    self.backward = ended = True
                self._node(node)
        totals = [total.part for total in self.totals]
        out = self.local.graph.output((*(self.results[index] for index in sorted(self.results)), *totals))
        out.meta[META] = NodeInfo(op="output")
        remove_dead(self.local.graph)
        if not self.local.seed.users:
            self.local.graph.erase_node(self.local.seed)
        self.local.graph.lint()
        return module_of(self.module, self.local.graph)

    # -- sources and sinks

    def _placeholder(self, node: fx.Node) -> None:
        if node.name in self.options.tangents:
            return  # written once its output is
        value = node.meta["val"]
        name = self.options.parameters.get(node.name)
        layout = self.options.sources.get(node.name, Layout.replicated(value.shape))
        shown = name or self.options.names.get(node.name, node.name)
        origin = Origin(shown, backward=self.backward)
        dtypes = self.rest_axes.get(name or "", Rest()).dtypes
        taken = value.to(dtypes.master) if dtypes else value
        holder = self.local.placeholder(shown, taken, drop(layout, self.mesh.woven), origin)
        self.canonical[node] = self._step_of(holder, layout, origin), layout
        if name is not None:
            self.parameters[node] = name
            if node.name in self.options.sources:
                self.rests[name] = layout

    def _step_of(self, holder: fx.Node, layout: Layout, origin: Origin) -> fx.Node:
        """The step at `layout` of what comes into the graph with all steps of the woven axes."""
        whole = drop(layout, self.mesh.woven)
        if whole == layout:
            return holder
        step = self.local.redistribute(holder, whole, layout, replace(origin, reason=TAKEN), lambda *_: None)
        annotate_layouts(step, (layout,))
        return step

    def _outputs(self, graph: fx.Graph, backward: bool) -> None:
        """Write the outputs of the forward, before its first backward node, or those of the backward."""
        values = graph_outputs(graph)
        written = bool(self.results)
        first_gradient = len(values) - len(self.options.gradients)
        for index, value in enumerate(values):
            if index in self.results:
                continue
            name = self.options.gradients[index - first_gradient] if index >= first_gradient else None
            if not isinstance(value, fx.Node):
                self.results[index] = value
            elif name is None and not info(value).backward:
                self.backward = False
                self.inside[index] = (self.options.outputs[index] or self.layout(value)).without_partial()
                self.results[index], self.lies[index] = self.returned(value, self.options.outputs[index])
            elif backward and name is not None:
                self.backward = True
                self.results[index] = self.gradient(name, value)
            elif backward:
                self.backward = True
                self.results[index], _ = self.returned(value, self.options.outputs[index])

        if not written:
            self._tangents(graph)

    def _tangents(self, graph: fx.Graph) -> None:
        last = [node for node in self.local.graph.nodes if node.op == "placeholder"][-1]
        for node in graph.nodes:
            if node.op == "placeholder" and node.name in self.options.tangents:
                # Each part of a sum has the sum's tangent.
                layout = self.inside[self.options.tangents[node.name]]
                origin = Origin(node.name, backward=True)
                with self.local.graph.inserting_after(last):
                    last = self.local.placeholder(node.name, node.meta["val"], drop(layout, self.mesh.woven), origin)
                self.canonical[node] = self._step_of(last, layout, origin), layout

    def _note_given(self, node: fx.Node) -> None:
        """Whether a value depends on inputs alone."""
        if node.op == "placeholder":
            known = node.name in self.options.inputs
        else:
            known = node.op == "call_function" and all(source in self.given for source in node.all_input_nodes)
        if known:
            self.given.add(node)

    # -- ops

    def _node(self, node: fx.Node) -> None:
        if node not in self.dependent:
            return self._constant_node(node)
        if node.target is operator.getitem:
            return None  # written with its parent
        rule = find_rule(node)
        if rule is not None and rule.kind == "view":
            return None  # written when it is asked for
        bound = bound_rule(node)
        arguments = tensor_args(node)
        self.current, self.at_once = node, self._takes_all(node)
        explicit = self.assignments.get(node.name)
        partner = rule.partner(node) if rule is not None and rule.partner is not None else None
        if partner is not None:
            explicit = self.assigned[partner]
        arrivals = self.arrivals_of(node, explicit is None)
        linear, summed_to = linear_in(node), node.meta["val"].numel() if is_gradient(node) else 0
        choice = self._followed(bound, rule, arrivals, linear, summed_to)
        if explicit is not None:
            explicit = _with_times(explicit, choice.assignment, bound)
        if explicit is not None and (blocked := {axis for axis, name in explicit.items if bound.factor(name).blocked}):
            if rule is None or rule.decompose is None:
                raise LayoutError(
                    f"{info(node).op}: the loops {sorted(dict(explicit.items)[axis] for axis in blocked)} of "
                    f"{node.target} ({node.name}) cannot be split, but {explicit} gives them axes: use other loops"
                )
            explicit, choice = None, replace(choice, blocked=choice.blocked | blocked)
        if explicit is not None and explicit != Assignment.of(choice.assignment):
            assignment = explicit.as_dict()
            wanted = accepting(rule, assignment, input_layouts(bound, assignment, self.mesh))
            sums = passing_sums(linear, arrivals, self.mesh, summed_to, assignment)
            wanted = tuple(
                met(want, self.layout(argument)) for want, argument in zip(sums.of_inputs(wanted), arguments)
            )
            results = sums.of_outputs(output_layouts(bound, assignment, self.mesh), self.mesh)
        else:
            if choice.blocked and rule is not None and rule.decompose is not None:
                parents = [source_of(argument)[0] for argument in arguments]
                for part in bind_new(decompose(node, rule.decompose, self.options.known), parents):
                    self.dependent.add(part)
                    self._note_given(part)
                    self._node(part)
                return None
            assignment, wanted, results = choice.assignment, choice.inputs, choice.outputs
        self.assigned[node] = Assignment.of(assignment)
        origin = Origin(info(node).op, backward=self.backward)
        wanted = tuple(
            want if argument.meta["val"].numel() else self.layout(argument) for argument, want in zip(arguments, wanted)
        )  # a result that an op leaves without elements has no loop
        values = iter([self.value(argument, want) for argument, want in zip(arguments, wanted)])
        emitter = OpEmitter(self.local, self.canonical, node, values, wanted, results, assignment, bound, origin)
        self._record(node, emitter.emit(rule), results)
        return None

    def _takes_all(self, node: fx.Node) -> bool:
        """Whether an op takes all sub-batches at once; what is in no module, a sum of gradients, as what it reads."""
        if info(node).op != node.name or not self.options.undivided:
            return covered(self.options.undivided, info(node).op)
        sources = [source_of(value)[0] for value in node.all_input_nodes]
        return any(covered(self.options.undivided, info(source).op) for source in sources)

    def _followed(
        self,
        bound: BoundRule,
        rule: Rule | None,
        arrivals: Sequence[Arrival],
        linear: Sequence[tuple[int, ...]],
        summed_to: int,
    ) -> Choice:
        """How an op is spread by its inputs, worked out once for equal layers."""
        key = bound, id(rule), tuple(arrivals), tuple(linear), summed_to
        if key not in self.followed:
            self.followed[key] = rule, follow(bound, rule, arrivals, self.mesh, linear, summed_to)
        return self.followed[key][1]

    def _constant_node(self, node: fx.Node) -> None:
        """A constant is written when it is asked for; now only where it is no tensor, or one of an op's several."""
        value = node.meta["val"]
        if node.op == "get_attr":
            written = self.local.constant(Origin(info(node).op, backward=self.backward), node)
        elif isinstance(value, torch.Tensor) and node.target is not operator.getitem:
            self.constants.add(node)
            return
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._whole_constant)
            written = self.local.call(Origin(info(node).op, backward=self.backward), node.target, *args, **kwargs)  # type: ignore[arg-type]
        layout = Layout.replicated(value.shape) if isinstance(value, torch.Tensor) else Layout(())
        self.canonical[node] = written, layout

    def _record(self, node: fx.Node, written: fx.Node, layouts: Sequence[Layout]) -> None:
        """Remember where the outputs lie; a node with several outputs is read through its `getitem` nodes."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            check_shape(node, written.meta["val"], layouts[0])
            annotate_layouts(written, layouts)
            self.canonical[node] = self._whole(node, written, layouts[0])
            return
        annotate_layouts(written, layouts)
        for user in node.users:
            if user.target is operator.getitem and isinstance(user.meta.get("val"), torch.Tensor):
                _, index = source_of(user)
                origin = Origin(info(node).op, backward=info(written).backward)
                item = self.local.call(origin, operator.getitem, written, user.args[1])
                layout = layouts[index] if user.meta["val"].numel() else Layout.replicated(user.meta["val"].shape)
                check_shape(user, item.meta["val"], layout)
                annotate_layouts(item, (layout,))
                self.canonical[user] = self._whole(user, item, layout)

    def _whole(self, node: fx.Node, written: fx.Node, layout: Layout) -> tuple[fx.Node, Layout]:
        """What an op gives, its slices together, and where; those of a gradient go to its states one by one."""
        if is_gradient(node):
            return written, layout
        return self.local.ended(written, layout, Origin(info(node).op, backward=self.backward), self.mesh.slices)


def _with_times(explicit: Assignment, followed: Mapping[Axis, str], bound: BoundRule) -> Assignment:
    """An assignment with the time axes that inputs bring: plans and strategies are about devices.

    What a step is too small for, of an op where others meet, all devices compute.
    """
    found = {axis: name for axis, name in followed.items() if axis.kind == "time"}
    if not found:
        return explicit
    sizes, timed = bound.sizes(), set(found.values())
    for axis, name in explicit.items:
        mine = [other for other, its in found.items() if its == name]
        if name not in timed or sizes[name] % axes_size([axis, *mine]) == 0:
            found[axis] = name
    return Assignment.of(found)
