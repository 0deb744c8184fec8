"""A folded step is the step of a smaller model; what it says, unfolded, is what the whole one says."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import shardweave as sw
from shardweave.compiler.capture import capture
from shardweave.compiler.compiler import Compiler
from shardweave.demo.model import GPT, GPTConfig
from shardweave.ir import Grid, RecomputeMode, Strategy
from shardweave.ir.captured import Captured
from shardweave.passes import partition
from shardweave.passes.partition import Shard, Sharder
from shardweave.passes.step_boundary import annotate
from shardweave.planner.problem.build_problem import ProblemBuilder
from shardweave.planner.problem.space import Space
from shardweave.planner.search.evaluation import Decision
from shardweave.planner.search.layer_problem import unfold
from shardweave.sharding.graphs import copied
from shardweave.sharding.layer_structure import deduplicate_layers, find_layer_runs

SMALL = GPTConfig(vocabulary=32, context=8, layers=6, heads=2, width=16, bias=True, tied=True)
BATCH = 8


def gpt(layers: int, config: GPTConfig = SMALL, batch: int = BATCH) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.device("meta"):
        tokens = torch.zeros(batch, config.context, dtype=torch.long)
        return GPT(replace(config, layers=layers)), (tokens, tokens)


@cache
def captured(layers: int) -> Captured:
    return capture(*gpt(layers))


def described(graph: fx.Graph) -> list[Any]:
    """Each node's op, the positions of its arguments and its value's shape."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    shapes = {node: str(getattr(node.meta.get("val"), "shape", None)) for node in graph.nodes}
    return [
        (node.op, str(node.target) if node.op == "call_function" else "", shapes[node],
         str(fx.map_arg((node.args, node.kwargs), lambda argument: str(position[argument]))))
        for node in graph.nodes
    ]  # fmt: skip


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_a_folded_step_is_that_of_a_model_with_fewer_layers(left: int) -> None:
    """Four inner layers of six are equal; with so many of them left it is a model of two more."""
    (run,) = find_layer_runs(captured(6))
    assert run.layers == ("blocks.1", "blocks.2", "blocks.3", "blocks.4")
    folded, smaller = deduplicate_layers(captured(6), {run: left}), captured(left + 2)
    assert described(folded.captured.graph.graph) == described(smaller.graph.graph)
    assert len(folded.captured.gradients) == len(smaller.gradients)
    assert folded.stands_for == ({run.layers[left - 1]: run.layers[left:]} if left < 4 else {})


def test_the_graph_that_is_folded_stays_as_it_is() -> None:
    before = described(captured(6).graph.graph)
    (run,) = find_layer_runs(captured(6))
    deduplicate_layers(captured(6), {run: 1})
    assert described(captured(6).graph.graph) == before


class Stack(nn.Module):
    """Layers of which one may differ, and whose values may be wanted outside."""

    def __init__(self, widths: list[int], returns: bool = False) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(width, 8) for width in widths)
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        seen = []
        for up, down in zip(self.up, self.down):
            x = x + down(torch.relu(up(x)))
            seen.append(x)
        return (x.sum(), seen[2]) if self.returns else x.sum()


class Blocks(nn.Module):
    def __init__(self, blocks: list[nn.Module], gathers: bool = False) -> None:
        super().__init__()
        self.blocks, self.gathers = nn.ModuleList(blocks), gathers

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for block in self.blocks:
            x = torch.relu(block(x))
            seen.append(x.mean())
        return x.sum() + (torch.stack(seen).sum() if self.gathers else 0.0)


def runs_of(model: nn.Module, said: Any = lambda name: None) -> list[tuple[str, ...]]:
    return [run.layers for run in find_layer_runs(capture(model, torch.zeros(4, 8)), said)]


def test_layers_that_differ_end_a_run() -> None:
    same = [nn.Linear(8, 8) for _ in range(7)]
    assert runs_of(Blocks(same)) == [("blocks.1", "blocks.2", "blocks.3", "blocks.4")]
    frozen = [nn.Linear(8, 8) for _ in range(7)]
    frozen[3].requires_grad_(False)
    assert all("blocks.3" not in run for run in runs_of(Blocks(frozen)))
    other = [*same[:3], nn.Linear(8, 8, bias=False), *same[3:]]
    assert all("blocks.3" not in run for run in runs_of(Blocks(other)))


