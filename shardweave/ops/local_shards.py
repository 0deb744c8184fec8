"""Ops on a rank's part of a value: padded rows, the steps of a time axis, and checks of indices and of matrices.

- Padded rows: an uneven dimension has room for the longest part on each rank (`ir.Padding`).
- Time axes: until `UnrollSubBatches` writes every step, a graph computes one step of each time axis. `total` and
  `joined` stand where the region of an axis ends, for ops on the results of all steps. They are never run.
- Checked indices: a rank gives zeros for rows that another rank holds, and would do so for an index that no rank holds.
  Torch's own kernels raise an error for such an index. So does this op, on each rank that sees the index.
- Checks of values: functions of torch.linalg raise an error for a matrix that has no inverse, and a forward may have
  asserts. In torch's graph a check has no result. These ops return a value, so that the check is sharded with it.

`register` adds an op to the library ``torch.ops.shardweave``: these, and those of the other modules of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import IndexRangeError, Padding, VerifyError

LIBRARY: Any = torch.library.Library("shardweave", "FRAGMENT")  # type: ignore[no-untyped-call]
"""The custom operators, ``torch.ops.shardweave``."""

_COORDINATE_PREFIX = "coord_"
"""The prefix of the placeholders that take a coordinate."""


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator with its kernel for all devices, and the function that computes its fake results."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardweave::{name}", fake, lib=LIBRARY)


def pad(x: Tensor, dim: int, size: int, levels: Sequence[int]) -> Tensor:
    """Cut each block of `size` rows of `dim` over `levels`, and pad every part with zeros to one length.

    >>> pad(torch.arange(1, 6), 0, 5, [2, 2])
    tensor([1, 2, 3, 0, 4, 0, 5, 0])
    """
    padding = Padding(dim, size, tuple(levels))
    blocks = x.shape[dim] // size
    result = x.new_zeros(_resized(x, dim, blocks * padding.padded))
    torch._foreach_copy_(_parts(result, padding, blocks), torch.split(x, [*padding.counts * blocks], dim))
    return result


def unpad(x: Tensor, dim: int, size: int, levels: Sequence[int]) -> Tensor:
    """Remove the padding of the rows of dimension `dim`: the inverse of `pad`.

    >>> unpad(torch.tensor([1, 2, 3, 0, 4, 0, 5, 0]), 0, 5, [2, 2])
    tensor([1, 2, 3, 4, 5])
    """
    padding = Padding(dim, size, tuple(levels))
    return torch.cat(_parts(x, padding, x.shape[dim] // padding.padded), dim)


def _parts(x: Tensor, padding: Padding, blocks: int) -> list[Tensor]:
    """Views of the parts of the padded `x`."""
    counts = padding.counts * blocks
    return [x.narrow(padding.dim, index * padding.place, count) for index, count in enumerate(counts)]


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


def _fake_pad(x: Tensor, dim: int, size: int, levels: Sequence[int]) -> Tensor:
    return x.new_empty(_resized(x, dim, x.shape[dim] // size * Padding(dim, size, tuple(levels)).padded))


def _fake_unpad(x: Tensor, dim: int, size: int, levels: Sequence[int]) -> Tensor:
    return x.new_empty(_resized(x, dim, x.shape[dim] // Padding(dim, size, tuple(levels)).padded * size))


def coordinate(axis: str) -> str:
    """The name of the placeholder that takes the coordinate of an axis."""
    return f"{_COORDINATE_PREFIX}{axis}"


def is_coordinate(node: fx.Node) -> bool:
    """Whether a node of a local graph is the placeholder of an axis' coordinate."""
    return node.op == "placeholder" and node.name.startswith(_COORDINATE_PREFIX)


def total(value: Tensor, axis: str, size: int) -> Tensor:
    """The sum of `value` over the steps of a time axis."""
    return _only_in_graphs(value)


