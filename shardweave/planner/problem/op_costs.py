"""Costs of ops with a parameter for each of their strategies, on one device of a cluster."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
Moving = Callable[[Sequence[Layout], Sequence[Layout], float], Links]


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
    kept_bytes : array
        Bytes of gathered parameters that the forward keeps for the backward, by strategy.
    recompute_costs : array
        As `costs`: what is gathered once more where the op is computed again.
    independent_seconds : array
        By port: of the backward's products that do not lead to an input's gradient. Its collectives hide behind them.
    """

    costs: Costs
    optimizer: Floats
    state_bytes: Ints
    gradient_bytes: Ints
    scratch_bytes: Ints
    gathered_bytes: Ints
    transient_bytes: Ints
    kept_bytes: Ints
    recompute_costs: Costs
    independent_seconds: Floats

    def communication(self, strategy: int) -> float:
        """Seconds that move parameters, gradients and the partial sums of its own backward, by no means hidden."""
        levels = (self.costs.shape[1] - 1) // 3
        return float(self.costs[:, 1 : 1 + 2 * levels, strategy].sum())


@dataclass(frozen=True)
class Ends:
    """Whether an op is one of those that nothing comes before, and of those that nothing comes after.

    `behind_all` says whether all others come before it.
    """

    first: bool = False
    last: bool = False
    behind_all: bool = False


@dataclass(frozen=True)
class Parameters:
    """What an op's parameters and their states are like.

    Parameters
    ----------
    shapes : sequence of shapes
        Of its parameter and its companions.
    are_read_again : sequence of bool
        Whether the backward reads each of them: a bias or a table of embeddings is gathered for the forward alone.
    sizes : Sizes
        Bytes of one of their elements.
    optimizer_bytes : int
        Of the optimizer's states for one element.
    whole : bool
        They and their gradients are whole on every rank.
    beside : float
        What is gathered and reduced beside them, of another op, as a part of their own.
    regathers : bool
        What is computed again gathers them again.
    """

    shapes: Sequence[tuple[int, ...]]
    are_read_again: Sequence[bool]
    sizes: Sizes
    optimizer_bytes: int
    whole: bool = False
    beside: float = 1.0
    regathers: bool = False


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
    kept: Ints
    regathers: Links


class Gathering(NamedTuple):
    """How a parameter is gathered: in so many slices, of which the forward keeps some for the backward."""

    slices: int
    kept: int

    @property
    def again(self) -> float:
        """The part that is gathered again for the backward."""
        return 1.0 - min(self.kept, self.slices) / self.slices


def price_op(
    op: Op,
    strategies: Sequence[Strategy],
    kept_slices: Sequence[int],
    ports: Sequence[Mapping[str, Assignment]],
    port_of: Sequence[int],
    parameters: Parameters,
    prices: Prices,
    windows: Windows,
    consumers: int,
    ends: Ends,
    sub_batches: int,
) -> OpPrices:
    """The price of an op at each of its strategies: its products, what its parameters move, what they hold.

    Parameters
    ----------
    kept_slices : sequence of int
        How many slices of the parameter stay gathered from the forward to the backward, at each strategy.
    ports, port_of : sequences
        The different assignments of its nodes, and the number of each strategy's (`candidates.spread`).
    consumers : int
        How many ops read the same activation: their input gradients are summed before they are reduced.
    ends : Ends
        Where nothing hides its parameters' collectives: at the beginning of a pass, and at its end.
    sub_batches : int
        Its products are computed in so many parts of the batch, one after another.
    """
    mesh = prices.mesh
    micro_batch_count = axes_size(mesh.micro_batch_axes)
    # 1. Compute, and sums: the same wherever states rest.
    computed, independent = windows.none(len(ports)), np.zeros(len(ports))
    for port, assignments in enumerate(ports):
        for role in op.roles:
            backward, assignment = info(role.node).backward, assignments[role.node.name]
            seconds = prices.compute(role.node, assignment, role.batch, sub_batches)
            if backward and _sums_over_batch(role):
                seconds += _adding(role, assignment, sub_batches, prices)
                independent[port] += seconds
            computed[int(backward), 0, port] += seconds
            sums = _owned_sum(role, assignment, prices) / consumers
            computed[:, :, port] += windows.waited(np.stack([np.zeros_like(sums), sums]))
    by_strategy = computed[:, :, port_of]
    for index, strategy in enumerate(strategies):
        if strategy.slices > 1:
            by_strategy[:2, 0, index] += _in_slices(op, strategy, ports[port_of[index]], prices, sub_batches)
    in_slices = [Gathering(strategy.slices, kept) for strategy, kept in zip(strategies, kept_slices, strict=True)]
    if ends.behind_all:
        by_strategy += _without_links(by_strategy[:2, 0], independent[port_of], strategies, in_slices, windows)
    # 2. What its parameters move and hold: its own, and its companions, which every device uses whole and gathers as
    #    one.
    used = {port: op.compute_layout(strategy, mesh) for port, strategy in zip(port_of, strategies)}
    batches = [_batch_axes(op, assignments) for assignments in ports]
    stages, over = [strategy.axes(mesh).stages for strategy in strategies], [batches[port] for port in port_of]
    as_one = [Gathering(1, each.kept) for each in in_slices]
    companions = Counter(zip(parameters.shapes[1:], parameters.are_read_again[1:], strict=True))
    parts = [([used[port] for port in port_of], in_slices, parameters.are_read_again[0], 1)]
    parts += [([Layout.replicated(shape)] * len(stages), as_one, read, count)
              for (shape, read), count in companions.items()]  # fmt: skip
    held = [
        (_held(layouts, stages, over, gathering, parameters, read, prices, windows, ends), count)
        for layouts, gathering, read, count in parts
    ]
    gathered, reduced = (np.max([getattr(each, kind) for each, _ in held], axis=0) for kind in ("gathered", "reduced"))
    regathers = held[0][0].regathers
    return OpPrices(
        micro_batch_count * by_strategy + np.sum([count * each.costs for each, count in held], axis=0),
        np.sum([count * each.optimizer for each, count in held], axis=0),
        np.sum([count * each.states for each, count in held], axis=0),
        np.sum([count * each.gradients for each, count in held], axis=0),
        np.max([each.scratch for each, _ in held], axis=0),
        gathered,
        gathered + reduced,
        np.sum([count * each.kept for each, count in held], axis=0),
        windows.moved("gather", np.stack([np.zeros_like(regathers), regathers])),
        independent,
    )


