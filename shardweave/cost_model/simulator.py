"""The simulator: it runs a generated step on a compute stream and a stream for each group of ranks.

The nodes of the forward, then of the backward graph run in their order on the compute stream. A collective goes to the
stream of its group once its input is ready, after the earlier collectives of that stream, and shares the links with
those of other groups (`streams.py`). A wait blocks the compute stream until the collective has ended. That time is
*exposed* communication, of the cause and the op of the collective; so is the time in which the host still launches a
collective (`Device.collective_host_seconds`). An optimizer step, which is memory bound, follows. All ranks do the
same, so one rank is simulated.

Tests hold the simulator to these laws:

- The step time is the sum of compute and exposed communication. Compute takes the seconds of its kernels alone, and up
  to `Device.overlap_slowdown` times as long while a collective runs.
- The step is never shorter than its compute alone, than the traffic of any level's links, or than the collectives of
  one group one after another. It is never longer than its slowed compute and all collectives one after another.
- Links are never used beyond their capacity, and their traffic does not depend on how they are shared.

Memory is that of the storages (`memory.py`) and the scratch of kernels (`kernel_scratch.py`). Gradients are freed after
the optimizer has used them (``zero_grad()`` after ``step()``), outputs at the end of the step. The step begins with
sharded parameters, so gathers for the next step are part of the next forward.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from torch import fx

from shardweave.cost_model.collectives import crossed_level
from shardweave.cost_model.kernel_scratch import allocated_bytes, optimizer_scratch_bytes
from shardweave.cost_model.machine import Machine
from shardweave.cost_model.memory import (
    Change,
    Liveness,
    MemoryCurve,
    Storage,
    liveness,
    output_storages,
    storage_bytes,
)
from shardweave.cost_model.node_cost import NodeCosts, optimizer_seconds
from shardweave.cost_model.streams import Contention, Streams, Transfer
from shardweave.cost_model.timeline import COMPUTE, Event, StreamOp, Timeline
from shardweave.ir import SEED, ParameterSpec, StepSpec, ValueSpec, VerifyError, group_name
from shardweave.sharding import collective, copied_from, gathers_parameter, info, is_start, is_wait, node_nodes

Phase = Literal["forward", "backward", "optimizer"]
_TRANSIENT_KINDS = ("working", "gathered")
"""The kinds of memory (`memory.MEMORY_KINDS`) that are freed after their last use in any graph."""


def simulate(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    spec: StepSpec,
    cluster: Machine,
    *,
    optimizer_bytes_per_parameter_byte: float = 2.0,
    micro_batch_graphs: MicroBatchGraphs | None = None,
    reduce_gradients: bool = True,
) -> Timeline:
    """Simulate one training step of one rank, with all its micro-batches.

    Parameters
    ----------
    forward, backward : fx.GraphModule
        As `ir.StepSpec` describes them, their nodes with local shapes in ``meta["val"]``; without a backward there is
        no optimizer step either.
    spec : StepSpec
        The calling convention of the two.
    cluster : Machine
        The machine.
    optimizer_bytes_per_parameter_byte : float
        Bytes of optimizer state for each byte of a trainable parameter at rest: 2 for Adam's two moments, 1 for
        momentum, 0 for plain SGD.
    micro_batch_graphs : MicroBatchGraphs, optional
        The graphs of a step of several micro-batches, which run instead of `forward` and `backward`.
    reduce_gradients : bool
        The last backward reduces the accumulated gradients. With False, which needs `micro_batch_graphs`, they stay
        accumulated, as under ``no_sync``.

    Returns
    -------
    Timeline
        The events, the exposed communication, and the memory at every moment.

    Raises
    ------
    VerifyError
        If the graphs do not follow the calling convention of `spec`.
    """
    step = _SimulatedStep(cluster, spec, optimizer_bytes_per_parameter_byte if backward is not None else 0.0)
    count = spec.micro_batches if micro_batch_graphs is not None else 1
    # 1. Count the constants, and compute the sums over the whole batch.
    step.count_constants(*(module.graph for module in (forward, backward) if module is not None))
    if micro_batch_graphs is not None and micro_batch_graphs.whole_batch_sums is not None:
        for _ in range(count):
            step.run_whole_batch_sums(micro_batch_graphs.whole_batch_sums.graph)
    # 2. Run the forward and the backward of each micro-batch.
    for index in range(count):
        is_first, is_last, num_kept = index == 0, index == count - 1, 0
        if micro_batch_graphs is not None:
            num_kept = len(micro_batch_graphs.gathered_parameters) if is_first and not is_last else 0
            forward = micro_batch_graphs.forward(is_first, not is_last)
            backward = backward and micro_batch_graphs.backward(not is_first, is_last and reduce_gradients)
        saved = step.run_forward(forward.graph, num_kept)
        if backward is not None:
            step.run_backward(backward.graph, saved, is_last)
    # 3. Run the optimizer.
    if backward is not None:
        step.run_optimizer()
    return replace(step.timeline(), micro_batches=count, reduces_gradients=reduce_gradients)


class MicroBatchGraphs(Protocol):
    """The graphs of a step of several micro-batches (see `passes.codegen.MicroBatchGraphs`)."""

    whole_batch_sums: fx.GraphModule | None

    @property
    def gathered_parameters(self) -> Sequence[str]: ...

    def forward(self, gathers: bool, returns_gathered: bool) -> fx.GraphModule: ...

    def backward(self, takes_sums: bool, finishes: bool) -> fx.GraphModule: ...


class _SimulatedStep:
    """The state of a simulation: the time of each stream, and the storages in memory."""

    def __init__(self, cluster: Machine, spec: StepSpec, optimizer_ratio: float) -> None:
        self.cluster, self.spec, self.optimizer_ratio = cluster, spec, optimizer_ratio
        self.costs = NodeCosts(cluster)
        self.streams = Streams(Contention.of(cluster.device), cluster.device.collective_host_seconds)
        self.events: list[Event | tuple[Event, Transfer]] = []  # with the transfer if it may not have ended
        self.stream_ops: list[StreamOp] = []
        self.graphs_run = 0
        self.changes: list[Change] = []
        self.kinds: dict[Storage, str] = {}
        self.trainable_bytes: list[int] = []  # of each trainable parameter
        self.outputs: tuple[Storage, ...] = ()
        self.inputs: list[tuple[Storage, ...]] = []  # of each parameter, buffer and input
        self.gathered: list[tuple[Storage, ...]] = []  # of each parameter gathered for all micro-batches
        self.gradients: list[tuple[Storage, ...]] = []
        self.input_gradients: list[tuple[Storage, ...]] = []
        self._liveness_cache: dict[Hashable, Liveness] = {}

    def count_constants(self, *graphs: fx.Graph) -> None:
        """Count the constants of the graphs, which stay in memory."""
        seen = set()
        for graph in graphs:
            for node in graph.nodes:
                if node.op == "get_attr":
                    self.kinds[node, 0] = "buffers"
                    if node.target not in seen:
                        self._change_memory("buffers", sum(self.costs.of(node).sizes), str(node.target))
                    seen.add(node.target)

    def _forward_liveness(self, graph: fx.Graph) -> Liveness:
        """The storages of a forward graph. All forward graphs share those of parameters, buffers and inputs."""
        spec = self.spec
        holders = _placeholders(graph, spec, spec.draws)
        states: list[ParameterSpec | ValueSpec] = [*spec.parameters, *spec.buffers, *spec.inputs]
        several = spec.micro_batches > 1  # whole-batch sums and gathered parameters may follow
        if len(holders) < len(states) or (len(holders) > len(states) and not several):
            raise VerifyError(
                f"the forward graph takes {len(holders)} tensors after the coordinates, expected {len(states)}: "
                f"{len(spec.parameters)} parameters, {len(spec.buffers)} buffers, {len(spec.inputs)} inputs"
            )
        # 1. Find the storages. Gathered parameters come last.
        given = dict(zip(holders, self.inputs))
        given |= dict(zip(reversed(holders[len(states) :]), reversed(self.gathered)))
        found = self._liveness(graph, given)
        if self.inputs:
            return found
        # 2. At the first call, count the optimizer's states, and the part of the inputs that this micro-batch lacks.
        names = ["parameters"] * len(spec.parameters) + ["buffers"] * len(spec.buffers) + ["inputs"] * len(spec.inputs)
        for holder, kind, state in zip(holders, names, states, strict=False):
            self.inputs.append(found.where[holder])
            for storage in found.where[holder]:
                self.kinds[storage] = kind
                if isinstance(state, ParameterSpec) and state.trainable:
                    self.trainable_bytes.append(storage_bytes(storage))
                    size = int(self.optimizer_ratio * self.trainable_bytes[-1])
                    self._change_memory("optimizer", allocated_bytes(size, self.cluster.device), state.name)
                if isinstance(state, ValueSpec):  # the input of a micro-batch is a view of the whole input
                    size = math.prod(state.layout.local_shape) * storage[0].meta["val"].element_size()
                    more = allocated_bytes(size, self.cluster.device) - self._size(storage)
                    self._change_memory("inputs", more, state.name)
        return found

    def _liveness(self, graph: fx.Graph, given: Mapping[fx.Node, tuple[Storage, ...]]) -> Liveness:
        """The storages of a graph, computed once for all micro-batches with the same `given`."""
        key = graph, tuple(given.items())
        if key not in self._liveness_cache:
            self._liveness_cache[key] = liveness(graph, given)
        return self._liveness_cache[key]

    def run_whole_batch_sums(self, graph: fx.Graph) -> None:
        """Simulate the graph that sums over the whole batch, on one micro-batch."""
        self._run_graph(graph, self._forward_liveness(graph), "forward", _TRANSIENT_KINDS, keep=set())

    def run_forward(self, graph: fx.Graph, num_kept: int = 0) -> Sequence[tuple[Storage, ...]]:
        """Simulate a forward, and return the storages of each saved value.

        Its last `num_kept` results are parameters that stay gathered for the other micro-batches.
        """
        # 1. Divide the results: new values of buffers, outputs, saved values, gathered parameters.
        found = self._forward_liveness(graph)
        results = _results(graph)
        split = len(results) - num_kept
        first = len(self.spec.mutated)
        last = first + len(self.spec.outputs)
        # 2. Set the kind of each storage; the first kind holds.
        if num_kept:
            self.gathered = [output_storages(result, found) for result in results[split:]]
            self._set_kind(found, results[split:], "copies")
        self._set_kind(found, results[first:last], "outputs")
        holders = {*_placeholders(graph, self.spec, self.spec.draws)[: len(self.spec.parameters)]}
        sources = {result: copied_from(result) for result in node_nodes(results[last:split])}
        of_parameters = [result for result, found_in in sources.items() if found_in and found_in <= holders]
        self._set_kind(found, of_parameters, "copies")
        self._set_kind(found, results[last:split], "saved")
        # 3. Run the nodes. The new values of buffers are copied and freed.
        mutated = output_storages(results[:first], found)
        self._run_graph(graph, found, "forward", _TRANSIENT_KINDS, keep={*mutated, *self._shared})
        self._free(mutated, _TRANSIENT_KINDS)
        self.outputs = (*self.outputs, *output_storages(results[first:last], found))
        return [output_storages(result, found) for result in results[last:split]]

    @property
    def _shared(self) -> set[Storage]:
        """The storages that several micro-batches use."""
        return {storage for storages in self.gathered for storage in storages}

    def run_backward(self, graph: fx.Graph, saved: Sequence[tuple[Storage, ...]], is_last: bool) -> None:
        """Simulate a backward. It takes the accumulated gradients after its tangents, and returns new ones."""
        holders = _placeholders(graph, self.spec)
        if len(holders) < len(saved) + len(self.gradients):
            raise VerifyError(
                f"the backward graph takes {len(holders)} values after the coordinates, "
                f"expected the {len(saved)} that the forward saves and a tangent for each differentiable output"
            )
        given = dict(zip(holders, saved))
        given |= dict(zip(reversed(holders), reversed(self.gradients)))
        found = self._liveness(graph, given)
        self._set_kind(found, _results(graph), "gradients")
        # The caller holds the tangents until the backward returns.
        tangents = set(output_storages(holders[len(saved) : len(holders) - len(self.gradients)], found))
        of_inputs = len(self.spec.differentiable_inputs)  # they come first; the caller keeps them
        mine, others = ([output_storages(result, found) for result in some if isinstance(result, fx.Node)]
                        for some in (_results(graph)[:of_inputs], _results(graph)[of_inputs:]))  # fmt: skip
        results = [*mine, *others]
        gradients = {storage for storages in results for storage in storages}
        before = {storage for storages in self.gradients for storage in storages}
        freed = (*_TRANSIENT_KINDS, "copies", "saved", *(("gradients",) if before else ()))
        self._run_graph(graph, found, "backward", freed, keep=tangents | gradients | self._shared)
        self._free(tangents - gradients, _TRANSIENT_KINDS)
        if is_last:
            self._free(self._shared, ("copies",))
        self.input_gradients += mine
        self.gradients = others

    def run_optimizer(self) -> None:
        """Simulate the optimizer's step, and free the gradients."""
        alone = self.cluster.world_size == 1
        sizes, ratio = self.trainable_bytes, self.optimizer_ratio
        scratch = optimizer_scratch_bytes(sizes, ratio, alone, self.cluster.device)
        self._change_memory("scratch", scratch, "optimizer")
        self._run_kernel("optimizer", "optimizer", optimizer_seconds(sizes, ratio, self.cluster))
        self._change_memory("scratch", -scratch, "optimizer")
        gradients = {storage for storages in (*self.gradients, *self.input_gradients) for storage in storages}
        self._free(gradients, ("gradients", "copies", "saved", *_TRANSIENT_KINDS))

    def timeline(self) -> Timeline:
        """The timeline of the simulated step, after the last collective has ended."""
        while self.streams.running:
            self._wait_for(self.streams.running[0], "optimizer")
        self._free(self.outputs, ("outputs", *_TRANSIENT_KINDS))
        end = self.streams.now
        levels = tuple(level.name for level in self.cluster.levels)
        return Timeline(
            self.cluster.name,
            tuple(event if isinstance(event, Event) else _finished(*event) for event in self.events),
            (COMPUTE, *levels),
            end,
            MemoryCurve.of(self.changes, end),
            {level: self.streams.busy[level] for level in levels},
            tuple((at, tuple(load.get(level, 0.0) for level in levels)) for at, load in self.streams.loads),
            tuple(self.stream_ops),
        )

    def _run_graph(
        self, graph: fx.Graph, found: Liveness, phase: Phase, freeable: tuple[str, ...], keep: set[Storage]
    ) -> None:
        """Simulate the nodes of a graph, and free those storages that it uses last, of kinds in `freeable`."""
        started: dict[fx.Node, Transfer] = {}
        self.graphs_run += 1
        for node in graph.nodes:
            if node.op == "output":
                continue
            cost, owner = self.costs.of(node), _display_name(node)
            # 1. Allocate the results of the node and its scratch memory.
            for storage in found.born.get(node, ()):
                self.kinds.setdefault(storage, "gathered" if gathers_parameter(node) else "working")
                if node.op != "get_attr":  # constants are counted once, by `count_constants`
                    self._change_memory(self.kinds[storage], self._size(storage), owner)
            self._change_memory("scratch", cost.scratch, owner)
            # 2. Run it.
            if is_start(node):
                started[node] = self._start_collective(node, phase)
                self._change_memory("scratch", cost.held, owner)
            elif is_wait(node):
                start = node.all_input_nodes[0]
                if start in started:
                    self._wait_for(started[start], phase)
                    self._change_memory("scratch", -self.costs.of(start).held, _display_name(start))
            elif cost.kernel:
                self._run_kernel(node.name, phase, cost.seconds, info(node).op, cost.flops)
            # 3. Free the scratch memory, and the storages that this node uses last.
            self._change_memory("scratch", -cost.scratch, owner)
            if node in found.dead:
                self._free([storage for storage in found.dead[node] if storage not in keep], freeable)

    def _run_kernel(self, name: str, phase: Phase, seconds: float, op: str = "", flops: int = 0) -> None:
        begin = self.streams.now
        took = self.streams.compute(seconds)
        self.stream_ops.append(StreamOp(self.graphs_run, op, seconds))
        self.events.append(Event(name, COMPUTE, begin, took, phase, "compute", op=op, flops=flops, alone=seconds))

    def _start_collective(self, node: fx.Node, phase: Phase) -> Transfer:
        call = collective(node)
        demand, name = self.costs.collective(call), f"{call.kind} {call.owner}".strip()
        transfer = Transfer(group_name(call.axes), demand, call.cause, call.owner, name)
        self.stream_ops.append(StreamOp(self.graphs_run, call.owner, transfer=transfer))
        begin = self.streams.now
        self._record_exposed("launch", transfer, phase, begin, self.streams.start(transfer))
        if level := crossed_level(call.axes, self.cluster):
            event = Event(name, level, 0.0, 0.0, phase, call.kind, call.cause, call.owner, bytes=call.bytes)
            self.events.append((event, transfer))
        return transfer

    def _wait_for(self, transfer: Transfer, phase: Phase) -> None:
        self.stream_ops.append(StreamOp(self.graphs_run, transfer.owner, transfer=transfer, waits=True))
        begin = self.streams.now
        self._record_exposed("wait", transfer, phase, begin, self.streams.wait(transfer))

    def _record_exposed(self, action: str, transfer: Transfer, phase: Phase, begin: float, took: float) -> None:
        """Record `took` seconds in which the device waits for a collective."""
        if took > 0:
            name = f"{action}: {transfer.name}"
            event = Event(name, COMPUTE, begin, took, phase, "wait", transfer.cause, transfer.owner, alone=took)
            self.events.append(event)

    def _set_kind(self, found: Liveness, results: Sequence[object], kind: str) -> None:
        for storage in output_storages(results, found):
            self.kinds.setdefault(storage, kind)

    def _size(self, storage: Storage) -> int:
        node, index = storage
        return self.costs.of(node).sizes[index]

    def _change_memory(self, kind: str, num_bytes: int, owner: str) -> None:
        if num_bytes:
            self.changes.append(Change(self.streams.now, kind, num_bytes, owner))

    def _free(self, storages: Iterable[Storage], freeable: tuple[str, ...]) -> None:
        for storage in storages:
            if self.kinds[storage] in freeable:
                self._change_memory(self.kinds[storage], -self._size(storage), _display_name(storage[0]))


