"""Block: collectives that compute waits for, as a step without overlap has them.

`schedule` hides what it can. What is named here is then not hidden: a parameter is gathered right before its first use,
and what else is started is waited for right away. It says what overlap is worth, and what a system takes that has only
some of it: AMSP's levels L0 to L3 (arXiv 2311.00257, Table V), AxoNN's steps of section IV (arXiv 2305.13525).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from shardweave.ir import Collective, Traffic
from shardweave.passes.base import Pass, Property
from shardweave.passes.partition import StateSharding
from shardweave.passes.scheduling_priorities import WAIT
from shardweave.sharding import info


def traffic_of(what: Collective, rest: StateSharding) -> Traffic:
    """Which of the kinds of traffic a collective is, of a parameter that rests so.

    >>> from shardweave.ir import Axis
    >>> gpu, node = Axis("gpu0", 8, 1), Axis("node0", 4, 8)
    >>> rest = StateSharding(parameter=(gpu,), states=(node,))
    >>> [traffic_of(Collective(kind, axes, 8, "up.weight", "", cause), rest)
    ...  for kind, axes, cause in (("all_gather", (gpu,), "parameter"), ("all_gather", (node,), "parameter"),
    ...                            ("reduce_scatter", (gpu,), "gradient"), ("all_reduce", (node,), "gradient"))]
    ['gather', 'broadcast', 'scatter', 'reduce']
    """
    if what.cause == "activation":
        return "activation"
    axes = set(what.axes)
    if what.cause == "parameter":
        return "gather" if axes <= {*rest.parameter} else "broadcast"
    return "scatter" if axes & {*rest.parameter, *rest.gradient} else "reduce"


@dataclass(frozen=True)
class DisableOverlap(Pass):
    """Wait for each collective of some kinds of traffic before anything else is computed.

    Requires a graph in its order; ensures the same values.

    Parameters
    ----------
    blocking : collection of Traffic
    rests : mapping of str to StateSharding
        Where each parameter rests, by its name.
    """

    name = "disable_overlap"
    requires: ClassVar[frozenset[Property]] = frozenset({"ordered"})
    blocking: Collection[Traffic]
    rests: Mapping[str, StateSharding]

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        for wait in graph.find_nodes(op="call_function", target=WAIT):
            start = wait.all_input_nodes[0]
            what = info(start).collective
            if what is None:
                continue
            owner = what.owner.partition(" ")[0]  # of a bucket its first one: all of them rest alike
            if traffic_of(what, self.rests.get(owner, StateSharding())) not in self.blocking:
                continue
            if what.cause == "parameter":
                wait.prepend(start)
            else:
                start.append(wait)
        graph.lint()
        graph_module.recompile()
        return graph_module
