"""What a plan says of one op, and the key of the model that a plan is made for.

What a plan knows of the model that it was made for.

What a plan says of one op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardweave.ir import Precision, Strategy, brief

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelKey:
    """What a model and its call must agree in with the ones that a plan was made for: names, global shapes, dtypes."""

    parameters: Mapping[str, Shape]
    inputs: Mapping[str, Shape] = field(default_factory=dict)
    precision: Precision | None = None

    def __repr__(self) -> str:
        precision = f", {self.precision}" if self.precision is not None else ""
        return f"<ModelKey of {len(self.parameters)} parameters and {len(self.inputs)} inputs{precision}>"

    def differences(self, given: ModelKey, places: tuple[str, str] = ("in the plan", "here")) -> list[str]:
        """What a model and its call have else than a plan with this key, each in words; `places` says where each is.

        >>> ModelKey({"up.weight": (8, 4)}).differences(ModelKey({"up.weight": (8, 2)}))
        ['parameter up.weight has shape (8, 4) in the plan and (8, 2) here']
        """
        found = _differences("parameter", self.parameters, given.parameters, places)
        found += _differences("input", self.inputs, given.inputs, places)
        if self.precision != given.precision:
            found.append(
                f"the plan is for the precision {_words(self.precision)}, the options ask for "
                f"{_words(given.precision)} (precision= in Options)"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain types; `from_dict` is its inverse."""
        precision = {"precision": self.precision.to_dict()} if self.precision is not None else {}
        return {"parameters": dict(self.parameters), "inputs": dict(self.inputs), **precision}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelKey:
        return cls(
            {name: tuple(shape) for name, shape in data["parameters"].items()},
            {name: tuple(shape) for name, shape in data["inputs"].items()},
            Precision.from_dict(data["precision"]) if data.get("precision") else None,
        )


def _differences(
    what: str, planned: Mapping[str, Shape], given: Mapping[str, Shape], places: tuple[str, str]
) -> list[str]:
    one, other = places
    found = [f"{what} {name} is {one} and not {other}" for name in planned if name not in given]
    found += [f"{what} {name} is {other} and not {one}" for name in given if name not in planned]
    return found + [
        f"{what} {name} has shape {tuple(shape)} {one} and {tuple(given[name])} {other}"
        for name, shape in planned.items()
        if name in given and tuple(given[name]) != tuple(shape)
    ]


def _words(precision: Precision | None) -> str:
    return "of the model" if precision is None else f"({precision})"


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
