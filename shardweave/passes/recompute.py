"""What the backward computes or gathers again: the passes `Recompute` and `KeepUnsharded`.

`Recompute` recomputes activations in the backward instead of saving them (activation checkpointing). A layer
that is recomputed saves only the values that it reads from other layers. In mode ``"full"`` its collectives run again
in the backward. In mode ``"fine"`` their results are saved as well, so that recomputation repeats no communication
(Oases, section 3.2). The recomputed nodes and the gradients are in one backward graph: the scheduler may recompute one
layer while the gradients of another are being reduced.

A recomputed node shares the all-gathers of the backward, unless `regather_in_recompute` asks for its own. It never
shares those of an op in slices: all slices would be gathered at once, which is what slices are to avoid.

`KeepUnsharded` keeps parameters gathered from the forward to the backward (no reshard after forward). By default a
gathered parameter is freed after its use in the forward, and the backward gathers it again. A parameter that is kept is
gathered once: this saves an all-gather and costs the memory of the gathered parameter (the cache of AxoNN, section
IV-D). Of a sliced op some slices may be kept and others not (OSDP, section 3.3).

`recompute_fusible` lets a finished backward recompute values by pointwise ops: for steps that Inductor compiles, which
fuses such ops with those that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from shardweave.ir import META, Axis, RecomputeMode
from shardweave.ops import coordinate, is_coordinate
from shardweave.passes.base import Pass, Property
from shardweave.passes.codegen import as_module
from shardweave.passes.spmd_builder import finished, remove_dead, sort_by_place
from shardweave.sharding import copied, graph_outputs, info, is_start, is_wait, last_match, layer_of


def region_of(node: fx.Node) -> str:
    """The unit that a node is recomputed with: its activation checkpoint, or else its layer."""
    known = info(node)
    return known.checkpoint or layer_of(known.op)


@dataclass(frozen=True)
class Recompute(Pass):
    """Recompute activations in the backward.

    Requires a local graph whose nodes know their modules. Ensures the same values.

    Parameters
    ----------
    modes : mapping of str to {"none", "full", "fine"}
        The mode of each module. Keys are shell patterns, matched against the names of modules; the last match holds.
        Without a match, the user's activation checkpoints decide: ``"full"`` inside one, else ``"none"``.
    gathered_once : collection of str
        Names of nodes that are saved in any mode: the copies of parameters that are gathered once a step.
    regather_in_recompute : bool
        Recomputed nodes gather parameters for themselves. ZeRO-3 then gathers a third time, as OSDP (arXiv 2209.13258,
        section 2) and AxoNN (arXiv 2305.13525, section IV-D) say of activation checkpoints.
    slice_axes : tuple of Axis
        The axes of slices, which are unrolled later.
    """

    name = "recompute"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    modes: Mapping[str, RecomputeMode] = field(default_factory=dict)
    gathered_once: Collection[str] = ()
    regather_in_recompute: bool = False
    slice_axes: tuple[Axis, ...] = ()

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        recomputation = _Recomputation(graph_module.graph, self.mode, self.gathered_once)
        if not self.regather_in_recompute:
            recomputation.share_gathers(self.slice_axes)
        recomputation.write()
        return finished(graph_module)

    def mode(self, node: fx.Node) -> RecomputeMode:
        """The mode of a node of the forward."""
        known = info(node)
        default: RecomputeMode = "full" if known.checkpoint else "none"
        return last_match(self.modes, known.op, default) if region_of(node) else default


class _Recomputation:
    """One run of `Recompute` on a graph."""

    def __init__(
        self, graph: fx.Graph, mode: Callable[[fx.Node], RecomputeMode], gathered_once: Collection[str]
    ) -> None:
        self.graph, self.mode = graph, mode
        nodes = list(graph.nodes)
        self.modes: dict[fx.Node, RecomputeMode] = {
            node: mode(node) for node in nodes if node.op == "call_function" and not info(node).backward
        }
        outputs = {value for value in graph_outputs(graph) if isinstance(value, fx.Node)}
        self.kept = {node for node in self.modes if node.name in gathered_once or self._is_kept(node, outputs)}
        self.again: dict[fx.Node, fx.Node] = {}
        self.known: dict[Hashable, fx.Node] = {}
        """The backward's own all-gathers, by `computation_key`."""
        self.place = {node: index for index, node in enumerate(nodes)}

    def _is_kept(self, node: fx.Node, outputs: set[fx.Node]) -> bool:
        """Whether the forward saves a value for the backward."""
        if self.modes[node] == "none" or node in outputs:
            return True
        if is_start(node):
            return False
        if is_wait(node) and self.modes[node] == "fine":
            collective = info(node.all_input_nodes[0]).collective
            return collective is not None and collective.cause == "activation"
        mine = region_of(node)
        return any(user in self.modes and region_of(user) != mine for user in node.users)

    def share_gathers(self, slice_axes: Collection[Axis]) -> None:
        """Let recomputed copies read the backward's own all-gathers of parameters that are gathered whole."""
        coordinates = {coordinate(axis.name) for axis in slice_axes}
        gathers: set[fx.Node] = set()
        for node in self._late_nodes():
            sources = node.all_input_nodes
            is_sliced = any(source.name in coordinates for source in sources)
            if not is_sliced and all(source.op != "call_function" or source in gathers for source in sources):
                self.known.setdefault(computation_key(node, node.args, node.kwargs), node)
                gathers.add(node)

    def _late_nodes(self) -> list[fx.Node]:
        """The nodes of the backward."""
        return [node for node in self.graph.nodes if info(node).backward and node.op == "call_function"]

    def write(self) -> None:
        """Let the backward read recomputed copies of values that are not saved."""
        if all(mode == "none" for mode in self.modes.values()):
            return
        for node in self._late_nodes():
            for source in list(node.all_input_nodes):
                if source in self.modes and source not in self.kept:
                    node.replace_input_with(source, self._copy(source, self.place[node]))
        sort_by_place(self.graph, self.place)

    def _copy(self, node: fx.Node, place: int) -> fx.Node:
        """The backward's copy of `node`, for a reader at `place`; `node` itself if it is saved."""
        if node not in self.modes or node in self.kept:
            return node
        if node not in self.again:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda leaf: self._copy(leaf, place))
            found = self.known.get(computation_key(node, args, kwargs))
            if found is None:
                name = f"{node.name}_again"
                found = self.graph.create_node("call_function", node.target, args, kwargs, name)
                found.meta = {**node.meta, "partitioner_tag": "is_backward"}
                found.meta[META] = replace(info(node), backward=True, recomputed=True)
                self.place[found] = place
            self.again[node] = found
        return self.again[node]


