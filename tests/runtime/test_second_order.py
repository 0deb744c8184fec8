"""Derivatives of a compiled step: gradients of first order; of another order or kind an error, never a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import shardweave as sw
from shardweave.ir.errors import CaptureError, ParallelError
from shardweave.runtime.launch import WorkerPool

BATCH = torch.linspace(-1, 1, 96, dtype=torch.float64).reshape(12, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x).square().mean()
        return result


class InputPenalty(Net):
    """WGAN's gradient penalty."""

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: self.net(y).sum())(x)
        return super().forward(x) + (slope.norm(dim=1) - 1).square().mean()


class HessianVector(Net):
    """A penalty on the gradient of the parameters and on a Hessian-vector product."""

    def forward(self, x: Tensor) -> Tensor:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            value: Tensor = torch.func.functional_call(self.net, parameters, (x,)).square().mean()
            return value

        parameters = dict(self.net.named_parameters())
        ones = {name: torch.ones_like(parameter) for name, parameter in parameters.items()}
        gradient, product = torch.func.jvp(torch.func.grad(loss), (parameters,), (ones,))
        return loss(parameters) + sum(t.square().sum() for t in [*gradient.values(), *product.values()])


class AutogradPenalty(Net):
    """The same, with a leaf that the forward makes, and a step along the gradient of another one."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        start = x.detach().clone().requires_grad_()
        (direction,) = torch.autograd.grad(super().forward(start), start)
        return super().forward(x + direction) + (slope.norm(dim=1) - 1).square().mean()


class Residual(Net):
    """The residual of a differential equation, of which the forward makes its input a leaf; without and with a batch
    that is one already."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        y = self.net(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (curvature + y).square().mean()


