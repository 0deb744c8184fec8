"""The base class of passes, the pass manager, and the laws that a local graph must keep after every pass.

A pass takes a graph and returns a graph. It states in `requires` and `ensures` which properties of a graph it needs and
establishes:

============  ==========================================================================================
``joint``     one global graph has forward and backward, and each op has its sharding rule
``local``     each node has its value on one device and its layout; each collective is waited for
``unrolled``  the ops are copied for each sub-batch and slice: no coordinate of such an axis is left
``ordered``   the nodes are in the order in which they run
============  ==========================================================================================

`annotate` ensures ``joint``. A local graph is not ``joint`` any more: `Shard` invalidates it.

`verify` checks the laws. Each is a function that yields violations. No law knows what the passes do: it compares what
nodes compute with what is noted on them. Each is one walk over the nodes, which is cheap enough to check a graph after
every pass.
"""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from shardweave.cost_model import (
    NO_SHARING,
    Cluster,
    MicroBatchSharing,
    NodeCosts,
    Storage,
    liveness,
    node_key,
    peak_live_bytes,
)
from shardweave.ir import Axis, Collective, VerifyError, group_name, readable_bytes
from shardweave.sharding import copied, fake_result, info, is_start, is_wait, node_nodes, tensor_bytes, tensors

c10d = torch.ops._c10d_functional

Property = Literal["joint", "local", "unrolled", "ordered"]


