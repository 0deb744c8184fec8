"""`compile_parallel` from the user's side: an nn.Module like any other, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import shardweave as sw
from shardweave.runtime.launch import WorkerPool
from tests.compiler.training import ADAMW, Run, distance, gradients_of, train
from tests.models import ZOO

MIXED: dict[str, Any] = {"first": (2, 1, 1, 2), "second": "zdp", "back": (2, 1, 2, 1), "last": (1, 2, 1, 2)}
"""For the MLP on 4 ranks; with it the batch is spread over two data ranks."""
DOUBLE = torch.float64
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
MLP = ZOO["mlp"]


def build() -> nn.Module:
    return MLP.model(DOUBLE)


def batch(step: int = 0) -> dict[str, Tensor]:
    return MLP.batch(step, 8, DOUBLE)


def compiled(force: dict[str, Any] = MIXED, inputs: Any = None, model: nn.Module | None = None, **options: Any) -> Any:
    cluster = sw.Cluster.local(dist.get_world_size())
    return sw.compile_parallel(
        model or build(), cluster, batch() if inputs is None else inputs, options=sw.Options(force=force, **options)
    )


def assert_same(run: Run, expected: Run) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=1e-9)
    for what in ("gradients", "parameters"):
        off, where = distance(getattr(run, what), getattr(expected, what))
        assert off < 1e-9, f"{what} of {where} differ by {off}"


# Each of these runs on every rank, and asserts there.


def trains_as_one_device_with_any_optimizer() -> None:
    parallel = compiled()
    start = parallel.full_state_dict()
    for optimizer, clip in (
        (ADAMW, None),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), None),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), 0.05),
        (partial(torch.optim.Adam, lr=0.01, amsgrad=True), 1e9),
        (partial(torch.optim.RMSprop, lr=0.01), None),
        (partial(torch.optim.AdamW, lr=0.01, foreach=True), 0.1),
    ):
        parallel.load_state_dict(start)
        assert_same(train(parallel, MLP, DOUBLE, optimizer, clip), train(build(), MLP, DOUBLE, optimizer, clip))


def clips_as_one_device() -> None:
    parallel, model = compiled(), build()
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        for module in (parallel, model):
            module.zero_grad()
            module(**batch()).backward()
        ours = parallel.clip_grad_norm_(0.01, norm_type)
        theirs = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        torch.testing.assert_close(ours, theirs, **CLOSE)
        torch.testing.assert_close(gradients_of(parallel), gradients_of(model), **CLOSE)


def accumulates_and_zeroes_gradients() -> None:
    parallel, model = compiled(), build()
    for module in (parallel, model):
        for step in range(3):
            module(**batch(step)).backward()
    torch.testing.assert_close(gradients_of(parallel), gradients_of(model), **CLOSE)
    parallel.zero_grad(set_to_none=False)
    assert all(not gradient.any() for gradient in gradients_of(parallel).values())
    parallel.zero_grad()
    assert all(parameter.grad is None for parameter in parallel.parameters())


def is_a_module_with_the_models_names() -> None:
    parallel, model = compiled(), build()
    assert isinstance(parallel, nn.Module) and isinstance(parallel, sw.ParallelModule)
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert {n: p.shape for n, p in parallel.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert list(parallel.state_dict()) == list(model.state_dict())
    assert all(isinstance(parameter, DTensor) for parameter in parallel.parameters())
    torch.testing.assert_close(parallel.full_state_dict(), dict(model.state_dict()), rtol=0, atol=0)
    assert {"capture", "shard", "schedule", "forward", "backward"} <= set(parallel.graphs)
    assert parallel.data_world_size == 2 and parallel.data_rank in (0, 1)
    spread = [p for p in parallel.parameters() if isinstance(p, DTensor) and p.to_local().numel() < p.numel()]
    assert spread


def state_dicts_go_round() -> None:
    trained, other = compiled(), compiled({"*": "zdp"})
    expected = train(trained, MLP, DOUBLE)
    whole = trained.full_state_dict()
    other.load_state_dict(whole)
    torch.testing.assert_close(other.full_state_dict(), whole, rtol=0, atol=0)
    one = build()
    one.load_state_dict(whole)
    loss = one(**batch(9))
    torch.testing.assert_close(trained(**batch(9)), loss, **CLOSE)
    torch.testing.assert_close(other(**batch(9)), loss, **CLOSE)
    sharded = {name: value.clone() for name, value in trained.state_dict().items()}
    train(trained, MLP, DOUBLE)
    trained.load_state_dict(sharded)
    assert distance(trained.full_state_dict(), whole)[0] == 0
    assert distance(expected.parameters, {n: whole[n] for n in expected.parameters})[0] == 0


def optimizer_states_go_round() -> None:
    parallel = compiled()
    optimizer = ADAMW(parallel.parameters())

    def step(number: int) -> None:
        parallel(**batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    model_state = {name: value.clone() for name, value in parallel.state_dict().items()}
    state = optimizer.state_dict()
    state = {
        "param_groups": state["param_groups"],
        "state": {key: {k: v.clone() for k, v in value.items()} for key, value in state["state"].items()},
    }
    step(1)
    after = parallel.full_state_dict()
    parallel.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    step(1)
    assert distance(parallel.full_state_dict(), after)[0] == 0


def takes_a_batch_whole_or_in_parts() -> None:
    parallel = compiled()
    whole = batch(3)
    parts = {name: parallel.local(value) for name, value in whole.items()}
    assert parts["x"].shape == (4, 6)
    results = []
    for inputs in (whole, parts, {"x": whole["x"], "targets": parts["targets"]}):
        parallel.zero_grad()
        loss = parallel(**inputs)
        loss.backward()
        results.append((loss, gradients_of(parallel)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=0)


def loads_its_part_of_a_data_set() -> None:
    parallel, model = compiled(), build()
    x, y = torch.randn(24, 6, dtype=DOUBLE), torch.randn(24, 7, dtype=DOUBLE)
    dist.broadcast(x, 0)
    dist.broadcast(y, 0)
    data = TensorDataset(x, y)
    sampler = parallel.sampler(data, shuffle=False)
    for number, (x_part, y_part) in enumerate(
        DataLoader(data, batch_size=8 // parallel.data_world_size, sampler=sampler)
    ):
        rows = slice(8 * number, 8 * number + 8)  # a sampler deals the rows out in turn: the same 8, in another order
        torch.testing.assert_close(parallel(x_part, y_part), model(x[rows], y[rows]), **CLOSE)


def loss_outside(force: dict[str, Any]) -> None:
    x, targets = batch()["x"], batch()["targets"]
    parallel, model = compiled(force, x), build()
    ours, theirs = ADAMW(parallel.parameters()), ADAMW(model.parameters())
    for step in range(3):
        x, targets = batch(step)["x"], batch(step)["targets"]
        prediction = parallel(x)
        assert prediction.shape == (8 // parallel.data_world_size, 7)
        loss = F.mse_loss(prediction, parallel.local(targets))
        expected = F.mse_loss(model(x), targets)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / dist.get_world_size(), expected.detach(), **CLOSE)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(gradients_of(parallel), gradients_of(model), **CLOSE)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


def loss_outside_is_averaged_over_data_ranks() -> None:
    for force in ({"*": "dp"}, {"*": "zdp"}, MIXED, {"first": "column:2"}):
        loss_outside(force)


def outputs_lie_as_asked() -> None:
    x, model = batch()["x"], build()
    expected = model(x).detach()
    whole = compiled({"*": "dp"}, x, outputs="whole")(x)
    torch.testing.assert_close(whole.detach(), expected, **CLOSE)
    part = compiled({"*": "dp"}, x)
    torch.testing.assert_close(part(x).detach(), part.local(expected), **CLOSE)
    torch.manual_seed(4)
    model = WithPrediction().double()
    expected = model(x)["prediction"].detach()
    for force in ({"linear": (2, 1, 1, 2)},):
        beside_a_loss = compiled(force, x, model)(x)["prediction"]
        assert isinstance(beside_a_loss, DTensor) and beside_a_loss.to_local().shape[1] < 8
        torch.testing.assert_close(beside_a_loss.full_tensor(), expected, **CLOSE)
        whole = compiled(force, x, model, outputs="whole")(x)["prediction"]
        torch.testing.assert_close(whole, expected, **CLOSE)


class WithPrediction(nn.Module):
    """Returns a loss and what it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"loss": y.square().mean(), "prediction": y}


