"""Micro-batches: what they move and when, what they hold, what needs the whole batch, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model.memory import peak_live_bytes
from shardweave.cost_model.node_cost import NodeCosts
from shardweave.cost_model.options import Options
from shardweave.ir import Grid, Strategy
from shardweave.ir.errors import LayoutError, PlanError
from shardweave.ir.strategy import preset
from shardweave.passes import pipeline
from shardweave.passes.pipeline import Compiled, lower
from shardweave.passes.schedule import Schedule
from shardweave.runtime.launch import WorkerPool
from tests.compiler.training import ADAMW, STEPS, Way, compile_ways, differences, model_of, train, train_packed
from tests.models import ZOO
from tests.passes.harness import collectives, mesh_of
from tests.passes.joint import joint
from tests.passes.test_collectives import whole_bytes

Moved = Counter[tuple[str, int]]


def in_parts(name: str, strategy: Strategy, count: int) -> Compiled:
    step = joint(name)
    return lower(
        step.annotated, {op.name: strategy for op in step.annotated.ops}, mesh_of(2, 2), Options(micro_batches=count)
    )


def moved(*graphs: fx.GraphModule) -> Moved:
    """Bytes of whole buffers of parameters and gradients, by the kind and the size of the group."""
    found: Moved = Counter()
    for graph in graphs:
        for what in collectives(graph):
            if what.cause in ("parameter", "gradient"):
                found[what.kind, 2 ** len(what.axes)] += what.bytes
    return found


@pytest.mark.parametrize(
    ("factors", "first", "each", "last"),
    [
        # DP and ZeRO-1 add gradients up whole, without a word, and sum them over ranks once a step
        ((1, 1, 1), {}, {}, {("all_reduce", 4): 1}),
        ((1, 1, 4), {("all_gather", 4): 1}, {}, {("reduce_scatter", 4): 1}),
        # ZeRO-2 sums them for each micro-batch, as it holds a part of them only; its parameters are gathered once
        ((1, 4, 4), {("all_gather", 4): 1}, {("reduce_scatter", 4): 1}, {}),
        # ZeRO-3 besides gathers its parameters twice for each micro-batch
        ((4, 4, 4), {}, {("all_gather", 4): "uses", ("reduce_scatter", 4): 1}, {}),
        # AMSP's between: within a node for each micro-batch, between nodes once a step
        (
            (2, 2, 4),
            {("all_gather", 2): 0.5},
            {("all_gather", 2): "uses", ("reduce_scatter", 2): 1},
            {("reduce_scatter", 2): 0.5},
        ),
        ((1, 2, 4), {("all_gather", 4): 1}, {("reduce_scatter", 2): 1}, {("reduce_scatter", 2): 0.5}),
        ((2, 2, 2), {}, {("all_gather", 2): "uses", ("reduce_scatter", 2): 1}, {("all_reduce", 2): 0.5}),
    ],
)  # fmt: skip
def test_what_is_moved_when(
    factors: tuple[int, int, int],
    first: dict[tuple[str, int], Any],
    each: dict[tuple[str, int], Any],
    last: dict[tuple[str, int], Any],
) -> None:
    """AMSP, section IV-C: what s_p and s_g cost for each micro-batch, and s_os once a step, in whole parameters."""
    rest, gradients, states = factors
    compiled = in_parts("chain", Strategy(Grid(data=4), rest, states=states, gradients=gradients), 2)
    assert compiled.step.micro_batch_graphs is not None
    graphs, sizes = compiled.step.micro_batch_graphs(), whole_bytes(compiled)
    whole = sum(sizes.values())
    op = joint("chain").annotated.ops[0]  # its input needs no gradient, so its backward no weight
    uses = 2 - sum(sizes[parameter] for parameter in (op.parameter, *op.companions)) / whole

    def bytes_of(parts: dict[tuple[str, int], Any]) -> Moved:
        return Counter({kind: int((uses if part == "uses" else part) * whole) for kind, part in parts.items()})

    assert moved(graphs.forward(True, True), graphs.backward(False, False)) == bytes_of(first) + bytes_of(each)
    assert moved(graphs.forward(False, True), graphs.backward(True, False)) == bytes_of(each)
    assert moved(graphs.forward(False, False), graphs.backward(True, True)) == bytes_of(each) + bytes_of(last)
    assert moved(graphs.finish) == bytes_of(last)
    assert not graphs.whole_batch_sums or not moved(graphs.whole_batch_sums)


class Counted(nn.Module):
    """A loss over the tokens that count, of which micro-batches have unequal numbers; and how many were right."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 12, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: Tensor

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        self.calls.add_(1)
        logits = self.head(F.gelu(self.norm(self.embed(tokens))))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=3)
        decay = sum(p.square().sum() for p in self.parameters())
        right = (logits.argmax(-1) == targets).sum()
        return {"loss": loss + 1e-3 * decay, "right": right, "logits": logits.detach()}


