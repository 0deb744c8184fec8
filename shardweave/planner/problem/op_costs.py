"""Costs of ops with a parameter for each of their strategies, on one device of a cluster."""

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

from shardweave.cost_model import optimizer_loads
from shardweave.ir import Assignment, Axis, Dtypes, Layout, Strategy, Traffic, axes_size, output_layouts, slice_axis
from shardweave.planner.problem.overlap_model import Costs, Floats, Windows
from shardweave.planner.problem.resharding_costs import Links, Prices, local_numel, tensor_outputs
from shardweave.sharding import EVERY, Op, Role, find_rule, info, tensor_args

Ints = NDArray[np.int64]


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


@dataclass(frozen=True, eq=False)
class OpPrices:
    """What one op costs at each of its strategies, on one device.

    Parameters
    ----------
    costs : array
        Seconds of its passes (`windows.Costs`), by strategy.
    optimizer : array
        Seconds of the optimizer's step on each stream of its window, by strategy.
    state_bytes, gradient_bytes, scratch_bytes : arrays
        Bytes by strategy: of the states, with gradients where several micro-batches add up; of gradients that are
        there from the backward on; of what the optimizer's step needs while it updates these parameters.
    gathered_bytes, transient_bytes : arrays
        Bytes of copies of parameters while the op runs, with its neighbour's; the same with gradients while they are
        reduced: what is there while its own products run, in the backward.
    """

    costs: Costs
    optimizer: Floats
    state_bytes: Ints
    gradient_bytes: Ints
    scratch_bytes: Ints
    gathered_bytes: Ints
    transient_bytes: Ints

    def communication(self, strategy: int) -> float:
        """Seconds that move parameters, gradients and the partial sums of its own backward, by no means hidden."""
        return float(self.costs[:, 1:, strategy].sum())


