"""Planning of one setting of the step: its micro-batches and sub-batches, and whether gradients have buckets.

All but a few of each stretch of equal layers are left out of the step. It is priced, written out as a problem of all
layers, and searched (`SettingSearch`). What is found becomes a `Plan` (`plan_of`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from shardweave.cost_model import Cluster, Options, node_work
from shardweave.ir import UNLIMITED, InfeasibleError, OverlapConfig, PlanError, RecomputeMode, Strategy, readable_bytes
from shardweave.passes import Annotated
from shardweave.planner.problem.build_problem import ProblemBuilder, gradient_bytes
from shardweave.planner.problem.space import Space
from shardweave.planner.search.evaluation import Decision, Evaluation, PlanEvaluator, complexity, named
from shardweave.planner.search.layer_problem import LayerProblem, Programs, Steps, buffer_bytes
from shardweave.planner.search.plan import ModelKey, OpChoice, Plan, RunnerUp, Saving
from shardweave.planner.search.setting_search import Evaluated, SettingSearch
from shardweave.planner.search.solver_cache import MAX_CANDIDATES_MODEST, CachedSolver, size
from shardweave.planner.solver.branch_and_bound import Progress
from shardweave.planner.solver.solver import alternatives
from shardweave.report import Reporter
from shardweave.sharding import LayerRun, covers, info, last_match, layer_of, unruled_ops

MIN_EXPOSED_RATIO = 0.02
"""Other settings are tried only if exposed communication is more than this part of the step's time."""

FIRST_KEPT_LAYERS = 2
"""The number of layers of a run that are kept at first. The last of them has an equal neighbour."""


@dataclass(frozen=True)
class SettingPlan:
    """The best plan of one setting."""

    planner: SettingPlanner
    chosen: Evaluated

    @property
    def overlap(self) -> OverlapConfig:
        """The choices for the whole step."""
        overlap = overlap_of(self.planner.options.overlap, self.chosen.decision)
        return replace(overlap, buckets="small") if self.chosen.is_merged else overlap

    @property
    def step_time(self) -> float:
        """Seconds, from a few layers."""
        return self.chosen.evaluation.step_time

    @property
    def strategies(self) -> set[Strategy]:
        """The strategies of its ops."""
        return {*self.chosen.decision.strategies.values()}

    @property
    def complexity(self) -> int:
        """How much there is to know of it (`evaluation.complexity`)."""
        return complexity(self.chosen.decision, self.planner.steps.runs(self.planner.options))

    @property
    def simpler(self) -> tuple[SettingPlan, ...]:
        """Simpler plans of the setting: the simplest that is nearly as fast, if there is one, and the simplest."""
        return tuple(replace(self, chosen=each) for each in self.chosen.simpler)

    @property
    def with_rivals(self) -> tuple[SettingPlan, ...]:
        """The plan, and those of the setting that may be faster with all layers."""
        return self, *(replace(self, chosen=each) for each in self.chosen.rivals)

    def is_same_plan(self, other: SettingPlan) -> bool:
        """Whether both decide the same for all ops and for the whole step."""
        own, others = self.chosen, other.chosen
        is_same_step = self.planner.options.micro_batches == other.planner.options.micro_batches
        return is_same_step and self.overlap == other.overlap and own.decision == others.decision

    @property
    def has_exposed_communication(self) -> bool:
        """Whether overlap could save some of the step's time."""
        evaluation = self.chosen.evaluation
        return evaluation.exposed_communication > MIN_EXPOSED_RATIO * evaluation.step_time


