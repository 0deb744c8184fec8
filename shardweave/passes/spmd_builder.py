"""The builder of the local graph: it emits local ops, and the collectives that change layouts.

`LocalGraph`
    is the graph that is being written: calls with their fake values, coordinates of the rank, and redistributions.
`OpEmitter`
    is what the lowering of a sharding rule sees of one op: its local arguments, its layouts, and the graph to write to.
`local_part`
    tells how each rank can make its own part of a constant (a mask, a range, a block of zeros) at a layout. An op with
    a rule is emitted on the parts of its inputs, these on the parts of theirs, down to a `full` or an `arange` of local
    size. A constant without a rule is made whole and sliced.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import keyword
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.ir import (
    META,
    SEED,
    Axis,
    BoundRule,
    Collective,
    Layout,
    LayoutError,
    Mesh,
    NodeInfo,
    RedistributionStep,
    RuleError,
    axes_size,
    digit_size,
    factors_of,
    group_name,
    input_layouts,
    layout_through_view,
    outermost_first,
    output_layouts,
    steps_between,
    without_axes,
)
from shardweave.ops import coordinate, joined, seeded, total
from shardweave.sharding import Rule, argument_names, draws, fake_result, find_rule


@dataclass(frozen=True)
class Part:
    """How to make a part of a constant or a view: the op's rule, the axes on its factors, the layouts of its inputs."""

    rule: Rule | None
    bound: BoundRule
    assignment: dict[Axis, str]
    inputs: tuple[Layout, ...]


def local_part(node: fx.Node, want: Layout, mesh: Mesh) -> Part | None:
    """How to make a rank's part of a constant at the layout `want`; None if the constant has to be made whole."""
    rule = find_rule(node)
    if rule is None:
        return None
    try:
        bound = rule.bind(node)
    except RuleError:
        return None
    if rule.kind == "view":
        back = layout_through_view(want, bound.outputs[0], bound.inputs[0], bound.sizes())
        return None if back is None else Part(rule, bound, {}, (back,))
    assignment = factors_of(want.dims, bound.outputs[0], bound.sizes())
    if any(bound.factor(name).blocked for name in assignment.values()):
        return None
    if output_layouts(bound, assignment, mesh) != (want,):
        return None
    return Part(rule, bound, assignment, input_layouts(bound, assignment))


class OpEmitter:
    """The `registry.Emitter` of one op. `values` are its tensor arguments, at the layouts of `inputs`."""

    def __init__(
        self,
        local: LocalGraph,
        written: Mapping[fx.Node, tuple[fx.Node, Layout]],
        node: fx.Node,
        values: Iterator[fx.Node],
        inputs: Sequence[Layout],
        outputs: Sequence[Layout],
        assignment: Mapping[Axis, str],
        rule: BoundRule,
        origin: Origin,
    ) -> None:
        self._local, self._origin = local, origin
        self.node, self.rule = node, rule
        self.input_layouts, self.output_layouts = tuple(inputs), tuple(outputs)
        self.assignment: Mapping[Axis, str] = {axis: assignment[axis] for axis in outermost_first(assignment)}

        def argument(leaf: fx.Node) -> Any:
            return next(values) if isinstance(leaf.meta.get("val"), torch.Tensor) else written[leaf][0]

        self.args: tuple[Any, ...] = fx.node.map_arg(node.args, argument)
        names = argument_names(node)
        ordered = sorted(node.kwargs, key=lambda name: names.index(name) if name in names else len(names))
        self.kwargs: dict[str, Any] = {name: fx.node.map_arg(node.kwargs[name], argument) for name in ordered}

    def emit(self, rule: Rule | None) -> fx.Node:
        """Write the op in its local form."""
        if rule is not None and rule.lower is not None:
            return rule.lower(self)
        return self.call(self.node.target, *self.args, **self.kwargs)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        drawn = target is self.node.target and draws(self.node)
        if drawn:
            return self._local.draw(self._origin, list(self.assignment), target, *args, **kwargs)
        return self._local.call(self._origin, target, *args, **kwargs)

    def offset(self, axes: Sequence[Axis], step: int) -> Any:
        return self._local.offset(self._origin, axes, step)


aten = torch.ops.aten
c10d = torch.ops._c10d_functional
custom_ops = torch.ops.shardweave

Cause = Literal["parameter", "gradient", "activation"]

INPUT_SLICE = "step of an input"
"""The reason that a slice of an input is marked with. It needs no copy, as the input outlives the step."""
_NEEDS_WHOLE_BATCH = (
    "{op} needs the whole batch at once (its value has the layout {layout}), so the batch cannot be computed in "
    "{parts}: use {option}=1, or move what needs the whole batch out of the model"
)


