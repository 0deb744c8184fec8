"""The pass `DisableOverlap` exposes collectives: compute waits for them, as in a step without overlap.

It runs after the scheduler. An all-gather of a parameter moves right before its first use, and any other collective is
waited for right after its start. This ablation measures what overlap is worth, and models systems that overlap only a
part of their communication: AMSP's levels L0 to L3 (arXiv 2311.00257, Table V), and the steps of AxoNN's section IV
(arXiv 2305.13525).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from shardweave.ir import Collective, Traffic
from shardweave.passes.base import Pass, Property
from shardweave.passes.partition import StateSharding
from shardweave.passes.schedule import WAIT
from shardweave.sharding import info


def traffic_of(collective: Collective, sharding: StateSharding) -> Traffic:
    """The kind of traffic that a collective is, given how its parameter is sharded.

    >>> from shardweave.ir import Axis
    >>> gpu, node = Axis("gpu0", 8, 1), Axis("node0", 4, 8)
    >>> sharding = StateSharding(parameter=(gpu,), states=(node,))
    >>> [traffic_of(Collective(kind, axes, 8, "up.weight", "", cause), sharding)
    ...  for kind, axes, cause in (("all_gather", (gpu,), "parameter"), ("all_gather", (node,), "parameter"),
    ...                            ("reduce_scatter", (gpu,), "gradient"), ("all_reduce", (node,), "gradient"))]
    ['gather', 'broadcast', 'scatter', 'reduce']
    """
    if collective.cause == "activation":
        return "activation"
    axes = set(collective.axes)
    if collective.cause == "parameter":
        return "gather" if axes <= {*sharding.parameter} else "broadcast"
    return "scatter" if axes & {*sharding.parameter, *sharding.gradient} else "reduce"


@dataclass(frozen=True)
class DisableOverlap(Pass):
    """Expose each collective of the kinds of traffic in `blocking`.

    Requires an ordered graph. Ensures the same values.

    Parameters
    ----------
    blocking : collection of Traffic
    state_sharding : mapping of str to StateSharding
        The sharding of each parameter, by its name.
    """

    name = "disable_overlap"
    requires: ClassVar[frozenset[Property]] = frozenset({"ordered"})
    blocking: Collection[Traffic]
    state_sharding: Mapping[str, StateSharding]

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        for wait in graph.find_nodes(op="call_function", target=WAIT):
            start = wait.all_input_nodes[0]
            collective = info(start).collective
            if collective is None:
                continue
            owner = collective.owner.partition(" ")[0]  # of a bucket, the first: all are sharded over the same axes
            if traffic_of(collective, self.state_sharding.get(owner, StateSharding())) not in self.blocking:
                continue
            if collective.cause == "parameter":
                wait.prepend(start)
            else:
                start.append(wait)
        graph.lint()
        graph_module.recompile()
        return graph_module
