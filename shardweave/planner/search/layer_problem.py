"""The problem of a step of a few layers of each kind, written out for all layers.

A step is annotated whole and with equal layers left out, each once. The problem is built for the smaller graph.
`unfold` adds the layers that were left out: each has the ops and candidates of the last layer of its run that was
kept, and is connected to its neighbours as that one is to the layer before it. Equal layers share their tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from shardweave.cost_model import Cluster, Options
from shardweave.ir import Captured, PlanError
from shardweave.passes import Annotated, annotate
from shardweave.planner.problem.build_problem import ProblemBuilder
from shardweave.planner.problem.graph_analysis import num_bytes
from shardweave.planner.problem.problem import Edge
from shardweave.planner.problem.problem import Op as Row
from shardweave.planner.problem.step_choices import with_modes, with_outputs, with_slices
from shardweave.planner.problem.variables import Costed, Variable
from shardweave.sharding import (
    DeduplicatedStep,
    LayerRun,
    copied,
    covers,
    deduplicate_layers,
    find_layer_runs,
)

MAX_CACHED_PROBLEMS = 8
"""The number of settings whose problems are cached: another memory limit asks for the same ones."""

Layer = str
Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentCache(Generic[Key, Value]):
    """The values that were made last, at most `size`. Keys are compared: they need not be hashable.

    >>> cache = RecentCache[list[int], str](size=2)
    >>> [cache.get(key, lambda: made) for key, made in (([1], "a"), ([2], "b"), ([1], "c"))]
    ['a', 'b', 'a']
    """

    def __init__(self, size: int | None = None) -> None:
        self._entries: deque[tuple[Key, Value]] = deque(maxlen=size)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key; it is made where there is none."""
        for known, value in self._entries:
            if known == key:
                return value
        value = make()
        self._entries.append((key, value))
        return value

    def clear(self) -> None:
        """Forget all of them."""
        self._entries.clear()


def inside(name: str, layer: Layer) -> bool:
    """Whether an op of that name belongs to a layer.

    >>> inside("blocks.1.up", "blocks.1"), inside("blocks.1:add:0", "blocks.1"), inside("blocks.11.up", "blocks.1")
    (True, True, False)
    """
    return name.startswith(layer) and name[len(layer) : len(layer) + 1] in (".", ":", "")


def renamed(name: str, layer: Layer, other: Layer) -> str:
    """The name in one layer of what has this name in another.

    >>> renamed("blocks.1.up", "blocks.1", "blocks.7")
    'blocks.7.up'
    """
    return other + name[len(layer) :]


def unfold(
    costed: Costed, stands_for: Mapping[Layer, tuple[Layer, ...]], before: Mapping[Layer, Layer]
) -> Costed | None:
    """The problem with the layers that are left out; None where a layer is not like the one before it.

    Parameters
    ----------
    costed : Costed
        Of the folded step.
    stands_for : mapping of layer to layers
        `DeduplicatedStep.stands_for`.
    before : mapping of layer to layer
        The layer before each of these, which is in the folded step and in the same run.
    """
    for layer, others in stands_for.items():
        if others:
            larger = _with_copies(costed, layer, before[layer], others)
            if larger is None:
                return None
            costed = larger
    return costed


def _with_copies(costed: Costed, layer: Layer, before: Layer, others: tuple[Layer, ...]) -> Costed | None:
    problem, variables = costed.problem, costed.variables
    own = [index for index, variable in enumerate(variables) if inside(variable.name, layer)]
    earlier = {variable.name: index for index, variable in enumerate(variables) if inside(variable.name, before)}
    twin: dict[int, int] = {}  # of an op in `before`, the op in `layer`
    for index in own:
        same = earlier.get(renamed(variables[index].name, layer, before))
        if same is None or problem.ops[same].candidates is not problem.ops[index].candidates:
            return None
        twin[same] = index
    if len(twin) < len(earlier):
        return None
    last, count = max(own), len(own)
    place = {index: own.index(index) for index in own}

    def moved(index: int, copy: int) -> int:
        """Where an op of the folded problem is: itself, or its copy of that number (-1: itself)."""
        if index in place:
            return index if copy < 0 else last + 1 + copy * count + place[index]
        return index if index <= last else index + count * len(others)

    rows: list[Row] = list(problem.ops[: last + 1])
    listed = list(variables[: last + 1])
    for other in others:
        for index in own:
            name = renamed(variables[index].name, layer, other)
            rows.append(replace(problem.ops[index], name=name))
            listed.append(_copy(variables[index], name, layer, other))
    rows += problem.ops[last + 1 :]
    listed += variables[last + 1 :]
    edges: list[Edge] = []
    final = len(others) - 1
    for edge in problem.edges:
        producer, consumer = edge.producer, edge.consumer
        if producer in place and consumer not in place:  # what reads the layer now reads the last of its copies
            edges.append(replace(edge, producer=moved(producer, final), consumer=moved(consumer, -1)))
            continue
        edges.append(replace(edge, producer=moved(producer, -1), consumer=moved(consumer, -1)))
        if consumer in place:
            for copy in range(len(others)):
                if producer in place:
                    source = moved(producer, copy)
                elif producer in twin:
                    source = moved(twin[producer], copy - 1)
                else:
                    source = moved(producer, -1)
                edges.append(replace(edge, producer=source, consumer=moved(consumer, copy)))
    edges.sort(key=lambda edge: (edge.producer, edge.consumer))
    return replace(costed, problem=replace(problem, ops=tuple(rows), edges=tuple(edges)), variables=listed)


