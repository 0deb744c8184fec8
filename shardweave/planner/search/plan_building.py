"""From an answer of the program to a `Plan`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from shardweave.cost_model import Cluster, Options, node_work
from shardweave.ir import UNLIMITED, OverlapConfig, RecomputeMode
from shardweave.passes import Annotated
from shardweave.planner.search.evaluation import Decision, named
from shardweave.planner.search.layer_problem import LayerProblem
from shardweave.planner.search.plan import ModelKey, OpChoice, Plan, RunnerUp
from shardweave.planner.search.setting_search import Evaluated
from shardweave.planner.solver.solver import alternatives
from shardweave.sharding import covers, info, last_match, layer_of


def plan_of(
    chosen: Evaluated, key: ModelKey, cluster: Cluster, options: Options, layers: LayerProblem, overlap: OverlapConfig
) -> Plan:
    """The plan of an answer; its figures are estimates from a few layers.

    Parameters
    ----------
    chosen : Evaluated
    key : ModelKey
        Of the model.
    cluster : Cluster
    options : Options
        With the memory limit and the number of micro-batches.
    layers : LayerProblem
    overlap : OverlapConfig
        What is chosen for the whole step.
    """
    problem, solution, evaluation = chosen.costed.problem, chosen.solution, chosen.evaluation
    limit = options.limit(cluster)
    return Plan(
        key,
        cluster,
        _op_choices(chosen),
        step_time=evaluation.step_time,
        peak_memory=evaluation.peak_memory,
        exposed_communication=evaluation.exposed_communication,
        compute_time=evaluation.compute_time,
        tokens=_tokens(layers.annotated),
        model_flops=_model_flops(layers),
        dtype=_dtype(layers.annotated),
        status=solution.status,
        program_time=problem.objective(solution.choice),
        bound=solution.bound,
        gap=solution.gap,
        proven_gap=chosen.proven_gap,
        memory_limit=limit,
        schedule_limit=chosen.schedule_limit,
        optimizer_bytes=options.optimizer_bytes,
        forced=tuple(options.force),
        joins={name: named(assignment) for name, assignment in chosen.decision.joins.items()},
        micro_batches=options.micro_batch_count,
        overlap=overlap,
    )


def _op_choices(chosen: Evaluated) -> dict[str, OpChoice]:
    problem, choice = chosen.costed.problem, chosen.solution.choice
    seconds_of, kept = problem.seconds_by_op(choice), problem.kept_by_op(choice)
    others = alternatives(problem, choice)
    found: dict[str, OpChoice] = {}
    rows = zip(chosen.costed.variables, problem.ops, choice, others, seconds_of, kept)
    for variable, row, index, other, own_seconds, own_bytes in rows:
        if variable.op is None or variable.prices is None:
            continue
        candidate, runner_up = row.candidates[index], None
        if other is not None:
            runner_up = RunnerUp(variable.strategies[other.candidate], other.seconds, other.missing_bytes)
        found[variable.name] = OpChoice(
            variable.strategies[index],
            own_seconds,
            variable.prices.communication(index),
            candidate.state_bytes + int(variable.prices.gradient_bytes[index]),
            own_bytes - candidate.kept_bytes + candidate.saved_bytes,
            candidate.transient_bytes,
            runner_up,
            (variable.op.parameter, *variable.op.companions),
        )
    return found


def overlap_of(overlap: OverlapConfig, decision: Decision) -> OverlapConfig:
    """What is said of the whole step, with the modes that were decided: the most frequent one by the pattern ``*``."""
    if any(decision.kept_slices.values()) and not overlap.keep_gathered:
        overlap = replace(overlap, keep_gathered=kept_by_pattern(decision))
    if overlap.recompute or not any(mode != "none" for mode in decision.modes.values()):
        return overlap
    most = Counter(decision.modes.values()).most_common(1)[0][0]
    said: dict[str, RecomputeMode] = {"*": most} if most != "none" else {}
    others = {layer: mode for layer, mode in decision.modes.items() if mode != most}
    return replace(overlap, recompute={**said, **others})


def kept_by_pattern(decision: Decision) -> dict[str, int]:
    """The slices that parameters keep gathered, by as few patterns of names as say the same of all that are gathered.

    >>> decided = {f"blocks.{layer}.{name}": int(name == "up") for layer in range(9) for name in ("up", "down")}
    >>> kept_by_pattern(Decision({}, {}, {}, decided))
    {'blocks.*.up': 1}
    >>> kept_by_pattern(Decision({}, {}, {}, {"up": 1, "down": 1})) == {"*": UNLIMITED}
    True
    """
    kept = decision.kept_slices
    slices = {name: strategy.slices for name, strategy in decision.strategies.items()}
    if all(count >= last_match(slices, name, 1) for name, count in kept.items()):
        return {"*": UNLIMITED}
    groups: dict[str, list[str]] = {}
    for name in kept:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    found: dict[str, int] = {}
    for pattern, names in groups.items():
        covered = {count for name, count in kept.items() if covers(pattern, name)}
        if len(covered) == 1:
            found[pattern] = covered.pop()
        else:
            found |= {name: kept[name] for name in names}
    return {pattern: count for pattern, count in found.items() if count}


def _tokens(annotated: Annotated) -> int:
    """Elements of the first input: tokens of a sequence, samples of anything else."""
    inputs = annotated.captured.inputs
    first = next((node.meta["val"] for node in annotated.captured.graph.graph.nodes if node.name in inputs), None)
    if first is None:
        return 1
    is_sequence = first.dim() > 1 and not first.is_floating_point()
    return int(torch.Size(first.shape[:2] if is_sequence else first.shape[:1]).numel())


def _model_flops(layers: LayerProblem) -> float:
    """Of the whole model: a layer counts for all that it stands for."""
    times: Mapping[str, int] = {layer: 1 + len(others) for layer, others in layers.fold.stands_for.items()}
    found = 0.0
    for node in layers.annotated.captured.graph.graph.nodes:
        if (work := node_work(node)) is not None:
            found += work.flops * times.get(layer_of(info(node).op), 1)
    return found


def _dtype(annotated: Annotated) -> str:
    captured = annotated.captured
    first = next(node for node in captured.graph.graph.nodes if node.name in captured.parameters)
    return str(first.meta["val"].dtype.to_real()).removeprefix("torch.")
