"""Options of the whole step, resolved for one model: the time axes, and the ops and modules that patterns name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from shardweave.cost_model import Options
from shardweave.ir import Axis, Captured, LayoutError, Mesh, OverlapConfig, PlanError, Strategy, slice_axis
from shardweave.sharding import Op, info, matches, modules_around, nothing_named


def with_times(mesh: Mesh, options: Options, strategies: Iterable[Strategy] = ()) -> Mesh:
    """`mesh` with time axes: over micro-batches, over the sub-batches of each micro-batch, and over slices of ops.

    The strides of the first two put them outside all axes of devices; those of slices put them inside.
    """
    micro, sub, world = options.turns, options.overlap.sub_batches, mesh.world_size
    micro_axes = (Axis("micro", micro, world * sub, "time"),) if micro > 1 else ()
    sub_axes = (Axis("sub", sub, world, "time"),) if sub > 1 else ()
    counts = {*options.overlap.operator_slices.values(), *(strategy.slices for strategy in strategies)} - {1}
    return replace(
        mesh, micro_batch_axes=micro_axes, sub_batch_axes=sub_axes, slice_axes=tuple(map(slice_axis, sorted(counts)))
    )


def check_patterns(captured: Captured, overlap: OverlapConfig) -> None:
    """Raise `PlanError` if a pattern of the overlap options matches nothing in the model."""
    modules = {info(node).op for node in captured.graph.graph.nodes}
    parameters = set(captured.parameters.values())
    meant: Sequence[tuple[str, Iterable[str], set[str]]] = (
        ("recompute", overlap.recompute, modules),
        ("keep_gathered", overlap.keep_gathered, parameters),
        ("exclude_from_sub_batches", overlap.exclude_from_sub_batches, modules),
    )
    for option, patterns, owners in meant:
        names = {name for owner in owners for name in modules_around(owner)} if patterns else set()
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, sorted(names), 3, 0.3)
                raise PlanError(f"{option}[{pattern!r}] names nothing of the model; close to it: {', '.join(near)}")


def sliced_ops(
    patterns: Mapping[str, int], ops: Sequence[Op], strategies: Mapping[str, Strategy], mesh: Mesh
) -> dict[str, int]:
    """The number of slices of each op that a pattern matches and that has a loop to slice. The last pattern holds.

    Raises
    ------
    PlanError
        If a pattern matches no op, or its number divides no loop of the ops that it matches.
    """
    found: dict[str, int] = {}
    for pattern, slices in patterns.items():
        meant = [op for op in ops if matches(pattern, op)]
        if not meant:
            raise nothing_named("operator_slices", pattern, ops)
        reasons = []
        for op in meant:
            found[op.name] = slices
            try:
                op.slice_atom(strategies[op.name], mesh, slices)
            except LayoutError as error:
                found[op.name] = 1
                reasons.append(str(error))
        if len(reasons) == len(meant):
            raise PlanError(f"operator_slices[{pattern!r}] = {slices} fits nothing that it names: {reasons[0]}")
    return found
