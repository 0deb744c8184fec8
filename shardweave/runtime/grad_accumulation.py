"""Gradient accumulation: the generated step runs once for each micro-batch, on its slices of the inputs.

Values are split along a time axis and joined again. A `MicroBatchRunner` runs the micro-batches of a step, which share
gathered parameters and accumulate gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardweave.ir import META, Axis, Layout, ParallelError, StepSpec
from shardweave.passes import MicroBatchGraphs
from shardweave.runtime.parameters import REDUCE_OPS, padded, part_for_step


def split_steps(value: torch.Tensor, layout: Layout, axis: Axis) -> list[torch.Tensor]:
    """Split a rank's `value` along a time axis. A value that is not on the axis is the same in all steps.

    >>> micro = Axis("micro", 2, 4, "time")
    >>> split_steps(torch.arange(4), Layout(((micro, 2),)), micro)
    [tensor([0, 1]), tensor([2, 3])]
    """
    if axis not in layout.shard_axes:
        return [value] * axis.size
    dim, outer, inner = layout.place(axis)
    shape = value.shape
    steps = value.reshape(*shape[:dim], outer, axis.size, inner, *shape[dim + 1 :]).unbind(dim + 1)
    return [step.flatten(dim, dim + 1).contiguous() for step in steps]


def join_steps(parts: Sequence[torch.Tensor], layout: Layout, axis: Axis) -> torch.Tensor:
    """Join the steps of a value along a time axis: concatenated, or reduced where it is partial over the axis.

    >>> micro = Axis("micro", 2, 4, "time")
    >>> join_steps([torch.tensor([0, 1]), torch.tensor([2, 3])], Layout(((micro, 2),)), micro)
    tensor([0, 1, 2, 3])
    >>> join_steps([torch.tensor(1), torch.tensor(2)], Layout((), ((micro, "sum"),)), micro)
    tensor(3)
    """
    combine = dict(layout.partial).get(axis)
    if combine is not None:
        total = parts[0]
        for part in parts[1:]:
            total = REDUCE_OPS[combine](total, part)
        return total
    if axis not in layout.shard_axes:
        return parts[-1]
    dim, outer, inner = layout.place(axis)
    shape = parts[0].shape
    steps = [part.reshape(*shape[:dim], outer, inner, *shape[dim + 1 :]) for part in parts]
    return torch.stack(steps, dim + 1).flatten(dim, dim + 2)


Boxed = Callable[[list[Any]], Sequence[Any]]
"""Takes its arguments as one list, which it empties, so that the graph frees each argument after its last use."""
Gradients = list[torch.Tensor | None]
"""The local gradients of the trained parameters; None for those without one."""


@dataclass
class Accumulation:
    """The gradients that calls under `ParallelModule.no_sync` accumulate; shared by all steps of a module."""

    syncs: bool = True
    """Whether a backward reduces its gradients, or accumulates them."""
    sums: Gradients | None = None
    """Accumulated gradients that are not reduced yet."""
    layouts: object = None
    """The names and layouts of `sums`."""
    reached: frozenset[int] = frozenset()
    """The indices of the gradients that were accumulated."""

    def drop(self) -> None:
        """Forget accumulated gradients."""
        self.sums, self.reached = None, frozenset()


@dataclass
class MicroBatchRunner:
    """Runs the micro-batches of one step on this rank, and holds the values that they share."""

    graphs: MicroBatchGraphs
    spec: StepSpec
    coordinates: tuple[int, ...]
    bind: Callable[[fx.GraphModule], Boxed]
    """Binds a graph to this rank's process groups."""
    shared: Accumulation = field(default_factory=Accumulation)
    _bound: dict[fx.GraphModule, Boxed] = field(default_factory=dict, init=False)
    _gathered: list[torch.Tensor] = field(default_factory=list, init=False)
    _gathered_from: list[tuple[torch.Tensor, int]] = field(default_factory=list, init=False)

    @cached_property
    def _layouts(self) -> object:
        graph = self.graphs.whole_backward.graph
        (returned,) = graph.output_node().args
        names = [spec.name for spec in self.spec.parameters if spec.trainable]
        gradients = returned[self.graphs.input_gradients :]  # type: ignore[index]
        with_gradient = [name for name, value in zip(names, gradients, strict=True) if value is not None]  # type: ignore[arg-type]
        # A step that was saved without its notes has no layouts; a module of such a step has no other steps.
        notes = [node.meta.get(META) for node in graph.find_nodes(op="placeholder")
                 if node.name in self.graphs.accumulators]  # fmt: skip
        return names, with_gradient, [None if note is None else note.layouts for note in notes]

    @property
    def sums(self) -> Gradients | None:
        """Accumulated gradients that are not reduced yet.

        Raises
        ------
        ParallelError
            If a step for other inputs has accumulated them with other layouts.
        """
        if self.shared.sums is not None and self.shared.layouts != self._layouts:
            raise ParallelError(
                "gradients were accumulated under no_sync() in calls with other inputs, whose step accumulates other "
                "gradients than the step of this call, so that they cannot be added: accumulate over calls with the "
                "same inputs only, or reduce each call's gradients (leave no_sync() before the inputs change)"
            )
        return self.shared.sums

    @sums.setter
    def sums(self, sums: Gradients | None) -> None:
        self.shared.sums, self.shared.layouts = sums, self._layouts

    def forward(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        step: int | None,
        seed: Sequence[int],
        keeps: bool,
    ) -> tuple[list[Any], list[Any]]:
        """Run one forward: the new values of buffers with the outputs, and the saved values.

        `inputs` are those of the micro-batch number `step`, then the totals. If it `keeps`, gathered parameters stay
        for the next micro-batch.
        """
        gathers = not self._is_gathered(parameters)
        given = [] if gathers else self._gathered
        where = [*self.coordinates, *([] if step is None else [step]), *seed]
        run = self._run(self.graphs.forward(gathers, keeps))
        results = list(run([*where, *local_parameters(parameters, self.spec), *buffers, *inputs, *given]))
        if gathers and keeps and self.graphs.gathered_parameters:
            count = len(self.graphs.gathered_parameters)
            self._gathered, results = results[-count:], results[:-count]
            self._gathered_from = [(parameter, parameter._version) for parameter in parameters]
        returned = len(self.spec.mutated) + len(self.spec.outputs)
        return results[:returned], results[returned:]

    def _is_gathered(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the gathered parameters are up to date."""
        current = [(parameter, parameter._version) for parameter in parameters]
        known = self._gathered_from
        return bool(self._gathered) and len(current) == len(known) and all(
            now is then and version == old for (now, version), (then, old) in zip(current, known)
        )

    def totals(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[Any],
        pieces: Sequence[Sequence[torch.Tensor]],
        seed: Sequence[int],
    ) -> list[torch.Tensor]:
        """The values that are summed over all micro-batches before the first one runs."""
        if self.graphs.whole_batch_sums is None:
            return []
        run = self._run(self.graphs.whole_batch_sums)
        sums: list[torch.Tensor] = []
        for step, inputs in enumerate(pieces):
            where = [*self.coordinates, step, *seed]
            parts = run([*where, *local_parameters(parameters, self.spec), *buffers, *inputs])
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else list(parts)
        return sums

    def backward(
        self, arguments: list[Any], step: int | None, before: Gradients | None, reduces: bool
    ) -> tuple[Gradients, Gradients]:
        """Run one backward, and add the sums `before`. Returns the gradients of inputs, and those of parameters.

        The latter are reduced if it `reduces`.

        `arguments` are the saved values of the forward, then the tangents. The lists are emptied, so that the graph
        frees each value after its last use.
        """
        held = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
        adds = before is not None
        run = self._run(self.graphs.backward(adds, reduces))
        where = [*self.coordinates, *([] if step is None else [step])]
        found = [] if before is None else [value for value in before if value is not None]
        boxed = [*where, *arguments, *found]
        arguments.clear()
        found.clear()
        if before is not None:
            before.clear()
        results = list(run(boxed))
        of_inputs, results = results[: self.graphs.input_gradients], results[self.graphs.input_gradients :]
        if reduces:
            self.release()
        elif not adds:
            held |= {x.untyped_storage().data_ptr() for x in of_inputs if x is not None}
            results = _owned(results, held)
        return of_inputs, results

    def add(self, sums: Gradients) -> None:
        """Add to the accumulated gradients."""
        if self.sums is None:
            self.sums = sums
            return
        pairs = [(a, b) for a, b in zip(self.sums, sums, strict=True) if a is not None and b is not None]
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])

    def finish(self) -> Gradients:
        """Reduce the accumulated gradients."""
        assert self.sums is not None
        sums = self.sums
        self.drop()
        times = [0] * len(self.spec.mesh.micro_batch_axes)
        return list(self._run(self.graphs.finish)([*self.coordinates, *times, *(x for x in sums if x is not None)]))

    def release(self) -> None:
        """Free the gathered parameters."""
        self._gathered, self._gathered_from = [], []

    def drop(self) -> None:
        """Forget accumulated gradients and gathered parameters."""
        self.shared.sums = None
        self.release()

    def _run(self, graph: fx.GraphModule) -> Boxed:
        if graph not in self._bound:
            self._bound[graph] = self.bind(graph)
        return self._bound[graph]


def local_parameters(parameters: Sequence[torch.Tensor], spec: StepSpec) -> list[torch.Tensor]:
    """This rank's parts of the parameters, as the graphs take them."""
    pairs = zip(parameters, spec.parameters, strict=True)
    return [padded(part_for_step(parameter), known.layout) for parameter, known in pairs]


def _owned(results: Gradients, held: set[int]) -> Gradients:
    """Copy gradients that share memory with other tensors, so that sums can be added in place."""
    owned: Gradients = []
    for value in results:
        if value is not None:
            storage = value.untyped_storage()
            if storage.data_ptr() in held or storage.nbytes() != value.nbytes or not value.is_contiguous():
                value = value.clone(memory_format=torch.contiguous_format)
            held.add(value.untyped_storage().data_ptr())
        owned.append(value)
    return owned
