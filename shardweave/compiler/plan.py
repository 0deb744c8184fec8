"""The plan: every op's strategy, what the step is predicted to cost, and how well that is proven.

A plan is keyed by the names of parameters, modules and inputs, never by nodes of a graph, so one made on a laptop's
CPU is used as it is on the GPUs. It is shown by `shardweave.report.tables`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardweave.cost_model.cluster import Cluster
from shardweave.errors import ParallelError, PlanError
from shardweave.ir import Grid, Strategy, Weaving
from shardweave.precision import Precision

if TYPE_CHECKING:
    from shardweave.cost_model.timeline import Timeline
    from shardweave.report.tables import Report

FORMAT = "shardweave plan"
VERSION = 4
"""Of the JSON file; raised whenever a change would make an older reader go wrong."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelKey:
    """What a model and its call must agree in with the ones that a plan was made for: names, global shapes, dtypes."""

    parameters: Mapping[str, Shape]
    inputs: Mapping[str, Shape] = field(default_factory=dict)
    precision: Precision | None = None


class RunnerUp(NamedTuple):
    """The strategy that an op nearly got, all other ops left as they are.

    Parameters
    ----------
    strategy : Strategy
    seconds : float
        How much longer the step would take with it (negative: shorter, but it does not fit).
    missing_bytes : int
        How far it would exceed the memory limit; 0 where it fits.
    """

    strategy: Strategy
    seconds: float
    missing_bytes: int = 0


class Saving(NamedTuple):
    """What the simulator says that one choice for the whole step is worth, all others left as they are.

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

    @property
    def memory(self) -> int:
        """What it occupies for longer than it runs, in bytes."""
        return self.state_bytes + self.saved_bytes


@dataclass(frozen=True)
class Plan:
    """How a model is trained on a cluster, and what a step is predicted to cost.

    Parameters
    ----------
    model_key : ModelKey
        The model and the inputs that it is for.
    cluster : Cluster
        The machine that it was made for.
    choices : mapping of str to OpChoice
        By the op's name, in the order of the model.
    step_time, compute_time, exposed_communication : float
        Seconds a step, as the simulator plays the generated graphs; the last is communication that no compute hides.
    peak_memory, memory_limit : int
        Bytes a device.
    tokens : int
        Elements of the batch a step (tokens, or samples where the input is not a sequence).
    model_flops : float
        FLOPs a step of the whole model, on all devices together, recomputation not counted.
    dtype : str
        The dtype that matmuls run in, for the device's peak.
    status : {"optimal", "feasible"}
        Whether no other choice is faster in the program, or that is not known.
    program_time, bound, gap : float
        What the integer program says that a step takes; no choice takes less than `bound` seconds in it; how far the
        plan is from that bound at most, relative to `program_time`.
    planning_seconds : float
        What making it took.
    forced : tuple of str
        The patterns of `Options.force` that had a say.
    joins : mapping of str to mapping of str to str
        How ops that bring several values together (a residual sum, attention) are spread: each axis' factor.
    micro_batches : int
        Into how many parts a call's batch is cut, one computed after another.
    weaving : Weaving
        What else is chosen for the whole step: sub-batches, recomputation, the schedule.
    savings : tuple of Saving
        What each of these choices is worth; not of a plan that `compile_parallel` makes on its way.
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
    planning_seconds: float = 0.0
    memory_limit: int = 0
    forced: tuple[str, ...] = ()
    joins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    micro_batches: int = 1
    weaving: Weaving = field(default_factory=Weaving)
    savings: tuple[Saving, ...] = ()
    _timeline: Callable[[], Timeline] | None = field(default=None, repr=False, compare=False)
    _resolve: Callable[[Plan, dict[str, Any]], Plan] | None = field(default=None, repr=False, compare=False)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole cluster."""
        return self.tokens / self.step_time if self.step_time else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the model's FLOP/s as a part of the peak of all devices (PaLM, appendix B)."""
        peak = self.cluster.device.peak(self.dtype) * self.cluster.world_size
        return self.model_flops / (self.step_time * peak) if self.step_time else 0.0

    def explain(self) -> Report:
        """The plan as a table, op by op: strategy, time, communication, memory, and why not the runner-up."""
        # The one import that goes up, so that a plan can be asked; the report knows plans, a plan no report.
        from shardweave.report.tables import explain

        return explain(self)

    def diff(self, other: Plan) -> Report:
        """The ops on which this plan and `other` differ, and what that costs."""
        from shardweave.report.tables import diff

        return diff(self, other)

    def timeline(self) -> Timeline:
        """The simulated schedule of the generated step.

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
        return self._timeline()

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

    def with_model(self, timeline: Callable[[], Timeline], resolve: Callable[[Plan, dict[str, Any]], Plan]) -> Plan:
        """This plan, able to show the timeline that the call `timeline()` makes, and to be made again."""
        return replace(self, _timeline=timeline, _resolve=resolve)

    def with_timeline(self, timeline: Callable[[], Timeline]) -> Plan:
        """This plan, able to show the timeline that the call `timeline()` makes."""
        return replace(self, _timeline=timeline)

    def check(self, model_key: ModelKey, cluster: Cluster) -> None:
        """Make sure that this plan is for such a model, such inputs and such a cluster.

        Another machine with as many devices a level is fine: the plan may be slower there, but it is right.

        Raises
        ------
        PlanError
            Names each parameter, input or size that differs.
        """
        differences = _differences("parameter", self.model_key.parameters, model_key.parameters)
        differences += _differences("input", self.model_key.inputs, model_key.inputs)
        if self.model_key.precision != model_key.precision:
            differences.append(
                f"the plan is for the precision {_precision(self.model_key)}, the options ask for "
                f"{_precision(model_key)} (precision= in Options)"
            )
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
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise PlanError(f"{path}: expected a readable plan file, got: {error.strerror or error}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"{path}: expected a plan as JSON, got: {error}") from error
        except ParallelError as error:
            raise PlanError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain types; `from_dict` is its inverse."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": _key_to_dict(self.model_key),
            "cluster": self.cluster.to_dict(),
            **figures,
            "weaving": self.weaving.to_dict(),
            "choices": {name: _choice_to_dict(choice) for name, choice in self.choices.items()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """A plan of plain types; `PlanError` names what is missing or wrong in them."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(f'expected a plan saved by shardweave ("format": "{FORMAT}"), got something else')
        if data.get("version") != VERSION:
            raise PlanError(f"expected a plan of version {VERSION}, got {data.get('version')!r}: plan again")
        try:
            key = _key_from_dict(data["model"])
            choices = {name: _choice_from_dict(choice) for name, choice in data["choices"].items()}
            figures = {name: data[name] for name in _FIGURES}
            figures["forced"] = tuple(figures["forced"])
            figures["weaving"] = Weaving.from_dict(data["weaving"])
            figures["savings"] = tuple(Saving(*saving) for saving in figures["savings"])
            return cls(model_key=key, cluster=Cluster.from_dict(data["cluster"]), choices=choices, **figures)
        except KeyError as error:
            raise PlanError(f"the plan lacks the key {error}: it is damaged, plan again") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"the plan has a value of a wrong type: {error}; it is damaged, plan again") from error