def _finished(event: Event, transfer: Transfer) -> Event:
    """The event of a collective that has ended."""
    assert transfer.end is not None
    seconds = transfer.end - transfer.begin
    return replace(event, start=transfer.begin, seconds=seconds, alone=transfer.demand.seconds, group=transfer.group)


def _display_name(node: fx.Node) -> str:
    """The name of a node's value in reports."""
    op = info(node).op
    return f"{op} ({node.name})" if op else node.name


def _placeholders(graph: fx.Graph, spec: StepSpec, draws: bool = False) -> list[fx.Node]:
    """The placeholders after the coordinates, and after the seed if the graph `draws` random numbers."""
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    coordinates = len(spec.mesh.axes) + len(spec.mesh.micro_batch_axes)
    for holder in holders[:coordinates]:
        if not holder.name.startswith("coord_"):
            raise VerifyError(
                f"placeholder {holder.name}: expected one of {coordinates} coordinates, called coord_<axis>; "
                "a generated graph takes them first"
            )
    if draws and (len(holders) == coordinates or holders[coordinates].name != SEED):
        raise VerifyError(
            f"the placeholder after the coordinates: expected {SEED}, as the step draws random numbers, "
            f"got {[holder.name for holder in holders[coordinates : coordinates + 1]]}"
        )
    return holders[coordinates + draws :]


def _results(graph: fx.Graph) -> Sequence[object]:
    results = graph.output_node().args[0]
    return results if isinstance(results, list | tuple) else (results,)
