"""What a plan says of one op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardweave.brief import brief
from shardweave.ir import Strategy

_FIGURES = ("seconds", "communication_seconds", "state_bytes", "saved_bytes", "transient_bytes")


class RunnerUp(NamedTuple):
    """The strategy that an op nearly got, all other ops left as they are.

    Parameters
    ----------
    strategy : Strategy
    seconds : float
        How much longer the step would take with it in the program (negative: shorter, but it does not fit, or the
        simulator says that the plan is faster).
    missing_bytes : int
        How far it would exceed the memory limit; 0 where it fits.
    """

    strategy: Strategy
    seconds: float
    missing_bytes: int = 0


@dataclass(frozen=True)
class OpChoice:
    """One op's strategy and its predicted part of the step, on one device.

    Parameters
    ----------
    strategy : Strategy
    seconds : float
        What it adds to the program's time, forward and backward: to what each of these waits for.
    communication_seconds : float
        What its own collectives take when nothing hides them.
    state_bytes, saved_bytes, transient_bytes : int
        Parameters, gradients and optimizer states; kept for the backward; needed only while it runs.
    runner_up : RunnerUp, optional
    params : tuple of str
        The names of its parameters.
    """

    strategy: Strategy
    seconds: float
    communication_seconds: float = 0.0
    state_bytes: int = 0
    saved_bytes: int = 0
    transient_bytes: int = 0
    runner_up: RunnerUp | None = None
    params: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return brief(self)

    @property
    def memory(self) -> int:
        """What it occupies for longer than it runs, in bytes."""
        return self.state_bytes + self.saved_bytes

    def to_dict(self) -> dict[str, Any]:
        """As plain types; `from_dict` is its inverse."""
        data = {"strategy": self.strategy.to_dict(), **{name: getattr(self, name) for name in _FIGURES}}
        if self.runner_up is not None:
            data["runner_up"] = {**self.runner_up._asdict(), "strategy": self.runner_up.strategy.to_dict()}
        return {**data, "params": list(self.params)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OpChoice:
        other = data.get("runner_up")
        runner_up = other and RunnerUp(Strategy.from_dict(other["strategy"]), other["seconds"], other["missing_bytes"])
        return cls(
            strategy=Strategy.from_dict(data["strategy"]),
            **{name: data[name] for name in _FIGURES},
            runner_up=runner_up,
            params=tuple(data["params"]),
        )
