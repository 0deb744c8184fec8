"""The pipeline: runs the passes on a captured step, checks the graph after each, and keeps every stage.

The border of a step: where inputs, outputs, tangents and parameters lie, and how the step is called.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from shardweave.cost_model import ONCE, Cluster, Options, Repeated, liveness, output_storages, rounded, storage_bytes
from shardweave.ir import (
    SEED,
    Assignment,
    Axis,
    Captured,
    Layout,
    Mesh,
    ParameterSpec,
    PlanError,
    StepSpec,
    Strategy,
    ValueSpec,
    axes_size,
    drop,
    dtype_name,
    normalise,
    outermost_first,
)
from shardweave.passes.bucket import Bucket
from shardweave.passes.codegen import Step, Turns, graph_hash, set_apart, split
from shardweave.passes.disable_overlap import Block
from shardweave.passes.drop_zero_tangents import drop_tangents
from shardweave.passes.keep_unsharded import Keep
from shardweave.passes.overlap_options import check_patterns, sliced_ops, with_times
from shardweave.passes.partition import Rest, Shard, Sharder
from shardweave.passes.quantize import Quantize
from shardweave.passes.recompute import Recompute
from shardweave.passes.schedule import Alike, Schedule
from shardweave.passes.unroll_sub_batches import Split
from shardweave.passes.verify import verify, verify_memory
from shardweave.sharding import (
    Annotate,
    Classes,
    Op,
    Samples,
    batch_classes,
    copied,
    find_classes,
    find_ops,
    graph_outputs,
    info,
    layer_of,
    op_name,
    with_forms,
)


class Boundary:
    """Where what crosses the border of the step lies: inputs, outputs, tangents, parameters."""

    def __init__(self, annotated: Annotated, mesh: Mesh, data: tuple[Axis, ...], options: Options) -> None:
        self.annotated, self.mesh, self.data = annotated, mesh, data
        self.undivided = bool(options.weaving.undivided)
        captured = annotated.captured
        nodes = {node.name: node for node in captured.graph.graph.nodes if node.op == "placeholder"}
        self.values = {name: node.meta["val"] for name, node in nodes.items()}
        self.sources = {name: self._batch(self.values[name]) for name in captured.inputs}
        samples = Samples.of(captured, annotated.classes)
        self.rows = {name: samples.rows(nodes[name]) for name in captured.inputs}
        results = graph_outputs(captured.graph.graph)
        first = len(captured.mutated_buffers)
        self.returned = [node.meta["val"] for node in results[first : first + len(captured.outputs)]]
        mode = "whole" if captured.whole else options.outputs
        if mode == "auto":
            mode = "sharded" if annotated.loss_inside else "part"
        self.returned_rows = [samples.rows(node) for node in results[first : first + len(captured.outputs)]]
        outputs: list[Layout | None] = []
        for value in self.returned:
            if value.dim() == 0 or mode == "whole":
                outputs.append(Layout.replicated(value.shape))
            else:
                outputs.append(None if mode == "sharded" else self._batch(value))
        if captured.whole:
            self.sources |= {name: Layout.replicated(self.values[name].shape) for name in captured.parameters}
        self.tangents = {name: first + captured.tangents[name] for name in annotated.tangents}
        if captured.whole:  # a tangent comes whole, as its output went; each rank takes its part
            self.sources |= {name: self._batch(self.values[name]) for name in self.tangents}
            self.tangents = {}
        mutated = [Layout.replicated(node.meta["val"].shape) for node in results[:first]]
        self.wanted = [*mutated, *outputs, *(None for _ in captured.gradients)]

    def _batch(self, value: torch.Tensor) -> Layout:
        """The first dimension spread over the data axes, and over micro-batches, where it is the batch."""
        shape = value.shape
        layout = Layout.replicated(shape)
        axes = (*self.mesh.all_times, *self.data)
        if not shape or shape[0] != self.annotated.batch:
            return layout
        if shape[0] % axes_size(axes) and self.undivided:  # what is too small to be cut comes in whole
            axes = (*self.mesh.times, *self.data)
        if shape[0] % axes_size(axes):
            if times := self.mesh.all_times:
                cuts = " of ".join(f"{axis.size} {axis.name}-batches" for axis in reversed(times))
                names = " or ".join(f"{axis.name}_batches" for axis in times)
                raise PlanError(
                    f"the batch of {shape[0]} is no multiple of {axes_size(axes)}: {cuts} "
                    f"on {axes_size(self.data)} parts of the batch; use another batch or {names}"
                )
            return layout
        return Layout((normalise([*axes, shape[0] // axes_size(axes)]), *layout.dims[1:]))

    def finish(
        self,
        lies: Mapping[int, Layout],
        rests: Mapping[str, Layout],
        forward: fx.GraphModule,
        code: str,
    ) -> StepSpec:
        """How the step is called, given where its outputs lie, its parameters rest, and the hash of its code."""
        captured = self.annotated.captured
        dtype = {name: dtype_name(value.dtype) for name, value in self.values.items()}
        trainable = set(captured.gradients)
        parameters = tuple(
            ParameterSpec(
                name,
                rests.get(name, Layout.replicated(self.values[node].shape)),
                dtype_name(captured.dtypes[name].master) if name in captured.dtypes else dtype[node],
                name in trainable,
                captured.aliases.get(name, ()),
            )
            for node, name in captured.parameters.items()
        )
        buffers = tuple(
            ParameterSpec(name, Layout.replicated(self.values[node].shape), dtype[node], False)
            for node, name in captured.buffers.items()
        )
        times = self.mesh.times
        pieces = [drop(self.sources[node], self.mesh.woven) for node in captured.inputs]
        inputs = tuple(
            ValueSpec(name, drop(lies, times), dtype[node], rows=self.rows[node])
            for (node, name), lies in zip(captured.inputs.items(), pieces)
        )
        first = len(captured.mutated_buffers)
        outputs = []
        active = {captured.tangents[name] for name in self.annotated.tangents}
        for index, (name, value) in enumerate(zip(captured.outputs, self.returned)):
            layout = lies[first + index]
            pieces.append(layout)
            whole = drop(layout, times).without_partial()
            left_out = index in captured.tangents.values() and index not in active
            rows = self.returned_rows[index]
            outputs.append(ValueSpec(name, whole, dtype_name(value.dtype), index in active, left_out, rows))
        return StepSpec(
            replace(self.mesh, woven=(), slices=()),
            parameters,
            buffers,
            inputs,
            tuple(outputs),
            captured.mutated_buffers,
            self.data,
            code,
            any(node.op == "placeholder" and node.name == SEED for node in forward.graph.nodes),
            tuple(pieces) if times else (),
            axes_size(self.mesh.woven),
        )


Shards = dict[Hashable, tuple[Sharder, Boundary, fx.GraphModule]]
"""Sharded graphs of one step under one plan, by what of the options they depend on."""


@dataclass
class Annotated:
    """A captured step whose ops have rules: what the planner and every lowering start from."""

    captured: Captured
    classes: Classes
    ops: list[Op]
    batch: int
    tangents: tuple[str, ...]
    """The placeholders of the outputs that a backward may start from."""
    loss_inside: bool


@dataclass
class Compiled:
    """A lowered step, with the graph after each pass: ``graphs["shard"]``, ..., ``graphs["backward"]``."""

    step: Step
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)


def annotate(captured: Captured, options: Options) -> Annotated:
    """Give every op its rule, and find the ops that a plan decides on.

    Where the model returns a scalar loss, the backward starts there; its other outputs carry no gradient, unless
    autograd gives one for each.
    """
    values = graph_outputs(captured.graph.graph)
    first = len(captured.mutated_buffers)
    returned = values[first : first + len(captured.outputs)]
    scalars = {index for index, value in enumerate(returned) if value.meta["val"].dim() == 0}
    loss_inside = any(index in scalars for index in captured.tangents.values())
    if loss_inside and not captured.whole:
        unused = [name for name, index in captured.tangents.items() if index not in scalars]
        drop_tangents(captured.graph, unused)
    Annotate(options.allow_unruled, captured.known)(captured.graph)
    classes = find_classes(captured.graph.graph)
    _, batch = batch_classes(captured, classes)
    kept = {node.name for node in captured.graph.graph.nodes if node.op == "placeholder"}
    tangents = tuple(name for name in captured.tangents if name in kept)
    ops = with_forms(find_ops(captured, classes), classes, captured.graph.graph, batch)
    return Annotated(captured, classes, ops, batch, tangents, loss_inside)


def join_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """A name for every forward op that reads several values: its module, its op, and its number there.

    Names of nodes would not do: a plan outlives the graph that it was made on.
    """
    counts: Counter[str] = Counter()
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not info(node).backward and len(node.all_input_nodes) > 1:
            module = op_name(node) if info(node).op != node.name else ""
            kind = f"{module}:{getattr(getattr(node.target, '_schema', None), 'name', node.target)}".replace(
                "aten::", ""
            )
            found[node] = f"{kind}:{counts[kind]}"
            counts[kind] += 1
    return found


def mesh_for(mesh: Mesh, strategies: Mapping[str, Strategy], sizes: Mapping[str, int]) -> Mesh:
    """The mesh in layout order: the axes of tensor parallelism first, each kind from the outermost in.

    At-rest axes then lie inside them on every dimension, which keeps layouts plain DTensor placements. What others
    gather over some of these axes and more comes in another order than its ranks', and is copied: axes come first where
    the ops that are tensor parallel over them, and do not rest whole beside that, have the larger part of both by the
    `sizes` of their parameters.
    """
    asked, gathered = Counter[frozenset[Axis]](), Counter[frozenset[Axis]]()
    for name, size in sizes.items():
        axes = strategies[name].axes(mesh)
        gathered[frozenset(axes.states)] += size
        if axes.states:
            asked[frozenset((*axes.x, *axes.y))] += size
    first: set[Axis] = set()
    for tensor, size in asked.most_common():
        copied = sum(other for axes, other in gathered.items() if _ordered(axes, tensor) != outermost_first(axes))
        if size >= copied:
            first |= tensor
    return Mesh(tuple(_ordered(mesh.axes, first)))


def times_of(alike: Alike) -> dict[str, int]:
    """For how many layers one counts, itself among them, by its name.

    >>> times_of([(["blocks.0", "blocks.1"], 10)])
    {'blocks.1': 11}
    """
    return {few[-1]: 1 + count for few, count in alike}


def _sum_so_far(accumulator: fx.Node) -> str:
    """The name of the placeholder that brings the sum of a gradient so far to the node that adds to it."""
    return accumulator.all_input_nodes[0].name


def _ordered(axes: Iterable[Axis], first: Container[Axis]) -> list[Axis]:
    return sorted(outermost_first(axes), key=lambda axis: axis not in first)


def data_axes(ops: list[Op], strategies: Mapping[str, Strategy], mesh: Mesh) -> tuple[Axis, ...]:
    """The axes that every op puts on the batch: the ones that a user's batch is spread over."""
    common = set(mesh.axes)
    for op in ops:
        if op.batch > 1:
            axes = strategies[op.name].axes(mesh)
            common &= {*axes.z, *axes.data}
    return tuple(outermost_first(common)) if any(op.batch > 1 for op in ops) else ()


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
        sharder, specs, local = self._local(accumulates=False)
        forward, backward = split(local, self._num_results, self.annotated.tangents)
        self._stage("forward", forward, last=True)
        self._stage("backward", backward, last=True)
        spec = specs.finish(sharder.lies, sharder.rests, forward, self._hash(forward, backward))
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
        self._stage("forward", forward, last=True)
        self._stage("backward", backward, last=True)
        return Compiled(Step(forward, backward, spec, lambda: turns), self.graphs)

    def _turns(self) -> tuple[Turns, StepSpec]:
        sharder, specs, local = self._local(accumulates=True)
        holders = [total.placeholder.name for total in sharder.totals]
        totals = set_apart(local, holders, "Totals") if holders else None
        forward, backward = split(local, self._num_results, self.annotated.tangents)
        inside = {node.name for node in forward.graph.nodes}
        working = [node.name for node in sharder.working if node.name in inside]
        added = {_sum_so_far(node): node.name for node in sharder.accumulators.values()}
        spec = specs.finish(sharder.lies, sharder.rests, forward, self._hash(forward, backward))
        return Turns(forward, backward, working, added, totals), spec

    @property
    def _num_results(self) -> int:
        captured = self.annotated.captured
        return len(captured.mutated_buffers) + len(captured.outputs)

    def _sharded(self, accumulates: bool) -> tuple[Sharder, Boundary, fx.GraphModule]:
        """The local graph, and the run of `shard` that wrote it."""
        captured = self.annotated.captured
        assignments = {}
        rests: dict[str, Rest] = {}
        slices = sliced_ops(self.options.weaving.operator_slices, self.annotated.ops, self.strategies, self.mesh)
        for op in self.annotated.ops:
            strategy = self.strategies[op.name]
            strategy = replace(strategy, slices=slices.get(op.name, strategy.slices))
            assignments.update(op.assignments(strategy, op.mesh_of(self.mesh, self.options.weaving.undivided)))
            axes = strategy.axes(self.mesh)
            rest = Rest(*axes.stages)
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
                name: rests.get(name, Rest())._replace(dtypes=captured.dtypes.get(name))
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
        """The local graph, scheduled, and the run of `shard` that wrote it."""
        self.graphs["capture"] = self.annotated.captured.graph
        weaving = self.options.weaving
        key = self.mesh, accumulates, tuple(weaving.operator_slices.items()), weaving.whole_sums, weaving.undivided
        if key not in self.shards:
            self.shards[key] = self._sharded(accumulates)
        sharder, specs, local = self.shards[key]
        self._verified(local, "shard")
        self._stage("shard", local)
        local = copied(local)
        working = {node.name for node in sharder.working}
        local = Recompute(weaving.recompute, working, weaving.gather_again)(local)
        self._verified(local, "recompute")
        self._stage("recompute", local)
        if self.mesh.unrolled:
            local = Split(self.mesh.unrolled)(local)
            self._verified(local, "split")
            self._stage("split", local)
        if weaving.keep_gathered:
            local = Keep(weaving.keep_gathered, self.mesh.slices)(local)
            self._verified(local, "keep")
            self._stage("keep", local)
        local = self._scheduled(local, self._schedule(sharder, local.graph), self._bucket(sharder))
        self._verified(local, "schedule")
        if weaving.blocking:
            self._stage("schedule", local)
            local = Block(weaving.blocking, sharder.options.rests)(local)
            self._verified(local, "block")
        self._stage("block" if weaving.blocking else "schedule", local, last=True)
        return sharder, specs, local

    def _scheduled(self, local: fx.GraphModule, schedule: Schedule, bucket: Bucket) -> fx.GraphModule:
        """`local` in order; in buckets, where these are wanted and fit, each being held as one, or asked to be flat."""
        fits, wanted = False, self.options.weaving.buckets
        if wanted:
            bucketed = bucket(copied(local))
            self._verified(bucketed, "bucket")
            self._stage("bucket", bucketed)
            ordered, fits = schedule.scheduled(self._quantized(bucketed))
        if not fits and wanted != "flat":
            self.graphs.pop("bucket", None)
            ordered, fits = schedule.scheduled(self._quantized(local))
        if fits and not self.draft:
            limit, beside = schedule.memory_limit, schedule.beside_bytes
            verify_memory(ordered, "schedule", self.cluster, limit, beside, schedule.repeated)
        return ordered

    def _quantized(self, local: fx.GraphModule) -> fx.GraphModule:
        """`local` with its parameters and gradients moved in few bits, where that is wanted."""
        if bits := self.options.weaving.quantize:
            local = Quantize(bits)(local)
            self._verified(local, "quantize")
            self._stage("quantize", local)
        return local

    def _bucket(self, sharder: Sharder) -> Bucket:
        """What puts collectives together, between where the graphs may be cut: at each tangent, and between turns."""
        shared = sharder.working, sharder.accumulators.values()
        turns = [[node.name for node in nodes] for nodes in shared] if sharder.options.accumulates else []
        borders = [[tangent] for tangent in self.annotated.tangents] + turns
        return Bucket(self.cluster, borders, sharder.options.rests if self.options.buckets == "flat" else None)

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
        shared = frozenset(node.name for node in sharder.working)
        return Repeated(shared, frozenset(_sum_so_far(node) for node in sharder.accumulators.values()))

    def _state_bytes(self, sharder: Sharder) -> int:
        """Of the optimizer's states."""
        states, times = 0, times_of(self.alike)
        for name in self.annotated.captured.gradients:
            if name in sharder.rests:
                size = math.prod(sharder.rests[name].local_shape) * self.options.optimizer_bytes
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

    def _verified(self, module: fx.GraphModule, after: str) -> None:
        """Check a graph that is to be run."""
        if not self.draft:
            verify(module, after)

    def _stage(self, name: str, module: fx.GraphModule, last: bool = False) -> None:
        """Keep the graph after a pass; one that later passes write to as it is now."""
        if last or not self.draft:
            self.graphs[name] = module if last else copied(module)
        if self.on_stage is not None:
            self.on_stage(name, module)
