"""Options of `plan` and `compile_parallel`, and their old names."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints

from shardweave.ir import (
    QUANTIZATION_BITS,
    UNLIMITED,
    Ablation,
    Grid,
    OverlapConfig,
    PlanError,
    Precision,
    Quantized,
    RecomputeMode,
    Strategy,
    brief,
    bytes_of,
    matches_annotation,
    readable_annotation,
)

if TYPE_CHECKING:
    from shardweave.cost_model.cluster import Cluster

Forced = str | tuple[int, ...] | Grid | Strategy
"""The values that `Options.force` takes for a strategy."""
RESERVE = 0.1
"""The part of a device's memory that a plan leaves alone by default: context, fragments, the user's own tensors."""
ZERO_PLUS_PLUS: Mapping[Quantized, int] = {"parameters": 8, "gradients": 4}
"""The value of ``quantize="zero++"``."""
OPTIMIZER_STATE_BYTES = {"sgd": 0, "momentum": 4, "adam": 8, "adamw": 8}

RENAMED_OPTIONS = {
    "undivided": "exclude_from_sub_batches",
    "lookahead": "max_prefetch",
    "allow_unruled": "replicate_unknown_ops",
}
"""Old names of options, accepted with a `DeprecationWarning` until version 0.2."""
RENAMED_ABLATIONS = {
    "blocking": "blocking",
    "whole_sums": "all_reduce_gradients",
    "gather_again": "regather_in_recompute",
    "cross_pass": "cross_pass",
}
"""Old options that are fields of `Ablation` now, accepted with a `DeprecationWarning` until version 0.2."""
OLD_OPTION_NAMES = frozenset({*RENAMED_OPTIONS, *RENAMED_ABLATIONS})
_Class = TypeVar("_Class", bound=type)


def _accepts_old_names(cls: _Class) -> _Class:
    """Let the constructor of `Options` take the old names of its fields."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: object, *args: Any, **options: Any) -> None:
        init(self, *args, **_with_new_names(options))

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _with_new_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with the names of today; each old name warns."""
    found = {name: value for name, value in options.items() if name not in OLD_OPTION_NAMES}
    for old, new in RENAMED_OPTIONS.items():
        if old in options:
            _warn(old, f"{new}=...")
            found[new] = options[old]
    for old, new in RENAMED_ABLATIONS.items():
        if old in options:
            _warn(old, f"ablation=Ablation({new}=...)")
            found["ablation"] = replace(found.get("ablation") or Ablation(), **{new: options[old]})
    if found.get("buckets") == "flat":
        _warn("buckets='flat'", "ablation=Ablation(flat_parameter=True)")
        found |= {"buckets": None, "ablation": replace(found.get("ablation") or Ablation(), flat_parameter=True)}
    return found


def _warn(old: str, new: str) -> None:
    message = f"the option {old} is now {new}; the old name is removed in version 0.2"
    warnings.warn(message, DeprecationWarning, stacklevel=4)


@_accepts_old_names
@dataclass(frozen=True)
class Options:
    """Options of `plan` and `compile_parallel`.

    Parameters
    ----------
    memory_limit : int, float or str, optional
        Bytes that one device may use, or a text with a unit: ``"20GB"`` is 20 * 10**9 bytes, ``"20GiB"`` is 20 * 2**30
        (`ir.formatting.bytes_of`). By default the device's memory less a tenth for what no plan sees.
    optimizer : str or int
        ``"adamw"``, ``"adam"``, ``"momentum"``, ``"sgd"``, or the bytes of optimizer state for each parameter.
    force : mapping from a name pattern to a strategy, or several
        Patterns as in a shell (``"blocks.*.mlp.up"``), matched against the names of modules and parameters. A strategy
        is ``"column"``, ``"row"``, ``"expert"``, ``"3d"`` (a degree may follow: ``"column:4"``), data parallelism by
        its systems' names, ``"dp"``, ``"zero1"``, ``"zero2"``, ``"zero3"`` (also ``"zdp"``; FSDP's), ``"hsdp"``
        (also ``"mics"``) and ``"hpz"`` (with a degree of the inner sharding: ``"hsdp:8"``; see `ir.strategy`), a
        `Grid`, its sizes as a tuple ``(x, y, z, data)`` or ``(x, y, z, data, experts)``, or a `Strategy`; or a sequence
        of these, of which the planner chooses. ``"tensor:4"`` is tensor parallelism by columns and rows in turn, as the
        model's structure has them (`sharding.parallel_ops`), ``"tensor:2x2x2"`` the same over x, y and z,
        ``"tensor:4+zero1"`` with the states sharded over the other devices. Where several patterns match, the last one
        holds.
    precision : Precision or str, optional
        Mixed precision: a `Precision`, ``"bf16"`` or ``"fp16"``. By default nothing is cast.
    outputs : {"auto", "sharded", "part", "whole"}
        Where the outputs other than a loss lie: as they were computed (a DTensor where that is more than a part of the
        batch), this rank's part of the batch, or whole on every rank. ``"auto"`` is ``"sharded"`` where the model
        returns a scalar loss, else ``"part"``.
    time_limit : float
        Seconds that the solver may take.
    max_prefetch : int, optional
        The number of parameters at most that are gathered ahead of their use, and of gradients whose reduction is under
        way. By default as many as pay and fit.
    micro_batches : int, optional
        Into how many parts a call's batch is cut, computed one after another with their gradients added up, so that
        only one part's activations are held. The model has to return a scalar loss. What needs the whole batch at once
        (the statistics of a batch norm) is refused. By default it is one part; where that does not fit, or only
        slowly, the planner chooses a power of two if the model goes with it.
    sub_batches : int, optional
        Into how many parts each of these is cut besides, all of them in one graph, so that one part computes while
        another communicates. The same things are refused. By default the planner chooses 1 or 2.
    exclude_from_sub_batches : sequence of name patterns
        Modules that take all sub-batches at once: a layer with less than a sample a device in each sub-batch, or one
        that needs the whole batch. Patterns as in `force`. No compute hides the activations' collectives there.
    recompute : {"none", "full", "fine"} or mapping from a name pattern to one of these, optional
        What the backward computes again instead of keeping it: all of a layer (a module in a list), or all but the
        results of its collectives, so that no communication is repeated. Patterns as in `force`. By default what lies
        in activation checkpoints of the model (``torch.utils.checkpoint``) is ``"full"``; of a model without any the
        planner chooses for each layer, where memory asks for it.
    operator_slices : int or mapping from a name pattern to int
        Into how many slices an op with a parameter is cut, computed one after another, so that only a slice of the
        parameter is gathered at a time. Patterns as in `force`; what a number does not divide stays whole. By default
        the planner chooses, as a part of an op's strategy, where memory asks for it; with 1 nothing is cut.
    keep_gathered : bool or mapping from a name pattern to bool or int, optional
        What is gathered for the forward is kept for the backward, instead of gathered again. Of an op in slices a
        number says how many of them; the others are gathered again. (What is gathered once a step, ``"zero2"``, is a
        strategy that the planner has anyway.) By default the planner chooses, all or none, for models of few layers.
    buckets : bool, optional
        Small collectives of parameters and gradients are put together. By default the planner chooses.
    sequence_parallel : bool, optional
        Whether each device takes a part of the sums that tensor parallelism leaves (at residual connections, and so in
        the norms after them), cut on the sequence where the batch is too small for it, or all of them take the whole.
        By default the planner chooses, at residual connections that no bias comes before.
    quantize : mapping from {"parameters", "gradients"} to int, or "zero++"; optional
        What moves in blocks of so many bits, each with a scale, as in ZeRO++ (arXiv 2306.10209): parameters wherever
        they are gathered (8), gradients wherever they are scattered (8 or 4), inside of a node first and then between
        nodes. ``"zero++"`` is ``{"parameters": 8, "gradients": 4}``. It changes numbers, and so is off by default.
        All-reduces of gradients (of replicated parameters, and across the copies of ``"hsdp"``) and activations move as
        they are. See docs/quantize.md.
    timeout : float or timedelta, optional
        Seconds that a rank waits for the others in one collective: then, or when a rank has ended, a LostRankError is
        raised. By default what ``torch.distributed.init_process_group`` was given. See docs/several-hosts.md.
    check_inputs : int, "always" or "never"
        In how many calls the ranks compare hashes of their inputs, which shows whether they mean the same batch. In
        each call they also agree that all can run it, so that an error of one rank is raised on all of them; with
        ``"never"`` they do neither. See docs/inputs.md.
    replicate_unknown_ops : bool
        Compute ops without a sharding rule whole on every device, instead of refusing the model.
    ablation : Ablation
        Overlap or sharing that is taken away, to measure what it is worth or to price a system that lacks it.

    Raises
    ------
    PlanError
        A value has another type, or is none that its option may have; the message names the option.

    Examples
    --------
    >>> Options(memory_limit="16GB").memory_limit == 16 * 10**9
    True
    >>> Options(force={"blocks.*.up": "column", "blocks.*.down": "row"}).optimizer_bytes
    8
    """

    memory_limit: float | str | None = None
    optimizer: str | int = "adamw"
    force: Mapping[str, Forced | Sequence[Forced]] = field(default_factory=dict)
    precision: Precision | str | None = None
    outputs: Literal["auto", "sharded", "part", "whole"] = "auto"
    time_limit: float = 30.0
    max_prefetch: int | None = None
    micro_batches: int | None = None
    sub_batches: int | None = None
    exclude_from_sub_batches: Sequence[str] = ()
    recompute: RecomputeMode | Mapping[str, RecomputeMode] | None = None
    operator_slices: int | Mapping[str, int] = field(default_factory=dict)
    keep_gathered: bool | Mapping[str, bool | int] | None = None
    buckets: bool | None = None
    sequence_parallel: bool | None = None
    quantize: Literal["zero++"] | Mapping[Quantized, int] | None = None
    timeout: float | timedelta | None = None
    check_inputs: int | Literal["always", "never"] = 3
    replicate_unknown_ops: bool = False
    ablation: Ablation = Ablation()

    def __post_init__(self) -> None:
        Precision.of(self.precision)  # first: it names the short names
        for name, annotation in _types().items():
            if not matches_annotation(getattr(self, name), annotation):
                with suppress(TypeError, AttributeError, ValueError):  # of what is read before it is checked
                    _ = self.overlap  # whose own errors tell more
                raise PlanError(
                    f"the option {name} must be {readable_annotation(annotation)}, got {getattr(self, name)!r}"
                )
        if self.memory_limit is not None:
            try:
                object.__setattr__(self, "memory_limit", bytes_of(self.memory_limit))
            except ValueError as error:
                raise PlanError(
                    f"memory_limit must be a positive number of bytes a device, or a size such as '20GB' or '20GiB': "
                    f"{error}"
                ) from error
        seconds = self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout
        if seconds is not None and not 0 < seconds < 1e9:
            raise PlanError(f"timeout is in seconds, or a timedelta, and must be positive, got {self.timeout!r}")
        if isinstance(self.optimizer, int) and self.optimizer < 0:
            raise PlanError(f"optimizer must be its bytes of state per parameter, or a name, got {self.optimizer}")
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZER_STATE_BYTES:
            known = ", ".join(OPTIMIZER_STATE_BYTES)
            raise PlanError(
                f"optimizer {self.optimizer!r} is unknown; expected one of {known}, or its bytes of state per parameter"
            )
        if not 0 < self.time_limit < math.inf:
            raise PlanError(f"time_limit is in seconds and must be positive, got {self.time_limit}")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise PlanError(f"micro_batches counts parts of a batch and must be positive, got {self.micro_batches}")
        if isinstance(self.check_inputs, int) and self.check_inputs < 0:
            raise PlanError(f"check_inputs counts calls, and cannot be negative, got {self.check_inputs}")
        _ = self.overlap  # which checks what it is made of

    def __repr__(self) -> str:
        return brief(self)

    @property
    def micro_batch_count(self) -> int:
        """The number of micro-batches; 1 if it is left to the planner."""
        return 1 if self.micro_batches is None else self.micro_batches

    @property
    def checks(self) -> int | None:
        """In how many calls inputs are compared: None for all of them, -1 where ranks do not even agree on calls."""
        if isinstance(self.check_inputs, str):
            return None if self.check_inputs == "always" else -1
        return self.check_inputs

    @property
    def overlap(self) -> OverlapConfig:
        """The options of the whole step. Those that are left to the planner are off."""
        recompute = {"*": self.recompute} if isinstance(self.recompute, str) else self.recompute or {}
        slices = {"*": self.operator_slices} if isinstance(self.operator_slices, int) else self.operator_slices
        kept = {"*": self.keep_gathered} if isinstance(self.keep_gathered, bool) else self.keep_gathered or {}
        kept = {pattern: UNLIMITED if number is True else int(number) for pattern, number in kept.items()}
        slices, kept = ({} if each == whole else each for each, whole in ((slices, {"*": 1}), (kept, {"*": 0})))
        sub_batches = 1 if self.sub_batches is None else self.sub_batches
        return OverlapConfig(
            sub_batches,
            recompute,
            slices,
            kept,
            self.buckets or False,
            self.max_prefetch,
            self._quantize,
            tuple(self.exclude_from_sub_batches),
            self.ablation,
        )

    @property
    def _quantize(self) -> Mapping[Quantized, int]:
        if self.quantize == "zero++":
            return ZERO_PLUS_PLUS
        if self.quantize is not None and not isinstance(self.quantize, Mapping):
            raise PlanError(
                f"quantize must be 'zero++', or the bits of {' and '.join(QUANTIZATION_BITS)} "
                f"as in {dict(ZERO_PLUS_PLUS)}, "
                f"got {self.quantize!r}"
            )
        return self.quantize or {}

    def with_overlap(self, overlap: OverlapConfig) -> Options:
        """These options with a plan's choices for the whole step."""
        return replace(self, **{each.name: getattr(overlap, each.name) for each in fields(overlap)})

    def limit(self, cluster: Cluster) -> int:
        """Bytes that a device may use."""
        return int(cluster.device.memory * (1 - RESERVE)) if self.memory_limit is None else bytes_of(self.memory_limit)

    @property
    def collective_timeout(self) -> timedelta | None:
        """How long a rank waits for the others; None where the world's own timeout holds."""
        if self.timeout is None or isinstance(self.timeout, timedelta):
            return self.timeout
        return timedelta(seconds=self.timeout)

    @property
    def mixed(self) -> Precision | None:
        """The dtypes of the step; None where nothing is cast."""
        return Precision.of(self.precision)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state for each parameter, in float32."""
        return self.optimizer if isinstance(self.optimizer, int) else OPTIMIZER_STATE_BYTES[self.optimizer]


@functools.cache
def _types() -> Mapping[str, Any]:
    """The type of each option. `force` is checked where its strategies are looked up."""
    return {**get_type_hints(Options), "force": Mapping[str, Any]}