def computation_key(node: fx.Node, args: Any, kwargs: Any) -> Hashable:
    """A key that is equal for nodes that compute the same: the key of `node`, if it had these arguments."""
    return node.target, repr(args), repr(kwargs)


@dataclass(frozen=True)
class KeepUnsharded(Pass):
    """Let the backward read parameters that the forward gathered.

    Requires a local graph in which sub-batches and slices are unrolled. Ensures the same values.

    Parameters
    ----------
    slices : mapping of str to int
        How many slices of a parameter are kept, counted from the first; a parameter without slices counts as one. Keys
        are shell patterns, matched against the names of parameters and their modules. The last match holds.
    axes : tuple of Axis
        The axes of slices.
    """

    name = "keep_unsharded"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    slices: Mapping[str, int] = field(default_factory=dict)
    axes: tuple[Axis, ...] = ()

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        early = {computation_key(node, node.args, node.kwargs): node for node in graph.nodes if not info(node).backward}
        twins: dict[fx.Node, fx.Node] = {}
        """The node of the forward that computes the same, for each backward node that depends on parameters alone."""
        kept: set[fx.Node] = set()
        for node in [node for node in graph.nodes if info(node).backward and node.op == "call_function"]:
            if any(info(source).backward and source not in twins for source in node.all_input_nodes):
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda leaf: twins.get(leaf, leaf))
            twin = early.get(computation_key(node, args, kwargs))
            if twin is None:
                continue
            twins[node] = twin
            if self._is_kept(node) or (node.all_input_nodes and kept.issuperset(node.all_input_nodes)):
                kept.add(node)
        for node, twin in twins.items():
            if node in kept and not info(node).collective:
                node.replace_all_uses_with(twin)
        return finished(graph_module)

    def _is_kept(self, node: fx.Node) -> bool:
        """Whether a node starts the all-gather of a parameter, or of one of its slices, that is kept."""
        collective = info(node).collective
        if collective is None or collective.cause != "parameter":
            return False
        names = {axis.name for axis in self.axes}
        mine = next((step for axis, step in info(node).steps if axis in names), 0)
        return mine < last_match(self.slices, collective.owner, 0)


