"""Calls with inputs of other sizes, or in another mode: a step for each from the same plan, equal to one device."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.runtime import WorkerPool


class Language(nn.Module):
    """A small language model with dropout, a batch norm, an optional target and a flag, as nanoGPT's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.0)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 32, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, scale: bool = False) -> tuple[Tensor, Any]:
        x = self.embedding(tokens)
        x = x + self.drop(self.down(torch.relu(self.up(x))))
        x = self.norm(x.flatten(0, 1)).view_as(x)
        if scale:
            x = 2 * x
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def words(rows: int = 8, length: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(32, (2, rows, length), generator=generator)
    return both[0], both[1]


def made(force: Any = None, batch: Any = "global", given: Any = None, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Language().double()
    world = dist.get_world_size() if dist.is_initialized() else 1
    asked = sw.Options(force=force or {}, **options)
    given = given or words()
    return model, sw.compile_parallel(
        model, sw.Cluster.local(world), given, options=asked, batch=batch, progress=False
    )


def assert_same_step(parallel: Any, model: nn.Module, given: tuple[Any, ...], own: Any = None) -> None:
    """The loss and the gradients of a call are those of one device."""
    for each, inputs in ((parallel, own or given), (model, given)):
        each.zero_grad()
        each(*inputs)[1].backward()
    whole = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in
             parallel.named_parameters()}  # fmt: skip
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad, msg=name)


def same_loss(parallel: Any, model: nn.Module, given: tuple[Any, ...]) -> None:
    torch.testing.assert_close(parallel(*given)[1], model(*given)[1])


@pytest.mark.filterwarnings("ignore:the model is compiled again")
def other_calls(force: Any) -> None:
    model, parallel = made(force)
    layouts = {name: parameter.placements for name, parameter in parallel.named_parameters() if dist.is_initialized()}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for given in (words(), words(4), words(8, 6), (*words(), True), words()):
            assert_same_step(parallel, model, given)
    told = [str(each.message) for each in heard if "compiled again" in str(each.message)]
    assert len(told) == (not dist.is_initialized() or dist.get_rank() == 0), told
    for name, placements in layouts.items():
        assert parallel.get_parameter(name).placements == placements
    # Evaluation and training in a loop, as nanoGPT's estimate_loss does.
    for seed in range(2):
        parallel.eval(), model.eval()
        with torch.no_grad():
            for given in (words(8, 4, seed), words(8, 4, seed + 1)):
                same_loss(parallel, model, given)
            assert parallel(words()[0])[0].shape[1:] == (1, 32) and parallel(words()[0])[1] is None
        parallel.train(), model.train()
        assert_same_step(parallel, model, words(8, 4, seed))
    for name, buffer in parallel.named_buffers():
        torch.testing.assert_close(buffer, model.get_buffer(name))
    # A copy, as an average of the weights is.
    twin = copy.deepcopy(parallel).eval()
    with torch.no_grad():
        twin.get_parameter("head.weight").zero_()
        model.eval()
        same_loss(parallel.eval(), model, words())
        parallel.train()


def accumulated(force: Any) -> None:
    """Calls of several sizes under no_sync add up."""
    model, parallel = made(force)
    for each in (parallel, model):
        for given in (words(4), words(8)):
            context = each.no_sync() if each is parallel else torch.enable_grad()
            with context:
                each(*given)[1].backward()
        each(*words(4, 6))[1].backward()
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), model.get_parameter(name).grad, msg=name)


