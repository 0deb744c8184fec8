"""The plan: every op's strategy, what the step is predicted to cost, and how far the program's bound is.

A plan is keyed by the names of parameters, modules and inputs, never by nodes of a graph, so one made on a laptop's
CPU is used as it is on the GPUs. It is shown by `shardweave.report.tables`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardweave.compiler.model_key import ModelKey
from shardweave.compiler.op_choice import OpChoice
from shardweave.compiler.plan_schema import check_on, check_plan
from shardweave.cost_model.cluster import Cluster
from shardweave.cost_model.timeline import Timeline
from shardweave.errors import ClusterError, LayoutError, ParallelError, PlanError
from shardweave.ir import Weaving
from shardweave.units import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from shardweave.report.report import Report

FORMAT = "shardweave plan"
VERSION = 5
"""Of the JSON file; raised whenever a change would make an older reader go wrong."""


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
        Seconds a step, as the simulator plays the generated graphs of all layers: those of `timeline()`. The last is
        communication that no compute hides.
    peak_memory, memory_limit : int
        Bytes a device: the peak of `timeline()`, and what it may not exceed.
    schedule_limit : int
        Bytes a device that the order of the generated graphs is made for, wherever the plan is compiled: the memory
        limit, or less where that was needed for `peak_memory` to keep to it. 0: what the options say then.
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
    proven_gap: float = 0.0
    planning_seconds: float = 0.0
    memory_limit: int = 0
    schedule_limit: int = 0
    optimizer_bytes: int | None = None
    forced: tuple[str, ...] = ()
    joins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    micro_batches: int = 1
    weaving: Weaving = field(default_factory=Weaving)
    savings: tuple[Saving, ...] = ()
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
            "weaving": self.weaving.to_dict(),
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
        figures = {name: data[name] for name in _FIGURES}
        figures["forced"] = tuple(figures["forced"])
        figures["weaving"] = Weaving.from_dict(data["weaving"])
        figures["savings"] = tuple(Saving(*saving) for saving in figures["savings"])
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


_APART = ("model_key", "cluster", "choices", "weaving", "_timeline", "_resolve")
_FIGURES = tuple(each.name for each in fields(Plan) if each.name not in _APART)