@dataclass(frozen=True)
class Pass(ABC):
    """A transformation of a graph. Its fields are its options.

    Examples
    --------
    >>> class Nothing(Pass):
    ...     name = "nothing"
    ...     def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
    ...         return graph_module
    >>> Nothing().requires
    frozenset()
    """

    name: ClassVar[str]
    """The name of the pass in stages, progress and errors."""
    requires: ClassVar[frozenset[Property]] = frozenset()
    ensures: ClassVar[frozenset[Property]] = frozenset()
    invalidates: ClassVar[frozenset[Property]] = frozenset()

    @abstractmethod
    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Return the transformed graph. The pass may change `graph_module`."""

    def check(self, graph_module: fx.GraphModule) -> None:  # noqa: B027  (optional: most passes check nothing more)
        """Raise `VerifyError` if the result breaks a promise that only this pass makes."""


@dataclass
class PassManager:
    """Runs passes in order, verifies the graph after each, and keeps a copy of it.

    Parameters
    ----------
    verifies : bool
        Whether graphs are verified and kept. The graphs of a draft, which are simulated and not run, are not.
    on_pass : callable, optional
        Told the name and the graph after each pass.
    properties : frozenset of Property
        The properties of the graph so far.
    names : list of str
        The passes that have run.
    history : dict from str to GraphModule
        The graph after each pass, by the pass's name. The last one is the graph itself, all others are copies.
    """

    verifies: bool = True
    on_pass: Callable[[str, fx.GraphModule], None] | None = None
    properties: frozenset[Property] = frozenset()
    names: list[str] = field(default_factory=list)
    history: dict[str, fx.GraphModule] = field(default_factory=dict)

    def run(self, graph_module: fx.GraphModule, passes: Iterable[Pass]) -> fx.GraphModule:
        """Run `passes`, each on the result of the one before, and return the last graph.

        The passes may change `graph_module`.

        Raises
        ------
        VerifyError
            If a graph lacks a property that a pass requires, or a result breaks a law of local graphs. The error names
            the pass.
        """
        for each in passes:
            self._check_required(each)
            if self.names and self.verifies:
                self.history[self.names[-1]] = copied(graph_module)  # `each` may change the graph
            graph_module = each(graph_module)
            if self.verifies:
                each.check(graph_module)
            self._finish(each, graph_module)
        return graph_module

    def resume(self, done: Pass | type[Pass], graph_module: fx.GraphModule) -> None:
        """Take `graph_module` as the result of the pass `done`, which has run before.

        Raises
        ------
        VerifyError
            As `run`.
        """
        self._check_required(done)
        self._finish(done, graph_module)

    def fork(self) -> PassManager:
        """A copy of the manager, to run other passes from here."""
        return replace(self, names=[*self.names], history=dict(self.history))

    def _check_required(self, each: Pass | type[Pass]) -> None:
        if missing := each.requires - self.properties:
            raise VerifyError(
                f"the pass {each.name} requires a graph that is {', '.join(sorted(missing))}, got one that is "
                f"{', '.join(sorted(self.properties)) or 'nothing of these'}: run the passes that ensure it first"
            )

    def _finish(self, each: Pass | type[Pass], graph_module: fx.GraphModule) -> None:
        """Note, verify, keep and report the result of a pass."""
        self.names.append(each.name)
        self.properties = (self.properties - each.invalidates) | each.ensures
        if self.verifies:
            verify(graph_module, each.name)
            self.history[each.name] = graph_module
        if self.on_pass is not None:
            self.on_pass(each.name, graph_module)


def verify(graph_module: fx.GraphModule, after: str) -> None:
    """Check a local graph.

    - Every value is computed before it is read, and the forward needs nothing of the backward. All ranks run this one
      graph, so they issue the collectives of each group in the same order.
    - Every collective is waited for exactly once, and only its wait reads the result of its start.
    - The note of a collective describes what it does.
    - Every value has the local shape of its layout. A value that differs between ranks along an axis does so until a
      collective over that axis: no partial sum is used as if it were reduced.
    - Every value has the shape and the dtype that its op computes from its inputs.
    - No op writes into a value that a running collective may still read, and no op reads the old content of a value
      after a write.

    Raises
    ------
    VerifyError
        If a law is broken. The error names the pass, the node and the law.
    """
    for law in (_order, _pairs, _notes, _layouts, _values, _writes):
        for broken in law(graph_module.graph):
            raise VerifyError(f"after {after}: {broken}")


def verify_memory(
    graph_module: fx.GraphModule,
    after: str,
    cluster: Cluster,
    limit: int | None,
    other_bytes: int = 0,
    repeated: MicroBatchSharing = NO_SHARING,
) -> None:
    """Check that the peak memory of a local graph, in its order, is within a limit.

    Parameters
    ----------
    cluster : Cluster
        The machine, whose allocator rounds sizes.
    limit : int, optional
        Bytes that a device may use; None for no limit.
    other_bytes : int
        Bytes that the graph does not see: the optimizer's states, inputs and results of other micro-batches.
    repeated : MicroBatchSharing
        The storages that the last of several runs of the graph finds, where it runs once for each micro-batch.

    Raises
    ------
    VerifyError
        If the peak exceeds the limit. The error names the pass, the node at the peak, and the bytes.
    """
    most, node = peak_live_bytes(graph_module.graph, NodeCosts(cluster), repeated)
    if limit is not None and most + other_bytes > limit:
        where = f" at {node.name} of {info(node).op}" if node is not None else ""
        raise VerifyError(
            f"after {after}: {readable_bytes(most + other_bytes)} ({most + other_bytes:,} bytes) are held{where}, "
            f"the limit is {readable_bytes(limit)} ({limit:,} bytes)"
        )


def _order(graph: fx.Graph) -> Iterator[str]:
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            if argument not in seen:
                yield f"{node.name} reads {argument.name} before it is computed"
        seen.add(node)
        if node.op == "call_function" and not info(node).backward:
            late = [argument.name for argument in node.all_input_nodes if info(argument).backward]
            if late:
                yield f"{node.name} of the forward needs {late} of the backward"


def _pairs(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if is_wait(node) and not all(map(is_start, node.all_input_nodes)):
            yield f"{node.name} waits for {node.all_input_nodes[0].name}, which starts no collective"
        if not is_start(node):
            continue
        collective = info(node).collective
        if collective is None:
            yield f"{node.name} starts a collective that nothing is noted of"
        elif len(node.users) != 1 or not all(map(is_wait, node.users)):
            yield (
                f"the {collective.kind} {node.name} of {collective.owner} must be waited for once and read by nothing "
                f"else, it has the users {[user.name for user in node.users]}"
            )


_KINDS = {
    c10d.all_reduce.default: "all_reduce",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_to_all_single.default: "all_to_all",
}


def _notes(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        collective = info(node).collective
        if collective is None:
            continue
        whole = node if collective.kind == "all_gather" else node.all_input_nodes[0]
        does = _KINDS.get(node.target), node.args[-1], tensor_bytes(whole.meta["val"])
        noted = collective.kind, group_name(collective.axes), collective.bytes
        if does != noted:
            yield f"{node.name} of {collective.owner} does {does} (kind, group, bytes), and {noted} is noted"


_CHECKED_NODES: set[Hashable] = set()
"""A cache of nodes, by what their values depend on, whose values were found correct."""
_MAX_CHECKED_NODES = 2**16


def _values(graph: fx.Graph) -> Iterator[str]:
    if len(_CHECKED_NODES) > _MAX_CHECKED_NODES:
        _CHECKED_NODES.clear()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        key = node_key(node)
        if key not in _CHECKED_NODES:  # equal layers, and the graph after the next pass, have equal nodes
            made, has = _shown(_evaluated(node)), _shown(node.meta.get("val"))
            if made != has:
                yield f"{node.name} has the value {has}, its op makes {made} of its inputs"
            else:
                _CHECKED_NODES.add(key)


def _evaluated(node: fx.Node) -> Any:
    given = tensors([node.meta.get("val"), *(leaf.meta["val"] for leaf in node.all_input_nodes)])
    mode = next((each.fake_mode for each in given if hasattr(each, "fake_mode")), contextlib.nullcontext())
    assert callable(node.target)
    with torch.no_grad():
        try:
            return fake_result(node.target, node.args, node.kwargs, mode)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return f"an error, {error}"


def _shown(value: Any) -> Any:
    shown = [(tuple(each.shape), str(each.dtype)) for each in tensors(value)]
    return shown if shown or not isinstance(value, str) else value


def _layouts(graph: fx.Graph) -> Iterator[str]:
    differs: dict[fx.Node, frozenset[Axis]] = {}
    for node in graph.nodes:
        layouts = info(node).layouts
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and layouts and tuple(value.shape) != layouts[0].local_shape:
            yield (
                f"{node.name} has the shape {tuple(value.shape)}, its layout {layouts[0]} says {layouts[0].local_shape}"
            )
        comes = frozenset[Axis]().union(*(differs[source] for source in _read(node)))
        if not layouts:
            collective = info(node).collective
            differs[node] = comes - _made_equal(collective)
            continue
        axes = {axis for layout in layouts for axis in (*layout.shard_axes, *layout.partial_axes)}
        differs[node] = frozenset(axis for axis in axes if axis.kind == "space")
        if lost := comes - differs[node]:
            shown = ", ".join(str(layout) for layout in layouts)
            yield (
                f"what {node.name} reads differs along {sorted(axis.name for axis in lost)}, and no collective comes "
                f"before its layout {shown}"
            )


def _made_equal(collective: Collective | None) -> frozenset[Axis]:
    """The axes along which a value is the same after a collective."""
    made = collective is not None and collective.kind in ("all_reduce", "all_gather")
    return frozenset(collective.axes) if collective is not None and made else frozenset()


_APART = {torch.ops.aten.cat.default, operator.getitem}
"""Ops that put several values together: along which axes their result differs is not tracked."""
_LIKE = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}


def _read(node: fx.Node) -> list[fx.Node]:
    """The inputs whose elements a node reads to compute one value."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    return [] if node.target in _APART or name in _LIKE else node.all_input_nodes


