"""The judge of a plan: it plays a generated step on a compute stream and one stream for each level of links.

The nodes of the forward, then of the backward graph run in their order on the compute stream. A collective goes to the
stream of the outermost level that it crosses once its input is ready, behind what that stream still has to do; a wait
blocks the compute stream until the collective is done, and that time is *exposed* communication. An optimizer
step, which is memory bound, follows. Every rank does the same, so that one rank is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from torch import fx

from shardweave.cost_model.cluster import Cluster
from shardweave.cost_model.collectives import collective_seconds, crossed_level
from shardweave.cost_model.compute import bytes_seconds, node_work, work_seconds
from shardweave.cost_model.graphs import collective, info, is_start, is_wait
from shardweave.cost_model.memory import Liveness, Storage, liveness, output_storages, storage_bytes
from shardweave.cost_model.timeline import COMPUTE, Event, MemoryCurve, Timeline
from shardweave.errors import VerifyError
from shardweave.ir import SEED, StepSpec

Phase = Literal["forward", "backward", "optimizer"]
_TRANSIENT = ("working", "gathered")


def simulate(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    spec: StepSpec,
    cluster: Cluster,
    *,
    optimizer_bytes_per_parameter_byte: float = 2.0,
) -> Timeline:
    """Play one training step of one rank.

    Parameters
    ----------
    forward, backward : fx.GraphModule
        As `ir.StepSpec` describes them, their nodes with local shapes in ``meta["val"]``; without a backward there is
        no optimizer step either.
    spec : StepSpec
        The calling convention of the two.
    cluster : Cluster
        The machine.
    optimizer_bytes_per_parameter_byte : float
        Bytes of optimizer state for each byte of a trainable parameter at rest: 2 for Adam's two moments, 1 for
        momentum, 0 for plain SGD.

    Returns
    -------
    Timeline
        When what ran, what was exposed, and the memory at every moment.

    Raises
    ------
    VerifyError
        Where the graphs do not keep to the calling convention.
    """
    step = _Step(cluster)
    saved = step.forward(forward.graph, spec, optimizer_bytes_per_parameter_byte if backward is not None else 0.0)
    if backward is not None:
        gradients = step.backward(backward.graph, spec, saved)
        step.optimize(gradients, optimizer_bytes_per_parameter_byte)
    return step.timeline()


class _Step:
    """The state of the machine while a step is played: each stream's time, and what memory holds."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.now = 0.0  # of the compute stream
        self.free_at = {level.name: 0.0 for level in cluster.levels}
        self.events: list[Event] = []
        self.changes: list[tuple[float, str, int]] = []  # seconds, kind, bytes
        self.kinds: dict[Storage, str] = {}
        self.parameter_bytes = 0

    def forward(self, graph: fx.Graph, spec: StepSpec, optimizer_ratio: float) -> Sequence[tuple[Storage, ...]]:
        """Play the forward; the storages of each value that it saves."""
        found = liveness(graph)
        holders = _placeholders(graph, spec, spec.draws)
        states = [*spec.parameters, *spec.buffers, *spec.inputs]
        if len(holders) != len(states):
            raise VerifyError(
                f"the forward graph takes {len(holders)} tensors after the coordinates, expected {len(states)}: "
                f"{len(spec.parameters)} parameters, {len(spec.buffers)} buffers, {len(spec.inputs)} inputs"
            )
        names = ["parameters"] * len(spec.parameters) + ["buffers"] * len(spec.buffers) + ["inputs"] * len(spec.inputs)
        for holder, kind, state in zip(holders, names, states, strict=True):
            for storage in found.where[holder]:
                self.kinds[storage] = kind
                if kind == "parameters" and getattr(state, "trainable", False):
                    self.parameter_bytes += storage_bytes(storage)
        self._change("optimizer", int(optimizer_ratio * self.parameter_bytes))

        results = _results(graph)
        first = len(spec.mutated_buffers)
        last = first + len(spec.outputs)
        self._name(found, results[first:last], "outputs")
        self._name(found, results[last:], "saved")
        mutated = output_storages(results[:first], found)
        self._play(graph, found, "forward", _TRANSIENT, keep=set(mutated))
        self._free(mutated, _TRANSIENT)
        return [output_storages(result, found) for result in results[last:]]

    def backward(self, graph: fx.Graph, spec: StepSpec, saved: Sequence[tuple[Storage, ...]]) -> set[Storage]:
        """Play the backward; the storages of the gradients."""
        holders = _placeholders(graph, spec)
        if len(holders) < len(saved):
            raise VerifyError(
                f"the backward graph takes {len(holders)} values after the coordinates, "
                f"expected the {len(saved)} that the forward saves and a tangent for each differentiable output"
            )
        found = liveness(graph, dict(zip(holders, saved)))
        self._name(found, _results(graph), "gradients")
        tangents = set(output_storages(holders[len(saved) :], found))  # the caller's until the backward returns
        gradients = set(output_storages(_results(graph), found))
        self._play(graph, found, "backward", (*_TRANSIENT, "saved"), keep=tangents | gradients)
        self._free(tangents - gradients, _TRANSIENT)
        return gradients

    def optimize(self, gradients: set[Storage], optimizer_ratio: float) -> None:
        """Read and write parameters and states, read gradients; then the gradients are freed.

        PyTorch's `foreach` optimizers keep intermediates of about the parameters' size meanwhile.
        """
        size = self.parameter_bytes
        self._change("working", size)
        self._run("optimizer", "optimizer", bytes_seconds((3 + 2 * optimizer_ratio) * size, self.cluster))
        self._change("working", -size)
        self._free(gradients, ("gradients", "saved", *_TRANSIENT))

    def timeline(self) -> Timeline:
        """What has been played, once all links have come to rest too."""
        end = max(self.now, *self.free_at.values())
        self._wait(end, "end of step", "optimizer", "")
        streams = (COMPUTE, *(level.name for level in self.cluster.levels))
        return Timeline(self.cluster.name, tuple(self.events), streams, end, MemoryCurve.of(self.changes, end))

    def _play(
        self, graph: fx.Graph, found: Liveness, phase: Phase, freeable: tuple[str, ...], keep: set[Storage]
    ) -> None:
        done: dict[fx.Node, float] = {}
        for node in graph.nodes:
            for storage in found.born.get(node, ()):
                kind = self.kinds.setdefault(storage, "gathered" if _gathers(node) else "working")
                self._change(kind, storage_bytes(storage))
            if is_start(node):
                done[node] = self._start(node, phase)
            elif is_wait(node):
                start = node.all_input_nodes[0]
                if start in done:
                    self._wait(done[start], _label(start), phase, collective(start).cause)
            elif (work := node_work(node)) is not None:
                self._run(node.name, phase, work_seconds(work, self.cluster), info(node).op, work.flops)
            self._free([storage for storage in found.dead.get(node, ()) if storage not in keep], freeable)

    def _run(self, name: str, phase: Phase, seconds: float, op: str = "", flops: int = 0) -> None:
        self.events.append(Event(name, COMPUTE, self.now, seconds, phase, "compute", op=op, flops=flops))
        self.now += seconds

    def _start(self, node: fx.Node, phase: Phase) -> float:
        what = collective(node)
        seconds = collective_seconds(what.kind, what.bytes, what.axes, self.cluster)
        level = crossed_level(what.axes, self.cluster)
        if not level:
            return self.now
        begin = max(self.now, self.free_at[level])
        self.free_at[level] = begin + seconds
        self.events.append(
            Event(_label(node), level, begin, seconds, phase, what.kind, what.cause, what.owner, bytes=what.bytes)
        )
        return begin + seconds

    def _wait(self, until: float, name: str, phase: Phase, cause: str) -> None:
        if until > self.now:
            self.events.append(Event(f"wait: {name}", COMPUTE, self.now, until - self.now, phase, "wait", cause))
            self.now = until

    def _name(self, found: Liveness, results: Sequence[object], kind: str) -> None:
        for storage in output_storages(results, found):
            self.kinds.setdefault(storage, kind)

    def _change(self, kind: str, num_bytes: int) -> None:
        if num_bytes:
            self.changes.append((self.now, kind, num_bytes))

    def _free(self, storages: Iterable[Storage], freeable: tuple[str, ...]) -> None:
        for storage in storages:
            if self.kinds[storage] in freeable:
                self._change(self.kinds[storage], -storage_bytes(storage))


def _placeholders(graph: fx.Graph, spec: StepSpec, draws: bool = False) -> list[fx.Node]:
    """The placeholders behind the coordinates, and behind the seed of a graph that draws."""
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    coordinates = len(spec.mesh.axes)
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


def _gathers(node: fx.Node) -> bool:
    what = info(node).collective
    return what is not None and what.kind == "all_gather" and what.cause == "parameter"


def _label(start: fx.Node) -> str:
    what = collective(start)
    return f"{what.kind} {what.owner}".strip()
