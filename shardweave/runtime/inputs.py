"""The inputs of a call: the global batch, this rank's part of it, or this rank's own samples.

The global batch and this rank's part of it are told apart by shape. With ``batch="local"`` each rank passes its own
samples, as under DistributedDataParallel, whatever the plan is. The global batch is all ranks' samples together. Each
rank computes one part of it, and ranks that compute the same part, such as tensor parallel ones, gather their samples
for it. The outputs of each sample go back to the rank that passed it.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten

from shardweave.distributed import RuntimeMesh, collective
from shardweave.ir import (
    PLAIN_TYPES,
    Axis,
    Digit,
    InputError,
    Layout,
    ParallelError,
    StepSpec,
    ValueSpec,
    axes_size,
    canonical_arguments,
    dtype_name,
    leaf_names,
    normalise,
    plain,
)
from shardweave.runtime.parameters import local_part, ranges
from shardweave.runtime.tensor import distribute, gather


@dataclass(frozen=True)
class CallSignature:
    """What tells calls apart that need different steps.

    Parameters
    ----------
    structure : TreeSpec
        Of the arguments.
    leaves : tuple
        The shape and dtype of each tensor among the arguments, and the other values.
    modes : tuple
        Whether the model is in training mode, the structure of its module tree, what autocast casts to, the default
        dtype, and whether each submodule is in training mode.
    trains : bool
        Whether gradients are wanted.
    """

    structure: TreeSpec
    leaves: tuple[object, ...]
    modes: tuple[Hashable, ...]
    trains: bool

    @classmethod
    def of(
        cls,
        signature: inspect.Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        modes: tuple[Hashable, ...],
        parameters: Iterable[torch.Tensor],
    ) -> CallSignature:
        """The signature of a call of a model with these `parameters`, whose forward has this `signature`."""
        leaves, structure = tree_flatten(canonical_arguments(signature, args, kwargs))
        described = (
            (tuple(leaf.shape), leaf.dtype, leaf.device.type, leaf.requires_grad) if isinstance(leaf, torch.Tensor)
            else (type(leaf), plain(leaf))
            for leaf in leaves
        )  # fmt: skip
        return cls(structure, tuple(described), modes, any(map(wants_gradient, (*parameters, *leaves))))

    def text(self, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The call in words, such as ``"tokens (8, 128), flag=True in training mode"``."""
        leaves, _ = tree_flatten(canonical_arguments(signature, args, kwargs))
        names = leaf_names(signature, args, kwargs)
        wanted = [name for name, leaf in zip(names, leaves, strict=True) if self.trains and wants_gradient(leaf)]
        return call_text(names, leaves, bool(self.modes[0]), self.trains, wanted)


