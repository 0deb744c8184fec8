"""Training on many ranks and on one device, side by side: what the tests of equality run in the pool's ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model.options import Options
from shardweave.ir import Mesh, Strategy
from shardweave.planner.problem.space import legal
from shardweave.planner.search.evaluation import Decision, Evaluation, PlanEvaluator
from shardweave.runtime.tensor import gather
from shardweave.sharding.parallel_ops import Op
from tests.compiler.packing import Packed
from tests.models import TODAY, ZOO, Case
from tests.planner.planners import smallest_named

ALL_CASES = bool(os.environ.get("SHARDWEAVE_ALL_CASES"))
"""All cells of the tables of models, worlds, dtypes and optimizers, which takes half an hour; without it a cell stands
for its neighbours, and every way, world, dtype and optimizer is still met."""

STEPS = 5 if ALL_CASES else 2
"""The second begins with what the first one's update left, and its own adds to momenta that are there."""

BATCH = 8


def only_with_all_cases(left_out: bool) -> None:
    """Skip this cell of a table, unless all are asked for."""
    if left_out and not ALL_CASES:
        pytest.skip("set SHARDWEAVE_ALL_CASES to run it")


# Adam divides a gradient by its own size, so that one that is zero but for rounding (the bias of a key: a softmax does
# not see it) would move its parameter as far as any other. An eps above float32's rounding, and far below true
# gradients, keeps the optimizer from blowing rounding up. As Adam hardly sees the scale of a gradient either,
# gradients are compared besides.
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, weight_decay=0.1)


class DoubleNorm(nn.Module):
    """transformers' LlamaRMSNorm in the dtype of its input."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def _double_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def model_of(case: Case, dtype: torch.dtype) -> nn.Module:
    """The model of a case; a Llama in float64 truly so.

    transformers' Llama computes its norms and its loss in float32 whatever its dtype, and sums of float32 in another
    order differ by 1e-7: of the float64 that the comparison is about, these two parts are made here. Its rotary
    embedding stays in float32, as it sums nothing that is spread.
    """
    model = case.model(dtype)
    if case.name.startswith("llama") and dtype == torch.float64:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__ == "LlamaRMSNorm":
                    setattr(module, name, DoubleNorm(child))
        model.loss_function = _double_loss
    return model


Forced = Callable[[Sequence[Op], Mesh], dict[str, Strategy]]


def most(wanted: Callable[[Strategy], tuple[float, ...]]) -> Forced:
    """For each op the legal strategy that has most of what is wanted, the first wish first."""
    return lambda ops, mesh: {op.name: max(legal(op, mesh), key=wanted) for op in ops}


@dataclass(frozen=True)
class Way:
    """How a model is to be spread: what is forced, and under which memory limit the planner completes the rest.

    What is forced may depend on the model's ops. `tight` stands for the smallest limit that a plan meets.
    """

    name: str
    force: Mapping[str, Any] | Callable[[Sequence[Op], Mesh], Mapping[str, Any]] = field(default_factory=dict)
    memory_limit: int | None = None
    tight: bool = False
    micro_batches: int = 1
    accumulates: int = 1
    """Calls a step, all but the last of them under `no_sync`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More of `Options`."""


@dataclass
class Run:
    """What training gave: a loss for each step, the first step's gradients, in the end all parameters and buffers."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def train(
    model: nn.Module,
    case: Case,
    dtype: torch.dtype,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
    clip: float | None = None,
    batches: Callable[[int], dict[str, Tensor]] | None = None,
    count: int = STEPS,
    size: int = BATCH,
    accumulates: int = 1,
) -> Run:
    """Train with another batch at each step, in either world; the loss is the model's own.

    With `accumulates` the mean of so many losses, of batches of their own, is that of a step.
    """
    steps = optimizer(model.parameters())
    losses, gradients = [], {}
    for step in range(count):
        total = 0.0
        for call in range(accumulates):
            batch = (batches or partial(case.batch, size=size, dtype=dtype))(accumulates * step + call)
            with model.no_sync() if call < accumulates - 1 and isinstance(model, sw.ParallelModule) else nullcontext():
                loss = case.loss(model(**batch)) / accumulates
                loss.backward()
            total += loss.item()
        if step == 0:
            gradients = gradients_of(model)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        steps.step()
        steps.zero_grad()
        losses.append(total)
    full = model.full_state_dict() if isinstance(model, sw.ParallelModule) else model.state_dict()
    return Run(losses, gradients, {name: value.detach().clone() for name, value in full.items()})


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradients of all parameters that have one."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if isinstance(model, sw.ParallelModule):
        layouts = {parameter.name: parameter.layout for parameter in model.spec.parameters}
        return {name: gather(grad, layouts[name], model.mesh) for name, grad in found.items()}
    return {name: grad.clone() for name, grad in found.items()}


