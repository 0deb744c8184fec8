"""Planning of one number of micro-batches: from a captured step and a cluster to the best plan.

All but a few of each stretch of equal layers are left out of the step. It is priced, written out as a problem of all
layers, and solved. The simulator evaluates the answers.

Overlap options that the user leaves open (kept gathers, sub-batches, buckets) are tried one after another where some
communication is exposed, each on top of those that were faster when simulated. An option that the model does not allow
(sub-batches with a batch norm) is skipped.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import torch

from shardweave.cost_model import Cluster, Options, node_work
from shardweave.ir import (
    UNLIMITED,
    Assignment,
    InfeasibleError,
    OverlapConfig,
    ParallelError,
    PlanError,
    RecomputeMode,
    readable_bytes,
)
from shardweave.passes import Annotated, with_times
from shardweave.planner.problem.build_problem import Costed, Costing
from shardweave.planner.problem.candidates import allowed_strategies
from shardweave.planner.problem.step_choices import layer_named
from shardweave.planner.search.evaluation import Decision, Evaluation, PlanEvaluator
from shardweave.planner.search.layer_problem import LayerProblem, Steps, buffer_bytes
from shardweave.planner.search.plan import ModelKey, OpChoice, Plan, RunnerUp, Saving
from shardweave.planner.search.plan_selection import MAX_NEED_RATIO, PlanSelector
from shardweave.planner.search.solver_cache import CachedSolver, Chosen, Lacking
from shardweave.planner.solver.branch_and_bound import Progress
from shardweave.planner.solver.solver import alternatives
from shardweave.report import Reporter
from shardweave.sharding import DeduplicatedStep, LayerRun, covers, info, last_match, layer_of

MIN_EXPOSED_RATIO = 0.02
"""Overlap options are tried only if exposed communication is more than this part of the step's time."""

MIN_GAIN_RATIO = 0.002
"""An overlap option is taken if it saves this part of the step's time."""

SUB_BATCHES = 2
"""One computes while the other communicates (Oases, arXiv 2305.16121, section 3.1); more make smaller kernels."""


def choices_for_the_whole(
    options: Options,
    made: OverlapConfig,
    evaluation: Evaluation,
    evaluate: Callable[[OverlapConfig], Evaluation],
    limit: int,
) -> tuple[OverlapConfig, Evaluation]:
    """The overlap options that are taken, and the evaluation with them.

    Parameters
    ----------
    options : Options
        What they leave at None is open.
    made : OverlapConfig
        What has been chosen so far.
    evaluation : Evaluation
        What the step takes with that.
    evaluate : callable
        From other choices to what the step takes.
    limit : int
        Bytes a device.
    """
    for tried in _open(options):
        if evaluation.exposed_communication <= MIN_EXPOSED_RATIO * evaluation.step_time:
            break
        other = tried(made)
        try:
            found = evaluate(other)
        except ParallelError:  # the model does not allow this option
            continue
        if found.peak_memory <= limit and found.step_time <= evaluation.step_time * (1 - MIN_GAIN_RATIO):
            made, evaluation = other, found
    return made, evaluation


def _open(options: Options) -> Iterator[Callable[[OverlapConfig], OverlapConfig]]:
    if options.sub_batches is None:
        yield lambda made: replace(made, sub_batches=SUB_BATCHES)
    if options.buckets is None and not options.ablation.flat_parameter:
        yield lambda made: replace(made, buckets=True)


FIRST_KEPT_LAYERS = 2
"""The number of layers of a run that are kept at first. The last of them has an equal neighbour."""