@dataclass(frozen=True)
class Ends:
    """Whether an op is one of those that nothing comes before, and of those that nothing comes after."""

    first: bool = False
    last: bool = False


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
    beside : float
        What is gathered and reduced beside them, of another op, as a part of their own.
    """

    shapes: Sequence[tuple[int, ...]]
    sizes: Sizes
    optimizer_bytes: int
    whole: bool = False
    beside: float = 1.0


@dataclass(frozen=True)
class _Held:
    """What parameters of one shape move and hold, at each strategy of their op."""

    costs: Costs
    optimizer: Floats
    states: Ints
    gradients: Ints
    scratch: Ints
    gathered: Ints
    reduced: Ints


def price_op(
    op: Op,
    strategies: Sequence[Strategy],
    ports: Sequence[Mapping[str, Assignment]],
    port_of: Sequence[int],
    parameters: Parameters,
    prices: Prices,
    windows: Windows,
    consumers: int,
    ends: Ends,
) -> OpPrices:
    """The price of an op at each of its strategies: its products, what its parameters move, what they hold.

    Parameters
    ----------
    ports, port_of : sequences
        The different assignments of its nodes, and the number of each strategy's (`candidates.spread`).
    consumers : int
        How many ops read the same activation: their input gradients are summed before they are reduced.
    ends : Ends
        Where nothing hides its parameters' collectives: at the beginning of a pass, and at its end.
    """
    mesh = prices.mesh
    micro_batch_count = axes_size(mesh.micro_batch_axes)
    slices = [strategy.slices for strategy in strategies]
    spread = windows.none(len(ports))  # compute and sums: the same wherever states rest
    for port, assignments in enumerate(ports):
        for role in op.roles:
            backward, assignment = int(info(role.node).backward), assignments[role.node.name]
            spread[backward, 0, port] += prices.compute(role.node, assignment)
            level, seconds = _owned_sum(role, assignment, prices)
            spread[1, 1 + level, port] += seconds / consumers

    used = {port: op.compute_layout(strategy, mesh) for port, strategy in zip(port_of, strategies)}
    batches = [_batch_axes(op, assignments) for assignments in ports]
    stages, over = [strategy.axes(mesh).stages for strategy in strategies], [batches[port] for port in port_of]

    def held(lies: Sequence[Layout]) -> _Held:
        return _held(lies, stages, over, slices, parameters, prices, windows, ends)

    parts = [(held([used[port] for port in port_of]), 1)]
    for shape, count in Counter(parameters.shapes[1:]).items():
        parts.append((held([Layout.replicated(shape)] * len(stages)), count))
    computed = spread[:, :, port_of]
    for index, strategy in enumerate(strategies):
        if strategy.slices > 1:
            computed[:, 0, index] += _in_slices(op, strategy, ports[port_of[index]], prices)
    gathered, reduced = (np.max([getattr(held, kind) for held, _ in parts], axis=0) for kind in ("gathered", "reduced"))
    return OpPrices(
        micro_batch_count * computed + np.sum([count * held.costs for held, count in parts], axis=0),
        np.sum([count * held.optimizer for held, count in parts], axis=0),
        np.sum([count * held.states for held, count in parts], axis=0),
        np.sum([count * held.gradients for held, count in parts], axis=0),
        np.max([held.scratch for held, _ in parts], axis=0),
        gathered,
        gathered + reduced,
    )


def _held(
    lies: Sequence[Layout],
    stages: Sequence[tuple[tuple[Axis, ...], ...]],
    over: Sequence[set[Axis]],
    slices: Sequence[int],
    parameters: Parameters,
    prices: Prices,
    windows: Windows,
    ends: Ends,
) -> _Held:
    """Of a parameter that the op needs at `lies`, that rests by `stages`, and whose gradient is partial `over` axes.

    It is brought there, and the gradient from there, in `slices`.
    """
    mesh, sizes = prices.mesh, parameters.sizes
    micro_batch_count = axes_size(mesh.micro_batch_axes)
    rests, partials = [], []
    for layout, axes, batch in zip(lies, stages, over):
        whole = Layout.replicated(layout.global_shape)
        rests.append([whole] * 3 if parameters.whole else prices.rests(layout, axes))
        unsummed = (axis for axis in mesh.axes if axis in batch and axis not in layout.shard_axes)
        partials.append(Layout(layout.dims, tuple((axis, "sum") for axis in unsummed)))
    rest, summed, master = ([stage[number] for stage in rests] for number in range(3))
    used, resting, adding, owning = (np.array([*map(local_numel, each)]) for each in (lies, rest, summed, master))

    copied = np.array([a != b for a, b in zip(master, rest)]) | (sizes.master != sizes.working)
    copy, gradient = copied * resting * sizes.working, owning * sizes.master  # gathered or cast once, held for the step
    states = owning * (sizes.master + parameters.optimizer_bytes) + copy
    # Two temporaries, and one of the parameter before: a bias, where there are any (`cost_model.scratch`)
    before = 0.0 if len(parameters.shapes) > 1 else parameters.beside
    adapts = parameters.optimizer_bytes >= 2 * sizes.master
    scratch = adapts * ((2.0 + before) * owning).astype(np.int64) * sizes.master
    if sizes.master != sizes.working:  # the copies are most of a step's states, and gone where the gradients come
        gradient = np.maximum(0, gradient - copy)
    if micro_batch_count > 1:  # from the first micro-batch's backward on
        states, gradient = states + gradient, np.zeros_like(gradient)

    def moved(haves: Sequence[Layout], wants: Sequence[Layout], itemsize: int) -> Floats:
        """Of each slice alone, all of them together."""
        found = prices.one_way(haves, wants, itemsize)
        for count in {*slices} - {1}:
            own = [index for index, mine in enumerate(slices) if mine == count]
            each = prices.one_way([haves[i] for i in own], [wants[i] for i in own], itemsize / count)
            found[:, own] = count * each
        return found

    # AMSP IV-C: into the sums for each micro-batch, from there to the states once a step; of one there is no such stop
    gathers = micro_batch_count * moved(rest, lies, sizes.working)
    broadcasts = prices.one_way(master, rest, sizes.working)
    into = master if micro_batch_count == 1 else summed
    added = [replace(to, partial=tuple(item for item in have.partial if item[0] not in to.shard_axes))
             for have, to in zip(partials, into)]  # fmt: skip
    scatters = micro_batch_count * moved(partials, added, sizes.reduced)
    reductions = (moved if micro_batch_count == 1 else prices.one_way)(added, master, sizes.reduced)
    if micro_batch_count == 1:  # what is whole until the end of the step is only reduced (`passes.block.traffic_of`)
        only = np.array([float(not (axes[0] or axes[1])) for axes in stages])
        scatters, reductions = scatters * (1.0 - only), reductions + scatters * only
    else:
        apart = np.array([a != b for a, b in zip(summed, master)]) | (sizes.reduced != sizes.master)
        states = states + apart * adding * sizes.reduced  # the sums of the micro-batches, beside what they become
    nothing = np.zeros_like(gathers)
    moves: tuple[tuple[Traffic, Links, Links, bool], ...] = (
        ("broadcast", broadcasts, nothing, ends.first),
        ("gather", gathers, nothing, ends.first),
        ("gather", nothing, gathers, ends.last),
        ("scatter", nothing, scatters, ends.first),
        ("reduce", nothing, reductions, ends.first),
    )
    costs = windows.none(len(stages))
    for traffic, forward, backward, alone in moves:
        costs += windows.moved(traffic, np.stack([forward, backward]), alone)
    gathered = np.array([a != b for a, b in zip(rest, lies)])
    copies = (gathered * (1.0 + parameters.beside) * (used // np.array(slices))).astype(np.int64)
    optimizer = [optimizer_loads(int(size), parameters.optimizer_bytes / sizes.master, prices.cluster)
                 for size in owning * sizes.master]  # fmt: skip
    return _Held(
        costs, np.array(optimizer).T, states, gradient, scratch, copies * sizes.working, copies * sizes.reduced
    )


def _in_slices(op: Op, strategy: Strategy, whole: Mapping[str, Assignment], prices: Prices) -> Floats:
    """What an op's products take longer in slices, forward and backward: smaller ones, and what puts them together."""
    found = np.zeros(2)
    sliced = op.assignments(strategy, prices.mesh)
    for role in op.roles:
        mine = sliced[role.node.name]
        cut = dict(mine.items).get(slice_axis(strategy.slices))
        bound = info(role.node).rule
        assert bound is not None
        longer = strategy.slices * prices.compute(role.node, mine) - prices.compute(role.node, whole[role.node.name])
        for value, dims in zip(tensor_outputs(role.node), bound.outputs):
            together = 1 if any(cut in names for names in dims) else strategy.slices - 1  # beside each other, or added
            size = value.numel() * value.element_size()
            spread = math.prod(axis.size for axis, name in whole[role.node.name].items if any(name in n for n in dims))
            longer += together * prices.copy(size // spread) if cut is not None else 0.0
        found[int(info(role.node).backward)] += longer
    return found


def _batch_axes(op: Op, assignments: Mapping[str, Assignment]) -> set[Axis]:
    found: set[Axis] = set()
    for role in op.roles:
        found |= {axis for axis, name in assignments[role.node.name].items if name in role.batch}
    return found


def _owned_sum(role: Role, assignment: Assignment, prices: Prices) -> tuple[int, float]:
    """Summing what a backward node leaves of an input's gradient with the ranks that own it: its level and seconds.

    What is a partial sum on all ranks is part of the change of layout to where the input lies.
    """
    bound = info(role.node).rule
    assert bound is not None
    if not info(role.node).backward or len(bound.outputs) != 1:
        return 0, 0.0
    own = {name for _, name in role.atoms}
    mapping = {axis: name for axis, name in assignment.items if name in own or name in role.batch}
    (layout,) = output_layouts(bound, mapping, prices.mesh)
    apart = tuple(axis for axis, reduce in layout.partial if mapping[axis] in own and reduce == "own")
    summed = where_summed(role.node) if apart else None
    if summed is None:
        return 0, 0.0
    size = local_numel(layout) * tensor_outputs(role.node)[0].element_size()
    share = math.prod(summed.meta["val"].shape) / math.prod(role.node.meta["val"].shape)
    return prices.collective("all_reduce", apart, int(size * share))


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
