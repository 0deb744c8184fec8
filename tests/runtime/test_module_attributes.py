"""The parallel module has the model's classes, attributes and methods, and changes of them take effect."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

import shardweave as sw
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.module_tree import ModuleTreeCopy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = {"width": 6}
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.embedding = nn.Parameter(torch.randn(6, 6))
        self.head = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.aliases = [self.head, self.layers[0]]
        self.activation = self._scaled
        self.through_head = lambda x: self.head(x)
        self.head.weight.no_decay = True  # type: ignore[attr-defined]

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def encode(self, x: Tensor) -> Tensor:
        x = x @ self.embedding
        for layer in self.layers:
            x = layer(x)
        return self.activation(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.encode(x)) - y).square().mean()

    def __len__(self) -> int:
        return len(self.layers)

    def configure_optimizers(self, decay: float) -> torch.optim.Optimizer:
        """As nanoGPT's."""
        found = {name: p for name, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in found.values() if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in found.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    @torch.no_grad()
    def normalise(self) -> None:
        self.embedding.div_(self.embedding.norm(dim=1, keepdim=True))
        self.head.weight[0] = 0

    def save_pretrained(self, file: io.BytesIO, state_dict: dict[str, Tensor] | None = None) -> None:
        """As that of transformers and diffusers: it writes tensors of a state dict, beside the name of the class."""
        torch.save((type(self).__name__, self.state_dict() if state_dict is None else state_dict), file)

    def penalty(self) -> Any:
        return sum(p.square().sum() for p in self.parameters())


def build() -> Net:
    return Net().double()


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(6, n, dtype=torch.float64, generator=generator) for n in (6, 5))  # type: ignore[return-value]


def compiled() -> Any:
    return sw.compile_parallel(build(), sw.Cluster.local(3), batch(), options=sw.Options(force={"*": "zdp"}))


def same_state(parallel: Any, model: nn.Module) -> None:
    torch.testing.assert_close(parallel.full_state_dict(), dict(model.state_dict()))


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.1)
        nn.init.zeros_(module.bias)