class Planning:
    """Plans one step on one cluster, under options that have a memory limit.

    `start` is a plan of the same model, to begin with. `margin` are the bytes of that limit that the search leaves
    free: for what the estimates from a few layers of a step leave out.
    """

    def __init__(
        self,
        steps: Steps,
        cluster: Cluster,
        options: Options,
        evaluate: PlanEvaluator,
        progress: Reporter,
        model: str = "the model",
        start: Plan | None = None,
        margin: int = 0,
    ) -> None:
        self.model, self.start = model, start
        self.memory_limit = options.limit(cluster)
        options = replace(options, memory_limit=max(1, self.memory_limit - margin))
        self.steps, self.cluster, self.options = steps, cluster, options
        self.evaluate, self.progress = evaluate, progress
        self._fastest, self._smallest = math.inf, math.inf

    @property
    def is_memory_bound(self) -> bool:
        """Whether memory makes the step slower for sure, and simulating it takes long."""
        return self._solver.is_memory_bound(self._whole, next(self._priced.ways_to_save(self._modes)))

    def expected(self, ceiling: float = math.inf) -> tuple[float, int]:
        """The solver's estimate of the fastest plan that fits: seconds, infinite if none fits, and bytes.

        From `ceiling` seconds on it says so of any plan.
        """
        self.progress("solve")
        return self._solver.expects(self._whole, next(self._priced.ways_to_save(self._modes)), ceiling)

    def make(self, ceiling: float = math.inf) -> Made | Lacked | None:
        """The best plan of the step; None if the solver proves that none takes less than `ceiling` seconds."""
        priced, whole, limit = self._priced, self._whole, self.options.limit(self.cluster)
        self.progress("solve")
        lacking = list[Lacking]()
        for smaller in priced.ways_to_save(self._modes):
            chosen = self._selector.choose(whole, smaller, ceiling)
            if chosen is None:
                return None
            if not isinstance(chosen, Lacking):
                return self._made(priced, chosen)
            lacking.append(chosen)
        ways = [(each.least.evaluation.peak_memory, partial(self._last, each, limit)) for each in lacking]
        return Lacked(min(least for least, _ in ways), lambda: self._made(priced, first_feasible(ways)))

    @cached_property
    def _solver(self) -> CachedSolver:
        start = self.start
        return CachedSolver(
            self.options.time_limit,
            lambda costed: None if start is None else _hint(costed, start),
            [run.layers for run in self.steps.runs(self.options)],
            self._solving,
        )

    def _solving(self, at: Progress) -> None:
        """Tell how far the program is."""
        left = max(0.0, self.options.time_limit - at.seconds)
        self.progress("solve", at.objective, at.bound, left, self._smallest)

    def _simulated(self, decision: Decision, limit: int) -> Evaluation:
        """Evaluate a plan under a limit, and report the best so far."""
        self.progress("simulate", self._fastest, least_bytes=self._smallest)
        evaluation = self.evaluate(decision, replace(self.options, memory_limit=limit))
        self._smallest = min(self._smallest, evaluation.peak_memory)
        if evaluation.peak_memory <= self.options.limit(self.cluster):
            self._fastest = min(self._fastest, evaluation.step_time)
        self.progress("simulate", self._fastest, least_bytes=self._smallest)
        return evaluation

    @cached_property
    def _selector(self) -> PlanSelector:
        return PlanSelector(self._simulated, self._solver)

    @cached_property
    def _whole(self) -> Costed:
        """The problem of the whole step, without recomputation that is not asked for."""
        return self._priced.whole(self._priced.costed)

    @property
    def _modes(self) -> bool:
        """Whether recomputation is chosen."""
        return self.options.recompute is None and not self._priced.has_checkpoints

    def _made(self, priced: LayerProblem, chosen: Chosen) -> Made:
        """With what is left open for the whole step."""
        overlap = _woven(self.options.overlap, chosen.decision)
        if not chosen.schedule_limit:  # the smallest plan is taken as it was simulated
            self.progress("weave")
            chosen, overlap = self._for_the_whole(chosen, overlap)
        return Made(self, priced, chosen, overlap)

    def _last(self, lacking: Lacking, limit: int) -> Chosen:
        """A plan for where nothing is known to fit, if there is one after all.

        Raises
        ------
        InfeasibleError
            With the smallest memory that would do, all layers simulated, and what takes it.
        """
        chosen = self._selector.last(lacking, limit)
        if chosen.evaluation.peak_memory <= limit:
            return chosen
        self.progress("simulate")
        evaluation, needed = self._least(chosen)
        if needed <= self.memory_limit:
            return replace(chosen, evaluation=evaluation, peak_memory=evaluation.peak_memory, schedule_limit=needed)
        parts = [f"{kind} {readable_bytes(size)}" for kind, size in largest(evaluation.at_peak)]
        raise InfeasibleError.needing(
            needed,
            f"no plan fits into the memory limit of {self.memory_limit} bytes ({readable_bytes(self.memory_limit)}) a "
            f"device; the smallest memory that does is {needed} bytes ({readable_bytes(needed)}): {', '.join(parts)}. "
            "Raise memory_limit, or use more devices or a smaller batch",
        )

    def _least(self, chosen: Chosen) -> tuple[Evaluation, int]:
        """What a plan takes with all of its layers simulated, and the smallest limit known that this meets."""
        overlap = _woven(self.options.overlap, chosen.decision)

        def under(limit: int) -> Evaluation:
            return self._evaluated(chosen, overlap, replace(self.options, memory_limit=limit), self.evaluate.whole)

        limit = chosen.evaluation.peak_memory
        evaluation = under(limit)
        if evaluation.peak_memory > limit:  # no order meets the limit of one byte: the one that holds least is taken
            evaluation = min(evaluation, under(1), key=lambda each: each.peak_memory)
        while evaluation.peak_memory > limit:
            limit = evaluation.peak_memory
            evaluation = under(limit)
        return evaluation, limit

    def plan(self, made: Made, key: ModelKey, begun: float) -> Plan:
        """The plan for the model of `key`; its figures are estimates."""
        return self._described(key, made.chosen, made.priced, made.overlap, time.monotonic() - begun)

    @cached_property
    def _priced(self) -> LayerProblem:
        """The folded step's problem: the smallest that tells how layers meet."""
        runs = self.steps.runs(self.options)
        mesh = with_times(self.cluster.mesh(), self.options)
        left = FIRST_KEPT_LAYERS
        while True:
            self.progress("annotate")
            counts: dict[LayerRun, int] = {run: min(left, len(run.layers)) for run in runs}
            fold, annotated = self.steps.folded(counts)
            if not annotated.ops:
                raise PlanError(f"{self.model} has no matrix product with a parameter: there is nothing to spread")
            self.progress("price")
            costing = Costing(annotated, self.cluster, self.options, allowed_strategies(annotated, mesh, self.options))
            priced = LayerProblem(fold, annotated, costing, costing.build(), buffer_bytes(self.steps.captured))
            if priced.unfolds:
                return priced
            left += 1

    def _for_the_whole(self, chosen: Chosen, overlap: OverlapConfig) -> tuple[Chosen, OverlapConfig]:
        """With what is left open for the whole step."""
        limit = self.options.limit(self.cluster)
        taken, evaluation = choices_for_the_whole(
            self.options, overlap, chosen.evaluation, lambda other: self._evaluated(chosen, other), limit
        )
        if taken == overlap:
            return chosen, overlap
        # Not less than without: under a limit that just this meets, the same is found
        peak_memory = max(chosen.peak_memory, evaluation.peak_memory)
        return replace(chosen, evaluation=evaluation, peak_memory=peak_memory), taken

    def _evaluated(
        self,
        chosen: Chosen,
        overlap: OverlapConfig,
        options: Options | None = None,
        evaluate: Callable[[Decision, Options], Evaluation] | None = None,
    ) -> Evaluation:
        """Evaluate the plan with these overlap options; without recomputation or kept gathers, if they have none."""
        decision = chosen.decision
        modes = decision.modes if overlap.recompute else {}
        kept = decision.kept_slices if overlap.keep_gathered else {}
        self.progress("weave", self._fastest)
        given = replace(
            overlap,
            recompute={} if modes else overlap.recompute,
            keep_gathered={} if kept else overlap.keep_gathered,
        )
        decision = decision._replace(modes=modes, kept_slices=kept)
        return (evaluate or self.evaluate)(decision, (options or self.options).with_overlap(given))

    def savings(self, made: Made) -> tuple[Saving, ...]:
        """The saving of each overlap option, from a simulation without it."""
        found, chosen, overlap = [], made.chosen, made.overlap
        self.progress("weigh")
        for choice, other in overlap.without().items():
            without = self._evaluated(chosen, other)
            seconds = without.step_time - chosen.evaluation.step_time
            found.append(Saving(choice, seconds, without.peak_memory - chosen.evaluation.peak_memory))
        return tuple(found)

    def _described(
        self,
        key: ModelKey,
        chosen: Chosen,
        priced: LayerProblem,
        overlap: OverlapConfig,
        seconds: float,
    ) -> Plan:
        problem, solution, options = chosen.costed.problem, chosen.solution, self.options
        annotated = priced.annotated
        seconds_of, kept = problem.seconds_by_op(solution.choice), problem.kept_by_op(solution.choice)
        others = alternatives(problem, solution.choice)
        choices: dict[str, OpChoice] = {}
        rows = zip(chosen.costed.variables, problem.ops, solution.choice, others, seconds_of, kept)
        for variable, row, index, other, own_seconds, own_bytes in rows:
            if variable.op is None or variable.prices is None:
                continue
            candidate = row.candidates[index]
            runner_up = None
            if other is not None:
                runner_up = RunnerUp(variable.strategies[other.candidate], other.seconds, other.missing_bytes)
            choices[variable.name] = OpChoice(
                variable.strategies[index],
                own_seconds,
                variable.prices.communication(index),
                candidate.state_bytes + int(variable.prices.gradient_bytes[index]),
                own_bytes - candidate.kept_bytes + candidate.saved_bytes,
                candidate.transient_bytes,
                runner_up,
                (variable.op.parameter, *variable.op.companions),
            )
        return Plan(
            key,
            self.cluster,
            choices,
            step_time=chosen.evaluation.step_time,
            peak_memory=chosen.peak_memory,
            exposed_communication=chosen.evaluation.exposed_communication,
            compute_time=chosen.evaluation.compute_time,
            tokens=_tokens(annotated),
            model_flops=_model_flops(annotated, priced.fold),
            dtype=_dtype(annotated),
            status=solution.status,
            program_time=solution.objective,
            bound=solution.bound,
            gap=solution.gap,
            proven_gap=chosen.proven_gap,
            planning_seconds=seconds,
            memory_limit=self.memory_limit,
            schedule_limit=chosen.schedule_limit or options.limit(self.cluster),
            optimizer_bytes=options.optimizer_bytes,
            forced=tuple(options.force),
            joins={name: _named(assignment) for name, assignment in chosen.decision.joins.items()},
            micro_batches=options.micro_batch_count,
            overlap=overlap,
        )