def parts_and_local(force: Any) -> None:
    """Each rank passes its part, or samples of its own; also of a smaller batch."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for batch in ("global", "local"):
        mine = tuple(value.chunk(world)[rank] for value in words())
        model, parallel = made(force, batch, None if batch == "global" else mine)
        for given in (words(), words(4)):
            own = tuple(value.chunk(world)[rank] for value in given)
            assert_same_step(parallel, model, given, own)


def told(call: Callable[[], Any]) -> str:
    with pytest.raises(sw.ParallelError) as error:
        call()
    return str(error.value)


def refused(force: Any) -> None:
    """Errors are the same on all ranks, and the next call works."""
    model, parallel = made(force, recompile_limit=2)
    rank = dist.get_rank()
    assert_same_step(parallel, model, words())
    each = told(lambda: parallel(*words(8 if rank else 4)))
    assert "rank 0 with tokens (4, 4)" in each and "rank 1 with tokens (8, 4)" in each and "drop_last=True" in each
    if rank:
        parallel.eval()
    each = told(lambda: parallel(*words()))
    assert "in training mode" in each and "in evaluation mode" in each, each
    parallel.train()
    assert_same_step(parallel, model, words(4))
    each = told(lambda: parallel(*words(2)))
    assert "recompile_limit=2" in each and "tokens (2, 4)" in each
    assert_same_step(parallel, model, words())


def frozen(force: Any) -> None:
    """A model without trained parameters: a forward, in both modes."""
    torch.manual_seed(0)
    model = Language().double().requires_grad_(False)
    parallel = sw.compile_parallel(
        model, sw.Cluster.local(2), words(), options=sw.Options(force=force), progress=False
    )
    same_loss(parallel, model, words())
    same_loss(parallel.eval(), model.eval(), words())


@pytest.mark.filterwarnings("ignore:the model is compiled again")
def thawed(force: Any) -> None:
    """Layers that are trained later, as in gradual unfreezing, and frozen again; with states of an optimizer."""
    torch.manual_seed(0)
    model = Language().double()
    model.up.requires_grad_(False), model.embedding.requires_grad_(False)
    parallel = sw.compile_parallel(
        model, sw.Cluster.local(2), words(), options=sw.Options(force=force), progress=False
    )
    optimizers = {each: torch.optim.AdamW(each.parameters(), 1e-2) for each in (model, parallel)}
    for changed, is_trained in (("", True), ("up", True), ("embedding", True), ("up", False), ("up", True)):
        for each, optimizer in optimizers.items():
            if changed:
                each.get_submodule(changed).requires_grad_(is_trained)
            optimizer.zero_grad()
            each(*words())[1].backward()
            optimizer.step()
    assert len(parallel._steps) == 3
    for name, value in parallel.full_state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], msg=name)


class Pictures(nn.Module):
    """A batch norm, which follows the convolution in training only, and a scale that one kind of call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, is_scaled: bool = False) -> tuple[None, Tensor]:
        y = self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return None, (y * self.scale if is_scaled else y).square().mean()


@pytest.mark.filterwarnings("ignore:the model is compiled again")
def kept_layouts(force: Any) -> None:
    """Parameters that another step would keep elsewhere stay where the first step has them."""
    torch.manual_seed(0)
    model, x = Pictures().double(), torch.randn(8, 3, 6, 6, dtype=torch.float64)
    options = sw.Options(force=force)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(2), (x,), options=options, progress=False)
    assert not any(placement.is_replicate() for placement in parallel.norm.weight.placements)
    for _ in range(2):
        parallel.eval(), model.eval()
        for given in ((x,), (x, True), (x[:4],)):
            assert_same_step(parallel, model, given)
        parallel.train(), model.train()
        assert_same_step(parallel, model, (x,))


class Recurrent(nn.Module):
    """Makes its first state like a parameter, and takes the last one of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 4)

    def initial(self, rows: int) -> Tensor:
        return next(self.parameters()).new_zeros(rows, 8)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        for each in x.unbind(1):
            state = self.cell(each, state)
        return state, self.head(state).square().mean()


def carried_state(force: Any) -> None:
    torch.manual_seed(0)
    model, batches = Recurrent().double(), torch.randn(3, 8, 2, 4, dtype=torch.float64)
    options = sw.Options(force=force, outputs="whole")
    given = (batches[0], model.initial(8))
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(2), given, options=options, progress=False)
    states = [each.initial(8) for each in (parallel, model)]
    for x in batches:
        assert_same_step(parallel, model, (x, states[1]), (x, states[0]))
        states = [each(x, state)[0].detach() for each, state in zip((parallel, model), states, strict=True)]
        torch.testing.assert_close(*states)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))) - x).square().mean()


def functional_calls(force: Any) -> None:
    """Calls with other parameters give these their gradients, sharded or whole, and leave the module's alone."""

    def loss(module: nn.Module, parameters: Any) -> Tensor:
        found: Tensor = torch.func.functional_call(module, parameters, (given,))
        return found

    given = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double()
    for micro_batches in (1, 2):
        torch.manual_seed(0)
        model = Squares().double()
        options = sw.Options(force=force, micro_batches=micro_batches)
        parallel = sw.compile_parallel(model, sw.Cluster.local(2), given, options=options, progress=False)
        both = [{name: 1.1 * p for name, p in each.named_parameters()} for each in (model, parallel)]
        whole = {name: p.detach().clone().requires_grad_() for name, p in both[0].items()}
        for own in (both[1], whole):
            expected = torch.autograd.grad(loss(model, both[0]), list(both[0].values()), retain_graph=True)
            found = torch.autograd.grad(loss(parallel, own), list(own.values()))
            for name, one, other in zip(own, found, expected, strict=True):
                one = one.full_tensor() if isinstance(one, DTensor) else one
                torch.testing.assert_close(one, other, msg=name)
        torch.testing.assert_close(parallel(given), model(given))


