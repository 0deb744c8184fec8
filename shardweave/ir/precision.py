"""Mixed precision: the dtypes in which a step computes, reduces gradients and returns outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardweave.ir.errors import PlanError

_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which specs and plans hold a dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


class Dtypes(NamedTuple):
    """The dtypes of a parameter: of the master weight between steps, and of the gradient reduction over devices."""

    master: torch.dtype
    reduced: torch.dtype


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step, with the meaning of FSDP2's ``MixedPrecisionPolicy``; None leaves a dtype as it is.

    The parameters that a user and the optimizer see, the *masters*, keep the dtype that the model gives them, and so do
    their gradients, state dicts and checkpoints. Buffers are not cast.

    Parameters
    ----------
    param_dtype : torch.dtype, optional
        The model computes with its floating-point parameters in this dtype. Each rank casts its part of the masters,
        so that they are gathered in this dtype.
    reduce_dtype : torch.dtype, optional
        The dtype in which gradients are summed over devices. By default the dtype that they are computed in,
        `param_dtype`.
    output_dtype : torch.dtype, optional
        The dtype to which the model's floating-point outputs are cast.
    cast_forward_inputs : bool
        Whether floating-point inputs are cast to `param_dtype`.

    Raises
    ------
    PlanError
        If a dtype is not one of floating-point numbers.

    Examples
    --------
    >>> str(Precision(torch.bfloat16, reduce_dtype=torch.float32))
    'bfloat16, gradients reduced in float32'
    >>> Precision.of("bf16") == Precision(torch.bfloat16, reduce_dtype=torch.float32)
    True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in _DTYPES:
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise PlanError(f"{name} must be a floating-point torch.dtype or None, got {dtype!r}")

    @classmethod
    def of(cls, given: Precision | str | None) -> Precision | None:
        """The precision that an option means: a `Precision`, a short name (``"bf16"``, ``"fp16"``) or None.

        Raises
        ------
        PlanError
            If the name is unknown.
        """
        if given is None or isinstance(given, Precision):
            return given
        if not isinstance(given, str) or given not in SHORT:
            raise PlanError(
                f"precision {given!r} is unknown; expected one of {', '.join(SHORT)}, a shardweave.Precision or None"
            )
        return SHORT[given]

    def working(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the step computes with a parameter that the model holds in `dtype`."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def dtypes(self, master: torch.dtype) -> Dtypes:
        """The dtypes of a parameter that the model holds in `master`."""
        reduced = self.reduce_dtype if master.is_floating_point else None  # complex numbers are not cast
        return Dtypes(master, reduced or self.working(master))

    def to_dict(self) -> dict[str, Any]:
        """The dtypes by their names; `from_dict` is its inverse.

        >>> Precision.from_dict(SHORT["fp16"].to_dict()) == SHORT["fp16"]
        True
        """
        dtypes = {name: dtype and dtype_name(dtype) for name in _DTYPES for dtype in [getattr(self, name)]}
        return {**dtypes, "cast_forward_inputs": self.cast_forward_inputs}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Precision:
        """A precision of plain types; PlanError where a name is no dtype's."""
        param, reduce, output = (_dtype(data[name]) for name in _DTYPES)
        return cls(param, reduce, output, data["cast_forward_inputs"])

    def __str__(self) -> str:
        names = self.to_dict()
        parts = [names["param_dtype"] or "the model's"]
        parts += [f"gradients reduced in {names['reduce_dtype']}"] if self.reduce_dtype else []
        parts += [f"outputs in {names['output_dtype']}"] if self.output_dtype else []
        return ", ".join(parts + ["inputs as they come"] * (not self.cast_forward_inputs))


SHORT = {
    "bf16": Precision(torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": Precision(torch.float16, reduce_dtype=torch.float32),
}
"""Precisions by their short names. Gradients are summed in float32: in 8 or 11 bits a sum loses its small terms."""


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise PlanError(f"{name!r} is not the name of a dtype, as 'bfloat16' is")
    return found
