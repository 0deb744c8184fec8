"""Checks of a step's calls: all ranks pass valid inputs in the same mode, or all of them raise an error.

Each call begins with one small collective. A rank whose inputs are wrong tells the others there, which would otherwise
wait for it in the step's collectives. It runs beside the forward, which waits for it before its first collective
(`Agreement`). In the first calls the ranks also exchange a hash of each input, to find ranks that pass other values
where all must pass the same.

Calls and backwards that no generated step can serve, such as those of second derivatives, are refused
(`refuse_transforms`, `check_backward`).

A plan is as good as the figures of its cluster. Where these are of another machine, or were measured while it was busy,
the plan may be far from the best, and nothing else would tell. So the first training steps are timed
(`PredictionCheck`), and a warning says where they differ much from what the plan predicts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

from shardweave.distributed import Failure, RuntimeMesh, all_gather_objects, collective, control_of, raise_failures
from shardweave.ir import InputError, ParallelError, StepSpec, ValueSpec, readable_seconds
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


_RUN_TWICE = (
    "this step has been run backward already, and what it saved is freed: pass retain_graph=True to each backward but "
    "the last, call the module again, or add the losses up before one backward"
)
_USE_TORCH_FUNC = (
    "compute what needs such derivatives inside the model's forward, with torch.autograd.grad or torch.func "
    "(torch.func.grad, torch.func.jvp), which are captured, and compile the model with it; docs/how-it-works.md has an "
    "example"
)


def refuse_transforms(values: Callable[[], Iterable[object]]) -> None:
    """Raise ParallelError for a call inside a transform of torch.func, or with tensors of forward-mode autograd.

    `values` returns the arguments of the call, and the tensors of the module.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        raise ParallelError(
            "a compiled step is called inside a transform of torch.func (grad, vjp, jvp, vmap, hessian, ...), which "
            f"cannot see into it: call it outside of the transform, or {_USE_TORCH_FUNC}"
        )
    if forward_ad._current_level < 0:
        return
    for tensor in values():
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise ParallelError(
                "a compiled step is called with a dual tensor of torch.autograd.forward_ad, but it has a backward "
                f"and no forward-mode derivative: {_USE_TORCH_FUNC}"
            )


def check_backward(
    spec: StepSpec, tangents: Sequence[torch.Tensor | None], saved: object, lost: Sequence[str]
) -> None:
    """Raise ParallelError for second derivatives, batched, unknown or `lost` gradients, or a second backward."""
    if torch.is_grad_enabled():  # create_graph=True
        raise ParallelError(
            "create_graph=True asks for gradients that can be differentiated again, but the backward of a compiled "
            "step is a generated graph without a derivative: second-order terms, such as those of a gradient penalty "
            "or a Hessian-vector product, would be lost. If gradients are all you need, leave it out; else "
            f"{_USE_TORCH_FUNC}"
        )
    functorch = torch._C._functorch
    batched = any(tangent is not None and functorch.is_legacy_batchedtensor(tangent) for tangent in tangents)
    if batched or functorch.maybe_current_level() is not None:
        raise ParallelError(
            "the backward of a compiled step is run inside vmap (is_grads_batched=True, or vectorize=True of "
            "torch.autograd.functional), which cannot see into it: run one backward after another, or "
            f"{_USE_TORCH_FUNC}"
        )
    pairs = zip(tangents, spec.outputs, strict=True)
    if asked := [output.name for tangent, output in pairs if tangent is not None and output.left_out]:
        raise ParallelError(
            f"the loss depends on the output {', '.join(asked)}, but where a model returns a loss of its own, its "
            "backward starts there and at nothing else: compute the whole loss in the model, or none of it; or detach "
            "the output, if no gradient is wanted through it"
        )
    if saved is None:
        raise ParallelError(_RUN_TWICE)
    if lost:
        raise ParallelError(
            f"gradients of {', '.join(lost[:5])} were accumulated under no_sync(), "
            "and would be lost, as these parameters are frozen in the call that reduces them: freeze them after a call "
            "outside of no_sync()"
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