def test_layers_that_are_read_from_outside_are_no_run() -> None:
    assert runs_of(Blocks([nn.Linear(8, 8) for _ in range(6)], gathers=True)) == []
    assert runs_of(Stack([16] * 5, returns=True)) == []


def test_layers_that_are_not_called_are_no_run() -> None:
    model = Blocks([nn.Linear(8, 8)])
    model.unused = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
    assert runs_of(model) == []
    sw.compile_parallel(model, sw.Cluster.local(1), torch.zeros(4, 8), progress=False)


def test_layers_of_which_the_options_differ_are_not_equal() -> None:
    same = [nn.Linear(8, 8) for _ in range(7)]
    apart = runs_of(Blocks(same), said=lambda name: name.startswith("blocks.3"))
    assert apart == [("blocks.1", "blocks.2")]


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_unfolded_problem_is_that_of_the_whole_step(nodes: int) -> None:
    cluster, options = sw.Cluster.preset("dgx-a100", nodes=nodes), sw.Options(memory_limit=10**9)
    step = captured(7)
    (run,) = find_layer_runs(step)

    def costed(part: Captured) -> Any:
        annotated = annotate(replace(part, graph=copied(part.graph)), options)
        return ProblemBuilder(Space(annotated, cluster, options)).build()

    folded = deduplicate_layers(step, {run: 2})
    found = unfold(costed(folded.captured), folded.stands_for, {"blocks.2": "blocks.1"})
    whole = costed(step)
    assert found is not None and [op.name for op in found.problem.ops] == [op.name for op in whole.problem.ops]
    for mine, theirs in zip(found.problem.ops, whole.problem.ops):
        assert [c.data for c in mine.candidates] == [c.data for c in theirs.candidates]
        for figure in ("seconds", "kept_bytes", "transient_bytes", "in_port", "out_port"):
            got, expected = ([getattr(c, figure) for c in op.candidates] for op in (mine, theirs))
            assert got == pytest.approx(expected, rel=0.02), (mine.name, figure)
    assert [(e.producer, e.consumer) for e in found.problem.edges] == [
        (e.producer, e.consumer) for e in whole.problem.edges
    ]
    for mine, theirs in zip(found.problem.edges, whole.problem.edges):
        assert np.array_equal(mine.seconds, theirs.seconds)
    assert [v.op.parameter for v in found.variables if v.op] == [v.op.parameter for v in whole.variables if v.op]


WIDE = GPTConfig(vocabulary=512, context=512, layers=8, heads=16, width=1024)
TENSOR = Strategy(Grid(x=8, data=2), 2)
PLANS = {
    "data": {"*": "dp"},
    "sharded": {"*": "zero3"},
    "tensor": {"*": TENSOR},
    "two stretches": {"*": "zero3", "blocks.[4567]": TENSOR},
}


@pytest.mark.parametrize(
    ("way", "sub_batches"), [("data", 1), ("sharded", 2), ("tensor", 1), ("tensor", 2), ("two stretches", 1)]
)
def test_a_few_layers_tell_what_all_of_them_take(way: str, sub_batches: int) -> None:
    """A plan's evaluated time and memory are those of the whole step's simulation."""
    compiler = copy.copy(wide())
    options = sw.Options(force=PLANS[way], sub_batches=sub_batches, memory_limit=10**13)
    compiler.options = options
    plan = compiler.plan()
    timeline = compiler.lowering.timeline(compiler.lower(plan))
    assert sum(len(run.layers) for run in compiler.steps.runs(options)) > 4
    evaluation = compiler.evaluate(decided(compiler, plan), options.with_overlap(plan.overlap))
    assert evaluation.step_time == pytest.approx(timeline.step_time, rel=0.02)
    assert evaluation.peak_memory == pytest.approx(timeline.peak_memory, rel=0.03)
    assert evaluation.compute_time == pytest.approx(timeline.compute_time, rel=0.02)


