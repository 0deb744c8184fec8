"""A device's streams: one that computes, and one for each group of ranks, whose collectives share the links.

Collectives of one group run one after another, in their order, as a communicator runs them. Those of different groups
run at the same time. A collective first takes its latency, which nothing shares; then its bytes take a part of the
links of one or more levels, all of those of its slowest one while it is alone. Where the parts of all come to more
than the links have, all are slowed down alike, and what one cannot use for the sake of another level is left to the
others: max-min fairness (Bertsekas and Gallager, Data Networks, 6.5.2), as flows over TCP and packets on InfiniBand
approximate it. Compute and collectives slow each other down, by a factor each, while both run.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardweave.cost_model.collectives import Demand
from shardweave.cost_model.machine import Device

_DONE = 1e-12
"""A phase counts as done when less than this part of it is left, which is rounding."""


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
        """On a device."""
        return cls(device.overlap_slowdown, device.collective_slowdown)


@dataclass(eq=False)
class Transfer:
    """A collective, from its start on.

    Parameters
    ----------
    group : str
        Whose collectives run in their order.
    demand : Demand
        Its latency, its bytes' seconds when it is alone, and the part of each level's links that they use then.
    cause, owner, name : str
        For the reader: see `timeline.Event`.
    """

    group: str
    demand: Demand
    cause: str = ""
    owner: str = ""
    name: str = ""
    begin: float = 0.0
    end: float | None = None
    left: float = field(init=False)
    """Seconds that the rest of the current phase would take alone."""
    moving: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.left = self.demand.latency


def fair_rates(usages: Sequence[Mapping[str, float]]) -> list[float]:
    """The part of its full speed at which each of several transfers moves: max-min fair.

    Parameters
    ----------
    usages : sequence of mapping of str to float
        The part of each level's links that each transfer uses at full speed, in ``[0, 1]``.

    Examples
    --------
    Two share a link; a third one does not cross it. What the link of "a" keeps the second from using on "b" is left
    to the third.

    >>> fair_rates([{"a": 1.0}, {"a": 1.0, "b": 1.0}, {"b": 0.5}])
    [0.5, 0.5, 1.0]
    """
    if len(usages) < 2:
        return [1.0] * len(usages)
    asked: defaultdict[str, float] = defaultdict(float)
    for usage in usages:
        for level, part in usage.items():
            asked[level] += part
    if max(asked.values(), default=0.0) <= 1.0:  # as nearly always
        return [1.0] * len(usages)
    rates = [0.0] * len(usages)
    free = dict.fromkeys((level for usage in usages for level in usage), 1.0)
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


class Streams:
    """The time of one device.

    Parameters
    ----------
    contention : Contention
        What compute and collectives take beside each other.
    launch : float
        Seconds that the host takes for each collective before it starts. The host does nothing else, and never waits.

    Examples
    --------
    >>> streams = Streams(Contention(compute=2.0))
    >>> gather = Transfer("gpu0", Demand(latency=1.0, transfer=2.0, use={"gpu": 1.0}))
    >>> began = streams.start(gather)
    >>> streams.compute(1.0)  # of these seconds none is alone
    2.0
    >>> streams.wait(gather), streams.now, streams.busy["gpu"]
    (1.0, 3.0, 2.0)
    """

    def __init__(self, contention: Contention = NO_CONTENTION, launch: float = 0.0) -> None:
        self.now = 0.0
        self.contention, self.launch = contention, launch
        self.launched = 0.0
        """Until when the host has been busy."""
        self.ended = 0
        """How many collectives are done."""
        self.loads: list[tuple[float, dict[str, float]]] = []
        """From when on which part of each level's links is busy."""
        self._queues: dict[str, deque[Transfer]] = {}
        self._rates: dict[Transfer, float] = {}

    def start(self, transfer: Transfer) -> float:
        """Put a collective on its group's stream; the seconds that the device waited for the host to launch it."""
        begin = self.now
        self.launched += self.launch
        while self.now < self.launched:
            self._pass(min(self.launched - self.now, self._next_end()))
        queue = self._queues.setdefault(transfer.group, deque())
        queue.append(transfer)
        if len(queue) == 1:
            self._begin(transfer)
        return self.now - begin

    def compute(self, seconds: float) -> float:
        """Compute for what takes `seconds` alone; the seconds that it does take."""
        begin, slowdown = self.now, self.contention.compute
        while seconds > 0:
            if not self._queues:
                self.now += seconds
                break
            span = min(seconds * slowdown, self._next_end() * self.contention.collectives)
            last = span >= seconds * slowdown
            self._pass(span, self.contention.collectives)
            seconds = 0.0 if last else seconds - span / slowdown
        return self.now - begin

    def wait(self, transfer: Transfer) -> float:
        """Let time pass until a collective that was started is done; the seconds that passed."""
        begin = self.now
        while transfer.end is None:
            self._pass(self._next_end())
        return self.now - begin

    def advance(self) -> None:
        """Let time pass until the next of the running collectives ends its latency or its bytes."""
        self._pass(self._next_end())

    @property
    def busy(self) -> Mapping[str, float]:
        """Seconds for which all of a level's links have been busy; half of them for twice as long counts the same."""
        found: defaultdict[str, float] = defaultdict(float)
        ends = [at for at, _ in self.loads[1:]]
        for (begin, load), end in zip(self.loads, [*ends, self.now]):
            for level, part in load.items():
                found[level] += part * (end - begin)
        return found

    @property
    def is_running(self) -> bool:
        """Whether something was started and is not done."""
        return bool(self._queues)

    @property
    def running(self) -> list[Transfer]:
        """The collectives under way, in the order of groups."""
        return [transfer for queue in self._queues.values() for transfer in queue]

    def _begin(self, transfer: Transfer) -> None:
        """The group has come to this one."""
        transfer.begin = self.now
        if transfer.left <= 0:
            self._next_phase(transfer)
        else:
            self._rates[transfer] = 1.0

    def _next_phase(self, transfer: Transfer) -> None:
        """Go from latency to transfer, and from there to the end; then the next collective of its group begins."""
        if not transfer.moving and transfer.demand.transfer > 0:
            transfer.moving, transfer.left = True, transfer.demand.transfer
            self._share()
            return
        transfer.end = self.now
        self.ended += 1
        self._rates.pop(transfer, None)
        queue = self._queues[transfer.group]
        queue.popleft()
        if transfer.moving:
            self._share()
        if queue:
            self._begin(queue[0])
        else:
            del self._queues[transfer.group]

    def _share(self) -> None:
        """Share the links anew: a transfer has begun to move bytes, or ended."""
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
        """Seconds until the next of the running collectives ends a phase."""
        return min((transfer.left / rate for transfer, rate in self._rates.items()), default=math.inf)

    def _pass(self, span: float, slowdown: float = 1.0) -> None:
        """Let `span` seconds pass, no more than until the next end of a phase; each takes so many times as long."""
        self.now += span
        ended = []
        for transfer, rate in self._rates.items():
            transfer.left -= rate * span / slowdown
            if transfer.left <= _DONE * transfer.demand.seconds:
                ended.append(transfer)
        for transfer in ended:
            self._next_phase(transfer)
