"""Edges: what it costs to bring values from where they lie to where they are wanted, and their gradients back.

Within what follows one variable a change belongs to that; between two it is their edge, with a table of what each pair
of their ports takes. Equal layers share the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from shardweave.compiler.pipeline import Annotated
from shardweave.compiler.planner.facts import Facts, root_of
from shardweave.compiler.planner.prices import Links, Prices
from shardweave.compiler.planner.problem import Edge
from shardweave.compiler.planner.rows import Rows, Variable
from shardweave.compiler.planner.windows import Costs, Windows
from shardweave.compiler.weaving import with_times
from shardweave.cost_model import Cluster
from shardweave.ir import Axis, Layout, Mesh
from shardweave.options import Options
from shardweave.passes.annotate import covered, info
from shardweave.passes.layouts import drop
from shardweave.passes.rules.registry import tensor_args

Arrivals = list[tuple[Layout, ...]]  # for each port of the variable that a value follows, where its outputs lie


class Edges:
    """The variables of a problem as it is built, where what follows them lies, and what changes of that cost."""

    def __init__(self, annotated: Annotated, cluster: Cluster, options: Options) -> None:
        self.annotated, self.options = annotated, options
        mesh = cluster.mesh()
        timed = with_times(Mesh(tuple(sorted(mesh.axes, key=lambda axis: -axis.stride))), options)
        self.legal_mesh, self.mesh = timed, replace(timed, woven=())
        self.prices = Prices(self.mesh, cluster)
        self.windows = Windows.of(cluster, self.prices.levels, options.weaving)
        self.facts = Facts(annotated, cluster)
        self.variables: list[Variable] = []
        self.follows: dict[fx.Node, int] = {}
        self.lies: dict[fx.Node, Arrivals] = {}
        self.undivided: set[int] = set()
        """The variables that take all sub-batches at once."""
        self.signatures: dict[fx.Node, int] = {}
        """The same number for values that lie alike, port by port."""
        self._edges: dict[tuple[int, int], Links] = {}
        self._changes: dict[object, Links] = {}
        self._sums: dict[object, Links] = {}
        self._known: dict[object, int] = {}

    def edges(self, rows: Rows) -> tuple[Edge, ...]:
        """The edges that cost anything."""
        return tuple(
            rows.edge(*ends, links, not self.undivided.isdisjoint(ends))
            for ends, links in sorted(self._edges.items())
            if links.any()
        )

    def change(
        self, argument: fx.Node, wants: Sequence[Layout], gradients: Sequence[Layout], undivided: bool
    ) -> tuple[int, Costs]:
        """A number for where a value is wanted by port, and what it takes to bring it there, and its gradient back."""
        haves = [port[0] for port in self.lies[argument]]
        links = self.prices.pairs(haves, wants, gradients, argument.meta["val"].element_size())
        return self.number(tuple(wants)), self.windows.activations(links, undivided)

    def edges_into(
        self,
        number: int,
        node: fx.Node,
        wants: Sequence[Sequence[Layout]],
        gradients: Sequence[Sequence[Layout]],
        signature: object,
    ) -> None:
        """Add what a variable's node takes of others: where its inputs are wanted, and their gradients, by its port."""
        for position, argument in enumerate(tensor_args(node)):
            if argument not in self.follows:
                continue
            source = self.follows[argument]
            shared = self.facts.readers[root_of(argument)] if node in self.facts.roles else 1
            key = self.signatures[argument], signature, position, shared
            if key not in self._changes:
                haves, wanted = [port[0] for port in self.lies[argument]], [want[position] for want in wants]
                back, itemsize = [gradient[position] for gradient in gradients], argument.meta["val"].element_size()
                links = self.prices.table(haves, wanted, back, itemsize)
                for idle, ports in self._idle(source).items():
                    # Its backward computes with a part of the gradient, too, and sums what becomes of it
                    parts = [drop(gradient, set(idle)) for gradient in back]
                    links[1][:, ports] = self.prices.gradients(parts, [haves[port] for port in ports], itemsize)
                self._changes[key] = links / shared
            links = self._changes[key]
            if source == number:
                diagonal = np.diagonal(links, axis1=2, axis2=3)
                self.variables[number].costs += self.windows.activations(diagonal, number in self.undivided)
            elif (source, number) in self._edges:
                before = self._edges[source, number]
                pair = id(before), id(links)  # equal layers share their edges' tables
                self._edges[source, number] = self._sums.setdefault(pair, before + links)
            else:
                self._edges[source, number] = links

    def _idle(self, number: int) -> dict[frozenset[Axis], list[int]]:
        """The ports of an op without a batch by the axes over which it does the same everywhere; none of a join."""
        variable, found = self.variables[number], dict[frozenset[Axis], list[int]]()
        if variable.op is None or variable.op.batch > 1:
            return found
        for number, port in enumerate(variable.ports):
            used = {axis for own in port.values() for axis, _ in own.items}
            found.setdefault(frozenset(self.mesh.axes) - used, []).append(number)
        found.pop(frozenset(), None)
        return found

    def number(self, thing: object) -> int:
        """A number for what compares equal: cheap to hash where it is asked for again and again."""
        return self._known.setdefault(thing, len(self._known))

    def is_undivided(self, node: fx.Node) -> bool:
        """Whether a node is in one of the modules that take all sub-batches at once."""
        return covered(self.options.weaving.undivided, info(node).op)
