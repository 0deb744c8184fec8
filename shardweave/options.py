"""What a user may ask of the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardweave.errors import PlanError
from shardweave.ir import Strategy
from shardweave.precision import Precision

OPTIMIZER_STATE_BYTES = {"sgd": 0, "momentum": 4, "adam": 8, "adamw": 8}


@dataclass(frozen=True)
class Options:
    """Options of `plan` and `compile_parallel`.

    Parameters
    ----------
    memory_limit : int, optional
        Bytes that one device may use; by default the device's memory less a tenth for what no plan sees.
    optimizer : str or int
        ``"adamw"``, ``"adam"``, ``"momentum"``, ``"sgd"``, or the bytes of optimizer state for each parameter.
    force : mapping from a name pattern to a strategy
        Patterns as in a shell (``"blocks.*.mlp.up"``), matched against the names of modules and parameters. A strategy
        is ``"column"``, ``"row"``, ``"expert"``, ``"3d"`` (a degree may follow: ``"column:4"``), data parallelism by
        its systems' names, ``"dp"``, ``"zero1"``, ``"zero2"``, ``"zero3"`` (also ``"zdp"``; FSDP's), ``"hsdp"``
        (also ``"mics"``) and ``"hpz"`` (with a degree of the inner sharding: ``"hsdp:8"``; see `planner.presets`), a
        `Grid`, its sizes as a tuple ``(x, y, z, data)`` or ``(x, y, z, data, experts)``, or a `Strategy`. Where several
        patterns match, the last one holds.
    precision : Precision or str, optional
        Mixed precision: a `Precision`, ``"bf16"`` or ``"fp16"``. By default nothing is cast.
    outputs : {"auto", "sharded", "part", "whole"}
        Where the outputs other than a loss lie: as they were computed (a DTensor where that is more than a part of the
        batch), this rank's part of the batch, or whole on every rank. ``"auto"`` is ``"sharded"`` where the model
        returns a scalar loss, else ``"part"``.
    time_limit : float
        Seconds that the solver may take.
    lookahead : int
        How many parameters are gathered ahead of their use.
    micro_batches : int
        Into how many parts a call's batch is cut, computed one after another with their gradients added up, so that
        only one part's activations are held. The model has to return a scalar loss. What needs the whole batch at once
        (the statistics of a batch norm) is refused.
    allow_unruled : bool
        Compute ops without a sharding rule whole on every device, instead of refusing the model.

    Examples
    --------
    >>> Options(memory_limit=16 * 10**9, force={"blocks.*.up": "column", "blocks.*.down": "row"}).optimizer_bytes
    8
    """

    memory_limit: int | None = None
    optimizer: str | int = "adamw"
    force: Mapping[str, str | tuple[int, ...] | Strategy] = field(default_factory=dict)
    precision: Precision | str | None = None
    outputs: Literal["auto", "sharded", "part", "whole"] = "auto"
    time_limit: float = 30.0
    lookahead: int = 1
    micro_batches: int = 1
    allow_unruled: bool = False

    def __post_init__(self) -> None:
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise PlanError(f"memory_limit is in bytes a device and must be positive, got {self.memory_limit}")
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZER_STATE_BYTES:
            known = ", ".join(OPTIMIZER_STATE_BYTES)
            raise PlanError(
                f"optimizer {self.optimizer!r} is unknown; expected one of {known}, or its bytes of state per parameter"
            )
        Precision.of(self.precision)
        if self.time_limit <= 0:
            raise PlanError(f"time_limit is in seconds and must be positive, got {self.time_limit}")
        if self.outputs not in ("auto", "sharded", "part", "whole"):
            raise PlanError(f"outputs must be 'auto', 'sharded', 'part' or 'whole', got {self.outputs!r}")
        if self.micro_batches < 1:
            raise PlanError(f"micro_batches counts parts of a batch and must be positive, got {self.micro_batches}")
        if self.lookahead < 0:
            raise PlanError(f"lookahead counts gathers and cannot be negative, got {self.lookahead}")

    @property
    def mixed(self) -> Precision | None:
        """The dtypes of the step; None where nothing is cast."""
        return Precision.of(self.precision)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state for each parameter, in float32."""
        return self.optimizer if isinstance(self.optimizer, int) else OPTIMIZER_STATE_BYTES[self.optimizer]