@pytest.mark.parametrize("width", [512, 1024])
def test_a_limit_that_a_step_keeps_to_anyway_does_not_slow_it_down(width: int) -> None:
    """Layers that were left out free what they saved as the one does that stands for them.

    They were thought to hold it for the whole backward, which then had no room to gather ahead.
    """
    model, inputs = gpt(24, replace(WIDE, width=width), 32)
    plain = {"force": {"*": "hsdp"}, "micro_batches": 1, "recompute": "none", "sub_batches": 1, "buckets": False}
    options = sw.Options(memory_limit=10**13, **plain)
    compiler = Compiler(model, sw.Cluster.preset("rtx3090-pcie", nodes=2), inputs, options, None)
    plan = compiler.plan()
    decision = decided(compiler, plan)
    free = compiler.evaluate(decision, options.with_overlap(plan.overlap))
    limited = compiler.evaluate(decision, sw.Options(memory_limit=free.peak_memory, **plain).with_overlap(plan.overlap))
    assert limited.peak_memory <= free.peak_memory
    assert limited.step_time <= 1.005 * free.step_time


def test_stretches_of_other_lengths_are_told_by_the_same_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal layers change places: plans that cut a run elsewhere are folded and sharded once."""
    model, inputs = gpt(18, WIDE, 64)
    compiler = Compiler(model, sw.Cluster.preset("dgx-a100", nodes=2), inputs, None, None)
    sharded: list[Shard] = []

    def noted(shard: Shard, graph_module: fx.GraphModule) -> Sharder:
        sharded.append(shard)
        return Sharder(shard, graph_module)

    plans, evaluation, whole = [], [], []
    for pattern in ("blocks.1?", "blocks.1[234567]"):  # stretches of four are simulated whole
        compiler.options = sw.Options(force={"*": "zero3", pattern: TENSOR}, memory_limit=10**13)
        plans.append(compiler.plan())
        whole.append(compiler.lowering.timeline(compiler.lower(plans[-1])))
    monkeypatch.setattr(partition, "Sharder", noted)
    for plan in plans:  # after both are made: few sharded graphs are kept
        free = sw.Options(memory_limit=10**13).with_overlap(plan.overlap)
        evaluation.append(compiler.evaluate(decided(compiler, plan), free))
    assert len(sharded) == 1
    assert abs(whole[0].step_time / whole[1].step_time - 1) > 0.01  # they are not the same plan
    for mine, timeline in zip(evaluation, whole):
        assert mine.step_time == pytest.approx(timeline.step_time, rel=0.02)
        assert mine.peak_memory == pytest.approx(timeline.peak_memory, rel=0.03)


def test_layers_that_are_recomputed_hold_what_they_hold() -> None:
    """Two stretches that hold different amounts: each counts as often as it has layers, and the step fits by that."""
    compiler = copy.copy(wide())
    compiler.options = options = sw.Options(force={"*": "zero3"}, memory_limit=10**13)
    plan = compiler.plan()
    modes: dict[str, RecomputeMode] = {f"blocks.{index}": "fine" for index in (4, 5, 6)}
    decision = decided(compiler, plan)._replace(modes=modes)
    for gib in (100, 1):
        options = sw.Options(force={"*": "zero3"}, memory_limit=gib * 2**30)
        overlap = replace(plan.overlap, recompute=modes)
        whole = replace(plan, overlap=overlap, peak_memory=0, schedule_limit=gib * 2**30)
        compiler.options = options
        timeline = compiler.lowering.timeline(compiler.lower(whole))
        evaluation = compiler.evaluate(decision, options.with_overlap(plan.overlap))
        assert evaluation.peak_memory == pytest.approx(timeline.peak_memory, rel=0.02)
        assert evaluation.step_time == pytest.approx(timeline.step_time, rel=0.02)
        assert sum(evaluation.at_peak.values()) == evaluation.peak_memory


@cache
def wide() -> Compiler:
    model, inputs = gpt(WIDE.layers, WIDE, 64)
    return Compiler(model, sw.Cluster.preset("dgx-a100", nodes=2), inputs, None, None)


def decided(compiler: Compiler, plan: sw.Plan) -> Decision:
    strategies = {name: choice.strategy for name, choice in plan.choices.items()}
    return Decision(strategies, compiler.lowering.joins_of(plan), {})