class Odd(nn.Module):
    """Frozen and unused parameters, a mask, a buffer that is not saved, and one that counts."""

    mask: Tensor
    scale: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained, self.unused = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", (torch.arange(16) % 3 > 0).double())
        self.register_buffer("scale", torch.full((8,), 1.5), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, *, power: int = 2) -> dict[str, Any]:
        self.calls += 1
        y = self.trained(torch.tanh(self.frozen(x)) * self.mask) * self.scale
        return {"loss": y.pow(power).mean(), "mean": y.detach().mean(), "note": "odd"}


def odd_models_train_too() -> None:
    for force in ({"*": "dp"}, {"*": "zdp"}, {"frozen": "column:4", "trained": "row:4"}, {"*": (2, 2, 1, 1)}):
        torch.manual_seed(3)
        model = Odd().double()
        x = torch.randn(8, 8, dtype=DOUBLE)
        parallel = compiled(force, ((x,), {"power": 2}), model)
        optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.1) for m in (parallel, model)]
        for _ in range(3):
            made, expected = parallel(x, power=2), model(x, power=2)
            torch.testing.assert_close(made["loss"], expected["loss"], **CLOSE)
            torch.testing.assert_close(made["mean"], expected["mean"], **CLOSE)
            assert made["note"] == "odd"
            made["loss"].backward()
            expected["loss"].backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert not parallel.frozen.weight.requires_grad
        assert list(parallel.state_dict()) == list(model.state_dict())
        state = parallel.full_state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                state[name], value, **CLOSE, msg=lambda text, name=name, force=force: f"{force} {name}: {text}"
            )