def wants_gradient(leaf: object) -> bool:
    """Whether a call gives this argument a gradient."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()


def call_text(
    names: Sequence[str], leaves: Sequence[object], training: bool, trains: bool, wanted: Sequence[str] = ()
) -> str:
    """A call in words; a leaf is a tensor, the shape of one, or another value. `wanted` get gradients themselves.

    >>> call_text(["tokens", "flag"], [torch.Size([8, 128]), True], False, False)
    'tokens (8, 128), flag=True in evaluation mode without gradients'
    >>> call_text(["x"], [torch.Size([8, 128])], True, True, ["x"])
    'x (8, 128) in training mode with a gradient of x'
    """
    shapes = [leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    told = [
        f"{name} {tuple(leaf)}"
        if isinstance(leaf, torch.Size)
        else f"{name}={leaf!r}"
        if isinstance(leaf, PLAIN_TYPES)
        else f"{name} (a {type(leaf).__name__})"
        for name, leaf in zip(names, shapes, strict=True)
    ]
    of = f" with a gradient of {', '.join(wanted)}" if wanted else ""
    mode = f"{'training' if training else 'evaluation'} mode{of if trains else ' without gradients'}"
    cast = "".join(f" under autocast of {kind} to {dtype_name(dtype)}" for kind, dtype in autocast_dtypes())
    default = torch.get_default_dtype()
    made = "" if default is torch.float32 else f" with the default dtype {dtype_name(default)}"
    return f"{', '.join(told) or 'no inputs'} in {mode}{cast}{made}"


def autocast_dtypes() -> tuple[tuple[str, torch.dtype], ...]:
    """The kinds of devices for which autocast is on now, each with the dtype that it casts to.

    >>> with torch.autocast("cpu"):
    ...     autocast_dtypes()
    (('cpu', torch.bfloat16),)
    """
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


def check_inputs(
    values: Sequence[object],
    specs: Sequence[ValueSpec],
    device_type: str = "cpu",
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> list[torch.Tensor]:
    """The tensors of a call; InputError if they are not those that the step was compiled for.

    Parameters
    ----------
    shapes : sequence of tuple of int, optional
        The shape of each on this rank; by default the global shape, or that of this rank's part.

    Examples
    --------
    >>> from shardweave.ir import Axis, Layout
    >>> tokens = ValueSpec("tokens", Layout(((Axis("gpu0", 2), 2), (3,))), "int64")
    >>> (value,) = check_inputs([torch.arange(12).view(4, 3)], [tokens])
    >>> local_input(value, tokens, {"gpu0": 1})
    tensor([[ 6,  7,  8],
            [ 9, 10, 11]])
    >>> check_inputs([torch.zeros(3, 3, dtype=torch.int64)], [tokens])
    Traceback (most recent call last):
    shardweave.ir.errors.InputError: input 'tokens' must have the global shape (4, 3) or this rank's part of it, \
(2, 3), but has (3, 3). The step was compiled for these shapes: pass one of them, or compile for the new one
    """
    if len(values) != len(specs):
        names = ", ".join(spec.name for spec in specs)
        raise InputError(f"the step takes {len(specs)} tensors ({names}), but the call passes {len(values)}")
    found = []
    for index, (value, spec) in enumerate(zip(values, specs, strict=True)):
        tensor = _typed(value, spec, device_type)
        shape, layout = tuple(tensor.shape), spec.layout
        if shapes is None and shape not in (layout.local_shape, layout.global_shape):
            raise InputError(
                f"input {spec.name!r} must have the global shape {layout.global_shape} or this rank's part of it, "
                f"{layout.local_shape}, but has {shape}. The step was compiled for these shapes: pass one of them, or "
                "compile for the new one"
            )
        if shapes is not None and shape != shapes[index]:
            of = (
                f"this rank's part of the global {layout.global_shape}"
                if spec.rows
                else "without a batch dimension, the same on all ranks"
            )
            raise InputError(
                f"input {spec.name!r} must have the shape {shapes[index]} ({of}), as the step was compiled with "
                f'batch="local", but has {shape}: pass that shape on every rank (drop_last=True leaves out a smaller '
                "last batch), or compile for the new one"
            )
        found.append(tensor)
    return found


def local_input(value: torch.Tensor, spec: ValueSpec, coordinates: Mapping[str, int]) -> torch.Tensor:
    """This rank's contiguous part of a checked input, which is global or that part."""
    if tuple(value.shape) == spec.layout.local_shape:  # also the global shape of a replicated input
        return value.contiguous()
    return local_part(value, spec.layout, coordinates).contiguous()


def _typed(value: object, spec: ValueSpec, device_type: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"input {spec.name!r} must be a tensor, but is a {type(value).__name__}: {value!r}")
    check_tensor(value, spec, device_type)
    return value


def check_tensor(value: torch.Tensor, spec: ValueSpec, device_type: str) -> None:
    """Raise InputError if a tensor has another dtype or device than a step takes, or a gradient that it lacks."""
    if dtype_name(value.dtype) != spec.dtype:
        raise InputError(
            f"input {spec.name!r} must have dtype {spec.dtype}, but has {dtype_name(value.dtype)}: convert it with "
            f".to(torch.{spec.dtype}), or compile for the new dtype"
        )
    if value.device.type != device_type:
        raise InputError(f"input {spec.name!r} must be on {device_type}, but is on {value.device}: move it there")
    if wants_gradient(value) and not spec.differentiable:
        raise InputError(
            f"input {spec.name!r} requires a gradient, but this step was compiled for one that does not: detach it, or "
            "compile the model with an example input that requires a gradient"
        )