def looks_and_computes(parallel: Any) -> None:
    model, (x, y) = build(), batch()
    assert isinstance(parallel, Net) and type(parallel.layers[0].norm) is nn.LayerNorm
    assert [n for n, _ in parallel.named_modules()] == [n for n, _ in model.named_modules()]
    assert len(parallel) == 2 and parallel.aliases[0] is parallel.head and parallel.config == {"width": 6}
    assert parallel.activation.__self__ is parallel and parallel.head.weight.no_decay
    assert list(inspect.signature(parallel.forward).parameters) == ["x", "y"]
    assert "on 3 ranks" in repr(parallel) and "2 x Block" in repr(parallel)
    for compute in (
        lambda m: m.encode(x),
        lambda m: m.through_head(x),
        lambda m: m.layers[1](x),
        lambda m: m.aliases[0](x),
    ):
        torch.testing.assert_close(compute(parallel), compute(model))
    for each in (model, parallel):
        (each.encode(x).sum() + each(x, y) + 0.1 * each.penalty()).backward()
    for mine, theirs in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def trains(parallel: Any) -> None:
    model = build()
    parallel.load_state_dict(model.state_dict())
    for each in (model, parallel):
        each.zero_grad()
        torch.manual_seed(5)
        each.apply(initialise)
        optimizer = each.configure_optimizers(0.1)
        for seed in range(3):
            each(*batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
            each.normalise()
    same_state(parallel, model)


def replaced(parallel: Any) -> None:
    model = build()
    parallel.load_state_dict(model.state_dict())
    for each in (model, parallel):
        each.embedding = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))
        optimizer = torch.optim.Adam(each.parameters(), 1e-2)
        for seed in range(2):
            each(*batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        each.scale.data = torch.tensor(3.0, dtype=torch.float64)
        each.layers[0].linear.weight.data = torch.eye(6, dtype=torch.float64)
        each.layers[0].linear.weight.data[1, 2] = 5
    torch.testing.assert_close(parallel(*batch()), model(*batch()))
    same_state(parallel, model)
    twin = copy.deepcopy(parallel)
    with torch.no_grad():
        twin.scale.zero_()
    assert twin.aliases[0] is twin.head and twin.activation.__self__ is twin
    same_state(parallel, model)


def saved(parallel: Any) -> None:
    model = build()
    parallel.load_state_dict(model.state_dict())
    for given in (None, parallel.state_dict()):
        file = io.BytesIO()
        parallel.save_pretrained(file, state_dict=given)
        if parallel.mesh.rank > 0:
            assert not file.getvalue()
            continue
        file.seek(0)
        kind, state = torch.load(file)
        assert kind == "Net" and not any(isinstance(value, DTensor) for value in state.values())
        torch.testing.assert_close(state, dict(model.state_dict()))
    assert isinstance(parallel.state_dict()["scale"], DTensor) and parallel.scale.requires_grad


def refused(parallel: Any) -> None:
    def raises(match: str) -> None:
        with pytest.raises(sw.ParallelError, match=match):
            parallel(*batch())

    with pytest.raises(sw.ParallelError, match="save_checkpoint"):
        torch.save(parallel, io.BytesIO())
    with pytest.raises(sw.ParallelError, match="DistributedDataParallel cannot wrap a parallel module"):
        nn.parallel.DistributedDataParallel(parallel)
    parallel.float()
    raises("float32 now")
    parallel.double()
    parallel(*batch())
    del parallel.scale
    raises("object has no attribute .*scale")


def all_in_turn() -> None:
    parallel = compiled()
    for check in (looks_and_computes, trains, saved, replaced, refused):
        check(parallel)


def test_the_parallel_module_is_as_the_model(pool: WorkerPool) -> None:
    pool.run(all_in_turn, nprocs=3, timeout=200)


def test_a_copied_module_tree_holds_nothing_of_the_model() -> None:
    model = nn.ModuleDict({"net": build()})
    old = weakref.ref(model["net"].head.weight)
    tensors = {p: nn.Parameter(p.detach().clone()) for p in model.parameters()}
    copied = nn.ModuleDict()
    attributes = ModuleTreeCopy(model, copied, tensors).attributes(model)
    vars(copied).update(attributes)
    assert copied["net"].config is model["net"].config
    copied["net"].extra = nn.Linear(2, 2)
    assert not hasattr(model["net"], "extra")
    del model, tensors, attributes
    gc.collect()
    assert old() is None
    x = torch.randn(2, 6, dtype=torch.float64)
    torch.testing.assert_close(copied["net"].through_head(x), copied["net"].head(x))


def compiled_by_torch() -> None:
    """`torch.compile` of the parallel module, and of a step that trains it, leave it as it is."""
    model, parallel = build(), compiled()
    calls, optimizers = (model, torch.compile(parallel, backend="aot_eager")), []
    for each in (model, parallel):
        optimizers.append(torch.optim.SGD(each.parameters(), lr=0.1))

    def step(call: Any, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
        loss: Tensor = call(*batch(seed)) * 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for train in (step, torch.compile(step, backend="eager")):
        for seed in range(2):
            expected = step(model, optimizers[0], seed)
            torch.testing.assert_close(train(calls[1], optimizers[1], seed), expected)
            same_state(parallel, model)
    torch._dynamo.reset()


def test_torch_compile_leaves_it_as_it_is(pool: WorkerPool) -> None:
    pool.run(compiled_by_torch, nprocs=3, timeout=120)


class MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def prunes(force: Any) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    world = dist.get_world_size() if dist.is_initialized() else 1
    losses = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), MeanSquare())
        options = sw.Options(force=force)
        module = sw.compile_parallel(model, sw.Cluster.local(world), (x,), options=options) if compiles else model
        module(x).backward()
        module.zero_grad()
        prune.l1_unstructured(module[0], "weight", 0.3)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            loss = module(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if step == 1:
                prune.remove(module[0], "weight")
    torch.testing.assert_close(losses[3:], losses[:3])


def test_weights_are_pruned_after_compiling_as_on_one_device() -> None:
    """Pruning keeps the weight that it computes, which needs a gradient, as an attribute of the module."""
    prunes({})


@pytest.mark.parametrize("force", [{"*": "zdp"}, {"0": "column", "2": "row"}], ids=str)
def test_sharded_weights_are_pruned_after_compiling(force: Any, pool: WorkerPool) -> None:
    """The masks are buffers that are made from sharded weights."""
    pool.run(prunes, force, nprocs=2, timeout=120)