def compiles_at_the_first_call() -> None:
    model = build()
    model.note = "kept"
    lazy = sw.compile_parallel(model, options=sw.Options(force=MIXED))
    refused: list[Callable[[], object]] = [
        lazy.state_dict, lambda: list(lazy.parameters()), lambda: lazy.apply(print), lambda: lazy.double(),
        lambda: lazy.graphs, lambda: setattr(lazy, "note", "other"),
    ]  # fmt: skip
    for ask in refused:
        with pytest.raises(sw.ParallelError, match="first"):
            ask()
    assert lazy.note == "kept"
    seen: list[Tensor] = []
    lazy.register_forward_hook(lambda module, args, result: seen.append(result))
    loss = lazy.train()(**batch())
    torch.testing.assert_close(loss, build()(**batch()), **CLOSE)
    assert isinstance(lazy, sw.ParallelModule) and isinstance(lazy, type(model)) and seen[0] is loss
    assert [type(m) for m in lazy.modules()][1:] == [type(m) for m in model.modules()][1:]
    assert lazy.note == "kept" and lazy.plan.cluster.world_size == dist.get_world_size()
    assert_same(train(lazy, MLP, DOUBLE), train(build(), MLP, DOUBLE))


def runs_without_gradients() -> None:
    parallel, model = compiled(), build()
    with torch.no_grad():
        loss = parallel(**batch())
    assert not loss.requires_grad
    torch.testing.assert_close(loss, model(**batch()).detach(), **CLOSE)
    loss = parallel(**batch())
    loss.backward()
    try:
        loss.backward()
    except (RuntimeError, sw.ParallelError):
        pass
    else:
        raise AssertionError("a step was run backward twice")


