"""ParallelModule on real ranks: the numbers of one device, and an nn.Module to everything around it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import shardweave as sw
from shardweave.ir import Axis, Layout, Mesh, StepSpec
from shardweave.ir.errors import InputError, ParallelError
from shardweave.passes import Step
from shardweave.runtime.bound_step import CompiledStep
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.module import ParallelModule
from shardweave.runtime.parameters import local_shard, local_tensor
from tests.runtime.handmade import FEATURES, OUTPUTS, ROWS, Model, handmade_step

SQUARE = Mesh.of_levels([("gpu", 4)])


def make(seed: int = 0) -> tuple[Model, ParallelModule]:
    torch.manual_seed(seed)
    model = Model()
    return model, ParallelModule(model, CompiledStep(handmade_step(SQUARE)))


def batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, FEATURES, dtype=torch.float64, generator=generator)
    return x, torch.randn(ROWS, OUTPUTS, dtype=torch.float64, generator=generator)


def whole_grads(parallel: ParallelModule) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor() for n, p in parallel.named_parameters() if isinstance(p.grad, DTensor)}


def part(parallel: ParallelModule, value: torch.Tensor, index: int = 1) -> torch.Tensor:
    return local_shard(value, parallel.spec.outputs[index].layout, SQUARE.coordinates(dist.get_rank()))


def assert_same_grads(parallel: ParallelModule, model: nn.Module) -> None:
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(whole_grads(parallel), expected)


def train_as_one_device(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    model, parallel = make()
    ours, theirs = optimizer(parallel.parameters()), optimizer(model.parameters())
    for step in range(5):
        x, target = batch(step)
        loss, y = parallel(x, target)
        expected, y_whole = model(x, target)
        torch.testing.assert_close((loss, y), (expected, part(parallel, y_whole)))
        loss.backward()
        expected.backward()
        assert_same_grads(parallel, model)
        for one in (ours, theirs):
            one.step()
            one.zero_grad()
    torch.testing.assert_close(parallel.full_state_dict(), dict(model.state_dict()))
    assert parallel.state_dict()["calls"].item() == 5


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def foreach_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, foreach=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("optimizer", [adamw, foreach_adamw, sgd])
def test_five_steps_equal_one_device(pool: WorkerPool, optimizer: Callable[..., Any]) -> None:
    pool.run(train_as_one_device, optimizer, nprocs=4)


def losses_outside() -> None:
    """Averaged over the data ranks, as DistributedDataParallel does; and mixed with the model's own loss."""
    model, parallel = make()
    x, target = batch()
    _, y = parallel(x, target)
    y.square().sum().backward()
    _, expected = model(x, target)
    (expected.square().sum() / 2).backward()
    assert_same_grads(parallel, model)
    loss, y = parallel(x, target)
    (3 * loss + y.sum()).backward()  # accumulates; the tangent of a sum is not contiguous
    loss, expected = model(x, target)
    (3 * loss + expected.sum() / 2).backward()
    assert_same_grads(parallel, model)


def module_manners() -> None:
    model, parallel = make()
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(parallel.state_dict()) == list(model.state_dict())
    assert list(dict(parallel.named_buffers())) == list(dict(model.named_buffers()))
    state = parallel.state_dict()
    assert state["again.weight"].data_ptr() == state["local.weight"].data_ptr()
    assert all(isinstance(p, DTensor) for p in parallel.parameters())
    assert [p.requires_grad for p in parallel.parameters()] == [p.requires_grad for p in model.parameters()]
    assert (parallel.data_world_size, parallel.data_rank) == (2, SQUARE.axes[1].coordinate(dist.get_rank()))
    numbers = TensorDataset(torch.arange(8))
    mine = [
        int(i) for (part_,) in DataLoader(numbers, 2, sampler=parallel.sampler(numbers, shuffle=False)) for i in part_
    ]
    assert mine == list(range(parallel.data_rank, 8, 2))
    assert parallel.local(torch.arange(8)).tolist() == [4 * parallel.data_rank + i for i in range(4)]
    with pytest.raises(InputError, match="does not divide into the 2 parts"):
        parallel.local(torch.arange(7))
    with pytest.raises(ParallelError, match="captured in training mode"):
        parallel.eval()
    assert parallel.train() is parallel