def _without_links(
    computed: Floats,
    independent: Floats,
    strategies: Sequence[Strategy],
    gathering: Sequence[Gathering],
    windows: Windows,
) -> Costs:
    """What the op behind all others computes while the links are idle, at each strategy.

    The forward's gathers have ended before it, or before its last slice. In the backward one of its two products comes
    before all reductions, the shorter one at least, but not before the gathers where parameters are gathered again.
    """
    slices = np.array([each.slices for each in gathering])
    gathers_once = np.array([own.rest == 1 or not each.again for own, each in zip(strategies, gathering, strict=True)])
    shorter = np.minimum(independent, computed[1] - independent)
    return windows.without_links(computed[0] / slices, gathers_once * shorter / slices)


def _held(
    used_at: Sequence[Layout],
    stages: Sequence[tuple[tuple[Axis, ...], ...]],
    over: Sequence[set[Axis]],
    gathering: Sequence[Gathering],
    parameters: Parameters,
    is_read_again: bool,
    prices: Prices,
    windows: Windows,
    ends: Ends,
) -> _Held:
    """Of a parameter that the op needs at `used_at`, that rests by `stages`, and whose gradient is partial `over` axes.

    It is brought there, and the gradient from there, in slices.
    """
    mesh, sizes = prices.mesh, parameters.sizes
    micro_batch_count = axes_size(mesh.micro_batch_axes)
    slices = np.array([each.slices for each in gathering])
    # 1. Where it rests in a step, where its gradient is summed, and where its states rest.
    at_rest, partials = [], []
    for layout, axes, batch in zip(used_at, stages, over):
        whole = Layout.replicated(layout.global_shape)
        at_rest.append([whole] * 3 if parameters.whole else prices.state_layouts(layout, axes))
        unsummed = (axis for axis in mesh.axes if axis in batch and axis not in layout.shard_axes)
        partials.append(Layout(layout.dims, tuple((axis, "sum") for axis in unsummed)))
    rest, summed, master = ([stage[number] for stage in at_rest] for number in range(3))
    used, resting, adding, owning = (np.array([*map(local_numel, each)]) for each in (used_at, rest, summed, master))

    # 2. What it holds.
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
    gathered = np.array([a != b for a, b in zip(rest, used_at)])
    again = np.array([each.again for each in gathering]) if is_read_again else np.zeros(len(gathering))
    kept = (gathered * is_read_again * (1.0 - again) * used * sizes.working).astype(np.int64)
    copies = (gathered * (1.0 + parameters.beside) * (used // slices)).astype(np.int64)

    def moved(move: Moving, sources: Sequence[Layout], targets: Sequence[Layout], itemsize: int) -> Floats:
        """Of each slice alone, all of them together."""
        found = move(sources, targets, itemsize)
        for count in {*slices.tolist()} - {1}:
            own = [index for index, each in enumerate(gathering) if each.slices == count]
            each = move([sources[i] for i in own], [targets[i] for i in own], itemsize / count)
            found[:, own] = count * each
        return found

    # 3. What it moves. AMSP IV-C: into the sums for each micro-batch, from there to the states once a step; of one
    #    micro-batch there is no such stop.
    gathers = micro_batch_count * moved(prices.gathers, rest, used_at, sizes.working)
    broadcasts = prices.gathers(master, rest, sizes.working)
    into = master if micro_batch_count == 1 else summed
    added = [replace(to, partial=tuple(item for item in have.partial if item[0] not in to.shard_axes))
             for have, to in zip(partials, into)]  # fmt: skip
    scatters = micro_batch_count * moved(prices.scatters, partials, added, sizes.reduced)
    if micro_batch_count == 1:  # what is whole until the end of the step is only reduced (`passes.block.traffic_of`)
        reductions = moved(prices.scatters, added, master, sizes.reduced)
        only = np.array([float(not (axes[0] or axes[1])) for axes in stages])
        scatters, reductions = scatters * (1.0 - only), reductions + scatters * only
    else:
        reductions = prices.scatters(added, master, sizes.reduced)
        apart = np.array([a != b for a, b in zip(summed, master)]) | (sizes.reduced != sizes.master)
        states = states + apart * adding * sizes.reduced  # the sums of the micro-batches, beside what they become
    nothing = np.zeros_like(gathers)
    moves: tuple[tuple[Traffic, Links, Links, bool], ...] = (
        ("broadcast", broadcasts, nothing, ends.first),
        ("gather", gathers, nothing, ends.first),
        ("gather", nothing, again * gathers, ends.last),
        ("scatter", nothing, scatters, ends.first),
        ("reduce", nothing, reductions, ends.first),
    )
    costs = windows.none(len(stages))
    for traffic, forward, backward, alone in moves:
        links = np.stack([forward, backward])
        moving = windows.moved(traffic, links / slices, alone)  # of all but one slice, other slices compute beside
        moving += windows.moved(traffic, links - links / slices)
        costs += windows.once(moving) if traffic in ("broadcast", "reduce") else moving
    optimizer = [optimizer_loads(int(size), parameters.optimizer_bytes / sizes.master, prices.cluster)
                 for size in owning * sizes.master]  # fmt: skip
    # What is computed again shares the backward's gather of a whole parameter, but gathers slices again
    regathers = again * ((slices > 1) | parameters.regathers) * gathers
    return _Held(
        costs, np.array(optimizer).T, states, gradient, scratch, copies * sizes.working, copies * sizes.reduced, kept,
        regathers,
    )  # fmt: skip


def _sums_over_batch(role: Role) -> bool:
    """Whether a product has no batch in its result: that of a weight's gradient."""
    bound = info(role.node).rule
    assert bound is not None
    return not any(name in names for dims in bound.outputs for names in dims for name in role.batch)


def _adding(role: Role, assignment: Assignment, parts: int, prices: Prices) -> float:
    """Seconds of adding up what the parts of a batch leave of a weight's gradient."""
    bound = info(role.node).rule
    assert bound is not None
    (layout,) = output_layouts(bound, assignment.as_dict(), prices.mesh)[:1]
    size = local_numel(layout) * tensor_outputs(role.node)[0].element_size()
    return (parts - 1) * prices.copy(size * 3 // 2)


def _in_slices(
    op: Op, strategy: Strategy, whole: Mapping[str, Assignment], prices: Prices, sub_batches: int
) -> Floats:
    """What an op's products take longer in slices, forward and backward: smaller ones, and what puts them together."""
    found = np.zeros(2)
    sliced = op.assignments(strategy, prices.mesh)
    for role in op.roles:
        mine, all_slices = sliced[role.node.name], whole[role.node.name]
        cut = dict(mine.items).get(slice_axis(strategy.slices))
        bound = info(role.node).rule
        assert bound is not None
        longer = strategy.slices * prices.compute(role.node, mine, role.batch, sub_batches)
        longer -= prices.compute(role.node, all_slices, role.batch, sub_batches)
        for value, dims in zip(tensor_outputs(role.node), bound.outputs):
            together = 1 if any(cut in names for names in dims) else strategy.slices - 1  # beside each other, or added
            size = value.numel() * value.element_size()
            spread = math.prod(axis.size for axis, name in all_slices.items if any(name in n for n in dims))
            longer += together * prices.copy(size // spread) if cut is not None else 0.0
        found[int(info(role.node).backward)] += longer
    return found


def _batch_axes(op: Op, assignments: Mapping[str, Assignment]) -> set[Axis]:
    found: set[Axis] = set()
    for role in op.roles:
        found |= {axis for axis, name in assignments[role.node.name].items if name in role.batch}
    return found


def _owned_sum(role: Role, assignment: Assignment, prices: Prices) -> Links:
    """Summing what a backward node leaves of an input's gradient with the ranks that own it.

    What is a partial sum on all ranks is part of the change of layout to the layout of the input.
    """
    nothing: Links = np.zeros(prices.num_links)
    bound = info(role.node).rule
    assert bound is not None
    if not info(role.node).backward or len(bound.outputs) != 1:
        return nothing
    own = {name for _, name in role.atoms}
    mapping = {axis: name for axis, name in assignment.items if name in own or name in role.batch}
    (layout,) = output_layouts(bound, mapping, prices.mesh)
    apart = tuple(axis for axis, reduce in layout.partial if mapping[axis] in own and reduce == "own")
    summed = where_summed(role.node) if apart else None
    if summed is None:
        return nothing
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