def compiles_with_a_loaded_plan(path: str, expected: dict[str, Any]) -> None:
    plan = sw.Plan.load(path)
    parallel = sw.compile_parallel(build(), sw.Cluster.local(dist.get_world_size()), batch(), plan=plan)
    assert {name: choice.strategy for name, choice in parallel.plan.choices.items()} == expected
    assert parallel.plan.timeline().peak_memory <= plan.peak_memory
    assert_same(train(parallel, MLP, DOUBLE), train(build(), MLP, DOUBLE))


def a_meta_model_takes_its_values_from_a_state_dict() -> None:
    with torch.device("meta"):
        model = MLP.build().to(DOUBLE)
    parallel = compiled(model=model)
    parallel.load_state_dict(build().state_dict())
    assert_same(train(parallel, MLP, DOUBLE), train(build(), MLP, DOUBLE))


def zoo_trains_by_the_planners_choice(name: str, size: int) -> str:
    case = ZOO[name]
    batches = partial(case.batch, size=size)
    parallel = sw.compile_parallel(case.model(), None, batches(0))
    run, expected = (train(model, case, torch.float32, batches=batches) for model in (parallel, case.model()))
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    off, where = distance(run.parameters, expected.parameters)
    assert off < 1e-4, (off, where)
    return str({name: choice.strategy for name, choice in parallel.plan.choices.items()})


ON_FOUR_RANKS: dict[str, list[Callable[[], None]]] = {
    "trains": [
        trains_as_one_device_with_any_optimizer,
        clips_as_one_device,
        accumulates_and_zeroes_gradients,
        odd_models_train_too,
        compiles_at_the_first_call,
        runs_without_gradients,
    ],
    "has states": [
        is_a_module_with_the_models_names,
        state_dicts_go_round,
        optimizer_states_go_round,
        a_meta_model_takes_its_values_from_a_state_dict,
    ],
    "takes and gives": [
        takes_a_batch_whole_or_in_parts,
        loads_its_part_of_a_data_set,
        loss_outside_is_averaged_over_data_ranks,
        outputs_lie_as_asked,
    ],
}
"""One after another in the same ranks: a rank's first compilation takes as long as two others."""


def in_turn(checks: list[Callable[[], None]]) -> None:
    for check in checks:
        check()


@pytest.mark.parametrize("checks", ON_FOUR_RANKS.values(), ids=ON_FOUR_RANKS)
def test_on_four_ranks(checks: list[Callable[[], None]], pool: WorkerPool) -> None:
    pool.run(in_turn, checks, nprocs=4, timeout=300)


def test_a_saved_plan_is_followed(tmp_path: Path, pool: WorkerPool) -> None:
    plan = sw.plan(build(), sw.Cluster.local(4), batch(), options=sw.Options(force={"first": "zdp"}))
    plan.save(tmp_path / "plan.json")
    expected = {name: choice.strategy for name, choice in plan.choices.items()}
    pool.run(compiles_with_a_loaded_plan, str(tmp_path / "plan.json"), expected, nprocs=4)


@pytest.mark.parametrize(("name", "world", "size"), [("gpt", 4, 8), ("llama", 2, 8), ("gpt-tied", 3, 6)])
def test_every_rank_compiles_the_same_plan_for_the_running_world(
    name: str, world: int, size: int, pool: WorkerPool
) -> None:
    assert len(set(pool.run(zoo_trains_by_the_planners_choice, name, size, nprocs=world))) == 1


def test_one_device_needs_no_ranks() -> None:
    parallel = sw.compile_parallel(build(), None, batch())
    assert isinstance(parallel, sw.ParallelModule)
    assert_same(train(parallel, MLP, DOUBLE), train(build(), MLP, DOUBLE))
