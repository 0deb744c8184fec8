"""First values of models without any: bitwise those of one device, and never more whole than one module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardweave as sw
from shardweave.demo.model import GPT
from shardweave.runtime.initialise import LazyStorageMode
from shardweave.runtime.launch import WorkerPool
from tests.models import TODAY, ZOO, Case, gpt, llama

CASES = {
    **TODAY,
    **ZOO,
    "small-gpt": Case("small-gpt", partial(gpt.build, replace(gpt.CONFIG, layers=1)), gpt.batch),
    "small-llama": Case("small-llama", partial(llama.build, layers=1), llama.batch),
    "small-tied": Case("small-tied", partial(llama.build, layers=1, tied=True), llama.batch),
}


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def reference(model: nn.Module, seed: int) -> nn.Module:
    """One device's: what a user writes without shardweave. It has tied parameters twice."""
    torch.manual_seed(seed)
    model.to_empty(device="cpu")
    if hasattr(model, "init_weights"):
        model.init_weights()
        return model
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return model


def assert_equal(made: Any, expected: Any) -> None:
    assert list(made) == list(expected)
    for name, value in expected.items():
        assert torch.equal(made[name], value), name


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


@pytest.mark.parametrize("name", ["gpt", "llama", "llama-tied", "gpt2", "qwen3", "bert", "t5", "vit", "mixtral"])
def test_the_numbers_are_those_of_one_device(name: str) -> None:
    build = CASES[name].build
    state = torch.get_rng_state()
    made = sw.initialised(on_meta(build), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(everything(made), everything(reference(on_meta(build), 3)))
    assert len(list(made.parameters())) == len(list(build().parameters()))  # tied is tied


def test_torch_layers_are_as_their_constructors_make_them() -> None:
    build = partial(nn.TransformerEncoderLayer, 8, 2, 16)
    torch.manual_seed(3)
    assert_equal(everything(sw.initialised(on_meta(build), seed=3)), everything(build()))


class Computed(nn.Module):
    """Computes a buffer as it is built, which the meta device does not."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("ramp", torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.line(x) + self.ramp).square().mean()


class Recomputed(Computed):
    def reset_parameters(self) -> None:
        self.ramp.copy_(torch.arange(8.0, device=self.ramp.device))


class Half(nn.Linear):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[::2].fill_(1)
            self.bias.zero_()


def test_what_nothing_initialises_is_an_error_with_its_name() -> None:
    with pytest.raises(sw.ParallelError, match=r"nothing initialises ramp, or not all of it.*reset_parameters"):
        sw.initialised(on_meta(Computed))
    with pytest.raises(sw.ParallelError, match=r"nothing initialises weight, or"):
        sw.initialised(Half(4, 4, device="meta"))
    with pytest.raises(sw.ParallelError, match=r"nothing initialises .*norm1\.weight"):
        sw.initialised(on_meta(CASES["gpt"].build), init=GPT._initialise)
    made = sw.initialised(on_meta(Recomputed))
    assert_equal(everything(made), everything(reference(on_meta(Recomputed), 0)))
    assert made.ramp.tolist() == list(range(8)) and made.norm.num_batches_tracked == 0
    mixed = on_meta(Computed)
    mixed.ramp = torch.arange(8.0)
    assert sw.initialised(mixed).ramp.tolist() == list(range(8))


class Scaled(nn.Module):
    """Initialises its child's weights again, from what they are; and ties a third module's to them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x)).square().mean()


def own_init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.trunc_normal_(module.bias.data, std=0.1, generator=torch.Generator().manual_seed(7))
    elif isinstance(module, Scaled):
        module.inner.weight.mul_(2).diagonal().add_(module.inner.weight.mean().item())


def test_an_own_initialiser_is_applied_as_torch_does() -> None:
    torch.manual_seed(5)
    model = Scaled()
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    torch.manual_seed(5)
    with torch.no_grad():
        model.apply(own_init)
    model.last.weight = model.inner.weight
    made = sw.initialised(on_meta(Scaled), 5, own_init)
    assert made.last.weight is made.inner.weight
    assert_equal(everything(made), everything(model))
    assert_equal(everything(sw.initialised(model, 5, own_init)), everything(model))  # a model with values: drawn anew


# On ranks.


class Counted(LazyStorageMode):
    """Records the most bytes allocated at a time."""

    largest = 0

    def _allocate(self, key: int, storage: torch.UntypedStorage) -> None:
        super()._allocate(key, storage)
        for key, tensors in self._tensors.items():
            assert key in self._allocated or not any(tensor.untyped_storage().nbytes() for _, tensor in tensors)
        Counted.largest = max(Counted.largest, sum(storage.nbytes() for storage in self._allocated.values()))


def largest_module(model: nn.Module) -> int:
    return max(
        sum(t.numel() * t.element_size() for t in [*m.parameters(recurse=False), *m.buffers(recurse=False)])
        for m in model.modules()
    )


