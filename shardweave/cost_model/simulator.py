"""The simulator: it runs a generated step on a compute stream and a stream for each group of ranks.

The nodes of the forward, then of the backward graph run in their order on the compute stream. A collective goes to the
stream of its group once its input is ready, behind what that stream still has to do, and shares the links with
those of other groups (`streams.py`). A wait blocks the compute stream until the collective is done, and that time is
*exposed* communication, of the cause and the op whose value is waited for; so is time in which the host is still
launching a collective (`Device.collective_host_seconds`). An optimizer step, which is memory bound,
follows. Every rank does the same, so that one rank is enough.

What this says of every step, and tests hold it to:

- the step takes its compute and its exposed communication, nothing else; compute takes what its kernels take alone, up
  to `Device.overlap_slowdown` times as long where communication runs;
- so it is never shorter than its compute alone, nor than what any level's links have to move, nor than the collectives
  of any one group one after another; and never longer than its slowed compute and all collectives one after another;
- links are never used beyond their capacity, and what they have to move does not depend on how they are shared.

Memory is what storages live (`memory.py`), with what kernels take besides (`kernel_scratch.py`), from states at rest
back to states at rest: gradients go when the optimizer has used them (``zero_grad()`` behind ``step()``), outputs at
the end.
The gathers for the next step are those at the beginning of its forward, the same as here: a generated step takes
parameters as they rest, so that none are gathered ahead of it.
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
_TRANSIENT = ("working", "gathered")


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
    """Play one training step of one rank: of a step of several micro-batches, all of them.

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
        The forms of a step of several micro-batches, which are played instead of the two graphs.
    reduce_gradients : bool
        The last backward reduces the accumulated gradients to the states. With False, which needs `micro_batch_graphs`,
        they stay accumulated, as under ``no_sync``: a step whose data parallelism takes no time.

    Returns
    -------
    Timeline
        When what ran, what was exposed, and the memory at every moment.

    Raises
    ------
    VerifyError
        Where the graphs do not keep to the calling convention.
    """
    step = _Step(cluster, spec, optimizer_bytes_per_parameter_byte if backward is not None else 0.0)
    count = spec.micro_batches if micro_batch_graphs is not None else 1
    step.rest(*(module.graph for module in (forward, backward) if module is not None))
    if micro_batch_graphs is not None and micro_batch_graphs.whole_batch_sums is not None:
        for _ in range(count):
            step.prepare(micro_batch_graphs.whole_batch_sums.graph)
    for index in range(count):
        first, last, kept = index == 0, index == count - 1, 0
        pair = forward, backward
        if micro_batch_graphs is not None:
            kept = len(micro_batch_graphs.gathered_parameters) if first and not last else 0
            several = micro_batch_graphs.forward(first, not last)
            pair = several, backward and micro_batch_graphs.backward(not first, last and reduce_gradients)
        saved = step.forward(pair[0].graph, kept)
        if pair[1] is not None:
            step.backward(pair[1].graph, saved, last)
    if backward is not None:
        step.optimize()
    return replace(step.timeline(), micro_batches=count, reduces_gradients=reduce_gradients)


class MicroBatchGraphs(Protocol):
    """The forms of a step of several micro-batches (see `passes.codegen.MicroBatchGraphs`)."""

    whole_batch_sums: fx.GraphModule | None

    @property
    def gathered_parameters(self) -> Sequence[str]: ...

    def forward(self, gathers: bool, returns_gathered: bool) -> fx.GraphModule: ...

    def backward(self, takes_sums: bool, finishes: bool) -> fx.GraphModule: ...


class _Step:
    """The state of a simulation: the time of each stream, and the storages in memory."""

    def __init__(self, cluster: Machine, spec: StepSpec, optimizer_ratio: float) -> None:
        self.cluster, self.spec, self.optimizer_ratio = cluster, spec, optimizer_ratio
        self.costs = NodeCosts(cluster)
        self.streams = Streams(Contention.of(cluster.device), cluster.device.collective_host_seconds)
        self.events: list[Event | tuple[Event, Transfer]] = []  # the second of what may not be over yet
        self.stream_ops: list[StreamOp] = []
        self.part = 0
        self.changes: list[Change] = []
        self.kinds: dict[Storage, str] = {}
        self.trained: list[int] = []  # bytes of each parameter that is
        self.outputs: tuple[Storage, ...] = ()
        self.states: list[tuple[Storage, ...]] = []  # of parameters, buffers and inputs
        self.gathered: list[tuple[Storage, ...]] = []  # of parameters gathered for several micro-batches
        self.gradients: list[tuple[Storage, ...]] = []
        self._found: dict[Hashable, Liveness] = {}

    def rest(self, *graphs: fx.Graph) -> None:
        """Count the constants of the graphs, which stay in memory."""
        seen = set()
        for graph in graphs:
            for node in graph.nodes:
                if node.op == "get_attr":
                    self.kinds[node, 0] = "buffers"
                    if node.target not in seen:
                        self._change("buffers", sum(self.costs.of(node).sizes), str(node.target))
                    seen.add(node.target)

    def _taken(self, graph: fx.Graph) -> Liveness:
        """The storages of a forward's graph: its states are the same in all of them."""
        spec = self.spec
        holders = _placeholders(graph, spec, spec.draws)
        states: list[ParameterSpec | ValueSpec] = [*spec.parameters, *spec.buffers, *spec.inputs]
        more = self.spec.micro_batches > 1  # then totals and gathered parameters may follow
        if len(holders) < len(states) or (len(holders) > len(states) and not more):
            raise VerifyError(
                f"the forward graph takes {len(holders)} tensors after the coordinates, expected {len(states)}: "
                f"{len(spec.parameters)} parameters, {len(spec.buffers)} buffers, {len(spec.inputs)} inputs"
            )
        given = dict(zip(holders, self.states))
        given |= dict(zip(reversed(holders[len(states) :]), reversed(self.gathered)))
        found = self._liveness(graph, given)
        if self.states:
            return found
        names = ["parameters"] * len(spec.parameters) + ["buffers"] * len(spec.buffers) + ["inputs"] * len(spec.inputs)
        for holder, kind, state in zip(holders, names, states, strict=False):
            self.states.append(found.where[holder])
            for storage in found.where[holder]:
                self.kinds[storage] = kind
                if isinstance(state, ParameterSpec) and state.trainable:
                    self.trained.append(storage_bytes(storage))
                    size = int(self.optimizer_ratio * self.trained[-1])
                    self._change("optimizer", allocated_bytes(size, self.cluster.device), state.name)
                if isinstance(state, ValueSpec):  # a micro-batch's piece is a view of what the call is given
                    size = math.prod(state.layout.local_shape) * storage[0].meta["val"].element_size()
                    self._change("inputs", allocated_bytes(size, self.cluster.device) - self._size(storage), state.name)
        return found

    def _liveness(self, graph: fx.Graph, given: Mapping[fx.Node, tuple[Storage, ...]]) -> Liveness:
        """The storages of a graph, found once for all micro-batches that use the same ones."""
        key = graph, tuple(given.items())
        if key not in self._found:
            self._found[key] = liveness(graph, given)
        return self._found[key]

    def prepare(self, graph: fx.Graph) -> None:
        """Simulate the graph that runs on all micro-batches before the first one."""
        self._play(graph, self._taken(graph), "forward", _TRANSIENT, keep=set())

    def forward(self, graph: fx.Graph, kept: int = 0) -> Sequence[tuple[Storage, ...]]:
        """Play a forward; the storages of each saved value. Its last `kept` results stay for other micro-batches."""
        found = self._taken(graph)
        results = _results(graph)
        split = len(results) - kept
        first = len(self.spec.mutated_buffers)
        last = first + len(self.spec.outputs)
        if kept:
            self.gathered = [output_storages(result, found) for result in results[split:]]
            self._name(found, results[split:], "copies")
        self._name(found, results[first:last], "outputs")
        holders = _placeholders(graph, self.spec, self.spec.draws)[: len(self.spec.parameters)]
        of_parameters = [result for result in node_nodes(results[last:split]) if copied_from(result) in holders]
        self._name(found, of_parameters, "copies")
        self._name(found, results[last:split], "saved")
        mutated = output_storages(results[:first], found)
        self._play(graph, found, "forward", _TRANSIENT, keep={*mutated, *self._shared})
        self._free(mutated, _TRANSIENT)
        self.outputs = (*self.outputs, *output_storages(results[first:last], found))
        return [output_storages(result, found) for result in results[last:split]]

    @property
    def _shared(self) -> set[Storage]:
        """The values that several micro-batches use."""
        return {storage for storages in self.gathered for storage in storages}

    def backward(self, graph: fx.Graph, saved: Sequence[tuple[Storage, ...]], closes: bool) -> None:
        """Play a backward: it takes the gradients so far behind its tangents, and gives new ones."""
        holders = _placeholders(graph, self.spec)
        if len(holders) < len(saved) + len(self.gradients):
            raise VerifyError(
                f"the backward graph takes {len(holders)} values after the coordinates, "
                f"expected the {len(saved)} that the forward saves and a tangent for each differentiable output"
            )
        given = dict(zip(holders, saved))
        given |= dict(zip(reversed(holders), reversed(self.gradients)))
        found = self._liveness(graph, given)
        self._name(found, _results(graph), "gradients")
        # tangents are the caller's until the backward returns
        tangents = set(output_storages(holders[len(saved) : len(holders) - len(self.gradients)], found))
        results = [output_storages(result, found) for result in _results(graph) if isinstance(result, fx.Node)]
        gradients = {storage for storages in results for storage in storages}
        before = {storage for storages in self.gradients for storage in storages}
        freed = (*_TRANSIENT, "copies", "saved", *(("gradients",) if before else ()))
        self._play(graph, found, "backward", freed, keep=tangents | gradients | self._shared)
        self._free(tangents - gradients, _TRANSIENT)
        if closes:
            self._free(self._shared, ("copies",))
        self.gradients = results

    def optimize(self) -> None:
        """Read and write parameters and states, read gradients; then the gradients are freed."""
        optimizer_ratio = self.optimizer_ratio
        alone = self.cluster.world_size == 1
        scratch = optimizer_scratch_bytes(self.trained, optimizer_ratio, alone, self.cluster.device)
        self._change("scratch", scratch, "optimizer")
        self._run("optimizer", "optimizer", optimizer_seconds(self.trained, optimizer_ratio, self.cluster))
        self._change("scratch", -scratch, "optimizer")
        gradients = {storage for storages in self.gradients for storage in storages}
        self._free(gradients, ("gradients", "copies", "saved", *_TRANSIENT))

    def timeline(self) -> Timeline:
        """The timeline of the simulated step, after the last collective has ended."""
        while self.streams.running:
            self._wait(self.streams.running[0], "optimizer")
        self._free(self.outputs, ("outputs", *_TRANSIENT))
        end = self.streams.now
        levels = tuple(level.name for level in self.cluster.levels)
        return Timeline(
            self.cluster.name,
            tuple(event if isinstance(event, Event) else _over(*event) for event in self.events),
            (COMPUTE, *levels),
            end,
            MemoryCurve.of(self.changes, end),
            {level: self.streams.busy[level] for level in levels},
            tuple((at, tuple(load.get(level, 0.0) for level in levels)) for at, load in self.streams.loads),
            tuple(self.stream_ops),
        )

    def _play(
        self, graph: fx.Graph, found: Liveness, phase: Phase, freeable: tuple[str, ...], keep: set[Storage]
    ) -> None:
        started: dict[fx.Node, Transfer] = {}
        self.part += 1
        for node in graph.nodes:
            if node.op == "output":
                continue
            cost, owner = self.costs.of(node), _owner(node)
            for storage in found.born.get(node, ()):
                self.kinds.setdefault(storage, "gathered" if gathers_parameter(node) else "working")
                self._change(self.kinds[storage], self._size(storage), owner, node.op != "get_attr")
            self._change("scratch", cost.scratch, owner)
            if is_start(node):
                started[node] = self._start(node, phase)
                self._change("scratch", cost.held, owner)
            elif is_wait(node):
                start = node.all_input_nodes[0]
                if start in started:
                    self._wait(started[start], phase)
                    self._change("scratch", -self.costs.of(start).held, _owner(start))
            elif cost.kernel:
                self._run(node.name, phase, cost.seconds, info(node).op, cost.flops)
            self._change("scratch", -cost.scratch, owner)
            if node in found.dead:
                self._free([storage for storage in found.dead[node] if storage not in keep], freeable)

    def _run(self, name: str, phase: Phase, seconds: float, op: str = "", flops: int = 0) -> None:
        begin = self.streams.now
        took = self.streams.compute(seconds)
        self.stream_ops.append(StreamOp(self.part, op, seconds))
        self.events.append(Event(name, COMPUTE, begin, took, phase, "compute", op=op, flops=flops, alone=seconds))

    def _start(self, node: fx.Node, phase: Phase) -> Transfer:
        what = collective(node)
        name = group_name(what.axes)
        transfer = Transfer(name, self.costs.collective(what), what.cause, what.owner, _label(node))
        self.stream_ops.append(StreamOp(self.part, what.owner, transfer=transfer))
        began = self.streams.now
        self._exposed("launch", transfer, phase, began, self.streams.start(transfer))
        if level := crossed_level(what.axes, self.cluster):
            begun = Event(transfer.name, level, 0.0, 0.0, phase, what.kind, what.cause, what.owner, bytes=what.bytes)
            self.events.append((begun, transfer))
        return transfer

    def _wait(self, transfer: Transfer, phase: Phase) -> None:
        self.stream_ops.append(StreamOp(self.part, transfer.owner, transfer=transfer, waits=True))
        began = self.streams.now
        self._exposed("wait", transfer, phase, began, self.streams.wait(transfer))

    def _exposed(self, what: str, transfer: Transfer, phase: Phase, began: float, took: float) -> None:
        """Time in which the device computes nothing, for a collective's sake."""
        if took > 0:
            name = f"{what}: {transfer.name}"
            event = Event(name, COMPUTE, began, took, phase, "wait", transfer.cause, transfer.owner, alone=took)
            self.events.append(event)

    def _name(self, found: Liveness, results: Sequence[object], kind: str) -> None:
        for storage in output_storages(results, found):
            self.kinds.setdefault(storage, kind)

    def _size(self, storage: Storage) -> int:
        node, index = storage
        return self.costs.of(node).sizes[index]

    def _change(self, kind: str, num_bytes: int, owner: str, counts: bool = True) -> None:
        if num_bytes and counts:
            self.changes.append(Change(self.streams.now, kind, num_bytes, owner))

    def _free(self, storages: Iterable[Storage], freeable: tuple[str, ...]) -> None:
        for storage in storages:
            if self.kinds[storage] in freeable:
                self._change(self.kinds[storage], -self._size(storage), _owner(storage[0]))


def _over(event: Event, transfer: Transfer) -> Event:
    """The event of a collective that is done."""
    assert transfer.end is not None
    seconds = transfer.end - transfer.begin
    return replace(event, start=transfer.begin, seconds=seconds, alone=transfer.demand.seconds, group=transfer.group)


def _owner(node: fx.Node) -> str:
    """The name of a value in reports."""
    op = info(node).op
    return f"{op} ({node.name})" if op else node.name


def _placeholders(graph: fx.Graph, spec: StepSpec, draws: bool = False) -> list[fx.Node]:
    """The placeholders behind the coordinates, and behind the seed of a graph that draws."""
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


def _label(start: fx.Node) -> str:
    what = collective(start)
    return f"{what.kind} {what.owner}".strip()
