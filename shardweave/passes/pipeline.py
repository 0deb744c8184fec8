"""The pipeline: the ordered list of passes, and the lowering of an annotated step by them.

`PASSES` is the order. `lower` runs the passes that a plan and its options ask for, and splits the result into the
forward and the backward that run. A step of several micro-batches, and a draft for the simulator, are lowered by the
same passes; the graphs of a draft are not verified.

The options of the whole step are resolved for the model first: the time axes, and the ops and modules that patterns
name.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import fx

from shardweave.cost_model import (
    NO_SHARING,
    Cluster,
    MicroBatchSharing,
    Options,
    allocated_bytes,
    liveness,
    output_storages,
    storage_bytes,
)
from shardweave.ir import (
    Assignment,
    Axis,
    Captured,
    LayoutError,
    Mesh,
    OverlapConfig,
    PlanError,
    StepSpec,
    Strategy,
    slice_axis,
)
from shardweave.passes.base import Pass, PassManager
from shardweave.passes.bucket import Bucket, has_merged
from shardweave.passes.codegen import MicroBatchGraphs, Step, graph_hash, split, split_whole_batch_sums
from shardweave.passes.partition import Shard, ShardedStep, sharded_step
from shardweave.passes.quantize import Quantize
from shardweave.passes.recompute import KeepUnsharded, Recompute
from shardweave.passes.schedule import DisableOverlap, RepeatedLayers, Schedule, fits
from shardweave.passes.sharded_values import StateSharding
from shardweave.passes.step_boundary import Annotated, Boundary, data_axes, join_names, mesh_for
from shardweave.passes.unroll_sub_batches import UnrollSubBatches
from shardweave.sharding import (
    Op,
    copied,
    graph_outputs,
    info,
    layer_of,
    matches,
    modules_around,
    unmatched_pattern_error,
)


def with_times(mesh: Mesh, options: Options, strategies: Iterable[Strategy] = ()) -> Mesh:
    """`mesh` with time axes: over micro-batches, over the sub-batches of each micro-batch, and over slices of ops.

    The strides of the first two put them outside all axes of devices; those of slices put them inside.
    """
    micro, sub, world = options.micro_batch_count, options.overlap.sub_batches, mesh.world_size
    micro_axes = (Axis("micro", micro, world * sub, "time"),) if micro > 1 else ()
    sub_axes = (Axis("sub", sub, world, "time"),) if sub > 1 else ()
    counts = {*options.overlap.operator_slices.values(), *(strategy.slices for strategy in strategies)} - {1}
    return replace(
        mesh, micro_batch_axes=micro_axes, sub_batch_axes=sub_axes, slice_axes=tuple(map(slice_axis, sorted(counts)))
    )


def check_patterns(captured: Captured, overlap: OverlapConfig) -> None:
    """Raise `PlanError` if a pattern of the overlap options matches nothing in the model."""
    modules = {info(node).op for node in captured.graph.graph.nodes}
    parameters = set(captured.parameters.values())
    meant: Sequence[tuple[str, Iterable[str], set[str]]] = (
        ("recompute", overlap.recompute, modules),
        ("keep_gathered", overlap.keep_gathered, parameters),
        ("exclude_from_sub_batches", overlap.exclude_from_sub_batches, modules),
    )
    for option, patterns, owners in meant:
        names = {name for owner in owners for name in modules_around(owner)} if patterns else set()
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, sorted(names), 3, 0.3)
                raise PlanError(f"{option}[{pattern!r}] names nothing of the model; close to it: {', '.join(near)}")


def sliced_ops(
    patterns: Mapping[str, int], ops: Sequence[Op], strategies: Mapping[str, Strategy], mesh: Mesh
) -> dict[str, int]:
    """The number of slices of each op that a pattern matches and that has a loop to slice. The last pattern holds.

    Raises
    ------
    PlanError
        If a pattern matches no op, or its number divides no loop of the ops that it matches.
    """
    found: dict[str, int] = {}
    for pattern, slices in patterns.items():
        meant = [op for op in ops if matches(pattern, op)]
        if not meant:
            raise unmatched_pattern_error("operator_slices", pattern, ops)
        reasons = []
        for op in meant:
            found[op.name] = slices
            try:
                op.slice_atom(strategies[op.name], mesh, slices)
            except LayoutError as error:
                found[op.name] = 1
                reasons.append(str(error))
        if len(reasons) == len(meant):
            raise PlanError(f"operator_slices[{pattern!r}] = {slices} fits nothing that it names: {reasons[0]}")
    return found


PASSES: tuple[type[Pass], ...] = (
    Shard,  # replaces each op by its local form, and inserts collectives where layouts differ
    Recompute,  # recomputes activations in the backward instead of saving them
    UnrollSubBatches,  # copies the ops for each sub-batch, and for each slice of a sliced op
    KeepUnsharded,  # keeps parameters gathered from the forward to the backward
    Bucket,  # merges small collectives
    Quantize,  # moves parameters and gradients in few bits
    Schedule,  # starts collectives early and waits for them late, within the memory limit
    DisableOverlap,  # waits at once for collectives that are not to overlap
)
"""In the order in which they run. `Shard`, `Recompute` and `Schedule` always run; the others where options ask.

