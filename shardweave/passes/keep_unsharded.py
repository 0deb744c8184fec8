"""The pass `KeepUnsharded` keeps parameters gathered from the forward to the backward (no reshard after forward).

By default a gathered parameter is freed after its use in the forward, and the backward gathers it again. A parameter
that is kept is gathered once: this saves an all-gather and costs the memory of the gathered parameter (the cache of
AxoNN, section IV-D). Of a sliced op some slices may be kept and others not (OSDP, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from shardweave.ir import Axis
from shardweave.passes.base import Pass, Property
from shardweave.passes.recompute import computation_key
from shardweave.passes.spmd_builder import finished
from shardweave.sharding import info, last_match


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
