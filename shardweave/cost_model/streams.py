"""A device's streams: one that computes, and one for each group of ranks, whose collectives share the links.

Collectives of one group run one after another, as a communicator runs them. Those of different groups run at the same
time. A collective has two phases: its latency, in which it uses no link, and its transfer, which uses a part of the
links of one or more levels. If the parts of all transfers add up to more than a level has, they share it with max-min
fairness (Bertsekas and Gallager, Data Networks, 6.5.2), as flows over TCP and packets on InfiniBand do nearly. Compute
and collectives slow each other down, by a factor each, while both run.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardweave.cost_model.collectives import Demand
from shardweave.cost_model.machine import Device

_ROUNDING_SHARE = 1e-12
"""A phase has ended when less than this part of the collective's seconds is left: a rounding error."""


@dataclass(frozen=True)
class Contention:
    """The factors by which compute and communication slow each other down; at least 1.

    >>> Contention(compute=1.2).collectives
    1.0
    """

    compute: float = 1.0
    collectives: float = 1.0

    @classmethod
    def of(cls, device: Device) -> Contention:
        """The factors of a device."""
        return cls(device.overlap_slowdown, device.collective_slowdown)


@dataclass(eq=False)
class Transfer:
    """A running collective.

    Parameters
    ----------
    group : str
        The group of ranks. Its collectives run one after another.
    demand : Demand
        The latency, the seconds of the transfer alone, and its use of each level's links.
    cause, owner, name : str
        As in `timeline.Event`.
    """

    group: str
    demand: Demand
    cause: str = ""
    owner: str = ""
    name: str = ""
    begin: float = 0.0
    end: float | None = None
    left: float = field(init=False)
    """Seconds that are left of the current phase, if it runs alone."""
    moving: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.left = self.demand.latency


def fair_rates(usages: Sequence[Mapping[str, float]]) -> list[float]:
    """The max-min fair rate of each transfer, as a part of its full speed.

    Parameters
    ----------
    usages : sequence of mapping of str to float
        The part of each level's links that each transfer uses at full speed, in ``[0, 1]``.

    Examples
    --------
    The first two share "a". The second is at half speed, so that it leaves "b" to the third.

    >>> fair_rates([{"a": 1.0}, {"a": 1.0, "b": 1.0}, {"b": 0.5}])
    [0.5, 0.5, 1.0]
    """
    if len(usages) < 2:
        return [1.0] * len(usages)
    # 1. Nearly always the links suffice for full speed.
    total: defaultdict[str, float] = defaultdict(float)
    for usage in usages:
        for level, part in usage.items():
            total[level] += part
    if max(total.values(), default=0.0) <= 1.0:
        return [1.0] * len(usages)
    # 2. Else raise all rates together. A rate stops rising at full speed, or when one of its links is full.
    rates = [0.0] * len(usages)
    free = dict.fromkeys(total, 1.0)
    rising = set(range(len(usages)))
    while rising:
        wanted = {level: sum(usages[i].get(level, 0.0) for i in rising) for level in free}
        steps = {level: max(0.0, free[level]) / want for level, want in wanted.items() if want > 0}
        step = min([*steps.values(), *(1.0 - rates[i] for i in rising)])
        for level, want in wanted.items():
            free[level] -= step * want
        full = {level for level, most in steps.items() if most <= step}
        for i in rising:
            rates[i] += step
        rising = {i for i in rising if rates[i] < 1.0 and not full.intersection(usages[i])}
    return rates


NO_CONTENTION = Contention()
"""Compute and collectives do not slow each other down."""


