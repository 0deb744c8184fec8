"""Checks of a step's calls: all ranks pass valid inputs in the same mode, or all of them raise an error.

Each call begins with one small collective. A rank whose inputs are wrong tells the others there, which would otherwise
wait for it in the step's collectives. It runs beside the forward, which waits for it before its first collective
(`Agreement`). In the first calls the ranks also exchange a hash of each input, to find ranks that pass other values
where all must pass the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shardweave.distributed import Failure, RuntimeMesh, all_gather_objects, collective, control_of, raise_failures
from shardweave.ir import InputError, ParallelError, StepSpec, ValueSpec
from shardweave.ops import IndexChecks
from shardweave.runtime.inputs import LocalBatch, check_inputs, local_input, wants_gradient

Batch = Literal["global", "local"]
"""The meaning of a call's batch: the global batch (or this rank's part of it), or this rank's own samples."""


def group_of_calls(mesh: RuntimeMesh) -> dist.ProcessGroup | None:
    """The group in which all ranks agree on calls; None without other ranks. Collective at the first call."""
    groups = control_of(mesh)
    return None if groups is None else groups.exchange


@dataclass(frozen=True)
class _Report:
    """The report of one rank on its call: its error, the call, how it runs the step, and the hashes of its inputs."""

    failure: Failure | None
    call: str
    running: Mapping[str, bool]
    hashes: tuple[tuple[str, str], ...] = ()


