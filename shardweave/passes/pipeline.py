"""The pipeline: the ordered list of passes, and the lowering of an annotated step by them.

`PASSES` is the order. `lower` runs those that a plan and its options ask for, and splits the result into the forward
and the backward that run. Everything that is lowered takes this one way: a step that runs for several micro-batches,
and a draft for the simulator, which is neither verified nor kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from shardweave.cost_model import ONCE, Cluster, Options, Repeated, liveness, output_storages, rounded, storage_bytes
from shardweave.ir import Assignment, Mesh, PlanError, StepSpec, Strategy
from shardweave.passes.annotated_step import Annotated, join_names
from shardweave.passes.base import Pass, PassManager
from shardweave.passes.bucket import Bucket
from shardweave.passes.codegen import Step, Turns, graph_hash, set_apart, split
from shardweave.passes.disable_overlap import DisableOverlap
from shardweave.passes.keep_unsharded import KeepUnsharded
from shardweave.passes.overlap_options import check_patterns, sliced_ops, with_times
from shardweave.passes.partition import Shard, Sharder, StateSharding
from shardweave.passes.quantize import Quantize
from shardweave.passes.recompute import Recompute
from shardweave.passes.schedule import Alike, Schedule, fits
from shardweave.passes.step_boundary import Boundary, data_axes, mesh_for
from shardweave.passes.unroll_sub_batches import UnrollSubBatches
from shardweave.sharding import copied, graph_outputs, info, layer_of

PASSES: tuple[type[Pass], ...] = (
    Shard,  # each op in its local form, and the collectives that bring values from layout to layout
    Recompute,  # what the backward computes again instead of keeping it from the forward
    UnrollSubBatches,  # the sub-batches, and the slices of ops, side by side
    KeepUnsharded,  # parameters that stay gathered from the forward to the backward
    Bucket,  # small collectives become one
    Quantize,  # parameters and gradients move in few bits
    Schedule,  # starts early, waits late, within the memory limit
    DisableOverlap,  # waits at once for what is not to overlap
)
"""In the order in which they run; each but `Shard`, `Recompute` and `Schedule` where options ask for it."""

Shards = dict[Hashable, tuple[Sharder, Boundary, fx.GraphModule]]
"""Sharded graphs of one step under one plan, by what of the options they depend on."""


@dataclass
class Compiled:
    """A lowered step, with the graph after each pass: ``graphs["shard"]``, ..., ``graphs["backward"]``."""

    step: Step
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)


def times_of(alike: Alike) -> dict[str, int]:
    """For how many layers one counts, itself among them, by its name.

    >>> times_of([(["blocks.0", "blocks.1"], 10)])
    {'blocks.1': 11}
    """
    return {few[-1]: 1 + count for few, count in alike}


def _sum_so_far(accumulator: fx.Node) -> str:
    """The name of the placeholder that brings the sum of a gradient so far to the node that adds to it."""
    return accumulator.all_input_nodes[0].name


def lower(
    annotated: Annotated,
    strategies: Mapping[str, Strategy],
    mesh: Mesh,
    options: Options,
    on_stage: Callable[[str, fx.GraphModule], None] | None = None,
    joins: Mapping[str, Assignment] | None = None,
    cluster: Cluster | None = None,
    draft: bool = False,
    shards: Shards | None = None,
    alike: Alike = (),
    in_turns: bool = False,
) -> Compiled:
    """The local forward and backward graphs of a step under these strategies, one an op.

    `joins` say how ops that bring several of them together are spread, by `join_names`; the others follow. Nodes are
    ordered by what they take on `cluster`; left out, on this machine. A `draft` is simulated and not run: its graphs
    are not verified, and only the last ones are kept. Lowered again with the same `shards` and other options for what
    comes after `shard`, the step is not sharded anew. `alike` are equal layers of a folded step, and how many were
    left out: memory is left for these. What is `in_turns` is lowered to run several times, as micro-batches are.

    Raises
    ------
    LayoutError
        Where a strategy does not fit its op.
    """
    joins, shards = joins or {}, {} if shards is None else shards
    times = times_of(alike)
    sizes = {op.name: math.prod(op.sizes.values()) * times.get(layer_of(op.name), 1) for op in annotated.ops}
    mesh = with_times(mesh_for(mesh, strategies, sizes), options, strategies.values())
    if mesh.all_times and not annotated.batch:
        raise PlanError(
            f"the step has no batch to cut, as none of its inputs has a dimension, but the options ask for "
            f"{' of '.join(f'{axis.size} {axis.name}-batches' for axis in reversed(mesh.all_times))}: leave them out"
        )
    cluster = cluster or Cluster.local(mesh.world_size)
    check_patterns(annotated.captured, options.weaving)
    lowering = _Lowering(annotated, strategies, mesh, options, joins, on_stage, cluster, draft, shards, alike)
    return lowering.turns() if mesh.times or in_turns else lowering.step()


@dataclass
class _Lowering:
    """One plan of one step on its way to graphs."""

    annotated: Annotated
    strategies: Mapping[str, Strategy]
    mesh: Mesh
    options: Options
    joins: Mapping[str, Assignment]
    on_stage: Callable[[str, fx.GraphModule], None] | None
    cluster: Cluster
    draft: bool
    shards: Shards
    alike: Alike
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)

    def step(self) -> Compiled:
        """The graphs of a step that is run once."""
        sharder, boundary, local = self._local(accumulates=False)
        forward, backward = split(local, self._num_results, self.annotated.tangents)
        self._keep(forward, backward)
        spec = boundary.finish(
            sharder.outputs.layouts, sharder.values.state_layouts, forward, self._hash(forward, backward)
        )
        again = replace(self, graphs={}, on_stage=None)
        return Compiled(Step(forward, backward, spec, lambda: again._turns()[0]), self.graphs)

    def turns(self) -> Compiled:
        """The graphs of a step that is run for one micro-batch after another."""
        if self.annotated.captured.whole:
            raise PlanError('micro_batches is for compile_parallel: torch.compile(backend="shardweave") has none')
        if not self.annotated.loss_inside or len(self.annotated.tangents) != 1:
            raise PlanError(
                f"micro_batches={self.options.turns} runs each micro-batch's backward right after its forward, "
                f"so the model must return one scalar loss; {len(self.annotated.tangents)} of its outputs may be one. "
                "Compute the loss in the model, or call it for each micro-batch under no_sync()"
            )
        turns, spec = self._turns()
        forward, backward = turns.forward(True, False), turns.backward(True, True)
        self._keep(forward, backward)
        return Compiled(Step(forward, backward, spec, lambda: turns), self.graphs)

    def _turns(self) -> tuple[Turns, StepSpec]:
        sharder, boundary, local = self._local(accumulates=True)
        holders = [total.placeholder.name for total in sharder.values.whole_batch_sums]
        totals = set_apart(local, holders, "Totals") if holders else None
        forward, backward = split(local, self._num_results, self.annotated.tangents)
        inside = {node.name for node in forward.graph.nodes}
        working = [node.name for node in sharder.values.gathered_once if node.name in inside]
        added = {_sum_so_far(node): node.name for node in sharder.outputs.accumulators.values()}
        spec = boundary.finish(
            sharder.outputs.layouts, sharder.values.state_layouts, forward, self._hash(forward, backward)
        )
        return Turns(forward, backward, working, added, totals), spec

    @property
    def _num_results(self) -> int:
        captured = self.annotated.captured
        return len(captured.mutated_buffers) + len(captured.outputs)

    def _sharded(self, accumulates: bool) -> tuple[Sharder, Boundary, fx.GraphModule]:
        """The local graph, and the run of `shard` that wrote it."""
        captured = self.annotated.captured
        assignments = {}
        rests: dict[str, StateSharding] = {}
        slices = sliced_ops(self.options.weaving.operator_slices, self.annotated.ops, self.strategies, self.mesh)
        for op in self.annotated.ops:
            strategy = self.strategies[op.name]
            strategy = replace(strategy, slices=slices.get(op.name, strategy.slices))
            assignments.update(op.assignments(strategy, op.mesh_of(self.mesh, self.options.weaving.undivided)))
            axes = strategy.axes(self.mesh)
            rest = StateSharding(*axes.stages)
            rests.update(dict.fromkeys((op.parameter, *op.companions), rest))
        for node, name in join_names(captured.graph.graph).items():
            if name in self.joins:
                assignments[node.name] = self.joins[name]
        data = data_axes(self.annotated.ops, self.strategies, self.mesh)
        specs = Boundary(self.annotated, self.mesh, data, self.options)
        shard = Shard(
            self.mesh,
            assignments,
            specs.sources,
            specs.wanted,
            captured.parameters,
            specs.tangents,
            {**captured.buffers, **captured.inputs},
            tuple(captured.inputs),
            captured.gradients,
            {
                name: rests.get(name, StateSharding())._replace(dtypes=captured.dtypes.get(name))
                for name in captured.parameters.values()
            },
            accumulates,
            captured.known,
            whole_sums=self.options.whole_sums,
            undivided=self.options.weaving.undivided,
        )
        sharder = Sharder(shard, copied(captured.graph))
        local = sharder.run()
        return sharder, specs, local

    def _local(self, accumulates: bool) -> tuple[Sharder, Boundary, fx.GraphModule]:
        """The local graph after all passes, and the run of `Shard` that wrote it."""
        weaving = self.options.weaving
        self.graphs["capture"] = self.annotated.captured.graph
        # 1. Shard, unless another lowering of this plan has: its result tells the later passes what they need.
        key = self.mesh, accumulates, tuple(weaving.operator_slices.items()), weaving.whole_sums, weaving.undivided
        if key not in self.shards:
            self.shards[key] = self._sharded(accumulates)
        sharder, boundary, sharded = self.shards[key]
        # 2. The other passes; without buckets where these do not fit into the memory limit, as each is held whole.
        attempts = (True, False) if weaving.buckets and weaving.buckets != "flat" else (bool(weaving.buckets),)
        for buckets in attempts:
            manager = PassManager(not self.draft, self.on_stage)
            manager.resume(Shard, sharded)
            local = manager.run(copied(sharded), self._passes(sharder, sharded.graph, buckets))
            if fits(local):
                break
        # 3. Nothing writes to the last graph any more: it is kept itself, and of drafts, too.
        self.graphs |= {**manager.history, manager.last: local}
        return sharder, boundary, local

    def _passes(self, sharder: Sharder, sharded: fx.Graph, buckets: bool) -> Iterator[Pass]:
        """The passes that come after `Shard` here, with their options."""
        weaving, rests = self.options.weaving, sharder.options.state_sharding
        yield Recompute(weaving.recompute, {node.name for node in sharder.values.gathered_once}, weaving.gather_again)
        if self.mesh.unrolled:
            yield UnrollSubBatches(self.mesh.unrolled)
        if weaving.keep_gathered:
            yield KeepUnsharded(weaving.keep_gathered, self.mesh.slices)
        if buckets:
            yield Bucket(self.cluster, self._borders(sharder), rests if weaving.buckets == "flat" else None)
        if weaving.quantize:
            yield Quantize(weaving.quantize)
        yield self._schedule(sharder, sharded)
        if weaving.blocking:
            yield DisableOverlap(weaving.blocking, rests)

    def _borders(self, sharder: Sharder) -> list[list[str]]:
        """Where the graph may be cut later: at each tangent, and between what runs once and for each micro-batch."""
        shared = sharder.values.gathered_once, sharder.outputs.accumulators.values()
        turns = [[node.name for node in nodes] for nodes in shared] if sharder.options.accumulates else []
        return [[tangent] for tangent in self.annotated.tangents] + turns

    def _schedule(self, sharder: Sharder, local: fx.Graph) -> Schedule:
        options = self.options
        return Schedule(
            self.cluster,
            options.lookahead,
            options.limit(self.cluster),
            self._state_bytes(sharder) + (options.turns - 1) * self._bytes_of_a_turn(local),
            options.cross_pass,
            self.alike,
            self._repeated(sharder),
        )

    def _repeated(self, sharder: Sharder) -> Repeated:
        """What all micro-batches use, and the sums of their gradients."""
        if self.options.turns == 1:
            return ONCE
        shared = frozenset(node.name for node in sharder.values.gathered_once)
        return Repeated(shared, frozenset(_sum_so_far(node) for node in sharder.outputs.accumulators.values()))

    def _state_bytes(self, sharder: Sharder) -> int:
        """Of the optimizer's states."""
        states, times = 0, times_of(self.alike)
        for name in self.annotated.captured.gradients:
            if name in sharder.values.state_layouts:
                size = math.prod(sharder.values.state_layouts[name].local_shape) * self.options.optimizer_bytes
                states += rounded(size, self.cluster.device) * times.get(layer_of(name), 1)
        return states

    def _bytes_of_a_turn(self, local: fx.Graph) -> int:
        """What one micro-batch is given and returns, which is there while the others run, too."""
        captured, found = self.annotated.captured, liveness(local)
        first = len(captured.mutated_buffers)
        returned = graph_outputs(local)[first : first + len(captured.outputs)]
        names = set(captured.inputs.values())
        given = [node for node in local.nodes if node.op == "placeholder" and info(node).op in names]
        storages = dict.fromkeys(output_storages([*given, *returned], found))
        return sum(rounded(storage_bytes(storage), self.cluster.device) for storage in storages)

    def _hash(self, *graphs: fx.GraphModule) -> str:
        return "" if self.draft else graph_hash(*graphs)

    def _keep(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        self.graphs |= {"forward": forward, "backward": backward}
        if self.on_stage is not None:
            for name in ("forward", "backward"):
                self.on_stage(name, self.graphs[name])