@pytest.mark.parametrize("force", [{"*": "zdp"}, {"*": "tensor:2"}], ids=str)
def test_other_calls(force: Any, pool: WorkerPool) -> None:
    pool.run(other_calls, force, nprocs=2, timeout=300)


def test_other_calls_on_one_device() -> None:
    other_calls({})


class Editable(nn.Module):
    """Parts that a program replaces, adds and takes away."""

    scale: Tensor | None
    adapter: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.head = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])
        self.register_parameter("scale", None)
        self.register_buffer("shift", None)
        self.register_module("adapter", None)

    def forward(self, x: Tensor) -> tuple[None, Tensor]:
        y = self.act(self.up(x))
        for block in self.blocks:
            y = block(y)
        if self.adapter is not None:
            y = y + self.adapter(y)
        y = self.head(y if self.scale is None else y * self.scale)
        return None, (y if self.shift is None else y + self.shift).square().mean()


def doubled(*given: Any) -> Any:
    return 2 * given[-1]


def _with_new_head(model: Any) -> None:
    model.head = nn.Sequential(nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 10)).double()


EDITS: list[Callable[[Any], object]] = [
    lambda model: setattr(model, "scale", nn.Parameter(torch.rand(16).double())),
    lambda model: setattr(model, "shift", torch.rand(4).double()),
    lambda model: setattr(model, "adapter", nn.Linear(16, 16).double()),
    lambda model: setattr(model, "act", nn.GELU()),
    lambda model: setattr(model.up, "bias", None),
    lambda model: model.blocks.append(nn.Linear(16, 16).double()),
    lambda model: model.blocks[0].register_forward_hook(doubled),
    lambda model: model.up.register_forward_pre_hook(lambda _, given: (given[0] + 1,)),
    lambda model: setattr(model, "shift", None),
    _with_new_head,
    lambda model: setattr(model, "adapter", None),
]


@pytest.mark.filterwarnings("ignore:the model is compiled again")
def edited(force: Any) -> None:
    """Parts and hooks that come and go after the model is compiled; rank 0 supplies what is random."""
    torch.manual_seed(0)
    rank, x = dist.get_rank(), torch.randn(8, 8, dtype=torch.float64)
    model = Editable().double()
    options = sw.Options(force=force, recompile_limit=16)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(2), (x,), options=options, progress=False)
    for number, edit in enumerate(EDITS):
        torch.manual_seed(number), edit(model)
        torch.manual_seed(number + rank), edit(parallel)
        assert_same_step(parallel, model, (x,))
        assert len(parallel._steps) == number + 2
    whole = parallel.full_state_dict()
    torch.testing.assert_close(whole, dict(model.state_dict()))
    parallel.load_state_dict(model.state_dict())
    assert_same_step(copy.deepcopy(parallel), copy.deepcopy(model), (x[:4],))
    # Back and forth: no step is compiled twice.
    steps = len(parallel._steps)
    for _ in range(2):
        handles = [each.blocks[1].register_forward_hook(doubled) for each in (model, parallel)]
        assert_same_step(parallel, model, (x,))
        for handle in handles:
            handle.remove()
        assert_same_step(parallel, model, (x,))
    assert len(parallel._steps) == steps + 1
    if rank:
        parallel.act = nn.ReLU()
    assert re.search("rank 1 with x .* and a model in which .*'act' is another one", told(lambda: parallel(x)))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.norm(torch.relu(self.up(x))))
        return y


def under_autocast(force: Any) -> None:
    """Calls with and without autocast around them, the backward inside or outside of it."""
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(8, 8)
    options = sw.Options(force=force, outputs="whole")
    parallel = sw.compile_parallel(model, sw.Cluster.local(2), x, options=options, progress=False)
    for dtype, is_inside in ((None, True), (torch.bfloat16, False), (torch.bfloat16, True), (None, False)):
        found = []
        for each in (parallel, model):
            each.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                output = each(x)
                loss = output.float().square().mean()
                if is_inside:
                    loss.backward()
            if not is_inside:
                loss.backward()
            gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in each.parameters()]
            found.append([output, *gradients])
        assert found[0][0].dtype == (dtype or torch.float32)
        torch.testing.assert_close(*found, **({} if dtype is None else {"rtol": 2e-2, "atol": 2e-2}))
    assert len(parallel._steps) == 2
    with torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() == 0):
        message = told(lambda: parallel(x))
    assert "rank 0 with x (8, 8) in training mode under autocast of cpu to bfloat16; rank 1 with x (8, 8)" in message


