"""Prices: seconds and bytes of ops and of changes of layout on one device of a cluster."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import fx

from shardweave.compiler.planner.ops import Op, Role
from shardweave.cost_model import Cluster, collective_seconds
from shardweave.cost_model.compute import Work, node_work, work_seconds
from shardweave.cost_model.products import product_of
from shardweave.cost_model.signature import signature, tensor_shape
from shardweave.errors import LayoutError
from shardweave.ir import Assignment, Axis, Layout, Mesh, Strategy, axes_size
from shardweave.passes.annotate import info
from shardweave.passes.layouts import LOCAL, input_layouts, output_layouts, rest_layouts, steps_between
from shardweave.passes.rules import find_rule
from shardweave.passes.rules.registry import EVERY, tensor_args
from shardweave.precision import Dtypes

# What carries the gradient back where the forward moved the value this way.
TRANSPOSED = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "slice": "all_gather",
    "all_to_all": "all_to_all",
    "all_reduce": None,
    "pad": None,
    "unpad": None,
}


def local_numel(layout: Layout) -> int:
    """Elements on one device."""
    return math.prod(layout.local_shape)


def tensor_outputs(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node computes."""
    value = node.meta["val"]
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, torch.Tensor)]


@dataclass
class Prices:
    """Prices on one cluster; changes of layout are remembered."""

    mesh: Mesh
    cluster: Cluster
    optimizer_bytes: int
    whole: bool = False
    """Parameters and their gradients are whole on every rank."""
    _changes: dict[tuple[Layout, Layout, int, bool], float] = field(default_factory=dict)
    _works: dict[fx.Node, Work | None] = field(default_factory=dict)

    def change(self, have: Layout, want: Layout, itemsize: int, with_backward: bool = False) -> float:
        """Seconds to bring a value from one layout to another, and its gradient back."""
        if have == want:
            return 0.0
        key = have, want, itemsize, with_backward
        if key not in self._changes:
            self._changes[key] = self._change(have, want, itemsize, with_backward)
        return self._changes[key]

    def _change(self, have: Layout, want: Layout, itemsize: int, with_backward: bool) -> float:
        total = 0.0
        for step in steps_between(have, want):
            axes = tuple(axis for axis in step.axes if axis.kind == "space")
            if not axes:
                continue
            whole = max(local_numel(step.before), local_numel(step.after)) * itemsize
            kinds = [step.kind] if step.kind not in LOCAL else []
            back = TRANSPOSED[step.kind] if with_backward else None
            total += sum(
                collective_seconds(kind, whole, axes, self.cluster) for kind in (*kinds, *([back] if back else []))
            )
        return total

    def compute(self, node: fx.Node, assignment: Assignment) -> float:
        """Seconds of an op at an assignment: the axes share its FLOPs, its bytes and its product follow the layouts."""
        if node not in self._works:
            self._works[node] = node_work(node)
        work, bound = self._works[node], info(node).rule
        if work is None or bound is None:
            return 0.0
        mapping = assignment.as_dict()
        arguments = list(zip(tensor_args(node), input_layouts(bound, mapping, self.mesh)))
        moved = sum(local_numel(layout) * argument.meta["val"].element_size() for argument, layout in arguments)
        results = list(zip(tensor_outputs(node), output_layouts(bound, mapping, self.mesh)))
        moved += sum(local_numel(layout) * value.element_size() for value, layout in results)
        shapes = {argument: layout.local_shape for argument, layout in arguments}
        shapes[node] = results[0][1].local_shape

        def local_shape(source: fx.Node) -> tuple[int, ...]:
            return shapes[source] if source in shapes else tensor_shape(source)

        local = Work(
            work.flops // axes_size(mapping),
            min(moved, work.num_bytes),
            work.dtype,
            product_of(node, local_shape) if work.product is not None else None,
            signature(node, local_shape) if self.cluster.measured is not None else "",
        )
        return work_seconds(local, self.cluster)


class Sizes(NamedTuple):
    """Bytes of one element of a parameter: between steps, as the step computes with it, of its gradient in sums."""

    master: int
    working: int
    reduced: int

    @classmethod
    def of(cls, working: torch.dtype, dtypes: Dtypes | None) -> Sizes:
        """Those of a parameter that the graph takes in the dtype `working`."""
        master, reduced = dtypes or (working, working)
        return cls(master.itemsize, working.itemsize, reduced.itemsize)


@dataclass(frozen=True)
class OpPrice:
    """What one op costs at one strategy, on one device.

    `seconds` is compute and communication together; `communication` the part that moves parameters, gradients and
    the partial sums of its own backward. `scratch_bytes` is what the optimizer's step needs beside the states: as much
    as the parameters, for foreach optimizers.
    """

    seconds: float
    communication: float
    state_bytes: int
    transient_bytes: int
    scratch_bytes: int = 0


