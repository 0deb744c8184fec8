"""The seams to autograd: a call of a generated step as one node, which takes parameters and gives their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardweave.errors import ParallelError

if TYPE_CHECKING:
    from shardweave.runtime.execute import Executor

_ONCE = (
    "this step has been run backward already, and what it saved is freed: call the module again, or add "
    "the losses up before one backward"
)


class Step(torch.autograd.Function):
    """The seam to autograd: one node that takes the DTensor parameters and gives their gradients.

    What the forward graph saves is held in a plain list and not by autograd, so that the backward graph frees each
    value after its last use; so a step can be run backward once only.
    """

    @staticmethod
    def forward(
        ctx: Any, executor: Executor, inputs: list[torch.Tensor], parameters: list[torch.Tensor], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.several = not executor.syncs or executor.adds_up
        outputs, saved = executor.run(parameters, inputs, ctx.several)
        # an output that held itself through its own autograd node would never be freed
        ctx.saved = [x.detach() if any(x is output for output in outputs) else x for x in saved]
        ctx.executor, ctx.syncs = executor, executor.syncs
        ctx.inputs = [x for x in inputs if any(x is other for other in saved)]
        ctx.versions = _versions([*parameters, *ctx.inputs])
        _mark(ctx, executor, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _check_tangents(ctx.executor, tangents)
        if ctx.saved is None:
            raise ParallelError(_ONCE)
        if ctx.versions != _versions([*ctx.executor.parameters(), *ctx.inputs]):
            raise ParallelError(
                "a parameter or an input was changed in place between forward and backward, so the gradients would "
                "belong to neither value: call backward before optimizer.step(), and before inputs are written to"
            )
        saved, ctx.saved, ctx.inputs = ctx.saved, None, None
        executor: Executor = ctx.executor
        return (None, None, None, *executor.gradients(saved, tangents, ctx.several, ctx.syncs))


class MicroBatches(torch.autograd.Function):
    """The seam for a call of several micro-batches.

    Each runs backward right after its forward, so that only its own activations are held: with the tangent that the
    loss had last time, 1 at first. What its own tangent differs by is made up for when it is known, as gradients are
    linear in it.
    """

    @staticmethod
    def forward(
        ctx: Any, executor: Executor, inputs: list[torch.Tensor], parameters: list[torch.Tensor], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.executor, ctx.syncs, ctx.tangent = executor, executor.syncs, executor.tangent()
        outputs, ctx.found, ctx.closed = executor.run_parts(parameters, inputs, ctx.tangent)
        _mark(ctx, executor, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _check_tangents(ctx.executor, tangents)
        if ctx.found is None:
            raise ParallelError(_ONCE)
        found, ctx.found = ctx.found, None
        executor: Executor = ctx.executor
        (tangent,) = [x for x, spec in zip(tangents, executor.spec.outputs, strict=True) if spec.differentiable]
        if tangent is None:  # what the user computes from the loss gives it no gradient at all
            return (None, None, None, *(None for _ in executor.trained(executor.parameters())))
        executor.expect(tangent)
        return (None, None, None, *executor.finished(found, ctx.closed, ctx.syncs, tangent / ctx.tangent))


def _mark(ctx: Any, executor: Executor, outputs: Sequence[torch.Tensor]) -> None:
    specs = executor.spec.outputs
    ctx.set_materialize_grads(False)
    pairs = zip(outputs, specs, strict=True)
    ctx.mark_non_differentiable(*(x for x, spec in pairs if not (spec.differentiable or spec.left_out)))


def _check_tangents(executor: Executor, tangents: Sequence[torch.Tensor | None]) -> None:
    """Refuse a gradient of an output that the step has none for."""
    pairs = zip(tangents, executor.spec.outputs, strict=True)
    if asked := [spec.name for tangent, spec in pairs if tangent is not None and spec.left_out]:
        raise ParallelError(
            f"the loss depends on the output {', '.join(asked)}, but where a model returns a loss of its own, its "
            "backward starts there and at nothing else: compute the whole loss in the model, or none of it; or detach "
            "the output, if no gradient is wanted through it"
        )


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