class Streams:
    """The simulated time of one device.

    Parameters
    ----------
    contention : Contention
        How compute and collectives slow each other down.
    launch : float
        Seconds that the host takes to launch a collective. The host does nothing else, and never waits.

    Examples
    --------
    >>> streams = Streams(Contention(compute=2.0))
    >>> gather = Transfer("gpu0", Demand(latency=1.0, transfer=2.0, use={"gpu": 1.0}))
    >>> began = streams.start(gather)
    >>> streams.compute(1.0)  # beside the collective
    2.0
    >>> streams.wait(gather), streams.now, streams.busy["gpu"]
    (1.0, 3.0, 2.0)
    """

    def __init__(self, contention: Contention = NO_CONTENTION, launch: float = 0.0) -> None:
        self.now = 0.0
        self.contention, self.launch = contention, launch
        self.launched = 0.0
        """The time at which the host has launched all collectives."""
        self.ended = 0
        """The number of collectives that have ended."""
        self.loads: list[tuple[float, dict[str, float]]] = []
        """The part of each level's links that is busy from a time on."""
        self._queues: dict[str, deque[Transfer]] = {}
        self._rates: dict[Transfer, float] = {}

    def start(self, transfer: Transfer) -> float:
        """Put a collective on its group's stream; returns the seconds that the device waits for its launch."""
        begin = self.now
        self.launched += self.launch
        while self.now < self.launched:
            self._advance(min(self.launched - self.now, self._next_end()))
        queue = self._queues.setdefault(transfer.group, deque())
        queue.append(transfer)
        if len(queue) == 1:
            self._begin(transfer)
        return self.now - begin

    def compute(self, seconds: float) -> float:
        """Run kernels that take `seconds` alone; returns the seconds that they take beside the collectives."""
        begin, slowdown = self.now, self.contention.compute
        while seconds > 0:
            if not self._queues:
                self.now += seconds
                break
            span = min(seconds * slowdown, self._next_end() * self.contention.collectives)
            last = span >= seconds * slowdown
            self._advance(span, self.contention.collectives)
            seconds = 0.0 if last else seconds - span / slowdown
        return self.now - begin

    def wait(self, transfer: Transfer) -> float:
        """Wait for a started collective; returns the seconds until it has ended."""
        begin = self.now
        while transfer.end is None:
            self._advance(self._next_end())
        return self.now - begin

    def advance(self) -> None:
        """Wait until the next running collective ends a phase."""
        self._advance(self._next_end())

    @property
    def busy(self) -> Mapping[str, float]:
        """Seconds of each level's links at full use: half of the links for two seconds count as one second."""
        found: defaultdict[str, float] = defaultdict(float)
        ends = [at for at, _ in self.loads[1:]]
        for (begin, load), end in zip(self.loads, [*ends, self.now]):
            for level, part in load.items():
                found[level] += part * (end - begin)
        return found

    @property
    def is_running(self) -> bool:
        """Whether a started collective has not ended."""
        return bool(self._queues)

    @property
    def running(self) -> list[Transfer]:
        """The started collectives that have not ended, by group."""
        return [transfer for queue in self._queues.values() for transfer in queue]

    def _begin(self, transfer: Transfer) -> None:
        """Begin the first phase of a collective."""
        transfer.begin = self.now
        if transfer.left <= 0:
            self._next_phase(transfer)
        else:
            self._rates[transfer] = 1.0

    def _next_phase(self, transfer: Transfer) -> None:
        """Go from latency to transfer, or from transfer to the end; then the next collective of the group begins."""
        if not transfer.moving and transfer.demand.transfer > 0:
            transfer.moving, transfer.left = True, transfer.demand.transfer
            self._share_links()
            return
        transfer.end = self.now
        self.ended += 1
        self._rates.pop(transfer, None)
        queue = self._queues[transfer.group]
        queue.popleft()
        if transfer.moving:
            self._share_links()
        if queue:
            self._begin(queue[0])
        else:
            del self._queues[transfer.group]

    def _share_links(self) -> None:
        """Share the links anew, after a transfer has begun or ended."""
        moving = [queue[0] for queue in self._queues.values() if queue and queue[0].moving and queue[0].end is None]
        usages = [transfer.demand.use for transfer in moving]
        rates = fair_rates(usages)
        load: dict[str, float] = {}
        for transfer, usage, rate in zip(moving, usages, rates):
            self._rates[transfer] = rate
            for level, part in usage.items():
                load[level] = load.get(level, 0.0) + rate * part
        if self.loads and self.loads[-1][0] == self.now:
            self.loads.pop()
        self.loads.append((self.now, load))

    def _next_end(self) -> float:
        """Seconds until the next running collective ends a phase."""
        return min((transfer.left / rate for transfer, rate in self._rates.items()), default=math.inf)

    def _advance(self, span: float, slowdown: float = 1.0) -> None:
        """Let `span` seconds pass, at most until the next end of a phase; collectives take `slowdown` times as long."""
        self.now += span
        ended = []
        for transfer, rate in self._rates.items():
            transfer.left -= rate * span / slowdown
            if transfer.left <= _ROUNDING_SHARE * transfer.demand.seconds:
                ended.append(transfer)
        for transfer in ended:
            self._next_phase(transfer)
