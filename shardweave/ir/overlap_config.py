"""The choices of a plan that concern the whole step, not one op: overlap, recomputation, buckets, quantization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_type_hints

from shardweave.ir.errors import PlanError
from shardweave.ir.formatting import brief, matches_annotation, readable_annotation, readable_ranges
from shardweave.ir.step_signature import Traffic

RecomputeMode = Literal["none", "fine", "full"]
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = ("none", "fine", "full")
"""How a layer is recomputed in the backward: not at all, all but the results of its collectives, or all of it. Of
equally good modes, the planner takes the first."""

Quantized = Literal["parameters", "gradients"]
QUANTIZATION_BITS: Mapping[Quantized, tuple[int, ...]] = {"parameters": (8,), "gradients": (8, 4)}
"""The kinds of traffic that may be quantized, and the bits that each allows."""

Buckets = bool | Literal["small"]
"""Whether collectives are merged: none, those that take longer to start than to transfer, or all where it pays."""

UNLIMITED = 2**31
"""A count that is no limit."""
_CROSS_PASS = "recomputation while gradients are reduced"


@dataclass(frozen=True)
class Ablation:
    """Takes overlap or sharing away from a step, to measure what it is worth, or to price a system that lacks it.

    Parameters
    ----------
    blocking : sequence of {"gather", "scatter", "reduce", "broadcast", "activation"}
        The kinds of collectives that compute waits for: all-gathers of parameters for a use, reduce-scatters of
        gradients, all-reduces of gradients, all-gathers of parameters after the optimizer's step (once a step), and
        collectives of activations.
    all_reduce_gradients : bool
        All-reduce gradients where the optimizer states are sharded, and let each device keep its part. By default
        gradients are reduce-scattered, which moves half as much. DeepSpeed's ZeRO-1 and 2
        (``use_multi_rank_bucket_allreduce``) and AMSP all-reduce.
    regather_in_recompute : bool
        Gather a parameter twice in the backward: for the recomputation and for the gradients, as activation checkpoints
        around FSDP's modules do. By default both share one all-gather.
    cross_pass : bool
        Let the backward recompute a layer while the gradients of another are reduced (Oases, section 4.2). False puts
        a barrier there, as in Megatron-LM.
    flat_parameter : bool
        Gather all parameters that a step holds unsharded (not those of ZeRO-3) in one all-gather before the forward,
        and reduce their gradients in one collective after the backward, as FSDP's first version did with its
        ``FlatParameter``. Other small collectives are bucketed.

    Raises
    ------
    PlanError
        If a value has another type, or a kind of collective is unknown.

    Examples
    --------
    >>> Ablation(blocking=["gather"], cross_pass=False)
    Ablation(blocking=('gather',), cross_pass=False)
    """

    blocking: Sequence[Traffic] = ()
    all_reduce_gradients: bool = False
    regather_in_recompute: bool = False
    cross_pass: bool = True
    flat_parameter: bool = False

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(Ablation).items():
            value = getattr(self, name)
            if name != "blocking" and not matches_annotation(value, annotation):
                raise PlanError(f"the ablation {name} must be {readable_annotation(annotation)}, got {value!r}")
        if isinstance(self.blocking, str) or not isinstance(self.blocking, Sequence):
            raise PlanError(f"the ablation blocking must be a sequence of kinds of collectives, got {self.blocking!r}")
        object.__setattr__(self, "blocking", tuple(self.blocking))
        if unknown := [kind for kind in self.blocking if kind not in get_args(Traffic)]:
            raise PlanError(f"blocking names kinds of traffic, {', '.join(get_args(Traffic))}, got {unknown[0]!r}")

    def without(self) -> dict[str, Ablation]:
        """Each field that is set, in words, with the ablation that is left without it.

        >>> list(Ablation(all_reduce_gradients=True).without())
        ['all-reduced gradients']
        """
        found: dict[str, Ablation] = {}
        if self.regather_in_recompute:
            found["parameters gathered again after recomputation"] = replace(self, regather_in_recompute=False)
        if self.flat_parameter:
            found["a flat parameter"] = replace(self, flat_parameter=False)
        if not self.cross_pass:
            found["a barrier between recomputation and backward"] = replace(self, cross_pass=True)
        if self.blocking:
            found[f"waiting for {', '.join(self.blocking)}"] = replace(self, blocking=())
        if self.all_reduce_gradients:
            found["all-reduced gradients"] = replace(self, all_reduce_gradients=False)
        return found

    def within(self, other: Ablation) -> bool:
        """Whether each field is this class's default or equal to `other`'s."""
        plain = Ablation()
        return all(value in (getattr(plain, name), getattr(other, name)) for name, value in vars(self).items())

    def __repr__(self) -> str:
        return brief(self)


@dataclass(frozen=True)
class OverlapConfig:
    """How a step hides communication and saves memory. `Options` describes each field.

    Raises
    ------
    PlanError
        If a count is not positive, or a mode is unknown.

    Examples
    --------
    >>> str(OverlapConfig(sub_batches=2, recompute={"*": "fine"}))
    '2 sub-batches, recomputation * fine'
    >>> OverlapConfig.from_dict(OverlapConfig(buckets=True).to_dict()) == OverlapConfig(buckets=True)
    True
    """

    sub_batches: int = 1
    recompute: Mapping[str, RecomputeMode] = field(default_factory=dict)
    operator_slices: Mapping[str, int] = field(default_factory=dict)
    keep_gathered: Mapping[str, int] = field(default_factory=dict)
    buckets: Buckets = False
    max_prefetch: int | None = None
    quantize: Mapping[Quantized, int] = field(default_factory=dict)
    exclude_from_sub_batches: tuple[str, ...] = ()
    ablation: Ablation = Ablation()

    def __post_init__(self) -> None:
        object.__setattr__(self, "exclude_from_sub_batches", tuple(self.exclude_from_sub_batches))
        for pattern, mode in self.recompute.items():
            if mode not in RECOMPUTE_MODES:
                known = ", ".join(map(repr, RECOMPUTE_MODES))
                raise PlanError(f"recompute[{pattern!r}] must be one of {known}, got {mode!r}")
        for pattern, slices in self.operator_slices.items():
            if slices < 1:
                raise PlanError(f"operator_slices[{pattern!r}] must be a positive number of parts, got {slices}")
        for pattern, kept in self.keep_gathered.items():
            if kept < 0:
                raise PlanError(f"keep_gathered[{pattern!r}] must be a bool or a number of slices, got {kept}")
        for kind, bits in self.quantize.items():
            if kind not in QUANTIZATION_BITS:
                raise PlanError(f"quantize names what moves in few bits, {', '.join(QUANTIZATION_BITS)}, got {kind!r}")
            if bits not in QUANTIZATION_BITS[kind]:
                allowed = " or ".join(map(str, QUANTIZATION_BITS[kind]))
                raise PlanError(f"quantize[{kind!r}] is {allowed} bits, got {bits!r}")
        if self.sub_batches < 1:
            raise PlanError(f"sub_batches counts parts of a batch and must be positive, got {self.sub_batches}")
        if self.buckets not in (False, True, "small"):
            raise PlanError(f"buckets must be True, False or 'small', got {self.buckets!r}")
        if self.max_prefetch is not None and self.max_prefetch < 0:
            raise PlanError(f"max_prefetch counts all-gathers and cannot be negative, got {self.max_prefetch}")

    def without(self) -> dict[str, OverlapConfig]:
        """Each choice that was made, in words, with the configuration that is left without it.

        >>> list(OverlapConfig(sub_batches=2, recompute={"*": "fine"}).without())
        ['2 sub-batches', 'recomputation * fine', 'recomputation while gradients are reduced']
        """
        found: dict[str, OverlapConfig] = {}
        if self.sub_batches > 1:
            excluded = self.exclude_from_sub_batches
            exception = f" but for {' and '.join(excluded)}" if excluded else ""
            one = replace(self, sub_batches=1, exclude_from_sub_batches=())
            found[f"{self.sub_batches} sub-batches{exception}"] = one
        if self.recompute:
            found[f"recomputation {_by_mode(self.recompute)}"] = replace(self, recompute={})
            if self.ablation.cross_pass:
                found[_CROSS_PASS] = replace(self, ablation=replace(self.ablation, cross_pass=False))
        sliced = [f"{pattern} in {count} slices" for pattern, count in self.operator_slices.items() if count > 1]
        if sliced:
            found[" and ".join(sliced)] = replace(self, operator_slices={})
        if kept := [f"{pattern} kept gathered{'' if count == UNLIMITED else f' in {count} slices'}"
                    for pattern, count in self.keep_gathered.items() if count]:  # fmt: skip
            found[" and ".join(kept)] = replace(self, keep_gathered={})
        if self.buckets:
            words = "small collectives merged" if self.buckets == "small" else "buckets"
            found[words] = replace(self, buckets=False)
        if self.max_prefetch is not None:
            found[f"at most {self.max_prefetch} gathered ahead"] = replace(self, max_prefetch=None)
        for kind, bits in self.quantize.items():
            left = {other: each for other, each in self.quantize.items() if other != kind}
            found[f"{kind} in int{bits}"] = replace(self, quantize=left)
        return found | {words: replace(self, ablation=left) for words, left in self.ablation.without().items()}

    def within(self, other: OverlapConfig) -> bool:
        """Whether `other` has all choices that this one makes.

        >>> OverlapConfig(buckets=True).within(OverlapConfig(2, buckets=True))
        True
        >>> OverlapConfig(2).within(OverlapConfig(4))
        False
        """
        plain = OverlapConfig()
        names = set(vars(self)) - {"ablation"}
        same = all(getattr(self, name) in (getattr(plain, name), getattr(other, name)) for name in names)
        return same and self.ablation.within(other.ablation)

    def to_dict(self) -> dict[str, Any]:
        """As plain types; `from_dict` is its inverse."""
        figures = {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(self).items()}
        return {**figures, "ablation": dict(vars(self.ablation))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OverlapConfig:
        """The configuration that `to_dict` gave."""
        return cls(**{**data, "ablation": Ablation(**data.get("ablation", {}))})

    def __repr__(self) -> str:
        return brief(self)

    def __str__(self) -> str:
        return ", ".join(choice for choice in self.without() if choice != _CROSS_PASS)


def _by_mode(recompute: Mapping[str, RecomputeMode]) -> str:
    """Patterns and their modes, those that differ in a layer's number together.

    >>> _by_mode({"*": "fine", "h.0": "none", "h.1": "none", "h.2": "none", "h.7": "full"})
    '* fine and h.0-2 none and h.7 full'
    """
    groups: dict[tuple[str, str, RecomputeMode], list[int]] = {}
    for pattern, mode in recompute.items():
        stem, dot, number = pattern.rpartition(".")
        if number.isdecimal():
            groups.setdefault((stem, dot, mode), []).append(int(number))
        else:
            groups.setdefault((pattern, "", mode), [])
    merged = ((f"{stem}{dot}{readable_ranges(numbers)}", mode) for (stem, dot, mode), numbers in groups.items())
    return " and ".join(f"{pattern} {mode}" for pattern, mode in merged)
