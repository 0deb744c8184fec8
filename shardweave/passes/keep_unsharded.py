"""Keep: parameters gathered in the forward that the backward reads as they are.

By default a gathered parameter is freed after its use in the forward, and the backward gathers it again. Kept, it is
gathered once: less communication for as much memory as it takes gathered (the cache of AxoNN, section IV-D). Of an op
in slices some may be kept and the others not, so that its slices rest differently in a step (OSDP, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from shardweave.ir import Axis
from shardweave.passes.base import Pass, Property
from shardweave.passes.recompute import same
from shardweave.passes.spmd_builder import remove_dead
from shardweave.sharding import info, last_match


@dataclass(frozen=True)
class KeepUnsharded(Pass):
    """Let the backward read what the forward gathered.

    Requires a local graph with every step of its time axes; ensures the same values.

    Parameters
    ----------
    slices : mapping of str to int
        How many slices of a parameter are kept, the first ones; one that is in no slices counts as one. By patterns as
        in a shell, matched against the names of parameters and their modules; of several that match the last one holds.
    axes : tuple of Axis
        The axes of slices.
    """

    name = "keep_unsharded"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    slices: Mapping[str, int] = field(default_factory=dict)
    axes: tuple[Axis, ...] = ()

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        early = {same(node, node.args, node.kwargs): node for node in graph.nodes if not info(node).backward}
        twins: dict[fx.Node, fx.Node] = {}
        """What the forward has already, of what the backward makes of parameters."""
        kept: set[fx.Node] = set()
        for node in [node for node in graph.nodes if info(node).backward and node.op == "call_function"]:
            if any(info(source).backward and source not in twins for source in node.all_input_nodes):
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda leaf: twins.get(leaf, leaf))
            twin = early.get(same(node, args, kwargs))
            if twin is None:
                continue
            twins[node] = twin
            if self._is_kept(node) or (node.all_input_nodes and kept.issuperset(node.all_input_nodes)):
                kept.add(node)
        for node, twin in twins.items():
            if node in kept and not info(node).collective:
                node.replace_all_uses_with(twin)
        remove_dead(graph)
        graph.lint()
        graph_module.recompile()
        return graph_module

    def _is_kept(self, node: fx.Node) -> bool:
        """Whether a node starts the gather of a parameter, or of one of its slices, that is kept."""
        what = info(node).collective
        if what is None or what.cause != "parameter":
            return False
        names = {axis.name for axis in self.axes}
        mine = next((step for axis, step in info(node).steps if axis in names), 0)
        return mine < last_match(self.slices, what.owner, 0)