_APART = ("model_key", "cluster", "choices", "weaving", "_timeline", "_resolve")
_FIGURES = tuple(each.name for each in fields(Plan) if each.name not in _APART)


def _differences(what: str, planned: Mapping[str, Shape], given: Mapping[str, Shape]) -> list[str]:
    found = [f"{what} {name} is in the plan and not here" for name in planned if name not in given]
    found += [f"{what} {name} is here and not in the plan" for name in given if name not in planned]
    return found + [
        f"{what} {name} has shape {tuple(shape)} in the plan and {tuple(given[name])} here"
        for name, shape in planned.items()
        if name in given and tuple(given[name]) != tuple(shape)
    ]


def _precision(key: ModelKey) -> str:
    return "of the model" if key.precision is None else f"({key.precision})"


def _key_to_dict(key: ModelKey) -> dict[str, Any]:
    precision = {"precision": key.precision.to_dict()} if key.precision is not None else {}
    return {"parameters": dict(key.parameters), "inputs": dict(key.inputs), **precision}


def _key_from_dict(data: dict[str, Any]) -> ModelKey:
    return ModelKey(
        {name: tuple(shape) for name, shape in data["parameters"].items()},
        {name: tuple(shape) for name, shape in data["inputs"].items()},
        Precision.from_dict(data["precision"]) if data.get("precision") else None,
    )


def _strategy_to_dict(strategy: Strategy) -> dict[str, Any]:
    grid = strategy.grid
    sizes = [grid.x, grid.y, grid.z, grid.data, *([grid.experts] if grid.experts > 1 else [])]
    return {"grid": sizes, "rest": strategy.rest, "y_inside": strategy.y_inside, "states": strategy.states,
            "gradients": strategy.gradients}  # fmt: skip


def _strategy_from_dict(data: dict[str, Any]) -> Strategy:
    return Strategy(
        Grid(*data["grid"]), data["rest"], data["y_inside"], data.get("states", 0), data.get("gradients", 0)
    )


_OP_FIGURES = ("seconds", "communication_seconds", "state_bytes", "saved_bytes", "transient_bytes")


def _choice_to_dict(choice: OpChoice) -> dict[str, Any]:
    data = {"strategy": _strategy_to_dict(choice.strategy), **{name: getattr(choice, name) for name in _OP_FIGURES}}
    if choice.runner_up is not None:
        other = choice.runner_up
        data["runner_up"] = {
            "strategy": _strategy_to_dict(other.strategy),
            "seconds": other.seconds,
            "missing_bytes": other.missing_bytes,
        }
    return {**data, "params": list(choice.params)}


def _choice_from_dict(data: dict[str, Any]) -> OpChoice:
    other = data.get("runner_up")
    runner_up = other and RunnerUp(_strategy_from_dict(other["strategy"]), other["seconds"], other["missing_bytes"])
    figures = {name: data[name] for name in _OP_FIGURES}
    return OpChoice(
        strategy=_strategy_from_dict(data["strategy"]), **figures, runner_up=runner_up, params=tuple(data["params"])
    )