def _copy(variable: Variable, name: str, layer: Layer, other: Layer) -> Variable:
    op = variable.op
    if op is not None:
        states = [renamed(state, layer, other) if inside(state, layer) else state for state in op.companions]
        parameter = renamed(op.parameter, layer, other)
        op = replace(op, name=name, parameter=parameter, companions=tuple(states))
    return replace(variable, name=name, op=op)


class Steps:
    """A captured step, in as many of its equal layers as are wanted."""

    def __init__(self, captured: Captured, options: Options) -> None:
        self.captured, self.options = captured, options
        self.priced = RecentCache[tuple[Cluster, str], LayerProblem](MAX_CACHED_PROBLEMS)
        """The problems of settings, by their clusters and the keys of their options without a memory limit."""
        self._runs: dict[Hashable, list[LayerRun]] = {}
        self._folded: dict[Hashable, tuple[DeduplicatedStep, Annotated]] = {}

    @cached_property
    def whole(self) -> Annotated:
        """The whole step, annotated."""
        return annotate(replace(self.captured, graph=copied(self.captured.graph)), self.options)

    def runs(self, options: Options) -> list[LayerRun]:
        """The runs of layers that are equal and of which the options say the same."""
        overlap = options.overlap
        chosen = overlap.recompute, overlap.operator_slices, overlap.keep_gathered, overlap.exclude_from_sub_batches
        patterns = (*options.force, *(pattern for patterns in chosen for pattern in patterns))

        def said(name: str) -> Hashable:
            return tuple(pattern for pattern in patterns if covers(pattern, name))

        if patterns not in self._runs:
            self._runs[patterns] = find_layer_runs(self.captured, said)
        return self._runs[patterns]

    def folded(self, left: Mapping[LayerRun, int]) -> tuple[DeduplicatedStep, Annotated]:
        """The step with so many layers of each run, annotated."""
        left = {run: count for run, count in left.items() if count < len(run.layers)}
        if not left:
            return DeduplicatedStep(self.whole.captured, ()), self.whole
        key = frozenset(left.items())
        if key not in self._folded:
            found = deduplicate_layers(self.captured, left)
            self._folded[key] = found, annotate(found.captured, self.options)
        return self._folded[key]


@dataclass(frozen=True)
class LayerProblem:
    """A folded step with its problem, whatever memory a device may use."""

    fold: DeduplicatedStep
    annotated: Annotated
    builder: ProblemBuilder
    costed: Costed
    buffer_bytes: int
    """Of the whole step's buffers."""

    @cached_property
    def unfolds(self) -> bool:
        """Whether the last layer of each run that is left is like the one before it."""
        return self._unfolded(self.costed) is not None

    @cached_property
    def plain(self) -> Costed:
        """The whole step's problem without choices that save memory."""
        return self.whole(self.costed)

    @cached_property
    def with_recomputation(self) -> Costed:
        """The same with a choice of recomputation for each layer, if the user leaves it open."""
        return self.whole(with_modes(self.builder, self.costed)) if self.builder.space.has_recomputation else self.plain

    @cached_property
    def in_slices(self) -> Costed | None:
        """The same also with slices of ops that gather much; None where none does.

        They are the last resort. The program's memory is rough: what gathers much may fit, though it counts too much,
        and is faster whole.
        """
        sliced = with_slices(self.builder, self.costed)
        if sliced is self.costed:
            return None
        return self.whole(with_modes(self.builder, sliced) if self.builder.space.has_recomputation else sliced)

    def whole(self, costed: Costed) -> Costed:
        """The problem of the whole step, with what the options say of recomputation."""
        options = self.builder.options
        if options.recompute is not None:
            costed = with_modes(self.builder, costed)
        found = self._unfolded(costed)
        if found is None:
            raise PlanError("layers that are equal are not priced alike: a bug in shardweave")
        found = with_outputs(self.builder, found, self._last)
        left_out = self.buffer_bytes - buffer_bytes(self.annotated.captured)
        return replace(found, problem=replace(found.problem, fixed_bytes=found.problem.fixed_bytes + left_out))

    def _last(self, name: str) -> str:
        """The last variable of the whole step that one of the folded step stands for."""
        for layer, others in self.fold.stands_for.items():
            if others and inside(name, layer):
                return renamed(name, layer, others[-1])
        return name

    def _unfolded(self, costed: Costed) -> Costed | None:
        before = {run.layers[count - 1]: run.layers[count - 2] for run, count in self.fold.runs}
        return unfold(costed, self.fold.stands_for, before)


@dataclass(frozen=True)
class Programs:
    """The whole step's problems under a memory limit, as `LayerProblem` has them without."""

    layers: LayerProblem
    limit: int
    """Bytes."""

    def __iter__(self) -> Iterator[Costed]:
        """With more and more choices that save memory, from that of recomputation on."""
        yield self.with_recomputation
        if self.in_slices is not None:
            yield self.in_slices

    @cached_property
    def plain(self) -> Costed:
        """The one without choices that save memory."""
        return self.layers.plain.limited(self.limit)

    @cached_property
    def with_recomputation(self) -> Costed:
        """The same with a choice of recomputation for each layer; the same one where there is none."""
        found = self.layers.with_recomputation
        return self.plain if found is self.layers.plain else found.limited(self.limit)

    @cached_property
    def in_slices(self) -> Costed | None:
        """The same also with slices of ops that gather much; None where none does."""
        found = self.layers.in_slices
        return None if found is None else found.limited(self.limit)


def buffer_bytes(captured: Captured) -> int:
    """What the buffers of a step take."""
    return num_bytes(node for node in captured.graph.graph.nodes if node.name in captured.buffers)
