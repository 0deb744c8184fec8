"""Acts: what a step asks of its device's streams, one after another, so that it can be played again, or longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardweave.cost_model.machine import Device
from shardweave.cost_model.streams import Contention, Streams, Transfer


class Act(NamedTuple):
    """A kernel, or the start of a collective, or a wait for one.

    Parameters
    ----------
    part : int
        Which of the step's graphs it is of, in the order in which they are played.
    op : str
        The module or parameter that it belongs to.
    seconds : float
        Of a kernel alone.
    transfer : Transfer, optional
        The collective; None of a kernel.
    waits : bool
        Whether it waits for the collective, not starts it.
    """

    part: int
    op: str
    seconds: float = 0.0
    transfer: Transfer | None = None
    waits: bool = False


class Played(NamedTuple):
    """Seconds of what has been played, and those of them in which kernels ran."""

    seconds: float
    compute: float


def play(acts: Sequence[Act], device: Device) -> Played:
    """What acts take on streams of their own (see `Streams`).

    Examples
    --------
    A kernel takes twice as long beside a collective of three seconds, of which one is left then.

    >>> from shardweave.cost_model import Cluster
    >>> from shardweave.cost_model import Machine
    >>> from shardweave.cost_model.collectives import Demand
    >>> gather = Transfer("gpu0", Demand(latency=0.0, transfer=3.0, use={"gpu": 1.0}))
    >>> acts = Act(0, "", transfer=gather), Act(0, "", 1.0), Act(0, "", transfer=gather, waits=True), Act(0, "", 1.0)
    >>> play(acts, Cluster.local(2).device)
    Played(seconds=4.0, compute=3.0)
    """
    streams = Streams(Contention.of(device), device.collective_host_seconds)
    started: dict[Transfer, Transfer] = {}
    compute = ahead = 0.0
    for act in acts:
        if act.transfer is None:
            ahead += act.seconds
            continue
        compute, ahead = compute + streams.compute(ahead), 0.0
        if act.waits:
            streams.wait(started[act.transfer])
        else:
            started[act.transfer] = Transfer(act.transfer.group, act.transfer.demand)
            streams.start(started[act.transfer])
    compute += streams.compute(ahead)
    while streams.is_running:
        streams.advance()
    return Played(streams.now, compute)
