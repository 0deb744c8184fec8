"""Windows: what of a step goes on at once, and how its seconds load the streams of each window.

A pass (the forward, the backward) is a *window*. Its first stream is its *way*: what comes one after the other however
it is ordered. Each level of the cluster is a stream, too: its links. A window takes as long as its busiest stream.

===============================  ===========================  =========================================
seconds of a pass                on its way                   on the links of a level
===============================  ===========================  =========================================
compute                          all
collectives that are waited for  all                          all
collectives that hide            what they slow compute down  all
===============================  ===========================  =========================================

A collective of activations is waited for: the batch has nothing else to do. With sub-batches another one computes
meanwhile, and it hides. Gathers of parameters and reductions of gradients hide, until the links of their pass are full.
While one of them runs, compute takes `Device.overlap_slowdown` times as long: c seconds of it hide in c seconds of
compute, but take ``c * (1 - 1 / slowdown)`` of them, and `drag` times as much where collectives are slowed down, too
(`Device.collective_slowdown`). Full links are then slowed by all compute. So what hides is never free, and a way that
is all compute and links that are all full meet where the simulator has them meet.

That is a bound: no order of a step hides more. A step of few ops, or one whose products wait for gathers, hides less.

What an op gathers that no other comes before, or reduces at the end of the backward, is waited for: nothing is computed
beside it (`op_costs.Ends`). While the last op of the forward computes, all gathers have ended, and no gradient is there
yet: the links are idle. What `Ablation.blocking` names is waited for, too. The optimizer's step is a window of its own:
the host and the device's memory work at once.

Of several micro-batches, copies of the states are gathered in the first forward alone, and gradients that are summed
over all of them are reduced in the last backward alone. These two are windows, and what the others take together are
two more.

With ``x[o, c]`` and ``t[w]`` as in `solver`, and sums over all ops and edges:

===============================================================  ==============================  =====================
t[forward] >= compute + waited                                   `Windows.loads`                 Oases 2 and 3
+ drag (1 - 1 / slowdown) hidden
t[forward] >= waited on l + hidden on l          for a level l   `Windows.loads`                 Oases 2 and 3
+ slowdown (1 - 1 / drag) compute
t[backward] >= the same of the backward, with what is            `Windows.loads`,                Oases 4 to 6
recomputed                                                       `step_choices.with_modes`
t[first forward], t[last backward], t[other forwards],           `Windows.loads`
t[other backwards] >= the same, of several micro-batches
t[optimizer] >= host, t[optimizer] >= memory                     `op_costs.price_op`
hidden in the forward: gathers from states to copies, and to     `op_costs.price_op`             AMSP 1 to 4, OSDP 1
where they are used; in the backward: the latter once more
hidden in the backward: reductions of gradients                  `op_costs.price_op`             AMSP 5 to 7, OSDP 1
waited: changes of layout between ops, and of their gradients    `build_problem.ProblemBuilder`  AxoNN 4 to 10
===============================================================  ==============================  =====================

The papers: Oases (arXiv 2305.16121), AMSP (arXiv 2311.00257), OSDP (arXiv 2209.13258), AxoNN (arXiv 2305.13525).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardweave.cost_model import Cluster
from shardweave.ir import OverlapConfig, Traffic
from shardweave.planner.problem.resharding_costs import Links

Floats = NDArray[np.float64]

Costs = NDArray[np.float64]
"""Seconds by pass, and by kind. The passes: the forwards and the backwards of all micro-batches; what of the first
forward and of the last backward there is once a step. The kinds: compute; of each level what is waited for; of each
level what hides; of each level how long collectives that cross an outer one keep its links busy."""

OPTIMIZER = "host", "memory"
"""The streams of the optimizer's window."""