Found = TypeVar("Found")


def first_feasible(lacking: Sequence[tuple[int, Callable[[], Found]]]) -> Found:
    """The first that is found, or the error that names the smallest memory; with the bytes that each needs, about.

    Those that need the least come first, and none that need much more.
    """
    error: InfeasibleError | None = None
    for least_bytes, last in sorted(lacking, key=lambda each: each[0]):
        if error is not None and least_bytes > MAX_NEED_RATIO * (error.needed_bytes or math.inf):
            break
        try:
            return last()
        except InfeasibleError as other:
            error = min(error or other, other, key=lambda each: each.needed_bytes or math.inf)
    assert error is not None  # there is something lacking
    raise error


@dataclass(frozen=True)
class Made:
    """The chosen plan for one number of micro-batches."""

    planning: Planning
    priced: LayerProblem
    chosen: Chosen
    overlap: OverlapConfig


@dataclass(frozen=True)
class Lacked:
    """No plan is known to fit for one number of micro-batches.

    `least_bytes` is what the smallest one needs that was simulated; `last` looks for others, or says what is missing.
    """

    least_bytes: int
    last: Callable[[], Made]


def largest(sizes: Mapping[str, int], count: int = 3) -> list[tuple[str, int]]:
    """The largest entries, largest first.

    >>> largest({"saved": 3, "optimizer": 7, "inputs": 1}, 2)
    [('optimizer', 7), ('saved', 3)]
    """
    return sorted(sizes.items(), key=lambda item: -item[1])[:count]