def count_tokens(force: str) -> tuple[list[float], list[float], int, float]:
    """Losses and right answers of both worlds, calls, and how far parameters and logits are apart in the end."""
    torch.manual_seed(0)
    model, tokens = Counted().double(), torch.randint(0, 12, (16, 5))
    targets = torch.where(torch.rand(16, 5) < torch.linspace(0, 1, 16)[:, None], 3, tokens.roll(1, 1))
    options = sw.Options(force={"*": force}, micro_batches=4)
    parallel = sw.compile_parallel(model, sw.Cluster.local(4), (tokens, targets), options=options)
    found: list[list[float]] = [[], []]
    for run, lines in zip((model, parallel), found):
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
        for scale in (1.0, 3.0, 0.5, 64.0):
            result = run(tokens, targets)
            (scale * result["loss"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            lines += [result["loss"].item(), float(result["right"])]
    assert isinstance(parallel, sw.ParallelModule)
    whole = parallel.full_state_dict()
    apart = [float((whole[name] - value).abs().max()) for name, value in model.state_dict().items()]
    with torch.no_grad():
        logits = model(tokens, targets)["logits"]
        mine = parallel(tokens, targets)["logits"]
    expected = logits if isinstance(mine, DTensor) else parallel.local(logits)
    apart.append(float((expected - (mine.full_tensor() if isinstance(mine, DTensor) else mine)).abs().max()))
    return found[0], found[1], int(parallel.calls), max(apart)


@pytest.mark.parametrize("force", ["zero2", "column"])
def test_what_inputs_decide_is_found_before(force: str, pool: WorkerPool) -> None:
    """The mean over the tokens of the whole batch, a weight decay in the loss, a count, logits, and a buffer."""
    for expected, got, calls, apart in pool.run(count_tokens, force, nprocs=4, timeout=120):
        assert got == pytest.approx(expected, rel=1e-12)
        assert calls == 4 + 1
        assert apart < 1e-12


def test_a_real_model(pool: WorkerPool) -> None:
    """transformers' Llama, as the planner spreads it."""
    name, dtype = "llama", torch.float64
    model = model_of(ZOO[name], dtype)
    chosen = [Way("planned", {}, micro_batches=2), Way("column", {"*_proj": "column:2"}, micro_batches=2)]
    steps = compile_ways(model, ZOO[name], dtype, 4, chosen, size=16)
    expected = train(model, ZOO[name], dtype, size=16)
    first, *others = pool.run(train_packed, name, dtype, steps, ADAMW, STEPS, 16, nprocs=4, timeout=300)
    wrong: list[str] = []
    for index, way in enumerate(chosen):
        wrong += differences(way, expected, [first[index], *(other[index] for other in others)], 1e-9, 1e-8)
    assert not wrong, "\n".join(wrong)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).square().mean()


class TwoLosses(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x).mean(), super().forward(x).square().mean()


class Squared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean().exp()


class Relative(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * (x.amax() - x)).sum()


@pytest.mark.parametrize("form", ["micro_batches", "sub_batches"])
def test_the_greatest_element_of_an_input_is_not_summed_over_parts_of_the_batch(form: Any) -> None:
    options = sw.Options(**{form: 2})
    with pytest.raises(LayoutError, match="needs the max over the whole batch"):
        sw.compile_parallel(Relative(8, 8), sw.Cluster.local(1), torch.randn(16, 8), options=options)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Norm(), LayoutError, "norm.*whole batch"),
        (Squared(8, 8), LayoutError, "exp.*whole batch"),
        (nn.Linear(8, 8), PlanError, "must return one scalar loss"),
        (TwoLosses(8, 8), PlanError, "must return one scalar loss; 2 of its outputs"),
    ],
    ids=["batch norm", "exp of the loss", "loss outside", "two losses"],
)
def test_what_needs_the_whole_batch_is_refused(model: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sw.plan(model, sw.Cluster.local(4), torch.randn(16, 8), options=sw.Options(micro_batches=2))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    model, cluster = Squared(8, 8), sw.Cluster.local(4)
    for force in ({}, {"*": "dp"}):
        with pytest.raises(PlanError, match="batch of 12"):
            sw.plan(model, cluster, torch.randn(12, 8), options=sw.Options(force=force, micro_batches=5))


class Loss(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def test_a_plan_says_its_micro_batches() -> None:
    model, cluster, x = Loss(nn.Linear(16, 64), nn.Linear(64, 16)), sw.Cluster.local(1), torch.randn(8, 16)
    plan = sw.plan(model, cluster, x, options=sw.Options(micro_batches=4))
    assert plan.micro_batches == 4 and sw.Plan.from_dict(plan.to_dict()) == plan
    parallel = sw.compile_parallel(model, cluster, x, plan=plan)
    assert parallel.spec.micro_batches == 4  # type: ignore[union-attr]
    with pytest.raises(PlanError, match="for 4 micro-batches a call"):
        sw.compile_parallel(model, cluster, x, plan=plan, options=sw.Options(micro_batches=2))


def test_micro_batches_hold_less() -> None:
    """The activations of one of four, and gradients added up where the plan says."""
    mesh = mesh_of(2, 2)
    model = Loss(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    peaks = {}
    for count in (1, 4):
        options = sw.Options(force={"*": preset("zero2", 0, mesh)}, micro_batches=count)
        plan = sw.plan(model, sw.Cluster.local(4), torch.randn(4096, 64), options=options)
        curve = plan.timeline().memory
        peaks[count] = curve.at_peak().get("saved", 0)
    assert 3.5 * peaks[4] < peaks[1]


class WithLogits(nn.Sequential):
    """Returns much besides its loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = super().forward(x)
        return found.square().mean(), found


def test_where_an_order_has_to_fit_what_other_micro_batches_return_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders had a limit to themselves that the other micro-batches' inputs and outputs take a part of."""
    schedules: list[Schedule] = []

    def noted(*args: Any) -> Schedule:
        schedules.append(Schedule(*args))
        return schedules[-1]

    monkeypatch.setattr(pipeline, "Schedule", noted)
    model, x = WithLogits(nn.Linear(64, 64), nn.Linear(64, 512)), torch.randn(4096, 64)
    cluster, options = sw.Cluster.local(4), {"force": {"*": "zero3"}, "sub_batches": 1, "buckets": False}
    for count in (1, 8):
        compiler = Compiler(model, cluster, x, sw.Options(micro_batches=count, **options), None)
        compiled = compiler.lower(compiler.plan())
        given_and_returned = 4096 * (64 + 512) * 4 // 4 // count + 4  # of each of four devices, with the loss
        states = 8 * sum(parameter.numel() for parameter in model.parameters()) // 4
        assert schedules[-1].other_bytes == states + (count - 1) * given_and_returned
        held, _ = peak_live_bytes(compiled.graphs["schedule"].graph, NodeCosts(cluster))
        peak = compiler.lowering.timeline(compiled).peak_memory
        assert held + schedules[-1].other_bytes == pytest.approx(peak, rel=0.05)


def test_an_order_holds_what_all_micro_batches_share_until_the_last_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of parameters were thought to go behind their last use, and the sums of gradients so far to stay."""
    schedules: list[Schedule] = []

    def noted(*args: Any) -> Schedule:
        schedules.append(Schedule(*args))
        return schedules[-1]

    monkeypatch.setattr(pipeline, "Schedule", noted)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    cluster, options = sw.Cluster.local(4), {"sub_batches": 1, "buckets": False, "recompute": "none"}
    for word in ("zero1", "zero2", "zero3"):
        asked = sw.Options(micro_batches=2, force={"*": word}, **options)
        compiler = Compiler(Loss(*layers), cluster, torch.zeros(128, 256), asked, None)
        compiled = compiler.lower(compiler.plan())
        held, _ = peak_live_bytes(compiled.graphs["schedule"].graph, NodeCosts(cluster), schedules[-1].repeated)
        assert held + schedules[-1].other_bytes == pytest.approx(
            compiler.lowering.timeline(compiled).peak_memory, rel=0.005
        )
