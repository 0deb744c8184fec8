"""Inputs that require gradients: each rank gets the gradient of what it passed, equal to one device's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardweave as sw
from shardweave.ir import InputError, ParallelError
from shardweave.runtime import WorkerPool


class Critic(nn.Module):
    """Scores samples with a shift that all samples share; with targets it computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, shift: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        hidden = self.norm(self.up(x if shift is None else x + shift))
        scores: Tensor = self.down(F.leaky_relu(hidden, 0.2))
        return scores if targets is None else (scores - targets).square().mean()


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, z: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(z)))


torch.manual_seed(3)
X, Z = torch.randn(2, 8, 6, dtype=torch.float64)
Y, SHIFT = torch.randn(8, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def compiled(model: nn.Module, given: Any, force: Any = None, batch: Any = "global", **options: Any) -> Any:
    asked = sw.Options(force=force or {}, **options)
    return sw.compile_parallel(
        copy.deepcopy(model).double(), sw.Cluster.local(world()), given, options=asked, batch=batch, progress=False
    )


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def assert_same_gradients(parallel: nn.Module, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        mine = parallel.get_parameter(name).grad
        assert (mine is None) == (parameter.grad is None), name
        if mine is not None:
            torch.testing.assert_close(whole(mine), parameter.grad, msg=name)


def gradients_of_inputs(force: Any, **options: Any) -> None:
    """The loss is the model's: the gradient of the whole input, and this rank's part of it."""
    model = Critic().double()
    parallel = compiled(model, (X, SHIFT, Y), force, **options)
    x, shift = leaf(X), leaf(SHIFT)
    model(x, shift, Y).backward()
    mine, mine_shift = leaf(X), leaf(SHIFT)
    parallel(mine, mine_shift, Y).backward()
    torch.testing.assert_close(mine.grad, x.grad)
    torch.testing.assert_close(mine_shift.grad, shift.grad)
    assert_same_gradients(parallel, model)
    part = leaf(parallel.local(X))
    parallel(part, SHIFT, parallel.local(Y)).backward()
    torch.testing.assert_close(part.grad, parallel.local(x.grad))
    (only,) = torch.autograd.grad(parallel(mine, SHIFT, Y), mine)  # in no .grad
    torch.testing.assert_close(only, x.grad)
    with torch.no_grad():
        assert not parallel(mine, SHIFT, Y).requires_grad


def own_losses(force: Any, batch: Any) -> None:
    """Each rank computes a loss of its own: its part gets that loss's gradient, the parameters get the mean's."""
    model = Critic().double()
    parallel = compiled(model, (X if batch == "global" else X[: len(X) // world()], SHIFT), force, batch)
    size = len(X) // parallel.data_world_size
    own = slice(parallel.data_rank * size, (parallel.data_rank + 1) * size)
    x, shift = leaf(X[own]), leaf(SHIFT)
    F.mse_loss(parallel(x, shift), Y[own]).backward()
    alone = leaf(X[own])
    F.mse_loss(model(alone, SHIFT), Y[own]).backward()
    torch.testing.assert_close(x.grad, alone.grad)
    model.zero_grad()
    every = leaf(SHIFT)
    F.mse_loss(model(X, every), Y).backward()
    torch.testing.assert_close(shift.grad, every.grad)
    assert_same_gradients(parallel, model)


def adversaries(force: Any, loss_inside: bool, batch: Any = "global", **options: Any) -> None:
    """The training loop of a GAN. The critic's loss is computed outside of it, or inside."""
    models: list[Any] = [Generator().double(), Critic().double()]
    size = len(X) // world()
    rows = slice(own_rank() * size, (own_rank() + 1) * size) if batch == "local" else slice(None)
    example = (X[rows], None, Y[rows]) if loss_inside else X[rows]
    parallels = [compiled(models[0], Z[rows], force, batch), compiled(models[1], example, force, batch, **options)]
    local = parallels[0].local if batch == "global" else lambda x: x
    train(models, Z, X, Y, loss_inside)
    train(parallels, Z[rows], local(X[rows]), local(Y[rows]), loss_inside)
    for parallel, model in zip(parallels, models, strict=True):
        state = parallel.full_state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=name)


def train(models: list[Any], z: Tensor, x: Tensor, y: Tensor, loss_inside: bool) -> None:
    generator, critic = models

    def loss(samples: Tensor, sign: float) -> Any:
        return critic(samples, None, sign * y) if loss_inside else F.mse_loss(critic(samples), sign * y)

    of_generator, of_critic = (torch.optim.SGD(model.parameters(), 0.1) for model in models)
    for step in range(3):
        of_critic.zero_grad()
        fake = generator(z)
        (loss(x, 1.0) + loss(fake.detach(), -1.0)).backward()
        of_critic.step()
        critic.requires_grad_(step != 1)  # some programs freeze the critic meanwhile
        of_generator.zero_grad()
        loss(2 * fake, 1.0).backward()
        of_generator.step()
        critic.requires_grad_(True)


def frozen_critic(force: Any) -> None:
    """Nothing of the model is trained, but its input is, as with a perceptual loss."""
    model = Critic().double().requires_grad_(False)
    parallel = compiled(model, (X, SHIFT, Y), force)  # a forward alone
    for each in (model, parallel):
        each.eval()
    for _ in range(2):
        x, mine = leaf(X), leaf(X)
        model(x, SHIFT, Y).backward()
        parallel(mine, SHIFT, Y).backward()
        torch.testing.assert_close(mine.grad, x.grad)
        assert not parallel(X, SHIFT, Y).requires_grad
    first = compiled(model, (leaf(X), SHIFT, Y), force)
    mine = leaf(X)
    first(mine, SHIFT, Y).backward()
    torch.testing.assert_close(mine.grad, x.grad)


def accumulated(force: Any) -> None:
    """Gradients of inputs come at once under no_sync, where those of parameters are added up."""
    model = Critic().double()
    parallel = compiled(model, (leaf(X), SHIFT, Y), force)
    with parallel.no_sync():
        for given in (X, Z):
            x, mine = leaf(given), leaf(given)
            model(x, SHIFT, Y).backward()
            parallel(mine, SHIFT, Y).backward()
            torch.testing.assert_close(mine.grad, x.grad)
    model(X, SHIFT, Y).backward()
    parallel(X, SHIFT, Y).backward()
    assert_same_gradients(parallel, model)


def frozen_meanwhile(force: Any, **options: Any) -> None:
    """Calls with frozen parameters have no part in what is accumulated, as little as in `.grad` on one device."""
    model = Critic().double()
    parallel = compiled(model, (leaf(X), SHIFT, Y), force, **options)
    part = [parallel.up.weight, model.up.weight]

    def run(module: Any, given: Tensor, frozen: list[Tensor], syncs: bool) -> Tensor | None:
        for parameter in frozen:
            parameter.requires_grad_(False)
        x = leaf(given)
        with nullcontext() if syncs or module is model else module.no_sync():
            module(x, SHIFT, Y).backward()
        for parameter in frozen:
            parameter.requires_grad_(True)
        return x.grad

    every = [*parallel.parameters(), *model.parameters()]
    for last in ([], every):  # the last call but one reduces, or has no part in what is accumulated
        for module in (model, parallel):
            module.zero_grad()
        calls = (X, [], False), (Z, every, False), (-X, part, False), (2 * X, last, True), (Z, [], True)
        for given, frozen, syncs in calls:
            mine, alone = (run(module, given, frozen, syncs) for module in (parallel, model))
            torch.testing.assert_close(mine, alone)
        assert_same_gradients(parallel, model)
    with parallel.no_sync():
        parallel(X, SHIFT, Y).backward()
    if world() > 1:
        with pytest.raises(ParallelError, match="up.weight were accumulated under no_sync.., and would be lost"):
            run(parallel, X, part, True)


def two_ranks() -> None:
    frozen_meanwhile({"*": "zdp"})
    frozen_meanwhile({"*": "dp"}, micro_batches=2)
    data, zero3, tensor = {"*": "dp"}, {"*": "zdp"}, {"*": "tensor:2"}
    gradients_of_inputs(zero3)
    gradients_of_inputs(data, micro_batches=2)
    gradients_of_inputs(data, sub_batches=2)
    frozen_critic(zero3)
    accumulated(tensor)
    own_losses(data, "global")
    own_losses(tensor, "local")
    adversaries(data, False)
    adversaries(data, True, micro_batches=2)
    adversaries(tensor, True, "local")
    refused()


def refused() -> None:
    """All ranks ask for the gradient of an input, or none of them does."""
    parallel = compiled(Critic(), (X, SHIFT, Y))
    x = leaf(X) if dist.get_rank() == 0 else X
    with pytest.raises(InputError, match="ranks call the model with different inputs.*with a gradient of x"):
        parallel(x, SHIFT, Y)


def four_ranks() -> None:
    force = {"*": "tensor:2"}  # and two data ranks
    gradients_of_inputs(force)
    adversaries(force, False)
    adversaries(force, True)


@pytest.mark.filterwarnings("ignore:the model is compiled again")
@pytest.mark.parametrize(("run", "ranks"), [(two_ranks, 2), (four_ranks, 4)])
def test_inputs_get_gradients_on_several_ranks(run: Callable[[], None], ranks: int, pool: WorkerPool) -> None:
    pool.run(run, nprocs=ranks)


def test_inputs_get_gradients() -> None:
    gradients_of_inputs({})
    frozen_critic({})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gradient_has_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    precision = sw.Precision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    x = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    parallel: Any = sw.compile_parallel(
        Critic(), sw.Cluster.local(1), x, options=sw.Options(precision=precision), progress=False
    )
    parallel(x).float().sum().backward()
    expected = leaf(x.detach().bfloat16())
    Critic().bfloat16()(expected).float().sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, expected.grad.to(dtype), rtol=0.05, atol=0.05)


def test_an_input_that_the_outputs_do_not_depend_on_gets_no_gradient() -> None:
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.line(x).sum() + y.detach().sum()

    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(4, requires_grad=True)
    parallel: Any = sw.compile_parallel(Ignores(), sw.Cluster.local(1), (x, y), progress=False)
    parallel(x, y).backward()
    assert x.grad is not None and y.grad is None
