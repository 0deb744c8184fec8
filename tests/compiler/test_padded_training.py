"""Sizes that no axis divides: states rest over all their devices all the same, and nobody sees the padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import shardweave as sw
from shardweave.demo.model import GPTConfig
from shardweave.ir import Grid, Mesh, Strategy
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.parameters import local_tensor
from shardweave.sharding.parallel_ops import Op
from tests.compiler.packing import Packed
from tests.compiler.test_state_sharding import MOMENTUM
from tests.compiler.training import (
    ADAMW,
    ALL_CASES,
    Run,
    Way,
    compile_ways,
    differences,
    only_with_all_cases,
    train,
)  # fmt: skip
from tests.measured_memory import Figures, measure
from tests.models import Case, gpt, mlp

DOUBLE = torch.float64
ODD = GPTConfig(vocabulary=19, context=5, layers=1, heads=2, width=10, bias=True, tied=True)
PRIMES = (5, 7, 13, 3)


def drawn(draw: Any, generator: torch.Generator, size: int) -> dict[str, Tensor]:
    """A batch that 3, 4 and 8 divide, whatever size is asked for."""
    found: dict[str, Tensor] = draw(generator, 24)
    return found


WIDE = (61, 127, 251, 89)
LARGE = Case("large", partial(mlp.build, WIDE), partial(drawn, partial(mlp.batch, sizes=WIDE)))
CASES = {
    "mlp": Case("mlp", partial(mlp.build, PRIMES), partial(drawn, partial(mlp.batch, sizes=PRIMES))),
    "gpt": Case("gpt", partial(gpt.build, ODD), partial(drawn, partial(gpt.batch, config=ODD))),
}


def mixed(ops: Sequence[Op], mesh: Mesh) -> dict[str, Strategy]:
    """Another strategy for each op, with tensor parallelism where it fits."""
    found = {}
    for index, op in enumerate(ops):
        data = mesh.world_size // 2
        x = 2 if op.name.endswith("up") else 1
        y = 2 if op.name.endswith(("down", "qkv")) else 1
        free = mesh.world_size // (x * y)
        rest = (free, 1, free // data)[index % 3]
        found[op.name] = Strategy(Grid(x=x, y=y, data=free), rest, states=free)
    return found


def ways(world: int) -> list[Way]:
    found = [Way(name, {"*": name}) for name in ("zdp", "zero2")]
    if world > 3:
        found += [Way(name, {"*": name}) for name in ("hpz:2", f"hsdp:{world // 2}")]
        found.append(Way("mixed", mixed))
    return found


@cache
def step_of(case: Case, world: int, name: str) -> Packed:
    """The step in this way; made once."""
    chosen = [way for way in ways(world) if way.name == name]
    return compile_ways(case.model(DOUBLE), case, DOUBLE, world, chosen)[0]


# The functions below run on every rank.


def train_all(case: Case, steps: Sequence[Packed], optimizer: Any) -> list[Run]:
    return [train(packed.module(case.model(DOUBLE)), case, DOUBLE, optimizer, clip=0.5) for packed in steps]


def looks_as_dtensors_do(case: Case, packed: Packed) -> int:
    """Parameters, gradients and AdamW's states have the parts that DTensor gives; the result: how many are padded."""
    parallel = packed.module(case.model(DOUBLE))
    optimizer = torch.optim.AdamW(parallel.parameters())
    case.loss(parallel(**case.batch(0, dtype=DOUBLE))).backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in parallel.parameters() if p.grad is not None]
    norm = parallel.clip_grad_norm_(1.0)
    whole = [gradient.full_tensor() for gradient in gradients]  # type: ignore[attr-defined]
    # after clipping, the norm is that much
    now = torch.stack([gradient.norm() for gradient in whole]).norm()
    torch.testing.assert_close(now, norm.clamp(max=1.0), rtol=1e-5, atol=0.0)
    largest = parallel.clip_grad_norm_(1e9, math.inf)
    torch.testing.assert_close(largest, torch.stack([gradient.abs().max() for gradient in whole]).max())
    optimizer.step()
    full = parallel.full_state_dict()
    for name, parameter in parallel.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.grad is not None
        shape, _ = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        for tensor in (parameter, parameter.grad, *optimizer.state[parameter].values()):
            if tensor.ndim:
                assert isinstance(tensor, DTensor) and tensor.placements == parameter.placements
                assert (
                    tensor.shape == parameter.shape and tensor.to_local().shape == shape == local_tensor(tensor).shape
                )
                assert local_tensor(tensor).is_contiguous()
        assert torch.equal(parameter.full_tensor(), full[name]), name
    return sum(spec.layout.padding is not None for spec in parallel.spec.parameters)


