"""Mixed precision: against one device that makes the same casts, in the graphs, in plans, and in what users see."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.capture import capture
from shardweave.compiler.compiler import Compiler
from shardweave.ir.errors import ParallelError, PlanError
from shardweave.passes.codegen import Step
from shardweave.passes.pipeline import lower
from shardweave.runtime.launch import WorkerPool
from shardweave.sharding.annotate import graph_outputs
from shardweave.sharding.graphs import info
from tests.compiler.packing import Packed
from tests.compiler.test_state_sharding import random_factors
from tests.compiler.training import ADAMW, STEPS, Run, Way, compile_ways, differences, distance, gradients_of, train
from tests.models import ZOO, Case
from tests.passes.harness import examples, mesh_of
from tests.passes.joint import Chain

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
PRECISE = sw.Precision(FP32, reduce_dtype=FP64)
"""Working copies in float32 of masters in float64: what differs from one device is float32's rounding alone."""
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
"""For bf16, as Adam would make steps of full size of a gradient that is rounding alone."""
WAYS = [Way(word, {"*": word}) for word in ("dp", "zero2", "zdp", "hpz:2", "column")]
WAYS.append(Way("flat", {"*": "zero1"}, options={"ablation": sw.Ablation(flat_parameter=True)}))
IN_PARTS = [Way(f"{word} in parts", {"*": word}, micro_batches=2) for word in ("zero1", "zero2", "column")]


class Net(nn.Module):
    """Layers that come with biases and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.norm(F.gelu(self.up(x)))), targets)


class Plain(nn.Module):
    """Products without biases: the generated graph has the very ops of the model, and so the same roundings."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))).float(), targets.float())


def draw(generator: torch.Generator, size: int) -> dict[str, Tensor]:
    return {name: torch.randn(size, 16, generator=generator) for name in ("x", "targets")}


NET, PLAIN = Case("net", Net, draw), Case("plain", Plain, draw)
CASES = {**ZOO, "net": NET}


def cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def train_masters(case: Case, dtype: torch.dtype, precision: sw.Precision, optimizer: Any, count: int = STEPS) -> Run:
    """One device: masters, cast to a working model; its gradients, cast back; the optimizer's step on the masters."""
    master = case.model(dtype)
    working = copy.deepcopy(master)
    for parameter in working.parameters():
        parameter.data = cast(parameter.data, precision.param_dtype)
    steps = optimizer(master.parameters())
    losses, gradients = [], {}
    for step in range(count):
        with torch.no_grad():
            for parameter, own in zip(working.parameters(), master.parameters(), strict=True):
                parameter.copy_(own)
        batch = case.batch(step, 8, dtype)
        loss = case.loss(working(**{name: cast(value, precision.param_dtype) for name, value in batch.items()}))
        loss.backward()
        for parameter, own in zip(working.parameters(), master.parameters(), strict=True):
            assert parameter.grad is not None
            own.grad, parameter.grad = parameter.grad.to(own.dtype), None
        if step == 0:
            gradients = {name: own.grad.clone() for name, own in master.named_parameters() if own.grad is not None}
        steps.step()
        losses.append(loss.item())
    return Run(losses, gradients, {name: value.clone() for name, value in master.state_dict().items()})


def train_each(name: str, dtype: torch.dtype, steps: list[Packed], optimizer: Any) -> list[Run | list[float]]:
    """In a rank: every step trains; what rank 0 saw, and of the other ranks the losses."""
    case = CASES[name]
    runs = [train(packed.module(case.model(dtype)), case, dtype, optimizer) for packed in steps]
    return [run if dist.get_rank() == 0 else run.losses for run in runs]


# -- the same numbers


