"""The seams to autograd: a call of a generated step as one node, which takes parameters and gives their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from shardweave.errors import ParallelError

if TYPE_CHECKING:
    from shardweave.runtime.execute import Executor

_ONCE = (
    "this step has been run backward already, and what it saved is freed: call the module again, or add "
    "the losses up before one backward"
)


_INSIDE = (
    "compute what needs such derivatives inside the model's forward, with torch.func (torch.func.grad, "
    "torch.func.jvp), which is captured, and compile the model with it; docs/how-it-works.md has an example"
)


untraced = _disable_dynamo
"""As ``torch.compiler.disable``, which would import Dynamo here: `torch.compile` of a parallel module, or of a training
step with one, leaves what is marked so as it is, since it is compiled already."""


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
    @untraced
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _check_first_order(tangents)
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
    @untraced
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _check_first_order(tangents)
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


def refuse_transforms(executor: Executor, arguments: object) -> None:
    """`ParallelError` where a call with these arguments is differentiated in a way that its step does not hear of."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise ParallelError(
            "a compiled step is called inside a transform of torch.func (grad, vjp, jvp, vmap, hessian, ...), which "
            f"cannot see into it: call it outside of the transform, or {_INSIDE}"
        )
    if forward_ad._current_level < 0:
        return
    for tensor in [*tree_leaves(arguments), *executor.parameters(), *executor.buffers()]:
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise ParallelError(
                "a compiled step is called with a dual tensor of torch.autograd.forward_ad, but it has a backward "
                f"and no forward-mode derivative: {_INSIDE}"
            )


def _check_first_order(tangents: Sequence[torch.Tensor | None]) -> None:
    """Refuse a backward whose own derivative, or that of many tangents at once, is asked for."""
    if torch.is_grad_enabled():  # inside a backward, that is what create_graph=True says
        raise ParallelError(
            "create_graph=True asks for gradients that can be differentiated again, but the backward of a compiled "
            "step is a generated graph without a derivative: second-order terms, such as those of a gradient penalty "
            f"or a Hessian-vector product, would be lost. If gradients are all you need, leave it out; else {_INSIDE}"
        )
    functorch = torch._C._functorch
    batched = any(tangent is not None and functorch.is_legacy_batchedtensor(tangent) for tangent in tangents)
    if batched or functorch.maybe_current_level() is not None:
        raise ParallelError(
            "the backward of a compiled step is run inside vmap (is_grads_batched=True, or vectorize=True of "
            f"torch.autograd.functional), which cannot see into it: run one backward after another, or {_INSIDE}"
        )


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
