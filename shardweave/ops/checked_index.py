"""Indices into a dimension that lies in parts, checked against the whole of it, as an op that generated graphs call.

A rank gives zeros for what another one holds, and would for an index that no rank holds. Torch's own kernels raise for
that one: so does this op, on each rank that sees the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import IndexRangeError

_LIBRARY: Any = torch.library.Library("shardweave", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("checked_index(Tensor index, SymInt start, int low, int high, str what) -> Tensor")


def checked_index(index: Tensor, start: int, low: int, high: int, what: str) -> Tensor:
    """`index` counted from `start`, after a check that it is at least `low` and less than `high`.

    On a GPU the check runs on the device, as torch's own does: it ends the process without waiting for the step.

    Raises
    ------
    IndexRangeError
        For the first index outside of the range.

    >>> checked_index(torch.tensor([4, 7]), 4, 0, 8, "embedding")
    tensor([0, 3])
    """
    if index.device.type == "cpu":
        check_range(index, low, high, what)
    else:
        inside = torch.logical_and(index >= low, index < high).all()
        torch._assert_async(inside, out_of_range("an index", low, high, what))
    return index - start


def check_range(index: Tensor, low: int, high: int, what: str) -> None:
    """`IndexRangeError` where one of these indices is less than `low` or not less than `high`."""
    if not index.numel():
        return
    least, most = (int(value) for value in torch.aminmax(index))
    if least < low or most >= high:
        raise IndexRangeError(out_of_range(f"the index {least if least < low else most}", low, high, what))


@dataclass(frozen=True)
class Check:
    """Of which op an index is, the least that it may be, and what it must be less than."""

    what: str
    low: int
    high: int


@dataclass(frozen=True)
class IndexChecks:
    """The indices of a step that its integer inputs alone decide, and what each is checked for.

    Parameters
    ----------
    indices : GraphModule
        From all tensors of a call, the whole batch, to the indices.
    checks : sequence of Check
        One for each index.
    """

    indices: fx.GraphModule
    checks: Sequence[Check]

    def __call__(self, inputs: Sequence[Tensor]) -> None:
        """`IndexRangeError` where an index of this batch is out of range."""
        with torch.no_grad():
            for index, check in zip(self.indices(*inputs), self.checks, strict=True):
                check_range(index, check.low, check.high, check.what)


def out_of_range(which: str, low: int, high: int, what: str) -> str:
    """What to say of an index outside of the range."""
    return (
        f"{which} is out of range in {what}: it has to be at least {low} and less than {high}. Check the inputs "
        "(a token or class that the model has no row for), or make the table larger"
    )


def _fake(index: Tensor, start: int, low: int, high: int, what: str) -> Tensor:
    return torch.empty_like(index)


_LIBRARY.impl("checked_index", checked_index, "CompositeExplicitAutograd")
torch.library.register_fake("shardweave::checked_index", _fake, lib=_LIBRARY)
