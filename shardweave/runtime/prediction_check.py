"""The first training steps beside what the plan predicts: a warning, once, where they differ by much.

A plan is as good as the figures of its cluster. Where these are of another machine, or were measured while it was busy,
the plan may be far from the best, and nothing else would tell.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from shardweave.ir import readable_seconds

MAX_ERROR_RATIO = 1.3
"""Steps that take so many times as long as predicted, or so many times less, lead to a warning."""

SKIPPED_STEPS = 3
"""Steps that are not timed: connections and the allocator's memory are made in these, and inputs are compared."""

TIMED_STEPS = 5


@dataclass(frozen=True)
class PredictedStep:
    """The step time of a plan.

    Parameters
    ----------
    seconds : float
        Of a step, the optimizer's part included.
    source : str
        Where the figures of the plan come from, and how to get better ones: for the warning.
    may_take_less : bool
        Whether less time is no surprise: plans do not count what Inductor gains.
    """

    seconds: float
    source: str
    may_take_less: bool = False


@dataclass
class PredictionCheck:
    """Times steps, and warns if they are not as predicted.

    From the start of its forward to the end of its backward a step takes less than the plan says, which counts the
    optimizer's part, too. From one forward to the next it takes more, with what the user's loop does. The prediction is
    wrong for sure if the former takes much longer, or the latter much less.

    On a GPU, events of the current stream are recorded, and read once they have happened: the host never waits.

    Parameters
    ----------
    predicted : PredictedStep
    device : torch.device
        That the steps run on.

    Examples
    --------
    >>> check = PredictionCheck(PredictedStep(3600.0, "the figures are of a slower machine"), torch.device("cpu"))
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     while not check.is_done:
    ...         check.forward_begins()
    ...         check.backward_ends()
    >>> print(str(caught[0].message).partition(",")[0])
    the plan predicts 3600 s a step
    """

    predicted: PredictedStep
    device: torch.device
    is_done: bool = field(default=False, init=False)
    _begins: list[Any] = field(default_factory=list, init=False)
    _ends: list[Any] = field(default_factory=list, init=False)

    def forward_begins(self) -> None:
        """The forward of a training step begins."""
        if self.is_done:
            return
        del self._begins[len(self._ends) :]  # of a call that no backward followed
        self._begins.append(self._now())
        if len(self._begins) > SKIPPED_STEPS + TIMED_STEPS and self._have_happened():
            self.is_done = True
            self._compare()

    def backward_ends(self) -> None:
        """The backward of that step ends; of several calls before one backward the last one counts."""
        if not self.is_done and len(self._ends) < len(self._begins):
            self._ends.append(self._now())

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _have_happened(self) -> bool:
        return self.device.type != "cuda" or bool(self._begins[SKIPPED_STEPS + TIMED_STEPS].query())

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(1e-3 * begin.elapsed_time(end) if self.device.type == "cuda" else end - begin)

    def _compare(self) -> None:
        timed = range(SKIPPED_STEPS, SKIPPED_STEPS + TIMED_STEPS)
        least = median(self._seconds(self._begins[step], self._ends[step]) for step in timed)
        most = median(self._seconds(self._begins[step], self._begins[step + 1]) for step in timed)
        self._begins.clear()
        self._ends.clear()
        seconds = self.predicted.seconds
        if least > MAX_ERROR_RATIO * seconds:
            took = f"its forward and backward alone take {readable_seconds(least)}"
        elif most < seconds / MAX_ERROR_RATIO and not self.predicted.may_take_less:
            took = f"the first ones take {readable_seconds(most)}, with all that lies between two of them"
        else:
            return
        warnings.warn(
            f"the plan predicts {readable_seconds(seconds)} a step, but {took} (median of {TIMED_STEPS}): another plan "
            f"may be faster. {self.predicted.source}",
            stacklevel=2,
        )