def _woven(overlap: OverlapConfig, decision: Decision) -> OverlapConfig:
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


def _hint(costed: Costed, start: Plan) -> tuple[int, ...] | None:
    """The choice that a plan stands for; None where it has another one for some op."""
    found: list[int] = []
    for variable in costed.variables:
        if variable.degrees:
            most = min(max(choice.strategy.degree for choice in start.choices.values()), variable.degrees[-1])
            found.append(next(at for at, degree in enumerate(variable.degrees) if degree >= most))
            continue
        given = start.choices.get(variable.name)
        if variable.modes:
            mode = last_match(start.overlap.recompute, layer_named(variable.name), "none")
            found.append(variable.modes.index(mode))
            continue
        if variable.op is not None and given is not None and given.strategy in variable.strategies:
            kept = last_match(start.overlap.keep_gathered, variable.op.parameter, 0)
            options = [*zip(variable.strategies, variable.kept_slices)]
            wanted = given.strategy, min(given.strategy.slices, kept)
            found.append(options.index(wanted) if wanted in options else variable.strategies.index(given.strategy))
        elif variable.op is None and variable.name in start.joins:
            lies = [_named(next(iter(port.values())).in_space) for port in variable.ports]
            if dict(start.joins[variable.name]) not in lies:
                return None
            found.append(lies.index(dict(start.joins[variable.name])))
        else:
            return None
    return tuple(found)


def _named(assignment: Assignment) -> dict[str, str]:
    """The factor that each axis is on, by its name."""
    return {axis.name: factor for axis, factor in assignment.items}


def _tokens(annotated: Annotated) -> int:
    """Elements of the first input: tokens of a sequence, samples of anything else."""
    inputs = annotated.captured.inputs
    first = next((node.meta["val"] for node in annotated.captured.graph.graph.nodes if node.name in inputs), None)
    if first is None:
        return 1
    is_sequence = first.dim() > 1 and not first.is_floating_point()
    return int(torch.Size(first.shape[:2] if is_sequence else first.shape[:1]).numel())


def _model_flops(annotated: Annotated, fold: DeduplicatedStep) -> float:
    """Of the whole model: a layer counts for all that it stands for."""
    times = {layer: 1 + len(others) for layer, others in fold.stands_for.items()}
    found = 0.0
    for node in annotated.captured.graph.graph.nodes:
        if (work := node_work(node)) is not None:
            found += work.flops * times.get(layer_of(info(node).op), 1)
    return found


def _dtype(annotated: Annotated) -> str:
    captured = annotated.captured
    first = next(node for node in captured.graph.graph.nodes if node.name in captured.parameters)
    return str(first.meta["val"].dtype).removeprefix("torch.")
