"""Calls of a step: all ranks pass what it takes, and what was meant by it, or all of them raise.

Each call begins with one small collective, in which a rank whose call is not the compiled one tells the others, as
these would wait for it in the step's own collectives. In the first calls a hash of each input is exchanged besides: it
shows whether ranks that should pass the same do so.
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

from shardweave.distributed import RuntimeMesh, collective, control_of
from shardweave.ir import InputError, ParallelError, StepSpec, ValueSpec
from shardweave.ops import IndexChecks
from shardweave.runtime.inputs import LocalBatch, checked, localized

Batch = Literal["global", "local"]
"""The meaning of a call's batch: the global batch (or this rank's part of it), or this rank's own samples."""

def group_of_calls(mesh: RuntimeMesh) -> dist.ProcessGroup | None:
    """The group in which all ranks agree on calls; None where no other rank runs. Collective at the first time."""
    groups = control_of(mesh)
    return None if groups is None else groups.exchange


@dataclass(frozen=True)
class _Report:
    """The report of one rank on its call: its error, how it runs the step, and the hashes of its inputs."""

    error: str | None
    kind: type[ParallelError]
    running: Mapping[str, bool]
    hashes: tuple[tuple[str, str], ...] = ()


@dataclass
class Calls:
    """The inputs of a step's calls, on which the ranks agree.

    Parameters
    ----------
    spec : StepSpec
    mesh : RuntimeMesh
    group : ProcessGroup, optional
        Of `group_of_calls`.
    local : LocalBatch, optional
        Where each rank passes its own samples; None where ranks pass the global batch, or their part of it.
    checks : int, optional
        In how many calls hashes are compared; None for all of them. Where it is negative, ranks do not agree at all.
    indices : IndexChecks, optional
        What indices among the inputs are checked for, on a CPU; a GPU does it itself.
    """

    spec: StepSpec
    mesh: RuntimeMesh
    group: dist.ProcessGroup | None
    local: LocalBatch | None
    checks: int | None
    indices: IndexChecks | None = None
    _done: int = field(default=0, init=False)

    @property
    def _agrees(self) -> bool:
        return self.group is not None and ranks_agree(self.checks)

    def fresh(self) -> Calls:
        """The checks of a copy of the module."""
        return Calls(self.spec, self.mesh, self.group, self.local, self.checks, self.indices)

    def __call__(
        self, flatten: Callable[[], Sequence[object]], running: Callable[[], Mapping[str, bool]]
    ) -> list[torch.Tensor]:
        """This rank's part of each input. Collective.

        Parameters
        ----------
        flatten : callable
            Gives the tensors of the call; it may raise.
        running : callable
            How this rank runs the step, which has to be the same on all of them; it may raise.

        Raises
        ------
        InputError
            On all ranks, if a tensor on one of them has another shape or dtype than the step was compiled for, or if
            ranks pass different tensors where they should pass the same.
        IndexRangeError
            On all ranks, if an index on one of them is out of range.
        """
        values: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        caught: Exception | None = None
        state: Mapping[str, bool] = {}
        try:
            state = running()
            shapes = None if self.local is None else [self.local.shape(spec) for spec in self.spec.inputs]
            values = checked(flatten(), self.spec.inputs, self.mesh.device_type, shapes)
            self._check_indices(values)
            parts = [] if self.local is not None else self._localized(values)
        except Exception as error:  # whatever it is, the other ranks have to hear of it
            if not self._agrees:
                raise
            caught = error
        if self._agrees:
            self._agree(values, parts, state, caught)
        if self.local is None:
            return parts
        return self._localized(self.local.parts(values))

    def _check_indices(self, values: Sequence[torch.Tensor]) -> None:
        """IndexRangeError where an index is out of range. Of a part of the batch, copies stand for the other parts."""
        if self.indices is None or self.mesh.device_type != "cpu":
            return
        whole = []
        for value, spec in zip(values, self.spec.inputs, strict=True):
            shape = spec.layout.global_shape
            if value.is_floating_point() or value.is_complex():  # which no index is made of
                value = value.new_empty(()).expand(shape)
            elif tuple(value.shape) != shape:
                value = value.repeat([size // length for size, length in zip(shape, value.shape, strict=True)])
            whole.append(value)
        self.indices(whole)

    def _localized(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        coordinates = self.spec.mesh.coordinates(self.mesh.rank)
        return [localized(value, spec, coordinates) for value, spec in zip(values, self.spec.inputs, strict=True)]

    def _agree(
        self,
        values: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        running: Mapping[str, bool],
        caught: Exception | None,
    ) -> None:
        hashing = self.checks is None or self._done < self.checks
        self._done += 1
        flags = (hashing, *running.values())
        code = 0 if caught is not None else 1 + sum(flag << place for place, flag in enumerate(flags))
        if _same_on_all_ranks(code, self.group) and code and not hashing:
            return
        hashes = self._hashes(values, parts) if hashing and caught is None else ()
        if caught is None:
            mine = _Report(None, ParallelError, running, hashes)
        elif isinstance(caught, ParallelError):
            mine = _Report(str(caught), type(caught), running)
        else:
            mine = _Report(f"{type(caught).__name__}: {caught}", ParallelError, running)
        reports: list[Any] = [None] * dist.get_world_size(self.group)
        with collective("comparing the inputs of a call", self.group):
            dist.all_gather_object(reports, mine, group=self.group)
        self._refuse_failed(reports, caught)
        self._refuse_unlike(reports)
        self._refuse_other_values(reports)

    def _refuse_failed(self, reports: Sequence[_Report], caught: Exception | None) -> None:
        ranks = _by(report.error for report in reports)
        failed = {error: which for error, which in ranks.items() if error is not None}
        if not failed:
            return
        if caught is not None and len(ranks) == 1:
            raise caught
        told = "; ".join(f"on {_ranks(which)}: {error}" for error, which in failed.items())
        kinds = {report.kind for report in reports if report.error is not None}
        kind = kinds.pop() if len(kinds) == 1 else ParallelError
        raise kind(f"no rank runs this call, as it fails {told}") from caught

    def _refuse_unlike(self, reports: Sequence[_Report]) -> None:
        for what in reports[0].running:
            ranks = _by(report.running[what] for report in reports)
            if len(ranks) > 1:
                raise ParallelError(
                    f"{_ranks(ranks[True])} call the step {what}, and {_ranks(ranks[False])} do not, so that their "
                    "collectives would not meet: all ranks call it in the same way, in the same order"
                )

    def _hashes(self, values: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> tuple[tuple[str, str], ...]:
        """For each input the hash of the passed value, if that is global, and the hash of this rank's part."""
        if self.local is not None:
            return tuple((_hash(value), "") for value in values)
        pairs = zip(values, parts, self.spec.inputs, strict=True)
        return tuple(
            (_hash(value) if tuple(value.shape) == spec.layout.global_shape else "", _hash(part))
            for value, part, spec in pairs
        )

    def _refuse_other_values(self, reports: Sequence[_Report]) -> None:
        """InputError where the ranks' hashes say that they do not mean the same global batch."""
        if not all(len(report.hashes) == len(self.spec.inputs) for report in reports):
            return
        same_everywhere = []
        for index, spec in enumerate(self.spec.inputs):
            found = {rank: report.hashes[index] for rank, report in enumerate(reports)}
            if self.local is not None:
                ranks = _by(whole for whole, _ in found.values())
                same_everywhere += [len(ranks) == 1] if spec.rows else []
                if not spec.rows and len(ranks) > 1:
                    raise InputError(
                        f'with batch="local" each rank passes its own samples, but the input {spec.name!r} has no '
                        "batch dimension, and must be the same on all ranks; "
                        f"{_listed(ranks.values())} pass different values. "
                        f"The inputs with a batch dimension are {self._having()}"
                    )
                continue
            whole = _by_key({rank: whole for rank, (whole, _) in found.items() if whole})
            if len(whole) > 1:
                raise InputError(self._meanings(spec, f"{_listed(whole.values())} pass different values of its global "
                                                      f"shape {spec.layout.global_shape}"))  # fmt: skip
            places: dict[tuple[int, ...], dict[int, str]] = {}
            for rank, (_, part) in found.items():
                at = tuple(axis.coordinate(rank) for axis in spec.layout.shard_axes)
                places.setdefault(at, {})[rank] = part
            for part_of in places.values():
                if len(unlike := _by_key(part_of)) > 1:
                    raise InputError(self._meanings(spec, f"{_listed(unlike.values())} have the same part of the batch "
                                                          "and pass different values for it"))  # fmt: skip
        if same_everywhere and all(same_everywhere) and self._done == 1:
            warnings.warn(
                f'all ranks pass the same batch ({self._having()}), but with batch="local" each rank passes samples '
                "of its own. Give the loader a sampler of this rank: parallel.sampler(dataset), or "
                "DistributedSampler(dataset, world_size, rank)",
                stacklevel=4,
            )

    def _having(self) -> str:
        return ", ".join(spec.name for spec in self.spec.inputs if spec.rows) or "none"

    def _meanings(self, spec: ValueSpec, what: str) -> str:
        return (
            f"the input {spec.name!r} is not the same global batch on all ranks: {what}. The model was compiled with "
            'batch="global": every rank passes the same whole batch, or its own part of it, as a loader gives it with '
            "sampler=parallel.sampler(dataset) and the global batch size over parallel.data_world_size (this rank's "
            "part is number parallel.data_rank). If each rank passes samples of its own, as under "
            'DistributedDataParallel, compile with batch="local" and with this rank\'s batch as the example'
        )


class AgreedCall(nn.Module):
    """The agreement of the ranks on a call, in a graph that takes whole inputs: they run the same graph on the same.

    Parameters
    ----------
    names : sequence of str
        What the user calls the inputs.
    graph_hash : str
        Of the generated step.
    group : ProcessGroup
        Of `group_of_calls`.
    checks : int, optional
        In how many calls inputs are compared; None for all of them.
    """

    def __init__(self, names: Sequence[str], graph_hash: str, group: dist.ProcessGroup, checks: int | None) -> None:
        super().__init__()
        self.names, self.graph_hash, self.group, self.checks = tuple(names), graph_hash, group, checks
        self._done = 0

    def forward(self, *values: torch.Tensor) -> None:
        """Collective. InputError on all ranks if one runs or compiles another graph, or passes different values."""
        agree_on_graph(self.group, self.graph_hash)
        if self.checks is not None and self._done >= self.checks:
            return
        self._done += 1
        found: list[Any] = [None] * dist.get_world_size(self.group)
        with collective("comparing the inputs of a call", self.group):
            dist.all_gather_object(found, tuple(map(_hash, values)), group=self.group)
        for index, name in enumerate(self.names):
            if len(ranks := _by(hashes[index] for hashes in found)) > 1:
                raise InputError(
                    f"the input {name!r} is not the same global batch on all ranks: {_listed(ranks.values())} pass "
                    "different values. A model under torch.compile takes the whole global batch on every rank. If each "
                    "rank reads samples of its own, as under DistributedDataParallel, use "
                    'shardweave.compile_parallel(..., batch="local"), or read the same on all ranks: see docs/inputs.md'
                )


def agree_on_graph(group: dist.ProcessGroup, graph_hash: str | None) -> None:
    """Make sure that all ranks run the same graph, or that all of them compile one. Collective.

    Without it a rank that ``torch.compile`` lets compile again, for a batch of another size, would wait for the others
    in the collectives of planning, and these for it in the collectives of the step.

    Parameters
    ----------
    group : ProcessGroup
        Of `group_of_calls`.
    graph_hash : str, optional
        Of the step that this rank runs; None where it compiles one.

    Raises
    ------
    InputError
        On all ranks, if they do not do the same.
    """
    code = 0 if graph_hash is None else 1 + int(graph_hash[:15], 16)
    if _same_on_all_ranks(code, group):
        return
    found: list[str | None] = [None] * dist.get_world_size(group)
    with collective("agreeing on a call of the model", group):
        dist.all_gather_object(found, graph_hash, group=group)
    told = [
        f"on {_ranks(ranks)} {'another graph is compiled' if each is None else f'the compiled graph {each[:8]} runs'}"
        for each, ranks in _by(found).items()
    ]
    raise InputError(
        f"the ranks do not call the model alike: {', '.join(told)}. A model under torch.compile takes the whole global "
        "batch on every rank: give each rank a batch of the same shapes and dtypes, in the same order, or use "
        'shardweave.compile_parallel(..., batch="local") for samples of its own: see docs/inputs.md'
    )


def ranks_agree(checks: int | None) -> bool:
    """Whether ranks agree on each call: not for negative `checks`, which `Options(check_inputs="never")` gives."""
    return checks is None or checks >= 0


def _same_on_all_ranks(code: int, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks have the same `code`, by one all-reduce of two numbers. Collective."""
    most = torch.tensor([code, -code])
    with collective("agreeing on a call of the model", group):
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most[0]) == -int(most[1])


def _hash(value: torch.Tensor) -> str:
    data = value.detach().contiguous().cpu().flatten().view(torch.uint8)
    return blake2b(data.numpy().data, digest_size=16).hexdigest()


def _by(values: Iterable[Any]) -> dict[Any, list[int]]:
    """The ranks that have each value."""
    return _by_key(dict(enumerate(values)))


def _by_key(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> _ranks([3]), _ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _listed(groups: Iterable[Sequence[int]]) -> str:
    """Groups of ranks in words.

    >>> _listed([[0, 1], [2], [3]])
    'ranks 0, 1 and rank 2 and rank 3'
    """
    listed = [_ranks(group) for group in groups]
    return " and ".join(listed[:4]) + (" and others" if len(listed) > 4 else "")
