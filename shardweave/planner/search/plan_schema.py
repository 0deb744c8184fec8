"""What a plan file may say: types, keys and ranges of every value, checked before a plan is made of them.

A schema is a function of a key and a value that raises `PlanError` with the key, what was expected and what came.
`check_plan` adds what holds between several values: grids and axes against the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

import torch

from shardweave.cost_model import Cluster, short_repr
from shardweave.ir import QUANTIZATION_BITS, RECOMPUTE_MODES, LayoutError, PlanError, Strategy, Traffic

Schema = Callable[[str, object], None]

MAX_COUNT = 2**31
"""The largest number of devices, slices or micro-batches."""
MAX_WHOLE = 2**63 - 1
"""The largest number of bytes or elements: torch counts them in 64-bit integers."""
MAX_NUMBER = 1e30
"""The largest number of seconds or FLOPs, so that sums and products stay finite."""


def whole(low: int = 0, high: int = MAX_WHOLE) -> Schema:
    """A whole number in ``[low, high]``."""

    def check(key: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _wrong(key, f"a whole number of at least {low:,} and at most {high:,}", value)

    return check


def number(low: float = 0.0) -> Schema:
    """A finite number in ``[low, MAX_NUMBER]``."""

    def check(key: str, value: object) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= MAX_NUMBER:
            raise _wrong(key, f"a number of at least {low:g} and at most {MAX_NUMBER:g}", value)

    return check


def one_of(*choices: object) -> Schema:
    """One of some values, of the same type."""

    def check(key: str, value: object) -> None:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise _wrong(key, f"one of {', '.join(map(repr, choices))}", value)

    return check


def text(key: str, value: object) -> None:
    """Any text but an empty one."""
    if not isinstance(value, str) or not value:
        raise _wrong(key, "a text that is not empty", value)


def optional(schema: Schema) -> Schema:
    """None, or what `schema` takes."""

    def check(key: str, value: object) -> None:
        if value is not None:
            schema(key, value)

    return check


def sequence(schema: Schema) -> Schema:
    """A list of what `schema` takes."""

    def check(key: str, value: object) -> None:
        if not isinstance(value, list | tuple):
            raise _wrong(key, "a list", value)
        for index, entry in enumerate(value):
            schema(f"{key}[{index}]", entry)

    return check


def row(*schemas: Schema, least: int | None = None) -> Schema:
    """A list with one entry for each schema; at least `least` of them."""

    def check(key: str, value: object) -> None:
        if not isinstance(value, list | tuple) or not (least or len(schemas)) <= len(value) <= len(schemas):
            raise _wrong(key, f"a list of {f'{least} to ' if least else ''}{len(schemas)} entries", value)
        for index, (entry, schema) in enumerate(zip(value, schemas)):
            schema(f"{key}[{index}]", entry)

    return check


def mapping(schema: Schema, names: Schema = text) -> Schema:
    """A mapping of names to what `schema` takes."""

    def check(key: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise _wrong(key, "a mapping", value)
        for name, entry in value.items():
            names(f"a name in {key}", name)
            schema(f"{key}.{name}", entry)

    return check


def record(required: Mapping[str, Schema], besides: Mapping[str, Schema] | None = None) -> Schema:
    """A mapping that has all the `required` keys, and perhaps some of `besides`, and no other."""
    known = {**required, **(besides or {})}

    def check(key: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise _wrong(key, f"a mapping with {', '.join(required)}", value)
        at = f"{key}." if key else ""
        for name in value:
            if name not in known:
                raise PlanError(f"{at}{name}: expected one of the keys {', '.join(known)}, got an unknown key")
        for name in required:
            if name not in value:
                raise PlanError(f"the plan lacks the key '{at}{name}': it is damaged, plan again")
        for name, entry in value.items():
            known[name](f"{at}{name}", entry)

    return check


def _anything(key: str, value: object) -> None:
    """Accept any value: it is checked elsewhere."""


def _floating(key: str, value: object) -> None:
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise _wrong(key, "the name of a floating-point dtype, such as 'bfloat16'", value)


_BOOLEAN = one_of(True, False)
_COUNT = whole(low=1, high=MAX_COUNT)
_SHAPES = mapping(sequence(whole()))
_STRATEGY = record(
    {"grid": row(*[_COUNT] * 5, least=4), "rest": _COUNT, "y_inside": _BOOLEAN},
    {"states": _COUNT, "gradients": _COUNT, "slices": _COUNT},
)
_CHOICE = record(
    {
        "strategy": _STRATEGY,
        "seconds": number(-MAX_NUMBER),
        "communication_seconds": number(),
        "state_bytes": whole(),
        "saved_bytes": whole(-MAX_WHOLE),
        "transient_bytes": whole(),
        "params": sequence(text),
    },
    {
        "runner_up": optional(
            record({"strategy": _STRATEGY, "seconds": number(-MAX_NUMBER), "missing_bytes": whole(-MAX_WHOLE)})
        )
    },
)
_OVERLAP = record(
    {},
    {
        "sub_batches": _COUNT,
        "recompute": mapping(one_of(*RECOMPUTE_MODES)),
        "operator_slices": mapping(_COUNT),
        "keep_gathered": mapping(whole(high=MAX_COUNT)),
        "buckets": one_of(True, False, "small"),
        "max_prefetch": optional(whole(high=MAX_COUNT)),
        "quantize": mapping(
            one_of(*sorted(set().union(*QUANTIZATION_BITS.values()))), names=one_of(*QUANTIZATION_BITS)
        ),
        "exclude_from_sub_batches": sequence(text),
        "ablation": record(
            {},
            {
                "blocking": sequence(one_of(*get_args(Traffic))),
                "all_reduce_gradients": _BOOLEAN,
                "regather_in_recompute": _BOOLEAN,
                "cross_pass": _BOOLEAN,
                "flat_parameter": _BOOLEAN,
            },
        ),
    },
)
_PRECISION = record(
    {
        "param_dtype": optional(_floating),
        "reduce_dtype": optional(_floating),
        "output_dtype": optional(_floating),
        "cast_forward_inputs": _BOOLEAN,
    }
)
_PLAN = record(
    {
        "format": text,
        "version": _anything,
        "model": record({"parameters": _SHAPES, "inputs": _SHAPES}, {"precision": optional(_PRECISION)}),
        "cluster": mapping(_anything),
        "step_time": number(),
        "peak_memory": whole(),
        "exposed_communication": number(),
        "compute_time": number(),
        "tokens": whole(),
        "model_flops": number(),
        "dtype": _floating,
        "status": one_of("optimal", "feasible"),
        "program_time": number(),
        "bound": number(-MAX_NUMBER),
        "gap": number(),
        "proven_gap": number(),
        "planning_seconds": number(),
        "memory_limit": whole(),
        "schedule_limit": whole(),
        "optimizer_bytes": optional(whole()),
        "forced": sequence(text),
        "joins": mapping(mapping(text)),
        "micro_batches": _COUNT,
        "savings": sequence(row(text, number(-MAX_NUMBER), whole(-MAX_WHOLE))),
        "overlap": _OVERLAP,
        "choices": mapping(_CHOICE),
    },
    {"made_by": text, "whole_ops": sequence(text), "other": optional(row(whole(), number()))},
)


def check_plan(data: object) -> None:
    """`PlanError` where the plain types of a plan are not what `Plan.to_dict` gives: names the key and both values.

    Examples
    --------
    >>> check_plan({"format": "shardweave plan"})
    Traceback (most recent call last):
        ...
    shardweave.ir.errors.PlanError: the plan lacks the key 'version': it is damaged, plan again
    """
    _PLAN("", data)


def check_on(cluster: Cluster, strategies: Mapping[str, Strategy], joins: Mapping[str, Mapping[str, str]]) -> None:
    """`PlanError` where a strategy (by its key), or the spread of a join, does not fit the axes of a cluster."""
    mesh = cluster.mesh()
    for key, strategy in strategies.items():
        try:
            strategy.axes(mesh)
        except LayoutError as error:
            raise PlanError(f"{key}: expected one that fits the cluster: {error}") from error
    names = [axis.name for axis in mesh.axes]
    for name, spread in joins.items():
        for axis in spread:
            if axis not in names:
                raise PlanError(f"joins.{name}: expected axes of {cluster.name}, {', '.join(names)}, got {axis!r}")


def _wrong(key: str, expected: str, value: object) -> PlanError:
    return PlanError(f"{key}: expected {expected}, got {short_repr(value)}")