def _writes(graph: fx.Graph) -> Iterator[str]:
    where = liveness(graph).where
    place: dict[fx.Node, int] = {}
    sent: dict[Storage, fx.Node] = {}
    written: dict[Storage, fx.Node] = {}
    for index, node in enumerate(graph.nodes):
        place[node] = index
        for argument in node.all_input_nodes:
            for storage in where[argument]:
                writer = written.get(storage)
                if writer is not None and place[argument] < place[writer]:
                    yield f"{node.name} reads {argument.name}, into which {writer.name} has been written"
        for argument in _written(node):
            for storage in where[argument]:
                if storage in sent:
                    yield f"{node.name} is written into {argument.name}, which {sent[storage].name} may still read"
                written[storage] = node
        for source in node.all_input_nodes:
            if is_start(node):
                sent.update(dict.fromkeys(where[source], node))
            elif is_wait(node):
                sent = {storage: start for storage, start in sent.items() if start is not source}


def _written(node: fx.Node) -> list[fx.Node]:
    """The inputs that a node is written into."""
    if node.op != "call_function":
        return []
    arguments = [node.args[index] for index in _mutable(node.target) if index < len(node.args)]
    return list(node_nodes(arguments))


@cache
def _mutable(target: Callable[..., Any]) -> tuple[int, ...]:
    schema = getattr(target, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    return tuple(i for i, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write)
