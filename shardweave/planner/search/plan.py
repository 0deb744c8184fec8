"""The plan: every op's strategy, the predicted cost of the step, and the gap to the solver's bound.

A plan is keyed by the names of parameters, modules and inputs, never by nodes of a graph, so that a plan made on a
laptop's CPU is used as it is on GPUs. `OpChoice` has the strategy of one op; `ModelKey` says which model a plan is for.

Plans and differences of plans print as tables. Equal layers are one row, ``blocks.*.qkv ×12``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardweave.cost_model import Cluster, Timeline
from shardweave.ir import (
    ClusterError,
    LayoutError,
    OverlapConfig,
    ParallelError,
    PlanError,
    Precision,
    Strategy,
    brief,
    readable_bytes,
    readable_ranges,
    readable_seconds,
)
from shardweave.planner.search.plan_schema import check_on, check_plan
from shardweave.report import Report

if TYPE_CHECKING:
    from shardweave.report import Report

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelKey:
    """The key of a model and its call: names, global shapes and dtypes. A plan is valid for the same key."""

    parameters: Mapping[str, Shape]
    inputs: Mapping[str, Shape] = field(default_factory=dict)
    precision: Precision | None = None

    def __repr__(self) -> str:
        precision = f", {self.precision}" if self.precision is not None else ""
        return f"<ModelKey of {len(self.parameters)} parameters and {len(self.inputs)} inputs{precision}>"

    def differences(self, given: ModelKey, places: tuple[str, str] = ("in the plan", "here")) -> list[str]:
        """The differences of a model and its call from this key, in words; `places` says where each of them is.

        >>> ModelKey({"up.weight": (8, 4)}).differences(ModelKey({"up.weight": (8, 2)}))
        ['parameter up.weight has shape (8, 4) in the plan and (8, 2) here']
        """
        found = _differences("parameter", self.parameters, given.parameters, places)
        found += _differences("input", self.inputs, given.inputs, places)
        if self.precision != given.precision:
            found.append(
                f"the plan is for the precision {_words(self.precision)}, the options ask for "
                f"{_words(given.precision)} (precision= in Options)"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain types; `from_dict` is its inverse."""
        precision = {"precision": self.precision.to_dict()} if self.precision is not None else {}
        return {"parameters": dict(self.parameters), "inputs": dict(self.inputs), **precision}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelKey:
        return cls(
            {name: tuple(shape) for name, shape in data["parameters"].items()},
            {name: tuple(shape) for name, shape in data["inputs"].items()},
            Precision.from_dict(data["precision"]) if data.get("precision") else None,
        )


def _differences(
    what: str, planned: Mapping[str, Shape], given: Mapping[str, Shape], places: tuple[str, str]
) -> list[str]:
    one, other = places
    found = [f"{what} {name} is {one} and not {other}" for name in planned if name not in given]
    found += [f"{what} {name} is {other} and not {one}" for name in given if name not in planned]
    return found + [
        f"{what} {name} has shape {tuple(shape)} {one} and {tuple(given[name])} {other}"
        for name, shape in planned.items()
        if name in given and tuple(given[name]) != tuple(shape)
    ]


def _words(precision: Precision | None) -> str:
    return "of the model" if precision is None else f"({precision})"


_OP_FIGURES = ("seconds", "communication_seconds", "state_bytes", "saved_bytes", "transient_bytes")


class RunnerUp(NamedTuple):
    """The strategy that an op nearly got, all other ops left as they are.

    Parameters
    ----------
    strategy : Strategy
    seconds : float
        How much longer the step would take with it in the program (negative: shorter, but it does not fit, or the
        simulator says that the plan is faster).
    missing_bytes : int
        How far it would exceed the memory limit; 0 where it fits.
    """

    strategy: Strategy
    seconds: float
    missing_bytes: int = 0