def joined(value: Tensor, axis: str, size: int, dim: int, outer: int, inner: int) -> Tensor:
    """The steps of `value` along a time axis, concatenated on `dim` between `outer` and `inner` local rows.

    >>> with torch._subclasses.FakeTensorMode():
    ...     joined(torch.ones(4, 3), "sub", 2, 0, 1, 4).shape
    torch.Size([8, 3])
    """
    _only_in_graphs(value)
    shape = list(value.shape)
    shape[dim] *= size
    return value.new_empty(shape)


def _only_in_graphs(value: Tensor) -> Tensor:
    if not isinstance(value, torch._subclasses.FakeTensor):
        raise VerifyError("`UnrollSubBatches` writes out the steps of a time axis: run the graph after this pass")
    return value.clone()


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


def checked_matrices(result: Tensor, info: Tensor, what: str, is_matrix: bool) -> Tensor:
    """`result` of the function `what` of torch.linalg, after a check of its error codes: `info`, one for each matrix.

    Raises
    ------
    torch.linalg.LinAlgError
        As on one device. Only ranks that compute a failed matrix raise it.

    >>> checked_matrices(*torch.linalg.inv_ex(torch.eye(2)), "linalg.inv", True)
    tensor([[1., 0.],
            [0., 1.]])
    """
    torch._linalg_check_errors(info, what, is_matrix=is_matrix)
    return result.clone()


def asserted(value: Tensor, flags: Tensor, expected: bool, message: str) -> Tensor:
    """`value`, after an assert that all flags are as `expected`.

    Raises
    ------
    AssertionError
        One is not; only ranks that have it raise this. On a GPU the check runs on the device: it ends the process
        without waiting for the step.

    >>> asserted(torch.ones(2), torch.tensor([True, True]), True, "two ones")
    tensor([1., 1.])
    """
    holds = flags.all() if expected else flags.any().logical_not()
    if holds.device.type != "cpu":
        torch._assert_async(holds, message)
    elif not holds:
        raise AssertionError(message)
    return value.clone()


def check_range(index: Tensor, low: int, high: int, what: str) -> None:
    """Raise `IndexRangeError` if an index is less than `low` or not less than `high`."""
    if not index.numel():
        return
    least, most = (int(value) for value in torch.aminmax(index))
    if least < low or most >= high:
        raise IndexRangeError(out_of_range(f"the index {least if least < low else most}", low, high, what))


@dataclass(frozen=True)
class IndexRange:
    """The op of an index, the smallest allowed value, and the exclusive upper limit."""

    what: str
    low: int
    high: int


@dataclass(frozen=True)
class IndexChecks:
    """The checks of the indices of a step that depend on its integer inputs alone.

    Parameters
    ----------
    indices : GraphModule
        Maps all tensors of a call, with the whole batch, to the indices.
    checks : sequence of IndexRange
        One for each index.
    """

    indices: fx.GraphModule
    checks: Sequence[IndexRange]

    def __call__(self, inputs: Sequence[Tensor]) -> None:
        """Raise `IndexRangeError` if an index of this batch is out of range."""
        with torch.no_grad():
            for index, check in zip(self.indices(*inputs), self.checks, strict=True):
                check_range(index, check.low, check.high, check.what)


def out_of_range(which: str, low: int, high: int, what: str) -> str:
    """The error message for an index outside of the range."""
    return (
        f"{which} is out of range in {what}: it has to be at least {low} and less than {high}. Check the inputs "
        "(a token or class that the model has no row for), or make the table larger"
    )


_CHECKED_INDEX = "checked_index(Tensor index, SymInt start, int low, int high, str what) -> Tensor"
register("pad(Tensor x, int dim, int size, int[] levels) -> Tensor", pad, _fake_pad)
register("unpad(Tensor x, int dim, int size, int[] levels) -> Tensor", unpad, _fake_unpad)
register(_CHECKED_INDEX, checked_index, lambda index, *_: torch.empty_like(index))
register(
    "checked_matrices(Tensor result, Tensor info, str what, bool is_matrix) -> Tensor",
    checked_matrices,
    lambda result, *_: torch.empty_like(result),
)
register(
    "asserted(Tensor value, Tensor flags, bool expected, str message) -> Tensor",
    asserted,
    lambda value, *_: torch.empty_like(value),
)