def without_gradients() -> None:
    model, parallel = make()
    x, target = batch()
    with torch.no_grad():
        loss, _ = parallel(x, target)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, model(x, target)[0])
    with torch.inference_mode():
        torch.testing.assert_close(parallel(x, target)[0], loss)


def loading() -> None:
    model, parallel = make()
    other = Model()
    parallel.load_state_dict(other.state_dict())
    torch.testing.assert_close(parallel.full_state_dict(), dict(other.state_dict()))
    nested = nn.ModuleDict({"net": parallel})
    nested.load_state_dict(nn.ModuleDict({"net": model}).state_dict())
    torch.testing.assert_close(parallel.full_state_dict(), dict(model.state_dict()))
    sharded = {name: tensor.clone() for name, tensor in parallel.state_dict().items()}
    parallel.load_state_dict(other.state_dict(), assign=True)
    x, target = batch()
    torch.testing.assert_close(parallel(x, target)[0], other(x, target)[0])
    parallel.load_state_dict(sharded)
    torch.testing.assert_close(parallel.full_state_dict(), dict(model.state_dict()))
    with pytest.raises(RuntimeError, match=r"size mismatch for local\.bias"):
        parallel.load_state_dict({**other.state_dict(), "local.bias": torch.zeros(5)})
    with torch.device("meta"):
        empty = Model()
    filled = ParallelModule(empty, CompiledStep(handmade_step(SQUARE)))
    with pytest.raises(ParallelError, match="no values for .* tensors that the step reads"):
        filled(x, target)
    filled.load_state_dict(model.state_dict())
    torch.testing.assert_close(filled(x, target)[0], model(x, target)[0])


def resuming() -> None:
    """An optimizer's state goes through state_dict and comes back."""
    _, parallel = make()
    optimizer = adamw(parallel.parameters())
    parallel(*batch(0))[0].backward()
    optimizer.step()
    copy = adamw(parallel.parameters())
    copy.load_state_dict(optimizer.state_dict())
    for key, value in optimizer.state_dict()["state"][2].items():
        again = copy.state_dict()["state"][2][key]
        assert torch.equal(local_tensor(value), local_tensor(again)) and type(value) is type(again)


def clipping() -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        model, parallel = make()
        x, target = batch()
        model(x, target)[0].backward()
        parallel(x, target)[0].backward()
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        torch.testing.assert_close(parallel.clip_grad_norm_(0.1, norm_type), expected)
        assert_same_grads(parallel, model)
        wholes, parts = model.parameters(), parallel.parameters()
        expected = torch.nn.utils.clip_grad_norm_(wholes, 0.05, norm_type)
        after = torch.nn.utils.clip_grad_norm_(parts, 0.05, norm_type)
        assert isinstance(after, DTensor)
        torch.testing.assert_close(after.full_tensor(), expected)
        assert_same_grads(parallel, model)


def parts_and_bad_inputs() -> None:
    model, parallel = make()
    x, target = batch()
    loss, _ = parallel(parallel.local(x), part(parallel, target))
    torch.testing.assert_close(loss, model(x, target)[0])
    loss, _ = parallel(x.t().contiguous().t(), target)
    torch.testing.assert_close(loss, model(x, target)[0])
    for values, words in [
        ((x[:6], target), r"'x' must have the global shape \(8, 4\) or .*\(4, 4\), but has \(6, 4\)"),
        ((x.float(), target), r"'x' must have dtype float64, but has float32"),
        ((x,), r"takes 2 tensors \(x, target\), but the call passes 1"),
        ((x, None), r"'target' must be a tensor, but is a NoneType"),
        ((x.clone().requires_grad_(), target), r"'x' requires a gradient"),
    ]:
        with pytest.raises(InputError, match=words):
            parallel(*values)


def misuse() -> None:
    _, parallel = make()
    loss, _ = parallel(*batch())
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(ParallelError, match="run backward already.*retain_graph=True"):
        loss.backward()
    loss, _ = parallel(*batch())
    with torch.no_grad():
        parallel.get_parameter("scale").mul_(2)
    with pytest.raises(ParallelError, match="changed in place"):
        loss.backward()
    x, target = batch()
    loss, _ = parallel(x, target)
    x.add_(1)
    with pytest.raises(ParallelError, match="changed in place"):
        loss.backward()