def price_op(
    op: Op, strategy: Strategy, shapes: Sequence[tuple[int, ...]], sizes: Sizes, prices: Prices, consumers: int
) -> OpPrice:
    """The price of an op: its products, what its parameter moves, what it holds.

    Parameters
    ----------
    shapes : sequence of shapes
        Of its parameter and its companions.
    sizes : Sizes
        Bytes of one of their elements.
    consumers : int
        How many ops read the same activation: their input gradients are summed before they are reduced.
    """
    mesh = prices.mesh
    turns = axes_size(mesh.times)
    assignments = op.assignments(strategy, mesh)
    compute = turns * sum(prices.compute(role.node, assignments[role.node.name]) for role in op.roles)
    sums = sum(_backward_sum(role, assignments[role.node.name], prices) for role in op.roles)
    communication = turns * sums / consumers
    axes = strategy.axes(mesh)
    states = transient = scratch = 0
    for index, shape in enumerate(shapes):
        lies = op.compute_layout(strategy, mesh) if index == 0 else Layout.replicated(shape)
        free = [[axis for axis in stage if axis not in lies.shard_axes] for stage in axes.stages]
        rest, summed, master = rest_layouts(lies, free, mesh)
        if prices.whole:
            rest = summed = master = Layout.replicated(shape)
        states += local_numel(master) * (sizes.master + prices.optimizer_bytes)
        scratch += local_numel(master) * sizes.master
        copy, gradient = 0, local_numel(master) * sizes.master
        if master != rest or sizes.master != sizes.working:  # gathered or cast once, and held for the step
            copy = local_numel(rest) * sizes.working
            communication += prices.change(master, rest, sizes.working)
        # In mixed precision the copies are most of a step's states, and gone where the gradients come
        states += max(copy, gradient) if sizes.master != sizes.working else copy + gradient
        if turns > 1 and (summed != master or sizes.reduced != sizes.master):
            states += local_numel(summed) * sizes.reduced  # the sums of the micro-batches, beside what they become
        batch = _batch_axes(op, assignments)
        over = tuple(
            (axis, "sum") for axis in mesh.ordered(batch) if axis.kind == "space" and axis not in lies.shard_axes
        )
        partial = Layout(lies.dims, over)
        communication += turns * 2 * prices.change(rest, lies, sizes.working)  # for the forward, for the backward
        if turns == 1:
            communication += prices.change(partial, master, sizes.reduced)
        else:  # AMSP IV-C: into the sums for each micro-batch, from there to the states once a step
            added = replace(summed, partial=tuple(item for item in over if item[0] not in summed.shard_axes))
            communication += turns * prices.change(partial, added, sizes.reduced)
            communication += prices.change(added, master, sizes.reduced)
        if rest != lies:  # its own copy, the next one's, and gradients on their way
            transient = max(transient, 2 * local_numel(lies) * (sizes.working + sizes.reduced))
    return OpPrice(compute + communication, communication, states, transient, scratch)


def _batch_axes(op: Op, assignments: dict[str, Assignment]) -> set[Axis]:
    found: set[Axis] = set()
    for role in op.roles:
        found |= {axis for axis, name in assignments[role.node.name].items if name in role.batch}
    return found


def _backward_sum(role: Role, assignment: Assignment, prices: Prices) -> float:
    """Reducing what a backward node leaves partial over the parameter's own loops (``x`` of a column-parallel one)."""
    bound = info(role.node).rule
    assert bound is not None
    if not info(role.node).backward or len(bound.outputs) != 1:
        return 0.0
    own = {name for _, name in role.atoms}
    mapping = {axis: name for axis, name in assignment.items if name in own or name in role.batch}
    (layout,) = output_layouts(bound, mapping, prices.mesh)
    partial = tuple(item for item in layout.partial if mapping[item[0]] in own)
    itemsize = tensor_outputs(role.node)[0].element_size()
    apart = tuple(axis for axis, reduce in partial if reduce == "own")
    summed = where_summed(role.node) if apart else None
    seconds = 0.0
    if summed is not None:
        share = math.prod(summed.meta["val"].shape) / math.prod(role.node.meta["val"].shape)
        seconds += collective_seconds("all_reduce", int(local_numel(layout) * share * itemsize), apart, prices.cluster)
    partial = tuple(item for item in partial if item[0] not in apart)
    try:
        return seconds + prices.change(Layout(layout.dims, partial), Layout(layout.dims), itemsize)
    except LayoutError:
        return seconds


def where_summed(node: fx.Node) -> fx.Node | None:
    """The value at which what ranks own of `node` is summed: it passes what keeps its zeros; None where it never is.

    The gradient of an expert's input goes to the experts before it as it is, or is first summed over a token's choices.
    """
    ends = []
    for user in node.users:
        if user.target is operator.getitem:
            ends.append(where_summed(user))
            continue
        rule = find_rule(user) if user.op == "call_function" else None
        if rule is None:
            ends.append(node)
            continue
        position = tensor_args(user).index(node)
        if not any(position in inputs for inputs in rule.owned.values()):
            passes = rule.kind == "view" or rule.zeros == EVERY or position in rule.zeros
            ends.append(where_summed(user) if passes else node)
    found = [end for end in ends if end is not None]
    return node if len(found) > 1 else found[0] if found else None
