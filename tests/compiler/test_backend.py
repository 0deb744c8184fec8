"""The ``torch.compile`` door: on real ranks, the numbers of one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.backend import shardweave
from shardweave.runtime.launch import WorkerPool
from shardweave.sharding.graphs import info
from tests.models import ZOO

RANKS, STEPS, BATCH = 4, 3, 8
TENSOR = {
    "blocks.*.attention.qkv": "column:4",
    "blocks.*.attention.out": "row:4",
    "blocks.*.up": "column:2",
    "blocks.*.down": "row:2",
    "head": "dp",
}


@dataclass
class Run:
    """What training gave: the losses, the first gradients, the parameters in the end; the collectives' kinds."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    collectives: set[tuple[str, str]]


def train(name: str, dtype: torch.dtype, outside: bool, options: Mapping[str, Any] | None) -> Run:
    """Train a model of the zoo with AdamW, compiled or (without options) as it is."""
    torch._dynamo.reset()
    case = ZOO[name]
    model = case.model(dtype)
    collectives: set[tuple[str, str]] = set()

    def inspect(_: sw.Plan, graphs: Mapping[str, torch.fx.GraphModule]) -> None:
        for stage in ("forward", "backward"):
            found = [info(node).collective for node in graphs[stage].graph.nodes]
            collectives.update((what.kind, what.cause) for what in found if what is not None)

    step = model
    if options is not None:
        step = torch.compile(model, backend="shardweave", options={"inspect": inspect, **options})  # type: ignore[assignment]
    # Without such an eps, Adam blows the rounding of gradients up that are zero (of a key's bias, for example).
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for number in range(STEPS):
        batch = case.batch(number, BATCH, dtype)
        targets = batch.pop("targets") if outside else None
        output = step(**batch)
        loss = case.loss(output) if targets is None else loss_outside(output, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, gradients, {name: p.detach() for name, p in model.named_parameters()}, collectives)


def loss_outside(output: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return F.mse_loss(output, targets)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


@pytest.mark.parametrize(
    ("name", "dtype", "outside", "force", "expected"),
    [
        ("gpt", torch.float32, True, {"*": "dp"}, {("all_reduce", "gradient")}),
        ("gpt", torch.float64, False, TENSOR, {("all_reduce", "activation"), ("all_gather", "gradient")}),
        ("gpt", torch.float64, True, {"*": (2, 2, 1, 1)}, {("all_reduce", "activation"), ("all_gather", "gradient")}),
        ("gpt-tied", torch.float32, False, {}, set()),
        ("mlp", torch.float64, True, {"first": "column:2", "last": "dp"}, {("all_gather", "gradient")}),
    ],
    ids=["data", "tensor", "rows-and-columns", "planned-tied", "mixed-mlp"],
)
def test_training_gives_the_numbers_of_one_device(
    pool: WorkerPool, name: str, dtype: torch.dtype, outside: bool, force: dict[str, Any], expected: set[Any]
) -> None:
    (alone,) = pool.run(train, name, dtype, outside, None, nprocs=1)
    options = {"cluster": sw.Cluster.local(RANKS), "force": force}
    runs = pool.run(train, name, dtype, outside, options, nprocs=RANKS)
    exact = dtype == torch.float64
    for run in runs:
        assert run.losses == pytest.approx(alone.losses, rel=1e-9 if exact else 1e-5)
        assert_close(run.gradients, alone.gradients, 1e-9 if exact else 1e-4)
        assert_close(run.parameters, alone.parameters, 1e-9 if exact else 1e-4)
        assert_close(run.parameters, runs[0].parameters, 0.0)  # every rank steps its own copy
        assert run.collectives and expected <= run.collectives


def test_weaving_gives_the_numbers_of_one_device(pool: WorkerPool) -> None:
    """Each rank takes its rows of every sub-batch, which do not lie together in the whole batch."""
    (alone,) = pool.run(train, "mlp", torch.float64, True, None, nprocs=1)
    options = {"cluster": sw.Cluster.local(RANKS), "force": {"*": "dp", "first": (2, 1, 1, 2)}, "sub_batches": 2}
    options |= {"recompute": "fine", "operator_slices": 2, "buckets": True}
    for run in pool.run(train, "mlp", torch.float64, True, options, nprocs=RANKS):
        assert run.losses == pytest.approx(alone.losses, rel=1e-9)
        assert_close(run.gradients, alone.gradients, 1e-9)
        assert_close(run.parameters, alone.parameters, 1e-9)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert float((found[name] - value).abs().max()) <= tolerance * float(value.abs().max()), name


class Branching(nn.Module):
    """Two outputs, one of them transposed, a frozen layer, a buffer that changes, and a break of the graph."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm = nn.LayerNorm(16)
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        self.count += x.detach().sum()
        hidden = torch.relu(self.first(x) * scale)
        hidden = hidden + self.frozen(self.norm(hidden))
        torch._dynamo.graph_break()
        return hidden.transpose(0, 1), torch.softmax(self.last(hidden), -1)


def branch(compiled: bool) -> list[Tensor]:
    """Steps with other sizes and numbers each, run backward from both outputs, one by one; then without gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Branching().double()
    step = torch.compile(model, backend="shardweave") if compiled else model
    seen = []
    for number, size in enumerate((8, 12)):
        x = torch.randn(8, size, dtype=torch.float64).t().requires_grad_()
        hidden, chances = step(x, 2.0 + number)
        hidden.square().mean().backward(retain_graph=True)
        (chances[:, 0].log().sum() + hidden.sum()).backward()
        assert x.grad is not None and model.frozen.weight.grad is None
        seen += [hidden.detach(), chances.detach(), x.grad, model.count.clone()]
        with torch.no_grad():
            seen += step(x, 1.0)
    return seen + [p.grad for p in model.parameters() if p.grad is not None]


def test_whatever_autograd_does(pool: WorkerPool) -> None:
    (alone,) = pool.run(branch, False, nprocs=1)
    for found in pool.run(branch, True, nprocs=2):  # on the running world, as no cluster is given
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-9)