This is the only place that states the order: the passes of a step are sorted by it.
"""

Shards = dict[Hashable, tuple[Boundary, fx.GraphModule]]
"""A cache of sharded graphs of one step under one plan. The key has those options that `Shard` depends on."""


@dataclass
class Compiled:
    """A lowered step, with the graph after each pass: ``graphs["shard"]``, ..., ``graphs["backward"]``."""

    step: Step
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)


def layer_multiplicity(repeated_layers: RepeatedLayers) -> dict[str, int]:
    """How many layers each layer that stands for others counts as, itself included, by its name.

    >>> layer_multiplicity([(["blocks.0", "blocks.1"], 10)])
    {'blocks.1': 11}
    """
    return {few[-1]: 1 + count for few, count in repeated_layers}


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
    repeated_layers: RepeatedLayers = (),
    accumulates: bool = False,
) -> Compiled:
    """Lower an annotated step to the local forward and backward graphs that run.

    Parameters
    ----------
    annotated : Annotated
    strategies : mapping of str to Strategy
        The strategy of each op, by its name.
    mesh : Mesh
    options : Options
    on_stage : callable, optional
        Told the name and the graph after each pass.
    joins : mapping of str to Assignment, optional
        The assignments of ops with several inputs, by `join_names`. Ops that are not named follow their inputs.
    cluster : Cluster, optional
        The machine that the scheduler times nodes on; left out, this machine.
    draft : bool
        The graphs are simulated and not run: they are not verified, and only the last ones are kept.
    shards : dict, optional
        A cache. A step that is lowered again with the same dict, and other options for the passes behind `Shard`, is
        not sharded again.
    repeated_layers : sequence of (sequence of str, int)
        Equal layers of the step, and how many more of them were left out. Memory is reserved for these.
    accumulates : bool
        Lower the step to run several times and to add its gradients up, as for micro-batches.

    Raises
    ------
    LayoutError
        If a strategy does not fit its op.
    PlanError
        If options do not fit the step.
    """
    joins, shards = joins or {}, {} if shards is None else shards
    times = layer_multiplicity(repeated_layers)
    sizes = {op.name: math.prod(op.sizes.values()) * times.get(layer_of(op.name), 1) for op in annotated.ops}
    first = annotated.first
    ordered = mesh_for(mesh, strategies, sizes) if first is None else Mesh(first.mesh.axes)
    mesh = with_times(ordered, options, strategies.values())
    if mesh.time_axes and not annotated.batch:
        raise PlanError(
            f"the step has no batch to cut, as none of its inputs has a dimension, but the options ask for "
            f"{' of '.join(f'{axis.size} {axis.name}-batches' for axis in reversed(mesh.time_axes))}: leave them out"
        )
    cluster = cluster or Cluster.local(mesh.world_size)
    check_patterns(annotated.captured, options.overlap)
    lowering = _Lowering(annotated, strategies, mesh, options, joins, on_stage, cluster, draft, shards, repeated_layers)
    return lowering.accumulating_step() if mesh.micro_batch_axes or accumulates else lowering.single_step()


@dataclass
class _Lowering:
    """The lowering of one step under one plan."""

    annotated: Annotated
    strategies: Mapping[str, Strategy]
    mesh: Mesh
    options: Options
    joins: Mapping[str, Assignment]
    on_stage: Callable[[str, fx.GraphModule], None] | None
    cluster: Cluster
    draft: bool
    shards: Shards
    repeated_layers: RepeatedLayers
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)

    def single_step(self) -> Compiled:
        """The graphs of a step that runs once for each update of the optimizer."""
        boundary, local = self._lowered(accumulates=False)
        forward, backward = split(local, self._num_results, self.annotated.tangents)
        self._keep(forward, backward)
        spec = self._spec(boundary, local, forward, backward)
        again = replace(self, graphs={}, on_stage=None)
        return Compiled(Step(forward, backward, spec, lambda: again._micro_batch_graphs()[0]), self.graphs)

    def accumulating_step(self) -> Compiled:
        """The graphs of a step that runs for one micro-batch after another, and adds their gradients up."""
        if self.annotated.captured.whole:
            raise PlanError('micro_batches is for compile_parallel: torch.compile(backend="shardweave") has none')
        if not self.annotated.loss_inside or len(self.annotated.tangents) != 1:
            raise PlanError(
                f"micro_batches={self.options.micro_batch_count} runs the backward of each micro-batch right after its "
                f"forward, so the model must return one scalar loss; {len(self.annotated.tangents)} of its outputs may "
                "be one. "
                "Compute the loss in the model, or call it for each micro-batch under no_sync()"
            )
        graphs, spec = self._micro_batch_graphs()
        forward, backward = graphs.forward(True, False), graphs.backward(True, True)
        self._keep(forward, backward)
        return Compiled(Step(forward, backward, spec, lambda: graphs), self.graphs)

    def _micro_batch_graphs(self) -> tuple[MicroBatchGraphs, StepSpec]:
        """The graphs of the runs of a step, from the first to the last micro-batch."""
        boundary, local = self._lowered(accumulates=True)
        step = sharded_step(local)
        sums = split_whole_batch_sums(local, step.whole_batch_sums, "Totals") if step.whole_batch_sums else None
        forward, backward = split(local, self._num_results, self.annotated.tangents)
        inside = {node.name for node in forward.graph.nodes}
        gathered = [name for name in step.gathered_once if name in inside]
        spec = self._spec(boundary, local, forward, backward)
        of_inputs = len(self.annotated.captured.input_gradients)
        return MicroBatchGraphs(forward, backward, gathered, step.accumulators, sums, of_inputs), spec

    def _spec(
        self, boundary: Boundary, local: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule
    ) -> StepSpec:
        step, code = sharded_step(local), "" if self.draft else graph_hash(forward, backward)
        return boundary.finish(step.output_layouts, step.state_layouts, forward, code)

    @property
    def _num_results(self) -> int:
        """How many of the graph's outputs the forward computes."""
        captured = self.annotated.captured
        return len(captured.mutated) + len(captured.outputs)

    def _shard(self, accumulates: bool) -> tuple[Boundary, Shard]:
        """The pass `Shard` for this plan, and the layouts of everything that enters or leaves the step."""
        captured = self.annotated.captured
        # 1. Strategies become assignments of mesh axes to the loops of ops, and the sharding of parameters and states.
        assignments = {}
        state_sharding: dict[str, StateSharding] = {}
        slices = sliced_ops(self.options.overlap.operator_slices, self.annotated.ops, self.strategies, self.mesh)
        for op in self.annotated.ops:
            strategy = self.strategies[op.name]
            strategy = replace(strategy, slices=slices.get(op.name, strategy.slices))
            mesh = op.mesh_of(self.mesh, self.options.overlap.exclude_from_sub_batches)
            assignments.update(op.assignments(strategy, mesh))
            axes = strategy.axes(self.mesh)
            state_sharding.update(dict.fromkeys((op.parameter, *op.companions), StateSharding(*axes.stages)))
        has_other_loops = captured.at_rest and self.annotated.batch == 1  # than those that a plan's joins name
        for node, name in join_names(captured.graph.graph).items():
            if name in self.joins and not has_other_loops:
                assignments[node.name] = self.annotated.without_idle(node, self.joins[name])
        # 2. The layouts of what enters and leaves the step.
        data, first = data_axes(self.annotated.ops, self.strategies, self.mesh), self.annotated.first
        if first is not None:
            data = tuple(axis for axis in data if axis in first.data_axes)
        boundary = Boundary(self.annotated, self.mesh, data, self.options)
        # 3. The pass.
        shard = Shard(
            self.mesh,
            assignments,
            boundary.sources,
            boundary.wanted,
            captured.parameters,
            boundary.tangents,
            {**captured.buffers, **captured.inputs},
            tuple(captured.inputs),
            (*captured.input_gradients, *captured.gradients),
            {
                name: state_sharding.get(name, StateSharding())._replace(
                    dtypes=captured.dtypes.get(name), at_rest=captured.at_rest.get(name)
                )
                for name in captured.parameters.values()
            },
            accumulates,
            captured.known,
            all_reduce_gradients=self.options.ablation.all_reduce_gradients,
            exclude_from_sub_batches=self.options.overlap.exclude_from_sub_batches,
            mutated=boundary.mutated,
        )
        return boundary, shard

    def _lowered(self, accumulates: bool) -> tuple[Boundary, fx.GraphModule]:
        """The local graph after all passes, and the boundary of the step."""
        self.graphs["capture"] = self.annotated.captured.graph
        manager = PassManager(not self.draft, self.on_stage, frozenset({"joint"}))
        # 1. Shard, or take the sharded graph from the cache.
        boundary, sharded = self._sharded(manager, accumulates)
        # 2. Run the passes up to `Bucket`, and the others with buckets. Buckets take memory: where the step does not
        #    fit with them, run the others without.
        passes = self._passes_after_shard(sharded, accumulates)
        optional = self.options.overlap.buckets and not self.options.ablation.flat_parameter
        at = next((i for i, each in enumerate(passes) if isinstance(each, Bucket) and optional), len(passes))
        local = manager.run(copied(sharded), passes[:at])
        if at < len(passes):
            unbucketed, fallback = copied(local), manager.fork()
            local = manager.run(local, passes[at:])
            if not fits(local) and has_merged(local):
                manager, local = fallback, fallback.run(unbucketed, passes[at + 1 :])
        # 3. Keep the last graph, of drafts too: no pass changes it any more.
        self.graphs |= {**manager.history, manager.names[-1]: local}
        return boundary, local

    def _sharded(self, manager: PassManager, accumulates: bool) -> tuple[Boundary, fx.GraphModule]:
        """The boundary of the step, and its local graph right after `Shard`, from the cache if it is there."""
        overlap = self.options.overlap
        key = (
            self.mesh,
            accumulates,
            tuple(overlap.operator_slices.items()),
            overlap.ablation.all_reduce_gradients,
            overlap.exclude_from_sub_batches,
        )
        if key in self.shards:
            manager.resume(Shard, self.shards[key][1])
        else:
            boundary, shard = self._shard(accumulates)
            self.shards[key] = boundary, manager.run(copied(self.annotated.captured.graph), [shard])
        return self.shards[key]

    def _passes_after_shard(self, sharded: fx.GraphModule, accumulates: bool) -> list[Pass]:
        """The passes after `Shard` that options ask for, sorted by `PASSES`."""
        overlap, step = self.options.overlap, sharded_step(sharded)
        ablation = overlap.ablation
        recompute = Recompute(
            overlap.recompute, {*step.gathered_once}, ablation.regather_in_recompute, self.mesh.slice_axes
        )
        passes: list[Pass] = [recompute, self._schedule(sharded)]
        if self.mesh.unrolled_axes:
            passes.append(UnrollSubBatches(self.mesh.unrolled_axes))
        if overlap.keep_gathered:
            passes.append(KeepUnsharded(overlap.keep_gathered, self.mesh.slice_axes))
        if overlap.buckets or ablation.flat_parameter:
            flat = step.state_sharding if ablation.flat_parameter else None
            # No bucket may reach across a tangent, or across what runs once a step and what runs for each micro-batch.
            cut_points: list[Collection[str]] = [[tangent] for tangent in self.annotated.tangents]
            cut_points += [step.gathered_once, step.accumulators.values()] if accumulates else []
            passes.append(Bucket(self.cluster, cut_points, flat, overlap.buckets == "small" and flat is None))
        if overlap.quantize:
            passes.append(Quantize(overlap.quantize))
        if ablation.blocking:
            passes.append(DisableOverlap(ablation.blocking, step.state_sharding))
        return sorted(passes, key=lambda each: PASSES.index(type(each)))

    def _schedule(self, sharded: fx.GraphModule) -> Schedule:
        """The scheduler, with the memory limit and the bytes that the graph does not see."""
        options, step = self.options, sharded_step(sharded)
        others = options.micro_batch_count - 1
        # All micro-batches share the gathered parameters and the running sums of gradients.
        repeated = (
            MicroBatchSharing(frozenset(step.gathered_once), frozenset(step.accumulators)) if others else NO_SHARING
        )
        return Schedule(
            self.cluster,
            options.max_prefetch,
            options.limit(self.cluster),
            self._state_bytes(step) + others * self._micro_batch_bytes(sharded.graph),
            options.ablation.cross_pass,
            self.repeated_layers,
            repeated,
        )

    def _state_bytes(self, step: ShardedStep) -> int:
        """The bytes of the optimizer's states on a device."""
        states, times = 0, layer_multiplicity(self.repeated_layers)
        for name in self.annotated.captured.gradients:
            if name in step.state_layouts:
                size = math.prod(step.state_layouts[name].local_shape) * self.options.optimizer_bytes
                states += allocated_bytes(size, self.cluster.device) * times.get(layer_of(name), 1)
        return states

    def _micro_batch_bytes(self, local: fx.Graph) -> int:
        """The bytes of the inputs and results of one micro-batch, which are held while the others run."""
        captured, found = self.annotated.captured, liveness(local)
        first = len(captured.mutated)
        returned = graph_outputs(local)[first : first + len(captured.outputs)]
        names = set(captured.inputs.values())
        given = [node for node in local.nodes if node.op == "placeholder" and info(node).op in names]
        storages = dict.fromkeys(output_storages([*given, *returned], found))
        return sum(allocated_bytes(storage_bytes(storage), self.cluster.device) for storage in storages)

    def _keep(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Keep the final graphs, and report them."""
        self.graphs |= {"forward": forward, "backward": backward}
        if self.on_stage is not None:
            for name in ("forward", "backward"):
                self.on_stage(name, self.graphs[name])