@dataclass(frozen=True)
class Windows:
    """The windows of a step.

    Parameters
    ----------
    levels : sequence of str
        The cluster's, that have links.
    slowdown, drag : float
        `Device.overlap_slowdown` and `Device.collective_slowdown`.
    has_sub_batches : bool
        Another sub-batch computes while one waits for activations.
    blocking : collection of Traffic
        What is waited for instead of hiding.
    micro_batches : int
        Forwards and backwards of a step.

    Examples
    --------
    >>> windows = Windows(["gpu"], slowdown=1.25)
    >>> windows.names[0], windows.names[2]
    (('forward', 'forward on gpu'), ('host', 'memory'))
    >>> gather = np.array([[0.0, 0.5, 0.0], [0.0, 0.0, 0.0]])  # no copy, and nothing back
    >>> costs = windows.computed(2.0, 4.0) + windows.hidden(gather)
    >>> windows.loads(costs).tolist()
    [2.1, 0.5, 4.0, 0.0, 0.0, 0.0]
    """

    levels: Sequence[str]
    slowdown: float = 1.0
    drag: float = 1.0
    has_sub_batches: bool = False
    blocking: Collection[Traffic] = ()
    micro_batches: int = 1

    @classmethod
    def of(cls, cluster: Cluster, levels: Sequence[str], overlap: OverlapConfig, micro_batches: int) -> Windows:
        """Those of a step on a cluster."""
        device = cluster.device
        slowdowns = device.overlap_slowdown, device.collective_slowdown
        return cls(levels, *slowdowns, overlap.sub_batches > 1, overlap.ablation.blocking, micro_batches)

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The streams of each window: `Problem.windows`."""
        passes = ["forward", "backward"]
        if self.micro_batches > 1:
            passes = ["first forward", "last backward", "other forwards", "other backwards"]
        return *((way, *(f"{way} on {level}" for level in self.levels)) for way in passes), OPTIMIZER

    def none(self, *shape: int) -> Costs:
        """No costs."""
        return np.zeros((4, 1 + 3 * len(self.levels), *shape))

    def computed(self, forward: Floats | float, backward: Floats | float) -> Costs:
        """Of compute."""
        found = self.none(*np.shape(forward))
        found[0, 0], found[1, 0] = forward, backward
        return found

    def without_links(self, forward: Floats, backward: Floats) -> Costs:
        """Of compute, besides `computed`, where no collective that hides can run beside it: the links are idle."""
        found, levels = self.none(*np.shape(forward)), slice(1 + 2 * len(self.levels), None)
        found[0, levels], found[1, levels] = forward, backward
        return found

    def waited(self, links: Links) -> Costs:
        """Of collectives that are waited for: those of the forward, and those of the backward."""
        found, count = self.none(*links.shape[2:]), len(self.levels)
        found[:2, : 1 + count], found[:2, 1 + 2 * count :] = links[:, : 1 + count], links[:, 1 + count :]
        return found

    def hidden(self, links: Links) -> Costs:
        """Of collectives that hide."""
        found = self.none(*links.shape[2:])
        found[:2, 0], found[:2, 1 + len(self.levels) :] = links[:, 0], links[:, 1:]
        return found

    def once(self, costs: Costs) -> Costs:
        """Of what is done once a step: in the first forward, or in the last backward."""
        return np.concatenate([np.zeros_like(costs[:2]), costs[:2]])

    def activations(self, links: Links, whole_batch: bool = False, beside: Floats | float = 0.0) -> Costs:
        """Of collectives of activations: they hide where another sub-batch computes meanwhile.

        Else as much of those of the backward hides as there are seconds `beside`: of products that wait for none.
        """
        if not whole_batch and self.has_sub_batches:
            return self.moved("activation", links)
        if "activation" in self.blocking or not np.any(beside):
            return self.waited(links)
        total = links[1, 1 : 1 + len(self.levels)].sum(axis=0)
        share = np.divide(np.minimum(beside, total), total, out=np.zeros_like(total), where=total > 0)
        hiding = np.stack([np.zeros_like(links[0]), share * links[1]])
        hiding[:, 0] = 0.0
        return self.waited(links - hiding) + self.hidden(hiding)

    def moved(self, traffic: Traffic, links: Links, alone: bool = False) -> Costs:
        """Of collectives of one kind of traffic: they hide, unless they are `alone` or compute waits for them."""
        return self.waited(links) if alone or traffic in self.blocking else self.hidden(links)

    def loads(self, costs: Costs) -> Floats:
        """The seconds on each stream of each window, in the order of `names`: none on those of the optimizer."""
        count, (every, once) = self.micro_batches, (costs[:2], costs[2:])
        passes = every / count + once
        if count > 1:
            passes = np.concatenate([passes, (count - 1) / count * every])
        each = np.einsum("sk,pk...->ps...", self._streams, passes)
        loads = each.reshape(-1, *costs.shape[2:])
        return np.concatenate([loads, np.zeros((len(OPTIMIZER), *costs.shape[2:]))])

    @cached_property
    def _streams(self) -> Floats:
        """What a second of each kind is on each stream of its pass."""
        count, beside = len(self.levels), self.drag * (1.0 - 1.0 / self.slowdown)
        slowed = np.full((count, 1), self.slowdown * (1.0 - 1.0 / self.drag))
        way = [1.0, *[1.0] * count, *[beside] * count, *[0.0] * count]
        links = np.hstack([slowed, np.eye(count), np.eye(count), np.eye(count)])
        return np.vstack([way, links])