class _Compiler(Compiler):
    """Can leave its plans to the program, without a simulation: where they are forced it has little to say."""

    simulates = True

    @property
    def evaluate(self) -> PlanEvaluator:
        evaluate = super().evaluate
        if self.simulates:
            return evaluate
        return _Unjudged(evaluate.lowering)


class _Unjudged(PlanEvaluator):
    def __call__(self, decision: Decision, options: Options) -> Evaluation:
        return Evaluation(1.0, 1.0, 0.0, 0, {})


def compile_ways(
    model: nn.Module,
    case: Case,
    dtype: torch.dtype,
    world: int,
    ways: Sequence[Way],
    precision: sw.Precision | None = None,
    size: int = BATCH,
    cluster: sw.Cluster | None = None,
) -> list[Packed]:
    """The model's step in each of these ways, ready to be sent to ranks, which are of one node if nothing else is said.

    Done once and not in every rank, as eight ranks on two cores would be at it for minutes; that `compile_parallel`
    does the same on every rank is for test_api.py to show. The capture is the same for all ways.
    """
    cluster = cluster or sw.Cluster.local(world)
    compiler = _Compiler(model, cluster, case.batch(0, size, dtype), Options(precision=precision), None)
    packed = []
    for way in ways:
        compiler = copy.copy(compiler)
        force = way.force(compiler.annotated.ops, cluster.mesh()) if callable(way.force) else way.force
        given = Options(force=force, memory_limit=way.memory_limit, precision=precision, **way.options)
        compiler.options = replace(given, micro_batches=way.micro_batches)
        compiler.simulates = not force or way.tight or way.memory_limit is not None
        plan = tightest(compiler) if way.tight else compiler.plan()
        several = max(way.micro_batches, way.accumulates) > 1
        packed.append(Packed.of(compiler.lower(plan).step, compiler.captured.call, plan, several))
    return packed


def tightest(compiler: Compiler) -> sw.Plan:
    """The plan under the smallest memory limit that the errors of planning with less lead to."""
    limit = 1
    while True:
        compiler.options = replace(compiler.options, memory_limit=limit)
        try:
            return compiler.plan()
        except sw.InfeasibleError as error:
            limit = smallest_named(error)


def train_packed(
    name: str,
    dtype: torch.dtype,
    steps: Sequence[Packed],
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
    count: int = STEPS,
    size: int = BATCH,
    accumulates: int = 1,
) -> list[Run | list[float]]:
    """Train a model of the zoo by each of these steps; what rank 0 saw, and of the other ranks the losses."""
    case = {**ZOO, **TODAY}[name]
    model = model_of(case, dtype)
    found: list[Run | list[float]] = []
    for packed in steps:
        run = train(packed.module(model), case, dtype, optimizer, None, None, count, size, accumulates)
        found.append(run if dist.get_rank() == 0 else run.losses)
    return found


def distance(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 0.0) -> tuple[float, str]:
    """The largest difference of two sets of tensors, each relative to the largest entry of its tensor, and where.

    A tensor whose entries are all below `floor` of the largest of all is taken relative to that: it is rounding.
    """
    assert got.keys() == expected.keys()
    sizes = {name: float(e.abs().max()) if e.numel() else 0.0 for name, e in expected.items()}
    least = max(1e-30, floor * max(sizes.values(), default=0.0))
    worst = [(float((got[n] - e).abs().max()) / max(sizes[n], least), n) for n, e in expected.items() if e.numel()]
    return max(worst, default=(0.0, ""))


def differences(
    way: Way, expected: Run, ranks: Sequence[Run | list[float]], loss: float, rest: float, floor: float = 1e-6
) -> list[str]:
    """What is wrong with what the ranks saw, beyond these tolerances of losses, and of parameters and gradients."""
    run, *others = ranks
    assert isinstance(run, Run)
    found = []
    worst = max(abs(got - want) / abs(want) for got, want in zip(run.losses, expected.losses, strict=True))
    if not worst <= loss:
        found.append(f"{way.name}: losses {run.losses}, one device {expected.losses}")
    if any(other != run.losses for other in others):
        found.append(f"{way.name}: the ranks' losses are {run.losses}, {others}")
    for what in ("gradients", "parameters"):
        off, where = distance(getattr(run, what), getattr(expected, what), floor)
        if not off <= rest:
            found.append(f"{way.name}: {what} differ by {off:.2e}, most in {where}")
    return found