class ParameterPenalty(Net):
    """A penalty on the gradient of the parameters, beside a loss that leads through the same graph."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + sum(gradient.square().sum() for gradient in gradients)


def compiled(model: nn.Module, ranks: int, **options: Any) -> Any:
    return sw.compile_parallel(model.double(), sw.Cluster.local(ranks), BATCH, options=sw.Options(**options))


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def inside_the_model_they_are_those_of_one_device(kind: type[nn.Module]) -> None:
    model, parallel = kind().double(), compiled(kind(), 2, force={"*": "zdp"})
    batches = BATCH.clone(), BATCH.clone()
    for module, batch in zip((model, parallel), batches, strict=True):
        module(batch).backward()
        module(batch).backward()
    ones, others = ([batch, *module.parameters()] for module, batch in zip((model, parallel), batches, strict=True))
    for one, other in zip(ones, others, strict=True):
        assert one.requires_grad == other.requires_grad
        if one.grad is not None:
            torch.testing.assert_close(whole(other.grad), one.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [InputPenalty, HessianVector, AutogradPenalty, Residual, ParameterPenalty])
def test_second_order_terms_inside_the_model_are_right(kind: type[nn.Module], pool: WorkerPool) -> None:
    pool.run(inside_the_model_they_are_those_of_one_device, kind, nprocs=2)


def penalty(parallel: Any) -> object:
    gradients = torch.autograd.grad(parallel(BATCH), list(parallel.parameters()), create_graph=True)
    return (parallel(BATCH) + 10 * sum(whole(g).square().sum() for g in gradients)).backward()


def backward_twice(parallel: Any) -> object:
    parallel(BATCH).backward(create_graph=True)
    return sum(whole(p.grad).square().sum() for p in parallel.parameters()).backward()


def of_parameters(parallel: Any, *values: Tensor) -> Tensor:
    names = [name for name, _ in parallel.named_parameters()]
    result: Tensor = torch.func.functional_call(parallel, dict(zip(names, values, strict=True)), (BATCH,))
    return result


def hvp(parallel: Any) -> object:
    values = tuple(p.detach() for p in parallel.parameters())
    return torch.autograd.functional.hvp(lambda *given: of_parameters(parallel, *given), values, values)


def hessian(parallel: Any) -> object:
    values = tuple(p.detach() for p in parallel.parameters())
    return torch.autograd.functional.hessian(lambda *given: of_parameters(parallel, *given), values)


def many_tangents(parallel: Any) -> object:
    loss, parameters = parallel(BATCH), list(parallel.parameters())
    return torch.autograd.grad(loss, parameters, torch.ones(3, dtype=loss.dtype), is_grads_batched=True)


def func_grad(parallel: Any) -> object:
    values = tuple(p.detach() for p in parallel.parameters())
    return torch.func.grad(lambda *given: of_parameters(parallel, *given))(*values)


def func_jvp(parallel: Any) -> object:
    return torch.func.jvp(parallel, (BATCH,), (BATCH,))


def vmap(parallel: Any) -> object:
    return torch.vmap(parallel)(torch.stack([BATCH, BATCH]))


def dual_input(parallel: Any) -> object:
    with torch.no_grad(), forward_ad.dual_level():
        return parallel(forward_ad.make_dual(BATCH, BATCH))


def func_grad_of_another_step(parallel: Any) -> object:
    return torch.func.grad(parallel)(BATCH)  # compiled for an input without a gradient


def vmap_of_another_size(parallel: Any) -> object:
    return torch.func.vmap(parallel)(BATCH[None, :2])


def dual_parameter(parallel: Any) -> object:
    with forward_ad.dual_level():
        values = [forward_ad.make_dual(p.detach(), torch.ones_like(p)) for p in parallel.parameters()]
        return of_parameters(parallel, *values)


WAYS: list[tuple[Callable[[Any], object], str]] = [
    (penalty, "create_graph=True"),
    (backward_twice, "create_graph=True"),
    (hvp, "create_graph=True"),
    (hessian, "create_graph=True"),
    (many_tangents, "vmap"),
    (func_grad, "torch.func"),
    (func_jvp, "torch.func"),
    (vmap, "torch.func"),
    (func_grad_of_another_step, "torch.func"),
    (vmap_of_another_size, "torch.func"),
    (dual_input, "forward_ad"),
    (dual_parameter, "forward_ad"),
]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_other_derivatives_are_refused_before_a_number_is_wrong(micro_batches: int) -> None:
    parallel = compiled(Net(), 1, micro_batches=micro_batches)
    for way, word in WAYS:
        with pytest.raises(ParallelError, match=word) as raised:
            way(parallel)
        assert "torch.func.grad" in str(raised.value)
    parallel.zero_grad()
    parallel(BATCH).backward()  # and none of these has left anything behind
    model = Net().double()
    model(BATCH).backward()
    for one, other in zip(model.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-9, atol=1e-12)


def first_order_is_fine_and_second_is_refused_on_all_ranks() -> None:
    parallel = compiled(Net(), 2, force={"*": "zdp"})
    with pytest.raises(ParallelError, match="create_graph=True"):
        penalty(parallel)
    parallel.zero_grad()
    gradients = torch.autograd.grad(parallel(BATCH), list(parallel.parameters()))
    model = Net().double()
    expected = torch.autograd.grad(model(BATCH), list(model.parameters()))
    for one, other in zip(expected, gradients, strict=True):
        torch.testing.assert_close(whole(other), one, rtol=1e-9, atol=1e-12)


def test_several_ranks_refuse_together(pool: WorkerPool) -> None:
    pool.run(first_order_is_fine_and_second_is_refused_on_all_ranks, nprocs=2)


def test_a_forward_that_runs_backward_itself_is_told_of_another_way() -> None:
    class Asks(Net):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            loss.backward(create_graph=True)
            return loss

    told = r"uses the grad of a parameter.*\n.*loss\.backward\(create_graph=True\)\n.*torch\.autograd\.grad is captured"
    with pytest.raises(CaptureError, match=told):
        compiled(Asks(), 1)


def test_a_forward_that_makes_its_input_a_leaf_late_is_told_of_another_way() -> None:
    class Asks(Net):
        def forward(self, x: Tensor) -> Tensor:
            before = super().forward(x)
            x.requires_grad_()
            return super().forward(x) + before

    with pytest.raises(CaptureError, match=r"x = x\.detach\(\)\.requires_grad_\(\)"):
        compiled(Asks(), 1)
