"""Runs a generated step: local tensors through the forward graph, and autograd's tangents through the backward one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import fx

from shardweave.errors import ParallelError
from shardweave.ir import StepSpec, axes_size
from shardweave.runtime.parameters import in_place, like, local_tensor

Boxed = Callable[[list[Any]], Sequence[Any]]
"""Takes its arguments as one list, which it empties: so each argument lives no longer than the graph needs it."""


def boxed(gm: fx.GraphModule) -> Boxed:
    """The code of `gm` with its arguments in one list.

    >>> double = fx.symbolic_trace(lambda x: [x + x])
    >>> arguments = [torch.ones(())]
    >>> boxed(double)(arguments), arguments
    ([tensor(2.)], [])
    """
    graph = copy.deepcopy(gm.graph)
    generator = copy.copy(graph._codegen)
    generator.gen_fn_def = MethodType(_boxed_definition, generator)  # type: ignore[method-assign]
    graph.set_codegen(generator)
    run: Boxed = fx.GraphModule(gm, graph).forward
    return run


def _boxed_definition(_: fx.graph.CodeGen, free_vars: list[str], annotation: str, **__: object) -> str:
    names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars if variable != "self"]
    unpack = f"\n    {', '.join(names)}, = boxed" if names else ""
    return f"def forward(self, boxed){annotation}:{unpack}\n    boxed.clear()"


@dataclass(frozen=True)
class Executor:
    """A step bound to this rank: its graphs with real groups, and where its parameters and buffers are found.

    Parameters
    ----------
    spec : StepSpec
        The calling convention.
    coordinates : tuple of int
        What both graphs take first.
    forward, backward : callable
        The boxed graphs; no backward for a step that trains nothing.
    parameters, buffers : callable
        The current tensors of `spec.parameters` and `spec.buffers`, in order.
    """

    spec: StepSpec
    coordinates: tuple[int, ...]
    forward: Boxed
    backward: Boxed | None
    parameters: Callable[[], list[torch.Tensor]]
    buffers: Callable[[], list[torch.Tensor]]
    seeds: Callable[[], int] | None = None
    """Gives each call its seed, the same on all ranks; None for a step that draws no random numbers."""

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The step's outputs, from the local parts of its inputs."""
        parameters = self.parameters()
        if self.backward is None or not torch.is_grad_enabled() or not any(p.requires_grad for p in parameters):
            with torch.no_grad():
                return self.run(parameters, inputs)[0]
        outputs = _Step.apply(self, inputs, *parameters)  # type: ignore[no-untyped-call]
        return list(outputs)

    def run(self, parameters: Sequence[torch.Tensor], inputs: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        """The outputs and what the forward graph saves; buffers that the step changes are changed."""
        buffers = self.buffers()
        mutated = len(self.spec.mutated_buffers)
        first = self.coordinates if self.seeds is None else (*self.coordinates, self.seeds())
        specs = self.spec.parameters
        parts = [in_place(local_tensor(p), spec.layout) for p, spec in zip(parameters, specs, strict=True)]
        results = list(self.forward([*first, *parts, *map(local_tensor, buffers), *inputs]))
        outputs = results[mutated : mutated + len(self.spec.outputs)]
        saved = results[mutated + len(self.spec.outputs) :]
        if mutated:
            by_name = dict(zip((buffer.name for buffer in self.spec.buffers), buffers, strict=True))
            changing = [local_tensor(by_name[name]) for name in self.spec.mutated_buffers]
            saved = [x.clone() if any(x is buffer for buffer in changing) else x for x in saved]
            for buffer, value in zip(changing, results, strict=False):
                buffer.copy_(value)
        return outputs, saved

    def gradients(self, saved: list[Any], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradient of each of `spec.parameters`, as a DTensor; None for those that are not trained.

        `tangents` are those of all outputs. A tangent of an output that is spread over data axes belongs to a loss of
        this rank's part alone: such losses are averaged over the data ranks, as DistributedDataParallel does.
        """
        assert self.backward is not None
        arguments = [*self.coordinates, *saved]
        saved.clear()
        for output, tangent in zip(self.spec.outputs, tangents, strict=True):
            if output.differentiable:
                ranks = axes_size(axis for axis in output.layout.shard_axes if axis in self.spec.data_axes)
                arguments.append((tangent if ranks == 1 else tangent / ranks).contiguous())
        results = iter(self.backward(arguments))
        gradients: list[torch.Tensor | None] = []
        for spec, parameter in zip(self.spec.parameters, self.parameters(), strict=True):
            gradient = next(results) if spec.trainable else None
            gradients.append(None if gradient is None else like(gradient, parameter))
        return gradients


class _Step(torch.autograd.Function):
    """The seam to autograd: one node that takes the DTensor parameters and gives their gradients.

    What the forward graph saves is held in a plain list and not by autograd, so that the backward graph frees each
    value after its last use; so a step can be run backward once only.
    """

    @staticmethod
    def forward(
        ctx: Any, executor: Executor, inputs: list[torch.Tensor], *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs, saved = executor.run(parameters, inputs)
        # an output that held itself through its own autograd node would never be freed
        ctx.saved = [x.detach() if any(x is output for output in outputs) else x for x in saved]
        ctx.executor = executor
        ctx.inputs = [x for x in inputs if any(x is other for other in saved)]
        ctx.versions = _versions([*parameters, *ctx.inputs])
        specs = executor.spec.outputs
        fixed = [output for output, spec in zip(outputs, specs, strict=True) if not spec.differentiable]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.saved is None:
            raise ParallelError(
                "this step has been run backward already, and what it saved is freed: call the module again, or add "
                "the losses up before one backward"
            )
        if ctx.versions != _versions([*ctx.executor.parameters(), *ctx.inputs]):
            raise ParallelError(
                "a parameter or an input was changed in place between forward and backward, so the gradients would "
                "belong to neither value: call backward before optimizer.step(), and before inputs are written to"
            )
        saved, ctx.saved, ctx.inputs = ctx.saved, None, None
        return (None, None, *ctx.executor.gradients(saved, tangents))


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