def resumes(case: Case, step: Packed, folder: str, save: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps and a checkpoint, or what comes after it."""
    parallel = step.module(case.model(DOUBLE, seed=0 if save else 1))
    optimizer = ADAMW(parallel.parameters())
    losses = []
    if not save:
        sw.load_checkpoint(folder, parallel, optimizer)
    for index in range(2) if save else range(2, 4):
        loss = case.loss(parallel(**case.batch(index, dtype=DOUBLE)))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if save:
        sw.save_checkpoint(folder, parallel, optimizer)
    return losses, parallel.full_state_dict()


def weights_come_and_go(case: Case, step: Packed, folder: str) -> None:
    """Whole state dicts, DTensors' own, files and first values give what one device has."""
    model = case.model(DOUBLE, seed=3)
    expected = model.state_dict()

    def check(parallel: sw.ParallelModule, wanted: dict[str, Tensor] = expected) -> None:
        found = parallel.full_state_dict()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())

    parallel = step.module(case.model(DOUBLE))
    parallel.load_state_dict(expected)
    check(parallel)
    sw.save_weights(parallel, folder)
    other = step.module(case.model(DOUBLE))
    sw.load_weights(other, folder)
    check(other)
    third = step.module(case.model(DOUBLE))
    third.load_state_dict(parallel.state_dict())
    check(third)
    third.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)
    check(third)
    # a part that was put in the place of ours has no room behind it
    assert torch.equal(third(**case.batch(0, dtype=DOUBLE)), parallel(**case.batch(0, dtype=DOUBLE)))
    sw.initialise(parallel, model, seed=5)
    check(parallel, sw.initialised(model, seed=5).state_dict())


def measured(case: Case, options: sw.Options) -> tuple[Figures, int, int]:
    """What a rank's memory holds at most and between steps, and what the plan says of both."""
    parallel: Any = sw.compile_parallel(case.model(), sw.Cluster.local(3), case.batch(0), options=options)
    timeline = parallel.plan.timeline()
    return measure(case, parallel), timeline.peak_memory, sum(timeline.memory.at_rest().values())


# The tests.


@pytest.mark.parametrize("world", [3, 4, 8])
@pytest.mark.parametrize(("name", "optimizer"), [("mlp", MOMENTUM), ("mlp", ADAMW), ("gpt", ADAMW)])
def test_training_equals_one_device(name: str, optimizer: Any, world: int, pool: WorkerPool) -> None:
    only_with_all_cases((name, optimizer) != ("mlp", MOMENTUM) if world == 4 else optimizer is MOMENTUM)
    case = CASES[name]
    chosen = ways(world) if ALL_CASES or name == "mlp" else ways(world)[::2]
    steps = [step_of(case, world, way.name) for way in chosen]
    expected = train(case.model(DOUBLE), case, DOUBLE, optimizer, clip=0.5)
    first, *others = pool.run(train_all, case, steps, optimizer, nprocs=world, timeout=300.0)
    wrong: list[str] = []
    for index, way in enumerate(chosen):
        runs: list[Run | list[float]] = [first[index], *(other[index].losses for other in others)]
        wrong += differences(way, expected, runs, 1e-9, 1e-8)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("name", "world", "way"), [("gpt", 3, "zdp"), ("mlp", 8, "zdp"), ("gpt", 8, "mixed")])
def test_tensors_look_as_dtensors_do(name: str, world: int, way: str, pool: WorkerPool) -> None:
    case = CASES[name]
    assert all(pool.run(looks_as_dtensors_do, case, step_of(case, world, way), nprocs=world, timeout=120.0))


def test_a_checkpoint_goes_from_one_world_to_another(pool: WorkerPool, tmp_path: Any) -> None:
    case, folder = CASES["mlp"], str(tmp_path / "checkpoint")
    pool.run(resumes, case, step_of(case, 4, "zdp"), folder, True, nprocs=4, timeout=120.0)
    runs = {}
    for world in (4, 3, 2, 1):
        runs[world] = pool.run(resumes, case, step_of(case, world, "zdp"), folder, False, nprocs=world, timeout=120.0)[
            0
        ]
    expected = train(case.model(DOUBLE), case, DOUBLE, ADAMW, count=4)
    for losses, full in runs.values():
        torch.testing.assert_close(losses, expected.losses[2:], rtol=1e-10, atol=0.0)
        for name, value in expected.parameters.items():
            torch.testing.assert_close(full[name], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("world", [3, 8])
def test_weights_come_and_go(world: int, pool: WorkerPool, tmp_path: Any) -> None:
    case = CASES["mlp"]
    pool.run(weights_come_and_go, case, step_of(case, world, "zdp"), str(tmp_path / "w"), nprocs=world, timeout=120.0)


@pytest.mark.parametrize("word", ["zdp", "zero2"])
def test_memory_is_what_is_predicted(word: str, pool: WorkerPool) -> None:
    """To the byte between steps, but for the optimizer's counters, on ranks whose parts fill their places."""
    options = sw.Options(force={"*": word})
    ranks = pool.run(measured, LARGE, options, nprocs=3, timeout=120.0)
    numbers = [parameter.numel() for parameter in LARGE.model().parameters()]
    for found, peak, rest in ranks:
        assert rest * 0.97 <= found.rest <= rest * 1.01 and found.peak <= peak * 1.02
        # a third of parameters and both moments, rounded up to rows
        assert found.rest <= 1.06 * 12 * sum(numbers) / 3
    found, peak, rest = ranks[0]
    counters = 4 * len(numbers)
    assert found.rest == rest + counters
    assert found.peak == pytest.approx(peak, rel=0.02)
