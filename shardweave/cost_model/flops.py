"""Which part of a step's FLOPs is sharded: what one device would do, against what all devices do together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from shardweave.cost_model.compute import node_work
from shardweave.cost_model.graphs import info

Place = tuple[str, bool]
"""The name of an op (its module's), and whether it is its backward."""


def flops_by_op(graphs: fx.Graph | Iterable[fx.Graph]) -> Counter[Place]:
    """The FLOPs of `graphs` by the op that they belong to: those of products, convolutions and attention (`node_work`).

    Parameters
    ----------
    graphs : Graph or iterable of Graph
        A joint graph, or a forward and a backward one. Its nodes carry their values in ``meta["val"]``: global ones
        (an annotated graph), or one device's (a sharded one).
    """
    found: Counter[Place] = Counter()
    for graph in [graphs] if isinstance(graphs, fx.Graph) else graphs:
        for node in graph.nodes:
            if (work := node_work(node)) is not None and work.flops:
                found[info(node).op, info(node).backward] += work.flops
    return found


def sharded_share(whole: Counter[Place], local: Counter[Place], devices: int) -> float:
    """FLOPs of the step on one device, over those that all devices do together: 1 where nothing is done twice.

    It is not capped. Above 1, the sharded step does less than the whole one: it must have dropped or split an op in a
    way that the counting does not see, and the numbers of one of them are wrong.

    Examples
    --------
    >>> sharded_share(Counter({("up", False): 100}), Counter({("up", False): 50}), devices=4)
    0.5
    """
    together = devices * local.total()
    return whole.total() / together if together else 1.0


def replicated(whole: Counter[Place], local: Counter[Place], devices: int) -> list[tuple[Place, float]]:
    """The ops of which devices do the same, largest first, each with its part of what all devices do together.

    Examples
    --------
    >>> whole = Counter({("up", False): 100, ("down", False): 100})
    >>> replicated(whole, Counter({("up", False): 25, ("down", False): 50}), devices=4)
    [(('down', False), 0.3333333333333333)]
    """
    together = devices * local.total()
    excess = {place: (devices * count - whole[place]) / together for place, count in local.items()}
    return sorted(((place, part) for place, part in excess.items() if part > 0), key=lambda item: -item[1])