def recompute_fusible(
    forward: fx.GraphModule, backward: fx.GraphModule, num_results: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Recompute saved values in the backward by pointwise ops, from other saved values.

    A value is no longer saved if pointwise ops of its layer compute it from values that are. If they compute it from
    one smaller value, such as a value in bfloat16 that is cast to float32, that one is saved in its place. A value is
    recomputed where it is first used, or earlier, before the values that it is made from would be freed. So at no point
    of the backward more bytes are held.

    Parameters
    ----------
    forward, backward : GraphModule
        As `codegen.split` makes them. They are not changed.
    num_results : int
        How many outputs of the forward are not saved values.
    """
    pair = _Fusible(copied(forward), copied(backward), num_results)
    pair.choose()
    pair.write()
    return as_module(forward, pair.forward, "Forward"), as_module(backward, pair.backward, "Backward")


class _Fusible:
    """One run of `recompute_fusible`."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, num_results: int) -> None:
        self.forward, self.backward = forward.graph, backward.graph
        outputs = graph_outputs(self.forward)
        self.results, saved = outputs[:num_results], outputs[num_results:]
        self.place = {node: index for index, node in enumerate(self.forward.nodes)}
        self.late = list(self.backward.nodes)
        self.coordinates: dict[str, fx.Node] = {node.name: node for node in self.late if is_coordinate(node)}
        taken = [node for node in self.backward.find_nodes(op="placeholder") if not is_coordinate(node)]
        self.holders: dict[fx.Node, fx.Node] = dict(zip(saved, taken))
        """The placeholder of the backward that takes each saved value."""
        self.rest = next(node for node in self.late if not is_coordinate(node) and node not in taken[: len(saved)])
        places = {node: index for index, node in enumerate(self.late)}
        uses = {value: [places[user] for user in holder.users] for value, holder in self.holders.items()}
        self.first = {value: min(found, default=len(self.late) - 1) for value, found in uses.items()}
        self.last = {value: max(found, default=len(self.late) - 1) for value, found in uses.items()}
        """The places in the backward where a saved value is first and last used."""
        self.kept = set(saved)
        self.dropped: dict[fx.Node, set[fx.Node]] = {}
        """The saved values that each value is recomputed from."""

    def choose(self) -> None:
        """Decide which values are recomputed."""
        candidates = [value for value in self.holders if _is_fusible(value) and value not in self.results]
        for value in candidates:
            self._save_smaller(value)
        pinned = {leaf for value in self.dropped for leaf in self.dropped[value]}
        for value in candidates:
            if value not in self.kept or value in pinned:
                continue
            leaves = self._leaves(value, region_of(value))
            if leaves is not None:
                self.kept.remove(value)
                self.dropped[value] = leaves
                # Else a chain of values over all layers would be recomputed from its start.
                pinned |= {leaf for leaf in leaves if region_of(leaf) != region_of(value) or not region_of(value)}

    def _save_smaller(self, value: fx.Node) -> None:
        """Save the smallest value that `value` alone is computed from in its place, if there is one."""
        found = source = value
        while _is_fusible(source) and len(source.all_input_nodes) == 1:
            (source,) = source.all_input_nodes
            if source in self.kept:
                return  # it may be recomputed without
            if source.op == "call_function" and source.meta["val"].nbytes < found.meta["val"].nbytes:
                found = source
        if found is not value:
            self.kept.remove(value)
            self.kept.add(found)
            self.dropped[value] = {found}
            self.first[found] = self.last[found] = min(self.first[value], self.last.get(found, len(self.late)))

    def _leaves(self, value: fx.Node, region: str) -> set[fx.Node] | None:
        """The saved values that fusible ops of a layer compute `value` from; None if it takes more than these."""
        leaves: set[fx.Node] = set()
        for source in value.all_input_nodes:
            if source in self.kept:
                leaves.add(source)
            elif not is_coordinate(source):
                is_inside = region_of(source) == region and (bool(region) or source not in self.dropped)
                inner = self._leaves(source, region) if _is_fusible(source) and is_inside else None
                if inner is None:
                    return None
                leaves |= inner
        return leaves

    def write(self) -> None:
        """Change the outputs of the forward, and the inputs of the backward."""
        kept = sorted(self.kept, key=self.place.__getitem__)
        self.forward.output_node().args = ((*self.results, *kept),)
        for value in kept:
            if value not in self.holders:
                with self.backward.inserting_before(self.rest):
                    self.holders[value] = self.backward.placeholder(value.name)
                self.holders[value].meta = dict(value.meta)
            else:
                self.rest.prepend(self.holders[value])
        made: dict[fx.Node, fx.Node] = {}
        for place, value in sorted(((self._place_of(each), each) for each in self.dropped), key=lambda pair: pair[0]):
            again = self._copy(value, place, made)
            self.holders[value].replace_all_uses_with(again)
            self.backward.erase_node(self.holders[value])
            made[value] = again
        remove_dead(self.forward)

    def _place_of(self, value: fx.Node) -> int:
        """Where in the backward a value is recomputed."""
        freed = [self.last[leaf] for leaf in self.dropped[value] if leaf.op != "placeholder"]
        return min([self.first[value], *freed])

    def _copy(self, node: fx.Node, place: int, made: dict[fx.Node, fx.Node]) -> fx.Node:
        """The backward's copy of `node`, for a user at `place`."""
        if node in self.kept:
            return self.holders[node]
        if node in made and self.last[node] >= place:
            return made[node]
        if is_coordinate(node):
            return self.coordinates[node.name]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda leaf: self._copy(leaf, place, made))
        with self.backward.inserting_before(self.late[place]):
            again = self.backward.create_node("call_function", node.target, args, kwargs, f"{node.name}_again")
        again.meta = {**node.meta, "partitioner_tag": "is_backward"}
        again.meta[META] = replace(info(node), backward=True, recomputed=True)
        return again


def _is_fusible(node: fx.Node) -> bool:
    """Whether an op computes each element by itself, or takes another view, or is arithmetic on coordinates."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function" and getattr(target, "__name__", "") in ("add", "mul")
    if target.namespace != "aten" or torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return False
    is_view = any(value.alias_info is not None for value in target._schema.returns)
    return is_view or torch.Tag.pointwise in target.tags or target in _FUSIBLE


_FUSIBLE = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default}