functional = torch.ops._c10d_functional


class LocalBatch:
    """Brings the samples that each rank passes to the ranks that compute them, and the outputs back.

    In the batch of the step, the samples of a rank stay together, in their order, as far as the plan's parts of the
    batch allow. The samples of ranks that compute the same part are neighbours. All ranks must make this object
    together. If `whole`, the step and a call return whole outputs, in the order of the ranks.

    Raises
    ------
    ParallelError
        If a part of the batch ends inside a sample, or a differentiable output is sharded and has no batch dimension.
    """

    def __init__(self, spec: StepSpec, mesh: RuntimeMesh, whole: bool) -> None:
        self.spec, self.mesh, self.whole = spec, mesh, whole
        self.ranks = range(spec.mesh.world_size)
        batched = [value for value in spec.inputs if value.rows]
        if not batched:
            raise ParallelError("the step has no input with a batch dimension, of which ranks could pass parts")
        spread = next((value for value in batched if value.layout.shard_axes), batched[0])
        digits = _digits_in_samples(spread)
        self.samples = spread.layout.global_shape[0] // spread.rows
        self._own = {rank: self._samples_of(rank, digits) for rank in self.ranks}
        self.exchanges = any(self._copy_axes(value.layout) for value in batched)
        """Whether several ranks compute the same samples, and are to be given them."""
        for value in batched:
            _digits_in_samples(value)
        for output in spec.outputs:
            if output.differentiable and output.layout.shard_axes and not self.has_own_rows(output):
                raise ParallelError(
                    f"the output {output.name}, from which a loss is computed, has the layout {output.layout}, so that "
                    'no rank can be given the rows of its own batch: compile with Options(outputs="part") or "whole"'
                )
        axes = {self._copy_axes(value.layout) for value in (*batched, *filter(self.has_own_rows, spec.outputs))}
        for names in sorted(axes, key=lambda found: [axis.name for axis in found]):
            if names:
                mesh.group_over(names)

    def shape(self, value: ValueSpec) -> tuple[int, ...]:
        """The shape of an input on each rank."""
        whole = value.layout.global_shape
        return (whole[0] // len(self.ranks), *whole[1:]) if value.rows else whole

    def parts(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's part of each input with a batch dimension; the other inputs unchanged."""
        batched = [index for index, spec in enumerate(self.spec.inputs) if spec.rows]
        axes = [self._copy_axes(self.spec.inputs[index].layout) for index in batched]
        gathered = self._all_gather([values[index] for index in batched], axes)
        parts = list(values)
        for index, value, over in zip(batched, gathered, axes, strict=True):
            spec = self.spec.inputs[index]
            needed = _sample_order(_digits_in_samples(spec), self._coordinates(self.mesh.rank))
            parts[index] = _select_rows(value, self._samples_of_group(over), needed, spec.rows).contiguous()
        return parts

    def returned(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of a call. Outputs with a batch dimension have the rows of this rank's samples."""
        given = list(values)
        own = [index for index, spec in enumerate(self.spec.outputs) if self.has_own_rows(spec) and not self.whole]
        moved = [index for index in own if self.spec.outputs[index].differentiable and given[index].requires_grad]
        if moved:
            for index, value in zip(moved, _OwnRowsFunction.apply(self, moved, *(given[index] for index in moved))):  # type: ignore[no-untyped-call]
                given[index] = value
        for index, spec in enumerate(self.spec.outputs):
            if index in own and index not in moved:
                given[index] = self.own_rows(given[index], spec)
            elif self.whole and spec.rows and not spec.layout.shard_axes:
                order = [sample for rank in self.ranks for sample in self._own[rank]]
                given[index] = _select_rows(given[index], range(self.samples), order, spec.rows)
            elif spec.layout.shard_axes and index not in own:
                given[index] = distribute(given[index], spec.layout, self.mesh)
        return given

    def own_rows(self, value: torch.Tensor, spec: ValueSpec) -> torch.Tensor:
        """The rows of a value that belong to this rank's samples."""
        have = _sample_order(_digits_in_samples(spec), self._coordinates(self.mesh.rank))
        return _select_rows(value, have, self._own[self.mesh.rank], spec.rows)

    def tangents(self, values: Sequence[torch.Tensor], specs: Sequence[ValueSpec]) -> list[torch.Tensor]:
        """Tangents of the step's outputs from tangents of each rank's rows, averaged over all ranks.

        The step itself averages over the axes that shard an output; this averages over the others.
        """
        axes = [self._copy_axes(spec.layout) for spec in specs]
        found = []
        for value, spec, over in zip(self._all_gather(values, axes), specs, axes, strict=True):
            needed = _sample_order(_digits_in_samples(spec), self._coordinates(self.mesh.rank))
            found.append(_select_rows(value, self._samples_of_group(over), needed, spec.rows) / axes_size(over))
        return found

    def input_gradient(self, gradient: torch.Tensor, spec: ValueSpec) -> torch.Tensor:
        """The gradient of this rank's samples, from the gradient of the part of an input that this rank computes."""
        return self.own_rows(gradient, spec) if spec.rows else gradient

    def has_own_rows(self, spec: ValueSpec) -> bool:
        """Whether an output can be returned as the rows of each rank's own samples."""
        if not spec.rows or not set(spec.layout.shard_axes) <= set(self.spec.data_axes):
            return False
        in_front = {digit for digit in spec.layout.dims[0] if isinstance(digit, Axis)}
        return in_front == set(spec.layout.shard_axes) and _has_whole_samples(spec)

    def _copy_axes(self, layout: Layout) -> tuple[Axis, ...]:
        """The axes along which ranks hold the same part of a value."""
        return tuple(axis for axis in self.mesh.mesh.innermost_first if axis not in layout.shard_axes)

    def _coordinates(self, rank: int) -> Mapping[str, int]:
        return self.spec.mesh.coordinates(rank)

    def _samples_of(self, rank: int, digits: tuple[Digit, ...]) -> list[int]:
        """The indices in the global batch of the samples that a rank passes."""
        axes = self._copy_axes(Layout((digits,)))
        part = _sample_order(digits, self._coordinates(rank))
        at, each = self.spec.mesh.group_ranks(axes, rank).index(rank), len(part) // axes_size(axes)
        return part[at * each : (at + 1) * each]

    def _samples_of_group(self, axes: Sequence[Axis]) -> list[int]:
        """The samples that the ranks of this rank's group over `axes` pass, in order."""
        group = self.spec.mesh.group_ranks(axes, self.mesh.rank)
        return [sample for rank in group for sample in self._own[rank]]

    def _all_gather(self, values: Sequence[torch.Tensor], axes: Sequence[tuple[Axis, ...]]) -> list[torch.Tensor]:
        """All-gather each value over its axes, along the first dimension.

        Values with the same axes are sent as one buffer of bytes.
        """
        found = list(values)
        for over in dict.fromkeys(axes):
            if not over:
                continue
            which = [index for index, each in enumerate(axes) if each == over]
            flat = [values[index].contiguous().flatten().view(torch.uint8) for index in which]
            mine = torch.cat(flat) if len(flat) > 1 else flat[0]
            count = axes_size(over)
            group = self.mesh.group_over(over)
            with collective("gathering the samples of the ranks that compute the same", group):
                everything = functional.wait_tensor(
                    functional.all_gather_into_tensor(mine, count, group.group_name)
                )
            pieces = torch.split(everything.view(count, -1), [len(part) for part in flat], dim=1)
            for index, piece in zip(which, pieces, strict=True):
                value = values[index]
                whole = piece.clone(memory_format=torch.contiguous_format).flatten().view(value.dtype)
                found[index] = whole.view(count * value.shape[0], *value.shape[1:])
        return found


@dataclass(frozen=True)
class InputGradients:
    """Brings the gradients of a step's inputs to the ranks and the shapes in which they were passed.

    A whole input, the same on all ranks, gets the gradient of the global loss, on all ranks. A rank's part of the batch
    gets the gradient of that rank's loss, as under DistributedDataParallel. Where the loss is the global one, because
    the model computes it, the part gets that one's gradient. If the part comes out of another parallel module, whose
    backward averages over ranks, it is multiplied by their number, so that the parameters there get the same gradient.
    """

    spec: StepSpec
    mesh: RuntimeMesh
    local: LocalBatch | None

    def averaging_ranks(self, output: int) -> int:
        """The number of ranks over which gradients of losses of this output are averaged."""
        spec = self.spec.outputs[output]
        if self.local is not None:
            return len(self.local.ranks) if self.local.has_own_rows(spec) and not self.local.whole else 1
        return axes_size(axis for axis in spec.layout.shard_axes if axis in self.spec.data_axes)

    def __call__(self, gradient: torch.Tensor, index: int, shape: Sequence[int], ranks: int) -> torch.Tensor:
        """The gradient of the input `index`, which was passed with `shape`, from that of the part in the step.

        `ranks` is the number of ranks over which the losses, or an earlier parallel module, average. Collective.
        """
        spec = self.spec.inputs[index]
        if self.local is not None:
            return self.local.input_gradient(gradient, spec) * (ranks if spec.rows else 1)
        if not spec.layout.shard_axes:
            return gradient
        if tuple(shape) == spec.layout.local_shape:
            return gradient * ranks
        return gather(gradient, spec.layout, self.mesh, f"the gradient of {spec.name}")


class _OwnRowsFunction(torch.autograd.Function):
    """Selects this rank's rows of the outputs. It is one node for all outputs, so that ranks gather in one order."""

    @staticmethod
    def forward(ctx: Any, batch: LocalBatch, which: Sequence[int], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.batch, ctx.specs = batch, [batch.spec.outputs[index] for index in which]
        ctx.set_materialize_grads(False)
        return tuple(batch.own_rows(value, spec).clone() for value, spec in zip(values, ctx.specs, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        known = [index for index, tangent in enumerate(tangents) if tangent is not None]
        found: list[torch.Tensor | None] = [None] * len(tangents)
        given = [tangent for tangent in tangents if tangent is not None]
        for index, tangent in zip(known, ctx.batch.tangents(given, [ctx.specs[index] for index in known])):
            found[index] = tangent
        return None, None, *found


def _has_whole_samples(spec: ValueSpec) -> bool:
    """Whether all parts of the batch consist of whole samples."""
    digits = spec.layout.dims[0]
    last = digits[-1] if digits and isinstance(digits[-1], int) else 1
    return last % spec.rows == 0


def _digits_in_samples(spec: ValueSpec) -> tuple[Digit, ...]:
    """The digits of a value's first dimension, counted in samples."""
    if not _has_whole_samples(spec):
        raise ParallelError(
            f"{spec.name} has {spec.rows} rows for each sample and the layout {spec.layout}: a part of the batch ends "
            "inside a sample. Use a larger batch on each rank, or pass this input with its samples in a dimension "
            "of their own"
        )
    digits = spec.layout.dims[0]
    if digits and isinstance(digits[-1], int):
        return normalise([*digits[:-1], digits[-1] // spec.rows])
    return digits


def _sample_order(digits: tuple[Digit, ...], coordinates: Mapping[str, int]) -> list[int]:
    """The samples of the part at `coordinates`, in the order in which it holds them."""
    (runs,) = ranges(Layout((digits,)), coordinates)
    return [sample for run in runs for sample in range(run.start, run.stop)]


def _select_rows(value: torch.Tensor, have: Sequence[int], want: Sequence[int], rows: int) -> torch.Tensor:
    """Select the rows of the samples `want` from a value with the rows of the samples `have`.

    >>> _select_rows(torch.arange(6), [4, 0, 2], [0, 2], 2)
    tensor([2, 3, 4, 5])
    """
    place = {sample: index for index, sample in enumerate(have)}
    order = [place[sample] for sample in want]
    if order == list(range(order[0], order[0] + len(order))):
        return value if len(order) == len(have) else value[order[0] * rows : (order[0] + len(order)) * rows]
    at = torch.tensor(order, device=value.device)
    picked = value.reshape(len(have), rows, *value.shape[1:]).index_select(0, at)
    return picked.flatten(0, 1)
