"""Turns: the forms of a step that runs several times before the optimizer does.

A *turn* is one run of the step, on a micro-batch or on a call's whole batch. All turns of a step share the copies of
parameters that are gathered once a step, and add their gradients up where the plan has these; the last one brings the
sums to the states (AMSP, arXiv 2311.00257, section IV-C). Each form is the step's forward or backward graph with its
border moved: what the first turn computes, the others take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from shardweave.compiler.codegen import as_module
from shardweave.passes.annotate import graph_outputs
from shardweave.passes.local import remove_dead
from shardweave.passes.times import is_coordinate


@dataclass
class Turns:
    """The forms of one step's graphs.

    Parameters
    ----------
    whole_forward, whole_backward : GraphModule
        With everything: the forward gathers the parameters, the backward takes the sums of the gradients before, behind
        the tangents, adds its own, and brings them to the states.
    working : sequence of str
        The nodes of the forward that are parameters gathered once a step.
    added : mapping of str to str
        For each placeholder of the backward that takes a sum, the node that adds to it.
    totals : GraphModule, optional
        Takes what the forward takes, but for the totals; gives this turn's part of each.
    """

    whole_forward: fx.GraphModule
    whole_backward: fx.GraphModule
    working: Sequence[str]
    added: Mapping[str, str]
    totals: fx.GraphModule | None = None
    _backwards: dict[tuple[bool, bool], fx.GraphModule] = field(default_factory=dict)

    def forward(self, fresh: bool, keeps: bool) -> fx.GraphModule:
        """The forward of a turn.

        Parameters
        ----------
        fresh : bool
            It gathers the parameters; else it takes them, behind all other inputs.
        keeps : bool
            It returns what it gathered, behind all other outputs.
        """
        if not self.working or (fresh and not keeps):
            return self.whole_forward
        return self._first_forward if fresh else self._next_forward

    @cached_property
    def _first_forward(self) -> fx.GraphModule:
        return _with_outputs(
            self.whole_forward,
            lambda outputs, nodes: (*outputs, *(nodes[name] for name in self.working)),
            "FirstForward",
        )

    @cached_property
    def _next_forward(self) -> fx.GraphModule:
        return _reading(self.whole_forward, self.working, "NextForward")

    def backward(self, adds: bool, closes: bool) -> fx.GraphModule:
        """The backward of a turn.

        Parameters
        ----------
        adds : bool
            It takes the sums of the gradients so far; else it is the first to compute one.
        closes : bool
            It returns the gradients where the states rest; else their sums.
        """
        key = adds, closes
        if key == (True, True):
            return self.whole_backward
        if key not in self._backwards:
            module = self.whole_backward
            if not closes:
                module = _with_outputs(module, self._as_summed, "MiddleBackward")
            if not adds:
                module = _without_sums(module, self.added, "OnlyBackward" if closes else "FirstBackward")
            self._backwards[key] = module
        return self._backwards[key]

    @cached_property
    def finish(self) -> fx.GraphModule:
        """From the sums to the gradients where the states rest: for sums whose last turn did not do it."""
        names = list(self.added.values())
        read = _reading(self.whole_backward, names, "Finish")
        return _only(read, {*names, *_coordinates(read)}, "Finish")

    def _as_summed(self, outputs: Sequence[object], nodes: Mapping[str, fx.Node]) -> tuple[object, ...]:
        """The sum for each gradient: the first node behind which nothing else is added."""
        sums = iter(self.added.values())
        return tuple(nodes[next(sums)] if isinstance(value, fx.Node) else value for value in outputs)


def _coordinates(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if is_coordinate(node)]


def _edited(
    module: fx.GraphModule, edit: Callable[[fx.Graph, Mapping[str, fx.Node]], None], name: str
) -> fx.GraphModule:
    """A copy of `module` after `edit` of its graph and its nodes by name; what nothing uses any more is dropped."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for node in module.graph.nodes:
        nodes[node.name] = graph.node_copy(node, lambda leaf: nodes[leaf.name])
    edit(graph, nodes)
    remove_dead(graph)
    return as_module(module, graph, name)


def _with_outputs(
    module: fx.GraphModule,
    outputs: Callable[[Sequence[object], Mapping[str, fx.Node]], tuple[object, ...]],
    name: str,
) -> fx.GraphModule:
    def edit(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> None:
        graph.output_node().args = (outputs(graph_outputs(graph), nodes),)  # type: ignore[assignment]

    return _edited(module, edit, name)


def _reading(module: fx.GraphModule, names: Iterable[str], name: str) -> fx.GraphModule:
    """`module` with these values taken as inputs, behind the others, instead of computed."""

    def edit(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> None:
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        for each in names:
            with graph.inserting_after(last):
                last = graph.placeholder(f"given_{each}")
            last.meta = dict(nodes[each].meta)
            nodes[each].replace_all_uses_with(last)

    return _edited(module, edit, name)


def _without_sums(module: fx.GraphModule, added: Mapping[str, str], name: str) -> fx.GraphModule:
    def edit(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> None:
        for holder, total in added.items():
            nodes[total].replace_all_uses_with(nodes[total].args[1])  # type: ignore[arg-type]
            graph.erase_node(nodes[total])
            graph.erase_node(nodes[holder])

    return _edited(module, edit, name)


def _only(module: fx.GraphModule, kept: set[str], name: str) -> fx.GraphModule:
    """`module` with only those inputs that are among `kept`, or given in their place."""

    def edit(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> None:
        for node in nodes.values():
            if node.op == "placeholder" and node.name.removeprefix("given_") not in kept:
                assert not node.users, f"{node} is still used"
                graph.erase_node(node)

    return _edited(module, edit, name)
