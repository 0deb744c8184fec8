"""Pricing: what ops with a parameter cost at each of their strategies, on one device of a cluster."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from shardweave.compiler.planner.ops import Op, Role
from shardweave.compiler.planner.prices import Prices, local_numel, tensor_outputs
from shardweave.ir import Assignment, Axis, Layout, Strategy, axes_size
from shardweave.passes.annotate import info
from shardweave.passes.layouts import output_layouts
from shardweave.passes.rules import find_rule
from shardweave.passes.rules.registry import EVERY, tensor_args
from shardweave.precision import Dtypes


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


@dataclass(frozen=True)
class Parameters:
    """What an op's parameters and their states are like.

    Parameters
    ----------
    shapes : sequence of shapes
        Of its parameter and its companions.
    sizes : Sizes
        Bytes of one of their elements.
    optimizer_bytes : int
        Of the optimizer's states for one element.
    whole : bool
        They and their gradients are whole on every rank.
    """

    shapes: Sequence[tuple[int, ...]]
    sizes: Sizes
    optimizer_bytes: int
    whole: bool = False


@dataclass(frozen=True)
class _Held:
    """What parameters of one shape move and hold, at each strategy of their op."""

    links: NDArray[np.float64]
    states: NDArray[np.int64]
    transient: NDArray[np.int64]
    scratch: NDArray[np.int64]


def price_op(
    op: Op,
    strategies: Sequence[Strategy],
    ports: Sequence[Mapping[str, Assignment]],
    port_of: Sequence[int],
    parameters: Parameters,
    prices: Prices,
    consumers: int,
) -> list[OpPrice]:
    """The price of an op at each of its strategies: its products, what its parameters move, what they hold.

    Parameters
    ----------
    ports, port_of : sequences
        The different assignments of its nodes, and the number of each strategy's (`candidates.spread`).
    consumers : int
        How many ops read the same activation: their input gradients are summed before they are reduced.
    """
    mesh = prices.mesh
    turns = axes_size(mesh.times)
    spread = np.zeros((len(ports), 2))  # compute and sums: the same wherever states rest
    for row, assignments in zip(spread, ports):
        compute = sum(prices.compute(role.node, assignments[role.node.name]) for role in op.roles)
        sums = sum(_backward_sum(role, assignments[role.node.name], prices) for role in op.roles)
        row[:] = turns * compute, turns * sums / consumers
    compute, communication = spread[port_of].T

    used = {port: op.compute_layout(strategy, mesh) for port, strategy in zip(port_of, strategies)}
    batches = [_batch_axes(op, assignments) for assignments in ports]
    stages, over = [strategy.axes(mesh).stages for strategy in strategies], [batches[port] for port in port_of]
    companions = Counter(parameters.shapes[1:])
    parts = [(_held([used[port] for port in port_of], stages, over, parameters, prices), 1)]
    for shape, count in companions.items():
        parts.append((_held([Layout.replicated(shape)] * len(stages), stages, over, parameters, prices), count))
    communication = communication + np.sum([count * held.links for held, count in parts], axis=0)
    states = np.sum([count * held.states for held, count in parts], axis=0)
    scratch = np.sum([count * held.scratch for held, count in parts], axis=0)
    transient = np.max([held.transient for held, _ in parts], axis=0)
    columns = compute + communication, communication, states, transient, scratch
    return [OpPrice(*figures) for figures in zip(*(column.tolist() for column in columns))]


def _held(
    lies: Sequence[Layout],
    stages: Sequence[tuple[tuple[Axis, ...], ...]],
    over: Sequence[set[Axis]],
    parameters: Parameters,
    prices: Prices,
) -> _Held:
    """Of a parameter that the op needs at `lies`, that rests by `stages`, and whose gradient is partial `over` axes."""
    mesh, sizes = prices.mesh, parameters.sizes
    turns = axes_size(mesh.times)
    rests, partials = [], []
    for layout, axes, batch in zip(lies, stages, over):
        whole = Layout.replicated(layout.global_shape)
        rests.append([whole] * 3 if parameters.whole else prices.rests(layout, axes))
        left = (axis for axis in mesh.axes if axis in batch and axis not in layout.shard_axes)
        partials.append(Layout(layout.dims, tuple((axis, "sum") for axis in left)))
    rest, summed, master = ([stage[number] for stage in rests] for number in range(3))
    used, resting, adding, owning = (np.array([*map(local_numel, each)]) for each in (lies, rest, summed, master))

    states = owning * (sizes.master + parameters.optimizer_bytes)
    copied = np.array([a != b for a, b in zip(master, rest)]) | (sizes.master != sizes.working)
    copy, gradient = copied * resting * sizes.working, owning * sizes.master  # gathered or cast once, held for the step
    # In mixed precision the copies are most of a step's states, and gone where the gradients come
    states = states + (np.maximum(copy, gradient) if sizes.master != sizes.working else copy + gradient)
    links = prices.pairs(master, rest, sizes.working)[0] + 2 * turns * prices.pairs(rest, lies, sizes.working)[0]
    if turns == 1:
        links += prices.pairs(partials, master, sizes.reduced)[0]
    else:  # AMSP IV-C: into the sums for each micro-batch, from there to the states once a step
        added = [replace(to, partial=tuple(item for item in have.partial if item[0] not in to.shard_axes))
                 for have, to in zip(partials, summed)]  # fmt: skip
        links += turns * prices.pairs(partials, added, sizes.reduced)[0] + prices.pairs(added, master, sizes.reduced)[0]
        apart = np.array([a != b for a, b in zip(summed, master)]) | (sizes.reduced != sizes.master)
        states = states + apart * adding * sizes.reduced  # the sums of the micro-batches, beside what they become
    gathered = np.array([a != b for a, b in zip(rest, lies)])
    transient = gathered * 2 * used * (sizes.working + sizes.reduced)  # its own copy, the next one's, gradients
    return _Held(links.sum(axis=0), states, transient, owning * sizes.master)


def _batch_axes(op: Op, assignments: Mapping[str, Assignment]) -> set[Axis]:
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
    size = local_numel(layout) * tensor_outputs(role.node)[0].element_size()
    mine = [(axis, reduce) for axis, reduce in layout.partial if mapping[axis] in own]
    plain, apart = (tuple(axis for axis, reduce in mine if (reduce == "own") == owned) for owned in (False, True))
    _, seconds = prices.collective("all_reduce", plain, size)
    if apart and (summed := where_summed(role.node)) is not None:
        share = math.prod(summed.meta["val"].shape) / math.prod(role.node.meta["val"].shape)
        seconds += prices.collective("all_reduce", apart, int(size * share))[1]
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
