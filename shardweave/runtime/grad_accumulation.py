"""Gradient accumulation: the generated step runs once for each micro-batch, on its slices of the inputs.

Values are cut along a time axis and joined again. A `MicroBatchRunner` runs the micro-batches of a step, which share
gathered parameters and accumulate gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from shardweave.ir import Axis, Layout, StepSpec
from shardweave.runtime.parameters import COMBINE, in_place
from shardweave.runtime.tensor import part_of


def cut(value: torch.Tensor, layout: Layout, axis: Axis) -> list[torch.Tensor]:
    """The steps of a rank's `value` along a time axis. A value that is not on the axis is the same in all steps.

    >>> micro = Axis("micro", 2, 4, "time")
    >>> cut(torch.arange(4), Layout(((micro, 2),)), micro)
    [tensor([0, 1]), tensor([2, 3])]
    """
    if axis not in layout.shard_axes:
        return [value] * axis.size
    dim, outer, inner = layout.place(axis)
    shape = value.shape
    steps = value.reshape(*shape[:dim], outer, axis.size, inner, *shape[dim + 1 :]).unbind(dim + 1)
    return [step.flatten(dim, dim + 1).contiguous() for step in steps]


def joined(parts: Sequence[torch.Tensor], layout: Layout, axis: Axis) -> torch.Tensor:
    """The value whose steps along a time axis are `parts`: side by side, or combined where it is partial over the axis.

    >>> micro = Axis("micro", 2, 4, "time")
    >>> joined([torch.tensor([0, 1]), torch.tensor([2, 3])], Layout(((micro, 2),)), micro)
    tensor([0, 1, 2, 3])
    >>> joined([torch.tensor(1), torch.tensor(2)], Layout((), ((micro, "sum"),)), micro)
    tensor(3)
    """
    combine = dict(layout.partial).get(axis)
    if combine is not None:
        total = parts[0]
        for part in parts[1:]:
            total = COMBINE[combine](total, part)
        return total
    if axis not in layout.shard_axes:
        return parts[-1]
    dim, outer, inner = layout.place(axis)
    shape = parts[0].shape
    steps = [part.reshape(*shape[:dim], outer, inner, *shape[dim + 1 :]) for part in parts]
    return torch.stack(steps, dim + 1).flatten(dim, dim + 2)


Boxed = Callable[[list[Any]], Sequence[Any]]
"""Takes its arguments as one list, which it empties: so each argument lives no longer than the graph needs it."""
Gradients = list[torch.Tensor | None]
"""Local ones, one a parameter that is trained; None for those that get none."""


class Forms(Protocol):
    """The graphs of a step of several micro-batches (see `passes.codegen.MicroBatchGraphs`)."""

    gathered_parameters: Sequence[str]
    accumulators: Mapping[str, str]
    whole_batch_sums: fx.GraphModule | None

    def forward(self, gathers: bool, returns_gathered: bool) -> fx.GraphModule: ...

    def backward(self, takes_sums: bool, finishes: bool) -> fx.GraphModule: ...

    @property
    def finish(self) -> fx.GraphModule: ...


class MicroBatchRunner:
    """The forms of one step, bound to this rank, and the values that its micro-batches share.

    Parameters
    ----------
    forms : Forms
    spec : StepSpec
    coordinates : tuple of int
        Of this rank.
    bind : callable
        From a graph to one that this rank can run.
    """

    def __init__(
        self, forms: Forms, spec: StepSpec, coordinates: Sequence[int], bind: Callable[[fx.GraphModule], Boxed]
    ) -> None:
        self.forms, self.spec, self.coordinates, self._bind = forms, spec, tuple(coordinates), bind
        self._bound: dict[fx.GraphModule, Boxed] = {}
        self._working: list[torch.Tensor] = []
        self._gathered_from: list[tuple[torch.Tensor, int]] = []
        self.sums: Gradients | None = None
        """Gradients of micro-batches whose sum has not been reduced to the states."""

    def forward(
        self,
        parameters: Sequence[torch.Tensor],
        rest: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        step: int | None,
        seed: Sequence[int],
        keeps: bool,
    ) -> tuple[list[Any], list[Any]]:
        """Run one forward: its results, the buffers' new values first, and the saved values.

        Parameters
        ----------
        rest : sequence
            The local buffers.
        inputs : sequence of Tensor
            Those of the micro-batch, then the totals.
        step : int, optional
            Which micro-batch it is.
        keeps : bool
            Parameters that it gathers are kept for the next micro-batch.
        """
        fresh = not self._is_gathered(parameters)
        given = [] if fresh else self._working
        where = [*self.coordinates, *([] if step is None else [step]), *seed]
        run = self._run(self.forms.forward(fresh, keeps))
        results = list(run([*where, *in_places(parameters, self.spec), *rest, *inputs, *given]))
        if fresh and keeps and self.forms.gathered_parameters:
            count = len(self.forms.gathered_parameters)
            self._working, results = results[-count:], results[:-count]
            self._gathered_from = [(parameter, parameter._version) for parameter in parameters]
        returned = len(self.spec.mutated_buffers) + len(self.spec.outputs)
        return results[:returned], results[returned:]

    def _is_gathered(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the gathered parameters are up to date."""
        if not self._working or len(parameters) != len(self._gathered_from):
            return False
        return all(
            now is then and now._version == version
            for now, (then, version) in zip(parameters, self._gathered_from, strict=True)
        )

    def totals(
        self,
        parameters: Sequence[torch.Tensor],
        rest: Sequence[Any],
        pieces: Sequence[Sequence[torch.Tensor]],
        seed: Sequence[int],
    ) -> list[torch.Tensor]:
        """The values that are summed over all micro-batches before the first one runs."""
        if self.forms.whole_batch_sums is None:
            return []
        run = self._run(self.forms.whole_batch_sums)
        sums: list[torch.Tensor] = []
        for step, inputs in enumerate(pieces):
            where = [*self.coordinates, step, *seed]
            parts = run([*where, *in_places(parameters, self.spec), *rest, *inputs])
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else list(parts)
        return sums

    def backward(self, arguments: list[Any], step: int | None, before: Gradients | None, closes: bool) -> Gradients:
        """One backward: the gradients where the states rest if it `closes`, else their sums with those `before`.

        `arguments` are what the forward saved, then the tangents. These lists are emptied, so that a value lives no
        longer than the graph needs it.
        """
        held = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
        adds = before is not None
        run = self._run(self.forms.backward(adds, closes))
        where = [*self.coordinates, *([] if step is None else [step])]
        found = [] if before is None else [value for value in before if value is not None]
        boxed = [*where, *arguments, *found]
        arguments.clear()
        found.clear()
        if before is not None:
            before.clear()
        results = list(run(boxed))
        if closes:
            self.release()
        elif not adds:
            results = _owned(results, held)
        return results

    def add(self, sums: Gradients) -> None:
        """Add sums to those that are still to be brought to the states."""
        if self.sums is None:
            self.sums = sums
            return
        pairs = [(a, b) for a, b in zip(self.sums, sums, strict=True) if a is not None and b is not None]
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])

    def finish(self) -> Gradients:
        """Bring the sums to the states."""
        assert self.sums is not None
        sums = self.sums
        self.drop()
        times = [0] * len(self.spec.mesh.micro_batch_axes)
        return list(self._run(self.forms.finish)([*self.coordinates, *times, *(x for x in sums if x is not None)]))

    def release(self) -> None:
        """Free the parameters that were gathered for several micro-batches."""
        self._working, self._gathered_from = [], []

    def drop(self) -> None:
        """Forget sums and gathered parameters."""
        self.sums = None
        self.release()

    def _run(self, graph: fx.GraphModule) -> Boxed:
        if graph not in self._bound:
            self._bound[graph] = self._bind(graph)
        return self._bound[graph]


def in_places(parameters: Sequence[torch.Tensor], spec: StepSpec) -> list[torch.Tensor]:
    """This rank's parts of the parameters, as the graphs take them."""
    pairs = zip(parameters, spec.parameters, strict=True)
    return [in_place(part_of(parameter), known.layout) for parameter, known in pairs]


def _owned(results: Gradients, held: set[int]) -> Gradients:
    """Sums that may be added to in place: copies of what shares its memory with anything else."""
    owned: Gradients = []
    for value in results:
        if value is not None:
            storage = value.untyped_storage()
            whole = storage.nbytes() == value.numel() * value.element_size()
            if storage.data_ptr() in held or not whole or not value.is_contiguous():
                value = value.clone(memory_format=torch.contiguous_format)
            held.add(value.untyped_storage().data_ptr())
        owned.append(value)
    return owned