def needs_whole_batch(op: str, layout: Layout, axis: Axis) -> LayoutError:
    """The error for a batch that cannot be computed in micro-batches or sub-batches, one after another."""
    parts, option = (f"{axis.name}-batches", f"{axis.name}_batches")
    return LayoutError(_NEEDS_WHOLE_BATCH.format(op=op, layout=layout, parts=parts, option=option))


@dataclass(frozen=True)
class Origin:
    """The owner of a piece of the local graph, and the reason and cause for it, for comments and traces."""

    op: str
    reason: str = ""
    cause: Cause = "activation"
    backward: bool = False


@dataclass
class LocalGraph:
    """The local graph while it is written. Each node gets its local fake value and its `NodeInfo`."""

    mesh: Mesh
    fake: Any
    graph: fx.Graph = field(default_factory=fx.Graph)
    coordinates: dict[str, fx.Node] = field(default_factory=dict)
    known: dict[object, Any] = field(default_factory=dict)
    """A cache of fake results, by op and the shapes, dtypes and strides of the arguments."""
    checkpoint: str = ""
    """The user's activation checkpoint that the current op is inside; "" outside of all."""

    def __post_init__(self) -> None:
        for axis in (*self.mesh.axes, *self.mesh.micro_batch_axes, *self.mesh.unrolled_axes):
            node = self.graph.placeholder(coordinate(axis.name))
            node.meta["val"] = 0
            node.meta[META] = NodeInfo(op=f"coordinate on {axis.name}")
            self.coordinates[axis.name] = node
        self.seed = self.graph.placeholder(SEED)
        self.seed.meta["val"] = None  # fake ops need no seed
        self.seed.meta[META] = NodeInfo(op="seed of the step")
        self.drawn = 0

    def placeholder(
        self, name: str, value: torch.Tensor, layout: Layout, origin: Origin, last: bool = False
    ) -> fx.Node:
        """Add an input of the graph at `layout`. Dots in its name become underscores.

        With `last`, it comes behind the inputs so far, wherever the graph is being written.
        """
        identifier = re.sub(r"\W", "_", name)
        if not identifier.isidentifier() or keyword.iskeyword(identifier):
            identifier = f"p_{identifier}"
        found = [node for node in self.graph.nodes if node.op == "placeholder"] if last else []
        with self.graph.inserting_after(found[-1]) if found else contextlib.nullcontext():
            node = self.graph.placeholder(identifier)
        node.target = node.name  # which is unique: an input may have the name of a parameter
        node.meta["val"] = self.empty(layout, value.dtype, value.device)
        node.meta[META] = NodeInfo(layouts=(layout,), op=origin.op, backward=origin.backward)
        return node

    def empty(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> Any:
        """The fake value of an input of the graph."""
        size = list(layout.local_shape)
        return fake_result(torch.empty, (size,), {"dtype": dtype, "device": device}, self.fake, self.known)

    def call(
        self,
        origin: Origin,
        target: Callable[..., Any],
        *args: Any,
        collective: Collective | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """Add a call of `target`. A reshape of a reshape becomes one; a transpose of a transpose is left out."""
        if target is aten.reshape.default:
            args = (_unreshaped(args[0]), *args[1:])
            base: fx.Node = args[0]
            if list(base.meta["val"].shape) == list(args[1]):
                return base
        if target is aten.t.default and args[0].target is aten.t.default:
            inner: fx.Node = args[0].args[0]
            return inner
        node = self.graph.create_node(
            "call_function", target, args, kwargs, name=short_name(args[0] if target is seeded else target)
        )
        node.meta["val"] = fake_result(target, args, kwargs, self.fake, self.known)
        checkpoint = "" if origin.backward else self.checkpoint
        node.meta[META] = NodeInfo(op=origin.op, backward=origin.backward, collective=collective, checkpoint=checkpoint)
        if origin.backward:
            node.meta["partitioner_tag"] = "is_backward"
        return node

    def draw(
        self, origin: Origin, axes: Sequence[Axis], target: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Add a call of a random op. Each rank along `axes` (outermost first) draws its own numbers."""
        position = self.offset(origin, axes, 1)
        node = self.call(origin, seeded, target, self.seed, self.drawn, position, *args, **kwargs)
        self.drawn += 1
        return node

    def constant(self, origin: Origin, node: fx.Node) -> fx.Node:
        """Add a tensor that the model holds as a constant."""
        copy = self.graph.get_attr(str(node.target))
        copy.meta["val"] = node.meta["val"]
        copy.meta[META] = NodeInfo(op=origin.op, backward=origin.backward)
        return copy

    def offset(self, origin: Origin, axes: Sequence[Axis], step: int) -> Any:
        """`step` times this rank's position along `axes`, outermost first."""
        total: Any = 0
        for axis in reversed(axes):
            term = self._integer(origin, operator.mul, self.coordinates[axis.name], step)
            total = term if isinstance(total, int) else self._integer(origin, operator.add, total, term)
            step *= axis.size
        return total

    def _integer(self, origin: Origin, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Integer arithmetic on coordinates."""
        node = self.graph.create_node("call_function", target, args, {}, name="offset")
        node.meta["val"] = 0
        node.meta[META] = NodeInfo(op=origin.op, backward=origin.backward)
        if origin.backward:
            node.meta["partitioner_tag"] = "is_backward"
        return node

    def reshape(self, origin: Origin, node: fx.Node, size: Sequence[int]) -> fx.Node:
        """`node` with another local shape, itself where it has it already."""
        if tuple(node.meta["val"].shape) == tuple(size):
            return node
        return self.call(origin, aten.reshape.default, node, list(size))

    def contiguous(self, origin: Origin, node: fx.Node) -> fx.Node:
        """`node` in row-major memory, as collectives need it."""
        if node.meta["val"].is_contiguous():
            return node
        return self.call(origin, aten.clone.default, node, memory_format=torch.contiguous_format)

    def cast(self, node: fx.Node, dtype: torch.dtype, origin: Origin) -> fx.Node:
        """`node` in another dtype, itself where it has it already."""
        if node.meta["val"].dtype == dtype:
            return node
        copy = self.call(origin, aten._to_copy.default, node, dtype=dtype)
        copy.meta[META] = replace(copy.meta[META], layouts=node.meta[META].layouts)
        return copy

    def redistribute(self, node: fx.Node, have: Layout, want: Layout, origin: Origin) -> fx.Node:
        """Bring the value of `node` to another layout.

        A value that is the same in all micro-batches or sub-batches becomes a partial sum over these if each takes an
        equal share of it.
        """
        return self.redistribute_and_reduced(node, have, want, origin)[0]

    def redistribute_and_reduced(
        self, node: fx.Node, have: Layout, want: Layout, origin: Origin
    ) -> tuple[fx.Node, tuple[fx.Node, Layout] | None]:
        """As `redistribute`, with the node and the layout after the last reduction of a partial sum, if there is one.
        """
        reduced = None
        shared = tuple(item for item in want.partial if item[0].kind == "time" and item not in have.partial)
        met = replace(want, partial=tuple(item for item in want.partial if item not in shared))
        for step in steps_between(have, met):
            if step.kind != "slice" and (times := [axis for axis in step.axes if axis.kind == "time"]):
                raise needs_whole_batch(origin.op, have, times[0])
            node = getattr(self, step.kind)(node, step, origin)
            if step.kind in ("all_reduce", "reduce_scatter"):
                reduced = node, step.after
        if shared:
            if not (node.meta["val"].is_floating_point() or node.meta["val"].is_complex()):
                raise needs_whole_batch(origin.op, have, shared[0][0])
            node = self.call(origin, aten.div.Scalar, node, axes_size(axis for axis, _ in shared))
        return node, reduced

    def join_steps(self, node: fx.Node, have: Layout, origin: Origin, axes: Sequence[Axis]) -> tuple[fx.Node, Layout]:
        """Join the sub-batches or slices of a value along these unrolled axes. Return the node and its layout."""
        for axis in axes:
            if axis in have.partial_axes:
                if (combine := dict(have.partial)[axis]) != "sum":
                    raise LayoutError(
                        f"{origin.op} needs the {combine} of all {axis.name}-batches, and only sums of them are "
                        f"computed: use {axis.name}_batches=1"
                    )
                have = replace(have, partial=tuple(item for item in have.partial if item[0] != axis))
                node = self.call(origin, total, node, axis.name, axis.size)
            elif axis in have.shard_axes:
                node = self.call(origin, joined, node, axis.name, axis.size, *have.place(axis))
                have = without_axes(have, (axis,))
            else:
                continue
            node.meta[META] = replace(node.meta[META], layouts=(have,))
        return node, have

    def _collect(
        self, kind: Any, target: Any, node: fx.Node, step: RedistributionStep, origin: Origin, *args: Any
    ) -> fx.Node:
        """Start a collective and wait for it. The pass `Schedule` moves the two apart later.

        Complex numbers are sent as pairs of real ones: backends have no complex dtypes.
        """
        value = node.meta["val"]
        if value.is_complex():
            pairs = self.call(origin, aten.view_as_real.default, node)
            pairs = self._collect(kind, target, pairs, step, origin, *args)
            return self.call(origin, aten.view_as_complex.default, pairs)
        whole = value.nbytes * (axes_size(step.axes) if kind == "all_gather" else 1)
        collective = Collective(kind, step.axes, whole, origin.op, origin.reason, origin.cause)
        start = self.call(origin, target, node, *args, group_name(step.axes), collective=collective)
        return self.call(origin, c10d.wait_tensor.default, start)

    def all_reduce(self, node: fx.Node, step: RedistributionStep, origin: Origin) -> fx.Node:
        """Reduce a partial value over `step.axes`."""
        node = self.contiguous(origin, node)
        return self._reduced("all_reduce", c10d.all_reduce.default, node, step, origin)

    def _reduced(
        self, kind: Any, target: Any, node: fx.Node, step: RedistributionStep, origin: Origin, *args: Any
    ) -> fx.Node:
        """Start a reducing collective. Maximum and minimum are reduced as `ordered_bits`, so that a NaN survives."""
        dtype = node.meta["val"].dtype
        if step.reduce not in ("max", "min") or not dtype.is_floating_point:
            return self._collect(kind, target, node, step, origin, step.reduce, *args)
        node = self.call(origin, custom_ops.ordered_bits.default, node, step.reduce == "max")
        node = self._collect(kind, target, node, step, origin, step.reduce, *args)
        return self.call(origin, custom_ops.from_ordered_bits.default, node, dtype)

    def reduce_scatter(self, node: fx.Node, step: RedistributionStep, origin: Origin) -> fx.Node:
        """Reduce a partial value and keep this rank's part. The parts are brought to the front first, in rank order."""
        units = [unit for dim in step.units for unit in dim]
        node = self.reshape(origin, node, [h for h, _ in units if isinstance(h, int)])
        local = [unit for unit in units if isinstance(unit[0], int)]
        positions = {w: index for index, (_, w) in enumerate(local) if isinstance(w, Axis)}
        front = [positions[axis] for axis in step.axes]
        order = [*front, *(index for index in range(len(local)) if index not in front)]
        node = self._permute(origin, node, order)
        size, shape = axes_size(step.axes), list(step.after.local_shape)
        shape = [size * shape[0], *shape[1:]] if shape else [size]
        node = self.contiguous(origin, self.reshape(origin, node, shape))
        node = self._reduced("reduce_scatter", c10d.reduce_scatter_tensor.default, node, step, origin, size)
        return self.reshape(origin, node, step.after.local_shape)

    def all_gather(self, node: fx.Node, step: RedistributionStep, origin: Origin) -> fx.Node:
        """Gather the parts of a value. They arrive in rank order, in front, and are then moved to their dimensions."""
        size = axes_size(step.axes)
        node = self.contiguous(origin, node)
        node = self.reshape(origin, node, node.meta["val"].shape or [1])
        node = self._collect("all_gather", c10d.all_gather_into_tensor.default, node, step, origin, size)
        units = [unit for dim in step.units for unit in dim]
        gathered = set(step.axes)
        kept = [h for h, _ in units if isinstance(h, int)]
        node = self.reshape(origin, node, [*(axis.size for axis in step.axes), *kept])
        order, next_local = [], len(step.axes)
        for h, _ in units:
            if isinstance(h, int):
                order.append(next_local)
                next_local += 1
            elif h in gathered:
                order.append(step.axes.index(h))
        node = self._permute(origin, node, order)
        # Some CPU kernels (attention, layer norm's backward) are silently wrong on tensors that are not contiguous.
        return self.contiguous(origin, self.reshape(origin, node, step.after.local_shape))

    def all_to_all(self, node: fx.Node, step: RedistributionStep, origin: Origin) -> fx.Node:
        """Move axes from one dimension to another: shard a dimension that was whole, and gather one that was sharded.

        The parts to send are brought to the front, in rank order. The parts that arrive there are moved to their
        dimension.
        """
        # 1. Bring the parts to the front.
        units = [unit for dim in step.units for unit in dim]
        local = [unit for unit in units if isinstance(unit[0], int)]
        node = self.reshape(origin, node, [digit_size(h) for h, _ in local])
        positions = {w: index for index, (_, w) in enumerate(local) if isinstance(w, Axis)}
        sent = [positions[axis] for axis in step.axes]
        kept = [index for index in range(len(local)) if index not in sent]
        sizes = [axis.size for axis in step.axes]
        stay = [digit_size(local[index][0]) for index in kept]
        node = self._permute(origin, node, [*sent, *kept])
        node = self.contiguous(origin, self.reshape(origin, node, [axes_size(step.axes), *stay]))
        # 2. Exchange them.
        splits = [1] * axes_size(step.axes)
        node = self._collect("all_to_all", c10d.all_to_all_single.default, node, step, origin, splits, splits)
        # 3. Move the parts that arrived to their dimension.
        node = self.reshape(origin, node, [*sizes, *stay])
        order, next_kept = [], len(sizes)
        for h, w in units:
            if isinstance(h, Axis) and h in step.axes:
                order.append(step.axes.index(h))
            elif isinstance(h, int) and w not in step.axes:
                order.append(next_kept)
                next_kept += 1
        node = self._permute(origin, node, order)
        return self.contiguous(origin, self.reshape(origin, node, step.after.local_shape))

    def slice(self, node: fx.Node, step: RedistributionStep, origin: Origin) -> fx.Node:
        """Keep this rank's part of a value that is whole on each rank."""
        units = [unit for dim in step.units for unit in dim]
        local = [(h, w) for h, w in units if isinstance(h, int)]
        node = self.reshape(origin, node, [h for h, _ in local])
        index = 0
        for _, w in local:
            if isinstance(w, Axis):
                node = self.call(origin, aten.select.int, node, index, self.coordinates[w.name])
            else:
                index += 1
        if step.axes and set(step.axes) <= set(self.mesh.slice_axes):
            return self.reshape(origin, node, step.after.local_shape)
        if node.meta["val"].is_contiguous() and origin.reason != INPUT_SLICE:  # a view would keep the whole value alive
            node = self.call(origin, aten.clone.default, node)
        return self.contiguous(origin, self.reshape(origin, node, step.after.local_shape))

    def pad(self, node: fx.Node, step: RedistributionStep, origin: Origin) -> fx.Node:
        """Pad a dimension: move its rows to their places in the padded dimension."""
        padding = step.after.padding
        assert padding is not None
        return self.call(origin, custom_ops.pad.default, node, padding.dim, padding.size, list(padding.levels))

    def unpad(self, node: fx.Node, step: RedistributionStep, origin: Origin) -> fx.Node:
        """Remove the padding of a dimension. This is a view if all rows are in front of the padding."""
        padding = step.before.padding
        assert padding is not None
        if padding.in_front and node.meta["val"].shape[padding.dim] == padding.padded:
            node = self.call(origin, aten.narrow.default, node, padding.dim, 0, padding.size)
            return self.contiguous(origin, node)
        return self.call(origin, custom_ops.unpad.default, node, padding.dim, padding.size, list(padding.levels))

    def _permute(self, origin: Origin, node: fx.Node, order: list[int]) -> fx.Node:
        return node if order == sorted(order) else self.call(origin, aten.permute.default, node, order)


def _unreshaped(node: fx.Node) -> fx.Node:
    """The value behind reshapes that copy nothing."""
    while node.target is aten.reshape.default and node.args[0].meta["val"].is_contiguous():  # type: ignore[union-attr]
        node = node.args[0]  # type: ignore[assignment]
    return node


def short_name(target: Callable[..., Any]) -> str:
    """The op's plain name, for a reader of the generated code: ``mm`` for ``aten.mm.default``."""
    schema = getattr(target, "_schema", None)
    name = schema.name.split("::")[-1] if schema is not None else getattr(target, "__name__", "call")
    return str(name).lstrip("_").replace("scaled_dot_product", "sdpa")


def sort_by_place(graph: fx.Graph, place: Mapping[fx.Node, int]) -> None:
    """Sort the nodes of a graph topologically by `place`. Of nodes of one place, the one made last comes first."""
    made = {node: index for index, node in enumerate(graph.nodes)}
    missing = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [(place[node], -made[node], node) for node in graph.nodes if not missing[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        order.append(heapq.heappop(ready)[-1])
        for user in order[-1].users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (place[user], -made[user], user))
    reorder(order)


def reorder(order: Sequence[fx.Node]) -> None:
    """Put the nodes of a graph into this order. Others stay where they are: the output is last."""
    for before, node in itertools.pairwise(order):
        before.append(node)


def finished(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The result of a pass that has edited a graph: without dead code, checked and compiled."""
    remove_dead(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def remove_dead(graph: fx.Graph) -> None:
    """Eliminate dead code, collectives included: torch's own pass keeps these as side effects."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