@pytest.mark.parametrize(
    ("world", "name", "dtype", "precision", "optimizer", "loss", "rest"),
    [
        (4, "gpt-tied", FP64, PRECISE, ADAMW, 1e-5, 3e-4),
        (8, "net", FP64, PRECISE, ADAMW, 1e-5, 3e-4),
        (4, "net", FP32, sw.Precision(BF16, FP32), SGD, 1e-2, 5e-2),
        (8, "net", FP32, sw.Precision(BF16), SGD, 1e-2, 5e-2),
    ],
    ids=["float32 of float64", "float32 of float64, 8 ranks", "bf16 and float32", "bf16, 8 ranks"],
)
def test_training_is_that_of_one_device_with_the_same_casts(
    world: int,
    name: str,
    dtype: torch.dtype,
    precision: sw.Precision,
    optimizer: Any,
    loss: float,
    rest: float,
    pool: WorkerPool,
) -> None:
    case = CASES[name]
    chosen = [*WAYS[2:4], *IN_PARTS] if world == 4 else WAYS
    steps = compile_ways(case.model(dtype), case, dtype, world, chosen, precision)
    expected = train_masters(case, dtype, precision, optimizer)
    first, *others = pool.run(train_each, name, dtype, steps, optimizer, nprocs=world, timeout=300)
    wrong: list[str] = []
    for index, way in enumerate(chosen):
        wrong += differences(way, expected, [first[index], *(other[index] for other in others)], loss, rest, 1e-3)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "precision", [sw.Precision(BF16), sw.Precision(BF16, FP32), sw.Precision(torch.float16)], ids=str
)
def test_one_rank_is_one_device_bit_for_bit(precision: sw.Precision) -> None:
    model = PLAIN.model()
    parallel = sw.compile_parallel(
        model, sw.Cluster.local(1), PLAIN.batch(0), options=sw.Options(precision=precision, force={"*": "dp"})
    )
    expected = train_masters(PLAIN, FP32, precision, ADAMW)
    optimizer = ADAMW(parallel.parameters())
    losses = []
    for step in range(STEPS):
        loss = parallel(**PLAIN.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == expected.losses
    for name, value in parallel.state_dict().items():
        assert value.dtype == FP32 and torch.equal(value, expected.parameters[name]), name


def train_long(precision: Any) -> list[float]:
    options = sw.Options(precision=precision, force={"*": "zdp"})
    parallel = sw.compile_parallel(NET.model(), sw.Cluster.local(dist.get_world_size()), NET.batch(0), options=options)
    optimizer = ADAMW(parallel.parameters())
    losses = []
    for _ in range(20):
        loss = parallel(**NET.batch(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_curve_of_20_steps_is_close_to_that_of_float32(pool: WorkerPool) -> None:
    (bf16, *_), (float32, *_) = (pool.run(train_long, precision, nprocs=4) for precision in ("bf16", None))
    assert bf16 != float32
    assert float32[-1] < float32[0] / 2
    for ours, theirs in zip(bf16, float32, strict=True):
        assert abs(ours - theirs) <= 0.02 * float32[0]


# -- the graphs


def compiler_of(model: nn.Module, world: int, batch: Any, options: sw.Options) -> Compiler:
    return Compiler(model, sw.Cluster.local(world), batch, options, None)


def moved(step: Step) -> Counter[tuple[str, str, torch.dtype]]:
    """Bytes of whole buffers by cause, kind and dtype."""
    found: Counter[tuple[str, str, torch.dtype]] = Counter()
    assert step.backward is not None
    for graph in (step.forward.graph, step.backward.graph):
        for node in graph.nodes:
            what = info(node).collective
            if what is not None:
                found[what.cause, what.kind, node.meta["val"].dtype] += what.bytes
    return found


@pytest.mark.parametrize("reduce", [None, BF16, FP32])
@pytest.mark.parametrize("word", ["dp", "zero2", "zdp", "hpz:2"])
def test_gathers_move_two_bytes_and_reductions_those_of_their_dtype(word: str, reduce: torch.dtype | None) -> None:
    """The volumes of AMSP IV-C, with `param_dtype` for what is gathered and `reduce_dtype` for what is summed."""
    batch = {"x": torch.randn(8, 8), "targets": torch.randn(8, 8)}
    options = sw.Options(precision=sw.Precision(BF16, reduce), force={"*": word}, keep_gathered=False)
    compiler = compiler_of(Chain(), 4, batch, options)
    step = compiler.lower(compiler.plan()).step
    sizes = [parameter.numel() for parameter in Chain().parameters()]
    uses = 2 * sum(sizes) - sizes[0]  # the first layer's input needs no gradient
    reduced = reduce or BF16
    gathers = {"dp": 0, "zero2": sum(sizes), "zdp": uses, "hpz:2": sum(sizes) // 2 + uses}[word]
    expected = Counter({("gradient", "all_reduce" if word == "dp" else "reduce_scatter", reduced): 0})
    expected[next(iter(expected))] = sum(sizes) * reduced.itemsize
    if gathers:
        expected["parameter", "all_gather", BF16] = gathers * BF16.itemsize
    found = moved(step)
    assert {what: size for what, size in found.items() if what[0] != "activation"} == expected


@examples(12, shrink=False)
@given(
    st.integers(0, 2**16),
    st.sampled_from([None, BF16, torch.float16]),
    st.sampled_from([None, BF16, FP32, FP64]),
    st.sampled_from([None, FP32]),
)
def test_every_value_has_the_dtype_of_its_place(
    seed: int, param: torch.dtype | None, reduce: torch.dtype | None, output: torch.dtype | None
) -> None:
    case, mesh = NET, mesh_of(2, 2)
    options = sw.Options(precision=sw.Precision(param, reduce, output))
    annotated = compiler_of(case.model(), 4, case.batch(0), options).annotated
    compiled = lower(annotated, random_factors(seed, annotated.ops, mesh), mesh, options)
    spec, (forward, backward) = compiled.step.spec, (compiled.step.forward, compiled.step.backward)
    assert backward is not None
    assert {parameter.dtype for parameter in spec.parameters} == {"float32"}
    assert spec.outputs[0].dtype == str(output or param or FP32).removeprefix("torch.")
    places = [node for node in forward.graph.nodes if node.op == "placeholder" and "val" in node.meta]
    masters = places[len(mesh.axes) :][: len(spec.parameters)]
    for node, own, gradient in zip(masters, spec.parameters, graph_outputs(backward.graph), strict=True):
        assert node.meta["val"].dtype == gradient.meta["val"].dtype == FP32, own.name
        shape = tuple(node.meta["val"].shape)
        assert shape == tuple(gradient.meta["val"].shape) == own.layout.local_shape, own.name
    for cause, _, dtype in moved(compiled.step):
        wanted = {"parameter": param or FP32, "gradient": reduce or param or FP32}
        assert cause == "activation" or dtype == wanted[cause], cause


def test_a_gather_starts_before_the_product_before_it() -> None:
    """A cast between the master and its gather does not keep the gather from being ahead of its use."""
    options = sw.Options(precision="bf16", force={"*": "zdp"}, buckets=False)
    compiler = compiler_of(Chain((8, 16, 32, 8)), 4, {"x": torch.randn(8, 8), "targets": torch.randn(8, 8)}, options)
    step = compiler.lower(compiler.plan()).step
    assert step.backward is not None
    names = [getattr(node.target, "__name__", "") for node in step.forward.graph.nodes]
    gathers = [index for index, name in enumerate(names) if name.startswith("all_gather")]
    products = [index for index, name in enumerate(names) if name.startswith("mm")]
    assert gathers[1] < products[0] and products[0] < gathers[2] < products[1], names
    back = [getattr(node.target, "__name__", "") for node in step.backward.graph.nodes]
    assert back.index("reduce_scatter_tensor.default") < len(back) - back[::-1].index("mm.default") - 1, back


# -- the capture


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tied(x)).mean() if x.dim() == 2 else self.cells(x)[0].bernoulli_missing()


def test_recurrent_layers_compute_in_the_working_dtype() -> None:
    model, x = nn.LSTM(8, 8, 2, bidirectional=True), torch.randn(2, 3, 8)
    refs = model._flat_weight_refs
    captured = capture(model, x, sw.Precision(BF16))
    (first, _) = captured.graph.graph.find_nodes(op="call_function", target=torch.ops.shardweave.recurrence.default)[:2]
    assert first.meta["val"].dtype == BF16 and {dtypes.master for dtypes in captured.dtypes.values()} == {FP32}
    assert [ref() for ref in refs] == [ref() for ref in model._flat_weight_refs] == [*model.parameters()]


@pytest.mark.parametrize("x", [torch.ones(2, 8), torch.ones(2, 2, 8)], ids=["captured", "fails"])
def test_a_capture_leaves_the_model_as_it_was(x: Tensor) -> None:
    model = Recurrent()
    before = dict(model.named_parameters(remove_duplicate=False))
    try:
        captured = capture(model, x, sw.Precision(BF16, output_dtype=FP32))
        assert {dtypes.master for dtypes in captured.dtypes.values()} == {FP32}
    except ParallelError:
        assert x.dim() == 3
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(any(weight is own for own in before.values()) for weight in model.cells._flat_weights)
    assert not model._forward_hooks and not model._forward_pre_hooks


class Seen(nn.Module):
    """Says which dtypes it sees: a buffer's stays, and integers are not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("shift", torch.ones(8))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, scale: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
        assert self.line.weight.dtype == self.frozen.weight.dtype == x.dtype == scale["by"].dtype == BF16
        assert self.shift.dtype == FP32 and index.dtype == torch.int64
        hidden = self.frozen(self.line(x)) * scale["by"]
        return {"loss": (hidden + self.shift.to(BF16)).mean(), "hidden": hidden[index]}


def test_inputs_are_cast_and_outputs_where_that_is_asked_for() -> None:
    model, batch = Seen(), (torch.randn(4, 8), {"by": torch.ones(8)}, torch.tensor([0, 1, 2, 3]))
    options = sw.Options(precision=sw.Precision(BF16, output_dtype=FP64))
    parallel = sw.compile_parallel(model, sw.Cluster.local(1), batch, options=options)
    found = parallel(*batch)
    assert {value.dtype for value in found.values()} == {FP64}
    found["loss"].backward()
    assert parallel.line.weight.grad.dtype == FP32 and parallel.frozen.weight.grad is None
    as_given = sw.Options(precision=sw.Precision(BF16, cast_forward_inputs=False))
    given = {name: value.to(BF16) for name, value in NET.batch(0).items()}
    captured = capture(NET.model(), given, as_given.mixed_precision)
    seen = {node.meta["val"].dtype for node in captured.graph.graph.nodes if node.name in captured.inputs}
    assert seen == {BF16}


class Autocast(nn.Module):
    """The norm's parameters are cast by no one, the head's by hand, those of the products by autocast; one is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.head = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            hidden = self.frozen(self.down(self.norm(self.up(x))))
        return F.mse_loss((hidden.bfloat16() @ self.head.bfloat16()).float(), targets)


AUTOCAST = Case("autocast", Autocast, draw)


def autocast_step(precision: Any, word: str) -> tuple[float, dict[str, Tensor], Any]:
    options = sw.Options(precision=precision, force={"*": word})
    cluster = sw.Cluster.local(dist.get_world_size())
    parallel = sw.compile_parallel(AUTOCAST.model(), cluster, AUTOCAST.batch(0), options=options)
    loss = parallel(**AUTOCAST.batch(0))
    loss.backward()
    step = Step(parallel.graphs["forward"], parallel.graphs["backward"], parallel.spec)
    return loss.item(), gradients_of(parallel), dict(moved(step))


@pytest.mark.parametrize("word", ["dp", "zdp"])
def test_autocast_in_the_model_is_mixed_precision_in_other_words(word: str, pool: WorkerPool) -> None:
    """What the model casts is gathered as what it is cast to; gradients are summed in the parameters' own dtype."""
    model = AUTOCAST.model()
    expected = model(**AUTOCAST.batch(0))
    expected.backward()
    loss, gradients, bytes_ = pool.run(autocast_step, None, word, nprocs=2)[0]
    assert loss == pytest.approx(expected.item(), rel=1e-2)
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert distance(gradients, wanted)[0] < 0.05
    assert {value.dtype for value in gradients.values()} == {FP32}
    assert {dtype for cause, _, dtype in bytes_ if cause == "gradient"} == {FP32}
    products = sum(
        p.numel() for p in (*model.up.parameters(), *model.down.parameters(), model.head, model.frozen.weight)
    )
    if word == "zdp":  # once or twice, as backward needs them
        assert 2 * products <= bytes_["parameter", "all_gather", BF16] <= 4 * products
        assert bytes_["parameter", "all_gather", FP32] <= 2 * 4 * sum(p.numel() for p in model.norm.parameters())


def test_autocast_goes_on_in_mixed_precision() -> None:
    options = sw.Options(precision="bf16")
    parallel = sw.compile_parallel(AUTOCAST.model(), sw.Cluster.local(1), AUTOCAST.batch(0), options=options)
    loss = parallel(**AUTOCAST.batch(0))
    loss.backward()
    assert loss.item() == pytest.approx(AUTOCAST.model()(**AUTOCAST.batch(0)).item(), rel=2e-2)
    assert {p.grad.dtype for p in parallel.parameters() if p.grad is not None} == {FP32}


# -- plans and options


def test_a_plan_is_for_its_precision(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(8, 16)
    cluster = sw.Cluster.local(1)
    precision = sw.Precision(BF16, FP32, FP64, cast_forward_inputs=False)
    plan = sw.plan(model, cluster, x.to(BF16), options=sw.Options(precision=precision))
    plan.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    assert again.model_key == plan.model_key and again.model_key.precision == precision
    assert "precision: bfloat16, gradients reduced in float32, outputs in float64" in str(again.explain())
    sw.compile_parallel(model, cluster, x.to(BF16), plan=again, options=sw.Options(precision=precision))
    with pytest.raises(PlanError, match=r"precision \(bfloat16, .*\), the options ask for of the model"):
        sw.compile_parallel(model, cluster, x, plan=again)
    plain = sw.plan(model, cluster, x)
    assert "precision" not in str(plain.explain()) and "precision" in str(plain.diff(plan))
    with pytest.raises(PlanError, match="the plan is for the precision of the model"):
        sw.compile_parallel(model, cluster, x, plan=plain, options=sw.Options(precision="bf16"))


@pytest.mark.parametrize("precision", ["bf17", torch.bfloat16, 16])
def test_unknown_precisions_are_refused(precision: Any) -> None:
    with pytest.raises(PlanError, match="is unknown; expected one of bf16, fp16"):
        sw.Options(precision=precision)


@pytest.mark.parametrize("dtype", [torch.int8, "bfloat16"])
def test_dtypes_that_are_none_of_numbers_with_a_point_are_refused(dtype: Any) -> None:
    with pytest.raises(PlanError, match="reduce_dtype must be a floating-point torch.dtype or None"):
        sw.Precision(BF16, reduce_dtype=dtype)


def test_the_other_door_refuses_a_precision() -> None:
    model = torch.compile(nn.Linear(8, 8), backend="shardweave", options={"precision": "bf16"})
    with pytest.raises(ParallelError, match="takes no precision"):
        model(torch.ones(2, 8))