class SettingPlanner:
    """Plans one setting of a step on one cluster, under options that have a memory limit.

    Parameters
    ----------
    steps : Steps
    cluster : Cluster
    options : Options
        With the numbers of micro-batches and sub-batches, and whether there are buckets.
    evaluator : PlanEvaluator
    progress : Reporter
    model : str
        Its name, for errors.
    start : Plan, optional
        Of the same model, to begin with.
    margin : int
        Bytes of the limit that the search leaves free: for what the estimates from a few layers of a step leave out.
    merges_small : bool
        Whether small collectives may be merged.
    """

    def __init__(
        self,
        steps: Steps,
        cluster: Cluster,
        options: Options,
        evaluator: PlanEvaluator,
        progress: Reporter,
        model: str = "the model",
        start: Plan | None = None,
        margin: int = 0,
        merges_small: bool = False,
    ) -> None:
        self.model, self.start, self.merges_small = model, start, merges_small
        self.memory_limit = options.limit(cluster)
        options = replace(options, memory_limit=max(1, self.memory_limit - margin))
        self.steps, self.cluster, self.options = steps, cluster, options
        self.evaluator, self.progress = evaluator, progress

    @property
    def is_memory_bound(self) -> bool:
        """Whether memory makes the step slower for sure, and simulating it takes long."""
        return self._solver.is_memory_bound(self._programs.plain, self._programs.with_recomputation)

    @property
    def is_modest(self) -> bool:
        """Whether the problem is small enough for several settings to be priced."""
        return size(self._programs.plain) <= MAX_CANDIDATES_MODEST

    def bound(self, ceiling: float) -> float:
        """Seconds that the program says no plan takes less than that it counts as fitting.

        Of a problem that is not modest a bound from `ceiling` seconds on will do.
        """
        self.expected(math.inf if self.is_modest else ceiling)
        return self._solver.bound(self._programs.plain, self._programs.with_recomputation)

    def expected(self, ceiling: float = math.inf) -> tuple[float, int]:
        """The solver's estimate of the fastest plan that fits: seconds, infinite if none fits, and bytes.

        From `ceiling` seconds on it says so of any plan.
        """
        self.progress("solve")
        return self._solver.expects(self._programs.plain, self._programs.with_recomputation, ceiling)

    def best_plan(self, ceiling: float = math.inf, is_other: bool = False) -> SettingPlan | None:
        """The best plan of the step; None where none is known to fit that takes less than `ceiling` seconds.

        As `SettingSearch.best`.
        """
        self.progress("solve")
        chosen = self._search.best(ceiling, is_other)
        return None if chosen is None else SettingPlan(self, chosen)

    @cached_property
    def least_bytes(self) -> int:
        """What the smallest plan needs that the program says, simulated: where none is known to fit."""
        return self._search.least().evaluation.peak_memory

    def smallest_plan(self) -> SettingPlan:
        """A plan for where nothing is known to fit, if there is one after all.

        Raises
        ------
        InfeasibleError
            With the smallest memory that would do, all layers simulated, and what takes it.
        """
        limit = self.options.limit(self.cluster)
        chosen = self._search.smallest()
        if chosen.evaluation.peak_memory <= limit:
            return SettingPlan(self, chosen)
        self.progress("simulate")
        chosen = self._whole_in_least(chosen)
        needed = chosen.evaluation.peak_memory
        if needed <= self.memory_limit:
            return SettingPlan(self, chosen)
        parts = [f"{kind} {readable_bytes(size)}" for kind, size in largest(chosen.evaluation.at_peak)]
        raise InfeasibleError.needing(
            needed,
            f"no plan fits into the memory limit of {self.memory_limit} bytes ({readable_bytes(self.memory_limit)}) a "
            f"device; the smallest memory that does is {needed} bytes ({readable_bytes(needed)}): {', '.join(parts)}. "
            "Raise memory_limit, or use more devices or a smaller batch",
        )

    def plan(self, best: SettingPlan, key: ModelKey) -> Plan:
        """The plan for the model of `key`; its figures are estimates."""
        options = replace(self.options, memory_limit=self.memory_limit)
        return plan_of(best.chosen, key, self.cluster, options, self.layers, best.overlap)

    def savings(self, best: SettingPlan) -> tuple[Saving, ...]:
        """The saving of each overlap option, from a simulation without it."""
        found, given = [], best.chosen.evaluation
        self.progress("weigh")
        for choice, other in best.overlap.without().items():
            without = self.evaluated(best.chosen, other)
            found.append(Saving(choice, without.step_time - given.step_time, without.peak_memory - given.peak_memory))
        return tuple(found)

    @cached_property
    def layers(self) -> LayerProblem:
        """The folded step's problem, which is the same under any memory limit."""
        options = replace(self.options, memory_limit=None)
        return self.steps.priced.get((self.cluster, options.key), lambda: self._priced(options))

    def _priced(self, options: Options) -> LayerProblem:
        """Price the smallest folded step that tells how layers meet."""
        runs = self.steps.runs(options)
        left = FIRST_KEPT_LAYERS
        while True:
            self.progress("annotate")
            counts: dict[LayerRun, int] = {run: min(left, len(run.layers)) for run in runs}
            fold, annotated = self.steps.folded(counts)
            if not annotated.ops:
                raise PlanError(
                    f"{self.model} has no op that reads a parameter together with the batch: there is nothing to spread"
                )
            self.progress("price")
            captured = self.steps.captured
            builder = ProblemBuilder(Space(annotated, self.cluster, options), gradient_bytes(captured))
            layers = LayerProblem(fold, annotated, builder, builder.build(), buffer_bytes(captured))
            if layers.unfolds:
                return layers
            left += 1

    @cached_property
    def _programs(self) -> Programs:
        return Programs(self.layers, self.options.limit(self.cluster))

    @cached_property
    def _solver(self) -> CachedSolver:
        runs = [run.layers for run in self.steps.runs(self.options)]
        return CachedSolver(self.options.time_limit, self.start, runs, self._solving)

    @cached_property
    def _search(self) -> SettingSearch:
        limit, settings = self.options.limit(self.cluster), (self.evaluator, self.options)
        return SettingSearch(self._programs, self._solver, *settings, limit, self.progress, self.merges_small)

    def _solving(self, at: Progress) -> None:
        """Tell how far the program is."""
        left = max(0.0, self.options.time_limit - at.seconds)
        self.progress("solve", at.objective, at.bound, left)

    def evaluated(self, chosen: Evaluated, overlap: OverlapConfig, limit: int | None = None) -> Evaluation:
        """Evaluate the plan with these overlap options; without recomputation or kept gathers, if they have none.

        With all layers, if a memory limit is given.
        """
        decision = chosen.decision
        modes = decision.modes if overlap.recompute else {}
        kept = decision.kept_slices if overlap.keep_gathered else {}
        given = replace(
            overlap,
            recompute={} if modes else overlap.recompute,
            keep_gathered={} if kept else overlap.keep_gathered,
        )
        decision, options = decision._replace(modes=modes, kept_slices=kept), self.options.with_overlap(given)
        if limit is None:
            return self.evaluator(decision, options)
        return self.evaluator.whole(decision, replace(options, memory_limit=limit))

    def _whole_in_least(self, chosen: Evaluated) -> Evaluated:
        """What a plan takes with all of its layers simulated, in the order that holds least of those for three limits.

        The one of its estimate, what it holds in that, and one byte, which no order meets.
        """
        overlap, least = SettingPlan(self, chosen).overlap, chosen.evaluation.peak_memory
        found: list[Evaluated] = []
        for limit in dict.fromkeys((chosen.schedule_limit, least, 1)):
            evaluation = self.evaluated(chosen, overlap, limit)
            found.append(replace(chosen, evaluation=evaluation, schedule_limit=limit))
            if evaluation.peak_memory <= least:
                break
        return min(found, key=lambda each: each.evaluation.peak_memory)


def largest(sizes: Mapping[str, int], count: int = 3) -> list[tuple[str, int]]:
    """The largest entries, largest first.

    >>> largest({"saved": 3, "optimizer": 7, "inputs": 1}, 2)
    [('optimizer', 7), ('saved', 3)]
    """
    return sorted(sizes.items(), key=lambda item: -item[1])[:count]


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
        whole_ops=unruled_ops(layers.annotated.captured.graph.graph),
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