@dataclass(frozen=True)
class OpChoice:
    """One op's strategy and its predicted part of the step, on one device.

    Parameters
    ----------
    strategy : Strategy
    seconds : float
        What it adds to the program's time, forward and backward: to what each of these waits for.
    communication_seconds : float
        What its own collectives take when nothing hides them.
    state_bytes, saved_bytes, transient_bytes : int
        Parameters, gradients and optimizer states; kept for the backward; needed only while it runs.
    runner_up : RunnerUp, optional
    params : tuple of str
        The names of its parameters.
    """

    strategy: Strategy
    seconds: float
    communication_seconds: float = 0.0
    state_bytes: int = 0
    saved_bytes: int = 0
    transient_bytes: int = 0
    runner_up: RunnerUp | None = None
    params: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return brief(self)

    @property
    def memory(self) -> int:
        """Bytes that the op occupies beyond its own run."""
        return self.state_bytes + self.saved_bytes

    def to_dict(self) -> dict[str, Any]:
        """As plain types; `from_dict` is its inverse."""
        data = {"strategy": self.strategy.to_dict(), **{name: getattr(self, name) for name in _OP_FIGURES}}
        if self.runner_up is not None:
            data["runner_up"] = {**self.runner_up._asdict(), "strategy": self.runner_up.strategy.to_dict()}
        return {**data, "params": list(self.params)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OpChoice:
        other = data.get("runner_up")
        runner_up = other and RunnerUp(Strategy.from_dict(other["strategy"]), other["seconds"], other["missing_bytes"])
        return cls(
            strategy=Strategy.from_dict(data["strategy"]),
            **{name: data[name] for name in _OP_FIGURES},
            runner_up=runner_up,
            params=tuple(data["params"]),
        )


FORMAT = "shardweave plan"
VERSION = 6
"""The version of plan files. It is raised whenever an older reader would misread a file."""


class Saving(NamedTuple):
    """The simulated saving of one overlap option, with all other choices unchanged.

    Parameters
    ----------
    choice : str
    seconds, bytes : float, int
        How much longer the step would take without it, and how much more memory it would need (negative: less).
    """

    choice: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class OtherPlan:
    """Another plan that was found, beside the one that was taken.

    Parameters
    ----------
    num_strategies : int
    slowdown : float
        The ratio of its step time to that of the plan that was taken.
    """

    num_strategies: int
    slowdown: float


@dataclass(frozen=True)
class Plan:
    """A parallelization plan of a model on a cluster, with the predicted cost of a step.

    Parameters
    ----------
    model_key : ModelKey
        The model and the inputs that it is for.
    cluster : Cluster
        The machine that it was made for.
    choices : mapping of str to OpChoice
        By the op's name, in the order of the model.
    step_time, compute_time, exposed_communication : float
        Seconds a step, as the simulator plays the generated graphs of all layers: those of `timeline()`. The last is
        communication that no compute hides.
    peak_memory, memory_limit : int
        Bytes a device: the peak of `timeline()`, and what it may not exceed.
    schedule_limit : int
        Bytes a device that the order of the generated graphs is made for, wherever the plan is compiled: such that
        `peak_memory` keeps to the memory limit. 0: what the options say then.
    optimizer_bytes : int, optional
        Bytes of optimizer states for each parameter that all of this holds for. None: what the options say.
    tokens : int
        Elements of the batch a step (tokens, or samples where the input is not a sequence).
    model_flops : float
        FLOPs a step of the whole model, on all devices together, recomputation not counted.
    dtype : str
        The dtype that matmuls run in, for the device's peak.
    status : {"optimal", "feasible"}
        ``"optimal"``: no other choice that the integer program has takes less time by the program's own count.
        ``"feasible"``: that is not known, or the simulator preferred another plan to the program's answer. Neither
        says that no faster step exists: the simulator's seconds are others, and so are the machine's.
    program_time, bound, gap : float
        What the integer program counts for this plan; a lower bound of what it counts for any choice that it has; and
        how far apart the two are, relative to `program_time`.
    proven_gap : float
        The same for the program's own answer. It is less than `gap` where the simulator
        takes that answer for slower than this plan.
    planning_seconds : float
        What making it took.
    forced : tuple of str
        The patterns of `Options.force` that had a say.
    joins : mapping of str to mapping of str to str
        How ops that bring several values together (a residual sum, attention) are spread: each axis' factor.
    whole_ops : tuple of str
        The ops that every device computes whole, as they have no sharding rule, each with its module.
    micro_batches : int
        Into how many parts a call's batch is cut, one computed after another.
    overlap : OverlapConfig
        What else is chosen for the whole step: sub-batches, recomputation, the schedule.
    savings : tuple of Saving
        What each of these choices is worth; not of a plan that `compile_parallel` makes on its way.
    other : OtherPlan, optional
        The fastest plan, if this one was taken because it is simpler and nearly as fast (`Options.simplicity`); else
        the simplest plan that was found, if this is another one.
    """

    model_key: ModelKey
    cluster: Cluster
    choices: Mapping[str, OpChoice]
    step_time: float
    peak_memory: int
    exposed_communication: float = 0.0
    compute_time: float = 0.0
    tokens: int = 0
    model_flops: float = 0.0
    dtype: str = "float32"
    status: Literal["optimal", "feasible"] = "feasible"
    program_time: float = 0.0
    bound: float = 0.0
    gap: float = 0.0
    proven_gap: float = 0.0
    planning_seconds: float = 0.0
    memory_limit: int = 0
    schedule_limit: int = 0
    optimizer_bytes: int | None = None
    forced: tuple[str, ...] = ()
    joins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    whole_ops: tuple[str, ...] = ()
    micro_batches: int = 1
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    savings: tuple[Saving, ...] = ()
    other: OtherPlan | None = None
    _timeline: Callable[[bool], Timeline] | None = field(default=None, repr=False, compare=False)
    _resolve: Callable[[Plan, dict[str, Any]], Plan] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        limit = f" of {readable_bytes(self.memory_limit)}" if self.memory_limit else ""
        return (
            f"<Plan of {len(self.choices)} ops for {self.cluster.name} ({self.cluster.world_size} devices): "
            f"{readable_seconds(self.step_time)} a step, {readable_bytes(self.peak_memory)}{limit} a device, "
            f"{self.status}>"
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of the whole cluster."""
        return self.tokens / self.step_time if self.step_time else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the model's FLOP/s as a part of the peak of all devices (PaLM, appendix B)."""
        peak = self.cluster.device.peak(self.dtype) * self.cluster.world_size
        return self.model_flops / (self.step_time * peak) if self.step_time else 0.0

    def explain(self) -> Report:
        """The plan as a table, op by op: strategy, time, communication, memory, and why not the runner-up."""
        # The one import that goes up, so that a plan can be asked; the report knows plans, a plan no report.

        return explain(self)

    def diff(self, other: Plan) -> Report:
        """The ops on which this plan and `other` differ, and what that costs."""

        return diff(self, other)

    def timeline(self, sums: bool = True) -> Timeline:
        """The simulated schedule of the generated step.

        Parameters
        ----------
        sums : bool
            Gradients are brought to the states. Without, they stay where they are added up, as under ``no_sync``, and
            the optimizer runs all the same: to see what data parallelism takes, or the step of one of its groups.

        Raises
        ------
        PlanError
            This plan was loaded: a timeline needs the model's graph.
        """
        if self._timeline is None:
            raise PlanError(
                "a plan that was loaded has no timeline, which needs the model's graph: take the one of "
                "compile_parallel(model, cluster, example_inputs, plan=plan).plan"
            )
        return self._timeline(sums)

    def resolve(self, **options: Any) -> Plan:
        """The best plan with some options changed, beginning at this one: the model is not captured again.

        Parameters
        ----------
        **options
            Fields of `Options`; the patterns of `force` are added to those that this plan was made with.

        Raises
        ------
        PlanError
            This plan was loaded, or there is no such option; besides what `shardweave.plan` raises.

        Examples
        --------
        >>> import torch
        >>> import shardweave as sw
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        >>> plan = sw.plan(model, sw.Cluster.local(4), torch.randn(32, 64))
        >>> str(plan.resolve(force={"0": "zero3"}).choices["0"].strategy)
        '(1, 1, 1, 4) ZDP'
        """
        if self._resolve is None:
            raise PlanError(
                "a plan that was loaded cannot be resolved, which needs the model's graph: make one with "
                "shardweave.plan(model, cluster, example_inputs)"
            )
        return self._resolve(self, options)

    def with_model(self, timeline: Callable[[bool], Timeline], resolve: Callable[[Plan, dict[str, Any]], Plan]) -> Plan:
        """This plan, able to show the timeline that the call `timeline(sums)` makes, and to be made again."""
        return replace(self, _timeline=timeline, _resolve=resolve)

    def with_timeline(self, timeline: Callable[[bool], Timeline]) -> Plan:
        """This plan, able to show the timeline that the call `timeline(sums)` makes."""
        return replace(self, _timeline=timeline)

    def check(self, model_key: ModelKey, cluster: Cluster) -> None:
        """Make sure that this plan is for such a model, such inputs and such a cluster.

        Another machine with as many devices a level is fine: the plan may be slower there, but it is right.

        Raises
        ------
        PlanError
            Names each parameter, input or size that differs.
        """
        differences = self.model_key.differences(model_key)
        planned, given = (
            [axis.size for axis in sorted(c.mesh().axes, key=lambda axis: axis.stride)] for c in (self.cluster, cluster)
        )
        if self.cluster.world_size != cluster.world_size:
            differences.append(
                f"the plan is for {self.cluster.world_size} devices ({self.cluster.name}), "
                f"the cluster {cluster.name} has {cluster.world_size}"
            )
        elif planned != given:
            differences.append(f"the plan is for axes of sizes {planned}, innermost first, {cluster.name} has {given}")
        if differences:
            shown = differences[:5] + [f"and {len(differences) - 5} more"] * (len(differences) > 5)
            raise PlanError(
                f"this plan is for another model, input or cluster: {'; '.join(shown)}. Make a plan for this one "
                "with shardweave.plan(model, cluster, example_inputs)."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON that `load` reads (without the timeline)."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in a JSON file.

        Raises
        ------
        PlanError
            There is no such file, or it is no plan of a version that this shardweave reads.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            return cls.from_dict(json.loads(text, object_pairs_hook=_without_duplicates))
        except OSError as error:
            raise PlanError(f"{path}: expected a readable plan file, got: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, too many digits, nested too deeply
            raise PlanError(f"{path}: expected a plan as JSON, got: {error}") from error
        except ParallelError as error:
            raise PlanError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain types; `from_dict` is its inverse."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        return {
            "format": FORMAT,
            "version": VERSION,
            "made_by": _made_by(),
            "model": self.model_key.to_dict(),
            "cluster": self.cluster.to_dict(),
            **figures,
            "overlap": self.overlap.to_dict(),
            "other": None if self.other is None else [self.other.num_strategies, self.other.slowdown],
            "choices": {name: choice.to_dict() for name, choice in self.choices.items()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """A plan of plain types; `PlanError` names what is missing or wrong in them."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(f'expected a plan saved by shardweave ("format": "{FORMAT}"), got something else')
        if data.get("version") != VERSION:
            made_by = data.get("made_by", "an older shardweave, which did not note its version")
            raise PlanError(
                f"expected a plan of version {VERSION}, got {data.get('version')!r}, made by {made_by}: plan again"
            )
        check_plan(data)
        choices = {}
        strategies = {}
        for name, choice in data["choices"].items():
            try:
                made = choices[name] = OpChoice.from_dict(choice)
            except LayoutError as error:
                raise PlanError(f"choices.{name}: {error}") from error
            strategies[f"choices.{name}.strategy"] = made.strategy
            if made.runner_up is not None:
                strategies[f"choices.{name}.runner_up.strategy"] = made.runner_up.strategy
        figures = {name: data[name] for name in _FIGURES if name != "whole_ops"}
        figures["whole_ops"] = data.get("whole_ops", ())
        figures["forced"], figures["whole_ops"] = tuple(figures["forced"]), tuple(figures["whole_ops"])
        figures["overlap"] = OverlapConfig.from_dict(data["overlap"])
        figures["savings"] = tuple(Saving(*saving) for saving in figures["savings"])
        figures["other"] = OtherPlan(*data["other"]) if data.get("other") else None
        try:
            cluster = Cluster.from_dict(data["cluster"])
        except ClusterError as error:
            raise PlanError(f"cluster: {error}") from error
        check_on(cluster, strategies, figures["joins"])
        return cls(model_key=ModelKey.from_dict(data["model"]), cluster=cluster, choices=choices, **figures)


def _made_by() -> str:
    try:
        return f"shardweave {metadata.version('shardweave')}"
    except metadata.PackageNotFoundError:  # imported from its sources, and not installed
        return "shardweave that is not installed"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON file, in which no key comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"the key {twice!r} comes twice in one mapping: it is damaged, plan again")
    return found


_APART = ("model_key", "cluster", "choices", "overlap", "other", "_timeline", "_resolve")
_FIGURES = tuple(each.name for each in fields(Plan) if each.name not in _APART)


def explain(plan: Plan) -> Report:
    """`plan` op by op: its strategy, time, communication, memory, and why not the runner-up.

    Time, communication and memory of a folded row are those of all its layers together.
    """
    folded = fold(plan.choices, lambda name: _choice_key(plan.choices[name]))
    rows = []
    for label, names in folded:
        own = [plan.choices[name] for name in names]
        strategy = own[0].strategy
        rows.append(
            (
                label,
                _grid(strategy),
                _rest(strategy),
                readable_seconds(sum(choice.seconds for choice in own)),
                readable_seconds(sum(choice.communication_seconds for choice in own)),
                readable_bytes(sum(choice.state_bytes for choice in own)),
                readable_bytes(sum(choice.saved_bytes for choice in own)),
                _why_not(strategy, own[0].runner_up),
            )
        )
    choices = list(plan.choices.values())
    total = (
        f"{len(choices)} ops",
        "",
        "",
        readable_seconds(sum(choice.seconds for choice in choices)),
        readable_seconds(sum(choice.communication_seconds for choice in choices)),
        readable_bytes(sum(choice.state_bytes for choice in choices)),
        readable_bytes(sum(choice.saved_bytes for choice in choices)),
        "",
    )
    columns = ("op", "x, y, z, data", "at rest", "time ", "comm. ", "states ", "saved ", "runner-up")
    return Report(_summary(plan), columns, tuple(rows), total)


def diff(plan: Plan, other: Plan) -> Report:
    """Where `plan` and `other` take different strategies, and what `plan` costs more (or, negative, less)."""
    names = [*plan.choices, *(name for name in other.choices if name not in plan.choices)]

    def strategies(name: str) -> tuple[str, str]:
        here, there = plan.choices.get(name), other.choices.get(name)
        return (str(here.strategy) if here else "no such op"), (str(there.strategy) if there else "no such op")

    differing = [name for name in names if strategies(name)[0] != strategies(name)[1]]
    rows = []
    for label, own in fold(differing, lambda name: (strategies(name), _figures(plan, name), _figures(other, name))):
        here, there = strategies(own[0])
        time, memory = (sum(_figures(plan, name)[i] - _figures(other, name)[i] for name in own) for i in (0, 1))
        rows.append((label, here, there, _signed(time, readable_seconds), _signed(memory, readable_bytes)))
    lines = [
        f"{len(differing)} of {len(names)} ops differ" if differing else f"all {len(names)} ops have the same strategy",
        "step time " + _both(plan.step_time, other.step_time, readable_seconds),
        "peak memory " + _both(plan.peak_memory, other.peak_memory, readable_bytes),
        "exposed communication " + _both(plan.exposed_communication, other.exposed_communication, readable_seconds),
    ]
    here, there = (str(key.precision or "the model's") for key in (plan.model_key, other.model_key))
    if here != there:
        lines.append(f"precision {here}; the other {there}")
    if plan.cluster != other.cluster:
        lines.append(f"made for {_cluster(plan)}, the other for {_cluster(other)}")
    return Report(tuple(lines), ("op", "this plan", "the other", "time ", "memory "), tuple(rows))


def fold(names: Iterable[str], key: Callable[[str], object]) -> list[tuple[str, list[str]]]:
    """Names that differ in one layer number only and have equal keys, as one label with all of them.

    >>> fold(["emb", "blocks.0.qkv", "blocks.1.qkv", "blocks.2.qkv"], key=lambda name: name != "blocks.2.qkv")
    [('emb', ['emb']), ('blocks.0-1.qkv ×2', ['blocks.0.qkv', 'blocks.1.qkv']), ('blocks.2.qkv', ['blocks.2.qkv'])]
    >>> [label for label, _ in fold(["h.0.up", "h.0.down", "h.1.up", "h.1.down"], key=lambda name: "")]
    ['h.*.up ×2', 'h.*.down ×2']
    """
    groups: dict[tuple[str, object], list[str]] = {}
    sizes: dict[str, int] = {}
    for name in names:
        pattern = _NUMBER.sub("*", name)
        groups.setdefault((pattern, key(name)), []).append(name)
        sizes[pattern] = sizes.get(pattern, 0) + 1
    folded = []
    for (pattern, _), own in groups.items():
        if len(own) == 1:
            folded.append((own[0], own))
        elif len(own) == sizes[pattern] or pattern.count("*") > 1:
            folded.append((f"{pattern} ×{len(own)}", own))
        else:
            numbers = [int(match.group()) for name in own if (match := _NUMBER.search(name))]
            folded.append((f"{pattern.replace('*', readable_ranges(numbers))} ×{len(own)}", own))
    return folded


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _choice_key(choice: OpChoice) -> tuple[object, ...]:
    """Equal where two ops' rows would read the same."""
    return (
        str(choice.strategy),
        readable_seconds(choice.seconds),
        readable_seconds(choice.communication_seconds),
        choice.state_bytes,
        choice.saved_bytes,
        choice.transient_bytes,
        _why_not(choice.strategy, choice.runner_up),
    )


def _figures(plan: Plan, name: str) -> tuple[float, int]:
    choice = plan.choices.get(name)
    return (choice.seconds, choice.memory) if choice else (0.0, 0)


def _grid(strategy: Strategy) -> str:
    both = strategy.grid.x > 1 and strategy.grid.y > 1
    slices = f" in {strategy.slices} slices" if strategy.slices > 1 else ""
    return f"{strategy.grid}{' y inside' if strategy.y_inside and both else ''}{slices}"


def _rest(strategy: Strategy) -> str:
    """How the states rest over the devices that hold the same part of the parameter: whole, sharded, or between."""
    free = strategy.grid.z * strategy.grid.data
    if free == 1:
        return "-"
    if strategy.states != strategy.rest:
        zero = {1: "ZeRO-1", free: "ZeRO-2"} if (strategy.rest, strategy.states) == (1, free) else {}
        apart = f", gradients {strategy.gradients}" if strategy.gradients != strategy.states else ""
        return zero.get(strategy.gradients, f"over {strategy.rest}{apart}, states {strategy.states} of {free}")
    return {1: "DP", free: "ZDP"}.get(strategy.rest, f"over {strategy.rest} of {free}")


def _why_not(chosen: Strategy, runner_up: RunnerUp | None) -> str:
    """The change that the runner-up strategy would make: ``DP: −0.30 ms, but 1.2 GiB too large``."""
    if runner_up is None:
        return "-"
    other = runner_up.strategy
    same = (other.grid, other.y_inside, other.slices) == (chosen.grid, chosen.y_inside, chosen.slices)
    size = f", but {readable_bytes(runner_up.missing_bytes)} too large" if runner_up.missing_bytes else ""
    return f"{_rest(other) if same else other}: {_signed(runner_up.seconds, readable_seconds)}{size}"


def _signed(value: float, readable: Callable[[float], str]) -> str:
    """The value with its sign, where it has one that can be seen."""
    return "±0" if not value else f"{'+' if value > 0 else '−'}{readable(abs(value))}"


def _effect(saving: Saving) -> str:
    """The effect of an option on the step: ``2 sub-batches −12 ms, +30 MiB``."""
    time, memory = _signed(-saving.seconds, readable_seconds), _signed(-saving.bytes, readable_bytes)
    return f"{saving.choice} {time} a step, {memory}"


def _both(here: float, there: float, readable: Callable[[float], str]) -> str:
    relative = f", {100 * (here / there - 1):+.1f} %" if there else ""
    return f"{readable(here)}, the other {readable(there)} ({_signed(here - there, readable)}{relative})"


def _cluster(plan: Plan) -> str:
    devices = plan.cluster.world_size
    return f"{plan.cluster.name} ({devices} device{'s' * (devices != 1)})"


def _answer(plan: Plan) -> str:
    """The proven gap of the solver's own answer, where that is another plan."""
    nearer = plan.proven_gap < plan.gap - 5e-6
    return f" (its own answer, slower when simulated, is within {100 * plan.proven_gap:.2g} %)" if nearer else ""


def _beside(other: OtherPlan) -> str:
    """What simplicity costs, or would cost."""
    strategies = f"of {other.num_strategies} strateg{'y' if other.num_strategies == 1 else 'ies'}"
    if other.slowdown <= 1:
        return f"{100 * (1 / other.slowdown - 1):.2g} % slower than the fastest plan found, {strategies}: simplicity=0"
    return f"the simplest plan found, {strategies}, takes {100 * (other.slowdown - 1):.2g} % longer"


def _summary(plan: Plan) -> tuple[str, ...]:
    rate = f", {plan.tokens_per_second:,.0f} tokens/s" if plan.tokens else ""
    mfu = f", MFU {100 * plan.mfu:.1f} %" if plan.model_flops else ""
    limit = f" of {readable_bytes(plan.memory_limit)}" if plan.memory_limit else ""
    proof = "optimal" if plan.status == "optimal" else f"feasible, at most {100 * plan.gap:.2g} % from the optimum"
    program = f" in the program, which says {readable_seconds(plan.program_time)} a step" if plan.program_time else ""
    lines = [
        f"{_cluster(plan)}: {readable_seconds(plan.step_time)} a step{rate}{mfu}",
        f"compute {readable_seconds(plan.compute_time)}, exposed communication "
        f"{readable_seconds(plan.exposed_communication)}; memory {readable_bytes(plan.peak_memory)}{limit} a device",
        f"{proof}{program}{_answer(plan)}; planned in {readable_seconds(plan.planning_seconds)}",
    ]
    if plan.other is not None:
        lines.append(_beside(plan.other))
    if plan.cluster.measured is not None and plan.cluster.measured.collectives.curves:
        lines.append("costs are by collectives and a device that were measured")
    if plan.micro_batches > 1:
        lines.append(f"{plan.micro_batches} micro-batches a call")
    if text := str(plan.overlap):
        lines.append(text)
    if plan.savings:
        lines.append(f"what each is predicted to change: {'; '.join(map(_effect, plan.savings))}")
    if plan.model_key.precision is not None:
        lines.append(f"precision: {plan.model_key.precision}")
    if plan.forced:
        lines.append(f"forced: {', '.join(plan.forced)}")
    if plan.whole_ops:
        lines.append(f"computed whole on every device, without a sharding rule: {', '.join(plan.whole_ops)}")
    others = [choice.runner_up for choice in plan.choices.values() if choice.runner_up is not None]
    if any(other.seconds < 0 and not other.missing_bytes for other in others):
        lines.append("runner-ups that save time do so in the program; the simulator took this plan for the fastest")
    return tuple(lines)