class WithNumbers(nn.Module):
    """Makes a tensor of the default dtype, and reads what a parameter and a buffer say of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.linear.weight.gain = 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x) * getattr(self.linear.weight, "gain", 1.0) + self.shift * getattr(self.shift, "times", 1)
        y = y * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return y, y.square().mean()


def attributes_of_tensors(force: Any) -> None:
    """Attributes that users give parameters and buffers are read anew, and another default dtype is heard."""
    torch.manual_seed(0)
    model, x = WithNumbers(), torch.randn(8, 4)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(2), x, options=sw.Options(force=force), progress=False)
    assert_same_step(parallel, model, (x,))
    for each in (parallel, model):
        each.shift.times = 3
    assert_same_step(parallel, model, (x,))
    for each in (parallel, model):
        each.linear.weight.gain = 0.5
    assert_same_step(parallel, model, (x,))
    for each in (parallel, model):
        del each.linear.weight.gain
    assert_same_step(parallel, model, (x,))
    torch.set_default_dtype(torch.float64)
    try:
        assert parallel(x)[1].dtype is model(x)[1].dtype is torch.float64
        assert "with the default dtype float64" in parallel._step.calls.call
    finally:
        torch.set_default_dtype(torch.float32)
    assert parallel(x)[1].dtype is torch.float32 and len(parallel._steps) == 5


class Steps(nn.Module):
    """Computes as often as a number says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, steps: int = 1) -> Tensor:
        for _ in range(steps):
            x = torch.tanh(self.linear(x))
        return x


def test_a_number_is_a_constant_of_its_step() -> None:
    model, x = Steps(), torch.randn(2, 4)
    parallel = sw.compile_parallel(model, sw.Cluster.local(1), (x, 3), progress=False)
    for steps in (3, 2, 1, 3):
        torch.testing.assert_close(parallel(x, steps), model(x, steps))


@pytest.mark.parametrize(
    "check",
    [
        accumulated, parts_and_local, refused, frozen, thawed, carried_state, functional_calls,
        edited, under_autocast, attributes_of_tensors,
    ],  # fmt: skip
)
def test_on_ranks(check: Any, pool: WorkerPool) -> None:
    pool.run(check, {"*": "zdp"}, nprocs=2, timeout=300)


@pytest.mark.parametrize("force", [{"conv": "column", "head": "row"}, {"*": "zero3"}], ids=str)
def test_parameters_stay_where_they_are(force: Any, pool: WorkerPool) -> None:
    pool.run(kept_layouts, force, nprocs=2, timeout=300)


class Tasks(nn.Module):
    """One encoder with a head a task; a task may also skip the encoder, or read both weights of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 16)
        self.heads = nn.ModuleDict(
            {task: nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4)) for task in "abc"}
        )
        self.first, self.second = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor, task: str = "a") -> Tensor:
        hidden = x @ self.first + x @ self.second if task == "c" else torch.tanh(self.encoder(x))
        if task == "b":
            hidden = hidden + x @ self.first
        return hidden if task == "none" else self.heads[task](hidden)


def trained_by_tasks(force: Any, tasks: str) -> None:
    """Training with a loss outside of the model, where each call uses the modules of one task."""
    torch.manual_seed(0)
    model, generator = Tasks().double(), torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, size, generator=generator).double() for size in (8, 4))
    asked, cluster = sw.Options(force=force), sw.Cluster.local(dist.get_world_size())
    parallel: Any = sw.compile_parallel(model, cluster, (x, tasks[0]), options=asked, progress=False)
    for each in (model, parallel):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, weight_decay=0.1)
        for task in tasks:
            target = y if each is model else y.chunk(parallel.data_world_size)[parallel.data_rank]
            (each(x, task) - target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dict(parallel.full_state_dict()), dict(model.state_dict()))
    hidden = parallel(x, "none")  # only the encoder, however it was planned
    torch.testing.assert_close(hidden, model(x, "none").chunk(parallel.data_world_size)[parallel.data_rank])


@pytest.mark.parametrize(
    "force, nprocs",
    [({"*": "zdp"}, 2), ({"*": "tensor:2"}, 2), ({"*": "tensor:2+zero1"}, 4), ({"*": "tensor:2", "encoder": "dp"}, 2)],
    ids=str,
)
def test_calls_may_use_modules_that_others_leave_out(force: Any, nprocs: int, pool: WorkerPool) -> None:
    pool.run(trained_by_tasks, force, "abcbca", nprocs=nprocs, timeout=300)


def test_a_step_of_fewer_modules_has_its_axes_in_the_order_of_the_first_step(pool: WorkerPool) -> None:
    """The order of axes depends on the ops: tensor parallelism is of no op in the second step."""
    force = {"*": "tensor:2+zero1", "encoder": "zdp"}
    pool.run(trained_by_tasks, force, "a", nprocs=4, timeout=300)