def recur(compiled: bool, fullgraph: bool = False) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = nn.LSTM(4, 4, 2).double()
    with torch._dynamo.config.patch(allow_rnn=fullgraph):
        step = torch.compile(model, backend="shardweave", fullgraph=fullgraph) if compiled else model
        x = torch.randn(3, 8, 4).double()
        steps, (_, cells) = step(x)
        (steps.square().mean() + cells.sum()).backward()
    return [steps.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_recurrent_layers(pool: WorkerPool) -> None:
    """Where Dynamo traces them, which is not its default, they are sharded."""
    (alone,) = pool.run(recur, False, nprocs=1)
    for fullgraph in (False, True):
        for found in pool.run(recur, True, fullgraph, nprocs=2):
            assert all(torch.allclose(*pair, rtol=1e-9) for pair in zip(found, alone, strict=True))


def test_it_is_found_by_name() -> None:
    assert "shardweave" in torch._dynamo.list_backends()


def compile_with(options: Mapping[str, Any], mode: str | None = None) -> None:
    torch._dynamo.reset()
    torch.compile(nn.Linear(8, 8), backend=partial(shardweave, options=options, mode=mode))(torch.ones(4, 8))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"clutser": 1, "cluster": sw.Cluster.local(1)}, sw.ParallelError, "no option 'clutser'; it has 'cluster'"),
        ({"cluster": 8}, sw.ParallelError, "expected a Cluster, a preset's name or .*, got int"),
        ({"cluster": sw.Cluster.local(2)}, sw.ParallelError, "2 devices, the running world 1"),
        ({"memory_limit": 100}, sw.InfeasibleError, "100 bytes.*smallest memory"),
        ({"force": {"frist": "dp"}}, sw.PlanError, "force..frist.. matches no op"),
        ({"time_limit": -1.0}, sw.PlanError, "time_limit"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        compile_with(options)


def test_there_are_no_modes() -> None:
    with pytest.raises(sw.ParallelError, match="no modes"):
        compile_with({}, mode="max-autotune")


def refused() -> str:
    with pytest.raises(sw.PlanError) as caught:
        compile_with({"force": {"*": "zdp"}})
    return str(caught.value)


def test_parameters_stay_with_the_user(pool: WorkerPool) -> None:
    assert "cannot rest sharded under torch.compile" in pool.run(refused, nprocs=2)[1]


def another_batch_on_one_rank(training: bool) -> list[str]:
    """What each rank is told where rank 1 passes a batch of another size, in its first call or later; then go on."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 8)
    step = torch.compile(model, backend="shardweave", options={"cluster": sw.Cluster.local(2)})
    if training:
        for _ in range(4):
            step(batch).sum().backward()
    told = []
    for size in (4, 2):
        with pytest.raises(sw.ParallelError) as caught:
            step(batch[: size if dist.get_rank() else 8]).sum().backward()
        told.append(str(caught.value).split("docs/inputs.md")[0])  # Dynamo adds words of its own
    step(batch).sum().backward()
    return told


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_of_another_size_on_one_rank_is_an_error_on_all(training: bool, pool: WorkerPool) -> None:
    first, second = pool.run(another_batch_on_one_rank, training, nprocs=2, timeout=60)
    assert first == second
    for message in first if training else []:
        assert "on rank 0 the compiled graph" in message and "on rank 1 another graph is compiled" in message


def test_old_names_of_options_work_with_a_warning() -> None:
    torch._dynamo.reset()
    options = {"cluster": sw.Cluster.local(1), "lookahead": 1, "cross_pass": False}
    model = torch.compile(nn.Linear(8, 8), backend=shardweave, options=options)
    with pytest.warns(DeprecationWarning, match="max_prefetch"):
        model(torch.ones(2, 8)).sum().backward()