def nothing_is_kept() -> None:
    """A step that never runs backward is freed with its outputs."""
    _, parallel = make()
    loss, y = parallel(*batch())
    gone = weakref.ref(y.grad_fn)
    del loss, y
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "check",
    [losses_outside, module_manners, without_gradients, loading, resuming, clipping, parts_and_bad_inputs, misuse,
     nothing_is_kept],
)  # fmt: skip
def test_behaves_as_a_module(pool: WorkerPool, check: Callable[[], None]) -> None:
    pool.run(check, nprocs=4, timeout=60.0)


def values_of_rank_zero() -> list[float]:
    _, parallel = make(seed=dist.get_rank())
    return parallel.full_state_dict()["local.bias"].tolist()


def test_ranks_start_from_the_values_of_rank_zero(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    assert pool.run(values_of_rank_zero, nprocs=4) == [Model().local.bias.tolist()] * 4


def other_graph_on_three() -> None:
    step = handmade_step(SQUARE)
    if dist.get_rank() == 3:
        step = Step(step.forward, step.backward, replace(step.spec, graph_hash="other"))
    with pytest.raises(ParallelError, match=r"ranks \[0, 1, 2\]: handmade; ranks \[3\]: other"):
        ParallelModule(Model(), CompiledStep(step))


def other_model() -> None:
    with pytest.raises(ParallelError, match=r"another model: this one has no .*local\.bias"):
        ParallelModule(nn.Linear(2, 2), CompiledStep(handmade_step(SQUARE)))
    model = Model()
    model.scale = nn.Parameter(torch.ones(2))
    with pytest.raises(ParallelError, match=r"'scale' of shape \(\), but this model has it of shape \(2,\)"):
        ParallelModule(model, CompiledStep(handmade_step(SQUARE)))


@pytest.mark.parametrize("check", [other_graph_on_three, other_model])
def test_what_does_not_fit_is_refused_on_all_ranks(pool: WorkerPool, check: Callable[[], None]) -> None:
    pool.run(check, nprocs=4, timeout=60.0)


def test_another_world_is_refused() -> None:
    with pytest.raises(ParallelError, match=r"compiled for 4 ranks .* not initialised"):
        ParallelModule(Model(), CompiledStep(handmade_step(SQUARE)))


def test_one_device_without_process_group() -> None:
    """Collectives over no axes are never generated; the rest is the same."""
    step = handmade_step(Mesh((Axis("gpu0", 1), Axis("gpu1", 1))))
    values: dict[str, Any] = {
        field: tuple(replace(x, layout=Layout.replicated(x.layout.global_shape)) for x in getattr(step.spec, field))
        for field in ("parameters", "buffers", "inputs", "outputs")
    }
    spec = StepSpec(mesh=Mesh(()), mutated=("calls",), **values)
    for gm in (step.forward, step.backward):
        assert gm is not None
        for node in list(gm.graph.nodes):
            if node.op == "placeholder" and node.name.startswith("coord"):
                gm.graph.erase_node(node)
            elif "_c10d" in str(node.target):
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        gm.recompile()
    model = Model()
    parallel = ParallelModule(model, CompiledStep(Step(step.forward, step.backward, spec)))
    x, target = batch()
    loss, y = parallel(x, target)
    expected, whole = model(x, target)
    torch.testing.assert_close((loss, y), (expected, whole))
    torch.autograd.backward(loss)
    torch.autograd.backward(expected)
    for ours, theirs in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(parallel.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))


class LossAndLogits(nn.Module):
    """Its own loss, what it is computed from, and something that has no gradient anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.line(x)
        return logits.pow(2).mean(), logits, logits.argmax(-1)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_of_outputs_beside_the_models_own_is_refused(micro_batches: int) -> None:
    """Its gradient would be lost without a word."""
    x, options = torch.randn(4, 8), sw.Options(micro_batches=micro_batches)
    parallel = sw.compile_parallel(LossAndLogits(), sw.Cluster.local(1), x, options=options)
    loss, logits, best = parallel(x)
    assert logits.requires_grad and not best.requires_grad
    (loss + logits.detach().sum()).backward()
    assert parallel.line.weight.grad.norm() > 0
    loss, logits, _ = parallel(x)
    with pytest.raises(ParallelError, match="the loss depends on the output output1, .* detach"):
        (loss + logits.sum()).backward()