class Agreement:
    """What all ranks agree on while the forward of a call begins, until it is waited for by a call of this object.

    Graphs call it before their first collective. Nothing that a refused call must not change may be changed before.

    >>> agreement = Agreement()
    >>> agreement.begin(lambda: print("all ranks make the same call"))
    >>> agreement()
    all ranks make the same call
    >>> agreement()
    """

    def __init__(self) -> None:
        self.__name__ = "agreement"  # by which generated code calls it
        self._finish: Callable[[], object] | None = None

    def begin(self, finish: Callable[[], object]) -> None:
        """Let the next call of this object call `finish`, which raises an error on all ranks if they do not agree."""
        self()  # of a call that was interrupted
        self._finish = finish

    def __call__(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


@dataclass
class CallChecks:
    """Checks the inputs of each call, and agrees on them with the other ranks."""

    spec: StepSpec
    mesh: RuntimeMesh
    group: dist.ProcessGroup | None
    """The result of `group_of_calls`."""
    local: LocalBatch | None
    """For ``batch="local"``; None if ranks pass the global batch, or their part of it."""
    checked_calls: float
    """The number of calls in which hashes are compared. If negative, ranks do not agree at all."""
    indices: IndexChecks | None = None
    """Ranges of indices among the inputs. They are checked on a CPU; a GPU's kernels check them."""
    call: str = ""
    """The call that the step is for, in words: the shapes of its inputs, and the mode of the model."""
    agreement: Agreement = field(default_factory=Agreement)
    """For the forward to wait for."""
    takes_parts: bool = True
    """Whether a rank may pass its part of the global batch; not if the step has fewer parts than the first one."""
    _done: int = field(default=0, init=False)
    passes_parts: bool = field(default=False, init=False)
    """Whether the last call passed this rank's part of the global batch, and not the whole."""

    @property
    def _agrees(self) -> bool:
        return self.group is not None and ranks_agree(self.checked_calls)

    def __call__(
        self, flatten: Callable[[], Sequence[object]], running: Callable[[], Mapping[str, bool]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors of a call, and this rank's part of each, without autograd. Collective.

        `flatten` returns the tensors of the call, `running` the mode in which this rank runs the step, which all ranks
        must share. Both may raise an error.

        Raises
        ------
        InputError
            On all ranks, if a tensor on one of them has another shape or dtype than the step was compiled for, or if
            ranks pass different tensors where they should pass the same. Ranks without an error may raise it later,
            when they call `agreement`.
        IndexRangeError
            On all ranks, if an index on one of them is out of range; as above.
        """
        given: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        caught: Exception | None = None
        state: Mapping[str, bool] = {}
        try:
            state = running()
            given = self.checked(flatten())
            pairs = [(x, spec) for x, spec in zip(given, self.spec.inputs, strict=True) if spec.differentiable]
            state = {**state, **{f"with a gradient of {spec.name}": wants_gradient(x) for x, spec in pairs}}
            values = [value.detach() if value.requires_grad else value for value in given]
            self._check_indices(values)
            parts = [] if self.local is not None else self._localized(values)
        except Exception as error:  # the other ranks must be told, whatever the error is
            if not self._agrees:
                raise
            caught = error
        if self._agrees:
            hashing = self._done < self.checked_calls
            self._done += 1
            hashes = self._hashes(values, parts) if hashing and caught is None else ()
            finish = self._begin_to_agree(self.call, state, caught, hashes, hashing)
            exchanges = self.local is not None and self.local.exchanges  # of samples, which is collective
            if hashing or exchanges or caught is not None:
                self._check_values(finish())
            else:
                self.agreement.begin(finish)
        if self.local is None:
            self.passes_parts = self.are_parts(values)
            return given, parts
        return given, self._localized(self.local.parts(values))

    def checked(self, values: Sequence[object]) -> list[torch.Tensor]:
        """The tensors of a call; InputError if they are not those that the step was compiled for."""
        shapes = None
        if self.local is not None:
            shapes = [self.local.shape(spec) for spec in self.spec.inputs]
        elif not self.takes_parts:
            shapes = [spec.layout.global_shape for spec in self.spec.inputs]
        return check_inputs(values, self.spec.inputs, self.mesh.device_type, shapes)

    def are_parts(self, values: Sequence[torch.Tensor]) -> bool:
        """Whether these inputs, if there are any, are this rank's part of the global batch, and not the whole."""
        pairs = zip(values, self.spec.inputs)
        return self.local is None and any(tuple(value.shape) != spec.layout.global_shape for value, spec in pairs)

    def are_equal(self, call: str, values: Sequence[torch.Tensor]) -> bool:
        """Whether all ranks pass the same values in a `call`; False if they do not agree on calls. Collective."""
        if not self._agrees:
            return False
        hashes = tuple((_hash(value), "") for value in values)
        reports = self._agree(f"{call}, the size of a part of the batch", {}, None, hashes, True)
        return len({report.hashes for report in reports}) == 1

    def agree_to_compile(self, call: str, caught: Exception | None) -> None:
        """Agree that all ranks compile a step for the same `call`. Collective.

        Raises
        ------
        Exception
            `caught`, the error of this rank, or the error of another rank; InputError if ranks call the model with
            other inputs, or run a step that is compiled already.
        """
        if self._agrees:
            self._agree(f"{call}, which is to be compiled", {}, caught, (), False)
        elif caught is not None:
            raise caught

    def _check_indices(self, values: Sequence[torch.Tensor]) -> None:
        """Raise IndexRangeError if an index is out of range. A part of the batch is repeated to the global shape."""
        if self.indices is None or self.mesh.device_type != "cpu":
            return
        whole = []
        for value, spec in zip(values, self.spec.inputs, strict=True):
            shape = spec.layout.global_shape
            if value.is_floating_point() or value.is_complex():  # no index is made of it
                value = value.new_empty(()).expand(shape)
            elif tuple(value.shape) != shape:
                value = value.repeat([size // length for size, length in zip(shape, value.shape, strict=True)])
            whole.append(value)
        self.indices(whole)

    def _localized(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        coordinates = self.spec.mesh.coordinates(self.mesh.rank)
        return [local_input(value, spec, coordinates) for value, spec in zip(values, self.spec.inputs, strict=True)]

    def _agree(self, *what: Any) -> list[_Report]:
        return self._begin_to_agree(*what)()

    def _begin_to_agree(
        self,
        call: str,
        running: Mapping[str, bool],
        caught: Exception | None,
        hashes: tuple[tuple[str, str], ...],
        hashing: bool,
    ) -> Callable[[], list[_Report]]:
        """A function that returns the reports of all ranks, after checks; none where they need not exchange them."""
        # 1. One all-reduce. It is enough if all ranks make the same call in the same mode and no hashes are due.
        flags = (hashing, *running.values())
        digest = int(blake2b(call.encode(), digest_size=6).hexdigest(), 16) << len(flags)
        code = 0 if caught is not None else 1 + digest + sum(flag << place for place, flag in enumerate(flags))
        is_same = _begin_to_compare(code, self.group)

        def finish() -> list[_Report]:
            if is_same() and code and not hashing:
                return []
            # 2. Exchange errors, calls, modes and hashes.
            mine = _Report(None if caught is None else Failure.of(caught), call, running, hashes)
            with collective("comparing the inputs of a call", self.group):
                reports: list[_Report] = all_gather_objects(mine, self.group)
            raise_failures([report.failure for report in reports], caught, "no rank runs this call, as it fails")
            _check_calls(reports)
            self._check_modes(reports)
            return reports

        return finish

    def _check_modes(self, reports: Sequence[_Report]) -> None:
        for what in reports[0].running:
            ranks = _ranks_by_value(report.running[what] for report in reports)
            if len(ranks) > 1:
                raise ParallelError(
                    f"{_rank_text(ranks[True])} call the step {what}, and {_rank_text(ranks[False])} do not, so that "
                    "their collectives would not meet: all ranks call it in the same way, in the same order"
                )

    def _hashes(self, values: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> tuple[tuple[str, str], ...]:
        """For each input the hash of its value, if that is global, and the hash of this rank's part."""
        if self.local is not None:
            return tuple((_hash(value), "") for value in values)
        pairs = zip(values, parts, self.spec.inputs, strict=True)
        return tuple(
            (_hash(value) if tuple(value.shape) == spec.layout.global_shape else "", _hash(part))
            for value, part, spec in pairs
        )

    def _check_values(self, reports: Sequence[_Report]) -> None:
        """Raise InputError if the hashes show that the ranks do not pass the same global batch."""
        if not reports or not all(len(report.hashes) == len(self.spec.inputs) for report in reports):
            return
        same_everywhere = []
        for index, spec in enumerate(self.spec.inputs):
            found = {rank: report.hashes[index] for rank, report in enumerate(reports)}
            if self.local is not None:
                ranks = _ranks_by_value(whole for whole, _ in found.values())
                same_everywhere += [len(ranks) == 1] if spec.rows else []
                if not spec.rows and len(ranks) > 1:
                    raise InputError(
                        f'with batch="local" each rank passes its own samples, but the input {spec.name!r} has no '
                        "batch dimension, and must be the same on all ranks; "
                        f"{_all_text(ranks.values())} pass different values. "
                        f"The inputs with a batch dimension are {self._batched_names()}"
                    )
                continue
            whole = _group_ranks({rank: whole for rank, (whole, _) in found.items() if whole})
            if len(whole) > 1:
                shape = spec.layout.global_shape
                what = f"{_all_text(whole.values())} pass different values of its global shape {shape}"
                raise InputError(self._mismatch(spec, what))
            places: dict[tuple[int, ...], dict[int, str]] = {}
            for rank, (_, part) in found.items():
                at = tuple(axis.coordinate(rank) for axis in spec.layout.shard_axes)
                places.setdefault(at, {})[rank] = part
            for part_of in places.values():
                if len(ranks := _group_ranks(part_of)) > 1:
                    same_part = "have the same part of the batch and pass different values for it"
                    raise InputError(self._mismatch(spec, f"{_all_text(ranks.values())} {same_part}"))
        if same_everywhere and all(same_everywhere) and self._done == 1:
            warnings.warn(
                f'all ranks pass the same batch ({self._batched_names()}), but with batch="local" each rank passes '
                "samples of its own. Give the loader a sampler of this rank: parallel.sampler(dataset), or "
                "DistributedSampler(dataset, world_size, rank)",
                stacklevel=3,
            )

    def _batched_names(self) -> str:
        return ", ".join(spec.name for spec in self.spec.inputs if spec.rows) or "none"

    def _mismatch(self, spec: ValueSpec, what: str) -> str:
        return (
            f"the input {spec.name!r} is not the same global batch on all ranks: {what}. The model was compiled with "
            'batch="global": every rank passes the same whole batch, or its own part of it, as a loader gives it with '
            "sampler=parallel.sampler(dataset) and the global batch size over parallel.data_world_size (this rank's "
            "part is number parallel.data_rank). If each rank passes samples of its own, as under "
            'DistributedDataParallel, compile with batch="local" and with this rank\'s batch as the example'
        )


def _check_calls(reports: Sequence[_Report]) -> None:
    """Raise InputError if ranks make different calls: with inputs of other shapes, or in another mode."""
    ranks = _ranks_by_value(report.call for report in reports)
    if len(ranks) > 1:
        told = "; ".join(f"{_rank_text(which)} with {call}" for call, which in [*ranks.items()][:4])
        raise InputError(
            f"the ranks call the model with different inputs: {told}. All ranks pass inputs of the same shapes, and "
            "call the model in the same mode: a loader that gives one rank a smaller last batch needs drop_last=True, "
            "or a sampler that pads (parallel.sampler(dataset))"
        )


class AgreedCall(nn.Module):
    """Checks that all ranks run the same graph on the same inputs; part of a graph that takes whole inputs.

    `names` are the user's names of the inputs, which are compared in the first `checked_calls` calls.
    """

    def __init__(self, names: Sequence[str], graph_hash: str, group: dist.ProcessGroup, checked_calls: float) -> None:
        super().__init__()
        self.names, self.graph_hash, self.group, self.checked_calls = tuple(names), graph_hash, group, checked_calls
        self._done = 0

    def forward(self, *values: torch.Tensor) -> None:
        """Raise InputError on all ranks if one runs or compiles another graph, or passes other values. Collective."""
        agree_on_graph(self.group, self.graph_hash)
        if self._done >= self.checked_calls:
            return
        self._done += 1
        with collective("comparing the inputs of a call", self.group):
            found = all_gather_objects(tuple(map(_hash, values)), self.group)
        for index, name in enumerate(self.names):
            if len(ranks := _ranks_by_value(hashes[index] for hashes in found)) > 1:
                raise InputError(
                    f"the input {name!r} is not the same global batch on all ranks: {_all_text(ranks.values())} pass "
                    "different values. A model under torch.compile takes the whole global batch on every rank. If each "
                    "rank reads samples of its own, as under DistributedDataParallel, use "
                    'shardweave.compile_parallel(..., batch="local"), or read the same on all ranks: see docs/inputs.md'
                )


def agree_on_graph(group: dist.ProcessGroup, graph_hash: str | None) -> None:
    """Check that all ranks run the same graph, or that all of them compile one. Collective.

    Otherwise a rank that compiles again, for a batch of another size, would wait for the others in the collectives of
    planning, and they would wait for it in the collectives of the step. `graph_hash` is None on a rank that compiles.

    Raises
    ------
    InputError
        On all ranks, if they do not do the same.
    """
    code = 0 if graph_hash is None else 1 + int(graph_hash[:15], 16)
    if _begin_to_compare(code, group)():
        return
    with collective("agreeing on a call of the model", group):
        found = all_gather_objects(graph_hash, group)
    told = []
    for each, ranks in _ranks_by_value(found).items():
        does = "another graph is compiled" if each is None else f"the compiled graph {each[:8]} runs"
        told.append(f"on {_rank_text(ranks)} {does}")
    raise InputError(
        f"the ranks do not call the model alike: {', '.join(told)}. A model under torch.compile takes the whole global "
        "batch on every rank: give each rank a batch of the same shapes and dtypes, in the same order, or use "
        'shardweave.compile_parallel(..., batch="local") for samples of its own: see docs/inputs.md'
    )


def ranks_agree(checked_calls: float) -> bool:
    """Whether ranks agree on each call. `checked_calls` is negative for ``Options(check_inputs="never")``."""
    return checked_calls >= 0


def _begin_to_compare(code: int, group: dist.ProcessGroup | None) -> Callable[[], bool]:
    """Begin to compare a `code` over the ranks, by one all-reduce; the result returns whether all have the same."""
    most, doing = torch.tensor([code, -code]), "agreeing on a call of the model"
    with collective(doing, group):
        work = dist.all_reduce(most, dist.ReduceOp.MAX, group=group, async_op=True)

    def is_same() -> bool:
        with collective(doing, group):
            work.wait()
        return int(most[0]) == -int(most[1])

    return is_same


def _hash(value: torch.Tensor) -> str:
    data = value.detach().contiguous().cpu().flatten().view(torch.uint8)
    return blake2b(data.numpy().data, digest_size=16).hexdigest()


def _ranks_by_value(values: Iterable[Any]) -> dict[Any, list[int]]:
    """The ranks of each value; `values` are in the order of ranks."""
    return _group_ranks(dict(enumerate(values)))


def _group_ranks(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """The ranks of each value; `values` are by rank."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def _rank_text(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> _rank_text([3]), _rank_text([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _all_text(groups: Iterable[Sequence[int]]) -> str:
    """Groups of ranks in words.

    >>> _all_text([[0, 1], [2], [3]])
    'ranks 0, 1 and rank 2 and rank 3'
    """
    listed = [_rank_text(group) for group in groups]
    return " and ".join(listed[:4]) + (" and others" if len(listed) > 4 else "")
