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
    Buckets,
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
RESERVED_MEMORY_SHARE = 0.1
"""The part of a device's memory that plans leave to the context, fragments and the user's own tensors by default."""
ZERO_PLUS_PLUS: Mapping[Quantized, int] = {"parameters": 8, "gradients": 4}
"""The value of ``quantize="zero++"``."""
OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Numbers of an optimizer's state for each number of a parameter, in the same dtype."""

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
        (`ir.formatting.bytes_of`). By default nine tenths of the device's memory.
    optimizer : str or int
        ``"adamw"``, ``"adam"``, ``"momentum"``, ``"sgd"``: its states have the dtype of the parameters, as those of
        torch's optimizers do. Or the bytes of optimizer state for each number of a parameter.
    force : mapping from a name pattern to a strategy, or several
        Shell patterns (``"blocks.*.mlp.up"``), matched against the names of modules and parameters; the last match
        holds. A strategy is one of the following, or a sequence of them, from which the planner chooses:

        - tensor parallelism: ``"column"``, ``"row"``, ``"expert"``, ``"3d"``; a degree may follow: ``"column:4"``;
        - data parallelism: ``"dp"``, ``"zero1"``, ``"zero2"``, ``"zero3"`` (also ``"zdp"``; as FSDP), ``"hsdp"`` (also
          ``"mics"``) and ``"hpz"``; the last two take the degree of the inner sharding: ``"hsdp:8"`` (`ir.strategy`);
        - ``"tensor:4"``: tensor parallelism by columns and rows in turn, following the structure of the model
          (`sharding.parallel_ops`); ``"tensor:2x2x2"`` over x, y and z; ``"tensor:4+zero1"`` with the states sharded
          over the other devices;
        - a `Grid`, a tuple ``(x, y, z, data)`` or ``(x, y, z, data, experts)``, or a `Strategy`.
    precision : Precision or str, optional
        Mixed precision: a `Precision`, ``"bf16"`` or ``"fp16"``. By default nothing is cast.
    outputs : {"auto", "sharded", "part", "whole"}
        The layout of outputs other than a loss: sharded as computed (a DTensor if not only the batch is sharded), this
        rank's part of the batch, or whole on every rank. ``"auto"`` is ``"sharded"`` if the model returns a scalar
        loss, else ``"part"``.
    time_limit : float
        Seconds that the solver may take.
    simplicity : float
        The part by which the plan may be slower than the fastest one found, if it is simpler: it has fewer strategies,
        or more of them that have a name, or more layers that are alike. With 0 the fastest is taken.
    max_prefetch : int, optional
        The most parameters that are gathered ahead of their use, and the most gradients in reduction at a time. By
        default the planner decides, by time and memory.
    micro_batches : int, optional
        The number of micro-batches of a call (gradient accumulation): only one of them has its activations in memory.
        The model has to return a scalar loss. Ops that need the whole batch at once (batch norm statistics) are
        refused. By default 1; if that does not fit, or is slow, the planner chooses a power of two if the model allows
        it.
    sub_batches : int, optional
        The number of parts of each micro-batch in one graph: one part computes while another communicates. The same
        ops are refused. By default the planner chooses 1 or 2.
    exclude_from_sub_batches : sequence of name patterns
        Modules that take all sub-batches at once: a layer with less than one sample a device in each sub-batch, or one
        that needs the whole batch. Patterns as in `force`. No compute hides the activations' collectives there.
    recompute : {"none", "full", "fine"} or mapping from a name pattern to one of these, optional
        Activation recomputation of a layer (a module in a list) in the backward: ``"full"`` computes all of it again,
        ``"fine"`` all but the results of collectives, so that no communication is repeated. Patterns as in `force`. By
        default activation checkpoints of the model (``torch.utils.checkpoint``) are ``"full"``. For a model without
        any, the planner chooses for each layer, to save memory.
    operator_slices : int or mapping from a name pattern to int
        The number of slices of an op with a parameter, computed one after another: only a slice of the parameter is
        gathered at a time. Patterns as in `force`; an op that the number does not divide stays whole. By default the
        planner chooses, to save memory; with 1 no op is sliced.
    keep_gathered : bool or mapping from a name pattern to bool or int, optional
        Parameters that are gathered for the forward are kept for the backward, instead of gathered again. For an op in
        slices a number says how many slices are kept. By default the planner chooses for each
        op. (``"zero2"`` is the strategy that gathers once a step.)
    buckets : bool or "small", optional
        Merge collectives of parameters and gradients; with ``"small"`` only those that take longer to start than to
        transfer their bytes. By default the planner chooses.
    sequence_parallel : bool, optional
        Reduce-scatter the partial sums of tensor parallelism at residual connections, so that the following norms are
        sharded on the batch, or on the sequence if the batch is too small. Without it they are all-reduced. By default
        the planner chooses, at residual connections without a bias before them.
    quantize : mapping from {"parameters", "gradients"} to int, or "zero++"; optional
        The bits of quantized blocks in collectives, as in ZeRO++ (arXiv 2306.10209): of parameters in all-gathers (8),
        of gradients in reduce-scatters (8 or 4), first inside a node and then between nodes. ``"zero++"`` is
        ``{"parameters": 8, "gradients": 4}``. It changes results, so it is off by default. All-reduces of gradients (of
        replicated parameters, and across the copies of ``"hsdp"``) and activations are not quantized. See
        docs/quantize.md.
    timeout : float or timedelta, optional
        Seconds that a rank waits for the others in one collective. After that, or if a rank has ended, a LostRankError
        is raised. By default the timeout of ``torch.distributed.init_process_group``. See docs/several-hosts.md.
    check_inputs : int, "always" or "never"
        The number of calls in which the ranks compare hashes of their inputs, to find ranks with different batches. In
        every call they agree that all can run it, so that an error of one rank is raised on all. With ``"never"`` they
        do neither. See docs/inputs.md.
    inductor : "auto" or bool
        Inductor compiles the compute between collectives; the order of these stands. ``"auto"`` compiles on GPUs, and
        runs ops that Inductor cannot compile as they are, after a warning. ``True`` compiles on CPUs, too, where steps
        gain no time by it; such ops are an error then. The plan does not count what is gained. See docs/overlap.md.
    measure_ops : "auto" or bool
        `compile_parallel` measures the ops of the step on the running machine first, and plans with their times. That
        takes up to half a minute, once for a step. ``"auto"`` measures in a world of several CPUs, for a cluster that
        was measured in it (`Cluster.detect()`). ``True`` measures on GPUs, too, and refuses a cluster that was not
        measured. `plan` measures nothing, as it may run anywhere. See docs/cluster.md.
    recompile_limit : int
        The most steps of one parallel module. Calls with inputs of other sizes or in another mode compile a step of
        their own, from the same plan; a call that needs one more is refused.
    replicate_unknown_ops : bool
        Compute ops without a sharding rule whole on every device, with a warning. ``plan.explain()`` lists them. If
        False, a model with such an op is refused.
    ablation : Ablation
        Switches off overlap or sharing, to measure its gain or to model a system without it.

    Raises
    ------
    PlanError
        If a value has a wrong type or is not allowed; the message names the option.

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
    simplicity: float = 0.005
    max_prefetch: int | None = None
    micro_batches: int | None = None
    sub_batches: int | None = None
    exclude_from_sub_batches: Sequence[str] = ()
    recompute: RecomputeMode | Mapping[str, RecomputeMode] | None = None
    operator_slices: int | Mapping[str, int] = field(default_factory=dict)
    keep_gathered: bool | Mapping[str, bool | int] | None = None
    buckets: Buckets | None = None
    sequence_parallel: bool | None = None
    quantize: Literal["zero++"] | Mapping[Quantized, int] | None = None
    timeout: float | timedelta | None = None
    check_inputs: int | Literal["always", "never"] = 3
    inductor: Literal["auto"] | bool = "auto"
    measure_ops: Literal["auto"] | bool = "auto"
    recompile_limit: int = 8
    replicate_unknown_ops: bool = True
    ablation: Ablation = Ablation()

    def __post_init__(self) -> None:
        Precision.of(self.precision)  # first, as its error lists the short names
        for name, annotation in _types().items():
            if not matches_annotation(getattr(self, name), annotation):
                with suppress(TypeError, AttributeError, ValueError):  # the value has a wrong type
                    _ = self.overlap  # its errors say more
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
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZER_STATES:
            known = ", ".join(OPTIMIZER_STATES)
            raise PlanError(
                f"optimizer {self.optimizer!r} is unknown; expected one of {known}, or its bytes of state per parameter"
            )
        if not 0 < self.time_limit < math.inf:
            raise PlanError(f"time_limit is in seconds and must be positive, got {self.time_limit}")
        if not 0 <= self.simplicity < 1:
            raise PlanError(f"simplicity is a part of the step's time, from 0 to less than 1, got {self.simplicity}")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise PlanError(f"micro_batches counts parts of a batch and must be positive, got {self.micro_batches}")
        if isinstance(self.check_inputs, int) and self.check_inputs < 0:
            raise PlanError(f"check_inputs counts calls, and cannot be negative, got {self.check_inputs}")
        if self.recompile_limit < 1:
            raise PlanError(f"recompile_limit counts steps and must be positive, got {self.recompile_limit}")
        _ = self.overlap  # checks its options

    def __repr__(self) -> str:
        return brief(self)

    @property
    def micro_batch_count(self) -> int:
        """The number of micro-batches; 1 if the planner chooses it."""
        return 1 if self.micro_batches is None else self.micro_batches

    @property
    def checked_calls(self) -> float:
        """The number of calls with compared inputs: infinite for all, negative if the ranks do not even agree on calls.
        """
        if isinstance(self.check_inputs, str):
            return math.inf if self.check_inputs == "always" else -1
        return self.check_inputs

    @property
    def overlap(self) -> OverlapConfig:
        """The options of the whole step; those that the planner chooses are off."""
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
                f"as in {dict(ZERO_PLUS_PLUS)}, got {self.quantize!r}"
            )
        return self.quantize or {}

    def with_overlap(self, overlap: OverlapConfig) -> Options:
        """These options with a plan's choices for the whole step."""
        return replace(self, **{each.name: getattr(overlap, each.name) for each in fields(overlap)})

    def limit(self, cluster: Cluster) -> int:
        """Bytes that a device may use."""
        return (
            int(cluster.device.memory * (1 - RESERVED_MEMORY_SHARE))
            if self.memory_limit is None
            else bytes_of(self.memory_limit)
        )

    @property
    def key(self) -> str:
        """What tells options apart. Equal ones may have their patterns in another order, and the last match holds.

        >>> force = {"*.up": "dp", "blocks.0": "zdp"}
        >>> one, other = Options(force=force), Options(force=dict(reversed(force.items())))
        >>> one == other, one.key == other.key
        (True, False)
        """
        return repr(self)

    @property
    def collective_timeout(self) -> timedelta | None:
        """The time that a rank waits for the others; None for the timeout of the world's own group."""
        if self.timeout is None or isinstance(self.timeout, timedelta):
            return self.timeout
        return timedelta(seconds=self.timeout)

    @property
    def mixed_precision(self) -> Precision | None:
        """The dtypes of the step; None if nothing is cast."""
        return Precision.of(self.precision)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state for each number of a parameter; of float32 where the optimizer is a name."""
        return self.optimizer if isinstance(self.optimizer, int) else 4 * OPTIMIZER_STATES[self.optimizer]

    def with_states_of(self, itemsize: int) -> Options:
        """These options with the bytes of state for parameters of `itemsize` bytes, where the optimizer is a name.

        >>> Options(optimizer="adamw").with_states_of(2).optimizer
        4
        """
        if isinstance(self.optimizer, int):
            return self
        return replace(self, optimizer=itemsize * OPTIMIZER_STATES[self.optimizer])


@functools.cache
def _types() -> Mapping[str, Any]:
    """The type of each option. The planner checks the strategies of `force`."""
    return {**get_type_hints(Options), "force": Mapping[str, Any]}
