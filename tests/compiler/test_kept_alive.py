"""Nothing that planning and compiling return, or leave behind, keeps the user's model or its weights alive."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw

WIDTH = 512


class Model(nn.Module):
    """Shares a module, and has buffers that change, a hook and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again, self.norm = self.up, nn.BatchNorm1d(WIDTH)
        self.down.register_forward_hook(lambda module, args, result: result * 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.norm(torch.dropout(self.again(self.up(x)), 0.1, self.training)))
        return result.pow(2).mean()


class Refused(Model):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        if result > 0:
            return result
        return -result


def batch() -> Tensor:
    return torch.ones(8, WIDTH)


def planned(model: nn.Module) -> object:
    plan = sw.plan(model, sw.Cluster.local(2), batch())
    plan.timeline()
    return plan


def compiled(model: nn.Module) -> object:
    parallel = sw.compile_parallel(model, sw.Cluster.local(1), batch())
    parallel(batch()).backward()
    return parallel


def compiled_from_plan(model: nn.Module) -> object:
    plan = sw.plan(model, sw.Cluster.local(1), batch())
    return plan, sw.compile_parallel(model, sw.Cluster.local(1), batch(), plan=plan)


def compiled_at_the_first_call(model: nn.Module) -> object:
    parallel = sw.compile_parallel(model, sw.Cluster.local(1))
    parallel(batch()).backward()
    return parallel


def mixed(model: nn.Module) -> object:
    return sw.compile_parallel(model, sw.Cluster.local(1), batch(), options=sw.Options(precision="bf16"))


def compared(model: nn.Module) -> object:
    return sw.compare(model, sw.Cluster.local(2), batch())


def swept(model: nn.Module) -> object:
    return sw.plan(model, sw.Cluster.local(2), batch(), sweep="memory")


def impossible(model: nn.Module) -> None:
    with contextlib.suppress(sw.InfeasibleError):
        sw.plan(model, sw.Cluster.local(1), batch(), options=sw.Options(memory_limit=1000))


def of_another_world(model: nn.Module) -> None:
    with contextlib.suppress(sw.ParallelError):
        sw.compile_parallel(model, sw.Cluster.local(3), batch())


def references(model: nn.Module) -> list[weakref.ref[Any]]:
    """To all that must be gone: the modules and the tensors."""
    return [weakref.ref(each) for each in [*model.modules(), *model.parameters(), *model.buffers()]]


WAYS = [
    planned, compiled, compiled_from_plan, compiled_at_the_first_call, mixed, compared, swept, impossible,
    of_another_world,
]  # fmt: skip


@pytest.mark.parametrize("act", WAYS)
def test_the_model_is_gone_when_its_user_lets_it_go(act: Callable[[nn.Module], object]) -> None:
    model = Model()
    left = references(model)
    kept = act(model)  # what is returned lives on
    del model
    gc.collect()
    assert [reference() for reference in left if reference() is not None] == []
    assert (kept is None) == (act in (impossible, of_another_world))


@pytest.mark.parametrize("act", [planned, compiled, compiled_at_the_first_call])
def test_a_model_that_is_refused_is_gone_too(act: Callable[[nn.Module], object]) -> None:
    model = Refused()
    left = references(model)
    with contextlib.suppress(sw.CaptureError):
        act(model)
    del model
    gc.collect()
    assert [reference() for reference in left if reference() is not None] == []


def test_ten_compiles_in_one_process_stay_flat() -> None:
    def once() -> tuple[int, int]:
        model = nn.Sequential(nn.Linear(64, 2**16), nn.ReLU(), nn.Linear(2**16, 4))  # 17.8 MB
        parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), torch.ones(4, 64))
        parallel(torch.ones(4, 64)).sum().backward()
        del model, parallel
        gc.collect()
        tensors = sum(isinstance(each, Tensor) for each in gc.get_objects())
        return tensors, resident()

    for _ in range(2):  # what is made once
        once()
    tensors, before = once()
    for _ in range(10):
        now, after = once()
    assert now <= tensors
    assert after - before < 17e6, f"{(after - before) / 1e6:.0f} MB more after ten compiles"  # less than one model


def resident() -> int:
    """Bytes of memory that this process has now, less what its allocator has free and would use again."""
    with contextlib.suppress(AttributeError):  # glibc keeps up to 75 MB more or less of it, by its own thresholds
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