def assert_initialised(build: Callable[[], nn.Module], batch: Any, force: Any, init: Any = None) -> None:
    model = on_meta(build)
    cluster = sw.Cluster.local(dist.get_world_size())
    parallel: Any = sw.compile_parallel(model, cluster, batch, options=sw.Options(force=force))
    assert parallel.unset == set(everything(model))
    Counted.largest = 0
    sw.initialise(parallel, model, 3, init)
    assert 0 < Counted.largest <= largest_module(model)
    assert not parallel.unset and all(t.is_meta for t in everything(model).values())
    expected = sw.initialised(model, 3, init)
    assert_equal(parallel.full_state_dict(), expected.state_dict())
    buffers = dict(expected.named_buffers())
    for name, value in parallel.named_buffers():
        whole = value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value
        assert torch.equal(whole, buffers[name]), name
    losses = [module(**batch) for module in (parallel, expected)]
    losses = [getattr(loss, "loss", loss) for loss in losses]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def initialises(names: list[str], plans: list[str]) -> None:
    from shardweave.runtime import initialise

    initialise.__globals__["LazyStorageMode"] = Counted  # this process is forked for this run
    for name in names:
        case: Case = CASES[name]
        for plan in plans:
            assert_initialised(case.build, case.batch(0), {"*": plan})


@pytest.mark.parametrize(
    ("names", "plans", "world"),
    [(["small-gpt"], ["column", "zdp"], 4), (["small-llama"], ["column"], 4), (["small-tied"], ["zdp"], 4),
     (["gpt2"], ["zdp"], 2), (["small-gpt"], ["zdp"], 8)],
)  # fmt: skip
def test_ranks_have_their_parts_of_it(pool: WorkerPool, names: list[str], plans: list[str], world: int) -> None:
    pool.run(initialises, names, plans, nprocs=world)


def odd_ones() -> None:
    from shardweave.runtime import initialise

    initialise.__globals__["LazyStorageMode"] = Counted
    assert_initialised(Scaled, {"x": torch.randn(8, 8)}, {"*": "zdp"}, own_init)
    assert_initialised(Recomputed, {"x": torch.randn(8, 8)}, {"*": "zdp"})
    model = on_meta(Computed)
    cluster = sw.Cluster.local(dist.get_world_size())
    parallel = sw.compile_parallel(model, cluster, torch.randn(8, 8), options=sw.Options(force={"*": "zdp"}))
    for call, words in [
        (partial(sw.initialise, parallel, model), "nothing initialises ramp"),
        (partial(sw.initialise, parallel, nn.Linear(8, 8)), r"line\.weight.*not in both"),
        (partial(sw.initialise, parallel, model, dist.get_rank()), r"one seed .*\[0, 1\]"),
        (partial(sw.initialise, model, model), "expected what compile_parallel returns"),
    ]:
        with pytest.raises(sw.ParallelError, match=words):
            call()


def test_odd_models_and_mistakes(pool: WorkerPool) -> None:
    pool.run(odd_ones, nprocs=2)


class Shifted(nn.Module):
    """With a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 12), nn.LayerNorm(12)
        self.register_buffer("shift", torch.linspace(0, 1, 12), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.up(x) + self.shift).square().mean()
        return result


def written(module: nn.Module) -> None:
    """An initialisation of one's own."""
    torch.manual_seed(5)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter) if "up" in name else torch.nn.init.constant_(parameter, 0.5)


def own_values() -> None:
    x, alone = torch.linspace(-1, 1, 96).view(12, 8), Shifted()
    written(alone)
    cluster, options = sw.Cluster.local(dist.get_world_size()), sw.Options(force={"*": "zdp"})

    def compiled() -> Any:
        return sw.compile_parallel(on_meta(Shifted), cluster, x, options=options, progress=False)

    # 1. What is written has a value, without a word; what is not is refused.
    parallel = compiled()
    written(parallel)
    assert parallel.unset == {"shift"}
    with pytest.raises(sw.ParallelError, match="shift: no values for 1 tensors"):
        parallel(x)
    parallel.shift.copy_(torch.linspace(0, 1, 12))
    torch.testing.assert_close(parallel(x), alone(x))
    # 2. `to_empty` takes all values away. A buffer that is not written is zero, with a warning.
    assert parallel.to_empty(device="cpu") is parallel
    with (
        pytest.warns(UserWarning, match="to_empty has emptied shift"),
        pytest.raises(sw.ParallelError, match=r"norm.bias, norm.weight, up.bias, up.weight: no values for 4 tensors"),
    ):
        parallel(x)
    written(parallel)
    alone.shift.zero_()
    torch.testing.assert_close(parallel(x), alone(x))
    with pytest.raises(sw.ParallelError, match=r"to_empty\(device='meta'\) would move the module"):
        parallel.to_empty(device="meta")


def test_own_values_are_written_after_compiling(pool: WorkerPool) -> None:
    pool.run(own_values, nprocs=2)


def values_of_rank_0() -> None:
    """As a launch does that reads the weights on rank 0 alone."""
    x = torch.linspace(-1, 1, 96).view(12, 8)
    torch.manual_seed(0)
    alone = Shifted()
    model = copy.deepcopy(alone) if dist.get_rank() == 0 else on_meta(Shifted)
    cluster, options = sw.Cluster.local(dist.get_world_size()), sw.Options(force={"*": "zdp"})
    parallel = sw.compile_parallel(model, cluster, x, options=options, progress=False)
    torch.testing.assert_close(parallel(x), alone(x))
    parallel(x).backward()
    assert_equal(parallel.full_state_dict(), alone.state_dict())


def test_rank_0_sends_its_values_to_ranks_without_any(pool: WorkerPool) -> None:
    pool.run(values_of_rank_0, nprocs=3)
