"""What a plan knows of the model that it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardweave.precision import Precision

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
