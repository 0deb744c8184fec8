"""Recompute: what the backward computes again instead of keeping it from the forward.

Of a layer that is recomputed, only what it reads of others is kept: in mode ``"full"`` its collectives run again in the
backward, in mode ``"fine"`` their results are kept, too, so that recomputation repeats no communication (Oases,
section 3.2). Copies lie in the backward graph, which holds them and the gradients as one dependence graph: the schedule
may compute a layer again while the gradients of another are on their way.

What the backward gathers anyway is not gathered once more for a copy, unless that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import fx

from shardweave.ir import META, Mode
from shardweave.passes.base import Pass, Property
from shardweave.passes.spmd_builder import in_order, remove_dead
from shardweave.sharding import graph_outputs, info, is_start, is_wait, last_match, layer_of


def region_of(node: fx.Node) -> str:
    """What a node is recomputed with: its checkpoint or its layer."""
    known = info(node)
    return known.checkpoint or layer_of(known.op)


@dataclass(frozen=True)
class Recompute(Pass):
    """Compute again in the backward.

    Requires a local graph whose nodes know their modules; ensures the same values.

    Parameters
    ----------
    modes : mapping of str to {"none", "full", "fine"}
        By patterns as in a shell, matched against the names of modules; of several that match the last one holds.
        Where none does, what the user's activation checkpoints say holds (``"full"`` inside of them).
    working : collection of str
        Names of nodes that are kept whatever the mode: the copies of parameters that are gathered once a step.
    gather_again : bool
        Copies gather for themselves: ZeRO-3 then gathers a third time, as OSDP (arXiv 2209.13258, section 2) and AxoNN
        (arXiv 2305.13525, section IV-D) say of activation checkpoints.
    """

    name = "recompute"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    modes: Mapping[str, Mode] = field(default_factory=dict)
    working: Collection[str] = ()
    gather_again: bool = False

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        _Recomputation(graph_module.graph, self.mode, self.working).write(share=not self.gather_again)
        remove_dead(graph_module.graph)
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module

    def mode(self, node: fx.Node) -> Mode:
        """How a node of the forward is recomputed."""
        known = info(node)
        default: Mode = "full" if known.checkpoint else "none"
        return last_match(self.modes, known.op, default) if region_of(node) else default


class _Recomputation:
    def __init__(self, graph: fx.Graph, mode: Callable[[fx.Node], Mode], working: Collection[str]) -> None:
        self.graph, self.mode = graph, mode
        nodes = list(graph.nodes)
        self.modes: dict[fx.Node, Mode] = {
            node: mode(node) for node in nodes if node.op == "call_function" and not info(node).backward
        }
        outputs = {value for value in graph_outputs(graph) if isinstance(value, fx.Node)}
        self.kept = {node for node in self.modes if node.name in working or self._is_kept(node, outputs)}
        self.again: dict[fx.Node, fx.Node] = {}
        self.known: dict[Hashable, fx.Node] = {}
        """The backward's own gathers, by what they do."""
        self.place = {node: index for index, node in enumerate(nodes)}

    def _is_kept(self, node: fx.Node, outputs: set[fx.Node]) -> bool:
        """Whether the backward finds a value where the forward left it."""
        if self.modes[node] == "none" or node in outputs:
            return True
        if is_start(node):
            return False
        if is_wait(node) and self.modes[node] == "fine":
            what = info(node.all_input_nodes[0]).collective
            return what is not None and what.cause == "activation"
        mine = region_of(node)
        return any(user in self.modes and region_of(user) != mine for user in node.users)

    def write(self, *, share: bool) -> None:
        """Let the backward read copies of what is not kept; what both gather they may share."""
        if all(mode == "none" for mode in self.modes.values()):
            return
        late = [node for node in self.graph.nodes if info(node).backward and node.op == "call_function"]
        gathers: set[fx.Node] = set()
        for node in late if share else ():
            if all(source.op != "call_function" or source in gathers for source in node.all_input_nodes):
                self.known.setdefault(same(node, node.args, node.kwargs), node)
                gathers.add(node)
        for node in late:
            for source in list(node.all_input_nodes):
                if source in self.modes and source not in self.kept:
                    node.replace_input_with(source, self._copy(source, self.place[node]))
        in_order(self.graph, self.place)

    def _copy(self, node: fx.Node, place: int) -> fx.Node:
        """`node` in the backward, for what stands at `place` there."""
        if node not in self.modes or node in self.kept:
            return node
        if node not in self.again:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda leaf: self._copy(leaf, place))
            found = self.known.get(same(node, args, kwargs))
            if found is None:
                name = f"{node.name}_again"
                found = self.graph.create_node("call_function", node.target, args, kwargs, name)
                found.meta = {**node.meta, "partitioner_tag": "is_backward"}
                found.meta[META] = replace(info(node), backward=True, recomputed=True)
                self.place[found] = place
            self.again[node] = found
        return self.again[node]


def same(node: fx.Node, args: Any, kwargs: Any) -> Hashable:
    """What two nodes that compute the same have in common; `node`'s, if it had these arguments."""
    return node.target, repr(args), repr(kwargs)
